"""`rf.Prober`: probing from a Python program that does not train.

With a master the program is a node of its run, beside the peers that probe: it has the same rounds, the same global
clock, and the same callbacks.

    with rf.Prober(master="10.0.0.1:48148", token_file="run.token") as prober:
        prober.on_round(lambda summary: print(summary.round, len(summary.edges)))
        window = prober.window()                  # the next one that ends
        print(prober.clock.now(), window.fits)

Without a run every node is made from the same list of nodes, and fits its own windows.

    with rf.Prober(nodes={"alpha": "10.0.0.1:48149", "beta": "10.0.0.2:48149"}, me="alpha", token="...") as prober:
        for fit in prober.window().fits:
            print(fit.dst, fit.delay_p50_ns, fit.alpha, fit.beta_ns)
"""

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

from ringfold import config
from ringfold.clock.global_clock import ClockModel, GlobalClock
from ringfold.errors import MasterUnreachable, UsageError
from ringfold.probe.fit import ESTIMATORS
from ringfold.probe.nodes.alone import StandaloneNode
from ringfold.probe.nodes.callbacks import OnClock, OnRound, OnWindow, ProbeEvents, ProbeWindow
from ringfold.probe.nodes.joined import JoinedNode, NodeRequest, make_node
from ringfold.probe.nodes.nodes_file import Nodes
from ringfold.probe.nodes.prober import ProbeSocket, ProbeStats
from ringfold.runtime import master_client
from ringfold.runtime.asyncio_support import LoopThread
from ringfold.wire.probing import Cadence, Neighbour, NodeClock, NodeId, ProbeAnswer, RoundSummary
from ringfold.wire.status import Status

Result = TypeVar("Result")

MAX_WINDOW_S = 660.0
"""A window may take ten minutes: by default a wait for one, or for a round, ends after this."""

_AT_THE_MASTER: Mapping[str, object] = {
    "insecure": False,
    "listeners": (),
    "neighbours": 4,
    "seed": 0,
    "graph": None,
    "gap_us": Cadence().gap_us,
    "pause_us": Cadence().pause_us,
    "window_ms": Cadence().window_ms,
}
"""Arguments of nodes without a run, with their defaults; a run has them as settings of its master."""


