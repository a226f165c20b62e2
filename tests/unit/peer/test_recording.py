"""What a peer records about its ops and steps, and what it reports in heartbeats."""

import logging
import math
import os
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from ringfold.clock.global_clock import ClockModel, GlobalClock
from ringfold.errors import UsageError
from ringfold.observe.records import read_directory
from ringfold.peer import recording
from ringfold.peer.recording import OpEntry, Recording, Thinning, unpack_ops
from ringfold.runtime import recorder
from ringfold.runtime.recorder import begun
from ringfold.units import MS, S
from ringfold.wire.events import (
    ClockSampled,
    FlightDumped,
    OpEnded,
    OpsLeftOut,
    PeerEvicted,
    PeerJoined,
    StacksDumped,
    StepEnded,
    ValuesLogged,
    decode_event,
)
from ringfold.wire.frames import MAX_REPORT_BYTES
from ringfold.wire.status import Progress

_ENTRY = struct.Struct("<7Q10q4I3B5x")
NO_STEP = 2**64 - 1


def entry(sequence: int, *, ended: int = 10_000, outcome: int = 0, attempts: int = 1, called: int = 1) -> bytes:
    times = (called, 2, 3, 4, 5, 6, 7, ended, 8, 9)
    return _ENTRY.pack(9, NO_STEP, 1_024, 600, 500, 4, 5, *times, sequence, 1, 0, attempts, 0, outcome, 0)


def without_rounds() -> GlobalClock:
    """The clock of a run that does not probe."""
    return GlobalClock(ClockModel(), lambda: 0)


class FakeEngine:
    """Ops that have ended, of which the engine still has the last few, and the reports that it was given."""

    def __init__(self) -> None:
        self.ops: list[bytes] = []
        self.capacity = 4_096
        self.reports: list[Progress] = []
        self.raw: list[bytes] = []
        self.wakes = 0

    def ended_ops(self, since: int) -> tuple[int, bytes]:
        first = max(since, len(self.ops) - self.capacity)
        return len(self.ops), b"".join(self.ops[first:])

    def set_report(self, report: bytes) -> None:
        self.raw.append(report)
        self.reports.append(msgspec.msgpack.decode(report, type=Progress))

    def wake(self) -> None:
        self.wakes += 1


