"""docs/guides/messages.md shows messages as they are printed."""

import re
from pathlib import Path

import pytest
from msgspec import structs

from ringfold.config import check_exposure, check_run_name
from ringfold.errors import ConfigError, Evicted, MasterUnreachable, RemoteProtocolError
from ringfold.master.disputes import Caller, find_conflicting_calls
from ringfold.master.lifecycle import Life, finished_text
from ringfold.master.requests import authenticate, eviction_reasons
from ringfold.master.stalls import AbsentMember, Stall, WaitKey, eviction_texts
from ringfold.peer.machine import join_too_late
from ringfold.peer.outcome import error_of
from ringfold.state.election import FinishedSync, NoWinner, elect
from ringfold.wire.diagnostics import (
    explain_connect_error,
    explain_no_challenge,
    explain_not_a_master,
    with_names,
    with_you,
)
from ringfold.wire.messages import (
    PROTOCOL_VERSION,
    AdmissionWaits,
    EvictRequest,
    Lineage,
    Offer,
    OpRef,
    Reason,
    Rollback,
    StatusRequest,
)
from ringfold.wire.notices import AdmissionDelayed, MasterAway, PeersStalled, ResumeDelayed, RunBegun, StateRolledBack
from ringfold.wire.proof import NONCE_BYTES, prove

GUIDE = re.sub(r"\s+", " ", (Path(__file__).parents[2] / "docs/guides/messages.md").read_text())
NAMES = {1: "gpu-1", 2: "gpu-2"}
NONCE = b"n" * NONCE_BYTES


def shown(text: str) -> bool:
    return re.sub(r"\s+", " ", text) in GUIDE


def test_the_guide_shows_the_messages_about_a_master_that_is_not_there() -> None:
    address, why = "10.0.0.1:48148", explain_connect_error("Connection refused")
    assert shown(str(MasterAway({address: why}, 60_000, "join_timeout_s")))
    assert shown(f"MasterUnreachable: {MasterUnreachable(address, f'{why} (given up after 60.0 s, join_timeout_s)')}")


@pytest.mark.parametrize(
    "reason",
    [
        explain_connect_error("no answer to the connection attempt").partition(":")[0],
        explain_connect_error("No route to host").partition(":")[0],
        explain_not_a_master("a frame of 759714643 bytes (limit 16384)"),
        explain_no_challenge(5_000).partition(":")[0],
    ],
)
def test_the_guide_shows_why_a_master_is_not_reached(reason: str) -> None:
    assert shown(reason)


@pytest.mark.parametrize(("has", "given"), [(b"secret", b""), (b"secret", b"wrong"), (b"", b"secret")])
def test_the_guide_shows_the_messages_about_tokens(has: bytes, given: bytes) -> None:
    claim = StatusRequest(PROTOCOL_VERSION, NONCE, prove(given, "status", NONCE, NONCE))
    with pytest.raises(RemoteProtocolError) as refusal:
        authenticate(claim, has, "status", NONCE)
    assert shown(f"refused this peer: {refusal.value}")


def test_the_guide_shows_the_messages_about_runs() -> None:
    assert shown(f"refused this peer: {finished_text('nightly-7', Life('finished', revision=5000))}")
    assert shown(str(RunBegun("default", 2, 40)))
    with pytest.raises(ConfigError) as refusal:
        check_run_name("night run")
    assert shown(f"ConfigError: {refusal.value}")


def test_the_guide_shows_how_to_make_a_token() -> None:
    with pytest.raises(ConfigError) as refusal:
        check_exposure("0.0.0.0", b"", insecure=False)
    assert shown(f"error: {refusal.value}")


def test_the_guide_shows_what_an_admission_waits_for() -> None:
    text = "these have not called update_topology: peer 1 (gpu-1) has been in its own code for 12.5 s; peer 2 (gpu-2) "
    assert shown(str(AdmissionDelayed(10_000, f"{text}is in op tag 0 sequence 17", None)))
    assert str(AdmissionDelayed(10_000, text, 42_000)).endswith("Waiting for another 42 s (join_timeout_s)")
    assert shown("Waiting for another 42 s (join_timeout_s)")
    text = "these have not called update_topology: peer 1 (gpu-1) has been in its own code for 61.2 s"
    assert shown(f"DeadlineExceeded: {join_too_late('peer 3 (gpu-3, you)', 60_000, 60_000, AdmissionWaits(text))}")


