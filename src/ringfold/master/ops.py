"""Ops, as far as a master handles them: those that fail, and Dones if the master collects the evidence.

An op needs no master to succeed. An op that cannot succeed (it timed out, or its caller cancelled it) ends its epoch,
and the verdict has the reason. If members called different things, the wrong side is evicted (`disputes.py`).
"""

from collections.abc import Mapping, Sequence

from ringfold.errors import RemoteProtocolError
from ringfold.master.disputes import Disputes
from ringfold.master.epochs import Epochs
from ringfold.master.events import DoneReceived, Ns
from ringfold.master.run import Peer, Run
from ringfold.master.verdicts import Cause, Mismatch
from ringfold.wire.diagnostics import format_seconds, list_peers, name_op
from ringfold.wire.frames import DESCRIPTOR_BYTES, Announced
from ringfold.wire.messages import OpCancelled, OpMismatch, OpRef, OpTimeout, PeerId, Reason
from ringfold.wire.notices import CallRefused


class OpReports:
    """What peers report about their ops."""

    def __init__(self, run: Run, epochs: Epochs, disputes: Disputes) -> None:
        self._run, self._epochs, self._disputes = run, epochs, disputes

    def failed(self, now: Ns, peer: Peer, message: OpMismatch | OpTimeout | OpCancelled) -> None:
        """An op cannot succeed: its epoch ends, and its verdict has the reason. Only a cancelled op is retried."""
        if not self._run.is_current(peer, message.epoch):
            return
        group = self._run.groups[peer.group]
        match message:
            case OpMismatch():
                self._disputes.add_report(now, peer, message)
            case OpTimeout(_, op, waited_ms, descriptor):
                if len(descriptor) != DESCRIPTOR_BYTES:
                    raise RemoteProtocolError(f"its op that timed out has a descriptor of {len(descriptor)} bytes")
                waited_ms = max(0, waited_ms)
                others = {each.id: self._run.announced(each) for each in self._run.live(group) if each is not peer}
                missing = absent_from(op, others)
                text = f"{name_op(op)} waited {format_seconds(waited_ms)} for {list_peers(missing)}"
                self._fault(now, peer, Reason("deadline", text, missing, waited_ms), op, descriptor)
            case OpCancelled(_, op):
                reason = Reason("cancelled", f"peer {peer.id} gave up {name_op(op)}", [peer.id])
                self._epochs.begin(now, group, Cause(reason))

    def _fault(self, now: Ns, peer: Peer, reason: Reason, op: OpRef, descriptor: bytes = b"") -> None:
        """The program is at fault. Every member may report it; the first report is enough."""
        group = self._run.groups[peer.group]
        if group.change is not None and any(
            (cause.op, cause.descriptor) == (op, descriptor) for cause in group.change.causes
        ):
            return
        self._epochs.begin(now, group, Cause(reason, op, descriptor))
        self._run.notify(CallRefused(reason.peers, reason.text))

    def done(self, now: Ns, event: DoneReceived) -> None:
        """Take a Done; send evidence if it was the last one."""
        connection = self._run.connections.get(event.conn)
        if connection is None:
            return
        peer, done = connection.peer, event.done
        if peer is None:
            raise RemoteProtocolError("Done from a client that has not joined")
        peer.last_received_ns = now
        if not self._run.is_current(peer, done.epoch):
            return
        group = self._run.groups[peer.group]
        if group.collector is None:
            if group.evidence == "ring":
                raise RemoteProtocolError("Done to the master in an epoch whose evidence travels on the ring")
            return  # it was in flight when the seal was sent
        try:
            evidence = group.collector.add(peer.id, done)
        except Mismatch as mismatch:
            self._disputes.add_dones(now, peer, OpRef(done.tag, done.sequence), done.descriptor, mismatch)
            return
        if evidence is not None:
            self._run.out.append(evidence)


def absent_from(op: OpRef, others: Mapping[PeerId, Sequence[Announced]]) -> list[PeerId]:
    """The peers that have not started an op that timed out, by their last heartbeats; if all have started it, all of
    them."""
    absent = [
        peer
        for peer, announced in sorted(others.items())
        if all((each.tag, each.sequence) != (op.tag, op.sequence) for each in announced)
    ]
    return absent or sorted(others)
