"""Nothing of one program is visible to the next, also where they share a warm jail."""

import asyncio
import os

import msgspec
import pytest
from temper.common.schema import TestCase
from temper.sandbox.jail import Host
from temper.sandbox.worker import Worker

from tests.attack.conftest import Jails

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


FEEL = """
import asyncio, atexit, builtins, ctypes, decimal, fcntl, gc, io, json, locale, os, random, resource, signal, sys, threading, time
import traceback, warnings
libc = ctypes.CDLL(None, use_errno=True)
names = [n for n in dir(resource) if n.startswith('RLIMIT_')]
print({n: resource.getrlimit(getattr(resource, n)) for n in names})
print(signal.pthread_sigmask(signal.SIG_BLOCK, []), signal.sigpending(), signal.getitimer(0), signal.alarm(0))
print([signal.getsignal(n) for n in range(1, 65) if n not in (32, 33)])
print(os.sched_getaffinity(0), os.sched_getscheduler(0), os.nice(0), os.umask(0o77), os.getcwd(), os.getsid(0), os.getpgrp())
print(sys.getrecursionlimit(), sys.getswitchinterval(), sys.gettrace(), sys.getprofile(), sys.meta_path, sys.path_hooks, sys.path)
print(gc.isenabled(), gc.get_threshold(), warnings.filters, decimal.getcontext(), locale.setlocale(0), threading.enumerate())
print(random.random(), random.getstate()[1][:3], sys.stdout.encoding, sys.stdin.errors, sys.excepthook, sys.displayhook)
print(1 + 1, len('ab'), sorted([2, 1]), json.dumps([1]), len(().__class__.__base__.__subclasses__()), builtins.print)
print(os.WIFEXITED(0), io.open is open, time.sleep(0), asyncio.get_event_loop_policy().__class__)
name = ctypes.create_string_buffer(16); libc.prctl(16, name); dead = ctypes.c_int(); libc.prctl(2, ctypes.byref(dead))
sub = ctypes.c_int(); libc.prctl(37, ctypes.byref(sub)); print(name.value, dead.value, sub.value, libc.prctl(3), libc.prctl(30))
def lock(path):
    try: fcntl.flock(os.open(path, os.O_RDONLY), fcntl.LOCK_EX | fcntl.LOCK_NB); return 'free'
    except OSError as error: return error.errno
print(lock('/opt/temper/init.pyc'), lock('/opt/temper/etc/passwd'), lock('/tmp'), lock('/dev/shm'), os.listxattr('/tmp'))
print(open(0, closefd=False).read(), sorted(os.listdir('/tmp')), os.listdir('/dev/shm'), len(sys.modules))
"""

POLLUTE = """
import asyncio, atexit, builtins, ctypes, decimal, fcntl, gc, io, json, locale, mmap, os, random, resource, signal, sys, threading
import time, warnings
libc = ctypes.CDLL(None, use_errno=True)
held = [os.open(p, os.O_RDONLY) for p in ('/opt/temper/init.pyc', '/opt/temper/etc/passwd', '/tmp', '/dev/shm')]
for fd in held: fcntl.flock(fd, fcntl.LOCK_EX)
for _ in range(4):
    if not os.fork():
        os.setsid(); signal.pthread_sigmask(signal.SIG_SETMASK, range(1, 65))
        while True: time.sleep(1)
for n in range(3): threading.Thread(target=time.sleep, args=(99,), daemon=True).start()
for n in range(1, 65):
    try: signal.signal(n, lambda *a: None)
    except (OSError, ValueError): pass
signal.setitimer(0, 1000); signal.alarm(1000); signal.pthread_sigmask(signal.SIG_SETMASK, range(1, 65))
os.nice(3); os.sched_setaffinity(0, {0}); os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0)); os.umask(0); os.chdir('/usr')
libc.prctl(15, b'evil'); libc.prctl(1, 9); libc.prctl(36, 1); libc.prctl(4, 0); libc.prctl(29, 50_000_000)
sys.setrecursionlimit(77); gc.disable(); gc.set_threshold(1); warnings.simplefilter('error'); random.seed(5)
decimal.getcontext().prec = 3; sys.meta_path.clear(); sys.path_hooks.clear(); sys.path[:] = ['/tmp']; sys.settrace(lambda *a: None)
sys.addaudithook(lambda *a: None); sys.excepthook = sys.displayhook = builtins.input = None; gc.unfreeze()
for module in list(sys.modules.values()):
    for key, value in list(vars(module).items()) if module is not sys and module is not builtins else ():
        if callable(value) and not key.startswith('__') and not isinstance(value, type):
            try: setattr(module, key, lambda *a, **k: 666)
            except Exception: pass
frame = sys._getframe()
while frame: frame.f_globals.clear() if frame.f_back else None; frame = frame.f_back
"""
POKE = """
import ctypes, mmap
for number in (0, 1, 2, 3): ctypes.memset(id(number) + 24, 7, 4)
libc = ctypes.CDLL(None); page = ctypes.cast(libc.getpid, ctypes.c_void_p).value & ~4095
libc.mprotect(ctypes.c_void_p(page), 4096, 7); ctypes.memset(page, 0xC3, 4096)
"""
BOUND = """
import resource
for name in dir(resource):
    if name.startswith('RLIMIT_') and name not in ('RLIMIT_AS', 'RLIMIT_DATA', 'RLIMIT_STACK'):
        try: resource.setrlimit(getattr(resource, name), (3, 3))
        except (OSError, ValueError): pass
print('bound')
"""


