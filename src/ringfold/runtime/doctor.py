"""Whether this machine has what a run needs. Each check reads one value and judges it; `examine` runs all checks.

A check never raises and never changes the machine. "fail" means that a run is impossible. What makes a run slower or
its clocks less precise is "warn", with advice. The `judge_...` functions are pure, so that tests can pass them any
machine.
"""

import ctypes
import errno
import fcntl
import importlib
import os
import resource
import secrets
import select
import socket
import struct
from collections.abc import Sequence
from typing import Literal

from msgspec import Struct

from ringfold.config import DATA_PORT, MASTER_PORT
from ringfold.errors import RingfoldError
from ringfold.runtime import master_client
from ringfold.runtime.hardware import Hardware, read_hardware, read_text, soft_limit
from ringfold.runtime.process import guardian_program
from ringfold.units import MIB

Outcome = Literal["ok", "warn", "fail"]

# Linux constants that Python's socket module lacks in some versions.
_SO_TIMESTAMPING = 37
_TX_SOFTWARE = 1 << 1
_RX_SOFTWARE = 1 << 3
_REPORT_SOFTWARE = 1 << 4
_MSG_ERRQUEUE = 0x2000
_STA_UNSYNC = 0x40
_TIME_ERROR = 5


class Check(Struct, frozen=True):
    """The result of one check: its name, its outcome, what was found, and what to do."""

    name: str
    outcome: Outcome
    found: str
    advice: str = ""


def examine(
    master: Sequence[str] = (), token: bytes = b"", *, master_port: int = MASTER_PORT, data_port: int = DATA_PORT
) -> list[Check]:
    """Every check, in reading order; with `master`, also whether one of its addresses answers and takes the token."""
    machine = read_hardware()
    checks = [
        check_native(),
        judge_cpu(machine),
        judge_cores(machine),
        judge_memory(machine),
        check_shared_memory(),
        check_memory_lanes(),
        check_guardian(),
        judge_open_files(soft_limit(resource.RLIMIT_NOFILE)),
        judge_locked_memory(soft_limit(resource.RLIMIT_MEMLOCK)),
        check_port(master_port, "master port"),
        check_port(data_port, "data port"),
        judge_clock_source(read_text("/sys/devices/system/clocksource/clocksource0/current_clocksource")),
        check_clock_sync(),
        check_timestamps(),
        judge_buffers(
            read_text("/proc/sys/net/ipv4/tcp_wmem"),
            read_text("/proc/sys/net/ipv4/tcp_rmem"),
            read_text("/proc/sys/net/core/wmem_max"),
            read_text("/proc/sys/net/core/rmem_max"),
        ),
        judge_congestion(read_text("/proc/sys/net/ipv4/tcp_available_congestion_control")),
        judge_huge_pages(read_text("/sys/kernel/mm/transparent_hugepage/enabled")),
    ]
    if master:
        checks.append(check_master(master, token))
    return checks


def check_native() -> Check:
    try:
        importlib.import_module("ringfold._native")
    except ImportError as error:
        advice = "build it: `make test`, or `pip install .` with a C++20 compiler"
        return Check("native core", "fail", str(error), advice)
    return Check("native core", "ok", "ringfold._native loads")


def judge_cpu(machine: Hardware) -> Check:
    found = f"{machine.cpu}, {machine.cpu_level} ({' '.join(machine.cpu_features) or 'no vector features'})"
    if machine.architecture == "aarch64" or {"avx2", "f16c"} <= set(machine.cpu_features):
        return Check("cpu", "ok", found)
    return Check("cpu", "warn", found, "without AVX2 and F16C the generic kernels run: correct, but slower")


def judge_cores(machine: Hardware) -> Check:
    found = f"{machine.cores} usable"
    if machine.cores >= 2:
        return Check("cores", "ok", found)
    return Check("cores", "warn", found, "with one core peers on this host take turns; give it two or more")


def judge_memory(machine: Hardware) -> Check:
    found = f"{_size(machine.memory_free_bytes)} free of {_size(machine.memory_bytes)}"
    if machine.memory_free_bytes >= 512 * MIB:
        return Check("memory", "ok", found)
    return Check("memory", "warn", found, "an all-reduce in place needs its buffer once more for the backup")


