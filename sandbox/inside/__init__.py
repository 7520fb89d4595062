"""Programs of Temper's own that run *inside* jails, next to hostile ones: only the standard library, nothing of Temper.

`init` is PID 1, with `program`, `warm` and `workspace`; the others judge or serve a program. The worker sends or binds these files
and imports `protocol` alone.
"""
