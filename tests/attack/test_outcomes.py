"""Programs of every outcome, in every mode: the same verdicts."""

import asyncio
import dataclasses

import msgspec
import pytest
from temper.common.schema import Limits, SandboxJob, TestCase
from temper.sandbox.check import check_host
from temper.sandbox.jail import Host
from temper.sandbox.worker import Worker

from tests.attack.conftest import Jails


def test_the_host_can_jail():
    report = check_host()
    assert report.ok, report.line()


OUTCOMES = [
    ("print(1)", {}, "ok"),
    ("1 / 0", {}, "error"),
    ("import sys; sys.exit(3)", {}, "error"),
    ("while True: pass", {"cpu_s": 0.3}, "timeout"),
    ("import time; time.sleep(30)", {"wall_s": 0.3}, "timeout"),
    ("x = [bytearray(1_000_000) for _ in range(1000)]", {}, "memory"),
    ("x = bytearray(10**11)", {}, "memory"),
    ("print('a' * 10**6)", {}, "output"),
    ("while True: print('a' * 1000)", {}, "output"),
    ("import os; os.kill(os.getpid(), 9)", {}, "signal"),
    ("import os; os.abort()", {}, "signal"),
    ("import ctypes; ctypes.CDLL(None).ptrace(0, 0, 0, 0)", {}, "policy"),
]


@pytest.fixture(scope="module", params=["fresh", "pool", "fork"])
def verdicts(request):
    jails = Jails(request.param)
    return jails.run(*(jails.job(source, **limits) for source, limits, _ in OUTCOMES), slots=4)


@pytest.mark.parametrize("number", range(len(OUTCOMES)), ids=[source for source, *_ in OUTCOMES])
def test_outcome(verdicts, number):
    assert verdicts[number].outcome == OUTCOMES[number][2], verdicts[number]


def test_each_test_of_a_job_starts_afresh(jails):
    source = "import os\nprint(sorted(os.listdir('.')), input())\nopen('left', 'w').write('x')"
    tests = [TestCase(str(i).encode(), f"['main.py'] {i}".encode()) for i in range(3)]
    (verdict,) = jails.run(jails.job(source, tests))
    assert [test.outcome for test in verdict.tests] == ["ok"] * 3, verdict


def test_bytes_of_any_kind_come_back(jails):
    (verdict,) = jails.run(jails.job(r"import os; os.write(1, b'\xff\x00\x1b[31m')"))
    assert (verdict.outcome, verdict.stdout) == ("ok", b"\xff\x00\x1b[31m")


def test_a_bad_job_is_infra_with_a_reason(jails):
    bad = (
        SandboxJob("1", "cobol", {"main.py": b""}, []),
        SandboxJob("2", "python", {}, []),
        SandboxJob("3", "python", {"main.py": b"", "../x": b""}, []),
        SandboxJob("4", "python", {"main.py": b""}, [], Limits(cpu_s=-1)),
    )
    for verdict in jails.run(*bad):
        assert verdict.outcome == "infra" and verdict.detail


CHANCE = """
import os, random, helper
class A: pass
print(random.random(), helper.value, hash('temper'), hash((1.5, 'a')), os.environ['TEMPER_SEED'], os.uname().nodename)
if not os.fork():
    os._exit(random.random() == random.Random(7).random())
print(os.waitstatus_to_exitcode(os.wait()[1]))
"""


def test_the_same_program_and_seed_draw_the_same_in_every_mode_and_jail():
    """Also where only a helper names the generator; a child of the program draws numbers of its own, as in any Python."""
    helper = b"from random import Random, randrange\nvalue = randrange(10**9)"

    async def main():
        found = set()
        for mode in ("fresh", "pool", "fork", "fork"):
            async with Worker(Host.here(), 1) as worker:
                for _ in range(2):
                    job = SandboxJob(
                        "1", "python", {"main.py": CHANCE.encode(), "helper.py": helper}, [], seed=7, mode=mode
                    )
                    verdict = await worker.execute(job)
                    assert verdict.outcome == "ok", verdict
                    found.add(verdict.stdout)
                only = SandboxJob(
                    "2",
                    "python",
                    {"main.py": b"import helper; print(helper.value)", "helper.py": helper},
                    [],
                    mode=mode,
                )
                first, second = [
                    (await worker.execute(msgspec.structs.replace(only, seed=seed))).stdout for seed in (1, 2)
                ]
                assert first != second
        return found

    (drawn,) = asyncio.run(main())
    assert drawn.endswith(b"\n0\n") and b" 7 temper" in drawn, drawn


def test_cancelling_kills_the_program(jails):
    async def main():
        async with Worker(Host.here(), 1) as worker:
            task = asyncio.create_task(worker.execute(jails.job("while True: pass", cpu_s=60, wall_s=60)))
            await worker.began.wait()
            cells = list(worker.running)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert not worker.running
            assert all(not cell.alive for cell in cells)

    asyncio.run(main())


def test_a_jail_that_cannot_start_says_why_at_once():
    async def main():
        host = dataclasses.replace(Host.here(), preload=("no_such_module",))
        async with Worker(host, 1) as worker:
            return await worker.execute(SandboxJob("1", "python", {"main.py": b"print(1)"}, [], mode="fork"))

    verdict = asyncio.run(asyncio.wait_for(main(), 60))
    assert verdict.outcome == "infra" and "no_such_module" in verdict.detail, verdict
