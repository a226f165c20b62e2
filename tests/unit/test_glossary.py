"""The glossary has the terms that the code uses, and no retired word is left in code, tests or pages."""

import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
GLOSSARY = ROOT / "docs" / "concepts" / "glossary.md"
FOLDERS = ("src/ringfold", "native", "include", "tests", "docs")
ENDINGS = {".py", ".pyi", ".md", ".cpp", ".hpp", ".h", ".c", ".inc", ".txt", ".sh", ".toml", ".service"}
KEPT_AS_WRITTEN = ("tests/fuzz/corpus", "tests/unit/written_before", "tests/unit/test_glossary.py")
"""Inputs and files that earlier versions wrote, and this list."""

# A retired word, as a regular expression that matches only where it is meant, and what to write instead.
RETIRED = {
    r"\bHall\b": "Host",
    r"\b_Ear\b": "TelemetryListener",
    r"\bTelemetryDesk\b": "TelemetryIngest",
    r"\b_?Surroundings\b": "HostMonitor",
    r"\bComplaints\b": "LogRateLimiter",
    r"\breads_not\b": "on_write_blocked",
    r"\b_be\(": "set_node_id",
    r"\b_say_what_was_said\b": "flush_probe_outbox",
    r"\b_mind_the_clock\b": "shift_deadlines",
    r"\bgive_way\b": "yield_mutex",
    r"\bgo_again\b": "requeue",
    r"\bShelf\b": "BlockServer",
    r"\bwishes\b": "fetch_effects, requests",
    r"\bWish\b": "ProbeOptions",
    r"\b_Landing\b": "PendingBlock",
    r"\b(MOST|LEAST)_[A-Z]": "MAX_, MIN_",
    r"\bErrands?\b": "SideChannels",
    r"\berrands?\b": "purpose",
    r"\bVisits\b": "BulkSessions",
    r"\b_?Guest\b": "PendingInbound",
    r"\b_Setting\b": "OutgoingDial",
    r"\b[Tt]he rim\b": "the I/O seam",
    r"\bask_aside\b": "run_in_subprocess",
    r"\baside\.py\b": "process.py",
    r"\btripped\b": "rtt_sampled_at",
    r"\bmuch_since\b": "saturated_since",
    r"\bframes_told\b": "frames_acked",
    r"\bbytes_untold\b": "bytes_unacked",
    r"\blongest_way\b": "max_yield",
    r"\bsince ever\b": "ever",
    r"\bgiven the doubt\b": "gets the benefit of the doubt",
    r"\bcast out\b": "evicted",
    r"\bby hearsay\b": "from the newest count",
    r"\bshel(?:f|ves)\b": "block server",
    r"\b[Ss]urroundings\b": "environment",
    r"\b(?:words|reports|facts)\.py\b": "named after their subject",
    r"(?<!\w)_Ear\b": "TelemetryListener",
    r"\bkeep_what_is_there\b": "freeze_garbage_collector",
    r"\bbe_prompt\b": "request_prompt_scheduling",
    r"\ballow_many_files\b": "raise_open_file_limit",
    r"\bFileBell\b": "FileWatch",
    r"\bStatusConnection\b": "MasterClient",
    r"\bClientSaid\b": "MessageReceived",
    r"\bClientGone\b": "ConnectionClosed",
    r"\bPairCame\b": "WatchPair",
    r"\bPairWent\b": "UnwatchPair",
    r"\bOnVisit\b": "BulkMessage",
    r"\bVisitHello\b": "BulkHello, BulkWelcome",
    r"\bVisitWelcome\b": "BulkHello, BulkWelcome",
    r"\bCallGoesOn\b": "CallExtended",
    r"\bSyncGoesOn\b": "SyncExtended",
    r"\bin_plain_words\b": "explain_connect_error",
    r"\bsaid_nothing\b": "explain_no_challenge",
    r"\bleast_trip\b": "min_rtt",
    r"\bpath_trips\b": "path_rtts",
    r"\bRoundTrip\b": "Rtt",
    r"\bnote_much\b": "note_saturation",
    r"\blet_go_of_memory\b": "release_memory",
    r"\bsend_again\b": "resend",
    r"\btell_ready\b": "send_ready",
    r"\btold_ready\b": "ready_sent",
    r"\btell_applied\b": "report_applied",
    r"\bdeadline_told\b": "timeout_reported",
    r"\bmismatch_told\b": "mismatch_reported",
    r"\bsilence_told_\b": "silence_reported_",
    r"\blast_heard_\b": "last_received_",
    r"\bheard_number_\b": "received_number_",
    r"\bbeat_number_\b": "heartbeat_number_",
    r"\bpatience_ms\b": "poll_timeout_ms",
    r"\bpatience_after_interrupt\b": "max_checks_after_interrupt",
    r"\bremembers_too_much\b": "has_too_much_unreported",
    r"\bcounted_anew\b": "is_recounted",
    r"\bearly_came\b": "on_early_bytes",
    r"\bshort_way_us\b": "low_rtt_us",
    r"\bCHECK_SAYING\b": "CHECK_MESSAGE",
    r"\blast_doubt\b": "error_bound, last_margin",
    r"\bask_for_short_turns\b": "request_short_time_slices",
    r"\bRawSealedOp\b": "OpAtSeal",
    r"\bRawVerdict\b": "OpVerdict",
    r"(?<!\w)_Setting\b": "OutgoingDial",
    r"\bway_of\b": "Route, route_of",
    r"\bPathAdvice\b": "PathShares, path_shares.py",
    r"\badvice\.py\b": "PathShares, path_shares.py",
    r"\bProbeSays\b": "gone: the session routes messages about probing",
    r"\bProbeHeard\b": "gone: the session routes messages about probing",
    r"\bProbeCut\b": "gone: the session routes messages about probing",
    r"\bstill_there\b": "live_conns",
    r"\bhas_let_go\b": "is_shut_down",
    r"\bcarry\.py\b": "engine.py, execute",
    r"\bNodeCame\b": "NodeConnected, NodeDisconnected",
    r"\bNodeGone\b": "NodeConnected, NodeDisconnected",
    r"\bSendTo\b": "SendToNode",
    r"(?<!\w)_still\b": "halt the nodes",
    r"\bPATIENCE_MS\b": "LATE_GRACE_MS, was_extended",
    r"\bwas_patient\b": "LATE_GRACE_MS, was_extended",
    r"\bis_young\b": "is_recent",
    r"(?<!\w)_Chance\b": "_SplitMix64",
    r"\bcovers\.py\b": "search.py",
    r"\bexchange\.py\b": "search.py",
    r"\bsteer\.py\b": "control.py",
    r"\bKEY_LIMIT\b": "MAX_KEY_BYTES, MAX_VALUE_BYTES",
    r"\bVALUE_LIMIT\b": "MAX_KEY_BYTES, MAX_VALUE_BYTES",
    r"(?<!\w)_Landing\b": "PendingBlock",
    r"\bSTALL_NS\b": "SOURCE_TIMEOUT_NS",
    r"\bAskHashes\b": "RequestHashes",
    r"\bAskBlocks\b": "RequestBlocks",
    r"\bgpu_kernels\.py\b": "gpu_hash_kernels.py",
    r"\bChildFailed\b": "ProcessFailed",
    r"\bPlotFailed\b": "DemoFailed",
    r"\bDoors?\b": "ClientProtocol",
    r"\bKeeper\b": "JournalStore",
    r"\bKeeping\b": "JournalPolicy",
    r"\bPatientClock\b": "StallCompensatedClock",
    r"\bout_of_redo\b": "excluded_from_retry",
    r"\bLAST_WORDS_S\b": "SHUTDOWN_TIMEOUT_S",
    r"\bSendBeat\b": "SendHeartbeat",
    r"\bDoneSeen\b": "DoneReceived",
    r"\bMoonshotFound\b": "MoonshotFinished",
    r"\bKeepLinks\b": "WriteLinks",
    r"\bis_inhabited\b": "RunPhase",
    r"\bKILLS_MOST\b": "MAX_KILLS, MAX_PROCESSES, MAX_SHOWN",
    r"\banew\b": "again",
    r"\bwhoever\b": "the peer, process or client that",
    r"\b(?:Stranger|stranger)\b": "unauthenticated client",
    r"\bfellows?\b": "other receivers, peers",
    r"\b[Uu]nrest\b": "instability",
    r"\bmended\b": "fixed",
    r"\bbefalls?\b|\bbefell\b": "happens to",
    r"\blast_beat\b|\bbeat_all\b|\b_BEAT\b": "last_heartbeat, send_heartbeats",
    r"\bheard_registrations\b": "received_registrations",
    r"\b(?:process_mark|process_of_mark_is_gone)\b": "process_identity, is_process_gone",
    r"\b(?:iterating_stories|run_story|StoryFailure)\b": "iterating_schedules, run_schedule, IterationFailure",
    r"\b(?:was_seated|_check_seats|LosesItsSeat)\b": "registered, registrations",
    r"\bMAX_STRIKES\b": "MAX_MASTER_FAULTS",
    r"\bMAX_ASKED\b": "MAX_REQUESTS",
    r"\bclass Pace\b": "StepProgress",
    r"\bit asked to\b": "it sent Leave",
}


