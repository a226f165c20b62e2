"""The summary of a run directory: what happened, what it cost, who was slow, and what could not be read."""

import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from run_directories import BEGIN_NS, HOSTS, RunDirectory, write_run

from ringfold.errors import UsageError
from ringfold.observe.records import read_directory
from ringfold.observe.summary import Summary, summarise
from ringfold.observe.summary.results import Incident
from ringfold.observe.summary.sentences import slowest
from ringfold.observe.summary.thinning import LogHistogram, ThinnedSeries
from ringfold.observe.summary.wording import duration_text, join_words, number_text, percent, rate_text, size_text
from ringfold.units import MIB, MS, S
from ringfold.wire.events import EpochRuns, OpEnded, PeerJoined, Stamp, StepEnded, encode_event
from ringfold.wire.messages import Rollback
from ringfold.wire.notices import (
    EpochInstalled,
    EpochRecorded,
    MasterLost,
    PeerDiverged,
    PeerGone,
    PeerRegistered,
    StateRolledBack,
)
from ringfold.wire.status import Divergence


def summary_of(directory: Path, run: str = "") -> Summary:
    return summarise(read_directory(directory), run)


def of_kind(summary: Summary, kind: str) -> list[Incident]:
    return [incident for incident in summary.incidents if incident.kind == kind]


@pytest.fixture(scope="module")
def disturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """c is killed in step 40, e joins at 80, the master is replaced in 120, b is frozen in 140 and rejoins at 170."""
    return write_run(tmp_path_factory.mktemp("disturbed") / "run", 200)


# What happened


def test_incidents_are_in_order_with_their_reasons(disturbed: Path) -> None:
    summary = summary_of(disturbed)
    kinds = ["begun", "lost", "joined", "failover", "evicted", "joined", "ended"]
    assert [incident.kind for incident in summary.incidents] == kinds
    begun, lost, joined, failover, evicted, again, _ = (incident.text for incident in summary.incidents)
    assert begun == "The run began with 4 peers: peer 1 (a), peer 2 (b), peer 3 (c) and peer 4 (d)."
    assert lost == "Peer 3 (c) was lost: its connection closed. 1 op was aborted and run again."
    assert joined.startswith("Peer 5 (e) joined, 12 ms after it had registered, and received 48 MiB of shared state")
    assert failover.startswith("The master was lost, and m2 led 700 ms later (fence 2): the lease of m1 has expired.")
    assert "was evicted: silent for 1500 ms (3 peers had waited 1.5 s for it in all_reduce; evict_after_ms)" in evicted
    assert again.startswith("Peer 6 (b) joined again: the process that was peer 2")


def test_costs_are_the_pauses_between_commits_beyond_the_usual(disturbed: Path) -> None:
    summary = summary_of(disturbed)
    [evicted], [failover], [lost] = (of_kind(summary, kind) for kind in ("evicted", "failover", "lost"))
    # The frozen peer was evicted 1.53 s after the last step, and the op ended 18 ms later.
    assert evicted.paused_s == pytest.approx(1.5, abs=0.02)
    assert evicted.next_commit_s == pytest.approx(0.018, abs=0.003)
    assert failover.paused_s == pytest.approx(0.73, abs=0.02)
    assert lost.paused_s == pytest.approx(0.0, abs=0.01)
    costs = summary.costs
    assert costs.paused_s == pytest.approx(sum(one.paused_s or 0.0 for one in summary.incidents))
    assert costs.longest_pause_s == evicted.paused_s
    assert costs.aborted_ops == 3
    assert costs.lost_steps == costs.repeated_steps == 0
    assert costs.fetched_bytes == 96 * MIB


