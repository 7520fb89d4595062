"""The command line (``temper.cli``): one module a command, each daemon imported lazily."""
