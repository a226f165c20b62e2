"""Checkpoints: they come back bit by bit, and whatever goes wrong is named and harms no other one."""

import logging
import os
import re
import resource
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import ml_dtypes
import msgspec
import numpy as np
import pytest

from ringfold.errors import StateError, UsageError
from ringfold.state.ancestry import new_lineage
from ringfold.state.checkpoint import _HEAD, CheckpointEntry, Checkpoints
from ringfold.state.shared import MayDiffer, SharedState, lineage_of, set_lineage, set_torn
from ringfold.state.snapshot import Snapshot
from ringfold.wire.messages import Branch, Lineage


def state_of(seed: int, revision: int = 0, **more: object) -> SharedState:
    """Arrays of many sizes: several chunks, a part of a block, nothing, a single number."""
    rng = np.random.default_rng(seed)
    arrays = {
        "large": rng.standard_normal(9 * (1 << 20) // 4 + 1).astype(np.float32),
        "small": rng.standard_normal((3, 5)).astype(ml_dtypes.bfloat16),
        "empty": np.zeros((0, 4)),
        "scalar": np.array(rng.integers(1000)),
    }
    return SharedState({**arrays, **more}, revision=revision)


def bytes_of(state: SharedState) -> dict[str, bytes]:
    return {name: array.tobytes() for name, array in state.arrays.items()}  # type: ignore[attr-defined]


def damage(path: Path, offset: int) -> None:
    """Flip one bit; a negative offset counts from the end."""
    content = bytearray(path.read_bytes())
    content[offset] ^= 1
    path.write_bytes(content)


def test_a_checkpoint_comes_back_bit_by_bit_with_its_revision(tmp_path: Path) -> None:
    saved, fresh = state_of(1, revision=42), state_of(2)
    Checkpoints(tmp_path).save(saved)
    assert Checkpoints(tmp_path).load_newest(fresh) == 42
    assert bytes_of(fresh) == bytes_of(saved)
    assert fresh.revision == 42


def test_no_checkpoint_is_no_error(tmp_path: Path) -> None:
    assert Checkpoints(tmp_path / "none").load_newest(state_of(1)) is None


def test_what_may_differ_is_saved_too(tmp_path: Path) -> None:
    own = np.arange(5)
    Checkpoints(tmp_path).save(SharedState(model=np.zeros(3), own=MayDiffer(own)))
    fresh = np.zeros(5, own.dtype)
    Checkpoints(tmp_path).load_newest(SharedState(model=np.zeros(3), own=MayDiffer(fresh)))
    assert fresh.tolist() == own.tolist()


def test_the_newest_revisions_stay(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    for revision in (1, 2, 3, 4):
        checkpoints.save(state_of(1, revision))
    assert checkpoints.revisions() == [4, 3]


def test_a_checkpoint_older_than_those_that_are_kept_is_not_pruned_by_its_own_save(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=1)
    checkpoints.save(state_of(1, 9))
    checkpoints.save(state_of(1, 5))
    assert checkpoints.revisions() == [9, 5]


def test_a_rolled_back_future_can_be_discarded(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    for revision in (5, 6, 7):
        checkpoints.save(state_of(1, revision))
    checkpoints.discard_after(5)
    assert checkpoints.revisions() == [5]


def test_a_given_revision_is_loaded(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    for revision in (5, 6):
        checkpoints.save(state_of(revision, revision))
    state = state_of(1)
    assert checkpoints.load(state, 5) == 5
    assert bytes_of(state) == bytes_of(state_of(5))


def test_a_revision_that_is_not_there_is_refused_with_those_that_are(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(state_of(1, 5))
    with pytest.raises(StateError, match=r"revision 7 .*; there is: 5"):
        checkpoints.load(state_of(1), 7)


@pytest.mark.parametrize("offset", [3, 50, 200, -1, -5_000_000], ids=["magic", "head", "manifest", "end", "middle"])
def test_a_damaged_checkpoint_is_named_and_the_next_older_one_is_taken(
    tmp_path: Path, offset: int, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(state_of(1, 1))
    newest = checkpoints.save(state_of(2, 2))
    damage(newest, offset)
    state = state_of(3)
    with caplog.at_level(logging.WARNING, "ringfold"):
        assert checkpoints.load_newest(state) == 1
    assert str(newest) in caplog.text
    assert bytes_of(state) == bytes_of(state_of(1))


@pytest.mark.parametrize("size", [0, 10, 100, 5_000_000])
def test_a_checkpoint_that_was_cut_off_is_damaged(tmp_path: Path, size: int) -> None:
    checkpoints = Checkpoints(tmp_path)
    os.truncate(checkpoints.save(state_of(1, 1)), size)
    with pytest.raises(StateError, match=re.escape(str(tmp_path))):
        checkpoints.load(state_of(2), 1)


def test_a_damaged_checkpoint_leaves_the_state_as_it_was(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    damage(checkpoints.save(state_of(1, 1)), -1)
    state = state_of(2, 7)
    with pytest.raises(StateError, match="damaged"):
        checkpoints.load(state, 1)
    assert (bytes_of(state), state.revision, state.torn) == (bytes_of(state_of(2)), 7, False)


def test_a_state_that_was_torn_before_also_gets_the_next_older_one(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(state_of(1, revision=1))
    damage(checkpoints.save(state_of(2, revision=2)), -1)
    state = state_of(3)
    set_torn(state, True)
    assert checkpoints.load_newest(state) == 1
    assert not state.torn


def test_a_fresh_start_in_spite_of_damaged_checkpoints_is_the_callers_decision(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    damage(checkpoints.save(state_of(1, 1)), -1)
    with pytest.raises(StateError, match="all 1 checkpoints"):
        checkpoints.load_newest(state_of(2))


def test_a_disk_that_fails_between_check_and_load_leaves_the_state_torn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(state_of(1, 1))
    state = state_of(2)
    whole = "ringfold.state.checkpoint._check_chunk"
    calls = []

    def failing(path: Path, *_: object) -> None:
        calls.append(path)
        if state.torn and len(calls) > 3:
            raise OSError(5, "Input/output error")

    monkeypatch.setattr(whole, failing)
    with pytest.raises(StateError, match="cannot be read: Input/output error"):
        checkpoints.load_newest(state)
    assert state.torn


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        ({"a": np.zeros(4, np.float32)}, r"'a' is float32 \[3\] in .*, but float32 \[4\]"),
        ({"a": np.zeros(3, np.float64)}, r"'a' is float32 \[3\] in .*, but float64 \[3\]"),
        ({"b": np.zeros(3, np.float32)}, "holds 'a'"),
        ({"a": np.zeros(3, np.float32), "b": np.zeros(1)}, "does not hold 'b'"),
    ],
)
def test_a_state_that_is_not_the_checkpoints_is_refused(tmp_path: Path, arrays: dict[str, object], words: str) -> None:
    Checkpoints(tmp_path).save(SharedState(a=np.ones(3, np.float32)))
    with pytest.raises(UsageError, match=words):
        Checkpoints(tmp_path).load_newest(SharedState(arrays))


def test_a_torn_state_is_not_saved(tmp_path: Path) -> None:
    state = state_of(1)
    set_torn(state, True)
    with pytest.raises(StateError, match="torn"):
        Checkpoints(tmp_path).save(state)


def test_loading_makes_a_torn_state_whole(tmp_path: Path) -> None:
    state = state_of(1)
    Checkpoints(tmp_path).save(state)
    set_torn(state, True)
    Checkpoints(tmp_path).load_newest(state)
    assert not state.torn


@contextmanager
def files_of_at_most(nbytes: int) -> Iterator[None]:
    """The system refuses to let a file grow beyond this, as a full disk does."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_is_an_error_that_leaves_the_older_checkpoints_and_nothing_else(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=1)
    first = checkpoints.save(state_of(1, 1))
    with files_of_at_most(5_000_000), pytest.raises(StateError, match=r"state-0+2-\w+.ringfold cannot be written"):
        checkpoints.save(state_of(2, 2))
    assert list(tmp_path.iterdir()) == [first]
    assert checkpoints.load_newest(state_of(3)) == 1


def test_a_directory_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(StateError, match=re.escape(str(tmp_path / "file" / "here"))):
        Checkpoints(tmp_path / "file" / "here").save(state_of(1))


def test_a_missing_permission_is_named(tmp_path: Path) -> None:
    Checkpoints(tmp_path).save(state_of(1))  # whatever is imported by this, another user need not be able to import
    # Not below `tmp_path`, which other users cannot reach at all.
    with tempfile.TemporaryDirectory() as folder, unprivileged(Path(folder)):
        Path(folder).chmod(0o500)
        with pytest.raises(StateError, match=f"{re.escape(folder)}.*Permission denied"):
            Checkpoints(folder).save(state_of(1))


@contextmanager
def unprivileged(folder: Path) -> Iterator[None]:
    """Root may write everywhere: become a user that may not, and own the folder, until the end of the block."""
    if os.geteuid() != 0:
        yield
        return
    nobody = 65_534
    os.chown(folder, nobody, -1)
    os.seteuid(nobody)
    try:
        yield
    finally:
        os.seteuid(0)


def test_a_state_that_changes_while_it_is_saved_is_not_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = state_of(1)
    monkeypatch.setattr(Checkpoints, "_remove_leftovers", lambda _: change(state))
    with pytest.raises(StateError, match="'large' was changed while it was saved"):
        Checkpoints(tmp_path).save(state)
    assert list(tmp_path.iterdir()) == []


def change(state: SharedState) -> None:
    state.arrays["large"][-1] += 1  # type: ignore[index]


def test_the_same_content_is_written_once(tmp_path: Path) -> None:
    """Several peers of a host may share a directory: they save the same."""
    first = Checkpoints(tmp_path).save(state_of(1, 1))
    before = first.stat().st_ino
    assert Checkpoints(tmp_path).save(state_of(1, 1)) == first
    assert first.stat().st_ino == before


def test_a_cut_off_file_of_the_same_name_is_replaced(tmp_path: Path) -> None:
    path = Checkpoints(tmp_path).save(state_of(1, 1))
    os.truncate(path, path.stat().st_size - 1)
    Checkpoints(tmp_path).save(state_of(1, 1))
    assert Checkpoints(tmp_path).load_newest(state_of(2)) == 1


def test_peers_whose_own_content_differs_have_files_of_their_own(tmp_path: Path) -> None:
    paths = {Checkpoints(tmp_path).save(state_of(1, 1, own=MayDiffer(np.array([peer])))) for peer in range(2)}
    assert len(paths) == 2


def test_leftovers_of_crashed_saves_are_removed_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / ".state-000000000001-0123456789abcdef.saving").write_bytes(b"half")
    (tmp_path / ".state-notes.saving").write_bytes(b"not ours")
    path = Checkpoints(tmp_path).save(state_of(1, 2))
    assert {each.name for each in tmp_path.iterdir()} == {path.name, ".state-notes.saving"}


def test_a_save_that_is_under_way_is_no_leftover(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another peer cleans up in the middle of this one's save."""
    at: list[Callable[[], object]] = [Checkpoints(tmp_path)._remove_leftovers]
    real = os.fsync

    def fsync(descriptor: int) -> None:
        at[0]()
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    assert Checkpoints(tmp_path).save(state_of(1, 2)).exists()


def test_a_new_directory_is_synced_with_all_that_hold_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint that is whole is of no use in a directory that a crash of the machine has undone."""
    synced: set[str] = set()
    real = os.fsync

    def fsync(descriptor: int) -> None:
        synced.add(os.readlink(f"/proc/self/fd/{descriptor}"))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    directory = tmp_path / "runs" / "7" / "ckpt"
    Checkpoints(directory).save(state_of(1, 2))
    assert {str(each) for each in (directory, *directory.parents[:3])} <= synced


def test_a_format_of_the_future_is_refused_by_its_number(tmp_path: Path) -> None:
    path = Checkpoints(tmp_path).save(state_of(1, 2))
    damage(path, 8)
    with pytest.raises(StateError, match="version 0"):
        Checkpoints(tmp_path).load_newest(state_of(1))


def test_nothing_kept_makes_no_sense(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="keep"):
        Checkpoints(tmp_path, keep=0)


def test_the_guide_shows_how_to_read_an_array_without_ringfold(tmp_path: Path) -> None:
    """The snippet in the guide is run as it stands there."""
    guide = Path(__file__).resolve().parents[3] / "docs" / "guides" / "checkpoints.md"
    snippet = guide.read_text(encoding="utf-8").split("```python\n")[-1].split("```")[0]
    model = np.arange(12, dtype=np.float32).reshape(3, 4)
    names: dict[str, object] = {"path": Checkpoints(tmp_path).save(SharedState(a=np.ones(3, bool), model=model))}
    exec(snippet, names)
    assert np.array_equal(names["model"], model)  # type: ignore[arg-type]


# Lineages

WRITTEN_BEFORE = Path(__file__).parents[1] / "written_before"
OLD = Lineage("run", "old")
NEW = new_lineage("run", "new", OLD, 140)


def save_at(checkpoints: Checkpoints, lineage: Lineage | None, revision: int, value: int) -> None:
    state = SharedState(w=np.full(10, value, np.float32), revision=revision)
    set_lineage(state, lineage)
    checkpoints.save(state)


def fresh() -> SharedState:
    return SharedState(w=np.zeros(10, np.float32))


def test_a_checkpoint_carries_its_lineage(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    save_at(checkpoints, NEW, 145, 1)
    state = fresh()
    checkpoints.load_newest(state)
    assert lineage_of(state) == NEW
    offer = Snapshot.take(state).manifest.offer("enforce-popular")
    assert (offer.lineage, offer.is_loaded) == (NEW, True)


def test_a_state_that_was_changed_is_no_checkpoint_any_more(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    save_at(checkpoints, NEW, 145, 1)
    state = fresh()
    checkpoints.load_newest(state)
    state.arrays["w"][3] = 7  # type: ignore[index]
    assert not Snapshot.take(state).manifest.offer("enforce-popular").is_loaded


def test_a_checkpoint_that_was_saved_with_another_hash_is_one_all_the_same(tmp_path: Path) -> None:
    pytest.importorskip("blake3")
    checkpoints = Checkpoints(tmp_path)
    save_at(checkpoints, NEW, 145, 1)
    state = SharedState(w=np.zeros(10, np.float32), hash="blake3")
    checkpoints.load_newest(state)
    assert Snapshot.take(state).manifest.offer("enforce-popular").is_loaded


def test_what_is_private_may_change_without_making_it_another_checkpoint(tmp_path: Path) -> None:
    checkpoints, seen = Checkpoints(tmp_path), np.zeros(3)
    state = SharedState(w=np.ones(10, np.float32), seen=MayDiffer(seen), revision=5)
    set_lineage(state, OLD)
    checkpoints.save(state)
    checkpoints.load_newest(state)
    seen += 1
    assert Snapshot.take(state).manifest.offer("enforce-popular").is_loaded


def test_an_abandoned_checkpoint_is_not_the_newest(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    save_at(checkpoints, OLD, 150, 1)
    save_at(checkpoints, NEW, 145, 2)
    state = fresh()
    assert checkpoints.load_newest(state) == 145
    assert checkpoints.branches() == [Branch("old", 150), Branch("new", 145)]
    assert checkpoints.load_branch(state, Branch("old", 150)) == 150
    with pytest.raises(StateError, match="no checkpoint of revision 150"):
        checkpoints.load_branch(state, Branch("new", 150))


def test_the_same_revision_of_two_lineages_is_loaded_from_the_one_that_goes_on(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    save_at(checkpoints, NEW, 150, 2)
    save_at(checkpoints, OLD, 150, 1)  # by a peer that did not know better
    state = fresh()
    checkpoints.load(state, 150)
    assert lineage_of(state) == NEW


def test_abandoned_checkpoints_do_not_displace_those_of_the_run(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    for revision in (140, 150, 160):
        save_at(checkpoints, OLD, revision, revision)
    for revision in (140, 142, 144):
        save_at(checkpoints, NEW, revision, revision + 1)
    assert checkpoints.branches() == [
        Branch("old", 160),
        Branch("old", 150),
        Branch("new", 144),
        Branch("new", 142),
    ]


def test_a_state_that_goes_on_in_a_new_lineage_is_saved_as_a_part_of_that(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    save_at(checkpoints, OLD, 140, 1)
    save_at(checkpoints, NEW, 140, 1)
    assert checkpoints.branches() == [Branch("new", 140)]


def test_a_file_of_the_version_before_is_loaded_and_has_no_lineage(tmp_path: Path) -> None:
    [path] = WRITTEN_BEFORE.glob("*.ringfold")
    shutil.copy(path, tmp_path)
    state = SharedState(w=np.zeros(10, np.float32))
    assert Checkpoints(tmp_path).load_newest(state) == 7
    assert list(state.arrays["w"]) == list(range(10))  # type: ignore[call-overload]
    assert lineage_of(state) is None
    assert Checkpoints(tmp_path).branches() == []


def test_what_is_written_now_has_the_fields_that_the_version_before_reads(tmp_path: Path) -> None:
    """It ignores those that it does not know."""

    class Before(msgspec.Struct):
        revision: int
        hash: str
        keys: list[CheckpointEntry]

    checkpoints = Checkpoints(tmp_path)
    save_at(checkpoints, NEW, 145, 1)
    [path] = checkpoints.paths()
    raw = path.read_bytes()
    _, version, _, length, _ = _HEAD.unpack(raw[: _HEAD.size])
    assert version == 1
    assert msgspec.json.decode(raw[_HEAD.size : _HEAD.size + length], type=Before).revision == 145
