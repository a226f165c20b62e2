"""The PCCL names without a network: values, argument checks, the table of results, and the batch that retries."""

import importlib
import importlib.util
import inspect
import pickle
import sys
import types
from collections import Counter

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringfold import errors
from ringfold.compat import descriptors, pccl
from ringfold.compat.descriptors import ReduceInfo
from ringfold.compat.pccl import reduce_all
from ringfold.compat.results import result_of
from ringfold.errors import CollectiveAborted, Evicted, PeerLost, RingfoldError, TooFewPeers
from ringfold.peer.outcome import ReduceInfo as Reduced

SUM = pccl.ReduceOp.SUM


def refused(call: object, result: pccl.Result, words: str = "") -> None:
    """The call must fail with this result, and say these words."""
    assert callable(call)
    with pytest.raises(pccl.PCCLError) as caught:
        call()
    assert caught.value.result is result
    assert words in str(caught.value)


def check(send: object, recv: object, **more: object) -> descriptors.Operands:
    facts = {"op": SUM, "tag": 0, "operand": None, "quantization": None, **more}
    return descriptors.check_operands("all_reduce", send, recv, **facts)  # type: ignore[arg-type]


# Values


NAMES: dict[str, str] = {
    "Communicator": "connect get_attribute update_topology are_peers_pending optimize_topology sync_shared_state "
    "all_reduce all_reduce_async all_reduce_multiple_with_retry",
    "MasterNode": "run interrupt",
    "AsyncReduceHandle": "wait",
    "Attribute": "GLOBAL_WORLD_SIZE LOCAL_WORLD_SIZE NUM_DISTINCT_PEER_GROUPS LARGEST_PEER_GROUP_WORLD_SIZE",
    "ReduceOp": "SUM AVG PROD MAX MIN",
    "DataType": "UINT8 INT8 UINT16 UINT32 INT32 UINT64 INT64 FLOAT16 BFLOAT16 FLOAT DOUBLE from_numpy_dtype "
    "from_torch_dtype to_numpy_dtype to_torch_dtype",
    "DeviceType": "CPU CUDA from_torch_device_type",
    "DistributionHint": "NONE NORMAL UNIFORM",
    "QuantizationAlgorithm": "NONE MIN_MAX ZERO_POINT_SCALE",
    "QuantizationOptions": "algorithm quantized_datatype",
    "ReduceOperandDescriptor": "datatype distribution_hint",
    "ReduceDescriptor": "count op tag operand_descriptor quantization_options",
    "ReduceOpDescriptor": "from_numpy from_torch reduce_descriptor",
    "ReduceInfo": "local_world_size tx_bytes rx_bytes",
    "TensorInfo": "from_numpy from_torch name numel dtype device_type allow_content_inequality",
    "SharedState": "revision push_revision",
    "SharedStateSyncInfo": "tx_bytes rx_bytes",
    "SharedStateSyncStrategy": "ENFORCE_POPULAR RECEIVE_ONLY SEND_ONLY",
    "PCCLError": "result check",
    "Result": "SUCCESS NOT_INITIALIZED INTERNAL_ERROR INVALID_ARGUMENT INVALID_USAGE TOO_FEW_PEERS "
    "MASTER_CONNECTION_FAILED RANK_CONNECTION_FAILED RANK_CONNECTION_LOST NO_SHARED_STATE_AVAILABLE PENDING_ASYNC_OPS "
    "UPDATE_TOPOLOGY_FAILED TOPOLOGY_OPTIMIZATION_FAILED",
    "cuda": "is_available",
}
"""Every public name of PCCL 1.0's package: `pccl.__all__` with Result and DeviceType, and the names of each."""
POINTERS = {"to_c", "to_c_inpl", "sendbuf_ptr", "recvbuf_ptr", "data_ptr", "is_cuda_available"}
"""What PCCL's classes have for its own C library, and no program uses."""


