"""Nothing of one program is visible to the next, also where they share a warm jail."""

import asyncio

import msgspec
from temper.common.schema import TestCase
from temper.sandbox.jail import Host
from temper.sandbox.worker import Worker

LOOK = """
import ctypes, gc, os, resource, signal, socket, sys, threading
def count():
    n = 0
    try:
        while True:
            os.waitpid(-1, os.WNOHANG)
            n += 1
    except ChildProcessError:
        return n
server = socket.socket(socket.AF_UNIX)
try:
    server.bind('\\0meeting')
    meeting = 'free'
except OSError:
    meeting = 'taken'
print(os.getpid(), sorted(os.listdir('/tmp')), os.listdir('/dev/shm'), os.umask(0o22), os.getcwd(), meeting, count())
print([f'{s.st_mode:o} {s.st_mtime:.0f}' for s in map(os.stat, ('/dev/shm',))], sorted(os.environ.items()))
print(signal.getsignal(signal.SIGTERM), resource.getrlimit(resource.RLIMIT_NOFILE), threading.active_count(), os.getpriority(0, 0))
print(sys.flags.hash_randomization, hash('temper'), os.uname().nodename, os.sched_getaffinity(0) == set(range(os.cpu_count())))
print('needle' + 'OfTheFirstProgram' in str([o for o in gc.get_objects() if isinstance(o, (str, bytes, list, dict))]))
"""

LEAVE = """
import atexit, builtins, os, signal, socket, subprocess, sys, threading, time
secret = 'needleOfTheFirstProgram'
builtins.secret = secret
os.makedirs('/tmp/a/b/c'); open('/tmp/a/b/c/d', 'w').write(secret); os.chmod('/tmp/a/b', 0)
os.symlink('/etc/passwd', '/tmp/link'); os.mkfifo('/tmp/fifo'); open('/dev/shm/x', 'w').write(secret)
os.mkdir('/tmp/main.py.d'); os.unlink('/tmp/main.py'); os.mkdir('/tmp/main.py'); open('/tmp/main.py/x', 'w')
os.chmod('/tmp', 0o777); os.utime('/dev/shm', (5, 5)); os.chmod('/dev/shm', 0o500)
os.umask(0); os.environ['SECRET'] = secret; sys.modules['json'] = None; print = None
signal.signal(signal.SIGTERM, signal.SIG_IGN)
server = socket.socket(socket.AF_UNIX); server.bind('\\0meeting')
for _ in range(3):
    if not os.fork():
        os.setsid()
        if not os.fork():
            signal.signal(signal.SIGHUP, signal.SIG_IGN)
            while True: time.sleep(1)
        os._exit(0)
try: os.nice(5)
except OSError: pass
"""


def test_the_next_program_sees_a_fresh_world(jails):
    alone, _, after, _, later = jails.run(
        jails.job(LOOK), jails.job(LEAVE), jails.job(LOOK), jails.job("raise SystemExit(3)"), jails.job(LOOK), slots=1
    )
    assert alone.outcome == "ok", alone
    assert after.stdout == alone.stdout
    assert later.stdout == alone.stdout
    assert alone.stdout.endswith(b"False\n")


def test_the_tests_of_one_job_do_not_see_each_other(jails):
    source = "import os\nprint(os.path.exists('seen'), os.getpid())\nopen('seen', 'w').write(input())"
    tests = [TestCase(b"answer", b"False 2")] * 3
    (verdict,) = jails.run(jails.job(source, tests))
    assert verdict.outcome == "ok", verdict


def test_a_deep_and_hostile_tree_is_removed(jails):
    source = """
import os
for i in range(1500):
    os.mkdir('d'); os.chdir('d')
for i in range(200):
    open('f' * 200 + str(i), 'w')
os.chmod('.', 0)
"""
    first, second = jails.run(jails.job(source), jails.job("import os; print(os.listdir('/tmp'))"), slots=1)
    assert first.outcome == "ok", first
    assert second.stdout == b"['main.py']\n"


def test_all_inodes_and_all_space_used_is_no_problem_for_the_next(jails):
    source = """
try:
    for i in range(100_000): open(f'f{i}', 'w').close()
except OSError as error: print(error.errno)
try:
    with open('f0', 'wb') as file:
        while True: file.write(bytes(1 << 20))
except OSError as error: print(error.errno)
"""
    first, second = jails.run(jails.job(source), jails.job("open('x', 'w').write('x' * 10**6); print('fine')"), slots=1)
    assert first.stdout == b"28\n28\n" or first.outcome == "memory", first
    assert second.stdout == b"fine\n", second


def test_a_jail_for_each_test_if_the_recipe_wants_it(jails):
    async def main(one_each):
        async with Worker(Host.here(), 1) as worker:
            job = msgspec.structs.replace(jails.job("print(1)", [TestCase()] * 4), jail_per_test=one_each)
            verdict = await worker.execute(job)
            assert [test.outcome for test in verdict.tests] == ["ok"] * 4
            (pool,) = worker._pools.values()
            (cell,) = pool._idle
            await asyncio.gather(*pool._ending)
            await cell.ready()
            return cell.jails

    ahead = 1 if jails.mode == "pool" else 0
    assert asyncio.run(main(False)) == 1 + ahead
    assert asyncio.run(main(True)) == {"fresh": 4, "pool": 5, "fork": 1}[jails.mode]


def test_a_jail_that_dies_takes_only_its_test_along(jails):
    async def main():
        async with Worker(Host.here(), 1) as worker:
            tests = [TestCase(b"wait"), TestCase(b"go", b"go"), TestCase(b"go", b"go")]
            source = (
                "import time\nword = input()\nif word == 'wait': print(word, flush=True); time.sleep(60)\nprint(word)"
            )
            task = asyncio.ensure_future(worker.execute(jails.job(source, tests, wall_s=60.0)))
            await worker.began.wait()
            (cell,) = worker.running
            await asyncio.wait_for(cell.began.wait(), 20)
            cell.kill()
            return await task

    verdict = asyncio.run(main())
    assert [test.outcome for test in verdict.tests] == ["infra", "ok", "ok"], verdict
    assert verdict.outcome == "infra"