def test_an_op_that_the_verdict_of_the_change_commits_is_part_of_the_pause(tmp_path: Path) -> None:
    """The master dies in an op; two seconds later the next one commits it, still in its own epoch."""
    files = RunDirectory(tmp_path / "run")
    record = files.record("peer", "a")
    record.clock(BEGIN_NS)
    for epoch, when in ((1, 0), (2, 3_000)):
        record.add(BEGIN_NS + when * MS, EpochRuns(0, epoch, epoch, [1, 2]), peer=1)
    record.add(BEGIN_NS, PeerJoined(1, 0, 1), peer=1)
    record.add(BEGIN_NS + 1_010 * MS, MasterLost("10.0.0.1:48148", "its connection closed"), peer=1)
    for number, (epoch, when) in enumerate([(1, 980), (1, 1_000), (1, 3_001), (2, 3_020), (2, 3_040)]):
        end = BEGIN_NS + when * MS
        at = HOSTS[0].monotonic(end - 5 * MS)
        op = OpEnded("all_reduce", 0, number, epoch, "committed", 64, at, at, step=number)
        record.add(end, op, peer=1, with_wall=False)
        record.add(end, StepEnded(number, epoch, 2, at), peer=1, with_wall=False)
    [failover] = of_kind(summary_of(files.write()), "failover")
    assert failover.paused_s == pytest.approx(2.0, abs=0.01)
    assert failover.paused_from_s == pytest.approx(1.0, abs=0.01)


def test_members_and_masters_have_their_times(disturbed: Path) -> None:
    summary = summary_of(disturbed)
    ends = {member.peer: (member.name, member.host, member.end) for member in summary.memberships}
    assert ends == {
        1: ("a", "oslo", "left"),
        2: ("b", "lima", "evicted"),
        3: ("c", "oslo", "lost"),
        4: ("d", "lima", "left"),
        5: ("e", "lima", "left"),
        6: ("b", "lima", "left"),
    }
    assert summary.memberships[1].record == summary.memberships[5].record
    assert [(lead.master, lead.fence) for lead in summary.leads] == [("m1", 1), ("m2", 2)]
    assert summary.leads[0].ended_s < summary.leads[1].began_s
    assert (summary.fewest_peers, summary.most_peers, summary.epochs) == (3, 4, 6)


def test_events_of_hosts_with_other_clocks_are_on_one_time(disturbed: Path) -> None:
    """The hosts' CLOCK_MONOTONIC are ten days apart, and their wall clocks 43 ms."""
    summary = summary_of(disturbed)
    assert 10 < summary.seconds < 15
    joined = {member.peer: member.joined_s for member in summary.memberships}
    assert all(time_s is not None and abs(time_s - 0.058) < 0.001 for peer, time_s in joined.items() if peer <= 4)
    lima = next(clock for clock in summary.clocks if clock.host == "lima" and clock.drift_ppm is not None)
    assert lima.drift_ppm == pytest.approx(-25.0, abs=0.1)
    assert lima.first_offset_us == pytest.approx(40_000, rel=0.01)
    assert lima.median_bound_us == pytest.approx(150, rel=0.02)


def test_the_paragraph_says_what_happened_what_it_cost_and_who_was_slow(disturbed: Path) -> None:
    text = " ".join(summary_of(disturbed).sentences)
    assert text.startswith("The run trained 200 steps in ")
    assert "one loss of a peer, one eviction, one change of masters and two joins while it trained" in text
    assert "no step was lost" in text
    assert "Peer 4 (d) was the slowest" in text
    assert text.endswith("It finished: the last member left with its program done.")


def test_a_calm_run_has_neither_disturbances_nor_pauses(tmp_path: Path) -> None:
    summary = summary_of(write_run(tmp_path / "run", 100, calm=True))
    assert [incident.kind for incident in summary.incidents] == ["begun", "ended"]
    assert "Nothing disturbed it." in summary.sentences
    assert summary.costs.paused_s == 0


def test_lost_steps_and_divergences_are_incidents_once(tmp_path: Path) -> None:
    """The master and every peer record them."""
    files = RunDirectory(tmp_path / "run")
    master, peers = files.record("master", "m"), [files.record("peer", name) for name in "ab"]
    back = StateRolledBack(0, Rollback(90, 100, 1))
    diverged = PeerDiverged(0, Divergence(2, "b", 80, 70, ["model"], 1, 4_096))
    for record in [master, *peers]:
        record.clock(BEGIN_NS)
        record.add(BEGIN_NS + S, back)
        record.add(BEGIN_NS + 2 * S, diverged)
    summary = summary_of(files.write())
    assert [incident.kind for incident in summary.incidents] == ["rollback", "divergence"]
    assert summary.incidents[0].text.endswith("10 steps are lost.")
    assert summary.costs.lost_steps == 10


# Who was slow


