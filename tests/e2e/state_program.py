"""A program that the tests of shared state share: a peer that has a state, and changes and syncs it on request.

Its arrays are described by the test: {"model": {"dtype": "float32", "count": 1000, "seed": 1}}. Content is random bytes
of the seed, so that a digest shows whose content a peer has. What the program receives, and reports:

    sync      sync_shared_state with the given arguments: "synced", or "failed" with the error's facts
    fill      put the content of another seed into an array
    poke      change one byte of an array
    revision  set the state's revision
    push      push_revision
    update    update_topology: "updated"
    reduce    an all_reduce of ones, to see that the run goes on: "reduced", or "failed"
    end       leave

`strike` in a sync: once so many of the array's blocks have changed here, a thread sends a signal to another process;
`churn`: from the master's plan to the end of the sync, a thread changes a byte of every block of the array.
"""

import os
import signal
import threading
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from programs import ClusterProcess, Message, ProgramCluster, ProgramContext

MIB = 1 << 20
Spec = dict[str, Any]


def spec(dtype: str = "uint8", count: int = 1000, seed: int = 0, **more: object) -> Spec:
    """An array of a holder. `library`: numpy (default), unaligned or torch; `shape`; `may_differ`; `times`: as many
    arrays of this kind, with numbers behind the name.
    """
    return {"dtype": dtype, "count": count, "seed": seed, **more}


def content(seed: int, nbytes: int) -> bytes:
    """The same random block over and over, each with its number in it: all differ, and it costs little to make."""
    block = np.frombuffer(np.random.default_rng(seed).bytes(min(nbytes, MIB)), np.uint8)
    whole = np.resize(block, nbytes)
    whole[::MIB] += np.arange(len(whole[::MIB]), dtype=np.uint8)
    return whole.tobytes()


def digest_of(seed: int, nbytes: int) -> int:
    """What a holder reports of an array with the content of `seed`."""
    return zlib.crc32(content(seed, nbytes))


# The test's side


def start_holders(cluster: ProgramCluster, *states: dict[str, Spec], **options: Any) -> list[ClusterProcess]:  # noqa: ANN401 - as start
    """One peer for each state, members of one group, lowest peer id first as the states are."""
    peers: list[ClusterProcess] = []
    for state in states:
        peers.append(start_holder(cluster, state, **options))
        for peer in peers[:-1]:
            peer.send("update")
        for peer in peers[:-1]:
            peer.expect("updated")
        peers[-1].expect("joined", size=len(peers))
    return peers


def start_holder(cluster: ProgramCluster, state: dict[str, Spec], **options: Any) -> ClusterProcess:  # noqa: ANN401 - as start
    """One more peer. It is registered when this returns; members must update to let it in."""
    assert cluster.master is not None
    registered = len(cluster.master.events("peer_registered"))
    peer = cluster.start_one(hold, state=state, **options)
    cluster.master.expect_events("peer_registered", registered + 1)
    return peer


def admit(members: Sequence[ClusterProcess]) -> None:
    for peer in members:
        peer.send("update")
    for peer in members:
        peer.expect("updated")


def sync(peers: Sequence[ClusterProcess], **arguments: object) -> list[Message]:
    """All sync at once; what each reports. A peer that fails fails the test."""
    return [peer.expect("synced") for peer in tell_sync(peers, **arguments)]


def tell_sync(peers: Sequence[ClusterProcess], **arguments: object) -> Sequence[ClusterProcess]:
    for peer in peers:
        peer.send("sync", **arguments)
    return peers


def check_goes_on(peers: Sequence[ClusterProcess]) -> None:
    """These peers can still reduce with each other."""
    for peer in peers:
        peer.send("reduce")
    for peer in peers:
        assert peer.expect("reduced")["total"] == len(peers)


def end(peers: Sequence[ClusterProcess]) -> None:
    for peer in peers:
        peer.send("end")
    for peer in peers:
        peer.wait_success()


# The peer's side


def hold(me: ProgramContext) -> None:
    holder = Holder(me.options["state"], me.options.get("revision", 0), me.options.get("hash", "rf64"))
    with me.join() as run:
        me.report("joined", peer=run.peer_id, size=run.group_size, members=run.members)
        while (order := me.receive())["what"] != "end":
            facts = {name: value for name, value in order.items() if name != "what"}
            holder.obey(me, run, order["what"], facts)


