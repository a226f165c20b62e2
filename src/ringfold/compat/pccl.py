"""The PCCL Python API: `import ringfold.compat.pccl as pccl`, and a PCCL program runs over Ringfold.

Same names, same meaning. Better where PCCL falls short: an aborted op always leaves an in-place buffer as it was, the
retry helper succeeds only if every op did, all dtypes have kernels, frozen peers are evicted, mismatches between peers
are errors that print both sides, and host names and IPv6 addresses are accepted. docs/guides/from-pccl.md has the
tables.

Three things to know before reading on.

* Every op is called with `retry=False` underneath, because a PCCL program sees its aborts and calls again. Whether an
  op retries is part of what peers must agree on, so the batch helper does it too, and calls again by itself.
* An op starts at once, so one peer may see an op aborted that another has not called yet. If the first then goes to a
  run-wide call (`update_topology`), the other stands in an op that needs the first: the master notices, and fails both.
  The op's caller gets its error and comes to the run-wide call, where `_run_wide` has called again to meet it.
* When this peer is evicted or its master gone, that is remembered: every later call says so, `get_attribute` too, so
  that a loop around a failed call ends.
"""

from collections.abc import Callable, Sequence
from typing import Any, NoReturn, Protocol, TypeVar, cast

from ringfold import config
from ringfold.compat import operands
from ringfold.compat.batch import reduce_all
from ringfold.compat.master import MasterNode
from ringfold.compat.operands import Operands, ReduceOpDescriptor
from ringfold.compat.results import PCCLError, Result, result_of
from ringfold.compat.shared import SharedState, TensorInfo
from ringfold.compat.words import (
    Attribute,
    DataType,
    DeviceType,
    DistributionHint,
    QuantizationAlgorithm,
    QuantizationOptions,
    ReduceDescriptor,
    ReduceInfo,
    ReduceOp,
    ReduceOperandDescriptor,
    SharedStateSyncInfo,
    SharedStateSyncStrategy,
)
from ringfold.errors import ConfigError, Evicted, MasterUnreachable, RingfoldError, UsageError
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
]

ATTEMPT_PAUSE_S = 1.0
REACH_S = 5.0
"""How long one attempt waits for a master that accepts connections to say something."""
ADMISSION_S = 86_400.0
"""How long `connect` waits to be accepted: peers call `update_topology` when they like. RINGFOLD_JOIN_TIMEOUT_S, or
the settings file, says otherwise."""
MEETING_TRIES = 3
"""How often a run-wide call is made that clashed with another peer's op; see above."""

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
            text = "peer_group and p2p_connection_pool_size are numbers from 0 on"
            raise PCCLError(Result.INVALID_ARGUMENT, "Communicator", text)
        self._address, self._group = address, peer_group
        self._joined: peer.Communicator | None = None
        self._over: RingfoldError | None = None
        self._unseen: dict[int, Handle] = {}
        """By tag, the handles whose end the program has not seen yet."""
        self._abandoned: list[Handle] = []
        """What a batch that was interrupted (by Ctrl-C) has left in flight: nobody will wait for it."""

    def connect(self, n_attempts: int = 5) -> None:
        """Join the run; returns when the peers that are in it have accepted this one (the first are, at once).

        The master is tried `n_attempts` times, a second apart; then a plain Exception is raised. A peer that was
        evicted may connect again: it must sync its state before its first op.
        """
        if n_attempts < 1:
            raise PCCLError(Result.INVALID_ARGUMENT, "connect", f"{n_attempts} attempts are none")
        if self._joined is not None and self._over is None:
            raise PCCLError(Result.INVALID_USAGE, "connect", "this communicator is connected")
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
        # A join waits for its master, an attempt must not: so it looks first.
        master_client.connect([self._address], settings.token(), REACH_S).close()
        patience_s = ADMISSION_S if settings.origin("join_timeout_s") == "default" else None
        return joining.join(joining.JoinRequest(address=[self._address], group=self._group, timeout_s=patience_s))

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
        """Accept everybody who waits in `connect`. Returns when all accepted peers of the run have called it."""
        self._run_wide("update_topology", lambda run: run.update_topology())

    def are_peers_pending(self) -> bool:
        """Whether somebody waits to be accepted. The same answer on every peer at the same point of the program."""
        return self._run_wide("are_peers_pending", lambda run: run.are_peers_pending())

    def optimize_topology(self) -> None:
        """Measure the links that are not known yet, and change to the ring whose slowest link is the fastest."""
        self._run_wide("optimize_topology", lambda run: cast(_Newer, run).optimize_topology())

    def sync_shared_state(
        self,
        shared_state: SharedState,
        strategy: SharedStateSyncStrategy = SharedStateSyncStrategy.ENFORCE_POPULAR,
    ) -> SharedStateSyncInfo:
        """Make the state bit-identical on all peers of the group; `shared_state.revision` is the agreed one after it.

        A revision that did not go up by exactly one is INVALID_USAGE; if nobody who is left has the state,
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
        call = operands.check(func, send, recv, op, tag, operand_descriptor, quantization_options)
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
        call = operands.check(func, send, recv, op, tag, operand_descriptor, quantization_options)
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
            outcome = reduce_all(len(calls), lambda place: self._begin(run, calls[place]), max_in_flight)
        finally:
            left = [self._unseen.pop(call.tag) for call in calls if call.tag in self._unseen]
            self._abandoned += [handle for handle in left if not handle.done()]
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
        """A tag may be used again as soon as its op is done, also if nobody has waited for it yet."""
        earlier = self._unseen.get(tag)
        if earlier is not None and earlier.done():
            del self._unseen[tag]

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
            flying = ", ".join(str(handle.operation) for handle in [*self._unseen.values(), *self._abandoned])
            raise PCCLError(Result.PENDING_ASYNC_OPS, func, f"wait for the ops in flight first: {flying}")
        tries = MEETING_TRIES
        while True:
            tries -= 1
            try:
                return call(run)
            except UsageError as error:
                # Without peers the fault is here; with them, somebody stood elsewhere and was told so, too.
                if not error.peers or not tries:
                    self._fail(error, func)
            except RingfoldError as error:
                self._fail(error, func)

    def _fail(self, error: RingfoldError, func: str, completed_tags: tuple[int, ...] = ()) -> NoReturn:
        self._note(error)
        raise PCCLError.of(error, func, completed_tags) from error

    def _note(self, error: RingfoldError) -> None:
        """Remember an error after which nothing works any more."""
        if isinstance(error, Evicted | MasterUnreachable):
            self._over = error

    def _seen(self, tag: int, handle: Handle) -> None:
        """The program knows how the op ended."""
        if self._unseen.get(tag) is handle:
            del self._unseen[tag]


class AsyncReduceHandle:
    """An all-reduce in flight. It keeps its communicator alive."""

    def __init__(self, owner: Communicator, handle: Handle, tag: int) -> None:
        self._owner, self._handle, self._tag = owner, handle, tag
        self.error: RingfoldError | None = None
        """Why it failed, once it has."""

    def wait(self) -> tuple[bool, int, ReduceInfo]:
        """Block until the op has ended: whether it succeeded, its `Result` as a number, and its information.

        Never raises on failure; the information is then all zeros. Every wait gives the same answer.
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


class _Newer(Protocol):
    """The run-wide call about links, as much of it as is used here."""

    def optimize_topology(self) -> object: ...
