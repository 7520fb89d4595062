"""Programs that take all they can get: processes, memory, files, output, time. Each gets its exact outcome and hurts nobody."""

import pytest
from temper.common.schema import Limits, SandboxJob, TestCase

from tests.attack.conftest import Attack, Batch, Jails, host_state, judge

CONFIGURATIONS = ["root-fork", "user-fresh"]
ROOM = {"memory_bytes": 256 << 20}
"""What a fork bomb may hold: a fork that the limit of processes refuses has copied its parent's page tables by then."""
ATTACKS = {
    # processes
    "fork_bomb": Attack("import os\nwhile True:\n    try: os.fork()\n    except OSError: pass", "timeout", limits=ROOM),
    # in the background: a shell that finds no room for a fork of its own tries again for longer than it may run
    "fork_bomb_in_bash": Attack(":(){ :|:& };: &", "ok", language="bash"),
    "fork_bomb_that_leaves_sessions": Attack(
        "import os\nwhile True:\n    try:\n        if not os.fork(): os.setsid()\n    except OSError: pass",
        "timeout",
        limits=ROOM,
    ),
    "fork_bomb_left_behind": Attack(
        "import os\nif not os.fork():\n    while True:\n        try: os.fork()\n        except OSError: pass", "ok"
    ),
    "thread_bomb": Attack(
        "import threading, time\nn = 0\ntry:\n    while True:\n        threading.Thread(target=time.sleep, args=(9,), daemon=True)"
        ".start(); n += 1\nexcept RuntimeError: print(n < 24)",
        "ok",
        b"True\n",
    ),
    "zombie_bomb": Attack(
        "import os\nn = 0\ntry:\n    while True:\n        if not os.fork(): os._exit(0)\n        n += 1\n"
        "except BlockingIOError: print(n < 24)",
        "ok",
        b"True\n",
    ),
    "daemons_that_hold_stdout": Attack(
        "import os, signal, time\nprint('done', flush=True)\nfor _ in range(5):\n    if not os.fork():\n        os.setsid()\n"
        "        for s in (1, 2, 3, 13, 15): signal.signal(s, signal.SIG_IGN)\n        time.sleep(1000)",
        "ok",
        b"done\n",
    ),
    "a_daemon_that_floods_later": Attack(
        "import os, time\nif not os.fork():\n    os.setsid()\n    while True: os.write(1, b'late' * 1000)\n", None
    ),
    # memory
    "memory_bomb": Attack("x = []\nwhile True: x.append(bytearray(1 << 20))", "memory"),
    "memory_bomb_in_one_piece": Attack("bytearray(1 << 40)", "memory"),
    "memory_bomb_caught": Attack("try: bytearray(1 << 40)\nexcept MemoryError: print('caught')", "ok", b"caught\n"),
    "memory_bomb_of_integers": Attack("x = 1 << (1 << 33)", "memory"),
    "recursion_bomb": Attack("def f(): f()\nf()", "error"),
    "stack_bomb_in_c": Attack(
        "int f(int n){volatile char b[4096]; b[n % 4096] = n; return f(n + 1) + b[0];} int main(){return f(0);}",
        "signal",
        language="c",
    ),
    "memory_bomb_in_javascript": Attack(
        "const a = []; while (true) a.push(new Array(1e5).fill(1.5));",
        "memory",
        language="javascript",
        limits={"cpu_s": 90.0, "wall_s": 110.0},  # V8 collects in vain before it gives up, on every core that it finds
    ),
    "memory_bomb_in_c": Attack(
        "#include <stdlib.h>\n#include <string.h>\n"
        "int main(){for(;;){char*p=malloc(1<<20);if(!p)abort();memset(p,1,1<<20);}}",
        None,
        language="c",
    ),
    "memory_bomb_shared_by_many": Attack(
        "import ctypes, mmap, os, time\nctypes.CDLL(None).prctl(4, 0)\nfor _ in range(10):\n    if not os.fork():\n"
        "        m = mmap.mmap(-1, 40 << 20)\n        for _ in range(40): m.write(bytes(1 << 20))\n        time.sleep(30)\n"
        "time.sleep(30)",
        "memory",
    ),
    "memory_that_many_share_counts_once": Attack(
        "import mmap, os, time\nm = mmap.mmap(-1, 60 << 20)\nfor _ in range(60): m.write(b'x' * (1 << 20))\nm.seek(0)\n"
        "for _ in range(6):\n    if not os.fork():\n        for i in range(0, 60 << 20, 4096): m[i]\n        time.sleep(0.3)\n"
        "        os._exit(0)\nfor _ in range(6): os.wait()\nprint('fine')",
        "ok",
        b"fine\n",
        limits={"cpu_s": 2.0},
    ),
    "memory_in_sockets": Attack(
        "import os, resource, socket\nkept = []\ntry:\n    while True:\n        kept += socket.socketpair()\n"
        "        kept[-1].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 30); kept[-1].setblocking(False)\n"
        "        try:\n            while True: kept[-1].send(bytes(65536))\n        except BlockingIOError: pass\n"
        "except (OSError, MemoryError): print(len(kept) <= 256)",
        None,
    ),
    "memory_in_the_writable_folders": Attack(
        "kept = []\nfor folder in ('/tmp', '/dev/shm'):\n    try:\n       "
        " for i in range(99): open(f'{folder}/{i}', 'wb').write(b'x' * (1 << 20))\n"
        "    except OSError as error: print(error.errno, i)\nwhile True: kept.append(bytearray(1 << 20))",
        "memory",
    ),
    # files
    "disk_bomb": Attack(
        "n = 0\nfile = open('x', 'wb')\ntry:\n    while True: n += file.write(bytes(1 << 20))\n"
        "except OSError as error: print(error.errno in (27, 28), n <= 64 << 20)",
        "ok",
        b"True True\n",
    ),
    "disk_bomb_of_many_files": Attack(
        "n = 0\ntry:\n    while True:\n        open(f'f{n}', 'wb').write(bytes(1 << 20)); n += 1\n"
        "except OSError as error: print(error.errno, n <= 64)",
        "ok",
        b"28 True\n",
    ),
    "sparse_bomb": Attack(
        "import os\nfd = os.open('x', os.O_CREAT | os.O_RDWR)\ntry: os.ftruncate(fd, 1 << 40)\n"
        "except OSError as error: print(error.errno)",
        "ok",
        b"27\n",
    ),
    "inode_bomb": Attack(
        "n = 0\ntry:\n    while True: open(f'f{n}', 'w').close(); n += 1\nexcept OSError as error: print(error.errno, n < 4096)",
        "ok",
        b"28 True\n",
    ),
    "shared_memory_bomb": Attack(
        "n = 0\nfile = open('/dev/shm/x', 'wb')\ntry:\n    while True: n += file.write(bytes(1 << 20))\n"
        "except OSError as error: print(error.errno, n <= 16 << 20)",
        "ok",
        b"28 True\n",
    ),
    "descriptor_bomb": Attack(
        "import os\nn = 0\ntry:\n    while True: os.dup(0); n += 1\nexcept OSError as error: print(error.errno, n < 256)",
        "ok",
        b"24 True\n",
    ),
    "pipe_bomb": Attack(
        "import os\nn = 0\ntry:\n    while True:\n        r, w = os.pipe(); os.set_blocking(w, False)\n"
        "        os.write(w, bytes(65536)); n += 1\n"
        "except OSError as error: print(error.errno in (24, 11), n < 128)",
        "ok",
        b"True True\n",
    ),
    "mapped_file_bomb": Attack(
        "import mmap\nm = []\ntry:\n    while True: m.append(mmap.mmap(-1, 1 << 24)); m[-1].write(bytes(1 << 24))\n"
        "except (OSError, MemoryError): raise MemoryError",
        "memory",
    ),
    "deep_folders": Attack(
        "import os\nn = 0\ntry:\n    while True: os.mkdir('d'); os.chdir('d'); n += 1\nexcept OSError as error: print(error.errno)",
        "ok",
        b"28\n",
    ),
    "files_of_every_name": Attack(
        "import os\nfor name in (b'-rf', b'--', b'a\\nb', b'\\xff\\xfe', b' ', b'*', b'$(id)', b'.1.3', b'x' * 255, b'\\x1b[m'):\n"
        "    open(name, 'w').close(); os.mkdir(name[:200] + b'.d'); open(name[:200] + b'.d/' + name, 'w').close()\n"
        "print(len(os.listdir('.')))",
        "ok",
        b"21\n",
    ),
    "names_that_the_sweep_would_use": Attack(
        "import os\nfor n in range(1, 40):\n    for pid in range(1, 9):\n"
        "        os.makedirs(f'.{n}.{pid}/x/y') if n % 2 else open(f'.{n}.{pid}', 'w').close()\nprint('laid')",
        "ok",
        b"laid\n",
    ),
    "hard_links_without_end": Attack(
        "import os\nopen('a', 'w').close()\nn = 0\ntry:\n    while True: os.link('a', f'l{n}'); n += 1\n"
        "except OSError as error: print(error.errno, n < 4096)",
        "ok",
        b"28 True\n",
    ),
    "sparse_files_without_end": Attack(
        "n = 0\ntry:\n    while True: open(f's{n}', 'wb').truncate(60 << 20); n += 1"
        "\nexcept OSError as error: print(error.errno, n < 4096)",
        "ok",
        b"28 True\n",
    ),
    "symlink_maze": Attack(
        "import os\nos.symlink('loop', 'loop')\nfor i in range(900): os.symlink('../tmp/' * 20, f'l{i}')\n"
        "try: open('loop')\nexcept OSError as error: print(error.errno)",
        "ok",
        b"40\n",
    ),
    # output
    "output_flood": Attack("while True: print('flood' * 1000)", "output"),
    "output_flood_on_stderr": Attack("import os\nwhile True: os.write(2, bytes(65536))", "output"),
    "a_gigabyte_on_one_line": Attack("import sys\nsys.stdout.write('x' * (1 << 25) * 1)\n" * 32, "output"),
    "output_flood_by_children": Attack(
        "import os\nfor _ in range(8):\n    if not os.fork():\n        while True: os.write(1, b'x' * 4096)\n"
        "while True: pass",
        "output",
    ),
    "output_flood_in_bash": Attack("yes", "output", language="bash"),
    "exactly_the_limit": Attack("import sys; sys.stdout.write('x' * 65536)", "ok", b"x" * 65536),
    "one_byte_more": Attack("import sys; sys.stdout.write('x' * 65537)", "output"),
    # time
    "endless_loop": Attack("while True: pass", "timeout"),
    "endless_loop_in_c": Attack("int main(){for(;;);}", "timeout", language="c"),
    "endless_loop_in_bash": Attack("while :; do :; done", "timeout", language="bash"),
    "endless_loop_in_javascript": Attack("while (true) {}", "timeout", language="javascript"),
    "endless_power": Attack("9 ** 9 ** 9", "timeout"),
    "endless_regular_expression": Attack("import re; re.match('(a*)*b', 'a' * 99)", "timeout"),
    "ignores_the_cpu_limits_signal": Attack(
        "import signal\nsignal.signal(signal.SIGXCPU, signal.SIG_IGN)\nwhile True: pass",
        "timeout",
        limits={"cpu_s": 1.0},
    ),
    "sleeps": Attack("import time; time.sleep(1000)", "timeout", limits={"wall_s": 0.4}),
    "stops_itself": Attack(
        "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)", "timeout", limits={"wall_s": 0.4}
    ),
    "waits_for_itself": Attack("import os; r, w = os.pipe(); os.read(r, 1)", "timeout", limits={"wall_s": 0.4}),
    "burns_time_in_children": Attack(
        "import os\nfor _ in range(4):\n    if not os.fork():\n        while True: pass\nos.wait()", "timeout"
    ),
    "hides_time_in_short_children": Attack(
        "import os, time\nwhile True:\n    pid = os.fork()\n    if not pid:\n        end = time.process_time() + 0.02\n"
        "        while time.process_time() < end: pass\n        os._exit(0)\n    os.waitpid(pid, 0)",
        "timeout",
    ),
    "sleeps_in_bash": Attack("sleep 1000", "timeout", language="bash", limits={"wall_s": 0.4}),
    # compilers
    "compiles_for_ever": Attack(
        "template<int N> struct A { using T = A<N + 1>; static const int v = T::v; };\nint main() { return A<0>::v; }",
        "compile",
        language="c++",
    ),
    "includes_an_endless_file": Attack('#include "/dev/zero"\n', "compile", language="c"),
    "includes_the_hosts_secrets": Attack('#include "/etc/shadow"\nint main(){}', "compile", language="c"),
    "floods_the_compilers_messages": Attack(
        '#include "main.c"\n#error x\n#include "main.c"\n' * 9, "compile", language="c"
    ),
}


