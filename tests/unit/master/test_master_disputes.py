"""Whose call is wrong: the rule by itself, and how long a peer that was wrong is refused."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs
from test_master import NONCE, TOKEN, MasterHarness, hello

from ringfold.master.disputes import FIRST_PAUSE_S, FORGOTTEN_AFTER_S, MAX_PAUSE_S, Bans, judge
from ringfold.units import S
from ringfold.wire import messages as m
from ringfold.wire.descriptor import Descriptor
from ringfold.wire.proof import prove

A, B, C = 1, 2, 3
"""What may be called."""


@pytest.mark.parametrize(
    ("calls", "members", "incumbents", "wrong"),
    [
        ({1: A, 2: A, 3: A, 4: B}, [1, 2, 3, 4], [], [4]),
        ({1: A, 4: B}, [1, 2, 3, 4], [], None),  # two have not called
        ({1: A, 2: A, 4: B}, [1, 2, 3, 4], [], None),  # two of four are no majority
        ({1: A, 2: A, 3: A, 4: B}, [1, 2, 3, 4, 5], [], [4]),  # three of five are
        ({1: A, 2: B}, [1, 2], [], [2]),  # a tie: the longest member is right
        ({1: B, 2: A}, [1, 2], [], [2]),
        ({1: A, 2: A, 3: B, 4: B, 5: B}, [1, 2, 3, 4, 5], [1, 2], [3, 4, 5]),  # newcomers do not count
        ({1: A, 3: B, 4: B, 5: B}, [1, 2, 3, 4, 5], [1, 2], None),  # until the incumbents have called
        ({3: B, 4: A}, [1, 2, 3, 4], [1, 2], None),
        ({1: A, 2: B, 3: B}, [1, 2, 3], [1, 2], [1]),  # a tie among incumbents: the most of all are right
        ({1: A, 2: B, 3: B}, [1, 2, 3, 4], [1, 2], None),  # two of four are not
        ({1: A, 2: B, 3: B, 4: A}, [1, 2, 3, 4], [1, 2], [2, 3]),  # a tie of all, too: the longest member is right
        ({1: A, 2: B, 3: C}, [1, 2, 3], [], [2, 3]),
        ({1: A, 2: A, 3: A}, [1, 2, 3], [], None),  # no member disagrees any more
        ({3: A, 4: B, 5: B}, [3, 4, 5], [1, 2], [3]),  # the incumbents are gone: all members decide
    ],
)
def test_the_wrong_side(
    calls: dict[int, int], members: list[int], incumbents: list[int], wrong: list[int] | None
) -> None:
    ruling = judge(calls, members, incumbents)
    assert (None if ruling is None else ruling.wrong) == wrong


@given(
    st.dictionaries(st.integers(1, 7), st.sampled_from([A, B, C]), max_size=7),
    st.sets(st.integers(1, 7)),
)
def test_incumbents_are_never_outvoted(calls: dict[int, int], incumbents: set[int]) -> None:
    members = set(range(1, 8))
    ruling = judge(calls, members, incumbents)
    if ruling is None:
        assert len(set(calls.values())) < 2 or not members <= calls.keys()
        return
    deciders = incumbents & members or members
    sides = [sum(calls.get(peer) == call for peer in deciders) for call in (A, B, C)]
    assert sides[(A, B, C).index(ruling.right)] == max(sides)
    assert ruling.wrong == sorted(peer for peer, call in calls.items() if call != ruling.right)


def test_pauses_grow_and_are_forgotten() -> None:
    bans, now = Bans(), 0
    pauses = []
    for _ in range(9):
        pauses.append(bans.add(now, "gpu-7", "host"))
        assert f"join in {pauses[-1]} s" in str(bans.refusal(now, "gpu-7", "host"))
        assert bans.refusal(now, "gpu-8", "host") is None
        now += pauses[-1] * S
        assert bans.refusal(now - 1, "gpu-7", "host") is not None
        assert bans.refusal(now, "gpu-7", "host") is None
    assert pauses == [5, 10, 20, 40, 80, 160, 320, 320, 320]
    assert (pauses[0], pauses[-1]) == (FIRST_PAUSE_S, MAX_PAUSE_S)
    now += FORGOTTEN_AFTER_S * S
    assert bans.add(now, "gpu-7", "host") == FIRST_PAUSE_S


def test_a_peer_that_was_evicted_for_its_call_is_refused_for_a_while_and_then_let_in() -> None:
    harness, op = MasterHarness(), m.OpRef(0, 0)
    harness.ring(2)
    calls = Descriptor(0, 10, arrays=1).pack(), Descriptor(0, 10, arrays=2).pack()
    harness.receive(1, m.OpMismatch(2, op, 2, calls[0], calls[1]))
    assert not harness.closed()  # its neighbour has not reported it itself
    [evicted] = harness.receive(2, m.OpMismatch(2, op, 1, calls[1], calls[0]))
    assert isinstance(evicted, m.Evicted)
    assert evicted.for_call
    harness.receive(1, m.Sealed(2, []))
    harness.receive(1, m.Attached(3))
    harness.open(12)
    again = structs.replace(hello(12), name=hello(2).name, host=hello(2).host)
    [refused] = harness.receive(12, again)
    assert isinstance(refused, m.Refused)
    assert "evicted a moment ago for a call that the others did not make" in refused.reason
    harness.wait(FIRST_PAUSE_S * 1_000)
    harness.open(13)
    proof = prove(TOKEN, "hello", bytes([13]) * 32, NONCE)
    [welcome, *_] = harness.receive(13, structs.replace(again, proof=proof))
    assert isinstance(welcome, m.Welcome)


def test_an_invalid_mismatch_evicts_its_sender() -> None:
    harness = MasterHarness()
    harness.ring(2)
    same = Descriptor(0).pack()
    [evicted] = harness.receive(2, m.OpMismatch(2, m.OpRef(0, 0), 1, same, same))
    assert isinstance(evicted, m.Evicted)
    assert not evicted.for_call


def test_more_mismatches_than_possible_evict_their_sender() -> None:
    harness = MasterHarness()
    harness.ring(3)
    for other in range(9):
        mine, theirs = Descriptor(0).pack(), Descriptor(0, elements=other + 1).pack()
        replies = harness.receive(2, m.OpMismatch(2, m.OpRef(0, 0), 1, mine, theirs))
        if replies:
            break
    assert [type(each) for each in replies] == [m.Evicted]


def test_a_dispute_of_which_one_side_is_known_reads_well() -> None:
    harness = MasterHarness()
    harness.ring(3)
    harness.receive(2, m.OpMismatch(2, m.OpRef(0, 0), 1, Descriptor(0).pack(), Descriptor(4).pack()))
    [waiting] = [each for each in harness.master.waiting(harness.now) if "different calls" in each.what]
    mine, theirs = "all_reduce(op=sum, retry=False) as call 1", "barrier(retry=False) as call 1"
    assert waiting.what.endswith(f"peer 2 called {mine}, but another peer called {theirs}")
