"""What happened, in a paragraph. Pure."""

from datetime import UTC, datetime

from ringfold.observe.summary.incidents import PLANNED
from ringfold.observe.summary.results import IncidentKind, PeerWork, Series, Summary
from ringfold.observe.summary.wording import duration_text, join_words, number_text, percent, size_text, times

MIN_JUDGED = 50
"""So many ops say something about who is slow."""
MIN_KEPT = 0.03
"""Of a peer's steps: it is slow if the others waited for it for so much of the time."""
_KINDS: tuple[tuple[IncidentKind, str, str], ...] = (
    ("lost", "loss of a peer", "losses of peers"),
    ("evicted", "eviction", "evictions"),
    ("failover", "change of masters", "changes of masters"),
    ("rollback", "rollback", "rollbacks"),
    ("divergence", "divergence", "divergences"),
    ("refused", "refused call", "refused calls"),
)
_NUMBERS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve")


def sentences(summary: Summary) -> list[str]:
    """The paragraph, sentence by sentence."""
    return [
        sentence
        for sentence in (
            _what(summary),
            _membership(summary),
            _incidents(summary),
            _costs(summary),
            _loss(summary),
            _slowest(summary),
            _end(summary),
        )
        if sentence
    ]


def _what(summary: Summary) -> str:
    name = f"run {summary.run}" if summary.run != "default" else "run"
    if not summary.seconds:
        return f"The records of the {name} have no event that has a place in time."
    began = datetime.fromtimestamp(summary.began_unix_ns / 1e9, UTC)
    when = f"from {began:%H:%M:%S} UTC on {began.day} {began:%B %Y}"
    took = duration_text(summary.seconds)
    if not summary.steps:
        return f"The {name} lasted {took}, {when}; no steps were recorded."
    rate = summary.steps / summary.seconds
    return f"The {name} trained {times(summary.steps, 'step')} in {took} ({number_text(rate)} steps/s), {when}."


def _membership(summary: Summary) -> str:
    if not summary.memberships:
        return ""
    size = times(summary.most_peers, "peer")
    if summary.fewest_peers != summary.most_peers:
        size = f"Between {summary.fewest_peers} and {times(summary.most_peers, 'peer')}"
    hosts = {member.host for member in summary.memberships if member.host}
    on = f" on {times(len(hosts), 'host')}" if hosts else ""
    members = "was a member" if summary.most_peers == 1 else "were members at a time"
    return f"{size}{on} {members}, in {times(summary.epochs, 'epoch')}."


def _incidents(summary: Summary) -> str:
    counted = []
    for kind, one, several in _KINDS:
        count = sum(incident.kind == kind for incident in summary.incidents)
        if count:
            counted.append(f"{count_text(count)} {one if count == 1 else several}")
    trained_s = summary.first_step_s or 0.0
    joined = sum(incident.kind == "joined" and incident.at_s >= trained_s for incident in summary.incidents)
    if joined:
        counted.append(f"{count_text(joined)} {'join' if joined == 1 else 'joins'} while it trained")
    if not counted:
        return "Nothing disturbed it." if summary.memberships else ""
    was = "was" if counted[0].startswith("one ") else "were"
    return f"There {was} {join_words(counted)}."


def _costs(summary: Summary) -> str:
    costs, parts = summary.costs, []
    broke = any(incident.kind not in PLANNED for incident in summary.incidents)
    paused_s = costs.paused_s or 0.0
    if costs.longest_pause_s is not None and paused_s >= max(0.001, summary.seconds / 1_000):
        share = percent(paused_s / summary.seconds) if summary.seconds else ""
        parts.append(
            f"training paused for {duration_text(paused_s)} in all ({share} of the run), "
            f"for {duration_text(costs.longest_pause_s)} at the longest"
        )
    if costs.lost_steps:
        parts.append(f"{times(costs.lost_steps, 'step')} {'was' if costs.lost_steps == 1 else 'were'} lost")
    elif broke and summary.steps:
        parts.append("no step was lost")
    if costs.fetched_bytes:
        parts.append(f"new members received {size_text(costs.fetched_bytes)} of shared state")
    if not parts:
        return ""
    text = join_words(parts)
    return f"{text[:1].upper()}{text[1:]}."


def _loss(summary: Summary) -> str:
    series = main_series(summary.logged)
    if series is None or len(series.points) < 2:
        return ""
    first, last = series.points[0], series.points[-1]
    return f"The logged {series.name} went from {number_text(first.mean)} to {number_text(last.mean)}."


def main_series(logged: list[Series]) -> Series | None:
    """The loss, if the program logged something of that name."""
    for series in logged:
        if series.name.lower() in ("loss", "train_loss", "train/loss"):
            return series
    return next((series for series in logged if "loss" in series.name.lower()), None)


def slowest(summary: Summary) -> PeerWork | None:
    """The peer that kept the others waiting: twice as long as any other did, and for a part of its time that counts."""
    judged = sorted((work for work in summary.work if work.judged >= MIN_JUDGED), key=lambda work: -work.kept_s)
    if not judged:
        return None
    first, others = judged[0], [work.kept_s for work in judged[1:] if work.name != judged[0].name or not work.name]
    in_steps_s = first.own_s + first.waited_s + first.moved_s
    is_clear = first.kept_s >= 2 * max(others, default=0.0) and first.kept_s >= MIN_KEPT * in_steps_s
    return first if is_clear else None


def _slowest(summary: Summary) -> str:
    work = slowest(summary)
    if work is None:
        return "No peer was clearly the slowest." if any(one.judged >= MIN_JUDGED for one in summary.work) else ""
    name = f"Peer {work.peer} ({work.name})" if work.name else f"Peer {work.peer}"
    share = percent(work.last / work.judged)
    return (
        f"{name} was the slowest: in {share} of its ops the others waited for it to begin, "
        f"{duration_text(work.kept_s)} in all."
    )


def _end(summary: Summary) -> str:
    if not summary.seconds:
        return ""
    if summary.ended == "finished":
        return "It finished: the last member left with its program done."
    if summary.ended:
        return "It was abandoned: all members were killed or stopped."
    return "No end is recorded: it was still running, or its master was killed."


def count_text(count: int) -> str:
    return _NUMBERS[count] if count < len(_NUMBERS) else f"{count:,}"
