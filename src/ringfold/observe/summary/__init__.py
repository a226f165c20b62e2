"""A summary of a run, from the records in its run directory: what happened, what it cost, who was slow.

`summarise` reads the records twice: first only the samples of clocks, then everything. Memory is bounded by the number
of peers, epochs and rare events, not by that of ops and steps.

Reading order: `builder.py` is the entry, and `results.py` has what a summary consists of. `run_time.py` gives all hosts
one time. `collector.py` reads the events: `ops.py`, `status_samples.py` and `rounds.py` keep tallies of the frequent
ones, in the series and histograms of `thinning.py`; `rare_events.py` has the members and epochs, and `incidents.py`
what happened and what it cost. `sentences.py` says it in a paragraph, `wording.py` turns figures into text.
"""

from ringfold.observe.summary.builder import summarise
from ringfold.observe.summary.results import Summary

__all__ = ["Summary", "summarise"]
