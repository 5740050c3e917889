"""What a submission may not do, enforced by the operating system. Loaded by path in the runner: standard library only.

Four layers, applied to the process itself just before it runs a submission; none can be undone:

* limits of processor time, memory, file size and open files (`resource`, all POSIX systems);
* seccomp (Linux on x86-64 and ARM64): no new processes or programs, no sockets, no opening of a file for writing, no
  creating, renaming, removing or changing of files, no signals to and no inspection of other processes;
* Landlock (Linux 5.13 and later): no file outside the folders of Python and its packages can be opened for reading;
* an audit hook (all systems): the same rules once more inside Python, with a sentence as the error. Code that calls C
  functions directly can avoid it, so it is only the second line.

No layer needs root. `enter` returns the names of the layers in force.
"""

import ctypes
import errno
import os
import platform
import struct
import sys
from typing import Any

DENIED = """
fork=57 vfork=58 execve=59:221 execveat=322:281 ptrace=101:117 process_vm_readv=310:270 process_vm_writev=311:271
pidfd_open=434:434 pidfd_send_signal=424:424 pidfd_getfd=438:438 process_madvise=440:440 rt_sigqueueinfo=129:138
rt_tgsigqueueinfo=297:240 tkill=200:130 socket=41:198 socketpair=53:199 connect=42:203 bind=49:200 listen=50:201
accept=43:202 accept4=288:242 sendto=44:206 sendmsg=46:211 sendmmsg=307:269 creat=85 truncate=76:45 rename=82
renameat=264:38 renameat2=316:276 mkdir=83 mkdirat=258:34 rmdir=84 link=86 linkat=265:37 unlink=87 unlinkat=263:35
symlink=88 symlinkat=266:36 mknod=133 mknodat=259:33 chmod=90 fchmod=91:52 fchmodat=268:53 fchmodat2=452:452 chown=92
fchown=93:55 lchown=94 fchownat=260:54 utime=132 utimes=235 utimensat=280:88 futimesat=261 setxattr=188:5
lsetxattr=189:6 fsetxattr=190:7 removexattr=197:14 lremovexattr=198:15 fremovexattr=199:16 mount=165:40 umount2=166:39
pivot_root=155:41 chroot=161:51 unshare=272:97 setns=308:268 open_tree=428:428 move_mount=429:429 fsopen=430:430
fsconfig=431:431 fsmount=432:432 fspick=433:433 mount_setattr=442:442 shmget=29:194 shmat=30:196 semget=64:190
msgget=68:186 mq_open=240:180 mq_unlink=241:181 memfd_create=319:279 memfd_secret=447:447 open_by_handle_at=304:265
bpf=321:280 perf_event_open=298:241 userfaultfd=323:282 io_uring_setup=425:425 io_uring_enter=426:426
io_uring_register=427:427 io_setup=206:0 keyctl=250:219 add_key=248:217 request_key=249:218 setpriority=141:140
ioprio_set=251:30 sched_setaffinity=203:122 sched_setscheduler=144:119 sched_setparam=142:118 sched_setattr=314:274
migrate_pages=256:238 move_pages=279:239 setrlimit=160:164 kexec_load=246:104 kexec_file_load=320:294
init_module=175:105 finit_module=313:273 delete_module=176:106 reboot=169:142 swapon=167:224 swapoff=168:225
settimeofday=164:170 clock_settime=227:112 adjtimex=159:171 clock_adjtime=305:266 sethostname=170:161
setdomainname=171:162 acct=163:89 quotactl=179:60 quotactl_fd=443:443 setuid=105:146 setgid=106:144 setreuid=113:145
setregid=114:143 setresuid=117:147 setresgid=119:149 setgroups=116:159
"""
"""System calls that fail with EPERM, as name=number on x86-64:number on ARM64. ARM64 lacks the oldest ones."""
MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
"""Column of `DENIED`, and the architecture's number in seccomp."""
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
NEWEST = 462
"""The newest system call that these rules consider; later ones fail with ENOSYS, as on an older kernel."""
REFUSED_EVENTS = (
    "socket.", "subprocess.", "shutil.", "tempfile.", "ftplib.", "smtplib.", "urllib.", "http.client.", "pty.",
    "os.system", "os.exec", "os.fork", "os.posix_spawn", "os.spawn", "os.kill", "os.remove", "os.rename", "os.mkdir",
    "os.rmdir", "os.link", "os.symlink", "os.truncate", "os.chmod", "os.chown", "os.lchown", "os.utime",
    "os.setxattr", "os.removexattr", "signal.pthread_kill",
)  # fmt: skip


