"""Asking a master something, over a plain blocking socket: what `status`, `runs`, `evict`, `doctor` and
`probe start|stop|round` do.

The connection begins like a peer's (a Challenge, and a proof of the token), so whoever cannot join cannot look either.
"""

import socket
import time
from collections.abc import Iterator, Sequence
from types import TracebackType

from ringfold.config import DEFAULT_RUN, check_run_name, split_address
from ringfold.errors import ConfigError, MasterUnreachable, RemoteProtocolError
from ringfold.runtime.clock import monotonic_ns, random_bytes
from ringfold.wire.diagnostics import explain_connect_error, explain_no_challenge, explain_not_a_master
from ringfold.wire.frames import MAX_FRAME_BYTES, FrameKind, FrameReader, decode_from_master, message_frame
from ringfold.wire.messages import (
    PROTOCOL_VERSION,
    Challenge,
    EvictRequest,
    EvictResponse,
    ForgetRun,
    FromMaster,
    Message,
    Refused,
    RunList,
    RunsRequest,
    Status,
    StatusRequest,
)
from ringfold.wire.probing import ProbeAction, ProbeAnswer, ProbeCommand
from ringfold.wire.proof import NONCE_BYTES, prove, run_token


class _NoAnswer(MasterUnreachable):
    """The connection is there, and nothing comes."""


