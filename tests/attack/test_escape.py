"""Attempts to leave the jail, to reach the kernel's dangerous corners, the host's files or its network.

`policy`: the call is one that only an attack makes. `ok` with errno names: the call is refused and the program lives on.
"""

from tests.attack.conftest import Attack, Batch, host_state, judge

CALL = """
import ctypes, errno, os, sys
libc = ctypes.CDLL(None, use_errno=True)
def call(number, *arguments):
    result = libc.syscall(ctypes.c_long(number), *(a if isinstance(a, bytes) else ctypes.c_long(a) for a in arguments))
    return errno.errorcode[ctypes.get_errno()] if result < 0 else result
def attempt(function, *arguments, **options):
    try:
        return function(*arguments, **options)
    except OSError as error:
        return errno.errorcode[error.errno]
"""


def syscall(*arguments: object) -> str:
    return f"{CALL}\nprint(call({', '.join(map(repr, arguments))}))"


KILLED = {
    "ptrace_attach_init": syscall(101, 16, 1, 0, 0),
    "ptrace_traceme": syscall(101, 0, 0, 0, 0),
    "process_vm_readv_init": syscall(310, 1, 0, 0, 0, 0, 0),
    "process_vm_writev_init": syscall(311, 1, 0, 0, 0, 0, 0),
    "pidfd_getfd_of_init": CALL + "fd = os.pidfd_open(1); print(call(438, fd, 3, 0))",
    "kcmp": syscall(312, 1, 2, 0, 0, 0),
    "mount_proc": syscall(165, b"proc", b"/tmp", b"proc", 0, 0),
    "mount_over_usr": syscall(165, b"none", b"/usr", b"tmpfs", 0, 0),
    "remount_usr_writable": syscall(165, b"none", b"/usr", b"", 0x1020, 0),
    "umount": syscall(166, b"/tmp", 2),
    "pivot_root": syscall(155, b"/tmp", b"/tmp"),
    "chroot": syscall(161, b"/tmp"),
    "unshare_user": syscall(272, 0x10000000),
    "unshare_everything": syscall(272, 0x7E020000),
    "setns": syscall(308, 0, 0),
    "clone_new_user": syscall(56, 0x10000000 | 17, 0, 0, 0, 0),
    "clone_new_net": syscall(56, 0x40000000 | 17, 0, 0, 0, 0),
    "fsopen": syscall(430, b"proc", 0),
    "open_tree": syscall(428, -100, b"/", 1),
    "open_tree_with_attributes": syscall(467, -100, b"/", 1, 0, 0),
    "move_mount": syscall(429, -100, b"/tmp", -100, b"/usr", 0),
    "mount_setattr": syscall(442, -100, b"/usr", 0, 0, 0),
    "open_by_handle_at": syscall(304, -100, 0, 0),
    "bpf": syscall(321, 0, 0, 0),
    "perf_event_open": syscall(298, 0, 0, -1, -1, 0),
    "userfaultfd": syscall(323, 0),
    "add_key": syscall(248, b"user", b"name", b"value", 5, -3),
    "keyctl_join_session": syscall(250, 1, 0),
    "request_key": syscall(249, b"user", b"name", 0, 0),
    "init_module": syscall(175, 0, 0, b""),
    "finit_module": syscall(313, 0, b"", 0),
    "delete_module": syscall(176, b"ext4", 0),
    "kexec_load": syscall(246, 0, 0, 0, 0),
    "reboot": syscall(169, 0xFEE1DEAD - (1 << 32), 672274793, 0x1234567, 0),
    "swapon": syscall(167, b"/tmp/x", 0),
    "acct": syscall(163, b"/tmp/x"),
    "quotactl": syscall(179, 0, 0, 0, 0),
    "iopl": syscall(172, 3),
    "ioperm": syscall(173, 0, 8, 1),
    "set_the_clock": CALL + "import time\ntime.clock_settime(time.CLOCK_REALTIME, 0)",
    "set_the_time_of_day": syscall(164, 0, 0),
    "set_the_hostname": "import socket\nsocket.sethostname('mine')",
    "thirty_two_bit_calls": CALL
    + """
import mmap
code = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
code.write(bytes([0x53, 0xB8, 26, 0, 0, 0, 0x31, 0xDB, 0x31, 0xC9, 0x31, 0xD2, 0xCD, 0x80, 0x5B, 0xC3]))  # ptrace by int 0x80
print(ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(code)))())
""",
    "an_allowing_filter_on_top": CALL
    + """
import struct
program = struct.pack('HBBI', 6, 0, 0, 0x7FFF0000)
buffer = ctypes.create_string_buffer(program)
filters = struct.pack('HxxxxxxQ', 1, ctypes.addressof(buffer))
top = ctypes.create_string_buffer(filters)
assert call(157, 22, 2, ctypes.addressof(top)) == 0
print(call(165, b'proc', b'/tmp', b'proc', 0, 0))
""",
    "from_a_thread": CALL
    + "import threading\nt = threading.Thread(target=call, args=(161, b'/tmp')); t.start(); t.join(); print('alive')",
}

