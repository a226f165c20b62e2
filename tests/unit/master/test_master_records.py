"""The events that a master keeps: its own and those of its peers, once each, whatever a peer sends."""

import logging
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs
from test_master import MasterHarness
from test_master_journal import MasterHarness as JournalHarness
from test_master_journal import pair
from test_master_server import TOKEN, Client, wait_for

from ringfold.errors import ConfigError
from ringfold.master import records
from ringfold.master.effects import Effect, RecordEvents
from ringfold.master.events import HeartbeatReceived
from ringfold.master.records import EventLog, MasterRecords
from ringfold.master.server import MasterThread
from ringfold.master.settings import MasterSettings
from ringfold.observe.records import read_directory
from ringfold.runtime import recorder
from ringfold.runtime.clock import monotonic_ns
from ringfold.runtime.master_client import MasterClient
from ringfold.units import S
from ringfold.wire import messages as m
from ringfold.wire.events import (
    ClockSampled,
    FlightDumped,
    LeaderChanged,
    OpsLeftOut,
    PeerEvicted,
    Stamp,
    StatusSampled,
    decode_event,
    encode_event,
)
from ringfold.wire.frames import Heartbeat, heartbeat_frame
from ringfold.wire.notices import PeerGone, PeerRegistered, RunForgotten
from ringfold.wire.status import LinkStatus, Progress, Status, World

STATUS = Status(1, 2, 3, 4, World())


def line(text: str, peer: int = 1) -> bytes:
    return encode_event(Stamp(5, 6, peer), PeerEvicted(text))


def reasons(lines: list[bytes]) -> list[str]:
    events = [decode_event(each) for each in lines]
    return [event.notice.reason for event in events if event is not None and isinstance(event.notice, PeerEvicted)]


# Numbers


def test_events_are_numbered_and_the_oldest_are_forgotten() -> None:
    log = EventLog(max_events=3)
    assert log.since(0, fence=7) == m.Events(7, 0, 0, [])
    for number in range(5):
        log.add(b"%d" % number)
    assert log.since(0) == m.Events(0, 2, 5, [b"2", b"3", b"4"])
    assert log.since(4) == m.Events(0, 4, 5, [b"4"])
    assert log.since(5) == m.Events(0, 5, 5, [])
    assert log.last(2) == [b"3", b"4"]
    assert log.last(9) == [b"2", b"3", b"4"]


def test_a_number_that_was_never_reached_is_of_another_master() -> None:
    log = EventLog()
    log.add(b"0")
    assert log.since(500) == m.Events(0, 0, 1, [b"0"])


def test_large_events_do_not_fill_the_memory() -> None:
    """A round of 256 nodes is half a megabyte."""
    log = EventLog(max_bytes=1_000)
    for _ in range(20):
        log.add(b"x" * 300)
    assert log.since(0).first == 17
    assert log.since(0).next == 20


# What a peer's heartbeats bring


def beat(harness: MasterHarness | JournalHarness, conn: int, progress: Progress | None) -> list[bytes]:
    """The lines that are recorded for a heartbeat."""
    harness.now += 10_000_000
    beats = Heartbeat(harness.now, 0, progress=progress)
    effects: list[Effect] = harness.step(HeartbeatReceived(conn, beats))
    found = [each for each in effects if isinstance(each, RecordEvents)]
    assert all(each.lines for each in found)
    return [each for effect in found for each in effect.lines]


def test_events_are_recorded_once_although_reports_repeat_them() -> None:
    harness = MasterHarness()
    harness.ring(2)
    first = Progress(step=1, events=[b"a", b"b"])
    assert beat(harness, 1, first) == [b"a", b"b"]
    assert beat(harness, 1, first) == []
    assert beat(harness, 1, None) == []
    assert beat(harness, 1, Progress(events=[b"a", b"b", b"c"])) == [b"c"]
    assert beat(harness, 1, Progress(events=[b"b", b"c", b"d"], first_event=1)) == [b"d"]
    assert beat(harness, 1, Progress(events=[b"z"], first_event=9)) == [b"z"], "some were lost with a full memory"
    assert beat(harness, 1, Progress(events=[b"d"], first_event=3)) == []
    assert beat(harness, 2, first) == [b"a", b"b"], "numbers are those of a peer"


def test_the_status_shows_the_last_report_without_its_events() -> None:
    harness = MasterHarness()
    harness.ring(2)
    beat(harness, 1, Progress(step=7, logged={"loss": 1.5}, events=[b"a"]))
    beat(harness, 1, None)
    [one, _] = harness.master.status(harness.now + 3_000_000_000).peers
    assert one.progress == Progress(step=7, logged={"loss": 1.5})
    assert one.progress_ms == 3_010


