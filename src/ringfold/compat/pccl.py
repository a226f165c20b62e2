"""The PCCL Python API: `import ringfold.compat.pccl as pccl`, and a PCCL program runs over Ringfold.

Same names, same meaning. Better where PCCL falls short: an aborted op always leaves an in-place buffer as it was, the
retry helper succeeds only if every op did, all dtypes have kernels, frozen peers are evicted, mismatches between peers
are errors that print both sides, and host names and IPv6 addresses are accepted. docs/guides/from-pccl.md has the
tables.

Three rules explain the code.

* Every op is called with `retry=False`, because a PCCL program sees aborts and calls again itself. Peers must agree on
  whether an op retries, so the batch call uses `retry=False`, too, and repeats aborted ops itself.
* An op starts at once, so one peer may see the abort of an op that another peer has not called yet. If the first then
  makes a run-wide call (`update_topology`), the other waits in an op that needs the first: the master detects that, and
  fails both calls. The caller of the op gets its error and goes on to the run-wide call, where it meets the first peer,
  because `_run_wide` repeats the call.
* After an eviction, or when the master is lost, every later call raises that error again, also `get_attribute`. So a
  loop around a failed call ends.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol, TypeVar, cast

from ringfold import config
from ringfold.compat import cuda
from ringfold.compat.descriptors import (
    Attribute,
    DataType,
    DeviceType,
    DistributionHint,
    Operands,
    QuantizationAlgorithm,
    QuantizationOptions,
    ReduceDescriptor,
    ReduceInfo,
    ReduceOp,
    ReduceOpDescriptor,
    ReduceOperandDescriptor,
    SharedState,
    SharedStateSyncInfo,
    SharedStateSyncStrategy,
    TensorInfo,
    check_operands,
)
from ringfold.compat.master import MasterNode
from ringfold.compat.results import PCCLError, Result, result_of
from ringfold.errors import CollectiveAborted, ConfigError, Evicted, MasterUnreachable, RingfoldError, UsageError
from ringfold.peer import communicator as peer
from ringfold.peer import joining
from ringfold.peer.buffers import ArrayLike
from ringfold.peer.outcome import Handle
from ringfold.peer.outcome import ReduceInfo as Reduced
from ringfold.runtime import master_client, threads

__all__ = [
    "AsyncReduceHandle",
    "Attribute",
    "Communicator",
    "DataType",
    "DeviceType",
    "DistributionHint",
    "MasterNode",
    "PCCLError",
    "QuantizationAlgorithm",
    "QuantizationOptions",
    "ReduceDescriptor",
    "ReduceInfo",
    "ReduceOp",
    "ReduceOpDescriptor",
    "ReduceOperandDescriptor",
    "Result",
    "SharedState",
    "SharedStateSyncInfo",
    "SharedStateSyncStrategy",
    "TensorInfo",
    "cuda",
]

ATTEMPT_PAUSE_S = 1.0
CONNECT_TIMEOUT_S = 5.0
"""How long one attempt waits for the first message of a master that accepts connections."""
ADMISSION_TIMEOUT_S = 86_400.0
"""How long `connect` waits to be accepted: peers may call `update_topology` at any time. RINGFOLD_JOIN_TIMEOUT_S, or
the settings file, overrides it."""
MAX_RUN_WIDE_ATTEMPTS = 3
"""How often a run-wide call is made that collided with an op of another peer; see above."""

T = TypeVar("T")


class Communicator:
    """A peer of the run of the master at `address`: "host:port" or "[IPv6]:port". It leaves when it is destroyed.

    `p2p_connection_pool_size` is accepted and has no effect: connections per link are the master's `lanes` setting.
    """

    def __init__(self, address: str, peer_group: int = 0, p2p_connection_pool_size: int = 0) -> None:
        try:
            config.split_address(address)
        except ConfigError as error:
            raise PCCLError(Result.INVALID_ARGUMENT, "Communicator", str(error)) from error
        if peer_group < 0 or p2p_connection_pool_size < 0:
            text = "peer_group and p2p_connection_pool_size are 0 or more"
            raise PCCLError(Result.INVALID_ARGUMENT, "Communicator", text)
        self._address, self._group = address, peer_group
        self._joined: peer.Communicator | None = None
        self._over: RingfoldError | None = None
        self._unseen: dict[int, Handle] = {}
        """By tag, the handles whose outcome the program has not seen yet."""
        self._abandoned: list[Handle] = []
        """Ops that an interrupted batch (Ctrl-C) left in flight: the program does not wait for them."""

    def connect(self, n_attempts: int = 5) -> None:
        """Join the run; returns when its peers have accepted this one (the first peers are accepted at once).

        The master is tried `n_attempts` times, a second apart; then a plain Exception is raised. A peer that was
        evicted may connect again: it must sync its state before its first op.
        """
        if n_attempts < 1:
            raise PCCLError(Result.INVALID_ARGUMENT, "connect", f"n_attempts must be at least 1, not {n_attempts}")
        if self._joined is not None and self._over is None:
            raise PCCLError(Result.INVALID_USAGE, "connect", "this communicator is connected already")
        reason: RingfoldError | None = None
        for attempt in range(n_attempts):
            if attempt:
                threads.pause(ATTEMPT_PAUSE_S)
            try:
                self._joined = self._join()
            except ConfigError as error:  # another attempt would end the same way
                raise Exception(f"cannot connect to {self._address}: {error}") from error
            except RingfoldError as error:
                reason = error
            else:
                self._over = None
                self._unseen, self._abandoned = {}, []
                return
        raise Exception(f"cannot connect to {self._address} in {n_attempts} attempts: {reason}") from reason

    def _join(self) -> peer.Communicator:
        settings = config.load({"master": [self._address]})
        # A join waits until its master appears, and an attempt must not: so it connects once before.
        master_client.connect([self._address], settings.token(), CONNECT_TIMEOUT_S).close()
        timeout_s = ADMISSION_TIMEOUT_S if settings.origin("join_timeout_s") == "default" else None
        return joining.join(joining.JoinRequest(address=[self._address], group=self._group, timeout_s=timeout_s))

    def get_attribute(self, attribute: Attribute) -> int:
        """A number about the run, as of the newest epoch this peer knows."""
        run = self._run("get_attribute")
        match attribute:
            case Attribute.GLOBAL_WORLD_SIZE:
                return run.world_size
            case Attribute.LOCAL_WORLD_SIZE:
                return run.group_size
            case Attribute.NUM_DISTINCT_PEER_GROUPS:
                return run.groups
            case Attribute.LARGEST_PEER_GROUP_WORLD_SIZE:
                return run.largest_group
        raise PCCLError(Result.INVALID_ARGUMENT, "get_attribute", f"{attribute!r} is no Attribute")

    # Run-wide calls

    def update_topology(self) -> None:
        """Accept all peers that wait in `connect`. Returns when all accepted peers of the run have called it."""
        self._run_wide("update_topology", lambda run: run.update_topology())

    def are_peers_pending(self) -> bool:
        """Whether a peer waits to be accepted. The same result on every peer at the same point of the program.

        Legal from any thread while ops are in flight: see `ringfold.Communicator.are_peers_pending`.
        """
        func = "are_peers_pending"
        try:
            return self._run(func).are_peers_pending()
        except RingfoldError as error:
            self._fail(error, func)

    def optimize_topology(self) -> None:
        """Measure the links that are not known yet, and change to the ring whose slowest link is the fastest."""
        self._run_wide("optimize_topology", lambda run: cast(_Newer, run).optimize_topology())

    def sync_shared_state(
        self,
        shared_state: SharedState,
        strategy: SharedStateSyncStrategy = SharedStateSyncStrategy.ENFORCE_POPULAR,
    ) -> SharedStateSyncInfo:
        """Make the state bit-identical on all peers of the group; `shared_state.revision` is the agreed one after it.

        A revision that did not go up by exactly one is INVALID_USAGE. If no remaining peer has the state, it is
        NO_SHARED_STATE_AVAILABLE.
        """
        if not isinstance(strategy, SharedStateSyncStrategy):
            text = f"strategy is a SharedStateSyncStrategy, not {strategy!r}"
            raise PCCLError(Result.INVALID_ARGUMENT, "sync_shared_state", text)
        state = shared_state.underlying
        call = "sync_shared_state"
        info = self._run_wide(call, lambda run: run.sync_shared_state(state, strategy=strategy.value))
        return SharedStateSyncInfo(info.tx_bytes, info.rx_bytes)

    # Collectives

    def all_reduce(
        self,
        send: ArrayLike,
        recv: ArrayLike,
        *,
        op: ReduceOp,
        tag: int = 0,
        operand_descriptor: ReduceOperandDescriptor | None = None,
        quantization_options: QuantizationOptions | None = None,
    ) -> ReduceInfo:
        """Reduce `send` over the group into `recv`, which may be the same array.

        If a peer is lost, PCCLError is raised and the buffers of an op in place are as they were: read the world size
        and call again.
        """
        func = "all_reduce"
        run = self._run(func)
        call = check_operands(func, send, recv, op, tag, operand_descriptor, quantization_options)
        self._free_tag(call.tag)
        try:
            return _info(run.all_reduce(call.send, out=_out(call), op=call.op, tag=call.tag, **_how(call)))
        except RingfoldError as error:
            self._fail(error, func)

    def all_reduce_async(
        self,
        send: ArrayLike,
        recv: ArrayLike,
        *,
        op: ReduceOp,
        tag: int = 0,
        operand_descriptor: ReduceOperandDescriptor | None = None,
        quantization_options: QuantizationOptions | None = None,
    ) -> "AsyncReduceHandle":
        """Begin an all-reduce and return a handle on it. Many tags may be in flight, one op per tag.

        Alone in the group, this call itself raises TOO_FEW_PEERS.
        """
        func = "all_reduce_async"
        run = self._run(func)
        call = check_operands(func, send, recv, op, tag, operand_descriptor, quantization_options)
        if run.group_size < 2:
            raise PCCLError(Result.TOO_FEW_PEERS, func, "this peer is alone in its group")
        try:
            return AsyncReduceHandle(self, self._begin(run, call), call.tag)
        except RingfoldError as error:
            self._fail(error, func)

    def all_reduce_multiple_with_retry(
        self, descriptors: Sequence[ReduceOpDescriptor], *, max_in_flight: int = 4
    ) -> ReduceInfo:
        """Run all ops, at most `max_in_flight` at once, and call those that are aborted again with the survivors.

        Returns only when every op has succeeded. Bytes are those of all ops; `local_world_size` is that of the op to
        which the fewest peers contributed, the same on every peer. An op that ended before a peer was lost has more
        in it, so let AVG divide. PCCLError has the tags that were completed; left alone, it is TOO_FEW_PEERS.
        """
        func = "all_reduce_multiple_with_retry"
        run = self._run(func)
        calls = [descriptor.operands(func) for descriptor in descriptors]
        _check_batch(func, calls, max_in_flight)
        self._check_free(func, calls)
        try:
            outcome = reduce_all(len(calls), lambda index: self._begin(run, calls[index]), max_in_flight)
        finally:
            left = [self._unseen.pop(call.tag, None) for call in calls]
            self._abandoned += [handle for handle in left if handle is not None and not handle.done()]
        done = [info for info in outcome.infos if info is not None]
        if outcome.error is not None:
            tags = tuple(call.tag for call, info in zip(calls, outcome.infos, strict=True) if info is not None)
            self._fail(outcome.error, func, tags)
        world = min((len(info.contributors) for info in done), default=run.group_size)
        return ReduceInfo(world, sum(info.tx_bytes for info in done), sum(info.rx_bytes for info in done))

    def _begin(self, run: peer.Communicator, call: Operands) -> Handle:
        self._free_tag(call.tag)
        handle = run.all_reduce_async(call.send, out=_out(call), op=call.op, tag=call.tag, **_how(call))
        self._unseen[call.tag] = handle
        return handle

    def _free_tag(self, tag: int) -> None:
        """A tag may be used again as soon as its op is done, also if the program has not waited for it yet."""
        earlier = self._unseen.get(tag)
        if earlier is not None and earlier.done():
            self._unseen.pop(tag, None)  # a thread that waits for it may be quicker

    def _check_free(self, func: str, calls: Sequence[Operands]) -> None:
        for call in calls:
            self._free_tag(call.tag)
            if call.tag in self._unseen:
                text = f"an op with tag {call.tag} is in flight; wait for it first"
                raise PCCLError(Result.INVALID_USAGE, func, text)

    # Before and after each call

    def _run(self, func: str) -> peer.Communicator:
        if self._joined is None:
            raise PCCLError(Result.INVALID_USAGE, func, "this communicator is not connected: call connect() first")
        if self._over is not None:
            raise PCCLError.of(self._over, func) from self._over
        return self._joined

    def _run_wide(self, func: str, call: Callable[[peer.Communicator], T]) -> T:
        """A call that all peers make at the same point of the program, with no op in flight."""
        run = self._run(func)
        self._abandoned = [handle for handle in self._abandoned if not handle.done()]
        if self._unseen or self._abandoned:
            in_flight = ", ".join(str(handle.operation) for handle in [*list(self._unseen.values()), *self._abandoned])
            raise PCCLError(Result.PENDING_ASYNC_OPS, func, f"wait for the ops in flight first: {in_flight}")
        tries = MAX_RUN_WIDE_ATTEMPTS
        while True:
            tries -= 1
            try:
                return call(run)
            except UsageError as error:
                # Without peers the error is of this call. With peers, they made another call and got the error, too.
                if not error.peers or not tries:
                    self._fail(error, func)
            except RingfoldError as error:
                self._fail(error, func)

    def _fail(self, error: RingfoldError, func: str, completed_tags: tuple[int, ...] = ()) -> NoReturn:
        self._note(error)
        raise PCCLError.of(error, func, completed_tags) from error

    def _note(self, error: RingfoldError) -> None:
        """Keep an error after which every call fails."""
        if isinstance(error, Evicted | MasterUnreachable):
            self._over = error

    def _seen(self, tag: int, handle: Handle) -> None:
        """The program has seen the outcome of the op."""
        if self._unseen.get(tag) is handle:
            self._unseen.pop(tag, None)


class AsyncReduceHandle:
    """An all-reduce in flight. It keeps its communicator alive."""

    def __init__(self, owner: Communicator, handle: Handle, tag: int) -> None:
        self._owner, self._handle, self._tag = owner, handle, tag
        self.error: RingfoldError | None = None
        """Why it failed, once it has."""

    def wait(self) -> tuple[bool, int, ReduceInfo]:
        """Block until the op has ended: whether it succeeded, its `Result` as a number, and its information.

        Never raises on failure; the information is then all zeros. Every wait returns the same.
        """
        try:
            answer = True, int(Result.SUCCESS), _info(self._handle.wait())
        except RingfoldError as error:
            self.error = error
            self._owner._note(error)
            answer = False, int(result_of(error, "all_reduce_async")), ReduceInfo(0, 0, 0)
        self._owner._seen(self._tag, self._handle)
        return answer


def _check_batch(func: str, calls: Sequence[Operands], max_in_flight: int) -> None:
    if max_in_flight < 1:
        raise PCCLError(Result.INVALID_ARGUMENT, func, f"max_in_flight must be at least 1, not {max_in_flight}")
    tags: set[int] = set()
    for call in calls:
        if call.tag in tags:
            text = f"two ops of the batch have tag {call.tag}; give each its own"
            raise PCCLError(Result.INVALID_ARGUMENT, func, text)
        tags.add(call.tag)


def _out(call: Operands) -> ArrayLike | None:
    return None if call.recv is call.send else call.recv


def _how(call: Operands) -> dict[str, Any]:
    return {"retry": False} if call.quantize is None else {"retry": False, "quantize": call.quantize}


def _info(info: Reduced) -> ReduceInfo:
    return ReduceInfo(len(info.contributors), info.tx_bytes, info.rx_bytes)


# A batch of ops


class _OpInFlight(Protocol):
    """A handle of the communicator."""

    def wait(self) -> Reduced: ...


@dataclass(frozen=True, slots=True)
class BatchOutcome:
    """What each op of a batch returned, in the order of the batch; None: it did not succeed. `error` is why."""

    infos: list[Reduced | None]
    error: RingfoldError | None


def reduce_all(count: int, begin: Callable[[int], _OpInFlight], max_in_flight: int) -> BatchOutcome:
    """Begin the ops 0 to count - 1, at most `max_in_flight` at once, and again after each abort, until all succeeded.

    `begin` gets the index of an op. Nothing is in flight any more when this returns.

    Survivors never deadlock: an op commits on all survivors or is aborted on all of them, so all agree on which ops
    remain. Each keeps the first few of those in flight, in the order of the batch, and waits for the very first. That
    op is in flight on every survivor, or will be as soon as the abort is noticed there. So it ends, and all move on. A
    peer that had not called an op yet when it was aborted calls it, and meets the peers that call it again.

    Only an abort is retried. Any other error (no peer left, a deadline, an eviction) ends the batch: first all ops in
    flight are waited for, then the error is returned with the ops that had succeeded.
    """
    infos: list[Reduced | None] = [None] * count
    in_flight: deque[tuple[int, _OpInFlight]] = deque()
    begun = 0
    try:
        while begun < count or in_flight:
            while begun < count and len(in_flight) < max_in_flight:
                in_flight.append((begun, begin(begun)))
                begun += 1
            index, first = in_flight[0]
            try:
                infos[index] = first.wait()
                in_flight.popleft()
            except CollectiveAborted:
                in_flight[0] = (index, begin(index))
    except RingfoldError as error:
        for index, op in in_flight:
            try:
                infos[index] = op.wait()
            except RingfoldError:
                infos[index] = None
        return BatchOutcome(infos, error)
    return BatchOutcome(infos, None)


class _Newer(Protocol):
    """The part of the communicator that is used here."""

    def optimize_topology(self) -> object: ...