@pytest.mark.parametrize("name", NAMES)
def test_every_name_of_pccl_is_there(name: str) -> None:
    assert name in pccl.__all__
    ours = getattr(pccl, name)
    assert inspect.isclass(ours) or name == "cuda"
    given = set(inspect.signature(ours).parameters) if inspect.isclass(ours) else set()
    missing = [each for each in NAMES[name].split() if not hasattr(ours, each) and each not in given]
    assert not missing


def test_the_list_of_names_has_nothing_that_is_not_offered_and_misses_nothing() -> None:
    assert set(NAMES) == set(pccl.__all__)


def test_pccls_own_package_has_no_other_names() -> None:
    """Where PCCL is installed, its names are compared with the list."""
    if importlib.util.find_spec("pccl") is None:
        pytest.skip("PCCL is not installed")
    theirs = importlib.import_module("pccl")
    if not hasattr(theirs, "__all__"):
        pytest.skip("the installed pccl is an empty package")
    assert set(theirs.__all__) <= set(NAMES)
    for name in theirs.__all__:
        public = {each for each in vars(getattr(theirs, name)) if not each.startswith("_")}
        assert public - POINTERS <= set(NAMES[name].split()), name


def test_dtypes_and_devices_are_converted_both_ways() -> None:
    for kind in pccl.DataType:
        assert pccl.DataType.from_numpy_dtype(kind.to_numpy_dtype()) is kind
    assert pccl.DeviceType.from_torch_device_type("cuda") is pccl.DeviceType.CUDA
    assert pccl.DeviceType.from_torch_device_type("cpu") is pccl.DeviceType.CPU
    assert pccl.DeviceType.from_torch_device_type("mps") is None
    info = pccl.TensorInfo.from_numpy(np.zeros((3, 4), np.float32), "w")
    assert (info.numel, info.dtype) == (12, pccl.DataType.FLOAT)


def test_a_status_is_checked_as_pccl_does() -> None:
    pccl.PCCLError.check(0, "f")
    refused(lambda: pccl.PCCLError.check(5, "f"), pccl.Result.TOO_FEW_PEERS, "f: TOO_FEW_PEERS")


def test_cuda_is_available_where_torch_sees_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert pccl.cuda.is_available() is False
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    for there in (True, False):
        device = types.SimpleNamespace(cuda=types.SimpleNamespace(is_available=lambda there=there: there))
        monkeypatch.setitem(sys.modules, "torch", device)
        assert pccl.cuda.is_available() is there


def test_results_have_pccls_numbers() -> None:
    assert [int(result) for result in pccl.Result] == list(range(13))
    named = (pccl.Result.SUCCESS, pccl.Result.TOO_FEW_PEERS, pccl.Result.PENDING_ASYNC_OPS)
    assert [int(result) for result in named] == [0, 5, 10]


@pytest.mark.parametrize("kind", [kind for kind in pccl.DataType if kind is not pccl.DataType.BFLOAT16])
def test_a_data_type_is_that_of_the_numpy_dtype_of_its_name(kind: pccl.DataType) -> None:
    assert pccl.DataType.from_numpy_dtype(np.dtype(kind.value)) is kind


def test_bfloat16_of_ml_dtypes_is_known() -> None:
    assert pccl.DataType.from_numpy_dtype(np.dtype(ml_dtypes.bfloat16)) is pccl.DataType.BFLOAT16


def test_a_dtype_that_no_op_knows_is_a_value_error_that_names_it() -> None:
    with pytest.raises(ValueError, match="complex64"):
        pccl.DataType.from_numpy_dtype(np.complex64)
    with pytest.raises(ValueError, match="big-endian"):
        pccl.DataType.from_numpy_dtype(">f4")


def test_torch_dtypes_go_there_and_back() -> None:
    torch = pytest.importorskip("torch")
    for kind in pccl.DataType:
        assert isinstance(kind.to_torch_dtype(), torch.dtype)
        assert pccl.DataType.from_torch_dtype(kind.to_torch_dtype()) is kind
    with pytest.raises(ValueError, match="complex64"):
        pccl.DataType.from_torch_dtype(torch.complex64)


