"""The events of a run in the order of time: of files, of files that grow, and which of them are wanted."""

import threading
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest

from ringfold.errors import ConfigError, UsageError
from ringfold.observe import stream
from ringfold.observe.records import read_directory
from ringfold.observe.stream import Filter, Seen, check_kinds, follow_directory, instant, merged
from ringfold.units import S
from ringfold.wire.events import (
    KINDS,
    RECORD_FORMAT,
    Event,
    PeerEvicted,
    RecordBegun,
    Role,
    Stamp,
    StepEnded,
    ValuesLogged,
    encode_event,
)
from ringfold.wire.notices import Notice, PeerRegistered

WALL = 1_700_000_000 * S


class Files:
    """Records of a run directory, whose hosts' monotonic clocks differ."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def begin(self, role: Role, name: str, offset_ns: int, at_ns: int = 0, part: int = 0, version: int = 1) -> None:
        begun = RecordBegun(version, role, "default", name, "host", "boot", 7, "1.0", part)
        self.write(name, offset_ns, at_ns, begun, role=role, part=part)

    def write(
        self, name: str, offset_ns: int, at_ns: int, notice: Notice, *, role: str = "peer", part: int = 0,
        peer: int = 0, has_wall: bool = True, cut: int | None = None,
    ) -> None:  # fmt: skip
        stamp = Stamp(at_ns + offset_ns, WALL + at_ns if has_wall else 0, peer)
        with (self.directory / f"{role}-{name}-7.{part:04}.jsonl").open("ab") as file:
            file.write((encode_event(stamp, notice) + b"\n")[:cut])


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path)


def texts(seen: "list[Seen]") -> list[str]:
    return [each.notice.reason if isinstance(each.notice, PeerEvicted) else str(each.notice) for each in seen]


def test_events_of_all_files_are_in_the_order_of_time(files: Files) -> None:
    for role, name, offset_ns in (("master", "m", 50 * S), ("peer", "a", 9_000 * S), ("peer", "b", 1)):
        files.begin(role, name, offset_ns)  # type: ignore[arg-type]
    for number, (role, name, offset_ns) in enumerate(
        [("peer", "a", 9_000 * S), ("master", "m", 50 * S), ("peer", "b", 1), ("peer", "a", 9_000 * S)]
    ):
        files.write(name, offset_ns, (number + 1) * S, PeerEvicted(str(number)), role=role, peer=3)
    found = list(merged(files.directory))
    assert texts(found) == ["0", "1", "2", "3"]
    assert [each.wall_ns - WALL for each in found] == [1 * S, 2 * S, 3 * S, 4 * S]
    assert [(each.role, each.source, each.peer) for each in found[:2]] == [("peer", "a", 3), ("master", "m", 3)]


def test_ops_and_steps_get_their_wall_time_from_the_record(files: Files) -> None:
    """Also the first ones, and those of a record whose first parts are deleted."""
    files.begin("peer", "a", 500 * S, part=4)
    files.write("a", 500 * S, 1 * S, StepEnded(1, 1, 2, 3), has_wall=False, part=4)
    [step] = merged(files.directory)
    assert step.wall_ns == WALL + 1 * S


def test_lines_that_are_a_little_late_are_in_their_places(files: Files) -> None:
    files.begin("peer", "a", 0)
    for at_ns in (1 * S, 3 * S, 2 * S, 4 * S, 3 * S + 1, 9 * S):
        files.write("a", 0, at_ns, PeerEvicted(str(at_ns)))
    times = [each.wall_ns for each in merged(files.directory)]
    assert times == sorted(times)
    assert len(times) == 6


def test_a_directory_without_records_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="has no records of events"):
        list(merged(tmp_path))
    with pytest.raises(UsageError, match="there is no run directory"):
        list(merged(tmp_path / "none"))
    with pytest.raises(UsageError, match="there is no run directory"):
        next(follow_directory(tmp_path / "none"))


def test_a_record_of_a_newer_format_is_an_error(files: Files) -> None:
    files.begin("peer", "a", 0, version=RECORD_FORMAT + 1)
    with pytest.raises(UsageError, match=r"written by version 1\.0"):
        read_directory(files.directory)


def test_a_file_without_its_first_line_is_skipped(files: Files) -> None:
    files.begin("peer", "a", 0)
    files.write("a", 0, 1, PeerEvicted("x"))
    (files.directory / "peer-b-8.0000.jsonl").write_bytes(b'{"at":1,"ev')
    (files.directory / "notes.txt").write_text("hello")
    assert texts(list(merged(files.directory))) == ["x"]


# Following


@pytest.fixture
def follow(files: Files, monkeypatch: pytest.MonkeyPatch) -> "Callable[[int], list[Seen]]":
    """Takes so many events. Between two looks at the files nothing is waited for, up to a limit."""
    looks = 0

    def pause(seconds: float) -> None:
        nonlocal looks
        looks += 1
        assert looks < 1_000, "it did not come"

    monkeypatch.setattr(stream.threads, "pause", pause)
    following: list[Iterator[Seen]] = []

    def take(count: int) -> list[Seen]:
        if not following:
            following.append(follow_directory(files.directory))
        return [next(following[0]) for _ in range(count)]

    return take


def test_what_is_appended_is_seen_once(files: Files, follow: "Callable[[int], list[Seen]]") -> None:
    files.begin("peer", "a", 5 * S)
    files.begin("master", "m", 7 * S)
    files.write("a", 5 * S, 1 * S, PeerEvicted("old a"))
    files.write("m", 7 * S, 2 * S, PeerEvicted("old m"), role="master")
    assert texts(follow(1)) == ["old a"]
    files.write("a", 5 * S, 3 * S, PeerEvicted("while it reads"))
    assert texts(follow(2)) in (["old m", "while it reads"], ["while it reads", "old m"])
    files.write("a", 5 * S, 4 * S, PeerEvicted("new a"))
    files.write("m", 7 * S, 5 * S, PeerEvicted("new m"), role="master")
    assert texts(follow(2)) == ["new a", "new m"]


def test_a_line_is_seen_when_it_is_whole(files: Files, follow: "Callable[[int], list[Seen]]") -> None:
    files.begin("peer", "a", 0)
    files.write("a", 0, 1 * S, PeerEvicted("one"))
    whole = encode_event(Stamp(2 * S, WALL + 2 * S), PeerEvicted("two")) + b"\n"
    path = files.directory / "peer-a-7.0000.jsonl"
    with path.open("ab") as file:
        file.write(whole[:30])
    assert texts(follow(1)) == ["one"]
    with path.open("ab") as file:
        file.write(whole[30:])
    assert texts(follow(1)) == ["two"]


def test_new_files_and_parts_are_followed_and_deleted_ones_forgotten(
    files: Files, follow: "Callable[[int], list[Seen]]"
) -> None:
    files.begin("peer", "a", 3 * S)
    files.write("a", 3 * S, 1 * S, PeerEvicted("part 0"))
    assert texts(follow(1)) == ["part 0"]
    (files.directory / "peer-a-7.0000.jsonl").unlink()
    (files.directory / "master-m-7.0000.jsonl").touch()  # its first line comes later
    files.begin("peer", "a", 3 * S, part=1)
    files.write("a", 3 * S, 2 * S, PeerEvicted("part 1"), part=1)
    assert texts(follow(1)) == ["part 1"]
    files.begin("master", "m", 8 * S, at_ns=3 * S)
    files.write("m", 8 * S, 4 * S, StepEnded(1, 1, 2, 3), role="master", has_wall=False)
    [seen] = follow(1)
    assert (seen.role, seen.source, seen.wall_ns) == ("master", "m", WALL + 4 * S)


def test_a_directory_without_records_yet_can_be_followed(files: Files, follow: "Callable[[int], list[Seen]]") -> None:
    taken: list[Seen] = []
    started = threading.Event()

    def write() -> None:
        files.begin("peer", "a", 0)
        files.write("a", 0, 1, PeerEvicted("first"))
        started.set()

    writer = threading.Thread(target=write)
    writer.start()
    assert started.wait(20)
    writer.join()
    taken += follow(1)
    assert texts(taken) == ["first"]


# Which events


def seen(notice: "PeerEvicted | ValuesLogged | PeerRegistered", *, peer: int = 0, wall_ns: int = 5) -> Seen:
    role: Role = "peer" if peer else "master"
    return Seen(wall_ns, role, "name" if peer else "127.0.0.1:1", Event(Stamp(1, wall_ns, peer), notice))


def test_a_filter_is_about_level_kind_source_and_time() -> None:
    evicted, logged = seen(PeerEvicted("x"), peer=3), seen(ValuesLogged({}), peer=3)
    of_master = seen(PeerRegistered(3, "gpu-1", 0, "r"))
    assert Filter().keeps(evicted)
    assert Filter().keeps(of_master)
    assert not Filter().keeps(logged)
    assert Filter(level="debug").keeps(logged)
    assert not Filter(level="error").keeps(evicted)
    assert Filter(kinds=["values_logged"]).keeps(logged), "a kind that is asked for is shown at any level"
    assert not Filter(kinds=["values_logged"]).keeps(evicted)
    for source in ("3", "name"):
        assert Filter(sources=[source]).keeps(evicted)
    for source in ("3", "gpu-1", "master"):
        assert Filter(sources=[source]).keeps(of_master), "what others recorded about a peer is asked for with it"
    assert not Filter(sources=["4", "gpu-2"]).keeps(of_master)
    assert Filter(sources=["master"]).keeps(of_master)
    assert not Filter(sources=["master", "4"]).keeps(evicted)
    assert Filter(since_ns=5, until_ns=5).keeps(evicted)
    assert not Filter(since_ns=6).keeps(evicted)
    assert not Filter(until_ns=4).keeps(evicted)


def test_a_kind_that_does_not_exist_is_an_error() -> None:
    check_kinds(["op_ended", "peer_gone"], KINDS)
    with pytest.raises(ConfigError, match="no kind of event 'op_end'; there are: admission_delayed, "):
        check_kinds(["op_end"], KINDS)


@pytest.mark.parametrize(
    ("text", "ago_s"), [("90s", 90), ("10m", 600), ("2h", 7_200), ("1d", 86_400), ("0.5m", 30), ("0s", 0)]
)
def test_a_time_ago(text: str, ago_s: float) -> None:
    assert instant(text, WALL) == WALL - ago_s * S


def test_a_date_and_time() -> None:
    when = datetime(2026, 11, 18, 14, 2, 11, tzinfo=UTC)
    assert instant("2026-11-18T14:02:11Z", WALL) == int(when.timestamp()) * S
    assert instant("2026-11-18T15:02:11+01:00", WALL) == int(when.timestamp()) * S
    assert instant("2026-11-18T14:02:11", WALL) == int(when.replace(tzinfo=None).timestamp()) * S


@pytest.mark.parametrize("text", ["", "m", "x", "10", "10y", "-5m", "1.2.3s", "²s", "2026-13-01", "9" * 400 + "s"])
def test_what_is_no_time_is_an_error(text: str) -> None:
    with pytest.raises(ConfigError, match="is no time"):
        instant(text, WALL)
