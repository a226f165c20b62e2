"""Requests to a running master, over a plain blocking socket: `status`, `runs`, `evict`, `doctor` and `probe` use it,
and peers, to open a connection for their guardian.

The connection starts like that of a peer (a Challenge, and a proof of the token): a client that cannot join cannot read
the status either.
"""

import socket
import time
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import TypeVar

from ringfold.config import DEFAULT_RUN, check_run_name, split_address
from ringfold.errors import ConfigError, MasterUnreachable, RemoteProtocolError
from ringfold.runtime.clock import monotonic_ns, random_bytes
from ringfold.runtime.process import close_on_fork, keep_on_fork
from ringfold.wire.diagnostics import explain_connect_error, explain_no_challenge, explain_not_a_master
from ringfold.wire.events import Event, decode_event
from ringfold.wire.frames import MAX_FRAME_BYTES, FrameKind, FrameReader, decode_from_master, message_frame
from ringfold.wire.messages import (
    PROTOCOL_VERSION,
    Challenge,
    Events,
    EventsRequest,
    EvictRequest,
    EvictResponse,
    ForgetRun,
    FromMaster,
    GuardianHello,
    GuardianWelcome,
    Message,
    PeerId,
    Refused,
    RunList,
    RunsRequest,
    Status,
    StatusRequest,
)
from ringfold.wire.probing import ProbeAction, ProbeAnswer, ProbeCommand
from ringfold.wire.proof import NONCE_BYTES, prove, proven, run_token

Result = TypeVar("Result")


class _NoResponse(MasterUnreachable):
    """The connection is open, and no message arrives."""


