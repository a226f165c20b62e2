"""Being told by the kernel that a file was touched (Linux). Elsewhere there is no such bell, and one polls."""

import ctypes
import os
import select
import struct
import sys

_IN_MODIFY, _IN_ATTRIB, _IN_CLOSE_WRITE = 0x2, 0x4, 0x8
_IN_NONBLOCK, _IN_CLOEXEC = os.O_NONBLOCK, getattr(os, "O_CLOEXEC", 0)
_BUFFER = 64 * (struct.calcsize("iIII") + 256)


class FileBell:
    """Rings when a file is written to or its times are set; it hears everything from its making on."""

    def __init__(self, path: str) -> None:
        """Raises OSError where the kernel has no such bell, or none to spare."""
        if sys.platform != "linux":
            raise OSError("inotify is Linux")
        libc = ctypes.CDLL(None, use_errno=True)
        self._fd = libc.inotify_init1(_IN_NONBLOCK | _IN_CLOEXEC)
        if self._fd < 0:
            raise OSError(ctypes.get_errno(), "inotify_init1")
        if libc.inotify_add_watch(self._fd, os.fsencode(path), _IN_MODIFY | _IN_ATTRIB | _IN_CLOSE_WRITE) < 0:
            number = ctypes.get_errno()
            os.close(self._fd)
            raise OSError(number, os.strerror(number), path)
        self._poll = select.poll()
        self._poll.register(self._fd, select.POLLIN)

    def wait(self, timeout_s: float) -> bool:
        """Whether it rang. All rings so far count as one."""
        if not self._poll.poll(max(0.0, timeout_s) * 1_000):
            return False
        try:
            os.read(self._fd, _BUFFER)
        except BlockingIOError:
            return False
        return True

    def close(self) -> None:
        os.close(self._fd)
