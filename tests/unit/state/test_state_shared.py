"""The shared state as the program makes it, and the memory and manifest that a sync makes of it."""

import array as arrays
from collections.abc import Callable

import ml_dtypes
import numpy as np
import pytest

import ringfold as rf
from ringfold.errors import UsageError
from ringfold.limits import MAX_KEYS
from ringfold.state.array_memory import ArrayMemory, memory_of
from ringfold.state.blocks import BLOCK_BYTES, block_count, block_range, root_hash
from ringfold.state.hashing import block_hash, block_hashes
from ringfold.state.manifest import digest_of
from ringfold.state.shared import SharedState, set_torn
from ringfold.state.snapshot import Snapshot
from ringfold.wire.messages import KeyOffer

# What the program holds


def test_a_push_adds_one() -> None:
    state = SharedState(a=np.zeros(1), revision=4)
    assert state.push_revision() == 5
    assert state.revision == 5


@pytest.mark.parametrize("revision", [-1, 1 << 63, 1.5, "7"])
def test_a_revision_is_a_number_that_counts_from_zero(revision: object) -> None:
    state = SharedState(a=np.zeros(1))
    with pytest.raises(UsageError, match="revision"):
        state.revision = revision  # type: ignore[assignment]


def test_the_arrays_are_there_without_their_marks() -> None:
    own = np.zeros(2)
    state = SharedState(model=np.zeros(1), own=rf.MayDiffer(own))
    assert state.arrays["own"] is own
    assert (state.may_differ("own"), state.may_differ("model")) == (True, False)


def test_torn_is_seen_and_not_set() -> None:
    state = SharedState(a=np.zeros(1))
    with pytest.raises(AttributeError):
        state.torn = True  # type: ignore[misc]
    set_torn(state, True)
    assert state.torn
    assert "torn" in repr(state)