class MasterClient:
    """A connection to a master. It may send any number of requests; each has a timeout of `timeout_s`.

    `run` names the run of the requests; empty means the default run, or the only one there is. One connection sends
    requests about one run, or about all runs, not both. `is_run_token`: the token is that of the run already, the only
    one that a peer has.
    """

    def __init__(
        self, address: str, token: bytes, timeout_s: float = 5.0, run: str = "", *, is_run_token: bool = False
    ) -> None:
        self.address, self.timeout_s = address, timeout_s
        self._token, self._run, self._is_run_token = token, run and check_run_name(run), is_run_token
        self._deadline_ns = monotonic_ns() + int(timeout_s * 1e9)
        self._reader = FrameReader()
        self._frames: Iterator[tuple[FrameKind, bytes]] = iter(())
        host, port = split_address(address)
        try:
            self._socket = socket.create_connection((host, port), timeout_s)
        except UnicodeError as error:
            raise MasterUnreachable(address, f"{host!r} is no name of a host ({error})") from None
        except OSError as error:
            raise MasterUnreachable(address, explain_connect_error(error.strerror or str(error))) from None
        close_on_fork(self._socket.fileno())
        try:
            challenge = self._receive_challenge()
            if not isinstance(challenge, Challenge):
                raise RemoteProtocolError(f"{address} did not begin with a challenge: is it a Ringfold master?")
            if not challenge.oldest <= PROTOCOL_VERSION <= challenge.newest:
                raise ConfigError(
                    f"the master at {address} speaks protocol versions {challenge.oldest} to {challenge.newest}, "
                    f"this is {PROTOCOL_VERSION}: install the same Ringfold on both sides"
                )
        except BaseException:
            self.close()
            raise
        self._challenge = challenge
        # A status of many peers is larger than the limit for a handshake.
        self._reader.limit = MAX_FRAME_BYTES

    def status(self) -> Status:
        """The status of the run."""
        nonce, proof = self._proof("status")
        response = self._request(StatusRequest(PROTOCOL_VERSION, nonce, proof, self._run))
        if not isinstance(response, Status):
            raise RemoteProtocolError(f"the master at {self.address} answered {type(response).__name__}, not Status")
        return response

    def events(self, after: int) -> Events:
        """The events of the run from number `after` on, as far as the master still has them."""
        nonce, proof = self._proof("status")
        response = self._request(EventsRequest(PROTOCOL_VERSION, after, nonce, proof, self._run))
        if not isinstance(response, Events):
            raise RemoteProtocolError(f"the master at {self.address} answered {type(response).__name__}, not Events")
        return response

    def probe(self, action: ProbeAction, label: str = "") -> ProbeAnswer:
        """Control probing, or read its newest round. A round takes a whole window: set the timeout accordingly."""
        nonce, proof = self._proof("probe")
        response = self._request(ProbeCommand(PROTOCOL_VERSION, action, label, nonce, proof, self._run))
        if not isinstance(response, ProbeAnswer):
            raise RemoteProtocolError(f"the master at {self.address} answered {type(response).__name__} to a command")
        return response

    def evict(self, peer: str, reason: str, by: str) -> EvictResponse:
        """Evict a peer, by its id or its name."""
        nonce, proof = self._proof("evict")
        response = self._request(EvictRequest(PROTOCOL_VERSION, peer, reason, by, nonce, proof, self._run))
        if not isinstance(response, EvictResponse):
            raise RemoteProtocolError(f"the master at {self.address} answered {type(response).__name__} to a command")
        return response

    def guard(self, peer: PeerId, key: bytes) -> int:
        """Make this the connection of a peer's guardian; returns its descriptor, which `close` closes. `key`: both
        nonces of the peer's control connection."""
        nonce, proof = self._proof("guardian")
        theirs = self._challenge.nonce
        peer_proof = prove(key, "guarded", theirs, nonce)
        response = self._request(GuardianHello(PROTOCOL_VERSION, peer, nonce, proof, peer_proof, self._run))
        if not isinstance(response, GuardianWelcome):
            raise RemoteProtocolError(f"the master at {self.address} answered {type(response).__name__} to a guardian")
        if not proven(self._run_token, response.proof, "guardian welcome", nonce, theirs):
            raise RemoteProtocolError(f"{self.address} does not know this run's token")
        return self._socket.fileno()

    def runs(self) -> RunList:
        """All runs of the master."""
        nonce, proof = self._master_proof("runs")
        return self._run_list(RunsRequest(PROTOCOL_VERSION, nonce, proof))

    def forget(self, name: str) -> RunList:
        """Forget a run that has ended; returns the other runs. ConfigError if it has peers, or does not exist."""
        nonce, proof = self._master_proof("forget")
        return self._run_list(ForgetRun(PROTOCOL_VERSION, check_run_name(name), nonce, proof))

    def _run_list(self, message: Message) -> RunList:
        response = self._request(message)
        if not isinstance(response, RunList):
            raise RemoteProtocolError(f"the master at {self.address} answered {type(response).__name__}, not RunList")
        return response

    def _receive_challenge(self) -> FromMaster:
        """The first message of a master. A server that sends nothing, or something else, is not a master."""
        try:
            return self._receive_message()
        except RemoteProtocolError as error:
            raise RemoteProtocolError(f"{self.address}: {explain_not_a_master(str(error))}") from None
        except _NoResponse:
            raise MasterUnreachable(self.address, explain_no_challenge(int(self.timeout_s * 1_000))) from None

    def _proof(self, purpose: str) -> tuple[bytes, bytes]:
        nonce = random_bytes(NONCE_BYTES)
        return nonce, prove(self._run_token, purpose, self._challenge.nonce, nonce)

    @property
    def _run_token(self) -> bytes:
        return self._token if self._is_run_token else run_token(self._token, self._run or DEFAULT_RUN)

    def _master_proof(self, purpose: str) -> tuple[bytes, bytes]:
        nonce = random_bytes(NONCE_BYTES)
        return nonce, prove(self._token, purpose, self._challenge.nonce, nonce)

    def _request(self, message: Message) -> FromMaster:
        self._deadline_ns = monotonic_ns() + int(self.timeout_s * 1e9)
        try:
            self._socket.sendall(message_frame(message))
        except OSError as error:
            raise MasterUnreachable(self.address, error.strerror or str(error)) from None
        return self._receive_message()

    def watch(self, every_s: float) -> Iterator[Status]:
        """Yield the status again and again, every `every_s`."""
        while True:
            yield self.status()
            time.sleep(every_s)

    def _receive_message(self) -> FromMaster:
        """The next message before the deadline. A refusal raises ConfigError, or MasterUnreachable if it is
        temporary."""
        while True:
            for kind, body in self._frames:
                if kind is not FrameKind.MESSAGE:
                    raise RemoteProtocolError(f"{self.address} sent a {kind.name} frame, and not a message")
                message = decode_from_master(body)
                if isinstance(message, Refused) and message.again:
                    raise MasterUnreachable(self.address, message.reason)
                if isinstance(message, Refused):
                    raise ConfigError(f"the master at {self.address} refused: {message.reason}")
                return message
            self._frames = self._reader.feed(self._receive_bytes())

    def _receive_bytes(self) -> bytes:
        left_s = (self._deadline_ns - monotonic_ns()) / 1e9
        try:
            # A timeout of zero would mean "do not block", with another exception.
            self._socket.settimeout(max(left_s, 1e-3))
            chunk = self._socket.recv(65_536)
        except TimeoutError:
            raise _NoResponse(self.address, f"no answer within {self.timeout_s:g} s") from None
        except OSError as error:
            raise MasterUnreachable(self.address, error.strerror or str(error)) from None
        if not chunk:
            raise MasterUnreachable(self.address, "it closed the connection")
        return chunk

    def close(self) -> None:
        keep_on_fork(self._socket.fileno())
        self._socket.close()

    def __enter__(self) -> "MasterClient":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def connect(
    addresses: Sequence[str], token: bytes, timeout_s: float = 5.0, run: str = "", *, is_run_token: bool = False
) -> MasterClient:
    """Connect to the first address that answers. If none does, the error has the reason of each.

    A relay answers too, and refuses every request: where the list may have one, use `ask`.
    """
    return _first_of(addresses, lambda address: MasterClient(address, token, timeout_s, run, is_run_token=is_run_token))


