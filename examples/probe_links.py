"""Draw the links of a run: `python examples/probe_links.py MASTER [ROUNDS [PICTURE.png]]`.

This process does not train. It is a node of the run, probes the others and responds to them; so it has the same rounds
and the same clock as the peers that probe. After each round it prints three matrices, with a row for each node that
sends and a column for each that receives:

    delay   half of the shortest RTT, in us, as the probes of that edge measured it
    loss    the share of probe exchanges without a response
    rate    MB/s, where peers have measured it (`run.optimize_topology`) or reduced over the link

A cell is darker the worse the link is, compared with the others of its matrix. A dot is a link that was not measured:
each node probes a few others, not all. With a third argument the last round is drawn as a picture, too, if matplotlib
is installed (`pip install ringfold[report]`).
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import ringfold as rf
from ringfold.wire.probing import RoundSummary
from ringfold.wire.status import Status

Link = tuple[int, int]
SHADES = " ░▒▓█"


@dataclass
class Matrix:
    """One quantity of all links, by (source, target)."""

    title: str
    values: dict[Link, float] = field(default_factory=dict)
    is_better_high: bool = False

    def shade(self, value: float) -> str:
        """From blank for the best link of the matrix to full for the worst."""
        low, high = min(self.values.values()), max(self.values.values())
        badness = (value - low) / (high - low) if high > low else 0.0
        return SHADES[round((1.0 - badness if self.is_better_high else badness) * (len(SHADES) - 1))]


def main(master: str, rounds: int = 3, picture: str = "") -> None:
    with rf.Prober(master=master, me="links") as prober:
        for number in range(rounds):
            summary = prober.round(label=f"links {number + 1}")
            matrices = measure(summary, prober.status())
            names = {int(node): name for node, name in summary.names.items()}
            now = prober.clock.now() if prober.clock.is_ready else None
            print(f"round {summary.round.sequence}: {len(summary.nodes)} nodes, {len(summary.edges)} edges")
            print(f"global time {now.ns} ns, +- {now.error_ns} ns" if now else "global time: after the next round")
            for matrix in matrices:
                print(draw(matrix, names), flush=True)
        if picture:
            save(matrices, names, picture)


def measure(summary: RoundSummary, status: Status) -> list[Matrix]:
    """Delay and loss of every probed edge, and the rate of every link between peers."""
    delay, loss = Matrix("delay (us)"), Matrix("loss (%)")
    for view in summary.edges:
        fit = view.fit
        if fit.delay_min_ns:
            delay.values[fit.src, fit.dst] = fit.delay_min_ns / 1e3
        if fit.sent:
            loss.values[fit.src, fit.dst] = 100.0 * fit.lost / fit.sent
    rate = Matrix("rate (MB/s)", is_better_high=True)
    for link in status.links:
        if link.bytes_per_s:
            rate.values[link.source, link.target] = link.bytes_per_s / 1e6
    return [delay, loss, rate]


def draw(matrix: Matrix, names: Mapping[int, str]) -> str:
    """The matrix as text. Columns have the numbers of the rows."""
    nodes = sorted(names)
    wide = max((len(name) for name in names.values()), default=0)
    lines = [f"\n{matrix.title}", " " * (wide + 4) + "".join(f"{column:>10}" for column in range(1, len(nodes) + 1))]
    for row, source in enumerate(nodes, 1):
        cells = (cell(matrix, source, target) for target in nodes)
        lines.append(f"{row:>3} {names[source]:<{wide}}" + "".join(cells))
    return "\n".join(lines)


def cell(matrix: Matrix, source: int, target: int) -> str:
    value = matrix.values.get((source, target))
    if value is None:
        return f"{'' if source == target else '·':>10}"
    return f"{value:>8.3g} {matrix.shade(value)}"


def save(matrices: Sequence[Matrix], names: Mapping[int, str], path: str) -> None:
    """The same three matrices as one picture."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print("no picture: matplotlib is not installed (pip install ringfold[report])")
        return
    nodes = sorted(names)
    figure = Figure(figsize=(5 * len(matrices), 4.5), layout="constrained")
    for axes, matrix in zip(figure.subplots(1, len(matrices)), matrices, strict=True):
        rows = [[matrix.values.get((source, target), float("nan")) for target in nodes] for source in nodes]
        shown = axes.imshow(rows, cmap="viridis" if matrix.is_better_high else "viridis_r")
        axes.set_title(matrix.title)
        axes.set_xticks(range(len(nodes)), [names[node] for node in nodes], rotation=45, ha="right")
        axes.set_yticks(range(len(nodes)), [names[node] for node in nodes])
        figure.colorbar(shown, ax=axes, shrink=0.8)
    figure.savefig(path, dpi=120)
    print(f"drawn: {path}")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 3, *sys.argv[3:4])
