"""Many peers of a master in one process: `master_worker.py ADDRESS NAME HOST PORT`.

The peers use the real control protocol and nothing else: they join, are admitted by a vote, respond to heartbeats,
seals and records, and send Done; there are no lanes and no arrays. So the figures show the master, not the cost of 64
training processes on a small machine. An epoch of a run with evidence by the master needs no lane for small ops, hence
a peer here sends Attached at once.

The bodies of evidence frames are counted and skipped, because copying 64 times 64 KiB per op would measure this client.
"""

import asyncio
import os
import struct
import sys
from pathlib import Path
from typing import cast

from ringfold.runtime.clock import monotonic_ns, random_bytes
from ringfold.tools.cluster import Channel, ChannelClosed, Message
from ringfold.wire.frames import (
    Done,
    FrameKind,
    Heartbeat,
    decode_from_master,
    decode_master_heartbeat,
    done_frame,
    heartbeat_frame,
    message_frame,
)
from ringfold.wire.messages import (
    PROTOCOL_VERSION,
    Attached,
    CallDone,
    CallFailed,
    Challenge,
    Evicted,
    FromMaster,
    Hello,
    Installed,
    Record,
    Refused,
    Registrations,
    Seal,
    Sealed,
    Vote,
    Welcome,
)
from ringfold.wire.proof import NONCE_BYTES, prove

HEAD = struct.Struct("<IB")
EVIDENCE = struct.Struct("<IQIIQH")
DESCRIPTOR = struct.Struct("<BBBBBBHIIQQ")
F32, SUM = 10, 0
ADMISSION_S = 60.0


class ControlPeer(asyncio.Protocol):
    """One connection: a frame cutter that skips what evidence carries, and the few answers that a master needs."""

    def __init__(self, peers: "ControlPeers", number: int) -> None:
        self._peers, self._number = peers, number
        self._buffer = bytearray()
        self._skip = 0
        self._beats = 0
        self._ballots = 0
        self._members: list[int] = []
        self.peer = self.epoch = self.rank = self.registrations = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def connection_lost(self, error: Exception | None) -> None:
        self._peers.fail(f"the master closed connection {self._number}: {error or 'no reason'}")

    def data_received(self, data: bytes) -> None:
        if self._skip:
            taken = min(self._skip, len(data))
            self._skip -= taken
            data = data[taken:]
        self._buffer += data
        buffer = self._buffer
        while len(buffer) >= HEAD.size:
            length, kind = HEAD.unpack_from(buffer)
            if kind == FrameKind.EVIDENCE:
                if len(buffer) < HEAD.size + EVIDENCE.size:
                    return
                _, _, sequence, _, _, _ = EVIDENCE.unpack_from(buffer, HEAD.size)
                here = min(len(buffer), 4 + length)
                self._skip = 4 + length - here
                del buffer[:here]
                self._peers.evidence(sequence)
                continue
            if len(buffer) < 4 + length:
                return
            body = bytes(buffer[HEAD.size : 4 + length])
            del buffer[: 4 + length]
            if kind == FrameKind.HEARTBEAT:
                self._answer_beat(body)
            else:
                self._answer(decode_from_master(body))

    def _answer_beat(self, body: bytes) -> None:
        self._beats += 1
        number, _ = decode_master_heartbeat(body)
        self.transport.write(heartbeat_frame(Heartbeat(self._beats, number, self.epoch)))

    def _answer(self, message: FromMaster) -> None:
        match message:
            case Challenge(nonce=theirs):
                mine = random_bytes(NONCE_BYTES)
                name = f"bench-{self._number}"
                proof = prove(b"", "hello", theirs, mine)
                hello = Hello(PROTOCOL_VERSION, 0, "bench", name, ["127.0.0.1"], 1, mine, proof)
                self.transport.write(message_frame(hello))
            case Welcome(peer=peer):
                self.peer = peer
            case Registrations(count=count):
                self.registrations = count
            case Seal(epoch=epoch):
                self.transport.write(message_frame(Sealed(epoch, [])))
            case Record():
                self.epoch = message.epoch
                self._members = [member.peer for member in message.members]
                self.rank = self._members.index(self.peer)
                self.registrations = message.registrations
                self.transport.write(message_frame(Attached(message.epoch)))
            case Installed():
                self._installed()
            case Refused(reason=reason) | Evicted(reason=reason):
                self._peers.fail(f"peer {self.peer} was turned away: {reason}")
            case CallFailed(reason=why):
                self._peers.fail(f"the vote of peer {self.peer} failed: {why.text}")
            case CallDone() | _:
                pass

    def _installed(self) -> None:
        if len(self._members) == self._peers.size:
            self._peers.admitted()
        else:
            self._ballots += 1
            vote = Vote(self._ballots, "update", self.epoch, min_world=self._peers.size)
            self.transport.write(message_frame(vote))


