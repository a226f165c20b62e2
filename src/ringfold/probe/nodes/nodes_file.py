"""The nodes and their probe graph when there is no master: the nodes file, which is the same on every node.

    token_file = "probe.token"     # needed beyond loopback
    neighbours = 4
    listeners = ["gateway"]

    [nodes]
    alpha = "10.0.0.1:48149"
    beta = "10.0.0.2:48149"
    gateway = "10.0.0.3"

Every node draws the same graph from it: ids follow the alphabetical order of the names, and the seed is in the file.
Pure, except for reading the file.
"""

import hashlib
import tomllib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from ringfold.config import DATA_PORT, check_exposure, read_token, split_address
from ringfold.errors import ConfigError
from ringfold.wire.probing import KEY_BYTES, Neighbour, NodeId

_KEYS = {"token_file", "insecure", "neighbours", "seed", "listeners", "nodes"}


@dataclass(frozen=True, slots=True)
class Nodes:
    """All nodes, by id. `key` authenticates packets."""

    by_id: Mapping[NodeId, Neighbour]
    listeners: frozenset[NodeId]
    neighbours: int
    seed: int
    key: bytes

    def named(self, name: str) -> Neighbour:
        for node in self.by_id.values():
            if node.name == name:
                return node
        known = ", ".join(node.name for node in self.by_id.values())
        raise ConfigError(f"there is no node {name!r}; the nodes are {known}")


def make_nodes(
    addresses: Mapping[str, str],
    token: bytes = b"",
    *,
    listeners: Collection[str] = (),
    neighbours: int = 4,
    seed: int = 0,
    insecure: bool = False,
) -> Nodes:
    """The nodes with these names at these addresses (`host:port`, or a host alone for the usual data port)."""
    if len(addresses) < 2:
        raise ConfigError(f"probing needs two nodes or more, not {len(addresses)}")
    if neighbours < 1:
        raise ConfigError(f"neighbours must be at least 1, not {neighbours}")
    by_id = {}
    for node, name in enumerate(sorted(addresses), 1):
        if not name or not name.isprintable():
            raise ConfigError(f"{name!r} is not a valid name of a node")
        host, port = split_address(addresses[name], DATA_PORT)
        check_exposure(host, token, insecure=insecure)
        by_id[node] = Neighbour(node, name, host, port)
    unknown = sorted(set(listeners) - set(addresses))
    if unknown:
        raise ConfigError(f"the listeners {', '.join(unknown)} are not among the nodes")
    if len(set(listeners)) == len(addresses):
        raise ConfigError("all nodes only listen: none would probe")
    ids = frozenset(node for node, facts in by_id.items() if facts.name in listeners)
    return Nodes(by_id, ids, neighbours, seed, derive_key(token))


def derive_key(token: bytes, salt: bytes = b"") -> bytes:
    """The key that authenticates packets, derived from the token."""
    return hashlib.blake2b(
        salt, digest_size=KEY_BYTES, key=hashlib.blake2b(token).digest(), person=b"rf probe"
    ).digest()


def read_nodes(path: Path) -> Nodes:
    """The nodes of a nodes file. Every mistake in it is a ConfigError that says where."""
    try:
        tree = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"cannot read the nodes file {path}: {error}") from None
    unknown = sorted(set(tree) - _KEYS)
    if unknown:
        raise ConfigError(f"{path}: unknown {', '.join(unknown)}; known are {', '.join(sorted(_KEYS))}")
    nodes, listeners = tree.get("nodes"), tree.get("listeners", [])
    if not isinstance(nodes, dict) or not all(isinstance(address, str) for address in nodes.values()):
        raise ConfigError(f'{path}: [nodes] must name each node\'s address, as in alpha = "10.0.0.1:48149"')
    if not isinstance(listeners, list) or not all(isinstance(name, str) for name in listeners):
        raise ConfigError(f"{path}: listeners must be a list of names")
    numbers = {name: tree.get(name, default) for name, default in (("neighbours", 4), ("seed", 0))}
    for name, number in numbers.items():
        if not isinstance(number, int) or isinstance(number, bool):
            raise ConfigError(f"{path}: {name} must be a whole number, not {number!r}")
    token_file = tree.get("token_file")
    if token_file is not None and not isinstance(token_file, str):
        raise ConfigError(f"{path}: token_file must be a path, not {token_file!r}")
    token = b"" if token_file is None else read_token(path.absolute().parent / Path(token_file).expanduser())
    insecure = tree.get("insecure", False)
    if not isinstance(insecure, bool):
        raise ConfigError(f"{path}: insecure must be true or false, not {insecure!r}")
    try:
        return make_nodes(
            cast(dict[str, str], nodes),
            token,
            listeners=listeners,
            neighbours=numbers["neighbours"],
            seed=numbers["seed"],
            insecure=insecure,
        )
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
