"""`ringfold probe --nodes FILE`: probe without a run. Each node fits its own windows and writes them down."""

from pathlib import Path

from ringfold.cli.output import console, print_json, table
from ringfold.cli.probe.wish import Wish
from ringfold.probe.logs.files import ExportSettings, Log
from ringfold.probe.logs.lines import Stretch, window_lines
from ringfold.probe.nodes.alone import Prober, ProbeWindow
from ringfold.probe.rounds.settings import RoundSettings
from ringfold.runtime import network
from ringfold.runtime.process import term_is_exit
from ringfold.wire.probing import EdgeFit, RoundId


def probe_alone(nodes: Path, wish: Wish) -> None:
    """Probe window after window until there were `windows`, or Ctrl-C or SIGTERM."""
    prober = Prober(
        nodes,
        wish.me,
        window_ms=wish.window_ms,
        estimator=wish.estimator,
        offset_ns=wish.offset_ns,
        drift_ppb=wish.drift_ppb,
    )
    if wish.rounds == "gloo":
        from ringfold.cli.probe.together import probe_together

        with prober:
            rounds = RoundSettings(
                window_ms=wish.window_ms,
                neighbours=prober.nodes.neighbours,
                seed=prober.nodes.seed,
                gloo_interface=wish.interface,
                gloo_timeout_ms=round(wish.timeout_s * 1_000),
            )
            probe_together(prober, rounds, wish)
        return
    with term_is_exit(), prober:
        log = None
        if wish.export is not None:
            settings = ExportSettings(directory=wish.export, points=wish.points)
            log = Log(settings, node=prober.node, name=prober.me.name, host=network.host_name())
            log.begin(prober.socket.now())
        try:
            _announce(prober, as_json=wish.as_json)
            for window in prober.windows():
                if log is not None:
                    log.write(window_lines(_stretch(prober, window), window.edges, window.fits, points=wish.points))
                _show(prober, window, as_json=wish.as_json)
                if window.number == wish.windows:
                    return
        except (KeyboardInterrupt, SystemExit):
            return  # both are how this is meant to end
        finally:
            if log is not None:
                log.close()


def _announce(prober: Prober, *, as_json: bool) -> None:
    if as_json:
        return
    names = ", ".join(f"{each.name} ({each.address}:{each.port})" for each in prober.out)
    what = f"probes {names}" if prober.out else "only listens"
    console.print(
        f"node {prober.node} ({prober.me.name}) at {prober.me.address}:{prober.socket.port} {what}",
        soft_wrap=True,
    )


def _stretch(prober: Prober, window: ProbeWindow) -> Stretch:
    return Stretch(
        node=prober.node,
        window=window.number,
        begin_ns=window.begin_ns,
        end_ns=window.end_ns,
        utc_ns=window.utc_ns,
        round_id=RoundId(0, window.number),
    )


def _show(prober: Prober, window: ProbeWindow, *, as_json: bool) -> None:
    if as_json:
        print_json({"window": window.number, "begin_ns": window.begin_ns, "end_ns": window.end_ns, "fits": window.fits})
        return
    if prober.is_listener:
        return
    names = {each.node: each.name for each in prober.out}
    rows = (
        (
            names[fit.dst],
            *(f"{ns / 1e3:.4g}" if ns else "-" for ns in (fit.delay_min_ns, fit.delay_p50_ns, fit.delay_p99_ns)),
            f"{fit.lost} of {fit.sent}",
            *_line(fit),
        )
        for fit in window.fits
    )
    columns = ["to", "min", "p50", "p99", "lost", "alpha (ppm)", "beta (ns)", "+-", "by"]
    numbers = {*columns} - {"to", "lost"}
    console.print(table(f"window {window.number} (one-way delay in us)", columns, rows, whole=numbers))
    for fit in window.fits:
        if fit.refused:
            console.print(f"{names[fit.dst]}: refused: {fit.refused}", markup=False)


def _line(fit: EdgeFit) -> tuple[str, str, str, str]:
    if fit.refused:
        return "refused", "-", "-", "-"
    return f"{fit.alpha * 1e6:+z.4f}", f"{fit.beta_ns:+,}", f"{fit.sigma_ns:.1f}", fit.estimator
