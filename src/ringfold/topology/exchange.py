"""A larger sum of rates for a ring of many members, by exchanging two neighbouring pieces of it.

Cut the ring behind the places i < j < k, and exchange the two pieces between the cuts. Every piece keeps its direction,
as it must: a link back is another link. Three links go and three come. Let m[a, b] be what is gained when the member at
a is followed by what came after b, instead of by what came after a. Then the exchange gains
m[i, j] + m[j, k] + m[k, i], so all pairs (j, k) of one i are looked at with three additions of matrices: a *row*. The
best of a row is taken if it gains. When no row does, the ring is *kicked* (four pieces are put in the reverse order,
which no single exchange can undo), improved again, and the better ring stays.

A link that is not allowed gains a very negative amount. So a kick may use some, and the exchanges remove them again.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ringfold.topology.covers import Draw

Matrix = npt.NDArray[np.float64]

ROW_LOOKS = 64 * 64


class Exchange:
    """Improves one ring. Rates and costs are whole numbers; a step is a row, or its part of ROW_LOOKS looks."""

    def __init__(self, rate: Matrix, cost: Matrix, allowed: npt.NDArray[np.bool_], draw: Draw, steps: int) -> None:
        size = len(rate)
        worst = -1.0 - size * float(rate[allowed].max())
        self._rate = np.where(allowed, rate, worst)
        self._cost = cost
        self._draw = draw
        self._upper = np.where(np.triu(np.ones((size, size), dtype=bool), 1), 0.0, -np.inf)
        self._row_steps = max(1, size * size // ROW_LOOKS)
        self._steps_left = steps

    def improve(self, ring: Sequence[int]) -> list[int]:
        """A ring at least as good as the given one, which uses allowed links only; then so does the answer."""
        best = self._settle(np.array(ring, dtype=np.intp))
        worth = self._worth(best)
        while self._steps_left > 0 and len(best) >= 8:
            tried = self._settle(self._kick(best))
            if (new := self._worth(tried)) > worth:
                best, worth = tried, new
        return [int(place) for place in best]

    def _worth(self, ring: npt.NDArray[np.intp]) -> tuple[float, float]:
        after = np.roll(ring, -1)
        return float(self._rate[ring, after].sum()), -float(self._cost[ring, after].sum())

    def _kick(self, ring: npt.NDArray[np.intp]) -> npt.NDArray[np.intp]:
        size = len(ring)
        length = min(size, 24)  # near each other, so that most of the ring stays as it is
        turned = np.roll(ring, -self._draw.below(size))
        cuts: set[int] = set()
        while len(cuts) < 3:
            cuts.add(1 + self._draw.below(length - 1))
        a, b, c = sorted(cuts)
        return np.concatenate([turned[:a], turned[c:length], turned[b:c], turned[a:b], turned[length:]])

    def _settle(self, ring: npt.NDArray[np.intp]) -> npt.NDArray[np.intp]:
        """Exchange until no row gains."""
        quiet, row = 0, 0
        while quiet < len(ring) and self._steps_left > 0:
            self._steps_left -= self._row_steps
            better = self._best_of_row(np.roll(ring, -row))
            if better is None:
                quiet += 1
                row = (row + 1) % len(ring)
            else:
                ring, quiet, row = better, 0, 0
        return ring

    def _best_of_row(self, ring: npt.NDArray[np.intp]) -> npt.NDArray[np.intp] | None:
        """The best exchange with a cut behind the first place, if it gains: a larger sum, or as large for less cost."""
        gain = self._row(self._rate, ring)
        most = gain.max(initial=-np.inf)
        if most < 0:
            return None
        costs = np.where(gain == most, self._row(self._cost, ring), np.inf)
        j, k = divmod(int(costs.argmin()), costs.shape[1])
        if most == 0 and costs[j, k] >= 0:
            return None
        j, k = j + 1, k + 1
        return np.concatenate([ring[:1], ring[j + 1 : k + 1], ring[1 : j + 1], ring[k + 1 :]])

    def _row(self, worth: Matrix, ring: npt.NDArray[np.intp]) -> Matrix:
        """What m[0, j] + m[j, k] + m[k, 0] is for all 0 < j < k, at [j - 1, k - 1]."""
        after = np.roll(ring, -1)
        m = worth[np.ix_(ring, after)]
        m = m - m.diagonal()[:, None]
        return m[0, 1:, None] + m[1:, 1:] + m[1:, 0] + self._upper[1:, 1:]