def check_shared_memory(path: str = "/dev/shm") -> Check:
    try:
        status = os.statvfs(path)
    except OSError as error:
        return Check("shared memory", "warn", f"{path}: {error.strerror}", "mount a tmpfs there")
    free = status.f_bavail * status.f_frsize
    if not os.access(path, os.W_OK):
        return Check("shared memory", "warn", f"{path} is not writable", f"chmod 1777 {path}")
    if free < 64 * MIB:
        advice = "delete leftovers, or mount it larger (containers: --shm-size=1g)"
        return Check("shared memory", "warn", f"{path}: {_size(free)} free", advice)
    return Check("shared memory", "ok", f"{path}: {_size(free)} free")


def check_memory_lanes() -> Check:
    """Whether peers of this host can share memory: a sealed file without a name, and its descriptor passed on."""
    advice = "peers of this host use TCP instead; a security policy may forbid memfd_create or passing descriptors"
    name = "\0ringfold-doctor-" + secrets.token_hex(8)
    try:
        fd = os.memfd_create("ringfold-doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
            with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as client:
                listener.bind(name)
                listener.listen(1)
                client.connect(name)
                accepted, _ = listener.accept()
                with accepted:
                    socket.send_fds(client, [b"x"], [fd])
                    accepted.settimeout(1.0)
                    _, passed, _, _ = socket.recv_fds(accepted, 1, 1)
        finally:
            os.close(fd)
    except OSError as error:
        return Check("lanes in memory", "warn", f"not possible here: {error.strerror}", advice)
    for each in passed:
        os.close(each)
    if not passed:
        return Check("lanes in memory", "warn", "a descriptor did not arrive", advice)
    return Check("lanes in memory", "ok", "peers of this host share memory, if they see each other's sockets")


def check_guardian() -> Check:
    """Whether peers of this host can have a guardian."""
    advice = "the death of a large peer is seen when the kernel has freed its memory; install Ringfold again"
    program = guardian_program()
    if program is None:
        return Check("guardian", "warn", "its program is not beside the native core, or cannot be run", advice)
    return Check("guardian", "ok", f"{program} can be run")


def judge_open_files(limit: int | None) -> Check:
    if limit is None or limit >= 1_024:
        return Check("open files", "ok", "unlimited" if limit is None else f"{limit}")
    outcome: Outcome = "fail" if limit < 64 else "warn"
    return Check("open files", outcome, f"{limit}", "raise it: ulimit -n 4096 (a master needs one per peer and more)")


def judge_locked_memory(limit: int | None) -> Check:
    found = "unlimited" if limit is None else _size(limit)
    if limit is None or limit >= 64 * 1024:
        return Check("locked memory", "ok", found)
    return Check("locked memory", "warn", found, "raise it: ulimit -l 65536, for pinned transfer buffers")


def check_port(port: int, name: str) -> Check:
    """Whether a listener could bind the port, on IPv4 and, if the machine has it, on IPv6."""
    for family, host in ((socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::")):
        try:
            with socket.socket(family, socket.SOCK_STREAM) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:
                    probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                probe.bind((host, port))
        except OSError as error:
            if error.errno in (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL):
                continue
            advice = (
                "a master may be running here: `ringfold status`; or choose another port with --listen"
                if name == "master port"
                else "a peer may be running here; the next peer takes the next free port (data_port)"
            )
            return Check(name, "warn", f"{port}: {error.strerror}", advice)
    return Check(name, "ok", f"{port} is free")


def judge_clock_source(source: str) -> Check:
    if source in ("tsc", "kvm-clock", "arch_sys_counter", "hyperv_clocksource_tsc_page"):
        return Check("clock source", "ok", source)
    advice = "reading this clock may cost a system call; on bare metal boot with tsc=reliable if the TSC is sound"
    return Check("clock source", "warn", source or "unknown", advice)


class _Timex(ctypes.Structure):
    """The beginning of the kernel's struct timex, and space for the rest."""

    _fields_ = (
        ("modes", ctypes.c_uint),
        ("offset", ctypes.c_long),
        ("freq", ctypes.c_long),
        ("maxerror", ctypes.c_long),
        ("esterror", ctypes.c_long),
        ("status", ctypes.c_int),
        ("rest", ctypes.c_long * 40),
    )


def check_clock_sync() -> Check:
    """Whether the wall clock is synchronised, according to the kernel. Only reads: modes is 0."""
    timex = _Timex()
    try:
        state = ctypes.CDLL(None, use_errno=True).adjtimex(ctypes.byref(timex))
    except (AttributeError, OSError) as error:
        return Check("clock sync", "warn", f"adjtimex: {error}", "cannot tell whether the clock is synchronised")
    if state < 0:
        reason = os.strerror(ctypes.get_errno())
        return Check("clock sync", "warn", f"adjtimex: {reason}", "cannot tell whether the clock is synchronised")
    return judge_clock_sync(state, timex.status, timex.maxerror)


def judge_clock_sync(state: int, status: int, max_error_us: int) -> Check:
    if state == _TIME_ERROR or status & _STA_UNSYNC:
        advice = "start chrony or systemd-timesyncd: no decision uses wall clocks, but log lines should agree"
        return Check("clock sync", "warn", "CLOCK_REALTIME is not synchronised", advice)
    return Check("clock sync", "ok", f"synchronised, at most {max_error_us / 1000:.1f} ms off")


def check_timestamps() -> Check:
    """Send one datagram over loopback, and check that the kernel stamps its send and receive times."""
    missing = []
    try:
        with (
            socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as receiver,
            socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender,
        ):
            receiver.bind(("127.0.0.1", 0))
            receiver.setsockopt(socket.SOL_SOCKET, _SO_TIMESTAMPING, _RX_SOFTWARE | _REPORT_SOFTWARE)
            sender.setsockopt(socket.SOL_SOCKET, _SO_TIMESTAMPING, _TX_SOFTWARE | _REPORT_SOFTWARE)
            sender.sendto(b"ringfold", receiver.getsockname())
            if not _stamped(receiver, 0, select.POLLIN):
                missing.append("receive")
            if not _stamped(sender, _MSG_ERRQUEUE, select.POLLERR):
                missing.append("send")
    except OSError as error:
        return Check("time stamps", "warn", f"SO_TIMESTAMPING: {error.strerror}", "probing will use coarser times")
    if missing:
        found = f"no kernel {' or '.join(missing)} times on loopback"
        return Check("time stamps", "warn", found, "probing will use coarser times; gVisor and WSL1 lack them")
    return Check("time stamps", "ok", "kernel send and receive times on loopback")


def _stamped(endpoint: socket.socket, flags: int, event: int) -> bool:
    """Whether the next message carries a software timestamp (the first of three timespecs)."""
    poll = select.poll()
    poll.register(endpoint, event)
    if not poll.poll(500):
        return False
    _, ancillary, _, _ = endpoint.recvmsg(256, 512, flags)
    return any(
        level == socket.SOL_SOCKET and kind == _SO_TIMESTAMPING and any(struct.unpack_from("@2l", content))
        for level, kind, content in ancillary
    )


def judge_buffers(tcp_wmem: str, tcp_rmem: str, wmem_max: str, rmem_max: str) -> Check:
    """TCP grows its buffers up to the third numbers; they bound what one lane can have in flight."""
    limits = {"tcp_wmem": tcp_wmem.split()[-1:], "tcp_rmem": tcp_rmem.split()[-1:]}
    limits |= {"wmem_max": [wmem_max] if wmem_max else [], "rmem_max": [rmem_max] if rmem_max else []}
    # A container has no net.core limits: judge the others.
    known = {name: int(numbers[0]) for name, numbers in limits.items() if numbers and numbers[0].isdigit()}
    found = ", ".join(f"{name} {_size(number)}" for name, number in known.items()) or "not readable"
    small = [name for name in ("tcp_wmem", "tcp_rmem") if known.get(name, 0) < 4 * MIB]
    if not small:
        return Check("tcp buffers", "ok", found)
    advice = "for long fat pipes: sysctl -w " + " ".join(f"net.ipv4.{name}='4096 131072 16777216'" for name in small)
    return Check("tcp buffers", "warn", found, advice)


def judge_congestion(available: str) -> Check:
    if {"cubic", "bbr"} & set(available.split()):
        return Check("congestion", "ok", available)
    return Check("congestion", "warn", available or "not readable", "modprobe tcp_cubic or tcp_bbr for long links")


def judge_huge_pages(enabled: str) -> Check:
    if not enabled or "[never]" in enabled:
        advice = "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled: large buffers touch fewer pages"
        return Check("huge pages", "warn", enabled or "not readable", advice)
    return Check("huge pages", "ok", enabled)


def check_master(addresses: Sequence[str], token: bytes) -> Check:
    try:
        where, status = master_client.ask(
            addresses, token, lambda client: (client.address, client.status()), timeout_s=3.0
        )
    except RingfoldError as error:
        advice = "is it running there, does a firewall let the port through, is --token-file the run's token?"
        return Check("master", "fail", str(error), advice)
    found = f"{where} answers: {status.world.peers} peers in {status.world.groups} groups"
    return Check("master", "ok", found)


def _size(count: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.3g} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"