def test_quantization_defaults_to_min_max_of_eight_bits() -> None:
    assert pccl.QuantizationOptions().scheme == "minmax8"
    zero = pccl.QuantizationAlgorithm.ZERO_POINT_SCALE
    assert pccl.QuantizationOptions(pccl.DataType.INT8, zero).scheme == "zeroscale8"
    assert pccl.QuantizationOptions(algorithm=pccl.QuantizationAlgorithm.NONE).scheme is None


def test_quantizing_to_a_wide_type_is_refused() -> None:
    refused(lambda: pccl.QuantizationOptions(pccl.DataType.UINT32), pccl.Result.INVALID_ARGUMENT, "UINT32")


# Errors


def test_an_error_says_where_what_and_why_and_survives_pickling() -> None:
    error = pccl.PCCLError(pccl.Result.TOO_FEW_PEERS, "all_reduce", "alone", (1, 2))
    again = pickle.loads(pickle.dumps(error))
    assert str(again) == "all_reduce: TOO_FEW_PEERS: alone"
    assert (again.result, again.func_name, again.completed_tags) == (error.result, "all_reduce", (1, 2))


def test_the_constructor_takes_what_pccls_does() -> None:
    assert pccl.PCCLError(pccl.Result.INTERNAL_ERROR, "connect").result is pccl.Result.INTERNAL_ERROR


RESULTS = [
    (errors.UsageError("x"), "all_reduce", "INVALID_USAGE"),
    (errors.CallMismatch("x"), "all_reduce", "INVALID_USAGE"),
    (errors.ConfigError("x"), "connect", "INVALID_ARGUMENT"),
    (errors.PeerLost("x", 1), "all_reduce", "RANK_CONNECTION_LOST"),
    (errors.EpochChanged("x", 1), "all_reduce_async", "RANK_CONNECTION_LOST"),
    (errors.PeerLost("x", 1), "update_topology", "UPDATE_TOPOLOGY_FAILED"),
    (errors.PeerLost("x", 1), "sync_shared_state", "RANK_CONNECTION_LOST"),
    (errors.DeadlineExceeded("x", (), 1), "all_reduce", "RANK_CONNECTION_LOST"),
    (errors.DeadlineExceeded("x", (), 1), "update_topology", "UPDATE_TOPOLOGY_FAILED"),
    (errors.DeadlineExceeded("x", (), 1), "optimize_topology", "TOPOLOGY_OPTIMIZATION_FAILED"),
    (errors.TopologyFailed("x"), "optimize_topology", "TOPOLOGY_OPTIMIZATION_FAILED"),
    (errors.TooFewPeers(1), "all_reduce", "TOO_FEW_PEERS"),
    (errors.Evicted("x"), "all_reduce", "MASTER_CONNECTION_FAILED"),
    (errors.MasterUnreachable("x", "y"), "update_topology", "MASTER_CONNECTION_FAILED"),
    (errors.RemoteProtocolError("x"), "all_reduce", "RANK_CONNECTION_LOST"),
    (errors.StateLost(3), "sync_shared_state", "NO_SHARED_STATE_AVAILABLE"),
    (errors.RevisionViolation(3, 5), "sync_shared_state", "INVALID_USAGE"),
    (errors.HashMismatch("x"), "sync_shared_state", "INVALID_USAGE"),
    (errors.HashMismatch("x", [2]), "sync_shared_state", "INTERNAL_ERROR"),
    (errors.StateError("x"), "sync_shared_state", "INVALID_USAGE"),
    (errors.StateDiverged(1, "x", 3, 2, ["a"], 1, 8), "sync_shared_state", "INVALID_USAGE"),
    (errors.RingfoldError("x"), "all_reduce", "INTERNAL_ERROR"),
    (errors.MissingPackage("x", "y", "z"), "connect", "INVALID_ARGUMENT"),
    # No call of PCCL uses a store: they are the "anything else" of the table.
    (errors.StoreError("x", "y"), "connect", "INTERNAL_ERROR"),
    (errors.StoreUnreachable("x", "y"), "connect", "INTERNAL_ERROR"),
    (errors.StoreUnknown("x", "y"), "connect", "INTERNAL_ERROR"),
    (errors.StoreWentBack("x", "y"), "connect", "INTERNAL_ERROR"),
    (errors.StoreReset("x", "y"), "connect", "INTERNAL_ERROR"),
    (errors.LeaseLost("x", "y"), "connect", "INTERNAL_ERROR"),
    (errors.Superseded(1, "x", "y"), "connect", "INTERNAL_ERROR"),
]


