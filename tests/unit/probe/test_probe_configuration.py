"""Neighbour lists, the seed, the density, the spacing inside a pair, and what a summary records of a graph."""

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_rounds import Room, published, sent

from ringfold.config import load
from ringfold.errors import ConfigError
from ringfold.master.settings import master_settings
from ringfold.probe.graph.draw import listed_edges
from ringfold.probe.nodes.nodes_file import make_nodes, read_graph, read_nodes
from ringfold.probe.rounds.calculation import advise, advised
from ringfold.probe.rounds.settings import Adaptive, RoundSettings
from ringfold.wire.probing import Cadence, ProbeGraph

ADDRESSES = {name: f"127.0.0.1:{port}" for port, name in enumerate(("a", "b", "c"), 1)}
NAMES = st.sampled_from("abcdef")


def rounds_of(**given_settings: object) -> RoundSettings:
    return master_settings(load(given_settings, environment={}, directory=Path("/"), home=Path("/"))).rounds


# Neighbour lists


@given(st.dictionaries(st.integers(1, 9), NAMES), st.sets(st.integers(1, 9)), st.dictionaries(NAMES, st.lists(NAMES)))
def test_edges_are_those_of_the_lists_between_nodes_that_are_there(
    names: dict[int, str], listeners: set[int], lists: dict[str, list[str]]
) -> None:
    edges = listed_edges(names, listeners, lists)
    assert edges == sorted(set(edges))
    wanted = {
        (src, dst)
        for src in names
        for dst in names
        if src != dst and src not in listeners and names[dst] in lists.get(names[src], ())
    }
    assert set(edges) == wanted


def test_a_master_with_neighbour_lists_draws_nothing() -> None:
    room = Room(nodes=3, graph={"node1": ("node2", "node9"), "node2": ("node1",)})
    graphs = sent(room.wait(room.master.settings.settle_ms), ProbeGraph)
    out = {node: [each.node for each in graph.out] for node, graph in graphs.items() if isinstance(graph, ProbeGraph)}
    assert out == {1: [2], 2: [1], 3: []}


def test_nodes_without_an_edge_between_them_begin_no_round() -> None:
    room = Room(nodes=2, graph={"node1": ("node3",)})
    assert room.wait(60_000) == []
    assert room.master.round is None
    room.come(3)
    assert room.begin().sequence == 1


def test_a_summary_records_who_took_part_and_who_listened() -> None:
    room = Room(nodes=2)
    room.come(9, listen_only=True)
    room.to_end()
    room.report(1)
    [summary] = published(room.report(2))
    assert (summary.participants, summary.listeners) == ([1, 2], [9])


def test_a_participant_that_does_not_report_is_recorded_all_the_same() -> None:
    room = Room(nodes=3, report_timeout_ms=1_000)
    room.to_end()
    room.report(1)
    room.report(2)
    [summary] = published(room.wait(1_001))
    assert summary.participants == [1, 2, 3]
    assert set(summary.missing) == {"3"}


def test_a_file_of_neighbour_lists_is_a_setting_of_the_master(tmp_path: Path) -> None:
    file = tmp_path / "graph.toml"
    file.write_text('[graph]\nalpha = ["beta", "gamma"]\nbeta = []\n')
    assert rounds_of(probe_graph=file).graph == {"alpha": ("beta", "gamma"), "beta": ()}
    assert rounds_of().graph == {}


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("x = 1", "must have the table [graph]"),
        ("[graph]\na = 'b'", "a must have a list of names"),
        ("[graph]\na = [1]", "a must have a list of names"),
        ("[graph]\na = ['a']", "a is its own neighbour"),
        ("[graph]\na = ['b', 'b']", "lists a neighbour twice"),
        ("[graph]\na = []", "none would probe"),
        ("[graph", "cannot read the graph file"),
    ],
)
def test_a_mistake_in_a_file_of_neighbour_lists_is_named(tmp_path: Path, text: str, complaint: str) -> None:
    file = tmp_path / "graph.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=re.escape(complaint)):
        read_graph(file)


def test_nodes_without_a_run_probe_by_their_lists() -> None:
    nodes = make_nodes(ADDRESSES, graph={"a": ["b"], "c": ["a", "b"]})
    assert nodes.edges() == [(1, 2), (3, 1), (3, 2)]


def test_the_root_of_a_nodes_file_has_rank_0(tmp_path: Path) -> None:
    file = tmp_path / "nodes.toml"
    nodes = "\n".join(f'{name} = "{address}"' for name, address in ADDRESSES.items())
    file.write_text(f'root = "b"\n[nodes]\n{nodes}\n[graph]\na = ["c"]\n')
    read = read_nodes(file)
    assert read.ranks() == [2, 1, 3]
    assert read.graph == {"a": ("c",)}
    assert make_nodes(ADDRESSES).ranks() == [1, 2, 3]


@pytest.mark.parametrize(
    ("given_nodes", "complaint"),
    [
        ({"graph": {"a": ["x"]}}, "graph: x is not among the nodes"),
        ({"graph": {"x": ["a"]}}, "graph: x is not among the nodes"),
        ({"graph": {"a": ["b"]}, "listeners": ["a"]}, "none would probe"),
        ({"root": "x"}, "the root 'x' is not among the nodes a, b, c"),
    ],
)
def test_nodes_that_contradict_their_lists_are_refused(given_nodes: dict[str, object], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        make_nodes(ADDRESSES, **given_nodes)  # type: ignore[arg-type]


# Seed, density, spacing


def test_the_seed_is_a_setting() -> None:
    assert (rounds_of().seed, rounds_of(probe_seed=7).seed) == (0, 7)


def test_the_dense_preset_has_800_us_between_all_probes() -> None:
    dense = rounds_of(probe_density="dense")
    assert (dense.gap_us, dense.pause_us) == (800, 800)
    assert dense.adaptive.pause_min_us == 800, "an unstable run returns to it"
    assert (rounds_of().gap_us, rounds_of().pause_us) == (800, 3_000)


def test_a_given_pause_takes_precedence_over_the_preset() -> None:
    assert rounds_of(probe_density="dense", probe_pause_us=2_000).pause_us == 2_000


def test_windows_are_combined_unless_told_otherwise() -> None:
    assert (rounds_of().combine_windows, rounds_of(probe_combine=False).combine_windows) == (True, False)


def test_the_spacing_inside_a_pair_grows_only_where_it_may() -> None:
    calm, now = [10.0] * 3, Cadence()
    assert advise(calm, now).gap_us == 0
    wider = advise(calm, now, Adaptive(gap_max_us=3_000))
    assert wider.gap_us == 1_200
    assert advised(now, wider) == Cadence(1_200, 4_500, 6_000)


def test_unstable_rounds_return_to_the_spacing_of_the_settings() -> None:
    limits, cadence = Adaptive(gap_max_us=3_000), Cadence(gap_us=3_000)
    for _ in range(8):
        cadence = advised(cadence, advise([1e6], cadence, limits, gap_us=800))
    assert cadence.gap_us == 800


@given(st.lists(st.floats(0, 1e9), max_size=6), st.integers(50, 10_000), st.integers(50, 10_000))
def test_the_spacing_stays_between_the_setting_and_its_limit(
    instability_ns: list[float], gap_us: int, gap_max_us: int
) -> None:
    cadence = Cadence(gap_us=gap_us)
    for _ in range(5):
        advice = advise(instability_ns, cadence, Adaptive(gap_max_us=gap_max_us), gap_us)
        cadence = advised(cadence, advice)
        assert gap_us <= cadence.gap_us <= max(gap_us, gap_max_us)