def test_the_peer_that_begins_ops_last_is_the_slowest(disturbed: Path) -> None:
    summary = summary_of(disturbed)
    work = slowest(summary)
    assert work is not None
    assert work.name == "d"
    assert work.last == work.judged > 150
    others = [one for one in summary.work if one.name != "d"]
    assert all(one.last == 0 for one in others)
    assert work.kept_s > 1.0
    assert all(one.waited_s > one.moved_s for one in others)
    assert work.waited_s == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize("spread_us", [0, 300, 3_000])
def test_nobody_is_blamed_where_peers_take_turns_being_last(tmp_path: Path, spread_us: int) -> None:
    files = RunDirectory(tmp_path / "run")
    records = {peer: files.record("peer", f"p{peer}") for peer in (1, 2, 3)}
    for peer, record in records.items():
        record.clock(BEGIN_NS)
        record.add(BEGIN_NS, PeerJoined(peer, 0, 1), peer=peer)
    for number in range(300):
        end = BEGIN_NS + (number + 1) * 20 * MS
        for peer, record in records.items():
            late_ns = spread_us * 1_000 * ((number * 2_654_435_761 + peer * 40_503 >> 7) % 5) // 5
            add_op(record.add, end, peer, number, began_ns=end - 8 * MS + late_ns)
    summary = summary_of(files.write())
    assert slowest(summary) is None
    assert "No peer was clearly the slowest." in summary.sentences


def add_op(add: Callable[..., None], end_ns: int, peer: int, number: int, *, began_ns: int, bytes_: int = MIB) -> None:
    """An op on the first host, whose CLOCK_MONOTONIC is known."""
    at = HOSTS[0].monotonic
    op = OpEnded("all_reduce", 0, number, 1, "committed", bytes_, at(began_ns), at(began_ns), step=number)
    add(end_ns, op, peer=peer, with_wall=False)


def test_a_step_in_which_a_peer_was_evicted_counts_for_nobody(tmp_path: Path) -> None:
    files = RunDirectory(tmp_path / "run")
    record, at = files.record("peer", "a"), HOSTS[0].monotonic
    record.clock(BEGIN_NS)
    record.add(BEGIN_NS, PeerJoined(1, 0, 1), peer=1)
    for number in range(20):
        began = BEGIN_NS + number * 10 * MS
        record.add(began + 9 * MS, StepEnded(number, 1, 2, at(began)), peer=1, with_wall=False)
    began, back = BEGIN_NS + 200 * MS, BEGIN_NS + 60 * S
    record.add(back, PeerJoined(4, 0, 3), peer=4)
    record.add(back + MS, StepEnded(20, 3, 2, at(began)), peer=4, with_wall=False)
    summary = summary_of(files.write())
    assert summary.last_step == 20
    assert max(work.own_s for work in summary.work) < 1
    assert summary.step_p99_s < 0.02
    assert not summary.slow_steps


def test_steps_that_are_done_again_are_counted(tmp_path: Path) -> None:
    files = RunDirectory(tmp_path / "run")
    record, at = files.record("peer", "a"), HOSTS[0].monotonic
    record.clock(BEGIN_NS)
    for place, number in enumerate([0, 1, 2, 3, 4, 2, 3, 4, 5]):
        began = BEGIN_NS + place * 10 * MS
        record.add(began + 9 * MS, StepEnded(number, 1, 2, at(began)), peer=1, with_wall=False)
    summary = summary_of(files.write())
    assert summary.costs.repeated_steps == 3
    assert (summary.steps, summary.first_step, summary.last_step) == (6, 0, 5)


def test_ops_have_figures_by_kind_and_size(tmp_path: Path) -> None:
    files = RunDirectory(tmp_path / "run")
    record = files.record("peer", "a")
    record.clock(BEGIN_NS)
    for number in range(100):
        end = BEGIN_NS + number * 20 * MS
        add_op(record.add, end, 1, 2 * number, began_ns=end - 2 * MS, bytes_=4096)
        add_op(record.add, end, 1, 2 * number + 1, began_ns=end - (50 if number == 99 else 5) * MS)
    small, large = summary_of(files.write()).ops
    assert (small.low_bytes, small.high_bytes, small.ops) == (4096, 4096, 100)
    assert small.median_us == pytest.approx(2_000, rel=0.02)
    assert large.median_us == pytest.approx(5_000, rel=0.02)
    assert large.p99_us == pytest.approx(5_000, rel=0.02)
    assert large.greatest_us == pytest.approx(50_000, abs=2)
    assert large.waited_share is None, "one member says nothing about waits"


