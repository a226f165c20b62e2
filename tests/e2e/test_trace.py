"""Traces and diagnoses of real runs: clocks that are made wrong are aligned again, and stragglers are named."""

import os
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from programs import ProgramCluster, ProgramContext

from ringfold.observe.align import Alignment, align, compare
from ringfold.observe.processes import Process, by_key, gather
from ringfold.observe.records import Record, read_directory
from ringfold.observe.trace import build
from ringfold.runtime.hardware import usable_cores
from ringfold.testing.recorded import with_clock
from ringfold.testing.trace_checks import faults
from ringfold.tools.bench.why import Faults, WhyPlan, run_once
from ringfold.tools.shaped import missing

PEERS, STEPS = 3, 2_000
CLOCKS = [(50_000_000, 30.0), (-50_000_000, -30.0), (20_000_000, 12.0), (-5_000_000, 0.0)]
"""Of the processes: by how much they are ahead in nanoseconds, and how they drift in ppm."""


def train(me: ProgramContext) -> None:
    import ringfold as rf

    os.environ["RINGFOLD_EVENTS_DIR"] = me.options["directory"]
    gradients, weights = np.ones(me.options["elements"], np.float32), np.zeros(4, np.float32)
    with me.join(probe=me.options["probe"]) as run:
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


def outside_of_uncertainty(real: list[Process], wrong: list[Process], alignment: Alignment) -> list[str]:
    """Ends of an op whose distance on the timeline is further from the real one than the uncertainties allow."""
    right = {(index, op.key): op.at for index, process in enumerate(real) for op in process.ops}
    found = []
    for key, members in list(by_key(wrong).items())[::10]:
        for (one, first), (other, second) in combinations(members, 2):
            errors = [alignment.error_ns(one, first.at), alignment.error_ns(other, second.at)]
            distance = alignment.time(one, first.at) - alignment.time(other, second.at)
            away = abs(distance - (right[one, key] - right[other, key]))
            # The timeline may itself be as fast as the fastest clock: 60 ns in an op of 2 ms.
            if None in errors or away > sum(error or 0 for error in errors) + 100:
                found.append(f"{key}: processes {one} and {other} are {away} ns off, their uncertainties {errors}")
    return found


@pytest.mark.parametrize(
    ("elements", "probe"), [(20_000, True), (64, False)], ids=["80 kB and a prober", "256 B, events alone"]
)
def test_a_real_run_is_aligned_after_its_clocks_were_made_wrong(
    cluster: ProgramCluster, tmp_path: Path, elements: int, probe: bool
) -> None:
    """Offsets of 50 ms, drifts of 30 ppm: thousands of impossible orders before alignment, none after."""
    cluster.start_master(events_dir=tmp_path)
    for peer in cluster.start_program(train, PEERS, directory=str(tmp_path), elements=elements, probe=probe):
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
    assert sum(count.impossible for count in before) > 1_000
    assert sum(count.impossible for count in after) == 0, after
    assert alignment.broken_ns == 0
    assert outside_of_uncertainty(real, wrong, alignment) == []
    assert not faults({"traceEvents": build(wrong, alignment).events})


@pytest.mark.netns
@pytest.mark.skipif(missing() is not None, reason=str(missing()))
@pytest.mark.skipif(usable_cores() < 2, reason="a busy host needs a core of its own")
@pytest.mark.parametrize("wrong", [Faults(), Faults(loader=0, host=1, link=(2, 3))], ids=["healthy", "all at once"])
def test_a_slow_loader_a_busy_host_and_a_slow_link_are_named(wrong: Faults) -> None:
    plan = WhyPlan([], 1, 4, 24, 1 << 20, 200.0, 15.0, 50.0, 50.0)
    outcome = run_once(plan, wrong)
    assert outcome.found == outcome.wanted, outcome.diagnosis