class ControlPeers:
    """All peers of one measurement. An op is over when every one of them has the evidence."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.peers: list[ControlPeer] = []
        self._missing = size
        self._over = asyncio.get_running_loop().create_future()

    async def connect(self, host: str, port: int) -> None:
        """Open all connections and wait until one epoch holds everybody."""
        loop = asyncio.get_running_loop()
        for number in range(self.size):
            peer = ControlPeer(self, number)
            self.peers.append(peer)
            await loop.create_connection(lambda peer=peer: peer, host, port)  # type: ignore[misc]
        await asyncio.wait_for(self._over, ADMISSION_S)

    async def op(self, sequence: int, payload: bytes, descriptor: bytes) -> None:
        """One op with everybody's Done at once."""
        self._missing = self.size
        self._sequence = sequence
        self._over = asyncio.get_running_loop().create_future()
        for peer in self.peers:
            done = Done(peer.epoch, 0, sequence, peer.rank, descriptor, peer.registrations, payload)
            peer.transport.write(done_frame(done))
        await self._over

    def evidence(self, sequence: int) -> None:
        assert sequence == self._sequence, f"evidence of op {sequence} during op {self._sequence}"
        self._one_less()

    def admitted(self) -> None:
        self._one_less()

    def fail(self, text: str) -> None:
        if not self._over.done():
            self._over.set_exception(RuntimeError(text))

    def close(self) -> None:
        for peer in self.peers:
            peer.transport.abort()

    def _one_less(self) -> None:
        self._missing -= 1
        if self._missing == 0 and not self._over.done():
            self._over.set_result(None)


async def measure(order: Message, host: str, port: int) -> Message:
    """Join with so many connections, then run ops for so long; report the time of each op."""
    peers = ControlPeers(order["connections"])
    payload = bytes(order["payload_bytes"])
    descriptor = DESCRIPTOR.pack(0, F32, SUM, 0, 1, 0, 0, 1, 0, len(payload) // 4, len(payload))
    durations: list[int] = []
    try:
        await peers.connect(host, port)
        for sequence in range(order["warm_up"]):
            await peers.op(sequence, payload, descriptor)
        sequence = order["warm_up"]
        cpu_before = cpu_ns(order["master_pid"])
        started = before = monotonic_ns()
        while before - started < order["seconds"] * 1e9:
            await peers.op(sequence, payload, descriptor)
            after = monotonic_ns()
            durations.append(after - before)
            before = after
            sequence += 1
        used = cpu_ns(order["master_pid"]) - cpu_before
    finally:
        peers.close()
    return {"durations_ns": durations, "took_ns": before - started, "master_cpu_ns": used}


def cpu_ns(pid: int) -> int:
    """Processor time that a process has used, all its threads together (in steps of 10 ms)."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) * 1_000_000_000 // os.sysconf("SC_CLK_TCK")


def main(arguments: list[str]) -> None:
    address, name, host, port = arguments
    channel = Channel.connect(address, name)
    try:
        while (order := channel.receive()) is not None:
            channel.send(asyncio.run(measure(order, host, int(port))))
    except ChannelClosed:
        return
    except Exception as error:
        channel.send({"error": f"{type(error).__name__}: {error}"})
        raise


if __name__ == "__main__":
    main(sys.argv[1:])