def ask(
    addresses: Sequence[str],
    token: bytes,
    request: Callable[[MasterClient], Result],
    timeout_s: float = 5.0,
    run: str = "",
    *,
    is_run_token: bool = False,
) -> Result:
    """The result of a request at the first address that accepts it. A relay, or a master that does not lead, does not.

    A request that was sent and not answered in time is not sent to another address.
    """

    def attempt(address: str) -> Result:
        with MasterClient(address, token, timeout_s, run, is_run_token=is_run_token) as client:
            return request(client)

    return _first_of(addresses, attempt)


def _first_of(addresses: Sequence[str], attempt: Callable[[str], Result]) -> Result:
    """The result of the first attempt that reaches a master."""
    if not addresses:
        raise ConfigError("no address of a master was given")
    failures: list[MasterUnreachable] = []
    for address in addresses:
        try:
            return attempt(address)
        except _NoResponse:
            raise
        except MasterUnreachable as error:
            failures.append(error)
    if len(failures) == 1:
        raise failures[0]
    reasons = "; ".join(f"{failure.address}: {failure.reason}" for failure in failures)
    raise MasterUnreachable(", ".join(addresses), reasons)


def _leader(addresses: Sequence[str], token: bytes, timeout_s: float, run: str) -> MasterClient:
    """A connection to the master that leads."""

    def attempt(address: str) -> MasterClient:
        client = MasterClient(address, token, timeout_s, run)
        try:
            client.status()  # a relay refuses it
        except BaseException:
            client.close()
            raise
        return client

    return _first_of(addresses, attempt)


def follow_status(
    addresses: Sequence[str], token: bytes, every_s: float, timeout_s: float = 5.0, run: str = ""
) -> Iterator[tuple[str, Status] | MasterUnreachable]:
    """Yield the status every `every_s`, from the master that leads at that time.

    Raises MasterUnreachable if there is none at first; later it yields that error.
    """

    has_seen = False
    while True:
        try:
            with _leader(addresses, token, timeout_s, run) as connection:
                for status in connection.watch(every_s):
                    has_seen = True
                    yield connection.address, status
        except MasterUnreachable as error:
            if not has_seen:
                raise
            yield error
            time.sleep(every_s)


def follow(
    addresses: Sequence[str], token: bytes, every_s: float, timeout_s: float = 5.0, run: str = ""
) -> Iterator[tuple[str, Status, list[Event]] | MasterUnreachable]:
    """Yield the status every `every_s`, and the events since the last look, from the master that leads at that time.

    The first look at a master brings all events that it still has. Raises MasterUnreachable if there is none at first;
    later it yields that error.
    """
    seen: tuple[str, int, int] = ("", 0, 0)
    has_seen = False
    while True:
        try:
            with _leader(addresses, token, timeout_s, run) as client:
                while True:
                    status = client.status()
                    address, fence, after = seen
                    is_known = (address, fence) == (client.address, status.fence)
                    new = client.events(after if is_known else 0)
                    seen, has_seen = (client.address, new.fence, new.next), True
                    yield client.address, status, [event for line in new.lines if (event := decode_event(line))]
                    time.sleep(every_s)
        except MasterUnreachable as error:
            if not has_seen:
                raise
            yield error
            time.sleep(every_s)
