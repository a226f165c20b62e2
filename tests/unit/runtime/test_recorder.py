"""What a process records: in memory, in the parts of a file record, and in flight records."""

import errno
import logging
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from ringfold.errors import ConfigError
from ringfold.observe.records import read_directory
from ringfold.runtime import recorder
from ringfold.runtime.clock import monotonic_ns
from ringfold.runtime.recorder import LastLines, Recorder, RecordFile, begun, file_name
from ringfold.wire.events import (
    Event,
    FlightDumped,
    PeerEvicted,
    RecordBegun,
    StacksDumped,
    Stamp,
    ValuesLogged,
    decode_event,
    encode_event,
)

WAIT_S = 20.0
ABOUT = begun("peer", "default", "a/b c", "host", "1.0")
LINE = encode_event(Stamp(5), ValuesLogged({"loss": 1.0}))


@pytest.fixture
def open_recorder(tmp_path: Path) -> Iterator[Callable[..., Recorder]]:
    made: list[Recorder] = []

    def make(directory: Path | None = tmp_path, **options: object) -> Recorder:
        made.append(Recorder(ABOUT, directory, **options))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for each in made:
        each.close()


def events_of(path: Path) -> list[Event]:
    lines = path.read_bytes().splitlines()
    found = [decode_event(line) for line in lines]
    assert None not in found
    return [event for event in found if event is not None]


def until(holds: Callable[[], bool]) -> None:
    """Wait for what another thread does."""
    end_ns = monotonic_ns() + int(WAIT_S * 1e9)
    pause = threading.Event()
    while not holds():
        assert monotonic_ns() < end_ns, "it did not happen in time"
        pause.wait(0.005)


# The last lines


def test_the_last_lines_are_bounded_by_number_and_by_bytes() -> None:
    lines = LastLines(max_lines=3, max_bytes=10)
    for number in range(5):
        lines.add(b"%d" % number)
    assert (lines.count, lines.first, lines.since(0)) == (5, 2, [b"2", b"3", b"4"])
    assert lines.since(4) == [b"4"]
    assert lines.since(5) == []
    assert lines.since(99) == []
    lines.add(b"x" * 9)
    assert lines.since(0) == [b"4", b"x" * 9]
    lines.add(b"y" * 50)
    assert (lines.first, lines.since(0)) == (6, [b"y" * 50]), "the newest line stays, however long"
    lines.add(b"z")
    assert lines.since(0) == [b"z"]


# Files


def test_a_record_is_made_of_parts_and_the_oldest_are_deleted(tmp_path: Path) -> None:
    file = RecordFile(tmp_path, ABOUT, capacity_bytes=8 * 4_096)
    for _ in range(12):
        file.write([LINE] * 100)
    file.close()
    parts = sorted(tmp_path.iterdir())
    assert len(parts) == recorder.PARTS
    assert file.path == parts[-1]
    assert sum(part.stat().st_size for part in parts) <= 8 * (4_096 + 101 * len(LINE) + 400)
    numbers = []
    for part in parts:
        first, *rest = events_of(part)
        assert isinstance(first.notice, RecordBegun)
        assert first.stamp.wall > 0
        assert first.notice.capacity_bytes == 8 * 4_096
        assert part.name == f"{file_name(ABOUT)}.{first.notice.part:04}.jsonl"
        numbers.append(first.notice.part)
        assert all(isinstance(each.notice, ValuesLogged) for each in rest)
    assert numbers == list(range(numbers[0], numbers[0] + 8))
    assert numbers[0] > 0


def test_the_name_of_a_file_is_safe() -> None:
    about = msgspec.structs.replace(ABOUT, name="../../etc/x:1\n", pid=7)
    assert file_name(about) == "peer-.._.._etc_x_1_-7"


def test_a_process_that_begins_again_continues_its_record(tmp_path: Path) -> None:
    name = file_name(ABOUT)
    for number in (9_999, 10_000):
        (tmp_path / f"{name}.{number}.jsonl").write_bytes(LINE + b"\n")
    for other in (f"{name}.notes.jsonl", f"{name}.x-1.0001.jsonl"):
        (tmp_path / other).write_text("not a part of this record")
    file = RecordFile(tmp_path, ABOUT, capacity_bytes=8 * 4_096)
    assert file.path.name == f"{name}.10001.jsonl"
    for _ in range(12):
        file.write([LINE] * 100)
    file.close()
    assert not (tmp_path / f"{name}.9999.jsonl").exists(), "its own oldest part"
    assert (tmp_path / f"{name}.notes.jsonl").exists()
    assert (tmp_path / f"{name}.x-1.0001.jsonl").exists()