def test_values_that_are_not_finite_are_counted_and_the_others_kept(tmp_path: Path) -> None:
    files = RunDirectory(tmp_path / "run")
    record, at = files.record("peer", "a"), HOSTS[0].monotonic
    record.clock(BEGIN_NS)
    for number, loss in enumerate([3.0, 2.0, None, None, 1.0]):
        began = BEGIN_NS + number * 10 * MS
        ended = StepEnded(number, 1, 2, at(began), logged={"loss": loss})
        record.add(began + 9 * MS, ended, peer=1, with_wall=False)
    [loss_series] = summary_of(files.write()).logged
    assert loss_series.not_finite == 2
    assert [point.mean for point in loss_series.points] == [3.0, 2.0, 1.0]


# What is missing or cannot be read


def edit(directory: Path, change: Callable[[str, list[bytes]], list[bytes] | None]) -> None:
    """Change the lines of each record by its name; None deletes it."""
    for path in directory.iterdir():
        lines = change(path.name, path.read_bytes().splitlines(keepends=True))
        if lines is None:
            path.unlink()
        else:
            path.write_bytes(b"".join(lines))


def test_a_cut_line_and_unknown_kinds_are_skipped_and_counted(tmp_path: Path) -> None:
    directory = write_run(tmp_path / "run", 60)
    before = summary_of(directory)

    def cut(name: str, lines: list[bytes]) -> list[bytes]:
        return [*lines, b'{"at":1,"event":"from_the_future","x":1}\n', b'{"at":17,"event":"step_en']

    edit(directory, cut)
    after = summary_of(directory)
    assert [one.text for one in after.incidents] == [one.text for one in before.incidents]
    assert {record.skipped for record in after.records} == {2}
    assert all("2 lines could not be read" in " ".join(record.notes) for record in after.records)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    directory = write_run(tmp_path_factory.mktemp("whole") / "run", 30)
    return {path.name: path.read_bytes() for path in sorted(directory.iterdir())}


@settings(max_examples=30)
@given(data=st.data())
def test_a_directory_that_is_cut_anywhere_is_summarised(whole: dict[str, bytes], data: st.DataObject) -> None:
    """Whatever is lost of the records, there is a summary, and its figures are possible."""
    with tempfile.TemporaryDirectory() as directory:
        for name, content in whole.items():
            (Path(directory) / name).write_bytes(content[: data.draw(st.integers(0, len(content)), label=name)])
        try:
            summary = summary_of(Path(directory))
        except UsageError:
            return  # no record has a whole first line
    assert summary.sentences
    assert summary.seconds >= 0
    assert all(member.ended_s >= (member.joined_s or 0.0) - 0.1 for member in summary.memberships)
    assert all(incident.paused_s is None or incident.paused_s >= 0 for incident in summary.incidents)


def test_without_a_masters_record_the_rings_say_who_is_gone(tmp_path: Path) -> None:
    directory = write_run(tmp_path / "run", 100)
    edit(directory, lambda name, lines: None if name.startswith("master") else lines)
    summary = summary_of(directory)
    assert {member.peer: member.end for member in summary.memberships}[3] == "missing"
    [lost] = of_kind(summary, "lost")
    assert lost.text.startswith("Peer 3 (c) is no longer in the ring; no record of a master says why.")
    assert of_kind(summary, "failover")[0].text.startswith("Another master took over (fence 2).")
    assert any("no record of a master" in note for note in summary.notes)
    assert not summary.links


def test_without_peers_records_the_incidents_are_there_without_costs(tmp_path: Path) -> None:
    directory = write_run(tmp_path / "run", 100)
    edit(directory, lambda name, lines: None if name.startswith("peer") else lines)
    summary = summary_of(directory)
    assert [incident.kind for incident in summary.incidents][:3] == ["begun", "lost", "joined"]
    assert summary.costs.paused_s is None
    assert not summary.ops
    assert not summary.work
    assert len(summary.traffic) == 6
    assert any("no records of peers" in note for note in summary.notes)


def test_a_record_without_samples_has_the_wall_clock_of_its_begin(tmp_path: Path) -> None:
    directory = write_run(tmp_path / "run", 60)
    edit(directory, lambda name, lines: [line for line in lines if b'"clock_sampled"' not in line])
    summary = summary_of(directory)
    assert {record.time_source for record in summary.records} == {"wall clock, at the record's begin"}
    assert summary.incidents[0].kind == "begun"
    assert not summary.clocks


