"""`ringfold status`: show a run, once or repeatedly."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ringfold.config import DEFAULT_RUN

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    from ringfold.errors import MasterUnreachable
    from ringfold.wire.status import GroupStatus, LinkStatus, PeerStatus, Status, Waiting

MATRIX_PEERS = 12
LINK_CHARS = 18
"""The minimum width of a cell of the matrix of links. If it does not fit, links are listed."""
LINKS_LISTED = 24
"""`--json` has everything."""
ARROWS = {"shm": "=>", "tcp": "->", "mixed": "~>", "unknown": "?>"}
ARROW_TEXTS = {
    "shm": "in shared memory",
    "tcp": "over TCP",
    "mixed": "some lanes in shared memory, some over TCP",
    "unknown": "not connected yet",
}


def status(
    address: Annotated[str | None, typer.Argument(help="The master's address.", show_default=False)] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    watch: Annotated[bool, typer.Option("--watch", help="Repeat until Ctrl-C.")] = False,
    every_ms: Annotated[int, typer.Option(help="The interval of --watch.", min=50)] = 500,
    run: Annotated[str | None, typer.Option(help="The run to show; without it `default`, or the only one.")] = None,
    token_file: Annotated[Path | None, typer.Option(help="File with the join token of the run.")] = None,
    config: Annotated[Path | None, typer.Option(help="Settings file (TOML).")] = None,
) -> None:
    """Show a run: members, epochs, rings, and which peers wait for which others.

    Without an address it connects to the master of the settings (`master`, by default on this machine).
    """
    from ringfold import config as settings
    from ringfold.cli.output import console, print_json
    from ringfold.errors import UsageError
    from ringfold.runtime import master_client

    if as_json and watch:
        raise UsageError("--json prints one object; leave out --watch")
    resolved = settings.load({"master": address, "run": run, "token_file": token_file, "config": config})
    masters, token, wanted = resolved.listed("master"), resolved.token(), resolved.named_run()
    if watch:
        _watch(master_client.follow_status(masters, token, every_ms / 1000, run=wanted))
        return
    where, seen = master_client.ask(masters, token, lambda client: (client.address, client.status()), run=wanted)
    if as_json:
        print_json(seen)
    else:
        console.print(render(where, seen))


def _watch(seen: "Iterator[tuple[str, Status] | MasterUnreachable]") -> None:
    """Redraw until Ctrl-C, which is not an error. Without a leading master it shows that error."""
    from rich.live import Live
    from rich.text import Text

    from ringfold.cli.output import console

    try:
        with Live(console=console, auto_refresh=False) as live:
            for look in seen:
                live.update(render(*look) if isinstance(look, tuple) else Text(str(look)), refresh=True)
    except KeyboardInterrupt:
        return


def render(address: str, status: "Status") -> "Group":
    """The whole status for a terminal."""
    from rich.console import Group
    from rich.text import Text

    return Group(Text(), *_parts(address, status))


def _parts(address: str, status: "Status") -> Iterator["Text | Table"]:
    from rich.text import Text

    from ringfold.cli.output import duration, table

    world = status.world
    whose = "" if status.run == DEFAULT_RUN else f"run {status.run} of "
    yield Text(
        f"{whose}{address}: {_count(world.peers, 'peer')} in {_count(world.groups, 'group')}, "
        f"up {duration(status.uptime_ms)}, {_count(status.epochs, 'epoch')} so far, fence {status.fence}"
        f"{f', led by {status.leader}' if status.leader else ''}"
    )
    if status.other_runs:
        others = ", ".join(status.other_runs)
        yield Text(f"it also serves other runs: {others}; show one with --run NAME", style="dim")
    if status.peers:
        columns = ["peer", "name", "group", "last seen", "ops"]
        yield Text()
        yield table("members", columns, (_peer_row(peer) for peer in status.peers), whole=columns[2:])
        yield Text()
        columns = ["peer", "phase", "state"]
        rows = [[str(peer.peer), peer.phase, peer.state] for peer in status.peers]
        yield table("what they do", columns, rows, whole=columns)
        if any(peer.op_states for peer in status.peers):
            columns = ["peer", "op", "state", "since"]
            yield Text()
            yield table("current ops", columns, _op_rows(status), whole=columns)
        yield Text()
        columns = ["peer", "host", "address"]
        yield table("addresses", columns, (_address_row(peer) for peer in status.peers), whole=["address"])
    if status.groups:
        yield Text()
        columns = ["group", "epoch", "phase", "ring", "lanes", "evidence", "avoided edges"]
        yield table("groups", columns, (_group_row(group) for group in status.groups))
        if arrows := _about_rings(status):
            yield Text(arrows, style="dim")
    if any(group.divergences for group in status.groups):
        yield Text()
        yield _divergences(status)
    if status.links:
        yield Text()
        yield _links(status)
        yield Text(_about_links(status), style="dim")
    yield Text()
    if status.waiting:
        columns = ["what", "waiting", "for", "since", "eviction"]
        yield table("waits", columns, map(_wait_row, status.waiting))
    else:
        yield Text("nothing waits", style="dim")


def _peer_row(peer: "PeerStatus") -> list["str | Text"]:
    from rich.text import Text

    from ringfold.cli.output import duration

    last_seen = Text(f"{duration(peer.silent_ms)} ago", style="yellow" if peer.suspected else "")
    if peer.suspected:
        last_seen.append("\nsuspected")
    return [str(peer.peer), peer.name, str(peer.group), last_seen, str(peer.committed_ops)]


def _op_rows(status: "Status") -> list[list[str]]:
    from ringfold.cli.output import duration

    return [
        [str(peer.peer), f"tag {op.tag} seq {op.sequence}", op.state, duration(op.age_ms)]
        for peer in status.peers
        for op in peer.op_states
    ]


def _wait_row(wait: "Waiting") -> list[str]:
    from ringfold.cli.output import duration

    eviction = wait.eviction if wait.evict_in_ms is None else f"in {duration(wait.evict_in_ms)}"
    return [wait.what, _names(wait.waiting), _names(wait.missing), duration(wait.since_ms), eviction]


def _address_row(peer: "PeerStatus") -> list[str]:
    addresses = [f"{f'[{host}]' if ':' in host else host}:{peer.port}" for host in peer.addresses]
    return [str(peer.peer), peer.host, "\n".join(addresses)]


def _group_row(group: "GroupStatus") -> list[str]:
    avoided = ", ".join(f"{source} -> {target}" for source, target in group.bad_edges)
    return [str(group.group), str(group.epoch), group.phase, _ring(group), _lanes(group), group.evidence, avoided]


def _ring(group: "GroupStatus") -> str:
    """The ring with an arrow for what carries each link. With two or more it is closed: the last sends to the first."""
    if len(group.ring) < 2:
        return "".join(map(str, group.ring))
    arrows = [ARROWS[link.transport] for link in group.ring_links] or ["->"] * len(group.ring)
    drawn = [f"{peer} {arrow} " for peer, arrow in zip(group.ring, arrows, strict=True)]
    return "".join([*drawn, str(group.ring[0])])


def _lanes(group: "GroupStatus") -> str:
    """How many lanes each link has, and how many channels they belong to."""
    counts = sorted({link.lanes for link in group.ring_links if link.lanes})
    if not counts:
        return ""
    lanes = " to ".join(map(str, dict.fromkeys((counts[0], counts[-1]))))
    return lanes if group.channels == 1 else f"{lanes} ({group.channels} channels)"


def _about_rings(status: "Status") -> str:
    """What the arrows mean that are drawn."""
    drawn = {link.transport for group in status.groups for link in group.ring_links}
    return "; ".join(f"{arrow}: {ARROW_TEXTS[name]}" for name, arrow in ARROWS.items() if name in drawn)


def _divergences(status: "Status") -> "Table":
    """Members whose state differed from that of the others, and was repaired."""
    from ringfold.cli.output import table

    count = sum(group.divergences for group in status.groups)
    columns = ["group", "peer", "name", "keys", "received", "at revision", "agreed last at"]
    rows = []
    for group in status.groups:
        for each in group.diverged:
            more = f" and {each.key_count - len(each.keys)} more" if each.key_count > len(each.keys) else ""
            keys, received = ", ".join(each.keys) + more, f"{each.received_bytes} bytes"
            numbers = [str(each.revision), str(each.since)]
            rows.append([str(group.group), str(each.peer), each.name, keys, received, *numbers])
    return table(f"diverged from the run's state, and repaired ({count} in all)", columns, rows)


def _links(status: "Status") -> "Table":
    """A matrix, or a list if that is too wide: the links of rings first, then the slowest."""
    from rich.text import Text

    from ringfold.cli.output import console, table

    rings = [group.ring for group in status.groups if len(group.ring) > 1]
    used = {edge for ring in rings for edge in zip(ring, [*ring[1:], ring[0]], strict=True)}
    links = {(link.source, link.target): link for link in status.links}
    peers = sorted({peer for edge in links for peer in edge})
    if len(peers) <= MATRIX_PEERS and (LINK_CHARS + 2) * len(peers) < console.width:
        return _matrix(peers, links, used)
    first = sorted(links.items(), key=lambda item: (item[0] not in used, item[1].bytes_per_s, item[0]))[:LINKS_LISTED]
    rows: list[list[str | Text]] = [
        [Text(f"{a} -> {b}", style="bold green" if (a, b) in used else ""), _link(link)] for (a, b), link in first
    ]
    shown = f" (the ring, then the slowest; {len(rows)} of {len(links)})" if len(rows) < len(links) else ""
    return table(f"links{shown}", ["link", "what is known"], rows)


def _matrix(peers: list[int], links: "dict[tuple[int, int], LinkStatus]", used: set[tuple[int, int]]) -> "Table":
    """Rates from the peer of the row to the peer of the column; links of a ring are highlighted."""
    from rich.text import Text

    from ringfold.cli.output import table

    rows: list[list[str | Text]] = []
    for source in peers:
        cells: list[str | Text] = [Text(str(source), style="bold")]
        for target in peers:
            link = links.get((source, target))
            cell = "" if source == target else "?" if link is None else _link(link)
            cells.append(Text(cell, style="bold green" if (source, target) in used else ""))
        rows.append(cells)
    return table("links (from the row's peer to the column's)", ["", *map(str, peers)], rows)


def _link(link: "LinkStatus") -> str:
    from ringfold.cli.output import duration

    bound = ">= " if link.by == "collective" else ""
    known = [] if link.by == "probed" else [f"{bound}{rate(link.bytes_per_s)}"]
    if link.loss is not None and link.delay_us is not None:
        known.append(f"{link.delay_us:.4g} us" + (f", {100 * link.loss:.2g} % lost" if link.loss else ""))
    return f"{', '.join(known)}, {duration(link.age_ms)} ago"


def _about_links(status: "Status") -> str:
    text = "green: in the ring; >=: at least that, as collectives showed; ?: not measured"
    shown = sum(link.source != link.target for link in status.links)
    more = f"; {status.known_links} links are known, --json has {shown} of them" if status.known_links > shown else ""
    return text + more


def rate(bytes_per_s: float) -> str:
    """A rate in bits: 94.1 Mbit/s, 2.35 Gbit/s."""
    mbit = bytes_per_s / 125_000
    return f"{mbit / 1_000:.3g} Gbit/s" if mbit >= 1_000 else f"{mbit:.3g} Mbit/s"


def _names(peers: list[int]) -> str:
    return ", ".join(str(peer) for peer in peers)


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
