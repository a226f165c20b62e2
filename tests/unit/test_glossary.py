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
    r"\bComplaints\b": "LogRateLimiter",
    r"\bShelf\b": "BlockServer",
    r"\b_Landing\b": "PendingBlock",
    r"\bMOST_FELLOWS\b": "MAX_RELAY_RECEIVERS",
    r"\bVisits\b": "BulkSessions",
    r"\b_Setting\b": "OutgoingDial",
    r"\b[Tt]he rim\b": "the I/O seam",
    r"\bask_aside\b": "run_in_subprocess",
    r"\baside\.py\b": "process.py",
    r"\bshort_way_us\b": "low_rtt_us",
    r"\bCHECK_SAYING\b": "CHECK_MESSAGE",
}


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
    faults = []
    for pattern, instead in RETIRED.items():
        word = re.compile(pattern)
        for name, text in texts().items():
            faults += [
                f"{name}:{text.count(chr(10), 0, match.start()) + 1}: {match.group()!r} is retired, use {instead!r}"
                for match in word.finditer(text)
            ]
    assert not faults, "\n".join(faults)
