"""The recipes that ship with Temper, one TOML file each."""
