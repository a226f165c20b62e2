"""Probing without a run: every node is made from the same list of nodes, and fits its own windows."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from ringfold.errors import ConfigError, UsageError
from ringfold.probe.fit import fit
from ringfold.probe.nodes.callbacks import ProbeWindow
from ringfold.probe.nodes.nodes_file import Nodes, make_nodes, read_nodes
from ringfold.probe.nodes.prober import ProbeSocket, ProbeStats
from ringfold.runtime import network, threads
from ringfold.wire.probing import Cadence, Neighbour, NodeId

NEIGHBOURS = 4
"""How many others a node probes by default."""


class StandaloneNode:
    """A node that probes others and responds to their probes, without a master.

    `nodes` is a mapping from names to addresses, or a TOML file (docs/guides/probing.md shows one), the same for every
    node; `me` is this node's name, by default the host's. Beyond loopback it needs a `token`, the same for every node,
    or `insecure`. It responds from its construction on, and probes while a window is open.
    """

    def __init__(
        self,
        nodes: Mapping[str, str] | str | Path | Nodes,
        me: str | None = None,
        *,
        token: str | bytes = b"",
        insecure: bool = False,
        listeners: Sequence[str] = (),
        neighbours: int = NEIGHBOURS,
        seed: int = 0,
        graph: Mapping[str, Sequence[str]] | None = None,
        gap_us: int = Cadence().gap_us,
        pause_us: int = Cadence().pause_us,
        window_ms: int = Cadence().window_ms,
        estimator: str = "auto",
        offset_ns: int = 0,
        drift_ppb: int = 0,
    ) -> None:
        if window_ms < 1:
            raise UsageError(f"window_ms must be at least 1, not {window_ms}")
        secret = token.encode() if isinstance(token, str) else token
        if isinstance(nodes, Nodes | str | Path):
            given = {
                "token": secret, "insecure": insecure, "listeners": tuple(listeners),
                "neighbours": neighbours != NEIGHBOURS, "seed": seed, "graph": graph is not None,
            }  # fmt: skip
            if useless := [name for name, value in given.items() if value]:
                raise UsageError(f"{', '.join(useless)}: the file of the nodes says that")
            self.nodes = nodes if isinstance(nodes, Nodes) else read_nodes(Path(nodes))
        else:
            self.nodes = make_nodes(
                nodes, secret, listeners=listeners, neighbours=neighbours, seed=seed, insecure=insecure, graph=graph
            )
        self.me = self.nodes.named(me or network.host_name())
        self._gap_us = gap_us
        self._pause_us = pause_us
        self._window_ms = window_ms
        self._estimator = estimator
        self._number = 0
        self.by_id = by_id = {node: _resolve_address(facts) for node, facts in self.nodes.by_id.items()}
        """All nodes, with literal addresses."""
        mine = by_id[self.me.node]
        edges = self.nodes.edges()
        self.out = [by_id[dst] for src, dst in edges if src == mine.node]
        """The nodes that this node probes."""
        into = [by_id[src] for src, dst in edges if dst == mine.node]
        self.socket = ProbeSocket(mine.node, mine.address, mine.port, offset_ns=offset_ns, drift_ppb=drift_ppb)
        try:
            self.socket.configure(self.nodes.key, self.out, into)
        except BaseException:
            self.socket.close()
            raise

    @property
    def node(self) -> NodeId:
        """This node's id."""
        return self.me.node

    @property
    def names(self) -> dict[NodeId, str]:
        """Every node's name."""
        return {node: facts.name for node, facts in self.nodes.by_id.items()}

    @property
    def is_listener(self) -> bool:
        """Whether it only responds: then its windows have no edge."""
        return not self.out

    def window(self, seconds: float | None = None) -> ProbeWindow:
        """Probe for one window, by default of `window_ms`, and fit it. Blocks until then."""
        self.begin()
        threads.pause(self._window_ms / 1_000 if seconds is None else seconds)
        return self.end()

    def windows(self) -> Iterator[ProbeWindow]:
        """Windows without end: one after another, as long as the caller iterates."""
        while True:
            yield self.window()

    def begin(self) -> None:
        """Open a window: probe from now on."""
        self._begin_ns = self.socket.now()
        self.socket.resume(self._gap_us, self._pause_us)

    def end(self) -> ProbeWindow:
        """Close the window, stop probing, and fit."""
        self.socket.pause()
        end_ns = self.socket.now()
        edges = self.socket.rotate()
        self._number += 1
        fits = [fit(edge, self._estimator) for edge in edges]
        return ProbeWindow(self._number, self._begin_ns, end_ns, self.socket.utc(), fits, edges)

    def stats(self) -> ProbeStats:
        """Counts of packets since construction."""
        return self.socket.stats()

    def close(self) -> None:
        self.socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _resolve_address(node: Neighbour) -> Neighbour:
    """The node with its address as a literal."""
    try:
        literal = network.literals(node.address, node.port)[0]
    except OSError as error:
        raise ConfigError(f"node {node.name}: {node.address!r} is not known ({error})") from None
    return Neighbour(node.node, node.name, literal, node.port)
