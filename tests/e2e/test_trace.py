"""Traces and diagnoses of real runs: clocks that are made wrong are aligned again, and stragglers are named."""

import os
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from programs import ProgramCluster, ProgramContext

from ringfold.observe.align import align, compare
from ringfold.observe.processes import Process, gather
from ringfold.observe.records import Record, read_directory
from ringfold.observe.trace import build
from ringfold.runtime.hardware import usable_cores
from ringfold.testing.recorded import with_clock
from ringfold.testing.trace_checks import faults
from ringfold.tools.bench.why import Faults, WhyPlan, run_once
from ringfold.tools.shaped import missing

PEERS, STEPS = 3, 700
CLOCKS = [(50_000_000, 30.0), (-50_000_000, -30.0), (20_000_000, 12.0), (-5_000_000, 0.0)]
"""Of the processes: by how much they are ahead in nanoseconds, and how they drift in ppm."""


def train(me: ProgramContext) -> None:
    import ringfold as rf

    os.environ["RINGFOLD_EVENTS_DIR"] = me.options["directory"]
    gradients, weights = np.ones(20_000, np.float32), np.zeros(4, np.float32)
    with me.join(probe=True) as run:
        for step in run.steps(rf.SharedState(weights=weights), until=STEPS, min_world=PEERS):
            step.all_reduce(gradients, op="avg")
            step.all_reduce(gradients[:64], op="sum")
            step.log(loss=1.0 / (1 + step.number))
            weights += 1
    me.report("done")


def with_wrong_clock(record: Record, number: int) -> Process:
    """The record as that of a host of its own, whose clocks are wrong."""
    begun = SimpleNamespace(**{name: getattr(record.begun, name) for name in record.begun.__struct_fields__})
    begun.boot_id = f"boot {number}"
    offset_ns, drift_ppm = CLOCKS[number % len(CLOCKS)]
    return gather(record.name, begun, with_clock(record.events(), offset_ns, drift_ppm))  # type: ignore[arg-type]


UNKNOWN_NS = 500_000
SAMPLING_NS = 100_000
"""Wall time is sampled every two seconds, and by a thread that may lose its core between two readings."""


def test_a_real_run_is_aligned_after_its_clocks_were_made_wrong(cluster: ProgramCluster, tmp_path: Path) -> None:
    """Offsets of 50 ms, drifts of 30 ppm: thousands of impossible orders before alignment, few and small ones after."""
    cluster.start_master(events_dir=tmp_path)
    for peer in cluster.start_program(train, PEERS, directory=str(tmp_path)):
        peer.expect("done")
        peer.wait()
    records = read_directory(tmp_path)
    assert len(records) == PEERS + 1
    real = [gather(record.name, record.begun, record.events()) for record in records]
    truth = align(real)
    assert sum(count.impossible for count in compare(real, truth)[0]) == 0, (
        f"the record contradicts itself: {compare(real, truth)[0]}"
    )

    wrong = [with_wrong_clock(record, number) for number, record in enumerate(records)]
    alignment = align(wrong)
    before, after = compare(wrong, alignment)
    assert sum(count.impossible for count in before) > 2_000
    # Knots are a second apart: in a run of two seconds some orders of a few microseconds are left.
    assert sum(count.impossible for count in after) < 0.1 * sum(count.impossible for count in before), after
    assert max(count.worst_ns for count in after) < SAMPLING_NS, after
    assert not faults({"traceEvents": build(wrong, alignment).events})
    for index, process in enumerate(wrong):
        for op, right in list(zip(process.ops, real[index].ops, strict=True))[::25]:
            error = alignment.error_ns(index, op.at)
            found = alignment.time(index, op.at) - truth.time(index, right.at)
            reference = alignment.time(1, wrong[1].ops[0].at) - truth.time(1, real[1].ops[0].at)
            own = alignment.error_ns(1, wrong[1].ops[0].at) or 0
            # Where orders contradict each other by a little, the uncertainty is not known.
            assert abs(found - reference) <= (UNKNOWN_NS if error is None else error + own + SAMPLING_NS)


@pytest.mark.netns
@pytest.mark.skipif(missing() is not None, reason=str(missing()))
@pytest.mark.skipif(usable_cores() < 2, reason="a busy host needs a core of its own")
@pytest.mark.parametrize("wrong", [Faults(), Faults(loader=0, host=1, link=(2, 3))], ids=["healthy", "all at once"])
def test_a_slow_loader_a_busy_host_and_a_slow_link_are_named(wrong: Faults) -> None:
    plan = WhyPlan([], 1, 4, 24, 1 << 20, 200.0, 15.0, 50.0, 50.0)
    outcome = run_once(plan, wrong)
    assert outcome.found == outcome.wanted, outcome.diagnosis