def test_a_new_master_records_what_it_is_told_once() -> None:
    """A peer repeats to it what the old one may not have recorded."""
    old = pair()
    assert beat(old, 1, Progress(events=[b"a", b"b"])) == [b"a", b"b"]
    new = JournalHarness(old.last, fence=2)
    for conn, peer in ((11, 1), (12, 2)):
        new.back(conn, peer)
    assert beat(new, 11, Progress(events=[b"a", b"b"])) == [b"a", b"b"]
    assert beat(new, 11, Progress(events=[b"a", b"b", b"c"])) == [b"c"]
    assert beat(new, 12, Progress(events=[b"d"])) == [b"d"]


def test_a_peer_that_lies_about_its_numbers_harms_only_itself() -> None:
    harness = MasterHarness()
    harness.ring(2)
    assert beat(harness, 1, Progress(events=[b"a"], first_event=2**60)) == [b"a"]
    assert beat(harness, 1, Progress(events=[b"b"], first_event=0)) == []
    assert beat(harness, 1, Progress(events=[b"c", b"d"], first_event=-(2**60))) == []
    assert beat(harness, 2, Progress(events=[b"e"])) == [b"e"]


# What is recorded


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Callable[..., MasterRecords]]:
    made: list[MasterRecords] = []

    def make(directory: Path | None = None, flights: Path | None = None) -> MasterRecords:
        made.append(MasterRecords(directory, flights, 1 << 20))
        made[-1].begin("127.0.0.1:1")
        return made[-1]

    yield make
    for each in made:
        each.close()


def test_a_peers_line_says_its_own_number(opened: Callable[..., MasterRecords]) -> None:
    kept = opened()
    kept.from_peer("default", RecordEvents(3, [line("x", peer=9)]))
    [kept_line] = kept.events("default", 0, 1).lines
    event = decode_event(kept_line)
    assert event is not None
    assert event.stamp == Stamp(5, 6, 3)


@pytest.mark.parametrize(
    "bad",
    [
        b"",
        b"\xff\xfe",
        b"null",
        line("x")[:-1],
        line("\xe9x").replace(b"\xc3\xa9", b"\xe9"),
        b'{"at":1,"event":"values_logged","logged":{"a":' + b"[" * 5_000,
        b'{"at":100000000000000000000,"event":"peer_evicted","reason":"x"}',
        encode_event(Stamp(1), StatusSampled(STATUS)),
        encode_event(Stamp(1), OpsLeftOut(1, 2, 3)),
        b'{"at":1,"event":"peers_stalled","group":0,"peers":[1],"names":[],"waiting":[],"what":"","waited_ms":0,'
        b'"limit":""}',
    ],
)
def test_what_is_no_event_for_a_live_view_is_dropped(opened: Callable[..., MasterRecords], bad: bytes) -> None:
    kept = opened()
    kept.from_peer("default", RecordEvents(3, [line("before"), bad, line("after")]))
    assert reasons(kept.events("default", 0, 1).lines) == ["before", "after"]
    assert kept.events("default", 0, 1).next == 2


@settings(max_examples=50)
@given(st.lists(st.binary(max_size=60), max_size=3))
def test_any_bytes_of_a_peer_are_recorded_or_dropped(lines: list[bytes]) -> None:
    kept = MasterRecords(None, None, 1 << 20)
    kept.from_peer("default", RecordEvents(3, lines))
    assert all(decode_event(each) is not None for each in kept.events("default", 0, 1).lines)


def test_runs_have_logs_of_their_own(opened: Callable[..., MasterRecords], tmp_path: Path) -> None:
    kept = opened(tmp_path)
    kept.notice("", PeerRegistered(1, "a", 0, "host"))
    kept.notice("other", PeerRegistered(2, "b", 0, "host"))
    assert len(kept.events("default", 0, 1).lines) == len(kept.events("other", 0, 1).lines) == 1
    kept.close()
    assert [each.begun.run for each in read_directory(tmp_path)] == ["default"]
    assert [each.begun.run for each in read_directory(tmp_path / "other")] == ["other"]


def test_a_run_that_is_forgotten_keeps_no_thread(opened: Callable[..., MasterRecords], tmp_path: Path) -> None:
    kept = opened(tmp_path)
    for number in range(5):
        kept.notice(f"run-{number}", PeerRegistered(1, "a", 0, "host"))
    kept.notice("run-0", RunForgotten("run-0"))
    kept.sample(monotonic_ns(), [("default", STATUS), ("run-1", STATUS)])
    wait_for(lambda: sum(each.name == "ringfold-record" for each in threading.enumerate()) == 2)
    assert len(kept.events("run-1", 0, 1).lines) == 1
    assert kept.events("run-0", 0, 1).lines == []


def test_a_run_whose_directory_cannot_be_made_is_in_memory(
    opened: Callable[..., MasterRecords], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "ringfold.record")
    kept = opened(tmp_path)
    (tmp_path / "other").write_text("")
    kept.notice("other", PeerRegistered(2, "b", 0, "host"))
    kept.notice("other", PeerRegistered(3, "c", 0, "host"))
    assert len(kept.events("other", 0, 1).lines) == 2
    assert caplog.text.count("no record can be written") == 1