def limit(seconds: int, memory: int) -> None:
    """Limit processor time, memory beyond what is mapped already, file size, core dumps and open files."""
    import resource

    limits = {
        "RLIMIT_CPU": (seconds, seconds + 1),  # a signal at the first, the end at the second
        **({"RLIMIT_AS": (memory, memory)} if sys.platform == "linux" else {}),  # macOS has no such limit
        "RLIMIT_FSIZE": (0, 0),
        "RLIMIT_CORE": (0, 0),
        "RLIMIT_NOFILE": (64, 64),
    }
    for name, values in limits.items():
        kind = getattr(resource, name)
        hard = resource.getrlimit(kind)[1]
        most = [value if hard == resource.RLIM_INFINITY else min(value, hard) for value in values]
        resource.setrlimit(kind, (most[0], most[1]))


def mapped() -> int:
    """Return the address space of this process in bytes; 0 where the system does not report it."""
    try:
        with open("/proc/self/statm", encoding="ascii") as held:
            return int(held.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def readable(hidden: list[str]) -> list[str]:
    """Return files and folders that a submission may read: Python, its packages and libraries, without `hidden`."""
    machine = platform.machine()
    names = [os.path.dirname(os.__file__), *(path for path in sys.path if path)]
    names += [f"/lib/{machine}-linux-gnu", f"/usr/lib/{machine}-linux-gnu", "/lib64", "/usr/lib64"]
    names += ["/etc/ld.so.cache", "/dev/null", "/dev/urandom", "/proc/cpuinfo", "/sys/devices/system/cpu"]
    hidden = [os.path.realpath(path) for path in hidden]
    hidden += [os.path.join(os.path.realpath(path), "glassformer") for path in sys.path if path]
    found: list[str] = []
    for name in names:
        _without(os.path.realpath(name), hidden, found)
    return list(dict.fromkeys(found))


def _without(path: str, hidden: list[str], found: list[str]) -> None:
    """Add a path; a folder with something hidden below it is replaced by its entries."""
    if path in hidden or not os.path.exists(path):
        return
    if not any(other.startswith(path.rstrip("/") + "/") and os.path.exists(other) for other in hidden):
        found.append(path)
    elif os.path.isdir(path):
        for entry in os.listdir(path):
            _without(os.path.realpath(os.path.join(path, entry)), hidden, found)


def _call(number: int, *arguments: Any) -> int:
    """Make a system call. Return its result, or minus the error number."""
    libc = ctypes.CDLL(None, use_errno=True)
    result = int(libc.syscall(ctypes.c_long(number), *arguments))
    return -ctypes.get_errno() if result < 0 else result


def landlock(paths: list[str]) -> int:
    """Return a ruleset that allows reading these paths and nothing else of the file system; -1 without Landlock."""
    if sys.platform != "linux":
        return -1
    version = _call(444, None, ctypes.c_size_t(0), ctypes.c_uint32(1))
    if version < 1:
        return -1
    rights = {1: 13, 2: 14, 3: 15, 4: 15}.get(version, 16)  # number of rights that this version knows
    network, scopes = (3 if version >= 4 else 0), (3 if version >= 6 else 0)  # TCP; abstract sockets and signals
    attributes = struct.pack("=QQQ", (1 << rights) - 1, network, scopes)[
        : 8 if version < 4 else 16 if version < 6 else 24
    ]
    ruleset = _call(444, attributes, ctypes.c_size_t(len(attributes)), ctypes.c_uint32(0))
    if ruleset < 0:
        return -1
    for path in paths:
        try:
            opened = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except OSError:
            continue
        reading = 0b1100 if os.path.isdir(path) else 0b0100  # files and folders, or a file
        rule = struct.pack("=Qi", reading, opened)
        _call(445, ctypes.c_int(ruleset), ctypes.c_int(1), rule, ctypes.c_uint32(0))
        os.close(opened)
    return ruleset


def _filter(column: int, architecture: int) -> bytes:
    """Return the seccomp program: instructions of 8 bytes, run by the kernel before each system call."""

    def step(code: int, value: int, yes: int = 0, no: int = 0) -> bytes:
        return struct.pack("=HBBI", code, yes, no, value & 0xFFFFFFFF)

    load, equal, at_least, any_bit, give = 0x20, 0x15, 0x35, 0x45, 0x06
    allow, refuse, unknown, kill = 0x7FFF0000, 0x50000 | errno.EPERM, 0x50000 | errno.ENOSYS, 0x80000000

    def on(number: int, *steps: bytes) -> bytes:
        """Run these steps for one system call; the last returns."""
        return step(equal, number, 0, len(steps)) + b"".join(steps)

    def argument(index: int) -> bytes:
        return step(load, 16 + 8 * index)

    own = os.getpid()
    numbers = [entry.split("=")[1].split(":") for entry in DENIED.split()]
    program = [step(load, 4), step(equal, architecture, 1, 0), step(give, kill), step(load, 0)]
    program += [step(at_least, NEWEST + 1, 0, 1), step(give, unknown)]
    program += [on(int(entry[column]), step(give, refuse)) for entry in numbers if len(entry) > column]
    may_write = (step(any_bit, WRITING, 0, 1), step(give, refuse), step(give, allow))
    only_own = (step(equal, own, 1, 0), step(give, refuse), step(give, allow))
    own_or_zero = (step(equal, 0, 2, 0), step(equal, own, 1, 0), step(give, refuse), step(give, allow))
    program += [on(2, argument(1), *may_write)] if column == 0 else []  # open, on ARM64 io_cancel
    program += [on((257, 56)[column], argument(2), *may_write)]  # openat
    program += [on(437, step(give, unknown)), on(435, step(give, unknown))]  # openat2 and clone3 hide their flags
    thread = (step(any_bit, 0x10000, 1, 0), step(give, refuse), step(give, allow))
    program += [on((56, 220)[column], argument(0), *thread)]  # clone: threads only
    program += [on((62, 129)[column], argument(0), *only_own), on((234, 131)[column], argument(0), *only_own)]  # kill
    program += [on((302, 261)[column], argument(0), *own_or_zero)]  # prlimit64
    owner = (step(equal, 8, 1, 0), step(equal, 15, 0, 1), step(give, refuse), step(give, allow))
    program += [on((72, 25)[column], argument(1), *owner)]  # fcntl: signals to another process
    flags = (step(equal, 0x40086602, 1, 0), step(equal, 0x401C5820, 0, 1), step(give, refuse), step(give, allow))
    program += [on((16, 29)[column], argument(1), *flags), step(give, allow)]  # ioctl: attributes of a file
    return b"".join(program)


def seccomp() -> bool:
    """Install the filter. Return False if the kernel or the architecture is not supported."""
    if sys.platform != "linux" or platform.machine() not in MACHINES or sys.maxsize < 2**32:
        return False
    code = _filter(*MACHINES[platform.machine()])
    buffer = ctypes.create_string_buffer(code, len(code))

    class Program(ctypes.Structure):
        _fields_ = (("length", ctypes.c_ushort), ("steps", ctypes.c_void_p))

    program = Program(len(code) // 8, ctypes.addressof(buffer))
    libc = ctypes.CDLL(None, use_errno=True)
    return int(libc.prctl(22, 2, ctypes.byref(program), 0, 0)) == 0


def audit(paths: list[str]) -> None:
    """Refuse, inside Python, what the other layers refuse."""
    allowed = tuple(os.path.realpath(path) for path in paths)
    folders = tuple(path.rstrip("/") + "/" for path in allowed)

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event.startswith(REFUSED_EVENTS) and not (event == "os.kill" and arguments[0] == os.getpid()):
            raise PermissionError(f"the grader does not allow {event}")
        if event not in ("open", "os.listdir", "os.scandir") or isinstance(arguments[0], int):
            return
        writes = event == "open" and bool((arguments[2] or 0) & WRITING)
        path = os.path.realpath(os.fsdecode(arguments[0] if arguments[0] is not None else "."))
        if writes or (path not in allowed and not path.startswith(folders)):
            verb = "write" if writes else "read"
            raise PermissionError(f"the grader does not allow to {verb} {os.path.basename(path)}")

    sys.addaudithook(hook)


def enter(seconds: int, memory: int, paths: list[str], ruleset: int) -> list[str]:
    """Apply all layers to this process. Return the names of those in force."""
    layers = ["limits", "audit"]
    limit(seconds, memory)
    audit(paths)
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        libc.prctl(1, 9, 0, 0, 0)  # end with the process that started it
        libc.prctl(4, 0, 0, 0, 0)  # no other process may inspect it
        libc.prctl(38, 1, 0, 0, 0)  # no new privileges, which the next two require
        if ruleset >= 0 and _call(446, ctypes.c_int(ruleset), ctypes.c_uint32(0)) == 0:
            layers.append("landlock")
        if ruleset >= 0:
            os.close(ruleset)
        if seccomp():
            layers.append("seccomp")
    return layers
