"""Nodes in one process that probe each other over real UDP, and rounds over them, as production does it.

Drawing, probing, fitting and calculating are production's; only the way of a report to the master is left out: this
process asks each prober for its window, one after the other, which takes microseconds. Nodes are on loopback, or each
on a host of its own in a shaped network.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass

import numpy as np

from ringfold.probe.base import EdgeWindow
from ringfold.probe.fit import fit
from ringfold.probe.graph.draw import draw
from ringfold.probe.models import Sample
from ringfold.probe.nodes.file import key_of
from ringfold.probe.nodes.prober import ProbeSocket, ProbeStats, raw_now
from ringfold.probe.rounds.calculation import Calculation
from ringfold.probe.rounds.events import Calculated
from ringfold.probe.rounds.settings import RoundSettings
from ringfold.tools.bench.clock_truth import INSTANTS, Clocks, NodeErrors, edge_outside, node_errors, with_truth
from ringfold.tools.shaped import ShapedNetwork
from ringfold.wire.probing import EdgeFit, Neighbour, NodeId

Wait = Callable[[float], None]
"""Lets so many seconds pass."""


@dataclass(frozen=True, slots=True)
class RoundSeen:
    """One round: its windows beside the truth, what production made of them, and how far off that is."""

    samples: list[Sample]
    fits: list[EdgeFit]
    """In the order of the samples."""
    result: Calculated
    nodes: NodeErrors
    edges_outside: int
    """How many corridors (of an edge at an instant) do not contain the truth."""


@dataclass(frozen=True, slots=True)
class ColumnSeen:
    """All rounds under one condition, and what probing cost each node."""

    rounds: list[RoundSeen]
    cpu_shares: list[float]
    """Of one core, while it probed; by node."""
    stats: list[ProbeStats]
    """By node."""
    out_edges: int
    in_edges: int
    """What the node with the most has."""


class Nodes:
    """One prober for each virtual clock, as a context. The graph is drawn, and nobody sends yet."""

    def __init__(self, clocks: Clocks, settings: RoundSettings, network: ShapedNetwork | None = None) -> None:
        self._clocks, self._settings = clocks, settings
        self.probers: dict[NodeId, ProbeSocket] = {}
        self._stack = ExitStack()
        try:
            for host, (node, clock) in enumerate(sorted(clocks.items())):
                with network.within(host) if network else nullcontext():
                    prober = ProbeSocket(
                        node,
                        network.address(host) if network else "127.0.0.1",
                        offset_ns=clock.offset_ns,
                        drift_ppb=clock.drift_ppb,
                        anchor_ns=clock.anchor_ns,
                    )
                self.probers[node] = self._stack.enter_context(prober)
            self.edges = draw(sorted(clocks), (), settings.neighbours, settings.seed)
            self._introduce(network)
        except BaseException:
            self._stack.close()
            raise

    def __enter__(self) -> "Nodes":
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _introduce(self, network: ShapedNetwork | None) -> None:
        """Tell everybody whom it probes and who may probe it."""
        known = {
            node: Neighbour(node, f"node-{node}", network.address(host) if network else "127.0.0.1", prober.port)
            for host, (node, prober) in enumerate(self.probers.items())
        }
        key = key_of(b"bench clock")
        for node, prober in self.probers.items():
            out = [known[dst] for src, dst in self.edges if src == node]
            into = [known[src] for src, dst in self.edges if dst == node]
            prober.configure(key, out, into)

    def rounds(self, count: int, wait: Wait, advance: Callable[[], None]) -> ColumnSeen:
        """Probe for `count` windows without a pause between them, and calculate each as soon as it is over."""
        cadence = self._settings.cadence
        calculation = Calculation(self._settings)
        probers = list(self.probers.values())
        history: object = None
        seen: list[RoundSeen] = []
        began_ns, before_ns = raw_now(), [prober.stats().cpu_ns for prober in probers]
        for prober in probers:
            prober.resume(cadence.gap_us, cadence.pause_us)
        for _ in range(count):
            opened_ns = raw_now()
            wait(cadence.window_ms / 1_000)
            instants = [round(instant) for instant in np.linspace(opened_ns, raw_now(), INSTANTS)]
            windows = [window for prober in probers for window in prober.rotate()]
            utc = {prober.node: prober.utc() for prober in probers}
            fits = [fit(window) for window in windows]
            result = calculation(fits, utc, history)
            history = result.history
            seen.append(self._judge(windows, fits, result, instants))
            advance()
        took_ns, stats = raw_now() - began_ns, [prober.stats() for prober in probers]
        shares = [(now.cpu_ns - before) / took_ns for now, before in zip(stats, before_ns, strict=True)]
        ends = [Counter(ends).most_common(1)[0][1] for ends in zip(*self.edges, strict=True)]
        return ColumnSeen(seen, shares, stats, out_edges=ends[0], in_edges=ends[1])

    def _judge(
        self, windows: Sequence[EdgeWindow], fits: list[EdgeFit], result: Calculated, instants: Sequence[int]
    ) -> RoundSeen:
        samples = [with_truth(window, self._clocks) for window in windows]
        outside = sum(edge_outside(sample, found) for sample, found in zip(samples, fits, strict=True))
        nodes = node_errors(result.nodes, result.reference, self._clocks, instants)
        return RoundSeen(samples, fits, result, nodes, outside)
