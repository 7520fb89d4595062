"""Hosts where nsjail cannot run, played by a filter on system calls: one line that says what is missing and how to allow it."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

CLONE, MOUNT, SECCOMP = 56, 165, 317
NEW_USER = 0x10000000

PLAY = """
import ctypes, os, struct, sys
from pathlib import Path
number, mask, error, folder = *map(int, sys.argv[1:4]), Path(sys.argv[4])
sys.path.insert(0, sys.argv[5])
import as_someone
from temper.sandbox.check import check_host
from temper.sandbox.jail import Host
host = Host.here()
check_host(host)  # imports what is imported late
if os.geteuid() == 0:
    host = as_someone.host_for_user(folder)
    as_someone.become_user()
def op(code, k, jt=0, jf=0): return struct.pack('HBBI', code, jt, jf, k)
rules = op(0x20, 0) + op(0x15, 435, 0, 1) + op(6, 0x00050000 | 38)  # no clone3, whose flags a filter cannot see
rules += op(0x15, number, 0, 3)  # this call?
rules += op(0x20, 16) + (op(0x45, mask, 0, 1) if mask else op(0x05, 0)) + op(6, 0x00050000 | error)  # with such flags?
rules += op(6, 0x7FFF0000)
buffer = ctypes.create_string_buffer(rules)
program = ctypes.create_string_buffer(struct.pack('HxxxxxxQ', len(rules) // 8, ctypes.addressof(buffer)))
libc = ctypes.CDLL(None, use_errno=True)
assert libc.prctl(38, 1, 0, 0, 0) == 0 and libc.prctl(22, 2, ctypes.byref(program), 0, 0) == 0, os.strerror(ctypes.get_errno())
report = check_host(host)
print(report.ok)
print(report.line())
"""


@pytest.mark.parametrize(
    ("number", "mask", "error", "words"),
    [
        (
            CLONE,
            NEW_USER,
            errno.EPERM,
            "user namespaces are forbidden here: set `sysctl user.max_user_namespaces=15000`",
        ),
        (CLONE, NEW_USER, errno.ENOSPC, "No space left on device"),
        (MOUNT, 0, errno.EACCES, "AppArmor forbids mounts in user namespaces"),
        (MOUNT, 0, errno.EPERM, "allow mounts in user namespaces"),
        (0xFFFF, 0, errno.EPERM, "limits enforced by cgroup"),
    ],
)
def test_a_host_that_forbids_something_is_told_in_one_line(number: int, mask: int, error: int, words: str) -> None:
    with tempfile.TemporaryDirectory(prefix="temper-host-") as folder:
        Path(folder).chmod(0o755)
        arguments = [str(number), str(mask), str(error), folder, str(Path(__file__).parent)]
        done = subprocess.run(
            [sys.executable, "-P", "-c", PLAY, *arguments], capture_output=True, text=True, timeout=60, check=False
        )
    assert done.returncode == 0, done.stderr[-2000:]
    ok, line, *more = done.stdout.splitlines()
    assert more == [] and ok == str(number == 0xFFFF) and words in line, done.stdout


@pytest.mark.parametrize(("binary", "words"), [("/bin/true", "nsjail"), ("/bin/cat", "nsjail")])
def test_what_is_no_nsjail_is_said_to_be_none(binary: str, words: str) -> None:
    code = "from temper.sandbox.check import check_host; r = check_host(); print(r.ok, r.line())"
    done = subprocess.run(
        [sys.executable, "-P", "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, "TEMPER_NSJAIL": binary},
    )
    assert done.stdout.startswith("False sandbox: nsjail cannot run programs here") and words in done.stdout, done
    assert len(done.stdout.splitlines()) == 1