@pytest.mark.parametrize(("error", "func", "name"), RESULTS)
def test_an_error_becomes_the_result_of_the_table(error: RingfoldError, func: str, name: str) -> None:
    assert result_of(error, func).name == name


def test_the_table_has_every_error() -> None:
    kinds = {thing for thing in vars(errors).values() if inspect.isclass(thing) and issubclass(thing, RingfoldError)}
    abstract, unknown_to_pccl = {errors.CollectiveAborted}, {errors.ClockNotReady, errors.AgentUnreachable}
    assert kinds - abstract - unknown_to_pccl == {type(error) for error, _, _ in RESULTS}


# Operands


def test_good_operands_are_taken_as_they_are() -> None:
    send, recv = np.ones(3, np.float32), np.zeros((1, 3), np.float32)
    found = check(send, recv, op=pccl.ReduceOp.MAX, tag=7, quantization=pccl.QuantizationOptions())
    assert found.send is send
    assert found.recv is recv
    assert (found.op, found.tag, found.quantize) == ("max", 7, "minmax8")


def test_operands_may_have_any_strides() -> None:
    grid = np.ones((4, 4), np.float32)
    for send, recv in ((grid.T, grid.T), (grid[:, 0], grid[:, 1]), (grid, np.zeros((4, 4), np.float32).T)):
        found = check(send, recv)
        assert found.send is send
        assert found.recv is recv
    refused(lambda: check(grid.T, grid), pccl.Result.INVALID_ARGUMENT, "overlap")


ONES = np.ones(4, np.float32)
BAD = {
    "another dtype": (ONES, np.ones(4, np.float64), "same dtype and size"),
    "another size": (ONES, np.ones(5, np.float32), "same dtype and size"),
    "elements that share memory": (
        ONES,
        np.lib.stride_tricks.as_strided(np.ones(1, np.float32), (4,), (0,)),
        "recv has",
    ),
    "a list": ([1.0], ONES, "both"),
    "a scalar": (ONES, 3.0, "both"),
    "no dtype of ours": (np.ones(2, np.complex64), np.ones(2, np.complex64), "complex64"),
    "big-endian": (np.ones(2, ">f4"), np.ones(2, ">f4"), "big-endian"),
    "read-only": (ONES, np.frombuffer(bytes(16), np.float32), "read-only"),
    "overlapping": (ONES[:3], ONES[1:], "overlap"),
}


@pytest.mark.parametrize("case", sorted(BAD))
def test_operands_that_cannot_be_reduced_are_invalid_arguments(case: str) -> None:
    send, recv, words = BAD[case]
    refused(lambda: check(send, recv), pccl.Result.INVALID_ARGUMENT, words)


@pytest.mark.parametrize("tag", [-1, 1 << 64, 1.5, "0", None, True])
def test_a_tag_that_is_none_is_an_invalid_argument(tag: object) -> None:
    refused(lambda: check(ONES, ONES, tag=tag), pccl.Result.INVALID_ARGUMENT, "tag")


def test_an_op_that_is_none_is_an_invalid_argument() -> None:
    refused(lambda: check(ONES, ONES, op="sum"), pccl.Result.INVALID_ARGUMENT, "ReduceOp")


