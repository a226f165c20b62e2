"""A lock file by which processes of one user on one host elect a host process and find its address.

The file is in a directory that only its user can read or write. The process that holds the lock is the host, and writes
its address into the file. The kernel releases the lock when the host process ends, however it ends, and a forked child
does not hold it. So the address of a dead host is never used.
"""

import contextlib
import fcntl
import os
import stat
from pathlib import Path

from ringfold.errors import ConfigError
from ringfold.runtime.process import close_on_fork, is_process_gone, keep_on_fork, process_identity

_MAX_BYTES = 4_096


class Rendezvous:
    """One such file. Call `close` at the end."""

    def __init__(self, directory: Path, name: str) -> None:
        """Raises ConfigError if the directory is not private to this user."""
        _make_private(directory)
        self.path = directory / name
        try:
            self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise ConfigError(f"{self.path} cannot be used: {error.strerror or error}") from None
        self._is_host = False

    def take(self) -> bool:
        """Try to become the host; whether it succeeded."""
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        self._is_host = True
        close_on_fork(self._fd)
        self.withdraw()
        return True

    def announce(self, address: str) -> None:
        """Publish the address of the host."""
        assert self._is_host
        os.pwrite(self._fd, f"{process_identity()}\n{address}\n".encode(), 0)

    def withdraw(self) -> None:
        """Remove the address of the host."""
        os.ftruncate(self._fd, 0)

    def address(self) -> str:
        """The address of the host; empty if there is no host, or it has not published one."""
        identity, _, rest = os.pread(self._fd, _MAX_BYTES, 0).decode(errors="replace").partition("\n")
        address, end, _ = rest.partition("\n")
        return address if end and not is_process_gone(identity) else ""

    def close(self) -> None:
        """Release the lock, and close the file."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            if self._is_host:
                fcntl.flock(fd, fcntl.LOCK_UN)  # also for a child that was forked a moment ago
                keep_on_fork(fd)
            os.close(fd)


def _make_private(directory: Path) -> None:
    with contextlib.suppress(FileExistsError):
        try:
            directory.mkdir(mode=0o700, parents=True)
        except FileExistsError:
            raise
        except OSError as error:
            raise ConfigError(f"{directory} cannot be created: {error.strerror or error}") from None
    found = directory.lstat()
    is_private = stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o077
    if not is_private:
        raise ConfigError(f"{directory} is not a private directory of this user: remove it, or chmod 700 it")