PHRASES = re.compile("|".join(old for old in RETIRED if " " in old))
"""Of several words."""


def rows() -> list[tuple[str, str, str]]:
    """Term, sentence and file of every row of the glossary."""
    found = re.findall(r"^\| (.+?) \| (.+) \| `(.+)` \|$", GLOSSARY.read_text(encoding="utf-8"), re.MULTILINE)
    assert len(found) > 100
    return found


def words_of(text: str) -> str:
    """The text in lower case, with names split into their words: `LaneKey`, `lane_key` and `lane-key` are alike."""
    return re.sub(r"[-_\s]+", " ", re.sub(r"(?<=[a-z0-9])(?=[A-Z])", " ", text).lower())


@cache
def texts() -> dict[str, str]:
    paths = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.suffix in ENDINGS]
    named = {path.relative_to(ROOT).as_posix(): path for path in paths if path.is_file()}
    return {
        name: path.read_text(encoding="utf-8")
        for name, path in sorted(named.items())
        if not name.startswith(KEPT_AS_WRITTEN)
    }


def test_the_glossary_is_in_alphabetical_order() -> None:
    terms = [term.lower() for term, _, _ in rows()]
    assert terms == sorted(terms)
    assert len(set(terms)) == len(terms)


def test_every_term_is_one_sentence() -> None:
    assert not [term for term, sentence, _ in rows() if not sentence.endswith(".")]


def test_every_term_is_used_in_the_file_that_owns_it() -> None:
    missing = [f"{term}: there is no {file}" for term, _, file in rows() if not (ROOT / file).is_file()]
    missing += [
        f"{term} does not occur in {file}"
        for term, _, file in rows()
        if (ROOT / file).is_file() and words_of(term) not in words_of((ROOT / file).read_text(encoding="utf-8"))
    ]
    assert not missing, "\n".join(missing)


def test_no_retired_word_is_left() -> None:
    # Most words are in many lines and files, and most of them are not retired: each is looked at once.
    words = {name: {*re.findall(r"[\w.(]+", text), *PHRASES.findall(text)} for name, text in texts().items()}
    any_word = re.compile("|".join(RETIRED))
    suspected = {word for word in set().union(*words.values()) if any_word.search(word)}
    faults = []
    for name, text in texts().items():
        if suspected.isdisjoint(words[name]):
            continue
        for match in any_word.finditer(text):
            line = text.count("\n", 0, match.start()) + 1
            instead = next(new for old, new in RETIRED.items() if re.search(old, match.group()))
            faults.append(f"{name}:{line}: {match.group()!r} is retired, use {instead!r}")
    assert not faults, "\n".join(faults)