@pytest.mark.parametrize("place", ["a file", "below a file", "/proc"])
def test_a_directory_that_cannot_be_written_is_a_clear_error(tmp_path: Path, place: str) -> None:
    (tmp_path / "file").write_text("")
    directory = {"a file": tmp_path / "file", "below a file": tmp_path / "file" / "x", "/proc": Path("/proc/1/x")}[
        place
    ]
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(ConfigError, match=f"events_dir: no record can be written in {directory}"):
        Recorder(ABOUT, directory)
    assert len(os.listdir("/proc/self/fd")) == before
    assert not any(thread.name == "ringfold-record" for thread in threading.enumerate())


def test_a_disk_that_is_full_at_the_start_is_a_clear_error(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recorder.os, "write", refuse)
        with pytest.raises(ConfigError, match="No space left on device"):
            Recorder(ABOUT, tmp_path)
    assert len(os.listdir("/proc/self/fd")) == before


def refuse(fd: int, body: bytes) -> int:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


# The recorder


def test_events_are_written_and_lines_of_the_collector_with_them(open_recorder: Callable[..., Recorder]) -> None:
    given = [[LINE, LINE], []]
    record = open_recorder(collect=lambda: given.pop(0) if given else [])
    record.peer = 3
    line = record.emit(PeerEvicted("silent"))
    record.emit(ValuesLogged({"loss": 0.5}), at_ns=77, is_stamped=False)
    record.close()
    record.close()  # twice
    first, *rest = events_of(record.path or Path())
    assert isinstance(first.notice, RecordBegun)
    assert decode_event(line) in rest
    assert Event(Stamp(77, 0, 3), ValuesLogged({"loss": 0.5})) in rest
    assert rest.count(Event(Stamp(5), ValuesLogged({"loss": 1.0}))) == 2
    assert not record.is_recording
    assert record.is_closed
    assert record.dropped == 0
    record.emit(PeerEvicted("after the end"))
    assert len(events_of(record.path or Path())) == 1 + len(rest)


def test_without_a_directory_events_are_in_memory_only(open_recorder: Callable[..., Recorder]) -> None:
    record = open_recorder(None)
    for number in range(recorder.MAX_RECENT + 5):
        record.emit(ValuesLogged({"n": number}))
    assert record.path is None
    assert not record.is_recording
    events = [decode_event(line) for line in record.recent()]
    assert len(events) == recorder.MAX_RECENT
    assert events[0] is not None
    assert events[0].notice == ValuesLogged({"n": 5})
    record.add_line(LINE)
    assert record.dropped == 0
    assert len(record.recent()) == recorder.MAX_RECENT


def test_live_events_are_those_of_a_level_and_are_numbered(open_recorder: Callable[..., Recorder]) -> None:
    record = open_recorder(None)
    assert record.live() == (0, [])
    lines = []
    for number in range(recorder.MAX_LIVE + 3):
        record.emit(ValuesLogged({"n": number}))  # of level debug
        lines.append(record.emit(PeerEvicted(str(number))))
    assert record.live_count == recorder.MAX_LIVE + 3
    assert record.live() == (3, lines[3:])
    assert record.live(number=10) == (10, lines[10:])
    assert record.live(since_ns=monotonic_ns()) == (record.live_count, [])
    long = record.emit(PeerEvicted("x" * recorder.MAX_LIVE_BYTES))
    assert record.live() == (record.live_count - 1, [long])


def test_what_does_not_fit_into_the_queue_is_counted(
    open_recorder: Callable[..., Recorder], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder, "MAX_QUEUED", 4)
    blocked, may_go = threading.Event(), threading.Event()

    def collect() -> list[bytes]:
        blocked.set()
        assert may_go.wait(WAIT_S)
        return []

    record = open_recorder(collect=collect)
    assert blocked.wait(WAIT_S)
    for _ in range(10):
        record.add_line(LINE)
    assert record.dropped == 6
    monkeypatch.setattr(recorder, "MAX_QUEUED", 1_000)
    monkeypatch.setattr(recorder, "MAX_QUEUED_BYTES", 6 * len(LINE))
    for _ in range(10):
        record.add_line(LINE)
    assert record.dropped == 6 + 8, "two more fit into the bytes"
    may_go.set()
    record.close()
    assert len(events_of(record.path or Path())) == 1 + 6


def test_a_disk_that_fills_up_ends_the_record_and_nothing_else(
    open_recorder: Callable[..., Recorder], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "ringfold.record")
    record = open_recorder()
    monkeypatch.setattr(recorder.os, "write", refuse)
    record.emit(PeerEvicted("lost with the disk"))
    until(lambda: not record.is_recording)
    monkeypatch.undo()
    for _ in range(3):
        record.emit(PeerEvicted("in memory"))
    assert record.dropped >= 4
    assert len(record.recent()) == 4
    assert not record.is_closed, "the record has ended; the recorder has not"
    record.close()
    [warning] = [each for each in caplog.records if each.name == "ringfold.record"]
    assert f"the record {record.path} ends here: No space left on device" in warning.getMessage()


