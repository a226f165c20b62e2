"""Programs of one host: Unix sockets and their credentials, private directories, and wake-ups by the kernel."""

import contextlib
import ctypes
import os
import select
import socket
import stat
import struct
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ringfold.errors import ConfigError
from ringfold.runtime.process import close_on_fork, keep_on_fork

BACKLOG = 1_024
"""How many connections may wait to be accepted. (The default of asyncio is lower.)"""
_CREDENTIALS = struct.Struct("3i")
_IN_MODIFY = 0x2
_IN_ATTRIB = 0x4
_IN_CLOSE_WRITE = 0x8
_INOTIFY_BUFFER_BYTES = 64 * (struct.calcsize("iIII") + 256)


@dataclass(frozen=True, slots=True)
class Credentials:
    """The process at the other end of a Unix socket, as the kernel reports it."""

    pid: int
    uid: int
    gid: int


def credentials(sock: Any) -> Credentials:  # noqa: ANN401 - a socket, or asyncio's wrapper of one
    """The credentials of the remote process when it connected (SO_PEERCRED)."""
    return Credentials(*_CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)))


def own_directory(path: Path, mode: int) -> None:
    """Make `path` a directory of this user with this mode; raises ConfigError if another user could write to it.

    An existing one must be a real directory and belong to this user. Its mode is set.
    """
    try:
        path.mkdir(mode=0o700, parents=True)
    except FileExistsError:
        pass
    except OSError as error:
        raise ConfigError(f"cannot make the directory {path}: {error.strerror or error}") from None
    about = path.lstat()
    if not stat.S_ISDIR(about.st_mode):
        raise ConfigError(f"{path} is not a directory (a link to one does not count)")
    if about.st_uid != os.geteuid():
        raise ConfigError(f"the directory {path} belongs to user {about.st_uid}: choose another, or remove it")
    os.chmod(path, mode)


def distrust(path: Path) -> str:
    """Why a file or directory of another program is not trusted; empty if it is.

    It is trusted if it belongs to root or to this user, and no other user can write to it.
    """
    try:
        about = path.lstat()
    except OSError as error:
        return f"{path}: {error.strerror or error}"
    if about.st_uid not in (0, os.geteuid()):
        return f"{path} belongs to user {about.st_uid}"
    if stat.S_ISLNK(about.st_mode):
        return f"{path} is a link"
    if about.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not stat.S_ISSOCK(about.st_mode):
        return f"others may write to {path}"
    return ""


def identity(path: Path) -> tuple[int, int, int] | None:
    """Device, inode and size of the file of this name; None if there is none."""
    try:
        about = path.lstat()
    except OSError:
        return None
    return about.st_dev, about.st_ino, about.st_size


def touch(path: Path) -> None:
    """Set the times of a file, so that programs that remove old files keep it. A removed file is not created again."""
    with contextlib.suppress(OSError):
        os.utime(path, follow_symlinks=False)


def listen_unix(path: Path, mode: int) -> socket.socket:
    """Listen at `path`, and replace an existing socket: the caller holds the lock that makes it the only listener."""
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISSOCK(path.lstat().st_mode):
            raise ConfigError(f"{path} exists and is not a socket")
        path.unlink()
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.bind(os.fspath(path))
        os.chmod(path, mode)
        sock.listen(BACKLOG)
        sock.setblocking(False)
    except OSError as error:
        sock.close()
        raise ConfigError(f"cannot listen at {path}: {error.strerror or error}") from None
    except BaseException:
        sock.close()
        raise
    return sock


class WakeEvent:
    """Wakes a thread that waits in `LocalConnection.wait` (eventfd). Any thread may set it, any number of times.

    The copy in a forked child has no effect.
    """

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        close_on_fork(self.fd)

    def set(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_write(self.fd, 1)

    def wait(self, timeout_s: float | None) -> bool:
        """Whether it was set before the timeout. Clears it."""
        poll = select.poll()
        poll.register(self.fd, select.POLLIN)
        is_set = bool(poll.poll(None if timeout_s is None else max(0, int(timeout_s * 1_000))))
        self.clear()
        return is_set

    def clear(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.fd)

    def close(self) -> None:
        keep_on_fork(self.fd)
        os.close(self.fd)


class LocalConnection:
    """A stream to a program of this host. Only `wait` blocks. Raises OSError when the connection is broken."""

    def __init__(self, path: Path) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._queued = bytearray()
        try:
            self._socket.setblocking(False)
            self._socket.connect(os.fspath(path))
        except BaseException:
            self._socket.close()
            raise

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def queued(self) -> int:
        """Bytes that wait to be sent."""
        return len(self._queued)

    def credentials(self) -> Credentials:
        return credentials(self._socket)

    def send(self, chunk: bytes) -> None:
        """Queue bytes, and send what the kernel takes at once; `wait` sends the rest.

        If the remote side has closed the connection, the bytes are dropped: its last message may be the reason, and
        `wait` returns it first.
        """
        self._queued += chunk
        self._flush()

    def _flush(self) -> None:
        while self._queued:
            try:
                sent = self._socket.send(memoryview(self._queued)[: 1 << 18])
            except BlockingIOError:
                return
            except BrokenPipeError:
                self._queued.clear()
                return
            del self._queued[:sent]

    def wait(self, timeout_s: float | None, wake: WakeEvent | None = None) -> bytes | None:
        """Received bytes; empty at the end of the stream, None at the timeout or when `wake` was set first."""
        poll = select.poll()
        poll.register(self._socket, select.POLLIN | (select.POLLOUT if self._queued else 0))
        if wake is not None:
            poll.register(wake.fd, select.POLLIN)
        ready = dict(poll.poll(None if timeout_s is None else max(0, int(timeout_s * 1_000 + 0.999))))
        if wake is not None and wake.fd in ready:
            wake.clear()
        state = ready.get(self._socket.fileno(), 0)
        if state & select.POLLOUT:
            self._flush()
        if not state & ~select.POLLOUT:
            return None
        try:
            return self._socket.recv(1 << 18)
        except BlockingIOError:
            return None

    def close(self) -> None:
        self._socket.close()


class FileWatch:
    """Reports that a file was written to or its times were set (inotify), from its creation on."""

    def __init__(self, path: str) -> None:
        """Raises OSError where the kernel has no inotify, or no watch left."""
        if sys.platform != "linux":
            raise OSError("inotify is Linux")
        libc = ctypes.CDLL(None, use_errno=True)
        self._fd = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        if self._fd < 0:
            raise OSError(ctypes.get_errno(), "inotify_init1")
        if libc.inotify_add_watch(self._fd, os.fsencode(path), _IN_MODIFY | _IN_ATTRIB | _IN_CLOSE_WRITE) < 0:
            number = ctypes.get_errno()
            os.close(self._fd)
            raise OSError(number, os.strerror(number), path)
        self._poll = select.poll()
        self._poll.register(self._fd, select.POLLIN)

    def wait(self, timeout_s: float) -> bool:
        """Whether the file changed before the timeout, or since the last call. Several changes count as one."""
        if not self._poll.poll(max(0.0, timeout_s) * 1_000):
            return False
        try:
            os.read(self._fd, _INOTIFY_BUFFER_BYTES)
        except BlockingIOError:
            return False
        return True

    def close(self) -> None:
        os.close(self._fd)
