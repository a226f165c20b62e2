"""The nodes file: the same graph on every node, and a clear word about every mistake."""

from pathlib import Path

import pytest

from ringfold.errors import ConfigError
from ringfold.probe.nodes.nodes_file import derive_key, make_nodes, read_nodes


def test_ids_do_not_depend_on_the_order_of_the_file() -> None:
    there = make_nodes({"b": "127.0.0.1:2", "a": "127.0.0.1:1"})
    here = make_nodes({"a": "127.0.0.1:1", "b": "127.0.0.1:2"})
    assert there == here
    assert here.named("b").node == 2
    assert here.named("b").port == 2


def test_a_file_names_nodes_listeners_and_token(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("a secret of 16 bytes or more\n")
    (tmp_path / "token").chmod(0o600)
    file = tmp_path / "nodes.toml"
    file.write_text('token_file = "token"\nlisteners = ["c"]\nseed = 7\n[nodes]\na = "10.0.0.1"\nc = "[fd00::1]:9"\n')
    nodes = read_nodes(file)
    assert nodes.key == derive_key(b"a secret of 16 bytes or more")
    assert nodes.listeners == {2}
    assert (nodes.named("a").address, nodes.named("a").port) == ("10.0.0.1", 48149)
    assert (nodes.named("c").address, nodes.named("c").port) == ("fd00::1", 9)


def test_another_token_makes_another_key() -> None:
    assert len({derive_key(b""), derive_key(b"a"), derive_key(b"b"), derive_key(b"a", b"salt")}) == 4


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("[nodes]\na = '127.0.0.1'", "two nodes"),
        ("[nodes]\na = '127.0.0.1'\nb = '10.0.0.1'", "10.0.0.1 can be reached from other machines"),
        ("[nodes]\na = 1\nb = 2", "must name each node's address"),
        ("nodes = 3", "must name each node's address"),
        ("speed = 3", "unknown speed"),
        ("listeners = ['x']\n[nodes]\na = '127.0.0.1'\nb = '127.0.0.1:7'", "x are not among"),
        ("listeners = ['a', 'b']\n[nodes]\na = '127.0.0.1'\nb = '127.0.0.1:7'", "none would probe"),
        ("seed = 'x'\n[nodes]\na = '127.0.0.1'\nb = '127.0.0.1:7'", "seed must be a whole number"),
        ("neighbours = 0\n[nodes]\na = '127.0.0.1'\nb = '127.0.0.1:7'", "neighbours must be at least 1"),
        ("token_file = 'nowhere'\n[nodes]\na = '127.0.0.1'\nb = '127.0.0.1:7'", "cannot read the token file"),
        ("[nodes", "cannot read the nodes file"),
    ],
)
def test_a_mistake_is_named_with_its_file(tmp_path: Path, text: str, complaint: str) -> None:
    file = tmp_path / "nodes.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=complaint):
        read_nodes(file)


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="the nodes are a, b"):
        make_nodes({"a": "127.0.0.1:1", "b": "127.0.0.1:2"}).named("c")
