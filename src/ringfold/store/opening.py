"""From an address to a store.

    sqlite:///var/lib/run.db          an absolute path has three slashes; sqlite:run.db is relative
    tcp://host:29500                  torch's TCPStore; with serve=True this process holds it
    etcd://host:2379                  several members: etcd://a:2379,b:2379; with TLS: etcds://
    redis://host:6379                 with TLS: rediss://

Options may stand behind a question mark, too: `etcd://host:2379?prefix=run-7&timeout_s=2`.
"""

from urllib.parse import parse_qsl, urlsplit

from ringfold.errors import ConfigError
from ringfold.store.base import Driver, Generation
from ringfold.store.client import StoreClient

SCHEMES = ("sqlite", "tcp", "etcd", "etcds", "redis", "rediss")
_TRUE = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}


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