def test_the_guide_shows_the_errors_of_calls() -> None:
    clash = find_conflicting_calls(600, [Caller(1, 0, "update", 0, {}), Caller(2, 0, "sync", 0, {})], 500)
    assert clash is not None
    assert shown(f"CallMismatch: {with_you(with_names(clash.sides, NAMES), 2)}: these calls can never meet")
    late = Reason("deadline", "op tag 0 sequence 0 waited 300.0 s for peer 1 (gpu-1)", [1], 300_000)
    assert shown(f"DeadlineExceeded: {error_of(late, 'all_reduce', 5, 2)}")
    lost = Reason("lost", "peer 1 (gpu-1) was lost: its connection closed", [1])
    assert shown(f"PeerLost: {error_of(lost, 'all_reduce', 5, 2)}")
    assert shown(f"Evicted: {Evicted('silent for 5017 ms (evict_after_ms 5000)', 'peer 3 (gpu-7, you)')}")


def test_the_guide_shows_the_messages_about_peers_that_hang() -> None:
    who, names = "peer 3 (gpu-7, you)", {1: "gpu-1", 2: "gpu-2", 3: "gpu-7", 4: "gpu-8"}
    op, absent = WaitKey("op", 0, OpRef(0, 17)), [AbsentMember(3)]
    waiting = Stall(op, "op tag 0 sequence 17", dict.fromkeys((1, 2, 4), 0), absent, {0: 4})
    limit = "stall_timeout_s 60.0 s, by what it usually takes"
    chosen, deadline = "stall_timeout_s 60.0 s", "op_timeout_s 300.0 s"
    assert shown(f"Evicted: {Evicted(with_names(eviction_texts(waiting, 60_100, limit)[1], names), who)}")
    silent = structs.replace(waiting, is_silent=True)
    assert shown(f"Evicted: {Evicted(with_names(eviction_texts(silent, 60_100, chosen)[1], names), who)}")
    sync = structs.replace(waiting, key=WaitKey("sync", 0), what="sync 9")
    assert shown(f"Evicted: {Evicted(with_names(eviction_texts(sync, 60_100, chosen)[1], names), who)}")
    vote = Stall(WaitKey("call", -1), "update_topology", {1: 0}, absent, {0: 2})
    assert shown(f"Evicted: {Evicted(with_names(eviction_texts(vote, 300_000, deadline)[1], names), who)}")
    assert shown(str(PeersStalled(0, [3], ["gpu-7"], [1, 2, 4], "op tag 0 sequence 17", 60_100, limit)))


def test_the_guide_shows_evictions_on_request() -> None:
    request = EvictRequest(PROTOCOL_VERSION, "3", "its disk is broken", "ada on gpu-1", NONCE, b"")
    assert shown(f"Evicted: {Evicted(eviction_reasons(request)[1], 'peer 3 (gpu-7, you)')}")


def test_a_reason_that_another_machine_wrote_does_no_harm() -> None:
    assert explain_connect_error("not an address: {x}") == "not an address: {x}"
    assert "no Ringfold master" in explain_not_a_master(f"a frame of {'9' * 10_000} bytes")


def test_the_guide_shows_the_messages_after_all_peers_were_killed() -> None:
    assert shown(str(ResumeDelayed(0, 534, ["gpu-2"], 60_000)))
    assert shown(str(StateRolledBack(0, Rollback(400, 534, 2))))


def test_the_guide_shows_what_to_do_when_the_state_is_lost() -> None:
    offer = Offer(0, "enforce-popular", "rf64", [])
    decision = elect({1: offer}, FinishedSync(534, frozenset({9}), b"gone"), Lineage("run", "lineage"))
    assert isinstance(decision, NoWinner)
    reason = decision.reasons[1]
    named = structs.replace(reason, text=with_names(reason.text, NAMES))
    assert shown(f"StateLost: {error_of(named, 'sync_shared_state', 5, 1)}")