REFUSED = {
    "clone3_new_user": (syscall(435, 0, 88), b"ENOSYS\n"),
    "io_uring": (syscall(425, 8, 0), b"ENOSYS\n"),
    "secret_memory": (syscall(447, 0), b"ENOSYS\n"),
    "sysv_shared_memory": (syscall(29, 0, 4096, 0o1600), b"ENOSYS\n"),
    "sysv_messages": (syscall(68, 0, 0o1600), b"ENOSYS\n"),
    "sysv_semaphores": (syscall(64, 0, 1, 0o1600), b"ENOSYS\n"),
    "message_queue": (syscall(240, b"q", 0o102, 0o600, 0), b"ENOSYS\n"),
    "x32_calls": (syscall(0x40000000 + 101, 0, 0, 0, 0), b"ENOSYS\n"),
    "sockets_of_every_family": (
        CALL
        + """
import socket
print({attempt(socket.socket, family, kind) for family in range(50) if family != 1 for kind in (1, 2, 3)})
""",
        b"{'EAFNOSUPPORT'}\n",
    ),
    "lower_the_inits_limits": (syscall(302, 1, 7, 0, 0), b"EPERM\n"),
    "slow_everybody_of_this_user": (CALL + "print(attempt(os.setpriority, os.PRIO_USER, 0, 19))", b"EPERM\n"),
    "pin_the_init": (CALL + "print(attempt(os.sched_setaffinity, 1, {0}))", b"EPERM\n"),
    "idle_the_init": (CALL + "print(attempt(os.sched_setscheduler, 1, 5, os.sched_param(0)))", b"EPERM\n"),
    "real_time_priority": (CALL + "print(attempt(os.sched_setscheduler, 0, 1, os.sched_param(50)))", b"EPERM\n"),
    "higher_priority": (CALL + "print(attempt(os.nice, -5))", b"EPERM\n"),
    "executable_data_persona": (syscall(135, 0x0400000), b"EPERM\n"),
    "push_terminal_input": (CALL + "import fcntl\nprint(attempt(fcntl.ioctl, 0, 0x5412, b'x'))", b"EPERM\n"),
    "extended_attributes": (
        CALL
        + "print(attempt(os.setxattr, '/tmp', 'user.note', b'x'), attempt(os.setxattr, '/tmp/main.py', 'user.n', b'x'))",
        b"ENOTSUP ENOTSUP\n",
    ),
    "become_root": (
        CALL + "print(attempt(os.setuid, 0), attempt(os.setgid, 0), attempt(os.setgroups, [0]))",
        b"EINVAL EINVAL EPERM\n",
    ),
    "raise_capabilities": (
        CALL
        + """
import struct
header = struct.pack('Ii', 0x20080522, 0)
print(call(126, header, struct.pack('6I', *[0xFFFFFFFF] * 6)), call(157, 24, 21, 0, 0, 0), call(157, 47, 2, 21, 0, 0))
""",
        b"EPERM EPERM EPERM\n",
    ),
    "drop_no_new_privs": (syscall(157, 38, 0, 0, 0, 0), b"EINVAL\n"),
    "setuid_programs": (
        CALL
        + """
import glob, stat, subprocess
found = [p for p in glob.glob('/usr/bin/*') if os.path.exists(p) and os.stat(p).st_mode & stat.S_ISUID]
codes = {subprocess.run([p, '--version'], capture_output=True, stdin=subprocess.DEVNULL).returncode for p in found[:0]}
os.posix_spawn('/usr/bin/id', ['id', '-u'], {})
os.wait()
print(bool(os.statvfs('/usr').f_flag & os.ST_NOSUID), bool(os.statvfs('/tmp').f_flag & os.ST_NOSUID))
""",
        b"65534\nTrue True\n",
    ),
    "device_nodes": (
        CALL
        + """
import stat
print(attempt(os.mknod, '/tmp/sda', 0o600 | stat.S_IFBLK, os.makedev(8, 0)), attempt(os.mknod, '/tmp/k', 0o600 | stat.S_IFCHR,
    os.makedev(1, 11)))
print([attempt(open, f'/dev/{n}') for n in ('mem', 'kmsg', 'sda', 'vda', 'tty', 'ptmx', 'random', 'fuse', 'kvm')].count('ENOENT'))
""",
        b"EPERM EPERM\n9\n",
    ),
    "no_proc_no_sys": (
        CALL
        + "print([attempt(os.listdir, p) for p in ('/proc', '/sys', '/dev/fd', '/run', '/var', '/home', '/mnt', '/boot')])",
        str(["ENOENT"] * 8).encode() + b"\n",
    ),
    "files_of_the_host": (
        CALL
        + "print([attempt(open, p) for p in ('/etc/shadow', '/etc/hostname', '/etc/hosts', '@CANARY@', '/root/.bashrc')])\n"
        "print(open('/etc/passwd').read(), end='')",
        str(["ENOENT"] * 5).encode() + b"\nnobody:x:65534:65534:nobody:/tmp:/bin/sh\n",
    ),
    "write_to_the_system": (
        CALL
        + """
def write(path):
    with open(path, 'w') as file: file.write('x')
print({attempt(write, p) for p in ('/usr/bin/x', '/usr/bin/env', '/etc/passwd', '/x', '/opt/temper/init.pyc', '/bin/x', '/dev/x')})
""",
        None,
    ),
    "change_shared_devices": (
        CALL
        + "print({attempt(os.chmod, '/dev/null', 0), attempt(os.chown, '/dev/zero', 0, 0), attempt(os.unlink, '/dev/null')})",
        None,
    ),
    "symlink_out": (
        CALL + "os.symlink('@CANARY@', '/tmp/link'); os.symlink('/proc/1/root', '/tmp/up')\n"
        "print(attempt(open, '/tmp/link', 'w'), attempt(os.listdir, '/tmp/up'), attempt(open, '../../../../../../@CANARY@'))",
        b"ENOENT ENOENT ENOENT\n",
    ),
    "talk_to_the_host": (
        CALL
        + """
import socket
def connect(address):
    socket.socket(socket.AF_UNIX).connect(address)
print({attempt(connect, a) for a in ('/run/docker.sock', '/run/dbus/system_bus_socket', '/tmp/.X11-unix/X0', '@CANARY@')})
print({attempt(connect, '\\0' + a) for a in ('temper-canary', '/tmp/.X11-unix/X0', '/org/freedesktop/systemd1/notify')})
""",
        b"{'ENOENT'}\n{'ECONNREFUSED'}\n",
    ),
    "signals_to_everybody": (
        CALL
        + """
import signal
for number in range(1, 65):
    if number not in (32, 33):
        attempt(os.kill, 1, number)
print(attempt(os.kill, -1, 9), attempt(os.killpg, 1, 9), attempt(os.kill, 1, 9), attempt(os.kill, 12345, 9), os.getppid())
""",
        b"ESRCH ESRCH None ESRCH 1\n",
    ),
    "raise_rlimits": (
        CALL
        + """
import resource
def up(what):
    soft, hard = resource.getrlimit(what)
    try:
        resource.setrlimit(what, (hard, hard + 1))
    except ValueError:
        return 'refused'
names = ('RLIMIT_CPU', 'RLIMIT_FSIZE', 'RLIMIT_NPROC', 'RLIMIT_NOFILE', 'RLIMIT_AS', 'RLIMIT_MEMLOCK', 'RLIMIT_SIGPENDING')
print({up(getattr(resource, name)) for name in names})
""",
        b"{'refused'}\n",
    ),
    "core_files": (
        CALL
        + """
import resource
resource.setrlimit(resource.RLIMIT_CORE, (1 << 30, 1 << 30)) if resource.getrlimit(resource.RLIMIT_CORE)[1] != 0 else 0
call(160, 4 + (1 << 32), ctypes.addressof(ctypes.create_string_buffer(bytes(16))))
if not os.fork(): os.abort()
_, status = os.wait()
print(resource.getrlimit(resource.RLIMIT_CORE)[1] <= 1, os.WCOREDUMP(status), os.WTERMSIG(status), os.listdir('/tmp'))
""",
        b"True False 6 ['main.py']\n",
    ),
    "push_terminal_input_by_a_high_bit": (syscall(16, 0, 0x100005412, b"x"), b"EPERM\n"),
    "paste_to_the_console": (syscall(16, 0, 0x541C, b"\3"), b"EPERM\n"),
    "extended_attributes_by_the_new_call": (
        CALL
        + """
import struct
value = ctypes.create_string_buffer(b'hello')
arguments = ctypes.create_string_buffer(struct.pack('QII', ctypes.addressof(value), 5, 0))
print(call(463, -100, b'/tmp', 0, b'user.note', ctypes.addressof(arguments), 16), os.listxattr('/tmp'))
""",
        b"ENOTSUP []\n",
    ),
    "watch_what_the_host_opens": (
        CALL
        + """
import fcntl
print(call(253), call(294, 0), call(300, 0, 0))
for what in (1026, 1026 + (1 << 32), 1024):
    print(call(72, os.open('/usr/bin', os.O_RDONLY), what, 1))
""",
        b"ENOSYS ENOSYS ENOSYS\nEPERM\nEPERM\nEPERM\n",
    ),
    "take_the_hosts_asynchronous_io": (syscall(206, 60_000, b"\0" * 8), b"ENOSYS\n"),
    "memory_in_no_address_space": (syscall(319, b"x", 0), b"ENOSYS\n"),
    "huge_pages": (syscall(9, 0, 1 << 21, 3, 0x40022, -1, 0), b"ENOMEM\n"),
    "huge_pages_of_a_size": (syscall(9, 0, 1 << 30, 3, 0x40022 | 30 << 26, -1, 0), b"ENOMEM\n"),
    "own_a_core_of_the_cpu": (
        CALL + "print(call(157, 62, 1, 0, 0, 0), call(157, 62 + (1 << 32), 1, 0, 0, 0))",
        b"EPERM EPERM\n",
    ),
    "a_local_descriptor_table": (syscall(154, 0x11, b"\0" * 16, 16), b"ENOSYS\n"),
    "ask_for_mounts": (CALL + "print(call(457, 0, 0, 0, 0), call(458, 0, 0, 0, 0))", b"ENOSYS ENOSYS\n"),
    "advise_on_the_inits_memory": (CALL + "print(call(440, os.pidfd_open(1), 0, 0, 21, 0))", b"EPERM\n"),
    "signal_the_init_by_descriptor": (
        CALL + "fd = os.pidfd_open(1)\nprint([call(424, fd, n, 0, 0) for n in (9, 15, 19, 2, 64)], os.getppid())",
        b"[0, 0, 0, 0, 0] 1\n",
    ),
    "queue_signals_without_end": (
        CALL
        + """
import signal
signal.pthread_sigmask(signal.SIG_BLOCK, {40})
info = ctypes.create_string_buffer((40).to_bytes(4, 'little') + bytes(4) + (-1 & 0xFFFFFFFF).to_bytes(4, 'little') + bytes(116))
n = 0
while (found := call(129, os.getpid(), 40, ctypes.addressof(info))) == 0 and n < 100_000: n += 1
print(found, n <= 512)
""",
        b"EAGAIN True\n",
    ),
    "timers_without_end": (
        CALL
        + """
n, timer = 0, ctypes.create_string_buffer(4)
while (found := call(222, 1, 0, ctypes.addressof(timer))) == 0 and n < 100_000: n += 1
print(found, n <= 512)
""",
        b"EAGAIN True\n",
    ),
    "descriptors_in_flight_without_end": (
        CALL
        + """
import array, socket
a, b = socket.socketpair(); a.setblocking(False)
fd, n = os.open('/dev/null', os.O_RDONLY), 0
def send(): a.sendmsg([b'x'], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array('i', [fd] * 100))])
while (found := attempt(send)) is None and n < 10_000: n += 1
print(found in ('ETOOMANYREFS', 'EAGAIN'), n < 300)
""",
        b"True True\n",
    ),
    "a_terminal_of_its_own": (CALL + "print(attempt(os.openpty))", b"ENOENT\n"),
    "a_sibling_instead_of_a_child": (
        CALL
        + "pid = call(56, 0x8000 | 17, 0, 0, 0, 0)\nif pid == 0: os._exit(0)\nprint(pid > 0, attempt(os.waitpid, pid, 0))",
        b"True ECHILD\n",
    ),
    "deadline_scheduling": (
        CALL + "import struct\nprint(call(314, 0, struct.pack('IIQiIQQQ', 48, 6, 0, 0, 0, 10**6, 10**7, 10**7), 0))",
        b"EPERM\n",
    ),
    "write_the_shared_devices_locks": (
        CALL
        + "import fcntl\nprint(attempt(fcntl.fcntl, os.open('/dev/null', os.O_RDWR), fcntl.F_SETLEASE, fcntl.F_RDLCK))",
        b"EPERM\n",
    ),
    "x32_numbers_of_everything": (
        CALL + "print({call(0x40000000 + n, 0, 0, 0, 0, 0, 0) for n in range(608)})",
        b"{'ENOSYS'}\n",
    ),
    "lock_memory": (
        CALL + "print(call(151, 3), call(149, ctypes.addressof(ctypes.create_string_buffer(1 << 20)), 1 << 20))",
        None,
    ),
}

ATTACKS = {name: Attack(source, "policy") for name, source in KILLED.items()} | {
    name: Attack(source, "ok", says) for name, (source, says) in REFUSED.items()
}


def test_attack(batch: Batch, attack: str) -> None:
    judge(batch, ATTACKS, attack)


def test_writing_was_refused_everywhere(batch: Batch) -> None:
    words = batch.verdicts["write_to_the_system"].stdout.decode()
    assert set(eval(words)) <= {"EROFS", "EACCES", "ENOENT"}, words
    words = batch.verdicts["change_shared_devices"].stdout.decode()
    assert set(eval(words)) <= {"EPERM", "EROFS", "EINVAL"}, words
    assert b"0" not in batch.verdicts["lock_memory"].stdout


def test_the_host_is_unchanged(batch: Batch) -> None:
    assert batch.before == batch.after == host_state()