class Clock:
    """The time that a recording sees."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_ns = 1_000 * S
        monkeypatch.setattr(recording, "monotonic_ns", self)
        monkeypatch.setattr(recorder, "monotonic_ns", self)

    def __call__(self) -> int:
        return self.now_ns


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


Open = Callable[..., tuple[Recording, FakeEngine]]


@pytest.fixture
def open_recording(tmp_path: Path) -> Iterator[Open]:
    made: list[Recording] = []

    def make(directory: Path | None = None, engine: FakeEngine | None = None) -> tuple[Recording, FakeEngine]:
        kept = Recording(begun("peer", "default", "one", "host", "1.0"), directory, tmp_path / "flight")
        made.append(kept)
        engine = engine or FakeEngine()
        kept.attach(engine, without_rounds())
        return kept, engine

    yield make
    for each in made:
        each.close()


def recorded(directory: Path) -> list[object]:
    [record] = read_directory(directory)
    return [event.notice for event in record.events()]


def reasons(report: Progress) -> list[str]:
    events = [decode_event(line) for line in report.events]
    return [event.notice.reason for event in events if event is not None and isinstance(event.notice, PeerEvicted)]


# Ops


def test_an_entry_of_the_engine_is_an_event() -> None:
    [op] = unpack_ops(entry(3))
    assert op.event() == OpEnded(
        "all_reduce", 9, 3, 1, "committed", 1_024, 1, 2,
        out_first_ns=3, out_last_ns=4, in_first_ns=5, in_last_ns=6, local_ns=7, blocked_ns=8, last_peer=4,
        sent_bytes=600, received_bytes=500, arriving_from=5, arriving_ns=9,
    )  # fmt: skip
    assert (op.ended, op.event().step) == (10_000, -1)
    assert len(list(unpack_ops(entry(1) + entry(2)))) == 2
    assert _ENTRY.size == 160
    assert OpEntry._fields[-1] == "small"


def test_ops_are_recorded_once(open_recording: Open, tmp_path: Path) -> None:
    kept, engine = open_recording(tmp_path)
    engine.ops = [entry(number) for number in range(10)]
    kept.close()
    found = [notice for notice in recorded(tmp_path) if isinstance(notice, OpEnded)]
    assert [op.sequence for op in found] == list(range(10))


def test_the_first_clocks_are_recorded_at_once(open_recording: Open, tmp_path: Path) -> None:
    """So that the times of a short record can be mapped, too."""
    kept, _ = open_recording(tmp_path)
    kept.close()
    assert any(isinstance(notice, ClockSampled) for notice in recorded(tmp_path))


@pytest.mark.parametrize("rate", [100, 500, 501, 3_000, 1_000_000])
def test_what_is_thinned_out_follows_the_rate_by_powers_of_two(rate: int) -> None:
    thinning = Thinning()
    thinning.note(rate, 1.0)
    assert thinning.every & (thinning.every - 1) == 0
    assert rate / thinning.every <= recording.MAX_OPS_PER_S
    assert thinning.every == 1 or 2 * rate / thinning.every > recording.MAX_OPS_PER_S
    assert sum(map(thinning.keeps, range(4_096))) == max(1, 4_096 // thinning.every)


def test_peers_that_thin_out_differently_keep_the_same_ops() -> None:
    """What the one with fewer ops in its record has, the other one has."""
    few, many = Thinning(), Thinning()
    few.note(4_000, 1.0)
    many.note(1_100, 1.0)
    assert few.every > many.every > 1
    assert all(many.keeps(number) for number in range(10_000) if few.keeps(number))


def test_a_burst_before_the_end_is_no_rate() -> None:
    thinning = Thinning()
    thinning.note(20, 0.001)
    assert thinning.every == 1


def test_special_ops_are_recorded_at_any_rate(open_recording: Open, tmp_path: Path, clock: Clock) -> None:
    engine = FakeEngine()
    engine.ops = [entry(number) for number in range(4_000)]
    engine.ops[1] = entry(1, outcome=1)
    engine.ops[3] = entry(3, attempts=2)
    engine.ops[5] = entry(5, called=1, ended=recording.SLOW_NS + 2)
    kept, _ = open_recording(None, engine)
    kept._collected_ns = clock.now_ns - 1 * S
    found = [op.sequence for op in kept._ended(clock.now_ns)]
    assert {1, 3, 5} <= set(found)
    assert [number for number in found if number not in (1, 3, 5)] == list(range(0, 4_000, 8))


def test_ops_that_are_left_out_or_lost_are_counted(open_recording: Open, clock: Clock) -> None:
    engine = FakeEngine()
    engine.ops = [entry(number) for number in range(5_000)]
    kept, _ = open_recording(None, engine)
    kept._collected_ns = clock.now_ns - 1 * S
    found = kept._ended(clock.now_ns)
    assert kept._left_out_ops == 5_000 - len(found)
    clock.now_ns += 3 * S
    events = [event for line in kept._collect() if (event := decode_event(line)) is not None]
    [left_out] = [event.notice for event in events if isinstance(event.notice, OpsLeftOut)]
    assert left_out.ops == 5_000 - len(found)
    kept.report(at_once=True)
    assert engine.reports[-1].events_dropped == 5_000 - engine.capacity, "the engine had forgotten these"
    clock.now_ns += 3 * S
    assert not any(b"ops_left_out" in line for line in kept._collect()), "counted once"


def test_the_last_ops_of_a_session_are_kept_when_the_peer_joins_again(open_recording: Open, tmp_path: Path) -> None:
    kept, first = open_recording(tmp_path)
    kept.joined(3)
    first.ops = [entry(number) for number in range(4)]
    second = FakeEngine()
    kept.attach(second, without_rounds())
    kept.joined(8)
    second.ops = [entry(100)]
    kept.close()
    [record] = read_directory(tmp_path)
    found = [(e.stamp.peer, e.notice.sequence) for e in record.events() if isinstance(e.notice, OpEnded)]
    assert sorted(found) == [(3, 0), (3, 1), (3, 2), (3, 3), (8, 100)]


# Steps, and what the program logs


def test_a_step_is_recorded_with_what_it_logged(open_recording: Open, tmp_path: Path) -> None:
    kept, _ = open_recording(tmp_path)
    kept.begin_step(5, epoch=2, size=3, sync_ns=77)
    kept.log({"loss": 2.5, "bad": math.nan})
    kept.log({"loss": 2.0})
    kept.wait_begins()
    kept.wait_begins()
    kept.end_step()
    kept.end_step()
    kept.log({"epoch": 1})
    kept.close()
    notices = recorded(tmp_path)
    [step] = [notice for notice in notices if isinstance(notice, StepEnded)]
    assert (step.step, step.epoch, step.size, step.sync_ns) == (5, 2, 3, 77)
    assert step.logged == {"bad": None, "loss": 2.0}
    assert 0 < step.began_ns <= step.waited_ns
    assert ValuesLogged({"epoch": 1.0}) in notices


def test_a_step_that_the_program_has_left_takes_no_values(open_recording: Open, tmp_path: Path) -> None:
    kept, engine = open_recording(tmp_path)
    kept.begin_step(5, epoch=2, size=3, sync_ns=0)
    kept.abandon_step()
    kept.log({"loss": 1})
    kept.report(at_once=True)
    assert not engine.reports[-1].in_step
    kept.close()
    notices = recorded(tmp_path)
    assert ValuesLogged({"loss": 1.0}) in notices
    assert not any(isinstance(notice, StepEnded) for notice in notices)


class Wrong:
    def __float__(self) -> float:
        raise RuntimeError("no scalar")


@pytest.mark.parametrize(
    ("values", "why"),
    [
        ({str(number): 0 for number in range(65)}, "65 values at once"),
        ({"x" * 65: 1}, "65 characters"),
        ({"loss": "high"}, "loss must be a number, not str"),
        ({"loss": "1.5"}, "loss must be a number, not str"),
        ({"loss": None}, "not NoneType"),
        ({"loss": [1.0]}, "not list"),
        ({"loss": np.zeros(2)}, "ndarray is none"),
        ({"loss": Wrong()}, "Wrong is none"),
        ({"lo\nss": 1}, "printable"),
        ({"\udc80": 1}, "printable"),
    ],
)
def test_what_cannot_be_logged_is_an_error(open_recording: Open, values: dict[str, float], why: str) -> None:
    kept, engine = open_recording()
    kept.begin_step(1, 1, 2, 0)
    with pytest.raises(UsageError, match=why):
        kept.log(values)
    kept.report(at_once=True)
    assert engine.reports[-1].logged == {}


def test_numbers_of_all_kinds_can_be_logged(open_recording: Open) -> None:
    kept, engine = open_recording()
    values: dict[str, Any] = {"a": 1, "b": np.float32(0.5), "c": True, "d": np.array(2), "e": -math.inf, "f": 10**400}
    kept.log(values)
    kept.report(at_once=True)
    assert engine.reports[-1].logged == {"a": 1.0, "b": 0.5, "c": 1.0, "d": 2.0, "e": None, "f": None}


def test_the_names_that_were_logged_last_are_shown(open_recording: Open) -> None:
    kept, engine = open_recording()
    kept.begin_step(1, 1, 2, 0)
    for number in range(200):
        kept.log({f"value {number}": number, "loss": 1})
    kept.report(at_once=True)
    shown = engine.reports[-1].logged
    assert len(shown) == recording.MAX_LOGGED
    assert list(shown)[-2:] == ["value 199", "loss"]
    assert "value 100" not in shown


# The report in heartbeats


def test_reports_are_limited_and_the_last_one_is_not_forgotten(open_recording: Open, clock: Clock) -> None:
    kept, engine = open_recording()
    kept.begin_step(1, 1, 2, 0)
    before, wakes = len(engine.reports), engine.wakes
    assert engine.reports[-1].step == 1
    for number in range(2, 50):
        kept.end_step()
        kept.begin_step(number, 1, 2, 0)
    kept.end_step()
    assert (len(engine.reports), engine.wakes) == (before, wakes + 1), "the session's thread is woken once"
    due_ns = kept.due_ns()
    assert due_ns == clock.now_ns + recording.REPORT_NS
    kept.tick()
    assert len(engine.reports) == before, "not yet"
    clock.now_ns = due_ns
    kept.tick()
    kept.tick()
    assert len(engine.reports) == before + 1
    assert engine.reports[-1].step == 49
    assert engine.reports[-1].steps == 49
    assert not engine.reports[-1].in_step
    assert kept.due_ns() is None


def test_events_of_a_report_that_was_replaced_are_in_the_next(open_recording: Open, clock: Clock) -> None:
    """A heartbeat takes only the newest report: two events at once, and both arrive."""
    kept, engine = open_recording()
    kept.follow(7)
    clock.now_ns += 2 * recording.LIVE_NS
    kept.emit(PeerEvicted("a"))
    kept.emit(PeerEvicted("b"))
    assert (engine.reports[-1].first_event, reasons(engine.reports[-1])) == (0, ["a", "b"])
    clock.now_ns += recording.LIVE_NS + 1
    kept.emit(PeerEvicted("c"))
    assert (engine.reports[-1].first_event, reasons(engine.reports[-1])) == (2, ["c"])


def test_a_new_master_gets_all_events_that_are_still_there(open_recording: Open, clock: Clock) -> None:
    kept, engine = open_recording()
    kept.follow(7)
    kept.emit(PeerEvicted("a"))
    kept.follow(None)  # the master is gone
    clock.now_ns += 10 * recording.LIVE_NS
    kept.emit(PeerEvicted("b"))
    assert (engine.reports[-1].first_event, reasons(engine.reports[-1])) == (0, ["a", "b"])
    clock.now_ns += 10 * recording.LIVE_NS
    kept.follow(9)
    assert (engine.reports[-1].first_event, reasons(engine.reports[-1])) == (0, ["a", "b"])
    clock.now_ns += 2 * recording.LIVE_NS
    kept.report(at_once=True)
    assert engine.reports[-1].events == []


def test_a_peer_that_joins_again_reports_no_events_of_before(open_recording: Open) -> None:
    kept, _engine = open_recording()
    kept.emit(PeerEvicted("a"))
    again = FakeEngine()
    kept.attach(again, without_rounds())
    kept.joined(12)
    kept.emit(PeerJoined(12, 0, 4))
    assert again.reports[-1].first_event == 0
    [line] = again.reports[-1].events
    event = decode_event(line)
    assert event is not None
    assert event.notice == PeerJoined(12, 0, 4)
    assert event.stamp.peer == 12


def test_a_report_fits_whatever_it_is_about(open_recording: Open) -> None:
    kept, engine = open_recording()
    kept.log({"\U0001f4c8" * 60 + f"{number:04}": number for number in range(recording.MAX_LOGGED)})
    for number in range(100):
        kept.emit(PeerEvicted(f"{number} " + "x" * 700))
    kept.emit(PeerEvicted("y" * 20_000))
    kept.emit(PeerEvicted("last"))
    assert max(map(len, engine.raw)) <= MAX_REPORT_BYTES
    assert reasons(engine.reports[-1]) == ["last"]
    assert engine.reports[-1].first_event == 101, "the number of the first that fits"
    assert len(engine.reports[-1].logged) == recording.MAX_LOGGED


def test_without_an_engine_nothing_is_reported(open_recording: Open) -> None:
    kept, engine = open_recording()
    kept.close()
    before = len(engine.reports)
    kept.emit(PeerEvicted("x"))
    kept.log({"loss": 1})
    kept.tick()
    assert len(engine.reports) == before


# The end of a record, and flight records


def test_a_record_that_was_closed_is_continued(open_recording: Open, tmp_path: Path) -> None:
    kept, engine = open_recording(tmp_path)
    kept.emit(PeerEvicted("a"))
    kept.close()
    kept.attach(engine, without_rounds())
    kept.emit(PeerEvicted("b"))
    kept.close()
    [record] = read_directory(tmp_path)
    assert len(record.parts) == 2
    found = [event.notice.reason for event in record.events() if isinstance(event.notice, PeerEvicted)]
    assert found == ["a", "b"]


def test_a_record_that_cannot_be_continued_ends_nothing(
    open_recording: Open, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "ringfold.record")
    kept, engine = open_recording(tmp_path / "events")
    kept.close()
    for path in (tmp_path / "events").iterdir():
        path.unlink()
    (tmp_path / "events").rmdir()
    (tmp_path / "events").write_text("in its place")
    kept.attach(engine, without_rounds())
    kept.emit(PeerEvicted("in memory"))
    assert kept.path is None
    assert "no record can be written" in caplog.text


def test_a_flight_record_has_the_last_ops(open_recording: Open, tmp_path: Path) -> None:
    kept, engine = open_recording()
    kept.joined(3)
    engine.ops = [entry(number) for number in range(600)]
    kept.emit(PeerEvicted("silent"))
    kept.dump("this peer was evicted", stacks=True)
    [path] = (tmp_path / "flight").iterdir()
    events = [event for line in path.read_bytes().splitlines() if (event := decode_event(line)) is not None]
    ops = [event.notice.sequence for event in events if isinstance(event.notice, OpEnded)]
    assert ops == list(range(600 - recording._LAST_OPS, 600))
    kinds = [type(event.notice) for event in events]
    assert ClockSampled in kinds
    assert StacksDumped in kinds
    assert PeerEvicted in kinds
    assert events[-1].notice == FlightDumped("this peer was evicted", 0)


def test_a_forked_child_records_and_reports_nothing(open_recording: Open, tmp_path: Path) -> None:
    kept, engine = open_recording(tmp_path / "events")
    before = len(engine.reports)
    child = os.fork()
    if child == 0:
        kept.forked()
        kept.emit(PeerEvicted("of the child"))
        kept.dump("of the child")
        kept.close()
        os._exit(0 if len(engine.reports) == before and kept.path is None else 1)
    assert os.waitpid(child, 0)[1] == 0
    kept.close()
    assert not any(isinstance(notice, PeerEvicted) for notice in recorded(tmp_path / "events"))
    assert not (tmp_path / "flight").exists()


def test_report_times_are_what_heartbeats_need() -> None:
    assert recording.REPORT_NS <= 250 * MS
    assert recording.LIVE_NS >= 10 * recording.REPORT_NS
