"""Peers in sentences: `peer 3` becomes `peer 3 (gpu-7)`, and the reader's own number says so.

Sentences are made with numbers, wherever they are made (an election, a measurement, another machine). Names are put in
once, where a sentence leaves the master: it knows the names of all groups, and of peers that are gone.
"""

import re
from collections.abc import Mapping

from ringfold.wire.base import PeerId

MAX_NAME_CHARS = 40
_NUMBER = r"[0-9]{1,18}\b(?! more)"
"""Some sentences have parts that another machine wrote: a number of thousands of digits is none."""
_PEERS = re.compile(rf"\b(peers? )({_NUMBER}(?:(?:, | and ){_NUMBER})*)(?! \()")
_BRACKETS = str.maketrans("()", "[]")


def with_names(text: str, names: Mapping[PeerId, str]) -> str:
    """The text with the name behind each peer's number, where it is known and not there already."""

    def name(number: re.Match[str]) -> str:
        known = names.get(int(number[0]), "")
        return f"{number[0]} ({_short(known)})" if known else number[0]

    return _PEERS.sub(lambda found: found[1] + re.sub(r"[0-9]+", name, found[2]), text)


def with_you(text: str, me: PeerId) -> str:
    """The text as peer `me` reads it: `peer 2 (gpu-2, you)`."""
    item = r"[0-9]{1,18}(?: \([^()]*\))?(?:, | and )"
    mine = re.compile(rf"\b(peers? (?:{item})*?{me}\b)(?! more)(?: \(([^()]*)\))?")
    return mine.sub(lambda found: f"{found[1]} ({f'{found[2]}, ' if found[2] else ''}you)", text)


def _short(name: str) -> str:
    shown = name if len(name) <= MAX_NAME_CHARS else f"{name[: MAX_NAME_CHARS - 3]}..."
    return shown.translate(_BRACKETS)