def test_a_collector_that_breaks_ends_the_record_and_nothing_else(
    open_recorder: Callable[..., Recorder], caplog: pytest.LogCaptureFixture
) -> None:
    def collect() -> list[bytes]:
        raise RuntimeError("broken")

    record = open_recorder(collect=collect)
    until(lambda: not record.is_recording)
    record.emit(PeerEvicted("in memory"))
    assert len(record.recent()) == 1
    assert sum("ends here" in each.getMessage() for each in caplog.records) == 1


def test_a_forked_child_writes_nothing(open_recorder: Callable[..., Recorder]) -> None:
    record = open_recorder()
    record.emit(PeerEvicted("of the parent"))
    child = os.fork()
    if child == 0:
        record.forked()
        record.emit(PeerEvicted("of the child"))
        record.close()
        os._exit(0 if len(record.recent()) == 2 and not record.is_recording else 1)
    assert os.waitpid(child, 0)[1] == 0
    record.close()
    [_, event] = events_of(record.path or Path())
    assert event.notice == PeerEvicted("of the parent")


def test_many_threads_record_at_once(open_recorder: Callable[..., Recorder]) -> None:
    record = open_recorder()

    def work(name: str) -> None:
        for number in range(200):
            record.emit(PeerEvicted(f"{name} {number}"))
            record.live(max(0, record.live_count - 10))

    workers = [threading.Thread(target=work, args=(str(each),)) for each in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    record.close()
    reasons = [str(event.notice) for event in events_of(record.path or Path())[1:]]
    assert len(set(reasons)) == 800 == record.live_count
    assert record.dropped == 0
    for each in range(4):
        assert [text for text in reasons if text.startswith(f"evicted: {each} ")] == [
            f"evicted: {each} {number}" for number in range(200)
        ]


# Flight records


def test_a_flight_record_has_the_last_events_and_the_stacks(
    open_recorder: Callable[..., Recorder], tmp_path: Path
) -> None:
    record = open_recorder(None)
    for number in range(recorder.MAX_RECENT + 7):
        record.emit(ValuesLogged({"n": number}))
    waits, is_waiting = threading.Event(), threading.Event()

    def waits_for_the_test() -> None:
        is_waiting.set()
        waits.wait(WAIT_S)

    same_name = [threading.Thread(target=waits_for_the_test, name="twins") for _ in range(2)]
    for thread in same_name:
        thread.start()
    assert is_waiting.wait(WAIT_S)
    path = record.dump(tmp_path / "new" / "flights", "it froze", [LINE], stacks=True)
    waits.set()
    for thread in same_name:
        thread.join()
    assert path is not None
    assert path.parent.stat().st_mode & 0o777 == 0o700
    first, *rest, stacks, last = events_of(path)
    assert isinstance(first.notice, RecordBegun)
    assert isinstance(stacks.notice, StacksDumped)
    assert last.notice == FlightDumped("it froze", 7)
    assert len(rest) == recorder.MAX_RECENT + 1
    assert rest[-1].stamp == Stamp(5)
    of_twins = [stack for name, stack in stacks.notice.stacks.items() if name.startswith("twins")]
    assert len(of_twins) == 2
    assert any("waits_for_the_test" in stack for stack in of_twins)
    assert any("test_a_flight_record_has" in stack for stack in stacks.notice.stacks.values())


def test_the_newest_flight_records_are_kept(open_recorder: Callable[..., Recorder], tmp_path: Path) -> None:
    """Also of more than fit: none takes the name of another one that is still there."""
    record = open_recorder(None)
    written = [record.dump(tmp_path, str(number)) for number in range(recorder.MAX_FLIGHTS + 5)]
    for age, path in enumerate(written):
        if path is not None and path.exists():
            os.utime(path, ns=(age, age))
    assert len(set(written)) == recorder.MAX_FLIGHTS + 5
    kept = sorted(tmp_path.iterdir(), key=lambda path: path.stat().st_mtime_ns)
    reasons = [event.notice.reason for path in kept if isinstance((event := events_of(path)[-1]).notice, FlightDumped)]
    assert len(kept) == recorder.MAX_FLIGHTS
    assert reasons[-1] == str(recorder.MAX_FLIGHTS + 4)
    assert "0" not in reasons
    assert record.dump(tmp_path, "one more") not in written


def test_a_flight_record_that_cannot_be_written_is_logged(
    open_recorder: Callable[..., Recorder], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    assert open_recorder(None).dump(tmp_path / "file", "why") is None
    assert "no flight record can be written" in caplog.text


def test_a_record_is_read_back(open_recorder: Callable[..., Recorder], tmp_path: Path) -> None:
    record = open_recorder()
    record.emit(PeerEvicted("silent"))
    record.close()
    with (record.path or Path()).open("ab") as file:
        file.write(LINE[:-5])  # of a process that was killed
    [read] = read_directory(tmp_path)
    assert read.begun.name == ABOUT.name
    assert read.began.wall > 0
    assert [event.notice for event in read.events()] == [PeerEvicted("silent")]
    assert read.skipped == 1
