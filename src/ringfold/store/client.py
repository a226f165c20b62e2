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

import os
from collections.abc import Callable, Sequence
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
from ringfold.limits import MAX_TIMEOUT_S
from ringfold.runtime import clock, threads
from ringfold.store.base import (
    ANY,
    MAX_KEY_BYTES,
    MAX_VALUE_BYTES,
    NS,
    Added,
    Deadline,
    Driver,
    Entry,
    Generation,
    KeyWatch,
    Lost,
    Read,
    Scanned,
    Won,
    Write,
    Written,
    version_of,
)

Response = TypeVar("Response", Read, Written, Added, Scanned)
Value = TypeVar("Value")

_FIRST_PAUSE_S = 0.005
_MAX_PAUSE_S = 0.25
_MIN_LAST_READ_S = 0.25
_MAX_WATCHES = 4

SCHEMES = ("sqlite", "tcp", "etcd", "etcds", "redis", "rediss")
_TRUE = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}


@dataclass(slots=True)
class _ObservedLease:
    version: int
    looked_ns: int
    watched_ns: int


@dataclass(slots=True)
class _KeptWatch:
    """A watch, the process that made it, and what was read last since it exists."""

    watch: KeyWatch
    pid: int
    read: Read | None


class LeaseMonitor:
    """What one client knows about the leases that it has read."""

    def __init__(self) -> None:
        self._watched: dict[str, _ObservedLease] = {}

    def observe(self, now_ns: int, key: str, entry: Entry | None) -> bool:
        """Note the present entry of a key; returns whether its lease has expired."""
        if entry is None or not entry.ttl_ms:
            self._watched.pop(key, None)
            return False
        ttl_ns = entry.ttl_ms * 1_000_000
        watched = self._watched.get(key)
        if watched is None or watched.version != entry.version:
            self._watched[key] = _ObservedLease(entry.version, now_ns, 0)
            return False
        watched.watched_ns += min(now_ns - watched.looked_ns, ttl_ns // 2)
        watched.looked_ns = now_ns
        return watched.watched_ns >= ttl_ns

    def forget(self, key: str) -> None:
        self._watched.pop(key, None)


def observe_interval_s(entry: Entry | None) -> float:
    """How often to read a key so that the expiry of its lease is seen in time."""
    return entry.ttl_ms / 4_000 if entry is not None and entry.ttl_ms else float("inf")


def pause(seconds: float) -> None:
    threads.Event().wait(seconds)


class StoreClient:
    """A `Store` on a driver. `now_ns` is the clock and `pause` sleeps; a simulation has its own."""

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
        if not 0 < timeout_s <= MAX_TIMEOUT_S:
            raise UsageError(f"timeout_s must be positive and at most {MAX_TIMEOUT_S:g}, not {timeout_s}")
        _check_key(prefix, "prefix")
        self._driver = driver
        self._prefix = f"{prefix}/"
        self._timeout_s = timeout_s
        self._now_ns = now_ns
        self._pause = pause
        self._lock = threads.Lock()
        self._leases = LeaseMonitor()
        self._operations = 0
        self._watches: dict[str, _KeptWatch] = {}
        """Watches that no wait uses now, by key."""
        self._known = known or Generation("", 0)
        self._check_generation_at_start(known, nonce or clock.random_bytes(16).hex())

    def _check_generation_at_start(self, known: Generation | None, nonce: str) -> None:
        """Read the generation. A client that knows it from before never creates a new one."""
        deadline = self._deadline(None)
        generation = self._retry(lambda: self._driver.ensure_generation(None if known else nonce, deadline), deadline)
        if known is None and generation is None:
            raise StoreError(self._driver.name, "it does not store what is written to it")
        self._check(generation, known or generation or self._known)

    @property
    def name(self) -> str:
        """The address of the store, without credentials, and with the actual port of a store that is served here."""
        return self._driver.name

    @property
    def can_list(self) -> bool:
        return self._driver.can_list

    @property
    def has_leases(self) -> bool:
        return self._driver.has_leases

    @property
    def counts_writes(self) -> bool:
        return self._driver.counts_writes

    @property
    def has_counters(self) -> bool:
        return self._driver.has_counters

    @property
    def operations(self) -> int:
        """How many requests this client has made of the store so far; notifications of watches are none."""
        return self._operations

    @property
    def generation(self) -> Generation:
        with self._lock:
            return self._known

    def get(self, key: str, timeout_s: float | None = None) -> Entry | None:
        return self._read(key, self._deadline(timeout_s)).entry

    def get_many(self, keys: Sequence[str], timeout_s: float | None = None) -> dict[str, Entry]:
        deadline, names = self._deadline(timeout_s), {self._full(key): key for key in keys}
        if not names:
            return {}
        scanned = self._call(lambda guard: self._driver.read_many(list(names), guard, deadline), deadline)
        found = {names[full]: entry for full, entry in scanned.entries.items()}
        return {key: entry for key, entry in found.items() if not self._has_expired(key, entry, deadline)}

    def set(self, key: str, value: bytes, timeout_s: float | None = None, *, lasting: bool = True) -> Entry:
        write = Write(self._full(key), _checked(value), lasting=lasting)
        written = self._write(write, self._deadline(timeout_s))
        assert written.was_applied, "an unconditional write was refused"
        assert written.entry is not None, "a value was written, and the key is absent"
        return written.entry

    def compare_and_set(
        self, key: str, expected: Entry | None, value: bytes, timeout_s: float | None = None, *, lasting: bool = True
    ) -> Won | Lost:
        write = Write(self._full(key), _checked(value), expected, lasting=lasting)
        written = self._write(write, self._deadline(timeout_s))
        if not written.was_applied:
            return Lost(written.entry)
        assert written.entry is not None, "a value was written, and the key is absent"
        return Won(written.entry)

    def add(self, key: str, delta: int = 1, timeout_s: float | None = None) -> int:
        deadline, full = self._deadline(timeout_s), self._full(key)
        added = self._call(lambda guard: self._driver.add(full, delta, guard, deadline), deadline)
        if added.total is None:
            raise UsageError(f"the value of {key!r} in the store is not a number, so nothing can be added to it")
        return added.total

    def increment(self, key: str, by: int = 1, timeout_s: float | None = None) -> int:
        if not self.has_counters:
            raise UsageError(f"the store {self._driver.name} has no atomic counters; use add")
        deadline, full = self._deadline(timeout_s), self._full(key)
        added = self._call(lambda guard: self._driver.increment(full, by, guard, deadline), deadline)
        assert added.total is not None, "a counter is not a number"
        return added.total

    def delete(self, key: str, expected: Entry | None = None, timeout_s: float | None = None) -> bool:
        condition = ANY if expected is None else expected
        written = self._write(Write(self._full(key), None, condition), self._deadline(timeout_s))
        return written.was_applied and written.existed

    def list(self, prefix: str = "", timeout_s: float | None = None) -> dict[str, Entry]:
        if not self.can_list:
            raise UsageError(f"the store {self._driver.name} cannot list its keys; maintain a list in a key instead")
        deadline, start = self._deadline(timeout_s), self._prefix + prefix
        scanned = self._call(lambda guard: self._driver.scan(start, guard, deadline), deadline)
        skip = len(self._prefix)
        found = {full[skip:]: entry for full, entry in sorted(scanned.entries.items())}
        # Names that begin with `!` are internal to a driver.
        return {
            key: entry
            for key, entry in found.items()
            if not key.startswith("!") and not self._has_expired(key, entry, deadline)
        }

    def wait(self, key: str, seen: int, timeout_s: float | None = None) -> Entry | None:
        deadline = self._deadline(timeout_s)
        kept = self._take_watch(key)
        if kept is None:
            read = self._read_for_wait(key, deadline)
            if version_of(read.entry) != seen or deadline.is_over():
                return read.entry
            # A change before the watch was set up does not notify it: read again first.
            watch = self._watch_key(key, deadline)
            kept = _KeptWatch(watch, os.getpid(), None)
        try:
            # What was read last under this watch is still there, unless the watch has been notified since.
            if kept.read is None or version_of(kept.read.entry) != seen:
                kept.read = self._read_for_wait(key, deadline)
            while version_of(kept.read.entry) == seen and not deadline.is_over():
                try:
                    kept.watch.wait(kept.read, min(deadline.left_s(), observe_interval_s(kept.read.entry)))
                except StoreUnreachable:
                    kept.watch.close()
                    kept.watch = self._watch_key(key, deadline)
                kept.read = self._read_for_wait(key, deadline)
        except BaseException:
            kept.watch.close()
            raise
        self._keep_watch(key, kept)
        return kept.read.entry

    def _take_watch(self, key: str) -> "_KeptWatch | None":
        with self._lock:
            kept = self._watches.pop(key, None)
        # After a fork it belongs to the parent.
        return kept if kept is not None and kept.pid == os.getpid() else None

    def _keep_watch(self, key: str, kept: "_KeptWatch") -> None:
        """Keep the watch for the next wait for the same key: to make one costs more than to wait."""
        with self._lock:
            extra = self._watches.pop(key, None)
            if extra is None and len(self._watches) >= _MAX_WATCHES:
                extra = self._watches.pop(next(iter(self._watches)))
            self._watches[key] = kept
        if extra is not None:
            extra.watch.close()

    def _read_for_wait(self, key: str, deadline: Deadline) -> Read:
        """Read for a wait. A read takes some time, so the last one has a minimum timeout of its own."""
        return self._read(key, self._graced(deadline))

    def _watch_key(self, key: str, deadline: Deadline) -> KeyWatch:
        graced = self._graced(deadline)
        self._operations += 1
        return self._retry(lambda: self._driver.watch(self._full(key), graced), graced)

    def _graced(self, deadline: Deadline) -> Deadline:
        return Deadline(self._now_ns, max(deadline.left_s(), _MIN_LAST_READ_S))

    def lease(self, key: str, value: bytes, ttl_s: float, timeout_s: float | None = None) -> "HeldLease | None":
        if ttl_s <= 0:
            raise UsageError(f"ttl_s must be positive, not {ttl_s}")
        deadline = self._deadline(timeout_s)
        ttl_ms = max(1, round(ttl_s * 1_000))
        # Only a read can tell whether the lease of the present holder has expired.
        if not self.has_leases and self._read(key, deadline).entry is not None:
            return None
        sent_ns = self._now_ns()
        written = self._write(Write(self._full(key), _checked(value), None, ttl_ms), deadline)
        if not written.was_applied:
            return None
        assert written.entry is not None, "a value was written, and the key is absent"
        return HeldLease(self, key, written.entry, ttl_ms, sent_ns)

    def close(self) -> None:
        with self._lock:
            kept, self._watches = list(self._watches.values()), {}
        for each in kept:
            if each.pid == os.getpid():
                each.watch.close()
        self._driver.close()

    def __enter__(self) -> "StoreClient":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _renew(self, key: str, entry: Entry, timeout_s: float | None) -> Entry | None:
        """The entry of the renewed lease; None if the lease is lost."""
        deadline, full = self._deadline(timeout_s), self._full(key)
        if self.has_leases:
            written = self._call(lambda guard: self._driver.renew(full, entry, guard, deadline), deadline)
        else:
            # Not lasting: a flush is slow, and a process that is suspended in one would hold the lock.
            written = self._write(Write(full, entry.value, entry, entry.ttl_ms, lasting=False), deadline)
        return written.entry if written.was_applied else None

    def _release(self, key: str, entry: Entry, timeout_s: float | None) -> None:
        self._write(Write(self._full(key), None, entry), self._deadline(timeout_s))

    # Common parts

    def _deadline(self, timeout_s: float | None) -> Deadline:
        return Deadline(self._now_ns, self._timeout_s if timeout_s is None else max(0.0, timeout_s))

    def _full(self, key: str) -> str:
        _check_key(key, "key")
        return self._prefix + key

    def _read(self, key: str, deadline: Deadline) -> Read:
        full = self._full(key)
        read = self._call(lambda guard: self._driver.read(full, guard, deadline), deadline)
        return Read(None, read.generation) if self._has_expired(key, read.entry, deadline) else read

    def _write(self, write: Write, deadline: Deadline) -> Written:
        return self._call(lambda guard: self._driver.write(write, guard, deadline), deadline)

    def _has_expired(self, key: str, entry: Entry | None, deadline: Deadline) -> bool:
        """Whether this entry is an expired lease; then it is removed, unless it is renewed at the same time."""
        if self.has_leases:
            return False
        with self._lock:
            if not self._leases.observe(self._now_ns(), key, entry):
                return False
        assert entry is not None, "an absent key has no lease"
        try:
            written = self._write(Write(self._full(key), None, entry), deadline)
        except StoreUnknown:
            return False
        return written.was_applied

    def _call(self, call: Callable[[Generation], Response], deadline: Deadline) -> Response:
        guard = self.generation
        self._operations += 1
        response = self._retry(lambda: call(guard), deadline)
        self._check(response.generation, guard)
        return response

    def _retry(self, call: Callable[[], Value], deadline: Deadline) -> Value:
        """Retry as long as nothing was changed, until the deadline."""
        wait_s = _FIRST_PAUSE_S
        while True:
            try:
                return call()
            except StoreUnreachable:
                if deadline.left_s() <= wait_s:
                    raise
            self._pause(wait_s)
            wait_s = min(2 * wait_s, _MAX_PAUSE_S)

    def _check(self, generation: Generation | None, guard: Generation) -> None:
        """Refuse a response of another store than the known one; remember its revision."""
        name = self._driver.name
        if generation is None:
            raise StoreReset(name, f"it was emptied: its generation {guard.id[:8]} is gone")
        if generation.id != guard.id:
            raise StoreReset(name, f"it is generation {generation.id[:8]}, and this client knows {guard.id[:8]}")
        if generation.revision < guard.revision:
            raise StoreWentBack(name, f"it is at revision {generation.revision}, and was at {guard.revision} before")
        with self._lock:
            if generation.revision >= self._known.revision:
                self._known = generation


class HeldLease:
    """The `Lease` of a StoreClient."""

    def __init__(self, store: StoreClient, key: str, entry: Entry, ttl_ms: int, sent_ns: int) -> None:
        self._store, self._entry, self._ttl_ms = store, entry, ttl_ms
        self._sent_ns: int | None = sent_ns
        self._lock = threads.Lock()
        self.key, self.fence = key, entry.version

    @property
    def ttl_s(self) -> float:
        return self._ttl_ms / 1_000

    def left_s(self) -> float:
        sent_ns = self._sent_ns  # another thread may renew or release it
        if sent_ns is None:
            return 0.0
        return max(0.0, (sent_ns - self._store._now_ns()) / NS + self.ttl_s)

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
                entry = self._resolve_unknown(error)
            if entry is None:
                self._sent_ns = None
                raise LeaseLost(self._store._driver.name, f"the lease of {self.key!r} is no longer held")
            self._entry, self._sent_ns = entry, sent_ns

    def _resolve_unknown(self, error: StoreUnknown) -> Entry | None:
        """Whether a renewal without a response was made: only the holder writes this key with this value."""
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
    if not key or key.startswith("!") or "\0" in key or len(key.encode()) > MAX_KEY_BYTES:
        raise UsageError(
            f"a {what} of the store has 1 to {MAX_KEY_BYTES} bytes, no NUL, and no '!' in front; got {key[:80]!r}"
        )


def _checked(value: bytes) -> bytes:
    if not isinstance(value, bytes):
        raise UsageError(f"a value in the store is bytes, not {type(value).__name__}")
    if len(value) > MAX_VALUE_BYTES:
        raise UsageError(f"a value in the store has at most {MAX_VALUE_BYTES} bytes, not {len(value)}")
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
    """Open the store at `url` for one namespace, `prefix`, and check that it responds.

        sqlite:///var/lib/run.db          an absolute path has three slashes; sqlite:run.db is relative
        tcp://host:29500                  torch's TCPStore; with serve=True this process runs it
        etcd://host:2379                  several members: etcd://a:2379,b:2379; with TLS: etcds://
        redis://host:6379                 with TLS: rediss://

    Options may also follow a question mark: `etcd://host:2379?prefix=run-7&timeout_s=2`. `timeout_s` (5) is the default
    timeout of a call. With `known`, a store of another generation or with a lower revision is refused; save
    `store.generation` for this. `serve` (tcp) runs the store inside this process; `allow_network` (sqlite) accepts a
    file on a network disk.
    """
    try:
        split = urlsplit(url)
    except ValueError as error:
        raise ConfigError(f"{_hidden(url)!r} is not the address of a store: {error}") from None
    if split.scheme not in SCHEMES:
        raise ConfigError(f"a store's address begins with one of {', '.join(SCHEMES)}; got {_hidden(url)!r}")
    options = dict(parse_qsl(split.query))
    unknown = options.keys() - {"prefix", "timeout_s", "serve", "allow_network"}
    if unknown:
        raise ConfigError(f"{_hidden(url)!r}: a store has no option {', '.join(sorted(unknown))}")
    bare = url.partition("?")[0]
    namespace = prefix or options.get("prefix", "ringfold")
    driver = _driver(
        split.scheme,
        bare,
        namespace,
        serve=_switch(url, options, "serve") if serve is None else serve,
        allow_network=_switch(url, options, "allow_network") if allow_network is None else allow_network,
    )
    try:
        return StoreClient(
            driver,
            prefix=namespace,
            timeout_s=_seconds(url, options) if timeout_s is None else timeout_s,
            known=known,
        )
    except BaseException:
        driver.close()
        raise


def _driver(scheme: str, url: str, namespace: str, *, serve: bool, allow_network: bool) -> Driver:
    """The backend for an address; its dependencies are imported here."""
    if scheme == "sqlite":
        from ringfold.store.sqlite import SqliteDriver

        path = url.removeprefix("sqlite:").removeprefix("//")
        if not path or "\0" in path:
            raise ConfigError(f"{url!r} has no file name; write sqlite:///absolute/path.db or sqlite:relative.db")
        return SqliteDriver(path, allow_network=allow_network)
    if scheme in ("redis", "rediss"):
        from ringfold.store.redis import RedisDriver

        return RedisDriver(url, namespace)
    if scheme in ("etcd", "etcds"):
        from ringfold.store.etcd import EtcdDriver

        return EtcdDriver(url, namespace)
    from ringfold.store.tcp import TcpDriver

    return TcpDriver(url, namespace, serve=serve)


def _switch(url: str, options: dict[str, str], name: str) -> bool:
    text = options.get(name, "0").lower()
    if text not in _TRUE:
        raise ConfigError(f"{_hidden(url)!r}: {name} is true or false, not {text!r}")
    return _TRUE[text]


def _seconds(url: str, options: dict[str, str]) -> float:
    text = options.get("timeout_s", "5")
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= MAX_TIMEOUT_S:
        raise ConfigError(f"{_hidden(url)!r}: timeout_s is a positive number of seconds, not {text!r}")
    return seconds


def _hidden(url: str) -> str:
    """An address without credentials."""
    head, at, tail = url.rpartition("@")
    return f"{head.partition('://')[0]}://...@{tail}" if at else url