class Prober:
    """A process that probes others and responds to their probes, and does not train.

    With `master` it is a node of the run `run`, as `ringfold probe --master` is: the master decides which node probes
    which, and when windows begin and end; while it is away, the node continues alone. `master` is an address, or
    several; `me` is the name that others see, by default the host's name with the process id; `listen_only` only
    responds. The constructor returns when the master has accepted the node, or raises MasterUnreachable after
    `timeout_s`. What is left out comes from the environment, the settings file, or a default (see `ringfold config`).

    Without a master, `nodes` is a mapping from names to addresses, or a TOML file (docs/guides/probing.md shows one),
    the same for every node; `me` is this node's name, by default the host's. Beyond loopback it needs a `token`, the
    same for every node, or `insecure`. `graph` lists for each node, by name, whom it probes; else the graph is drawn,
    from `seed`, with `neighbours` each. It responds from its construction on, and probes while a window is open.
    """

    def __init__(
        self,
        nodes: Mapping[str, str] | str | Path | Nodes | None = None,
        me: str | None = None,
        *,
        master: str | Sequence[str] | None = None,
        run: str | None = None,
        token: str | bytes | None = None,
        token_file: str | Path | None = None,
        listen_only: bool = False,
        timeout_s: float | None = None,
        insecure: bool = False,
        listeners: Sequence[str] = (),
        neighbours: int = 4,
        seed: int = 0,
        graph: Mapping[str, Sequence[str]] | None = None,
        gap_us: int = Cadence().gap_us,
        pause_us: int = Cadence().pause_us,
        window_ms: int = Cadence().window_ms,
        estimator: str = "auto",
        offset_ns: int = 0,
        drift_ppb: int = 0,
    ) -> None:
        if (nodes is None) == (master is None):
            raise UsageError("a Prober needs either `master`, the address of a run's master, or `nodes`, not both")
        if estimator not in ESTIMATORS:
            raise UsageError(f"there is no estimator {estimator!r}; there are {', '.join(ESTIMATORS)}")
        secret = token.encode() if isinstance(token, str) else token
        model = ClockModel()
        self._standalone: StandaloneNode | None = None
        self._in_run: _NodeInRun | None = None
        if nodes is not None:
            listens = listen_only or None
            _refuse("only with `master`", run=run, token_file=token_file, timeout_s=timeout_s, listen_only=listens)
            self._standalone = StandaloneNode(
                nodes, me, token=secret or b"", insecure=insecure, listeners=listeners, neighbours=neighbours,
                seed=seed, graph=graph, gap_us=gap_us, pause_us=pause_us, window_ms=window_ms, estimator=estimator,
                offset_ns=offset_ns, drift_ppb=drift_ppb,
            )  # fmt: skip
        else:
            given = {
                "insecure": insecure, "listeners": tuple(listeners), "neighbours": neighbours, "seed": seed,
                "graph": graph, "gap_us": gap_us, "pause_us": pause_us, "window_ms": window_ms,
            }  # fmt: skip
            changed = {name: value for name, value in given.items() if value != _AT_THE_MASTER[name]}
            _refuse("with `master` these are settings of the master", **changed)
            masters = [part.strip() for part in master.split(",")] if isinstance(master, str) else master
            settings = config.load(
                {"master": masters, "run": run, "token_file": token_file, "join_timeout_s": timeout_s}
            )
            request = NodeRequest(
                name=me or "", token=secret, listen_only=listen_only, estimator=estimator, offset_ns=offset_ns,
                drift_ppb=drift_ppb,
            )  # fmt: skip
            self._in_run = _NodeInRun(settings, request, model)
        self._clock = GlobalClock(model, self.socket.now)

    # This node

    @property
    def node(self) -> NodeId:
        """This node's id."""
        return self.socket.node

    @property
    def me(self) -> Neighbour:
        """This node, as others reach it."""
        return self._standalone.me if self._standalone else self._run_node.facts

    @property
    def names(self) -> dict[NodeId, str]:
        """Every node's name. In a run: of the nodes of the newest round."""
        if self._standalone is not None:
            return self._standalone.names
        summary = self.summary()
        named = {int(node): name for node, name in summary.names.items()} if summary else {}
        return {**named, self.node: self.me.name}

    @property
    def is_listener(self) -> bool:
        """Whether it only responds: then it has no windows of its own."""
        return self._standalone.is_listener if self._standalone else self._run_node.is_listener

    @property
    def socket(self) -> ProbeSocket:
        """The socket that probes."""
        return self._standalone.socket if self._standalone else self._run_node.node.shell.prober

    @property
    def nodes(self) -> Nodes:
        """Without a run: the list of nodes that this one was made from."""
        return self._made_from_nodes("nodes").nodes

    @property
    def by_id(self) -> dict[NodeId, Neighbour]:
        """Without a run: all nodes, with literal addresses."""
        return self._made_from_nodes("by_id").by_id

    @property
    def out(self) -> list[Neighbour]:
        """Without a run: the nodes that this node probes."""
        return self._made_from_nodes("out").out

    # Windows

    def window(self, seconds: float | None = None) -> ProbeWindow:
        """One window with its fits. Blocks until it has ended.

        Without a run: probe for so long, by default `window_ms`. In a run: the next window that ends; the master says
        when, and `seconds` limits the wait (11 minutes by default), with DeadlineExceeded.
        """
        if self._standalone is not None:
            return self._standalone.window(seconds)
        return next(self._run_node.windows(MAX_WINDOW_S if seconds is None else seconds))

    def windows(self) -> Iterator[ProbeWindow]:
        """Windows without end: one after another, as long as the caller iterates."""
        if self._standalone is not None:
            return self._standalone.windows()
        return self._run_node.windows(MAX_WINDOW_S)

    def begin(self) -> None:
        """Without a run: open a window, and probe from now on."""
        self._made_from_nodes("begin").begin()

    def end(self) -> ProbeWindow:
        """Without a run: close the window, stop probing, and fit."""
        return self._made_from_nodes("end").end()

    # Rounds and the clock

    @property
    def clock(self) -> GlobalClock:
        """Global time, the same on all nodes of a run; ready after the first round. Without a run it never is."""
        return self._clock

    def on_window(self, callback: OnWindow) -> None:
        """In a run: call it with each of this node's windows from now on.

        Callbacks run in a thread of their own, one after another. Those that fall behind by 64 events miss the oldest.
        """
        self._run_node.events.on_window(callback)

    def on_clock(self, callback: OnClock) -> None:
        """In a run: call it with each new mapping of this node's clock to global time, one a round."""
        self._run_node.events.on_clock(callback)

    def on_round(self, callback: OnRound) -> None:
        """In a run: call it with the summary of each round, which is requested from the master for that."""
        self._run_node.events.on_round(callback)

    def round(self, label: str = "", timeout_s: float = MAX_WINDOW_S) -> RoundSummary:
        """In a run: end the present window now, and return the round's summary, under this label.

        It takes a second or two where a window can be ended, else up to a whole one. UsageError if there is no node to
        probe, or the run's rounds are not the master's.
        """
        return self._run_node.request_round(label, timeout_s)

    def summary(self) -> RoundSummary | None:
        """In a run: the newest round, read from the master; None before the first."""
        return self._run_node.fetch()

    def status(self) -> Status:
        """In a run: what `ringfold status` shows. Its links have the rates that peers have measured."""
        return self._run_node.status()

    # The end

    def stats(self) -> ProbeStats:
        """Counts of packets since construction."""
        return self.socket.stats()

    def close(self) -> None:
        """Leave the run, and close the socket. May be called again."""
        if self._standalone is not None:
            self._standalone.close()
        else:
            self._run_node.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def _run_node(self) -> "_NodeInRun":
        if self._in_run is None:
            raise UsageError("this prober has no run: make it with `master`")
        return self._in_run

    def _made_from_nodes(self, name: str) -> StandaloneNode:
        if self._standalone is None:
            raise UsageError(f"{name}: the master of the run decides that, for all nodes")
        return self._standalone


