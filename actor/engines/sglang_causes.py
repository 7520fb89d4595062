"""Why an SGLang server ended, in words, from its exit code and the last lines of its log. Pure."""

from __future__ import annotations

import re
import signal

_KNOWN = (
    (r"CUDA out of memory|OutOfMemoryError|Not enough memory|not enough memory", "out of GPU memory: lower --mem-fraction-static"),
    (r"Cannot allocate memory|MemoryError|DefaultCPUAllocator", "out of memory: lower --max-total-tokens or engine.max_rows"),
    (r"[Aa]ddress already in use", "its port was taken"),
    (r"No space left on device", "disk or /dev/shm full"),
    (r"No module named '?([\w.]+)", "its environment lacks a module: run `temper engine install` again"),
    (r"unrecognized arguments: (.*)", "it does not know a flag of the host file or of this Temper's"),
    (r"Model architectures .* are not supported|is not supported for now", "it does not know this model"),
    (r"NCCL error|CUDA error|device-side assert|no CUDA-capable device|No CUDA GPUs", "a GPU fault"),
    (r"Watchdog timeout|watchdog timeout", "its scheduler hung and its own watchdog ended it"),
    (r"Subprocess \S+ \(pid=\d+\) crashed with exit code", "one of its processes died"),
    (r"RuntimeError: (.*)|ValueError: (.*)|AssertionError: (.*)", "it raised an error"),
)  # fmt: skip


def cause_of(exit_code: int | None, tail: str) -> str:
    """One line: what is known of the reason."""
    for pattern, words in _KNOWN:
        found = re.findall(f"^.*(?:{pattern}).*$", tail, re.MULTILINE)
        if found:
            line = next(reversed([each for each in tail.splitlines() if re.search(pattern, each)]))
            return f"{words} ({line.strip()[:200]})"
    if exit_code is None:
        return "it does not answer"
    if exit_code < 0:
        name = signal.Signals(-exit_code).name if -exit_code in {s.value for s in signal.Signals} else str(-exit_code)
        killed = ", perhaps by the kernel for want of memory" if exit_code == -signal.SIGKILL else ""
        return f"killed by {name}{killed}"
    return f"exit code {exit_code}"