class MasterClient:
    """A connection that can ask for the status any number of times. Each question has `timeout_s` to be answered.

    `run` names the run that questions are about; without one it is the default run, or the only one there is. One
    connection asks about a run, or about all runs, not both. With `is_of_run` the token is that of the run already: a
    peer has no other.
    """

    def __init__(
        self, address: str, token: bytes, timeout_s: float = 5.0, run: str = "", *, is_of_run: bool = False
    ) -> None:
        self.address, self.timeout_s = address, timeout_s
        self._token, self._run, self._is_of_run = token, run and check_run_name(run), is_of_run
        self._deadline_ns = monotonic_ns() + int(timeout_s * 1e9)
        self._reader = FrameReader()
        self._frames: Iterator[tuple[FrameKind, bytes]] = iter(())
        host, port = split_address(address)
        try:
            self._socket = socket.create_connection((host, port), timeout_s)
        except OSError as error:
            raise MasterUnreachable(address, explain_connect_error(error.strerror or str(error))) from None
        try:
            challenge = self._greeting()
            if not isinstance(challenge, Challenge):
                raise RemoteProtocolError(f"{address} did not begin with a challenge: is it a Ringfold master?")
            if not challenge.oldest <= PROTOCOL_VERSION <= challenge.newest:
                raise ConfigError(
                    f"the master at {address} speaks protocol versions {challenge.oldest} to {challenge.newest}, "
                    f"this is {PROTOCOL_VERSION}: install the same Ringfold on both sides"
                )
        except BaseException:
            self._socket.close()
            raise
        self._challenge = challenge
        # A status of many peers is larger than what a stranger may send in a handshake.
        self._reader.limit = MAX_FRAME_BYTES

    def status(self) -> Status:
        """The run as the master sees it now."""
        nonce, proof = self._proof("status")
        answer = self._question(StatusRequest(PROTOCOL_VERSION, nonce, proof, self._run))
        if not isinstance(answer, Status):
            raise RemoteProtocolError(f"the master at {self.address} answered {type(answer).__name__}, not Status")
        return answer

    def probe(self, action: ProbeAction, label: str = "") -> ProbeAnswer:
        """Steer the probing, or look at its newest round. A round takes a window's time: give the connection that."""
        nonce, proof = self._proof("probe")
        answer = self._question(ProbeCommand(PROTOCOL_VERSION, action, label, nonce, proof, self._run))
        if not isinstance(answer, ProbeAnswer):
            raise RemoteProtocolError(f"the master at {self.address} answered {type(answer).__name__} to a command")
        return answer

    def evict(self, peer: str, reason: str, by: str) -> EvictResponse:
        """Have a peer (its id, or its name) evicted; what came of it."""
        nonce, proof = self._proof("evict")
        answer = self._question(EvictRequest(PROTOCOL_VERSION, peer, reason, by, nonce, proof, self._run))
        if not isinstance(answer, EvictResponse):
            raise RemoteProtocolError(f"the master at {self.address} answered {type(answer).__name__} to a command")
        return answer

    def runs(self) -> RunList:
        """All runs of the master."""
        nonce, proof = self._master_proof("runs")
        return self._run_list(RunsRequest(PROTOCOL_VERSION, nonce, proof))

    def forget(self, name: str) -> RunList:
        """Have a run forgotten that has ended; the others that there are. ConfigError if it has peers, or is none."""
        nonce, proof = self._master_proof("forget")
        return self._run_list(ForgetRun(PROTOCOL_VERSION, check_run_name(name), nonce, proof))

    def _run_list(self, message: Message) -> RunList:
        answer = self._question(message)
        if not isinstance(answer, RunList):
            raise RemoteProtocolError(f"the master at {self.address} answered {type(answer).__name__}, not RunList")
        return answer

    def _greeting(self) -> FromMaster:
        """A master speaks first. Who does not, or says something else, is none."""
        try:
            return self._next()
        except RemoteProtocolError as error:
            raise RemoteProtocolError(f"{self.address}: {explain_not_a_master(str(error))}") from None
        except _NoAnswer:
            raise MasterUnreachable(self.address, explain_no_challenge(int(self.timeout_s * 1_000))) from None

    def _proof(self, purpose: str) -> tuple[bytes, bytes]:
        nonce = random_bytes(NONCE_BYTES)
        token = self._token if self._is_of_run else run_token(self._token, self._run or DEFAULT_RUN)
        return nonce, prove(token, purpose, self._challenge.nonce, nonce)

    def _master_proof(self, purpose: str) -> tuple[bytes, bytes]:
        nonce = random_bytes(NONCE_BYTES)
        return nonce, prove(self._token, purpose, self._challenge.nonce, nonce)

    def _question(self, message: Message) -> FromMaster:
        self._deadline_ns = monotonic_ns() + int(self.timeout_s * 1e9)
        try:
            self._socket.sendall(message_frame(message))
        except OSError as error:
            raise MasterUnreachable(self.address, error.strerror or str(error)) from None
        return self._next()

    def watch(self, every_s: float) -> Iterator[Status]:
        """The status now, and again every so often, for as long as the caller goes on."""
        while True:
            yield self.status()
            time.sleep(every_s)

    def _next(self) -> FromMaster:
        """The next message before the deadline; a refusal is raised as the ConfigError that it nearly always is."""
        while True:
            for kind, body in self._frames:
                if kind is not FrameKind.MESSAGE:
                    raise RemoteProtocolError(f"{self.address} sent a {kind.name} frame to somebody who only looks")
                message = decode_from_master(body)
                if isinstance(message, Refused) and message.again:
                    raise MasterUnreachable(self.address, message.reason)
                if isinstance(message, Refused):
                    raise ConfigError(f"the master at {self.address} refused: {message.reason}")
                return message
            self._frames = self._reader.feed(self._receive())

    def _receive(self) -> bytes:
        left_s = (self._deadline_ns - monotonic_ns()) / 1e9
        try:
            # A timeout of zero would mean "do not block", and fail in another way.
            self._socket.settimeout(max(left_s, 1e-3))
            chunk = self._socket.recv(65_536)
        except TimeoutError:
            raise _NoAnswer(self.address, f"no answer within {self.timeout_s:g} s") from None
        except OSError as error:
            raise MasterUnreachable(self.address, error.strerror or str(error)) from None
        if not chunk:
            raise MasterUnreachable(self.address, "it closed the connection")
        return chunk

    def close(self) -> None:
        self._socket.close()

    def __enter__(self) -> "MasterClient":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def connect(
    addresses: Sequence[str], token: bytes, timeout_s: float = 5.0, run: str = "", *, is_of_run: bool = False
) -> MasterClient:
    """A connection to the first of a master's addresses that answers. If none does, the error says why of each."""
    if not addresses:
        raise ConfigError("no address of a master was given")
    failures: list[MasterUnreachable] = []
    for address in addresses:
        try:
            return MasterClient(address, token, timeout_s, run, is_of_run=is_of_run)
        except MasterUnreachable as error:
            failures.append(error)
    if len(failures) == 1:
        raise failures[0]
    reasons = "; ".join(f"{failure.address}: {failure.reason}" for failure in failures)
    raise MasterUnreachable(", ".join(addresses), reasons)


def follow_status(
    addresses: Sequence[str], token: bytes, every_s: float, timeout_s: float = 5.0, run: str = ""
) -> Iterator[tuple[str, Status] | MasterUnreachable]:
    """The status now and again, from whoever leads by then. Raises if nobody does at first; later it says so."""
    has_seen = False
    while True:
        try:
            with connect(addresses, token, timeout_s, run) as connection:
                for status in connection.watch(every_s):
                    has_seen = True
                    yield connection.address, status
        except MasterUnreachable as error:
            if not has_seen:
                raise
            yield error
            time.sleep(every_s)
