"""The search for a ring with far more steps, as a program: `python -m ringfold.topology.moonshot`.

It reads one JSON object on stdin (a `MoonshotRequest`) and writes one on stdout (a `MoonshotResponse`). The master
starts it after an `optimize_topology` of many members, and reads the response at the next one: a better ring is adopted
if the members are still the same. It is a process of its own, so that the master's event loop never waits for it.
"""

import sys
from collections.abc import Collection, Sequence

import msgspec

from ringfold.errors import UsageError
from ringfold.topology.ring import Edge
from ringfold.topology.solve import NoRing, Solution, best_ring, known_or
from ringfold.wire.decoding import decode

BUDGET = 400_000
"""Fifty times the steps of a search that peers wait for. For 64 members, about 20 seconds."""

Figures = Collection[tuple[int, int, float]]


class MoonshotRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Links are (source, target, figure); a link that is not listed has `unknown` bytes a second and no delay."""

    members: list[int]
    rates: list[tuple[int, int, float]]
    delays: list[tuple[int, int, float]] = []
    forbidden: list[tuple[int, int]] = []
    start: list[int] = []
    unknown: float = 0.0
    margin: float = 0.0
    seed: int = 0
    budget: int = BUDGET


class MoonshotResponse(msgspec.Struct, frozen=True):
    """Either a solution, or the reason why there is none."""

    solution: Solution | None = None
    no_ring: NoRing | None = None


def moonshot(
    members: Sequence[int],
    rates: Figures,
    delays: Figures = (),
    forbidden: Collection[Edge] = (),
    seed: int = 0,
    budget: int = BUDGET,
    *,
    start: Sequence[int] = (),
    unknown: float = 0.0,
    margin: float = 0.0,
) -> Solution | NoRing:
    """`best_ring` with a large budget and plain arguments."""
    return best_ring(
        members,
        known_or({(source, target): figure for source, target, figure in rates}, unknown),
        known_or({(source, target): figure for source, target, figure in delays}, 0.0),
        budget=budget,
        seed=seed,
        start=start,
        forbidden={(source, target) for source, target in forbidden},
        margin=margin,
    )


def solve(request: MoonshotRequest) -> MoonshotResponse:
    """The response to a request. Raises UsageError if it is invalid."""
    found = moonshot(**{field: getattr(request, field) for field in MoonshotRequest.__struct_fields__})
    return MoonshotResponse(no_ring=found) if isinstance(found, NoRing) else MoonshotResponse(solution=found)


_request_decoder = msgspec.json.Decoder(MoonshotRequest)
_response_decoder = msgspec.json.Decoder(MoonshotResponse)


def decode_response(raw: bytes) -> MoonshotResponse:
    """The response that the program wrote; RemoteProtocolError if it is invalid."""
    return decode(_response_decoder.decode, raw, what="not a response of a moonshot: ")


def solve_json(raw: bytes) -> bytes:
    """JSON in, JSON out."""
    request = decode(_request_decoder.decode, raw, UsageError, "not a request for a moonshot: ")
    return msgspec.json.encode(solve(request))


def main() -> int:
    try:
        response = solve_json(sys.stdin.buffer.read())
    except UsageError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    sys.stdout.buffer.write(response + b"\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
