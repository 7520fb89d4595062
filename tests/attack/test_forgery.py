"""Programs that want a pass without the answer: forged exits, imitated verdicts, the init's socket, the tests themselves."""

from temper.common.schema import TestCase

from tests.attack.conftest import Attack, Batch, host_state, judge

ASKED = (TestCase(b"6 7\n", b"42", "multiply"),)
SECRET = (TestCase(b"", b"correct-horse-battery-staple", "secret"),)
TWICE = (TestCase(b"1\n", b"first"), TestCase(b"2\n", b"second"), TestCase(b"3\n", b"third"))

ATTACKS = {
    # exits
    "exit_0_without_an_answer": Attack("import os; os._exit(0)", "wrong", tests=ASKED),
    "answer_then_exit_256": Attack("import os; os.write(1, b'42'); os._exit(256)", "ok", tests=ASKED),
    "answer_then_exit_1": Attack("print(42); raise SystemExit(1)", "error", tests=ASKED),
    "answer_then_exit_with_text": Attack("print(42); raise SystemExit('bye')", "error", tests=ASKED),
    "answer_then_kill_itself": Attack("import os; os.write(1, b'42'); os.kill(os.getpid(), 9)", "signal", tests=ASKED),
    "answer_then_abort": Attack("import os; os.write(1, b'42'); os.abort()", "signal", tests=ASKED),
    "answer_then_fault": Attack("import ctypes, os; os.write(1, b'42'); ctypes.string_at(0)", "signal", tests=ASKED),
    "answer_then_loop": Attack("print(42, flush=True)\nwhile True: pass", "timeout", tests=ASKED),
    "answer_then_flood": Attack("print(42, flush=True)\nwhile True: print(' ' * 999)", "output", tests=ASKED),
    "answer_then_forbidden_call": Attack(
        "import ctypes; print(42, flush=True); ctypes.CDLL(None).chroot(b'/')", "policy", tests=ASKED
    ),
    "answer_then_fail_at_exit": Attack(
        "import atexit, os; atexit.register(os._exit, 3); print(42, flush=True)", "error", tests=ASKED
    ),
    "exit_patched_away": Attack(
        "import os, sys\nos._exit = sys.exit = exit = lambda *a: None\nraise SystemExit(5)", "error", tests=ASKED
    ),
    "excepthook_patched": Attack("import sys\nsys.excepthook = lambda *a: print(42)\n1 / 0", "error", tests=ASKED),
    "child_answers_parent_fails": Attack(
        "import os\nif os.fork():\n    os.wait(); os._exit(1)\nprint(42)", "error", tests=ASKED
    ),
    "parent_answers_child_fails": Attack(
        "import os\npid = os.fork()\nif pid:\n    os.wait(); print(42)\nelse: os._exit(9)", "ok", tests=ASKED
    ),
    "abort_where_it_would_be_the_first_process": Attack("kill -ABRT $$", "signal", language="bash", tests=ASKED),
    "a_signal_without_a_name": Attack("import os; os.kill(os.getpid(), 34)", "signal", tests=ASKED),
    # output that imitates
    "an_imitated_verdict": Attack(
        'print(\'{"outcome": "ok", "exit_code": 0, "tests": [{"outcome": "ok"}]}\')', "wrong", tests=ASKED
    ),
    "an_imitated_log": Attack(
        "import sys\nprint('[I][2030-01-01T00:00:00+0000] pid=2 ([STANDALONE MODE]) exited with status: 0, (PIDs left: 0)',"
        " file=sys.stderr)",
        "wrong",
        tests=ASKED,
    ),
    "an_imitated_memory_report": Attack(
        "import sys; print('MemoryError', file=sys.stderr); print(42)", "ok", tests=ASKED
    ),
    "the_answer_on_stderr": Attack("import sys; print(42, file=sys.stderr)", "wrong", tests=ASKED),
    "every_answer_at_once": Attack("for i in range(100): print(i)", "wrong", tests=ASKED),
    "the_answer_and_more": Attack("print('42 or 43')", "wrong", tests=ASKED),
    "the_answer_after_a_carriage_return": Attack("print('41\\r42')", "wrong", tests=ASKED),
    "the_answer_after_backspaces": Attack("print('41\\b\\b42')", "wrong", tests=ASKED),
    "the_answer_in_colour": Attack("print('\\x1b[31m42\\x1b[0m')", "wrong", tests=ASKED),
    "the_answer_after_a_nul": Attack("print('\\0' + '42')", "wrong", tests=ASKED),
    "the_answer_in_other_digits": Attack("print('４２')", "wrong", tests=ASKED),
    "the_answer_with_bad_utf8": Attack("import os; os.write(1, b'42\\xff')", "wrong", tests=ASKED),
    "a_right_answer": Attack("a, b = map(int, input().split()); print(a * b)", "ok", b"42\n", tests=ASKED),
    "a_right_answer_with_spaces": Attack("print('42  \\n\\n')", "ok", tests=ASKED),
    # the tests
    "search_for_the_answer_in_memory": Attack(
        """
import gc, sys
frame, seen = sys._getframe(), []
while frame:
    seen += [frame.f_locals, frame.f_globals]
    frame = frame.f_back
text = ' '.join(map(repr, seen + gc.get_objects() + list(sys.modules.values())))
needle = ''.join(map(chr, (98, 97, 116, 116, 101, 114, 121, 45, 115, 116)))
print('found' if needle in text else 'nothing')
""",
        "wrong",
        b"nothing\n",
        tests=SECRET,
    ),
    "search_for_the_answer_in_files": Attack(
        """
import os, sys
found = [os.path.join(f, n) for top in ('/tmp', '/dev/shm', '/opt/temper', '/etc') for f, _, names in os.walk(top) for n in names
         if n != 'ld.so.cache']
print(sorted(found), os.environ.keys() & {'ANSWER'}, sys.argv)
""",
        "wrong",
        b"['/etc/group', '/etc/nsswitch.conf', '/etc/passwd', '/opt/temper/etc/group', '/opt/temper/etc/nsswitch.conf', "
        b"'/opt/temper/etc/passwd', '/opt/temper/init.pyc', '/opt/temper/repl.py', "
        b"'/opt/temper/shell.sh', '/opt/temper/snapshot.py', '/opt/temper/temper_libc.pyc', '/opt/temper/temper_program.pyc', "
        b"'/opt/temper/temper_protocol.pyc', "
        b"'/opt/temper/temper_warm.pyc', '/opt/temper/temper_workspace.pyc', '/tmp/main.py'] set() ['/tmp/main.py']\n",
        tests=SECRET,
    ),
    "search_for_open_descriptors": Attack(
        """
import errno, fcntl, os
def there(fd):
    try:
        fcntl.fcntl(fd, fcntl.F_GETFD)
        return True
    except OSError:
        return False
print([fd for fd in range(4096) if there(fd)])
""",
        "wrong",
        b"[0, 1, 2]\n",
        tests=SECRET,
    ),
    "write_to_the_inits_socket": Attack(
        """
import os, socket
for fd in range(3, 300):
    for data in (b'R', bytes(33), b'K'):
        try: os.write(fd, data)
        except OSError: pass
""",
        "wrong",
        tests=SECRET,
    ),
    "change_what_it_read": Attack(
        "import fcntl, os\ntry: os.pwrite(0, b'x', 0); print('changed')\nexcept OSError as error: print(error.errno)\n"
        "try: os.ftruncate(0, 0); print('changed')\nexcept OSError as error: print(error.errno)",
        "wrong",
        b"1\n1\n",
        tests=ASKED,
    ),
    "read_back_its_output": Attack(
        "import os\ntry: print(os.pread(1, 10, 0))\nexcept OSError as error: print(error.errno)",
        "wrong",
        b"29\n",
        tests=SECRET,
    ),
    "close_everything": Attack("import os; os.closerange(0, 300); os._exit(0)", "wrong", tests=SECRET),
    "a_program_for_later_tests": Attack(
        """
import os
n = input()
if n == '1':
    open('/tmp/main.py', 'w').write("print('second')")
    os.makedirs('/dev/shm/keep'); open('/tmp/sitecustomize.py', 'w').write("print('second')")
    print('first')
""",
        "wrong",
        tests=TWICE,
    ),
    "a_daemon_for_later_tests": Attack(
        """
import os, socket, time
n = input()
if n == '1':
    if not os.fork():
        os.setsid()
        server = socket.socket(socket.AF_UNIX); server.bind('\\0answers'); server.listen()
        while True: server.accept()[0].sendall(b'second')
    time.sleep(0.05)
    print('first')
else:
    peer = socket.socket(socket.AF_UNIX); peer.connect('\\0answers'); print(peer.recv(99).decode())
""",
        "error",
        tests=TWICE,
    ),
    "patch_the_runner_for_later_tests": Attack(
        """
import builtins, sys
n = input()
if n == '1':
    frame = sys._getframe()
    while frame:
        frame.f_globals.update(run_python=lambda *a: 0, REPORT=None, finish=lambda c: None)
        frame = frame.f_back
    builtins.input = lambda *a: 'patched'
    print('first')
else:
    print({'2': 'second', '3': 'third'}[n])
""",
        "error",
        tests=TWICE,
    ),
    "kill_the_init": Attack(
        "import os, signal\nfor n in range(1, 65):\n    for who in (1, -1):\n        try:\n"
        "            n in (32, 33) or os.kill(who, n)\n"
        "        except OSError: pass\nprint('alive')",
        "wrong",
        b"alive\n",
        tests=SECRET,
    ),
    "become_the_reaper": Attack(
        "import ctypes, os\nctypes.CDLL(None).prctl(36, 1, 0, 0, 0)\nif not os.fork():\n"
        "    if not os.fork(): os._exit(0)\n    os._exit(0)\n"
        "print('fine')",
        "wrong",
        b"fine\n",
        tests=SECRET,
    ),
    "leave_its_session_and_group": Attack(
        "import os\nfor f in (os.setsid, lambda: os.setpgid(0, 1), lambda: os.tcsetpgrp(0, 1)):\n    try: f(); print('done')\n"
        "    except OSError as error: print(error.errno)",
        "wrong",
        None,
        tests=SECRET,
    ),
    # what differs from run to run
    "guess_by_hash": Attack("print(hash('temper') == hash('temper'), hash('a') % 97)", "ok"),
    "ask_where_it_is": Attack(
        "import locale, os, platform, time\nprint(platform.node(), os.getpid(), os.getuid(), time.tzname, locale.getlocale(),"
        " os.getcwd(), sorted(os.environ))",
        "ok",
    ),
}


def test_attack(batch: Batch, attack: str) -> None:
    judge(batch, ATTACKS, attack)


def test_only_the_patched_test_suffers(batch: Batch) -> None:
    verdict = batch.verdicts["patch_the_runner_for_later_tests"]
    assert [test.outcome for test in verdict.tests] == ["error", "ok", "ok"], verdict


def test_what_is_asked_is_the_same_everywhere(batch: Batch) -> None:
    asked = batch.verdicts["ask_where_it_is"].stdout
    assert asked.startswith(b"temper 2 65534 ('UTC', 'UTC')"), asked


def test_the_host_is_unchanged(batch: Batch) -> None:
    assert batch.before == batch.after == host_state()
