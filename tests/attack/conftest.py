"""Shared by the attack tests: run programs through the real worker, and look at the host before and after."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import msgpack
import msgspec
import pytest
from temper.common.schema import Limits, SandboxJob, TestCase, Verdict
from temper.sandbox.jail import Host
from temper.sandbox.languages import LANGUAGES
from temper.sandbox.worker import Worker

Mode = Literal["fresh", "pool", "fork"]


class Jails:
    """Jobs of one file, and their verdicts."""

    def __init__(self, mode: Mode) -> None:
        self.mode = mode

    def job(
        self, source: str | bytes, tests: Sequence[TestCase] = (), language: str = "python", **limits: Any
    ) -> SandboxJob:
        data = source.encode() if isinstance(source, str) else source
        files = {LANGUAGES[language].entry: data}
        return SandboxJob("attack", language, files, list(tests), Limits(**limits), mode=self.mode)

    @staticmethod
    def run(*jobs: SandboxJob, slots: int = 2) -> list[Verdict]:
        """The verdicts of `jobs`, one after the other in the same jail where jails are kept, with one slot."""

        async def main() -> list[Verdict]:
            async with Worker(Host.here(), slots) as worker:
                return list(await asyncio.gather(*(worker.execute(each) for each in jobs)))

        return asyncio.run(main())


@pytest.fixture(params=["fresh", "pool", "fork"])
def jails(request: pytest.FixtureRequest) -> Jails:
    """Every test that takes this runs in each of the three modes."""
    return Jails(request.param)


@dataclass(frozen=True)
class Attack:
    """A hostile program, the outcome it must get (None: see the test), and what its output must be (None: anything)."""

    source: str
    outcome: str | None = "ok"
    says: bytes | None = None
    language: str = "python"
    limits: Mapping[str, Any] = field(default_factory=dict)
    tests: Sequence[TestCase] = ()


def host_state() -> dict[str, Any]:
    """What no attack may change. Processes are those of the jails' outside identities."""
    jailed = set()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if b"/opt/temper/init.pyc" in (folder / "cmdline").read_bytes() and folder.stat().st_uid == 61_234:
                jailed.add(folder.name)
        except OSError:
            continue
    return {
        "mounts": sorted(line.split(" ", 2)[2] for line in Path("/proc/self/mountinfo").read_text().splitlines()),
        "hostname": os.uname().nodename,
        "null": oct(os.stat("/dev/null").st_mode),
        "swaps": [line.split()[0] for line in Path("/proc/swaps").read_text().splitlines()],
        "modules": Path("/proc/modules").exists() and Path("/proc/modules").read_text().count("\n"),
        "jailed": jailed,
    }


def length(attack: Attack) -> int:
    """A rough order of how long attacks last: builds, then what must run out of something, then the rest."""
    if LANGUAGES[attack.language].build:
        return 3
    return {"timeout": 2, "memory": 1, "output": 1}.get(attack.outcome or "output", 0)


class Batch:
    """All attacks of the modules that are tested, under one identity and mode: run once, side by side, the longest first."""

    def __init__(self, identity: str, mode: Mode, attacks: Mapping[str, Attack], folder: Path) -> None:
        self.before = host_state()
        folder.chmod(0o777)
        attacks = dict(sorted(attacks.items(), key=lambda item: -length(item[1])))
        canary = folder / "canary"
        canary.write_bytes(b"untouched")
        canary.chmod(0o666)
        jobs = [
            SandboxJob(
                name,
                attack.language,
                {LANGUAGES[attack.language].entry: attack.source.replace("@CANARY@", str(canary)).encode()},
                list(attack.tests),
                Limits(
                    **{
                        "wall_s": 3.0,
                        "cpu_s": 0.4 if attack.outcome == "timeout" else 2.0,
                        "memory_bytes": 128 << 20,
                        "pids": 24,
                        **attack.limits,
                    }
                ),
                mode=mode,
            )
            for name, attack in attacks.items()
        ]
        (folder / "jobs").write_bytes(msgpack.packb(msgspec.to_builtins(jobs, builtin_types=(bytes,))))
        script = Path(__file__).with_name("as_someone.py")
        command = [sys.executable, "-P", str(script), identity, str(folder)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False, cwd="/")
        assert done.returncode == 0, done.stderr[-3000:]
        data = msgpack.unpackb((folder / "verdicts").read_bytes())
        self.verdicts = dict(zip(attacks, msgspec.convert(data, list[Verdict], builtin_types=(bytes,)), strict=True))
        self.after = host_state()
        self.canary = canary.read_bytes()


BATCHES = pytest.StashKey[dict[str, Batch]]()


@pytest.fixture
def batch(request: pytest.FixtureRequest) -> Batch:
    """The `ATTACKS` of all modules, run as root and as an ordinary user, in a jail each and in warm jails."""
    identity, mode = request.param.split("-")
    if identity == "root" and os.geteuid() != 0:
        pytest.skip("not root")
    batches = request.session.stash.setdefault(BATCHES, {})
    if request.param not in batches:
        attacks: dict[str, Attack] = {}
        for module in {item.module for item in request.session.items if configuration(item) == request.param}:
            assert not attacks.keys() & module.ATTACKS.keys(), "a name in two modules"
            attacks |= module.ATTACKS
        with tempfile.TemporaryDirectory(prefix="temper-attack-") as folder:  # pytest's are closed to other users
            batches[request.param] = Batch(identity, mode, attacks, Path(folder))
    return batches[request.param]


def configuration(item: Any) -> str | None:
    """The identity and mode that a test is about."""
    spec = getattr(item, "callspec", None)
    return spec.params.get("batch") if spec is not None else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Whichever test comes first waits for its whole batch."""
    for item in items:
        if configuration(item) is not None:
            item.add_marker(pytest.mark.timeout(300))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """`attack` takes the names of the module's `ATTACKS`; `batch` all configurations, or the module's own."""
    if "batch" in metafunc.fixturenames:
        every = ["root-fresh", "root-fork", "user-fresh", "user-fork"]
        metafunc.parametrize("batch", getattr(metafunc.module, "CONFIGURATIONS", every), indirect=True)
    if "attack" in metafunc.fixturenames:
        metafunc.parametrize("attack", list(metafunc.module.ATTACKS))


def judge(batch: Batch, attacks: Mapping[str, Attack], name: str) -> None:
    """The attack got what it must get."""
    verdict, attack = batch.verdicts[name], attacks[name]
    assert verdict.outcome == attack.outcome, verdict
    assert attack.says is None or verdict.stdout == attack.says, verdict
    assert batch.canary == b"untouched"
