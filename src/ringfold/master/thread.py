"""A master inside somebody else's program: a thread with an event loop of its own."""

from collections.abc import Callable, Sequence
from types import TracebackType

from ringfold.master.server import LEASE_S, MasterServer
from ringfold.master.settings import MasterSettings
from ringfold.runtime import asyncio_support
from ringfold.wire.notices import Notice


class MasterThread:
    """A master in a thread of its own: for `rf.join(host_master=True)`, notebooks and tests. Use it with `with`."""

    def __init__(
        self,
        settings: MasterSettings | None = None,
        listen: Sequence[str] = ("127.0.0.1:0",),
        token: bytes = b"",
        insecure: bool = False,
        on_notice: Callable[[Notice], None] | None = None,
        journal: str | None = None,
        lease_s: float = LEASE_S,
        *,
        alone: bool = False,
    ) -> None:
        """Returns once it listens; raises OSError if it cannot."""
        used = settings or MasterSettings()
        self._server = MasterServer(used, listen, token, insecure, on_notice, journal, lease_s, alone=alone)
        self._thread = asyncio_support.LoopThread("ringfold-master", self._server.serve)
        self._thread.wait_ready()

    @property
    def address(self) -> str:
        """The first address it listens on."""
        return self._server.addresses[0]

    @property
    def addresses(self) -> list[str]:
        return list(self._server.addresses)

    def stop(self) -> None:
        """End the master and wait until its sockets are closed. May be called again."""
        self._thread.call(self._server.stop)
        self._thread.join()

    def __enter__(self) -> "MasterThread":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