def test_the_status_is_sampled_with_links_now_and_then(opened: Callable[..., MasterRecords], tmp_path: Path) -> None:
    kept = opened(tmp_path)
    links = [LinkStatus(1, 2, 1e9, None, 0, "measured")]
    status = structs.replace(STATUS, links=links)
    now_ns = 100 * S
    assert kept.is_due(now_ns)
    for _ in range(31):
        kept.sample(now_ns, [("default", status)])
        assert not kept.is_due(now_ns + records.SAMPLE_EVERY_NS - 1)
        now_ns += records.SAMPLE_EVERY_NS
        assert kept.is_due(now_ns)
    kept.close()
    [record] = read_directory(tmp_path)
    events = list(record.events())
    sampled = [event.notice.status for event in events if isinstance(event.notice, StatusSampled)]
    assert [number for number, each in enumerate(sampled) if each.links] == [0, 15, 30]
    assert sum(isinstance(event.notice, ClockSampled) for event in events) == 3


def test_without_a_directory_nothing_is_sampled(opened: Callable[..., MasterRecords]) -> None:
    assert not opened().is_due(10**18)


def test_after_the_end_nothing_is_written(opened: Callable[..., MasterRecords], tmp_path: Path) -> None:
    kept = opened(tmp_path)
    kept.close()
    kept.notice("default", PeerRegistered(1, "a", 0, "host"))
    kept.notice("late", PeerRegistered(1, "a", 0, "host"))
    assert len(list(tmp_path.iterdir())) == 1
    assert not any(each.name == "ringfold-record" for each in threading.enumerate())


# Flight records


def test_the_loss_of_many_peers_is_one_flight_record(opened: Callable[..., MasterRecords], tmp_path: Path) -> None:
    kept = opened(None, tmp_path)
    kept.from_peer("default", RecordEvents(1, [line("what it knew")]))
    for number in range(1, 9):
        kept.notice("default", PeerGone(number, f"p{number}", "evicted", "silent"))
    kept.notice("default", PeerGone(9, "p9", "left", "done"))
    wait_for(lambda: any(b"flight_dumped" in path.read_bytes() for path in tmp_path.iterdir()))
    [path] = tmp_path.iterdir()
    lines = path.read_bytes().splitlines()
    assert len(set(lines)) == len(lines), "no event is there twice"
    assert reasons(lines) == ["what it knew"]
    last = decode_event(lines[-1])
    assert last is not None
    assert isinstance(last.notice, FlightDumped)
    assert last.notice.reason == "peer 1 (p1) evicted: silent"


def test_a_peer_that_leaves_is_no_flight_record(
    opened: Callable[..., MasterRecords], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dumped: list[str] = []
    monkeypatch.setattr(recorder.Recorder, "dump", lambda *args: dumped.append(args[2]))
    kept = opened(None, tmp_path)
    kept.notice("default", PeerGone(9, "p9", "left", "done"))
    kept.notice("default", PeerGone(8, "p8", "lost", "closed"))
    wait_for(lambda: bool(dumped))
    assert dumped == ["peer 8 (p8) lost: closed"]


# On sockets


def test_a_client_reads_events_as_they_come(tmp_path: Path) -> None:
    with MasterThread(MasterSettings(events_dir=tmp_path), token=TOKEN) as master:
        peer = Client(master.address)
        peer.join()
        with MasterClient(master.address, TOKEN) as client:
            first = client.events(0)
            assert first.first == 0
            assert first.next == len(first.lines) > 0
            assert client.events(first.next).lines == []
            report = Progress(events=[b"garbage", line("of the peer", peer=77)])
            peer.socket.sendall(heartbeat_frame(Heartbeat(1_000, 0, progress=report)))
            wait_for(lambda: bool(client.events(first.next).lines))
            [new] = client.events(first.next).lines
            event = decode_event(new)
            assert event is not None
            assert event.notice == PeerEvicted("of the peer")
            assert event.stamp.peer == 1
        peer.close()
    [record] = read_directory(tmp_path)
    kinds = [type(event.notice) for event in record.events()]
    assert LeaderChanged in kinds
    assert PeerRegistered in kinds
    assert PeerGone in kinds


def test_a_report_that_is_none_ends_its_peer_alone() -> None:
    with MasterThread(token=TOKEN) as master:
        liar, other = Client(master.address), Client(master.address)
        liar.join()
        other.hello()
        body = heartbeat_frame(Heartbeat(1_000, 0, progress=Progress(version="x")))
        liar.socket.sendall(body.replace(msgspec.msgpack.encode("version"), msgspec.msgpack.encode("VERSION"))[:-2])
        liar.socket.sendall(heartbeat_frame(Heartbeat(1_001, 0)))
        liar.live()
        with MasterClient(master.address, TOKEN) as client:
            assert all(peer.name != "p1" for peer in client.status().peers)
        liar.close()
        other.close()


def test_a_directory_that_cannot_be_written_is_an_error_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="events_dir: no record can be written"):
        MasterThread(MasterSettings(events_dir=tmp_path / "file"), token=TOKEN)