class Holder:
    """The state of a peer, and what can be done with it."""

    def __init__(self, specs: dict[str, Spec], revision: int, hash: str) -> None:
        import ringfold as rf

        self.raw: dict[str, Any] = {}
        arrays: dict[str, object] = {}
        for name, each in _all(specs):
            array, self.raw[name] = make(**each)
            arrays[name] = rf.MayDiffer(array) if each.get("may_differ") else array
        self.state = rf.SharedState(arrays, revision=revision, hash=hash)  # type: ignore[arg-type]

    def obey(self, me: ProgramContext, run: Any, word: str, facts: Message) -> None:  # noqa: ANN401 - a communicator
        match word:
            case "sync":
                self.sync(me, run, **facts)
            case "fill":
                raw = self.raw[facts["name"]]
                raw[:] = np.frombuffer(content(facts["seed"], raw.size), np.uint8)
            case "poke":
                self.raw[facts["name"]][facts["at"]] ^= 0xFF
            case "revision":
                self.state.revision = facts["to"]
            case "push":
                self.state.push_revision()
            case "update":
                run.update_topology()
                me.report("updated", size=run.group_size, members=run.members)
            case "reduce":
                self.reduce(me, run)
            case _:
                raise AssertionError(f"received {word!r}")

    def reduce(self, me: ProgramContext, run: Any) -> None:  # noqa: ANN401 - a communicator
        from ringfold import RingfoldError

        ones = np.ones(50_000)
        try:
            run.all_reduce(ones)
        except RingfoldError as error:
            me.report("failed", error=type(error).__name__, message=str(error))
        else:
            me.report("reduced", total=ones[-1])

    def sync(self, me: ProgramContext, run: Any, **facts: Any) -> None:  # noqa: ANN401 - a communicator, and arguments
        from ringfold import RingfoldError

        strike, churn = facts.pop("strike", None), facts.pop("churn", None)
        with striking(me, self.raw, strike), churning(self.raw, churn):
            try:
                info = run.sync_shared_state(self.state, **facts)
            except RingfoldError as error:
                known = {name: value for name, value in vars(error).items() if not name.startswith("_")}
                reported = {"error": type(error).__name__, "message": str(error), "torn": self.state.torn}
                me.report("failed", **reported, **known)
                return
        me.report(
            "synced",
            revision=self.state.revision,
            rx=info.rx_bytes,
            tx=info.tx_bytes,
            torn=self.state.torn,
            digests={name: zlib.crc32(raw.tobytes()) for name, raw in self.raw.items()},
        )


@contextmanager
def striking(me: ProgramContext, raw: dict[str, Any], strike: Message | None) -> Iterator[None]:
    """While this lasts: when `blocks` blocks of array `name` have changed, send `signal` to `pid`, once."""
    if strike is None:
        yield
        return
    watched = raw[strike["name"]][::MIB]
    before = watched.copy()
    over = threading.Event()

    def watch() -> None:
        while not over.is_set():
            changed = int((watched != before).sum())
            if changed >= strike["blocks"]:
                # Before the signal: what the program reports of it comes after this.
                me.report("struck", blocks=changed)
                os.kill(strike["pid"], signal.Signals[strike["signal"]])
                return

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@contextmanager
def churning(raw: dict[str, Any], name: str | None) -> Iterator[None]:
    """While this lasts, and the plan of a sync is here, a thread changes every block of the array again and again."""
    if name is None:
        yield
        return
    from ringfold.peer.sync.syncing import Syncing

    planned, over, begin = threading.Event(), threading.Event(), Syncing.begin

    def begun(self: Syncing, *arguments: Any) -> Any:  # noqa: ANN401 - as the method
        planned.set()
        raw[name][::MIB] += 1
        return begin(self, *arguments)

    def churn() -> None:
        planned.wait()
        while not over.is_set():
            raw[name][::MIB] += 1

    Syncing.begin = begun  # type: ignore[method-assign]
    thread = threading.Thread(target=churn, daemon=True)
    thread.start()
    try:
        yield
    finally:
        Syncing.begin = begin  # type: ignore[method-assign]
        over.set()
        planned.set()
        thread.join()


def _all(specs: dict[str, Spec]) -> Iterator[tuple[str, Spec]]:
    for name, each in specs.items():
        times = each.pop("times", None)
        if times is None:
            yield name, each
        else:
            yield from ((f"{name}{number}", {**each, "seed": each["seed"] + number}) for number in range(times))


def make(
    dtype: str,
    count: int,
    seed: int,
    library: str = "numpy",
    shape: Sequence[int] | None = None,
    may_differ: bool = False,
) -> tuple[Any, Any]:
    """An array with the content of `seed`, and a flat view of its bytes."""
    if library == "torch":
        import torch

        tensor = torch.empty(count, dtype=getattr(torch, dtype))
        raw = tensor.view(torch.uint8).numpy()
        array: Any = tensor if shape is None else tensor.view(*shape)
    else:
        import ml_dtypes  # noqa: F401  # makes NumPy know "bfloat16"

        kind = np.dtype(dtype)
        # Eight bytes more than needed, so that the array can begin at an odd address.
        whole = np.empty(count * kind.itemsize + 8, np.uint8)
        first = 3 if library == "unaligned" else 0
        raw = whole[first : first + count * kind.itemsize]
        array = raw.view(kind) if shape is None else raw.view(kind).reshape(shape)
    raw[:] = np.frombuffer(content(seed, raw.size), np.uint8)
    return array, raw