def test_no_program_pollutes_what_the_next_one_is_a_fork_of(jails):
    sources = [FEEL, POLLUTE, FEEL, POKE, FEEL, BOUND, FEEL]
    clean, _, after, _, later, bound, last = jails.run(*map(jails.job, sources), slots=1)
    assert clean.outcome == "ok" and len(clean.stdout.splitlines()) > 10, clean
    assert bound.stdout == b"bound\n", bound
    for found in (after, later, last):
        assert found.stdout.decode().splitlines() == clean.stdout.decode().splitlines()


# Locks on files of the read-only system are the one thing that programs at once share: so each knows that the other is there.
LOCKS = """
import fcntl, os, time
here, gone = (os.open('/opt/temper/etc/' + name, os.O_RDONLY) for name in ('passwd', 'group'))
def until(fd, taken):
    while True:
        try: fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError: found = True
        else: found = fcntl.flock(fd, fcntl.LOCK_UN)
        if bool(found) == taken: return
        time.sleep(0.01)
"""
MEET = (
    LOCKS
    + """
import socket
server = socket.socket(socket.AF_UNIX)
server.bind('\\0meeting'); server.listen(); server.settimeout(0.0)
open('/dev/shm/meeting', 'w').write('x'); open('/tmp/meeting', 'w').write('x')
fcntl.flock(here, fcntl.LOCK_EX)
until(gone, True)
try: server.accept(); print('met')
except BlockingIOError: print('alone')
"""
)
CALL_OUT = (
    LOCKS
    + """
import socket
until(here, True)
found = set()
for _ in range(20):
    try: socket.socket(socket.AF_UNIX).connect('\\0meeting'); found.add('met')
    except OSError as error: found.add(error.errno)
print(found, os.listdir('/dev/shm'), os.path.exists('/tmp/meeting'))
fcntl.flock(gone, fcntl.LOCK_EX)
until(here, False)
"""
)


FIND = """
import os, signal, sys
print(sys.argv, sys.path, sorted(os.environ.items()), os.getcwd(), os.listdir('/tmp'), os.listdir('/dev/shm'), os.environb)
print({key: repr(value) for key, value in vars(sys.modules['__main__']).items()}, sys._getframe(1).f_code.co_name)
print([signal.getsignal(n) for n in (signal.SIGINT, signal.SIGPIPE, signal.SIGXFSZ)], os.popen('env | sort').read())
"""


def test_a_program_finds_the_same_in_every_mode() -> None:
    """What a warm jail's init did beforehand is not to be seen."""
    fresh, *others = (Jails(mode).run(Jails(mode).job(FIND))[0] for mode in ("fresh", "pool", "fork"))
    assert fresh.outcome == "ok" and len(fresh.stdout.splitlines()) > 10, fresh
    for found in others:
        assert found.stdout.decode().splitlines() == fresh.stdout.decode().splitlines()


DESCRIPTORS = """
import errno, fcntl
def there(fd):
    try: return fcntl.fcntl(fd, fcntl.F_GETFD) >= 0
    except OSError: return False
print([fd for fd in range(4096) if there(fd)])
"""


@pytest.mark.parametrize("held", [40, 55, 62, 300])
def test_however_many_descriptors_a_worker_has_its_programs_get_none(jails, held):
    """A jail's init has the worker's socket under the number that it had there."""
    kept = [os.open("/dev/null", os.O_RDONLY) for _ in range(held)]
    try:
        for verdict in jails.run(*[jails.job(DESCRIPTORS)] * 3, slots=3):
            assert (verdict.outcome, verdict.stdout) == ("ok", b"[0, 1, 2]\n"), verdict
    finally:
        for fd in kept:
            os.close(fd)


def test_programs_that_run_at_once_do_not_meet(jails):
    there, caller = jails.run(*(jails.job(source, wall_s=60.0) for source in (MEET, CALL_OUT)))
    assert there.stdout == b"alone\n", there
    assert caller.stdout == b"{111} [] False\n", caller


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
                "import time\nword = input()\nif word == 'wait': print(word, flush=True); time.sleep(600)\nprint(word)"
            )
            task = asyncio.ensure_future(worker.execute(jails.job(source, tests, wall_s=600.0)))
            await worker.began.wait()
            (cell,) = worker.running
            await asyncio.wait_for(cell.began.wait(), 60)
            cell.kill()
            return await task

    verdict = asyncio.run(main())
    assert [test.outcome for test in verdict.tests] == ["infra", "ok", "ok"], verdict
    assert verdict.outcome == "infra"