def test_attack(batch: Batch, attack: str) -> None:
    if ATTACKS[attack].outcome is not None:
        judge(batch, ATTACKS, attack)


def test_a_flood_after_the_end_never_passes_the_limit(batch: Batch) -> None:
    verdict = batch.verdicts["a_daemon_that_floods_later"]
    assert verdict.outcome in ("ok", "output"), verdict
    assert len(verdict.stdout) <= 65536


def test_memory_in_sockets_is_memory_too_or_bounded_by_descriptors(batch: Batch) -> None:
    """It ends at a limit: the descriptors', as it says then, or memory's, or time's, also while its sockets are freed."""
    verdict = batch.verdicts["memory_in_sockets"]
    assert verdict.outcome in ("ok", "memory", "timeout"), verdict
    assert verdict.stdout == b"True\n" or (verdict.stdout == b"" and verdict.outcome != "ok"), verdict
    assert (verdict.peak_bytes or 0) <= 128 << 20


def test_the_output_of_many_tests_together_is_bounded() -> None:
    limits = Limits(output_bytes=1 << 20)
    source = b"import sys; sys.stdout.write('x' * (1 << 20))"
    tests = [TestCase(expected=b"x" * (1 << 20))] * 40
    (verdict,) = Jails("fork").run(SandboxJob("many", "python", {"main.py": source}, tests, limits, mode="fork"))
    assert [test.outcome for test in verdict.tests] == ["ok"] * 40
    assert sum(len(test.stdout) for test in verdict.tests) == 32 << 20 and verdict.truncated
    (refused,) = Jails("fork").run(
        SandboxJob("much", "python", {"main.py": source}, [TestCase(bytes(1 << 20))] * 257, limits, mode="fork")
    )
    assert refused.outcome == "infra" and "tests of" in refused.detail


def test_a_refused_allocation_in_c_is_memory_or_its_own_abort(batch: Batch) -> None:
    verdict = batch.verdicts["memory_bomb_in_c"]
    assert (verdict.outcome, verdict.signal) in (("memory", 9), ("signal", 6)), verdict


def test_output_is_bounded_and_marked(batch: Batch) -> None:
    for name, verdict in batch.verdicts.items():
        assert len(verdict.stdout) <= 65536 and len(verdict.stderr) <= 65536
        if verdict.outcome == "output":
            assert verdict.truncated, name


@pytest.mark.parametrize("outcome", ["timeout", "memory", "output"])
def test_every_kind_was_met(batch: Batch, outcome: str) -> None:
    assert any(verdict.outcome == outcome for verdict in batch.verdicts.values())


def test_the_host_is_unchanged(batch: Batch) -> None:
    assert batch.before == batch.after == host_state()
