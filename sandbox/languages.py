"""The table of languages: adding one is adding a row."""

from __future__ import annotations

import shutil
from dataclasses import dataclass

from temper.common.grading import BUILD_WALL_S
from temper.common.schema import Limits
from temper.sandbox.inside import protocol

TOOLS = "/usr/local/bin:/usr/bin:/bin"


@dataclass(frozen=True, slots=True)
class Language:
    """How a program of one language is run.

    `entry` is the file the program must bring. `run` is the command (empty: the init's own interpreter runs the entry).
    `build`, when set, is a shell command that turns the files into one file, `program`; its failure is the outcome
    `compile`. `needs` must be on the host, under /usr. `reserves_memory`: the runtime reserves far more address space
    than it uses. `trusted`: it judges programs and runs where none of them does.
    """

    name: str
    entry: str
    run: tuple[str, ...] = ()
    build: str = ""
    needs: tuple[str, ...] = ()
    reserves_memory: bool = False
    trusted: bool = False

    @property
    def kind(self) -> int:
        return protocol.COMMAND if self.run else protocol.PYTHON

    def arguments(self, limits: Limits) -> tuple[str, ...]:
        """What the init starts; some runtimes must be told their limit."""
        memory_mb = str(limits.memory_bytes >> 20)
        return tuple(part.replace("{memory_mb}", memory_mb) for part in self.run) or (self.entry,)

    def missing(self) -> str:
        """The tool that this host lacks, "" when nothing is missing."""
        return next((tool for tool in self.needs if shutil.which(tool, path=TOOLS) is None), "")


PROGRAM = "program"
BUILD_LIMITS = Limits(wall_s=BUILD_WALL_S, cpu_s=20.0, memory_bytes=1 << 30, pids=64, output_bytes=64 * 1024)
BUILT_LIMIT_BYTES = 16 * 1024 * 1024

LANGUAGES: dict[str, Language] = {
    row.name: row
    for row in (
        Language("python", "main.py"),
        Language("grader", "main.py", trusted=True),
        Language("bash", "main.sh", run=("/bin/bash", "main.sh"), needs=("bash",)),
        Language(
            "javascript",
            "main.js",
            ("/usr/bin/node", "--max-old-space-size={memory_mb}", "--stack-size=900", "main.js"),
            needs=("node",),
            reserves_memory=True,
        ),
        Language("c", "main.c", ("/tmp/program",), build="gcc -std=gnu17 -O2 -w -o program main.c -lm", needs=("gcc",)),
        Language(
            "c++", "main.cpp", ("/tmp/program",), build="g++ -std=gnu++20 -O2 -w -o program main.cpp", needs=("g++",)
        ),
    )
}
