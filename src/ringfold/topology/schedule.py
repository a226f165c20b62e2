"""Which pairs are measured at the same time.

In a *measurement round* every peer takes part in at most one measurement, so that no two of them share a network card.
The fewer rounds, the sooner all is known. Assigning pairs to rounds so that no peer has two pairs in one is edge
colouring. The peer with the most pairs has d of them, so at least d rounds are needed; Vizing proved that d + 1 always
suffice.

Two algorithms are run, and the better result is taken:

* The *circle method*, when every pair must be measured: one peer is fixed, the others are placed around it and move on
  by one place for each round; opposite peers are a pair. n peers need n - 1 rounds if n is even. If n is odd a dummy is
  added, and n rounds are needed (n/2 rounded down pairs fit into one). A few absent pairs leave gaps, no more.
* *Fans* (Misra and Gries, 1992), when few pairs are left: pairs are coloured one by one. If the two peers have no free
  colour in common, a fan of the first one's pairs is rotated by one place, after two colours have been swapped along a
  path of alternating colours. It never needs more than d + 1 rounds.
"""

import itertools
from collections import Counter
from collections.abc import Iterable

from ringfold.errors import UsageError

Pair = tuple[int, int]


def disjoint_rounds(pairs: Iterable[Pair]) -> list[list[Pair]]:
    """Every pair once (lower id first), no peer twice in a round; at most one round more than the minimum.

    All pairs of n peers take n - 1 rounds, or n if n is odd: the minimum. Equal sets give equal results.
    """
    wanted = sorted({(min(pair), max(pair)) for pair in pairs})
    for a, b in wanted:
        if a == b:
            raise UsageError(f"peer {a} cannot be measured against itself")
    peers = sorted({peer for pair in wanted for peer in pair})
    if not wanted:
        return []
    circle = _circle(peers, set(wanted))
    busiest = max(Counter(peer for pair in wanted for peer in pair).values())
    fewest = max(busiest, -(-len(wanted) // (len(peers) // 2)))
    if len(circle) <= fewest:
        return circle
    fans = _Fans(busiest + 1)
    for a, b in wanted:
        fans.add(a, b)
    return min(circle, fans.rounds(), key=len)


def _circle(peers: list[int], wanted: set[Pair]) -> list[list[Pair]]:
    places: list[int | None] = [*peers, None] if len(peers) % 2 else [*peers]
    rounds = []
    for _ in range(len(places) - 1):
        opposite = zip(places[: len(places) // 2], reversed(places), strict=False)
        met = [(min(a, b), max(a, b)) for a, b in opposite if a is not None and b is not None]
        rounds.append(sorted(pair for pair in met if pair in wanted))
        places = [places[0], places[-1], *places[1:-1]]
    return [met for met in rounds if met]


class _Fans:
    """Colours are rounds. `_at[peer][colour]` is the other peer of the pair with that colour; it is symmetric."""

    def __init__(self, colours: int) -> None:
        self._colours = colours
        self._at: dict[int, dict[int, int]] = {}

    def rounds(self) -> list[list[Pair]]:
        met: list[list[Pair]] = [[] for _ in range(self._colours)]
        for peer, meets in self._at.items():
            for colour, other in meets.items():
                if peer < other:
                    met[colour].append((peer, other))
        return [sorted(pairs) for pairs in met if pairs]

    def add(self, centre: int, other: int) -> None:
        """Colour the pair; others may change their colours."""
        self._at.setdefault(centre, {})
        self._at.setdefault(other, {})
        fan = self._fan(centre, other)
        kept, freed = self._free(centre), self._free(fan[-1])
        self._swap_along_path(centre, freed, kept)
        # Now `freed` is free at the centre. The swap may have broken the fan: use it up to the first end that fits.
        for length, end in enumerate(fan):
            if freed not in self._at[end] and self._is_fan(centre, fan[: length + 1]):
                self._rotate(centre, fan[: length + 1], freed)
                return
        raise AssertionError("a fan has an end that fits")

    def _free(self, peer: int) -> int:
        return next(colour for colour in range(self._colours) if colour not in self._at[peer])

    def _fan(self, centre: int, first: int) -> list[int]:
        """Peers of the centre, such that each pair's colour is free at the peer before it; as long as possible."""
        fan = [first]
        while True:
            meets = self._at[centre].items()
            grown = [other for colour, other in meets if other not in fan and colour not in self._at[fan[-1]]]
            if not grown:
                return fan
            fan.append(min(grown))

    def _is_fan(self, centre: int, fan: list[int]) -> bool:
        colour_of = {other: colour for colour, other in self._at[centre].items()}
        return all(colour_of[after] not in self._at[before] for before, after in itertools.pairwise(fan))

    def _swap_along_path(self, start: int, first: int, second: int) -> None:
        """Swap two colours on the path that leaves `start` with colour `first`; `second` is free at the start."""
        path, colour = [start], first
        while (after := self._at[path[-1]].get(colour)) is not None:
            path.append(after)
            colour = second if colour == first else first
        pairs = list(itertools.pairwise(path))
        for number, (a, b) in enumerate(pairs):
            colour = second if number % 2 else first
            del self._at[a][colour], self._at[b][colour]
        for number, (a, b) in enumerate(pairs):
            colour = first if number % 2 else second
            self._at[a][colour], self._at[b][colour] = b, a

    def _rotate(self, centre: int, fan: list[int], last: int) -> None:
        """Each pair of the fan takes the colour of the next one; the last pair takes `last`."""
        colour_of = {other: colour for colour, other in self._at[centre].items()}
        colours = [*(colour_of[other] for other in fan[1:]), last]
        for other in fan[1:]:
            del self._at[centre][colour_of[other]], self._at[other][colour_of[other]]
        for other, colour in zip(fan, colours, strict=True):
            self._at[centre][colour], self._at[other][colour] = other, centre