def test_an_operand_descriptor_must_tell_the_truth() -> None:
    truth = pccl.ReduceOperandDescriptor(pccl.DataType.FLOAT, pccl.DistributionHint.NORMAL)
    assert check(ONES, ONES, operand=truth).op == "sum"
    lie = pccl.ReduceOperandDescriptor(pccl.DataType.DOUBLE)
    refused(lambda: check(ONES, ONES, operand=lie), pccl.Result.INVALID_ARGUMENT, "DOUBLE")


def test_numpy_and_torch_do_not_mix() -> None:
    torch = pytest.importorskip("torch")
    refused(lambda: check(ONES, torch.ones(4)), pccl.Result.INVALID_ARGUMENT, "both")
    assert check(torch.ones(4), torch.zeros(4)).tag == 0


def test_a_descriptor_is_of_the_library_it_says() -> None:
    descriptor = pccl.ReduceDescriptor(count=4, op=SUM, tag=0)
    refused(lambda: pccl.ReduceOpDescriptor.from_torch(ONES, ONES, descriptor), pccl.Result.INVALID_ARGUMENT, "torch")


def test_a_descriptor_must_count_right() -> None:
    wrong = pccl.ReduceOpDescriptor.from_numpy(ONES, ONES, pccl.ReduceDescriptor(count=5, op=SUM, tag=3))
    refused(lambda: wrong.operands("f"), pccl.Result.INVALID_ARGUMENT, "counts 5 elements, but send has 4")


# A communicator that never connected


CALLS = {
    "update_topology": lambda peer: peer.update_topology(),
    "are_peers_pending": lambda peer: peer.are_peers_pending(),
    "optimize_topology": lambda peer: peer.optimize_topology(),
    "get_attribute": lambda peer: peer.get_attribute(pccl.Attribute.GLOBAL_WORLD_SIZE),
    "all_reduce": lambda peer: peer.all_reduce(ONES, ONES, op=SUM),
    "all_reduce_async": lambda peer: peer.all_reduce_async(ONES, ONES, op=SUM),
    "all_reduce_multiple_with_retry": lambda peer: peer.all_reduce_multiple_with_retry([]),
    "sync_shared_state": lambda peer: peer.sync_shared_state(pccl.SharedState([pccl.TensorInfo.from_numpy(ONES, "a")])),
}


@pytest.mark.parametrize("func", sorted(CALLS))
def test_a_call_before_connect_says_so(func: str) -> None:
    peer = pccl.Communicator("127.0.0.1:1")
    refused(lambda: CALLS[func](peer), pccl.Result.INVALID_USAGE, f"{func}: INVALID_USAGE: this communicator is not")


@pytest.mark.parametrize("address", ["", "127.0.0.1:many", "[::1:48148", "a b:1"])
def test_an_address_that_is_none_is_refused_at_once(address: str) -> None:
    refused(lambda: pccl.Communicator(address), pccl.Result.INVALID_ARGUMENT)
    refused(lambda: pccl.MasterNode(address), pccl.Result.INVALID_ARGUMENT)


@pytest.mark.parametrize("address", ["10.0.0.1:48148", "[::1]:48148", "::1", "trainer-0.example.org:1", "localhost"])
def test_names_and_ipv6_are_addresses(address: str) -> None:
    pccl.Communicator(address)
    pccl.MasterNode(address)


# Shared state


def test_a_revision_is_read_set_and_pushed() -> None:
    state = pccl.SharedState([pccl.TensorInfo.from_numpy(ONES, "weights")])
    assert state.revision == 0
    state.push_revision()
    assert state.revision == 1
    state.revision = 41
    state.push_revision()
    assert state.revision == 42
    assert state.underlying.revision == 42


def test_tensors_are_found_by_their_names_and_not_copied() -> None:
    state = pccl.SharedState([pccl.TensorInfo.from_numpy(ONES, "b"), pccl.TensorInfo.from_numpy(ONES[:2], "a")])
    assert list(state.underlying.arrays) == ["a", "b"]
    assert state.underlying.arrays["b"] is ONES


