"""The one `Store`: namespaces, deadlines, retries, generations and leases, on top of any backend.

What a backend cannot decide for itself is decided here, once for all of them:
- which calls are retried until the deadline (reads; writes that certainly were not made), and which are not;
- whether a response comes from the store that this client knows. It is compared with what was known *before* the
  request was sent: another thread's newer response must not make this one look old;
- when a lease has expired, where the store does not expire leases.

*Leases without the store's help.* A leased key carries its time to live, and renewing it writes it again, which gives
it a new version. An observer notes when, on its own monotonic clock, it first saw a version. A version that it has seen
for the whole time to live is expired. The observer deletes the key, on condition of that version: a renewal in between
wins, and a holder whose key is gone notices at its next renewal. No clock value is ever sent.

The holder notices first. It counts from before it sent the write, an observer from after it read it. So if clocks run
at the same rate, the holder gives up before another client takes over.

A gap between two observations counts at most half the time to live. So an observer that was suspended, or a store that
was, leaves a live holder half of its time to renew. An expiry takes three observations.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar
from urllib.parse import parse_qsl, urlsplit

from ringfold.errors import (
    ConfigError,
    LeaseLost,
    StoreError,
    StoreReset,
    StoreUnknown,
    StoreUnreachable,
    StoreWentBack,
    UsageError,
)
from ringfold.runtime import clock, threads
from ringfold.store.base import (
    ANY,
    KEY_LIMIT,
    NS,
    VALUE_LIMIT,
    Added,
    Bell,
    Deadline,
    Driver,
    Entry,
    Generation,
    Lost,
    Read,
    Scanned,
    Won,
    Write,
    Written,
    version_of,
)

Answer = TypeVar("Answer", Read, Written, Added, Scanned)
Value = TypeVar("Value")

_FIRST_PAUSE_S = 0.005
_LAST_PAUSE_S = 0.25
_LAST_LOOK_S = 0.25

SCHEMES = ("sqlite", "tcp", "etcd", "etcds", "redis", "rediss")
_TRUE = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}


@dataclass(slots=True)
class _Watched:
    version: int
    looked_ns: int
    watched_ns: int


class LeaseWatch:
    """What one observer knows about the leases that it has looked at."""

    def __init__(self) -> None:
        self._watched: dict[str, _Watched] = {}

    def look(self, now_ns: int, key: str, entry: Entry | None) -> bool:
        """Note what a key holds now; returns whether its lease has ended."""
        if entry is None or not entry.ttl_ms:
            self._watched.pop(key, None)
            return False
        ttl_ns = entry.ttl_ms * 1_000_000
        watched = self._watched.get(key)
        if watched is None or watched.version != entry.version:
            self._watched[key] = _Watched(entry.version, now_ns, 0)
            return False
        watched.watched_ns += min(now_ns - watched.looked_ns, ttl_ns // 2)
        watched.looked_ns = now_ns
        return watched.watched_ns >= ttl_ns

    def forget(self, key: str) -> None:
        self._watched.pop(key, None)


def pace_s(entry: Entry | None) -> float:
    """How often to look at a key so that the end of its lease is seen in time."""
    return entry.ttl_ms / 4_000 if entry is not None and entry.ttl_ms else float("inf")


def pause(seconds: float) -> None:
    threads.Event().wait(seconds)


class StoreClient:
    """A `Store` on a driver. `now_ns` and `pause` are the clock and how to let time pass; a simulation has its own."""

    def __init__(
        self,
        driver: Driver,
        *,
        prefix: str = "ringfold",
        timeout_s: float = 5.0,
        known: Generation | None = None,
        now_ns: Callable[[], int] = clock.monotonic_ns,
        pause: Callable[[float], None] = pause,
        nonce: str | None = None,
    ) -> None:
        if timeout_s <= 0:
            raise UsageError(f"timeout_s must be positive, not {timeout_s}")
        _check_key(prefix, "prefix")
        self._driver, self._prefix = driver, f"{prefix}/"
        self._timeout_s, self._now_ns, self._pause = timeout_s, now_ns, pause
        self._lock = threads.Lock()
        self._watch = LeaseWatch()
        self._known = known or Generation("", 0)
        self._meet(known, nonce or clock.random_bytes(16).hex())

    def _meet(self, known: Generation | None, nonce: str) -> None:
        """Learn which store this is. Who knows it from before never founds it anew."""
        deadline = self._deadline(None)
        stamp = self._repeat(lambda: self._driver.found(None if known else nonce, deadline), deadline)
        if known is None and stamp is None:
            raise StoreError(self._driver.name, "it does not keep what is written into it")
        self._check(stamp, known or stamp or self._known)

    @property
    def name(self) -> str:
        """The address of the store, without what must not be shown, and with the port that a served one has got."""
        return self._driver.name

    @property
    def can_list(self) -> bool:
        return self._driver.can_list

    @property
    def has_leases(self) -> bool:
        return self._driver.has_leases

    @property
    def generation(self) -> Generation:
        with self._lock:
            return self._known

    def get(self, key: str, timeout_s: float | None = None) -> Entry | None:
        return self._read(key, self._deadline(timeout_s)).entry

    def set(self, key: str, value: bytes, timeout_s: float | None = None, *, lasting: bool = True) -> Entry:
        write = Write(self._full(key), _checked(value), lasting=lasting)
        written = self._write(write, self._deadline(timeout_s))
        assert written.is_made, "a write without a condition was refused"
        assert written.entry is not None, "a value was written, and the key is absent"
        return written.entry

    def compare_and_set(
        self, key: str, expected: Entry | None, value: bytes, timeout_s: float | None = None, *, lasting: bool = True
    ) -> Won | Lost:
        write = Write(self._full(key), _checked(value), expected, lasting=lasting)
        written = self._write(write, self._deadline(timeout_s))
        if not written.is_made:
            return Lost(written.entry)
        assert written.entry is not None, "a value was written, and the key is absent"
        return Won(written.entry)

    def add(self, key: str, delta: int = 1, timeout_s: float | None = None) -> int:
        deadline, full = self._deadline(timeout_s), self._full(key)
        added = self._ask(lambda guard: self._driver.add(full, delta, guard, deadline), deadline)
        if added.total is None:
            raise UsageError(f"{key!r} in the store holds no number, so nothing can be added to it")
        return added.total

    def delete(self, key: str, expected: Entry | None = None, timeout_s: float | None = None) -> bool:
        condition = ANY if expected is None else expected
        written = self._write(Write(self._full(key), None, condition), self._deadline(timeout_s))
        return written.is_made and written.was_there

    def list(self, prefix: str = "", timeout_s: float | None = None) -> dict[str, Entry]:
        if not self.can_list:
            raise UsageError(f"the store {self._driver.name} cannot list its keys; keep a roster in a key instead")
        deadline, start = self._deadline(timeout_s), self._prefix + prefix
        scanned = self._ask(lambda guard: self._driver.scan(start, guard, deadline), deadline)
        skip = len(self._prefix)
        found = {full[skip:]: entry for full, entry in sorted(scanned.entries.items())}
        # `!` begins the names that a driver keeps for itself.
        return {
            key: entry
            for key, entry in found.items()
            if not key.startswith("!") and not self._has_ended(key, entry, deadline)
        }

    def wait(self, key: str, seen: int, timeout_s: float | None = None) -> Entry | None:
        deadline = self._deadline(timeout_s)
        read = self._look(key, deadline)
        if version_of(read.entry) != seen or deadline.is_over():
            return read.entry
        bell = self._listen(key, deadline)
        try:
            # What changed before the bell was there did not ring it: look again first.
            read = self._look(key, deadline)
            while version_of(read.entry) == seen and not deadline.is_over():
                try:
                    bell.wait(read, min(deadline.left_s(), pace_s(read.entry)))
                except StoreUnreachable:
                    bell.close()
                    bell = self._listen(key, deadline)
                read = self._look(key, deadline)
            return read.entry
        finally:
            bell.close()

    def _look(self, key: str, deadline: Deadline) -> Read:
        """Read for a wait. Reading takes longer than nothing, so the last look has a moment of its own."""
        return self._read(key, self._graced(deadline))

    def _listen(self, key: str, deadline: Deadline) -> Bell:
        graced = self._graced(deadline)
        return self._repeat(lambda: self._driver.listen(self._full(key), graced), graced)

    def _graced(self, deadline: Deadline) -> Deadline:
        return Deadline(self._now_ns, max(deadline.left_s(), _LAST_LOOK_S))

    def lease(self, key: str, value: bytes, ttl_s: float, timeout_s: float | None = None) -> "HeldLease | None":
        if ttl_s <= 0:
            raise UsageError(f"ttl_s must be positive, not {ttl_s}")
        deadline = self._deadline(timeout_s)
        ttl_ms = max(1, round(ttl_s * 1_000))
        # Whether the lease of the present holder has ended, only a look can tell.
        if not self.has_leases and self._read(key, deadline).entry is not None:
            return None
        sent_ns = self._now_ns()
        written = self._write(Write(self._full(key), _checked(value), None, ttl_ms), deadline)
        if not written.is_made:
            return None
        assert written.entry is not None, "a value was written, and the key is absent"
        return HeldLease(self, key, written.entry, ttl_ms, sent_ns)

    def close(self) -> None:
        self._driver.close()

    def __enter__(self) -> "StoreClient":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _renew(self, key: str, entry: Entry, timeout_s: float | None) -> Entry | None:
        """The entry under the renewed lease; None if the lease is lost."""
        deadline, full = self._deadline(timeout_s), self._full(key)
        if self.has_leases:
            written = self._ask(lambda guard: self._driver.keep(full, entry, guard, deadline), deadline)
        else:
            # Not lasting: a flush is long, and whoever is frozen in one keeps the lock from those who would take over.
            written = self._write(Write(full, entry.value, entry, entry.ttl_ms, lasting=False), deadline)
        return written.entry if written.is_made else None

    def _release(self, key: str, entry: Entry, timeout_s: float | None) -> None:
        self._write(Write(self._full(key), None, entry), self._deadline(timeout_s))

    # What all of them go through

    def _deadline(self, timeout_s: float | None) -> Deadline:
        return Deadline(self._now_ns, self._timeout_s if timeout_s is None else max(0.0, timeout_s))

    def _full(self, key: str) -> str:
        _check_key(key, "key")
        return self._prefix + key

    def _read(self, key: str, deadline: Deadline) -> Read:
        full = self._full(key)
        read = self._ask(lambda guard: self._driver.read(full, guard, deadline), deadline)
        return Read(None, read.stamp) if self._has_ended(key, read.entry, deadline) else read

    def _write(self, write: Write, deadline: Deadline) -> Written:
        return self._ask(lambda guard: self._driver.write(write, guard, deadline), deadline)

    def _has_ended(self, key: str, entry: Entry | None, deadline: Deadline) -> bool:
        """Whether what was just read is a lease that has ended; then it is removed, unless it is renewed just now."""
        if self.has_leases:
            return False
        with self._lock:
            if not self._watch.look(self._now_ns(), key, entry):
                return False
        assert entry is not None, "an absent key has no lease"
        try:
            written = self._write(Write(self._full(key), None, entry), deadline)
        except StoreUnknown:
            return False
        return written.is_made

    def _ask(self, call: Callable[[Generation], Answer], deadline: Deadline) -> Answer:
        guard = self.generation
        answer = self._repeat(lambda: call(guard), deadline)
        self._check(answer.stamp, guard)
        return answer

    def _repeat(self, call: Callable[[], Value], deadline: Deadline) -> Value:
        """Call again as long as nothing was changed, until the deadline."""
        wait_s = _FIRST_PAUSE_S
        while True:
            try:
                return call()
            except StoreUnreachable:
                if deadline.left_s() <= wait_s:
                    raise
            self._pause(wait_s)
            wait_s = min(2 * wait_s, _LAST_PAUSE_S)

    def _check(self, stamp: Generation | None, guard: Generation) -> None:
        """Refuse an answer of a store that is not the one we know; remember how far it has come."""
        name = self._driver.name
        if stamp is None:
            raise StoreReset(name, f"it was emptied: its generation {guard.id[:8]} is gone")
        if stamp.id != guard.id:
            raise StoreReset(name, f"it is generation {stamp.id[:8]}, and this client knows {guard.id[:8]}")
        if stamp.revision < guard.revision:
            raise StoreWentBack(name, f"it is at revision {stamp.revision}, and was at {guard.revision} before")
        with self._lock:
            if stamp.revision >= self._known.revision:
                self._known = stamp


class HeldLease:
    """The `Lease` that a StoreClient gives out."""

    def __init__(self, store: StoreClient, key: str, entry: Entry, ttl_ms: int, sent_ns: int) -> None:
        self._store, self._entry, self._ttl_ms = store, entry, ttl_ms
        self._sent_ns: int | None = sent_ns
        self._lock = threads.Lock()
        self.key, self.fence = key, entry.version

    @property
    def ttl_s(self) -> float:
        return self._ttl_ms / 1_000

    def left_s(self) -> float:
        if self._sent_ns is None:
            return 0.0
        return max(0.0, (self._sent_ns - self._store._now_ns()) / NS + self.ttl_s)

    def renew(self, timeout_s: float | None = None) -> None:
        with self._lock:
            left_s = self.left_s()
            if left_s == 0:
                self._sent_ns = None
                raise LeaseLost(self._store._driver.name, f"the lease of {self.key!r} was not renewed in time")
            sent_ns = self._store._now_ns()
            default_s = self._store._timeout_s if timeout_s is None else timeout_s
            try:
                entry = self._store._renew(self.key, self._entry, min(default_s, left_s))
            except StoreUnknown as error:
                entry = self._settle(error)
            if entry is None:
                self._sent_ns = None
                raise LeaseLost(self._store._driver.name, f"the lease of {self.key!r} is held no longer")
            self._entry, self._sent_ns = entry, sent_ns

    def _settle(self, error: StoreUnknown) -> Entry | None:
        """Whether a renewal without an answer was made: only the holder writes this key with this content."""
        present = self._store.get(self.key, self.left_s())
        if present is None:
            return None
        if present.version == self._entry.version:
            raise StoreUnreachable(error.store, error.text) from error
        is_ours = present.value == self._entry.value and present.ttl_ms == self._entry.ttl_ms
        return present if is_ours else None

    def release(self, timeout_s: float | None = None) -> None:
        with self._lock:
            if self._sent_ns is not None:
                self._sent_ns = None
                self._store._release(self.key, self._entry, timeout_s)


if TYPE_CHECKING:
    from ringfold.store.base import Store

    _: type[Store] = StoreClient


def _check_key(key: str, what: str) -> None:
    if not key or key.startswith("!") or "\0" in key or len(key.encode()) > KEY_LIMIT:
        raise UsageError(
            f"a {what} of the store has 1 to {KEY_LIMIT} bytes, no NUL in it and no '!' in front; got {key[:80]!r}"
        )


def _checked(value: bytes) -> bytes:
    if not isinstance(value, bytes):
        raise UsageError(f"a value in the store is bytes, not {type(value).__name__}")
    if len(value) > VALUE_LIMIT:
        raise UsageError(f"a value in the store has at most {VALUE_LIMIT} bytes, not {len(value)}")
    return value


def open_store(
    url: str,
    *,
    prefix: str | None = None,
    timeout_s: float | None = None,
    known: Generation | None = None,
    serve: bool | None = None,
    allow_network: bool | None = None,
) -> StoreClient:
    """Open the store at `url` for one namespace, `prefix`, and make sure that it answers.

    `timeout_s` (5) is what a call may take that says nothing else. With `known`, a store that is not that generation,
    or has not come as far, is refused; keep `store.generation` on disk for this. `serve` (tcp) runs the store inside
    this process; `allow_network` (sqlite) takes a file on a network disk after all.
    """
    split = urlsplit(url)
    if split.scheme not in SCHEMES:
        raise ConfigError(f"a store's address begins with one of {', '.join(SCHEMES)}; got {_hidden(url)!r}")
    asked = dict(parse_qsl(split.query))
    unknown = asked.keys() - {"prefix", "timeout_s", "serve", "allow_network"}
    if unknown:
        raise ConfigError(f"{_hidden(url)!r}: a store has no option {', '.join(sorted(unknown))}")
    bare = url.partition("?")[0]
    namespace = prefix or asked.get("prefix", "ringfold")
    driver = _driver(
        split.scheme,
        bare,
        namespace,
        serve=_switch(url, asked, "serve") if serve is None else serve,
        allow_network=_switch(url, asked, "allow_network") if allow_network is None else allow_network,
    )
    try:
        return StoreClient(
            driver,
            prefix=namespace,
            timeout_s=_seconds(url, asked) if timeout_s is None else timeout_s,
            known=known,
        )
    except BaseException:
        driver.close()
        raise


def _driver(scheme: str, url: str, namespace: str, *, serve: bool, allow_network: bool) -> Driver:
    """The backend for an address; what it needs is imported only now."""
    if scheme == "sqlite":
        from ringfold.store.sqlite import SqliteDriver

        path = url.removeprefix("sqlite:").removeprefix("//")
        if not path:
            raise ConfigError(f"{url!r} names no file; write sqlite:///absolute/path.db or sqlite:relative.db")
        return SqliteDriver(path, allow_network=allow_network)
    if scheme in ("redis", "rediss"):
        from ringfold.store.redis import RedisDriver

        return RedisDriver(url, namespace)
    if scheme in ("etcd", "etcds"):
        from ringfold.store.etcd import EtcdDriver

        return EtcdDriver(url, namespace)
    from ringfold.store.tcp import TcpDriver

    return TcpDriver(url, namespace, serve=serve)


def _switch(url: str, asked: dict[str, str], name: str) -> bool:
    text = asked.get(name, "0").lower()
    if text not in _TRUE:
        raise ConfigError(f"{_hidden(url)!r}: {name} is true or false, not {text!r}")
    return _TRUE[text]


def _seconds(url: str, asked: dict[str, str]) -> float:
    try:
        return float(asked.get("timeout_s", "5"))
    except ValueError:
        raise ConfigError(f"{_hidden(url)!r}: timeout_s is a number of seconds") from None


def _hidden(url: str) -> str:
    """An address without what must not be shown."""
    head, at, tail = url.rpartition("@")
    return f"{head.partition('://')[0]}://...@{tail}" if at else url