def test_a_host_without_any_time_is_counted_but_has_no_place(tmp_path: Path) -> None:
    files = RunDirectory(tmp_path / "run")
    record = files.record("peer", "a", HOSTS[1])
    record.lines[0] = record.lines[0].replace(b'"wall":', b'"_wall":')
    record.add(BEGIN_NS + S, OpEnded("barrier", 0, 1, 1, "committed", 0, 1, 1), peer=1, with_wall=False)
    summary = summary_of(files.write())
    assert summary.sentences == ["The records of the run have no event that has a place in time."]
    assert [(op.op, op.ops) for op in summary.ops] == [("barrier", 1)]
    assert "no place in time" in summary.records[0].notes[0]


def test_a_run_that_goes_on_has_no_end(tmp_path: Path) -> None:
    summary = summary_of(write_run(tmp_path / "run", 60, ended=False))
    assert summary.ended == ""
    assert summary.sentences[-1].startswith("No end is recorded")
    assert {member.end for member in summary.memberships if member.peer in (1, 4, 5)} == {"stayed"}


def test_an_empty_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="has no records"):
        summary_of(tmp_path)


def test_of_several_runs_one_is_chosen(tmp_path: Path) -> None:
    for run in ("one", "two"):
        files = RunDirectory(tmp_path / "run", run)
        master = files.record("master", f"m-{run}")
        master.clock(BEGIN_NS)
        master.add(BEGIN_NS, PeerRegistered(1, run, 0, "10.0.0.1:48149"))
        master.add(BEGIN_NS, EpochRecorded(0, 1, [1], 0, 0))
        files.write()
    with pytest.raises(UsageError, match="several runs; choose one by --run: one, two"):
        summary_of(tmp_path / "run")
    with pytest.raises(UsageError, match="no records of run 'three'"):
        summary_of(tmp_path / "run", "three")
    assert [member.name for member in summary_of(tmp_path / "run", "two").memberships] == ["two"]


def test_frequent_rare_events_are_limited(tmp_path: Path) -> None:
    """A run that changes its epoch all the time."""
    files = RunDirectory(tmp_path / "run")
    master = files.record("master", "m")
    master.clock(BEGIN_NS)
    for epoch in range(1, 5_001):
        at = BEGIN_NS + epoch * 10 * MS
        if epoch > 1:
            master.add(at, PeerGone(epoch - 1, f"p{epoch - 1}", "lost", "it broke"))
        master.add(at + MS, EpochRecorded(0, epoch, [100_000, epoch], 0, 0))
        master.add(at + 2 * MS, EpochInstalled(0, epoch, 2))
    summary = summary_of(files.write())
    assert len(summary.incidents) == 1_000
    assert summary.incidents_left_out > 0
    assert "events of frequent kinds are counted only" in " ".join(summary.records[0].notes)


# Large directories