def test_a_state_that_cannot_be_is_an_invalid_argument() -> None:
    info = pccl.TensorInfo.from_numpy(ONES, "a")
    refused(lambda: pccl.SharedState([info, info]), pccl.Result.INVALID_ARGUMENT, "two tensors are named 'a'")
    refused(lambda: pccl.SharedState([]), pccl.Result.INVALID_ARGUMENT)
    refused(lambda: pccl.TensorInfo.from_torch(ONES, "a"), pccl.Result.INVALID_ARGUMENT, "torch")


def test_a_negative_revision_is_an_invalid_argument() -> None:
    state = pccl.SharedState([pccl.TensorInfo.from_numpy(ONES, "a")])

    def set_it() -> None:
        state.revision = -1

    refused(set_it, pccl.Result.INVALID_ARGUMENT, "-1")


# The batch


class Group:
    """Stands for the others: each op has a list of what becomes of its attempts, and succeeds when that is used up."""

    def __init__(self, fates: dict[int, list[RingfoldError]]) -> None:
        self.fates = fates
        self.begun: Counter[int] = Counter()
        self.flying: set[int] = set()
        self.most = 0

    def begin(self, place: int) -> "Flying":
        self.begun[place] += 1
        self.flying.add(place)
        self.most = max(self.most, len(self.flying))
        fate = self.fates.get(place, [])
        return Flying(self, place, fate.pop(0) if fate else None)


class Flying:
    def __init__(self, group: Group, place: int, error: RingfoldError | None) -> None:
        self.group, self.place, self.error = group, place, error

    def wait(self) -> Reduced:
        self.group.flying.discard(self.place)
        if self.error is not None:
            raise self.error
        return Reduced((1, 2, 3), 1, 10, 20)


def lost() -> CollectiveAborted:
    return PeerLost("peer 3 is gone", 5, [3])


def test_a_batch_ends_when_every_op_has_succeeded() -> None:
    group = Group({0: [lost()], 2: [lost(), lost()]})
    outcome = reduce_all(4, group.begin, 2)
    assert outcome.error is None
    assert None not in outcome.infos
    assert group.begun == {0: 2, 1: 1, 2: 3, 3: 1}


@given(
    count=st.integers(0, 12),
    most=st.integers(1, 6),
    aborts=st.dictionaries(st.integers(0, 11), st.integers(1, 4)),
)
def test_never_too_many_in_flight_and_none_forgotten(count: int, most: int, aborts: dict[int, int]) -> None:
    group = Group({place: [lost() for _ in range(times)] for place, times in aborts.items()})
    outcome = reduce_all(count, group.begin, most)
    assert group.most <= most
    assert not group.flying
    assert len(outcome.infos) == count
    assert all(outcome.infos)
    assert group.begun == {place: 1 + aborts.get(place, 0) for place in range(count)}


@pytest.mark.parametrize("error", [TooFewPeers(1), Evicted("silent"), errors.DeadlineExceeded("x", (2,), 5)])
def test_another_error_ends_the_batch_and_tells_what_succeeded(error: RingfoldError) -> None:
    group = Group({1: [lost(), error], 2: [lost()]})
    outcome = reduce_all(5, group.begin, 3)
    assert outcome.error is error
    assert [info is not None for info in outcome.infos] == [True, False, False, True, False]
    assert not group.flying


def test_an_op_that_cannot_begin_ends_the_batch_after_those_in_flight() -> None:
    group = Group({})

    def begin(place: int) -> Flying:
        if place == 2:
            raise errors.UsageError("no")
        return group.begin(place)

    outcome = reduce_all(4, begin, 4)
    assert isinstance(outcome.error, errors.UsageError)
    assert [info is not None for info in outcome.infos] == [True, True, False, False]
    assert not group.flying


def test_reduce_info_has_pccls_fields() -> None:
    info = ReduceInfo(2, 3, 4)
    assert (info.local_world_size, info.tx_bytes, info.rx_bytes) == (2, 3, 4)
