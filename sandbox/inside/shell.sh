# A shell that lives across the turns of an episode: commands arrive on descriptor 4, each ended by a NUL; the exit
# status of each is told on descriptor 3.
trap : INT
while IFS= read -r -d '' -u 4 temper_command; do
  eval "$temper_command" </dev/null 3>&- 4>&-
  printf '%d' "$((${?} != 0))" >&3
done
