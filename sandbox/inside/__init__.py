"""Programs of Temper's own that run *inside* jails, next to hostile ones: only the standard library, nothing of Temper.

The worker reads these files and sends them as text; it imports none of them.
"""
