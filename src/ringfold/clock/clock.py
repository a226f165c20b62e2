"""The global clock that users hold, as `run.clock`."""

from collections.abc import Callable

from ringfold.clock.model import ClockModel, Instant
from ringfold.wire.probing import NodeClock


class GlobalClock:
    """The time that all nodes of a run share, with its error: nanoseconds that read like Unix time.

    It is kept by probing, and is ready after the first round. Safe to use from any thread.
    """

    def __init__(self, model: ClockModel, read_ns: Callable[[], int]) -> None:
        """`read_ns` reads the node's own clock, the one that probing measures (CLOCK_MONOTONIC_RAW)."""
        self._model, self._read_ns = model, read_ns

    @property
    def is_ready(self) -> bool:
        """Whether there has been a round; `now` and `to_global` raise `ClockNotReady` before."""
        return self._model.newest is not None

    def now(self) -> Instant:
        """The time now. It never goes back and never jumps: a correction is spread over some time.

        `earliest` and `latest` bound the truth, including what is left of a correction. They widen when rounds stop.
        """
        return self._model.read(self._read_ns())

    def to_global(self, ns: int) -> Instant:
        """The time at which the node's clock (CLOCK_MONOTONIC_RAW) read `ns`, by the rounds around it.

        More exact than `now` for what lies in the past, because the rounds after it are used too. The same `ns` may
        give a slightly different answer once another round has come, until two rounds enclose it.
        """
        return self._model.to_global(ns)

    @property
    def uncertainty_ns(self) -> int:
        """How far `now()` may be off."""
        return self.now().error_ns

    @property
    def newest(self) -> NodeClock | None:
        """The mapping of the newest round, as it came from the calculation; None before the first."""
        return self._model.newest

    def __repr__(self) -> str:
        if not self.is_ready:
            return "<GlobalClock: not ready, no round of probing yet>"
        return f"<GlobalClock: +-{self.uncertainty_ns} ns>"