def test_a_step_loop_may_have_no_arrays_at_all() -> None:
    state = SharedState._without_arrays(3)
    assert Snapshot.take(state).manifest.offer("enforce-popular").keys == []


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: SharedState(w=[1, 2]), "'w' is a list"),
        (lambda: SharedState(w=np.ones((4, 4))[:, ::2]), "'w' is not contiguous"),
        (lambda: SharedState(w=np.ones((4, 4), order="F")), "'w' is not contiguous"),
        (lambda: SharedState(w=memoryview(bytearray(8))[::2]), "'w' is not contiguous"),
        (lambda: SharedState(w=np.broadcast_to(np.float32(1), (1,))), "'w' is read-only"),
        (lambda: SharedState(w=b"bytes"), "'w' is read-only"),
        (lambda: SharedState(w=np.array([object()])), "'w' holds Python objects"),
        (lambda: SharedState(w=np.zeros(3, [("a", "f4"), ("b", "O")])), "'w' holds Python objects"),
        (lambda: SharedState(w=np.zeros(1), hash="md5"), "unknown hash 'md5'"),  # type: ignore[arg-type]
        (lambda: SharedState({str(i): np.zeros(0) for i in range(MAX_KEYS + 1)}), "at most 100000"),
    ],
)
def test_what_no_sync_could_use_is_refused_with_its_name(make: Callable[[], object], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        make()


# ArrayMemory

SHARED = [
    (np.arange(6, dtype=np.float32).reshape(2, 3), "float32", (2, 3)),
    (np.ones(3, np.float16), "float16", (3,)),
    (np.ones(3, bool), "bool", (3,)),
    (np.ones(3, np.complex64), "complex64", (3,)),
    (np.ones(3, ">f4"), ">f4", (3,)),
    (np.array(["ab", "c"]), "<U2", (2,)),
    (np.zeros(2, "M8[ns]"), "<M8[ns]", (2,)),
    (np.zeros(2, [("x", "<f4"), ("y", "<i8")]), "[('x', '<f4'), ('y', '<i8')]", (2,)),
    (np.ones(3, ml_dtypes.bfloat16), "bfloat16", (3,)),
    (np.ones(3, ml_dtypes.float8_e4m3fn), "float8_e4m3fn", (3,)),
    (np.array(2.5), "float64", ()),
    (np.zeros((0, 7), np.int32), "int32", (0, 7)),
    (np.zeros(9, np.uint8)[1:].view(np.float64), "float64", (1,)),
    (bytearray(b"abc"), "uint8", (3,)),
    (arrays.array("d", [1.0, 2.0]), "float64", (2,)),
]


@pytest.mark.parametrize(("shared", "dtype", "shape"), SHARED, ids=[dtype + str(shape) for _, dtype, shape in SHARED])
def test_any_array_is_flat_bytes_in_place(shared: object, dtype: str, shape: tuple[int, ...]) -> None:
    memory = memory_of(shared, "x")
    assert (memory.dtype, memory.shape) == (dtype, shape)
    exported = memoryview(shared).nbytes if not isinstance(shared, np.ndarray) else shared.nbytes  # type: ignore[arg-type]
    assert memory.nbytes == exported
    assert memory.host is not None
    memory.host[:] = 1
    again = memory_of(shared, "x").host
    assert again is not None
    assert again.tolist() == [1] * memory.nbytes


def test_a_torch_tensor_is_flat_bytes_in_place() -> None:
    torch = pytest.importorskip("torch")
    for dtype in (torch.float32, torch.bfloat16, torch.bool, torch.complex64, torch.int64):
        tensor = torch.zeros((2, 3), dtype=dtype)
        memory = memory_of(tensor, "x")
        assert (memory.dtype, memory.shape) == (str(dtype).removeprefix("torch."), (2, 3))
        memory.write(0, np.ones(1, np.uint8))
        assert tensor.reshape(-1)[0] != 0
    parameter = torch.nn.Parameter(torch.zeros(()))
    assert memory_of(parameter, "x").nbytes == 4
    assert memory_of(torch.zeros(0), "x").nbytes == 0


def test_a_tensor_that_cannot_be_used_in_place_is_refused_with_its_name() -> None:
    torch = pytest.importorskip("torch")
    for tensor in (torch.zeros(4, 4).t(), torch.zeros(3, device="meta"), torch.eye(3).to_sparse()):
        with pytest.raises(UsageError, match="'x'"):
            memory_of(tensor, "x")


class Exporter:
    """An array of a library that has DLPack only."""

    def __init__(self, content: np.ndarray) -> None:
        self.content = content

    def __dlpack__(self, **options: object) -> object:
        return self.content.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.content.__dlpack_device__()


def test_an_array_with_dlpack_is_used_in_place() -> None:
    content = np.zeros(3, np.float32)
    memory = memory_of(Exporter(content), "x")
    memory.write(0, np.full(12, 255, np.uint8))
    assert np.isnan(content).all()


def test_reading_and_landing_give_the_array_itself() -> None:
    content = np.arange(10, dtype=np.uint8)
    memory = memory_of(content, "x")
    assert np.shares_memory(memory.read(2, 5), content)
    landing = memory.receive_buffer(2, 5)
    landing[:] = 0
    memory.write(2, landing)
    assert content.tolist() == [0, 1, 0, 0, 0, 5, 6, 7, 8, 9]


class FakeDevice:
    """A flat byte tensor that is not in host memory, as far as `ArrayMemory` can tell."""

    is_cuda = False

    def __init__(self, content: np.ndarray) -> None:
        self.content = content

    def __getitem__(self, part: slice) -> "FakeDevice":
        return FakeDevice(self.content[part])

    def cpu(self) -> "FakeDevice":
        return FakeDevice(self.content.copy())

    def numpy(self) -> np.ndarray:
        return self.content


def test_device_memory_is_hashed_in_stretches_to_the_same_hashes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ringfold.state.array_memory._STAGE_BYTES", 2 * BLOCK_BYTES)
    content = np.random.default_rng(1).integers(0, 256, 5 * BLOCK_BYTES + 7, np.uint8)
    memory = ArrayMemory("uint8", (content.size,), content.size, None, FakeDevice(content))  # type: ignore[arg-type]
    assert memory.block_hashes("rf64") == block_hashes(content, "rf64")
    assert not np.shares_memory(memory.receive_buffer(0, 5), content)


def test_the_last_block_is_short_and_nothing_has_none() -> None:
    assert [block_count(size) for size in (0, 1, BLOCK_BYTES, BLOCK_BYTES + 1)] == [0, 1, 1, 2]
    assert block_range(1, BLOCK_BYTES + 3) == (BLOCK_BYTES, BLOCK_BYTES + 3)


# The manifest


def test_a_snapshot_lists_keys_by_name_with_their_hashes() -> None:
    large = np.random.default_rng(1).integers(0, 256, BLOCK_BYTES + 5, np.uint8)
    manifest = Snapshot.take(SharedState(b=np.zeros((2, 2), np.float32), a=large, revision=9)).manifest
    hashes = block_hash(large[:BLOCK_BYTES], "rf64") + block_hash(large[BLOCK_BYTES:], "rf64")
    assert manifest.hashes[0] == hashes
    assert manifest.keys[0] == KeyOffer("a", "uint8", [BLOCK_BYTES + 5], root_hash(hashes, large.size, "rf64"))
    assert [key.name for key in manifest.keys] == ["a", "b"]
    assert (manifest.revision, manifest.nbytes) == (9, BLOCK_BYTES + 21)


def test_what_may_differ_is_not_hashed() -> None:
    manifest = Snapshot.take(SharedState(a=rf.MayDiffer(np.ones(3)))).manifest
    assert (manifest.hashes, manifest.keys[0].root, manifest.keys[0].may_differ) == ([b""], b"", True)


def test_an_offer_describes_the_state() -> None:
    state = SharedState(a=np.ones(3), revision=2)
    set_torn(state, True)
    offer = Snapshot.take(state).manifest.offer("send-only", stepped=True, rollback=True)
    assert (offer.revision, offer.strategy, offer.hash) == (2, "send-only", "rf64")
    assert (offer.torn, offer.stepped, offer.rollback) == (True, True, True)


def test_a_tensor_that_changed_its_shape_is_seen_at_the_next_snapshot() -> None:
    memory = bytearray(4)
    state = SharedState(a=memory)
    before = digest_of(Snapshot.take(state).manifest.offer("enforce-popular"))
    memory += b"more"
    assert Snapshot.take(state).manifest.keys[0].shape == [8]
    assert digest_of(Snapshot.take(state).manifest.offer("enforce-popular")) != before


@pytest.mark.parametrize(
    "other",
    [
        SharedState(a=np.ones(4, np.float32), revision=5),
        SharedState(a=np.ones((2, 2), np.float32)),
        SharedState(a=np.ones(4, np.float32).view(np.int32)),
        SharedState(b=np.ones(4, np.float32)),
        SharedState(a=np.full(4, 2, np.float32)),
        SharedState(a=rf.MayDiffer(np.ones(4, np.float32))),
    ],
    ids=["revision", "shape", "dtype", "name", "content", "may differ"],
)
def test_a_digest_tells_structure_and_content_but_not_the_revision(other: SharedState) -> None:
    mine = digest_of(Snapshot.take(SharedState(a=np.ones(4, np.float32))).manifest.offer("enforce-popular"))
    theirs = digest_of(Snapshot.take(other).manifest.offer("enforce-popular"))
    assert (mine == theirs) == (other.revision == 5)
