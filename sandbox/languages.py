"""The table of languages: adding one is adding a row."""

from __future__ import annotations

import shutil
from dataclasses import dataclass

from temper.sandbox import init as protocol


@dataclass(frozen=True, slots=True)
class Language:
    """How a program of one language is run.

    `entry` is the file the program must bring. `run` is the command (empty: the init's own interpreter runs the entry).
    `compile` comes first, when set; a failing one is the outcome of the job. `needs` must be on the host under /usr.
    `reserves_memory`: its runtime reserves far more address space than it uses.
    """

    name: str
    entry: str
    run: tuple[str, ...] = ()
    compile: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    reserves_memory: bool = False

    @property
    def kind(self) -> int:
        return protocol.COMMAND if self.run else protocol.PYTHON

    def missing(self) -> str:
        """The tool that this host lacks, "" when nothing is missing."""
        return next(
            (tool for tool in self.needs if shutil.which(tool, path="/usr/bin:/usr/local/bin:/bin") is None), ""
        )


LANGUAGES: dict[str, Language] = {
    row.name: row
    for row in (
        Language("python", "main.py"),
        Language("bash", "main.sh", run=("/bin/bash", "main.sh"), needs=("bash",)),
        Language("javascript", "main.js", run=("/usr/bin/node", "main.js"), needs=("node",), reserves_memory=True),
    )
}
