"""`ringfold probe --nodes FILE --rounds gloo`: nodes that meet after each window, over torch.distributed.

Rank 0 is the first node by name. It calculates, and its address (TCP, at the number of its UDP port) is where the
ranks meet; everybody gets the result.
"""

import os
from collections.abc import Mapping
from pathlib import Path

from msgspec import structs

from ringfold.cli.output import complaints, console, print_json
from ringfold.cli.probe.steer import show_summary
from ringfold.cli.probe.wish import Wish
from ringfold.errors import DeadlineExceeded
from ringfold.probe.fit import fit
from ringfold.probe.graph.draw import draw
from ringfold.probe.logs.files import ExportSettings, Log
from ringfold.probe.logs.lines import Stretch, round_line, window_lines
from ringfold.probe.nodes.alone import Prober
from ringfold.probe.nodes.file import key_of
from ringfold.probe.rounds.calculation import Calculation
from ringfold.probe.rounds.gloo import GlooRounds, Taken
from ringfold.probe.rounds.gloo_group import TorchCollectives
from ringfold.probe.rounds.settings import RoundSettings
from ringfold.runtime import network
from ringfold.runtime.process import signals_end_at_once, term_is_exit
from ringfold.wire.probing import NodeId


def probe_together(prober: Prober, settings: RoundSettings, wish: Wish) -> None:
    """Round after round until there were `windows`, or Ctrl-C or SIGTERM."""
    ranks = sorted(prober.nodes.by_id)
    first = prober.by_id[ranks[0]]
    logs = _Logs(prober, wish)
    where = f"{len(ranks)} nodes meet at {first.name} ({first.address}, TCP port {first.port})"
    complaints.print(f"{where}; waiting up to {wish.timeout_s:g} s for all", style="dim", markup=False, soft_wrap=True)
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")  # errors are told once, and without C++ stacks
    with signals_end_at_once():
        group = TorchCollectives(
            ranks.index(prober.node),
            len(ranks),
            first.address,
            first.port,
            interface=settings.gloo_interface,
            timeout_ms=settings.gloo_timeout_ms,
        )
    try:
        rounds = GlooRounds(
            group,
            settings,
            prober.by_id[prober.node],
            prober.socket,
            lambda window: fit(window, wish.estimator),
            draw,
            Calculation(settings),
            lambda number: key_of(prober.nodes.key, b"graph %d" % number),
            listen_only=prober.node in prober.nodes.listeners,
        )
        with term_is_exit():
            _run(rounds, logs, prober.names, wish)
    except (KeyboardInterrupt, SystemExit):
        return  # both are how this is meant to end
    finally:
        group.close()
        logs.close()


def _run(rounds: GlooRounds, logs: "_Logs", names: Mapping[NodeId, str], wish: Wish) -> None:
    done = 0
    while wish.windows is None or done < wish.windows:
        try:
            taken = rounds.round()
        except DeadlineExceeded:
            logs.write(rounds.exported)
            raise
        done += 1
        logs.write(taken)
        for note in taken.notes:
            console.print(note)
        if taken.summary is None:
            continue
        summary = structs.replace(taken.summary, names={str(node): name for node, name in names.items()})
        if wish.as_json:
            print_json(summary)
        else:
            show_summary(summary)


class _Logs:
    """A node's log, and at rank 0 that of all rounds; none without `--export`."""

    def __init__(self, prober: Prober, wish: Wish) -> None:
        self._prober = prober
        self._own = self._all = None
        if wish.export is None:
            return
        settings = ExportSettings(directory=Path(wish.export), points=wish.points)
        self._own = Log(settings, node=prober.node, name=prober.me.name, host=network.host_name())
        if prober.node == min(prober.nodes.by_id):
            self._all = Log(settings, host=network.host_name())

    def write(self, taken: Taken) -> None:
        if self._own is None:
            return
        for export in taken.exports:
            stretch = Stretch(
                node=self._prober.node,
                window=export.window,
                begin_ns=export.begin_ns,
                end_ns=export.end_ns,
                utc_ns=self._prober.socket.utc(),
                round_id=export.round,
                label=export.label,
            )
            lines = window_lines(stretch, taken.windows, list(export.edges), points=self._own.points)
            self._own.write(lines)
        if self._all is not None and taken.summary is not None:
            self._all.write([round_line(taken.summary, self._prober.names)])

    def close(self) -> None:
        for log in (self._own, self._all):
            if log is not None:
                log.close()
