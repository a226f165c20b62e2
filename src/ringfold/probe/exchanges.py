"""The terms of probing, and a window of exchanges of one edge, as plain data.

An *exchange* is five packets between a prober P and a responder R. The kernel timestamps each packet at both ends:

    P                                R
    Pt1 --- t1_tx -------- t1_rx --->      then, one gap later:
    Pt2 --- t2_tx -------- t2_rx --->      (carries t1_tx)
        <-- r1_rx -------- r1_tx --- Pr1   (carries t1_rx)
        <-- r2_rx -------- r2_tx --- Pr2   (carries r1_tx and t2_rx)
        <------------------------- Pd1     (carries r2_tx)

t*_tx and r*_rx are times of the prober's clock, t*_rx and r*_tx of the responder's. A packet cannot arrive before it
was sent. So t_rx - t_tx bounds C_dst - C_src from above, and r_tx - r_rx bounds it from below. If two packets were sent
one gap apart and did not arrive one gap apart, one of them was queued: such a pair is *filtered*.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from ringfold.wire.probing import NodeId

COLUMNS = ("t1_tx", "t1_rx", "t2_tx", "t2_rx", "r1_tx", "r1_rx", "r2_tx", "r2_rx")
FORWARD_KEPT, BACKWARD_KEPT = 1, 2

Stamps = Literal["kernel", "user"]


@dataclass(frozen=True, slots=True)
class EdgeWindow:
    """One window of one edge, at its prober.

    `exchanges` is an int64 matrix with the columns COLUMNS: a row for each exchange with at least one complete pair, in
    the order of sending; a missing timestamp is 0. `kept` has a uint8 for each row: FORWARD_KEPT if its pair Pt1-Pt2 is
    complete and passed the filter, BACKWARD_KEPT for Pr1-Pr2. Times are nanoseconds of each node's clock.
    """

    src: NodeId
    dst: NodeId
    begin_ns: int
    end_ns: int
    exchanges: npt.NDArray[np.int64]
    kept: npt.NDArray[np.uint8]
    sent: int
    """Exchanges begun."""
    lost: int
    """Exchanges without a complete response in time."""
    duplicates: int
    filtered: int
    """Complete pairs that did not pass the filter."""
    threshold_ns: int
    """The largest change of a pair's spacing that passed the filter at the end of the window."""
    stamps: Stamps
    stepped: str = ""
    """How the host's clock stepped during the window, if it did; then the timestamps are not usable."""
