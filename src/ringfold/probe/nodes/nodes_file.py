"""The nodes and their probe graph when there is no master: the nodes file, which is the same on every node.

    token_file = "probe.token"     # needed beyond loopback
    neighbours = 4
    listeners = ["gateway"]

    root = "alpha"                 # who calculates, where nodes calculate together; the first by name if left out

    [nodes]
    alpha = "10.0.0.1:48149"
    beta = "10.0.0.2:48149"
    gateway = "10.0.0.3"

    [graph]                        # instead of a drawn graph: whom each node probes
    alpha = ["beta", "gateway"]
    beta = ["alpha"]

Every node draws the same graph from it: ids follow the alphabetical order of the names, and the seed is in the file.
Pure, except for reading the file.
"""

import hashlib
import tomllib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

from ringfold.config import DATA_PORT, check_exposure, read_token, split_address
from ringfold.errors import ConfigError
from ringfold.probe.graph.draw import Edge, draw, listed_edges
from ringfold.wire.probing import KEY_BYTES, Neighbour, NodeId

_KEYS = {"token_file", "insecure", "neighbours", "seed", "listeners", "root", "nodes", "graph"}

Graph = Mapping[str, tuple[str, ...]]
"""Neighbour lists: for each node that probes, by name, the nodes that it probes."""


@dataclass(frozen=True, slots=True)
class Nodes:
    """All nodes, by id. `key` authenticates packets."""

    by_id: Mapping[NodeId, Neighbour]
    listeners: frozenset[NodeId]
    neighbours: int
    seed: int
    key: bytes
    root: NodeId = 1
    """The node that calculates, where nodes calculate together: rank 0 of gloo rounds, or the host of the master."""
    graph: Graph = field(default_factory=dict)
    """Given neighbour lists; empty: the graph is drawn."""
    token: bytes = field(default=b"", repr=False)
    insecure: bool = False

    def edges(self) -> list[Edge]:
        """Which node probes which."""
        if self.graph:
            names = {node: facts.name for node, facts in self.by_id.items()}
            return listed_edges(names, self.listeners, self.graph)
        return draw(sorted(self.by_id), self.listeners, self.neighbours, self.seed)

    def ranks(self) -> list[NodeId]:
        """All nodes in the order of their ranks: the root first."""
        return [self.root, *(node for node in sorted(self.by_id) if node != self.root)]

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
    graph: Mapping[str, Sequence[str]] | None = None,
    root: str | None = None,
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
    lists = check_graph(graph or {}, addresses)
    if lists and not any(others and name not in listeners for name, others in lists.items()):
        raise ConfigError("the graph has no edge: none would probe")
    if root is not None and root not in addresses:
        raise ConfigError(f"the root {root!r} is not among the nodes {', '.join(sorted(addresses))}")
    chosen = 1 if root is None else sorted(addresses).index(root) + 1
    return Nodes(by_id, ids, neighbours, seed, derive_key(token), chosen, lists, token, insecure)


def check_graph(lists: Mapping[str, object], known: Collection[str] | None = None) -> Graph:
    """Neighbour lists, checked: lists of names, no node its own neighbour, and only `known` names if they are given."""
    checked = {}
    for name, others in lists.items():
        if isinstance(others, str) or not isinstance(others, Sequence) or not all(isinstance(o, str) for o in others):
            raise ConfigError(f'graph: {name} must have a list of names, as in {name} = ["beta"], not {others!r}')
        if name in others:
            raise ConfigError(f"graph: {name} is its own neighbour")
        if len(set(others)) < len(others):
            raise ConfigError(f"graph: {name} lists a neighbour twice")
        unknown = sorted({name, *others} - set(known)) if known is not None else []
        if unknown:
            raise ConfigError(f"graph: {', '.join(unknown)} is not among the nodes")
        checked[name] = tuple(others)
    return checked


def read_graph(path: Path) -> Graph:
    """The neighbour lists of a run, from the table [graph] of a TOML file. Which nodes will come is not known."""
    tree = _read(path, "the graph")
    lists = tree.get("graph")
    if not isinstance(lists, dict) or set(tree) != {"graph"}:
        raise ConfigError(f'{path}: it must have the table [graph] and nothing else, as in alpha = ["beta"]')
    try:
        graph = check_graph(lists)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    if not any(graph.values()):
        raise ConfigError(f"{path}: the graph has no edge: none would probe")
    return graph


def _read(path: Path, what: str) -> dict[str, object]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"cannot read {what} file {path}: {error}") from None


def derive_key(token: bytes, salt: bytes = b"") -> bytes:
    """The key that authenticates packets, derived from the token."""
    return hashlib.blake2b(
        salt, digest_size=KEY_BYTES, key=hashlib.blake2b(token).digest(), person=b"rf probe"
    ).digest()


def read_nodes(path: Path) -> Nodes:
    """The nodes of a nodes file. Every mistake in it is a ConfigError that says where."""
    tree = _read(path, "the nodes")
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
    graph, root = tree.get("graph", {}), tree.get("root")
    if not isinstance(graph, dict):
        raise ConfigError(f'{path}: [graph] must list each node\'s neighbours, as in alpha = ["beta"]')
    if root is not None and not isinstance(root, str):
        raise ConfigError(f"{path}: root must be a name, not {root!r}")
    insecure = tree.get("insecure", False)
    if not isinstance(insecure, bool):
        raise ConfigError(f"{path}: insecure must be true or false, not {insecure!r}")
    try:
        return make_nodes(
            cast(dict[str, str], nodes),
            token,
            listeners=listeners,
            neighbours=cast(int, numbers["neighbours"]),
            seed=cast(int, numbers["seed"]),
            insecure=insecure,
            graph=graph,
            root=root,
        )
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