def _refuse(why: str, **arguments: object) -> None:
    """UsageError if one of these arguments was given: they have no effect here."""
    if wrong := [name for name, value in arguments.items() if value is not None]:
        raise UsageError(f"{', '.join(wrong)}: {why}")


class _NodeInRun:
    """A node in a thread with an event loop of its own."""

    def __init__(self, settings: config.Resolved, request: NodeRequest, model: ClockModel) -> None:
        self._token = settings.token() if request.token is None else request.token
        self._run = settings.text("run")
        self._timeout_s = settings.number("join_timeout_s")
        self._model = model
        self._stop: asyncio.Event | None = None
        self._connected: asyncio.Event | None = None
        self.is_listener = request.listen_only
        self.events = ProbeEvents(self.fetch)
        self.node: JoinedNode = make_node(
            settings, request, self._adopt, on_connected=self._note_connected, on_window=self.events.publish
        )
        self._thread = LoopThread("ringfold-prober", self._serve)
        self._thread.wait_ready()

    @property
    def facts(self) -> Neighbour:
        prober = self.node.shell.prober
        return Neighbour(prober.node, self.node.name, self.node.addresses[0], prober.port)

    def windows(self, timeout_s: float) -> Iterator[ProbeWindow]:
        if self.is_listener:
            raise UsageError("this prober only listens: it has no windows")
        return self.events.windows(timeout_s)

    def fetch(self) -> RoundSummary | None:
        return self._ask(lambda client: client.probe("show").summary)

    def status(self) -> Status:
        return self._ask(lambda client: client.status())

    def request_round(self, label: str, timeout_s: float) -> RoundSummary:
        def request(client: master_client.MasterClient) -> ProbeAnswer:
            client.timeout_s = timeout_s
            return client.probe("round", label)

        answer = self._ask(request)
        if not answer.done or answer.summary is None:
            raise UsageError(f"there is no round: {answer.text}")
        return answer.summary

    def close(self) -> None:
        self.events.close()
        self._thread.call(self._end)
        self._thread.join()

    def _ask(self, request: Callable[[master_client.MasterClient], Result]) -> Result:
        """A relay may be first in the list of addresses: the request goes to the first that accepts it."""
        return master_client.ask(self.node.masters, self._token, request, run=self._run)

    def _end(self) -> None:
        if self._stop is not None:
            self._stop.set()

    async def _serve(self, ready: Callable[[], None]) -> None:
        """Run the node until `close`. It is ready when a master has accepted it, and fails if none does in time."""
        self._stop, self._connected = asyncio.Event(), asyncio.Event()
        running = asyncio.create_task(self.node.run(self._stop), name="ringfold prober")
        connecting = asyncio.create_task(self._connected.wait(), name="ringfold prober connecting")
        try:
            await asyncio.wait((running, connecting), timeout=self._timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if not connecting.done() and not running.done():
                why = self.node.away_reason or f"no answer within {self._timeout_s:g} s"
                raise MasterUnreachable(", ".join(self.node.masters), why)
            if not running.done():
                ready()
            await running
        finally:
            connecting.cancel()
            self._stop.set()
            await asyncio.gather(running, connecting, return_exceptions=True)

    def _note_connected(self, where: str, node: NodeId) -> None:
        if self._connected is not None:
            self._connected.set()

    def _adopt(self, clock: NodeClock) -> None:
        if self._model.adopt(clock, self.node.shell.prober.now()):
            self.events.publish(clock)