def write_many_ops(directory: Path, ops: int) -> Path:
    """Two peers on one host with an op and a step every 3 ms."""
    files = RunDirectory(directory)
    first = HOSTS[0].monotonic(BEGIN_NS)
    for peer in (1, 2):
        record = files.record("peer", f"p{peer}")
        record.add(BEGIN_NS, EpochRuns(0, 1, 1, [1, 2]), peer=peer)
        record.add(BEGIN_NS, PeerJoined(peer, 0, 1), peer=peer)
        op = OpEnded("all_reduce", 0, 7_000_001, 1, "committed", MIB, 7_000_002, 7_000_002, step=7_000_001)
        step = StepEnded(7_000_001, 1, 2, 7_000_002, logged={"loss": 7_000_003.0})
        # Encoding so many takes longer than what is measured: only the numbers differ.
        lines = b"\n".join(encode_event(Stamp(7_000_004, 0, peer), notice) for notice in (op, step)).decode()
        for number in range(ops // 2):
            end = first + (number + 1) * 3 * MS
            if number % 500 == 0:
                record.clock(BEGIN_NS + number * 3 * MS)
            values = (str(number), str(end - MS), str(1.0 + number % 7), str(end))
            text = lines
            for place, value in enumerate(values, 1):
                text = text.replace(str(7_000_000 + place) + (".0" if place == 3 else ""), value)
            record.raw(text.encode())
    return files.write()


def test_a_hundred_thousand_ops_take_seconds(tmp_path: Path) -> None:
    directory = write_many_ops(tmp_path / "run", 100_000)
    before = time.process_time()
    summary = summary_of(directory)
    took_s = time.process_time() - before
    sys.stdout.write(f"\nsummary of 100,000 ops and as many steps: {took_s:.2f} s of CPU time\n")
    assert summary.ops[0].ops == 100_000
    assert summary.steps == 50_000
    assert summary.work[0].judged == 50_000
    assert took_s < 20
    assert all(len(series.points) <= 2_000 for series in [summary.rates, *summary.logged])


def test_memory_does_not_grow_with_the_number_of_ops(tmp_path: Path) -> None:
    peaks = []
    for ops in (2_000, 6_000):
        directory = write_many_ops(tmp_path / f"run{ops}", ops)
        records = read_directory(directory)
        tracemalloc.start()
        summarise(records)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 2 * peaks[0], f"three times the ops: {peaks}"
    assert peaks[1] < 8 * MIB


# Its parts


@given(st.lists(st.tuples(st.integers(0, 10**13), st.floats(-1e9, 1e9)), min_size=1, max_size=400))
def test_a_thinned_series_keeps_extremes_counts_and_order(values: list[tuple[int, float]]) -> None:
    series = ThinnedSeries(limit=16)
    for at_ns, value in values:
        series.add(at_ns, value)
    buckets = series.buckets()
    assert len(buckets) <= 16
    assert min(bucket.low for bucket in buckets) == min(value for _, value in values)
    assert max(bucket.high for bucket in buckets) == max(value for _, value in values)
    assert sum(bucket.count for bucket in buckets) == len(values) == series.added
    assert sum(bucket.total for bucket in buckets) == pytest.approx(sum(value for _, value in values), abs=1e-3)
    assert buckets == sorted(buckets, key=lambda bucket: bucket.first_ns)
    assert all(bucket.low <= bucket.mean + 1e-3 and bucket.mean <= bucket.high + 1e-3 for bucket in buckets)


@given(st.lists(st.integers(1, 10**10), min_size=1, max_size=300), st.floats(0.01, 1.0))
def test_quantiles_of_a_histogram_are_close(values: list[int], fraction: float) -> None:
    histogram = LogHistogram()
    for value in values:
        histogram.add(value)
    exact = sorted(values)[max(0, -(-int(fraction * len(values) * 10**6) // 10**6) - 1)]
    found = histogram.quantile(fraction)
    near = [value for value in values if abs(found - value) <= 0.0111 * value + 1]
    assert near, (found, exact)
    below = sum(value <= found * 1.0111 + 1 for value in values)
    assert below >= fraction * len(values) - 1e-6


def test_figures_as_text() -> None:
    durations = [0, 12e-6, 4.2e-3, 0.99951, 3.14159, 59.99, 3_600, 100_000, -0.5]
    texts = ["0 s", "12 us", "4.2 ms", "1 s", "3.14 s", "1 min 0 s", "1 h 0 min", "1 d 3 h", "-500 ms"]
    assert [duration_text(seconds) for seconds in durations] == texts
    assert [size_text(count) for count in (0, 512, 1_536, 64 * MIB, 3 * 2**40)] == [
        "0 B", "512 B", "1.5 KiB", "64 MiB", "3 TiB",
    ]  # fmt: skip
    assert [rate_text(rate) for rate in (125_000, 117.5e6, 1.25e9)] == ["1 Mbit/s", "940 Mbit/s", "10 Gbit/s"]
    assert [number_text(value) for value in (0, 2.0714, 1_500, 48_204, 1_234_567, float("nan"))] == [
        "0", "2.071", "1500", "48,204", "1,234,567", "nan",
    ]  # fmt: skip
    assert [percent(share) for share in (0, 0.004, 0.111, 1)] == ["0 %", "0.4 %", "11 %", "100 %"]
    assert join_words(["a"]) == "a"
    assert join_words(["a", "b", "c"]) == "a, b and c"
    assert join_words([str(number) for number in range(20)]).endswith("11 and 8 others")


def test_a_summary_survives_json(disturbed: Path) -> None:
    summary = summary_of(disturbed)
    assert msgspec.json.decode(msgspec.json.encode(summary), type=Summary) == summary
