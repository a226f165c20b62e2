"""What an engine is told with an op."""

from types import SimpleNamespace
from typing import Any, cast

import numpy as np

from ringfold.peer.buffers import spans_of
from ringfold.peer.codes import OpKind
from ringfold.peer.ops import Ops
from ringfold.peer.session import Session
from ringfold.wire.descriptor import NO_STEP


class FakeEngine:
    def __init__(self) -> None:
        self.calls: list[object] = []

    def set_step(self, step: int) -> None:
        self.calls.append(step)

    def submit(self, request: Any) -> int:  # noqa: ANN401 - OpRequest
        self.calls.append("op")
        return 1


def session_of(engine: FakeEngine) -> Session:
    return cast(Session, SimpleNamespace(engine=engine, final_tags=set()))


def submit(ops: Ops) -> None:
    ops.submit("all_reduce", OpKind.ALL_REDUCE, 0, 0, 0, spans_of(np.zeros(4, np.float32)), None)


def test_the_engine_learns_of_a_step_with_its_first_op() -> None:
    """Each command wakes its thread: a step without an op costs none, and one with two ops costs one."""
    engine = FakeEngine()
    ops = Ops(session_of(engine), 1.0)
    ops.set_step(7)
    ops.set_step(8)
    assert engine.calls == []
    submit(ops)
    submit(ops)
    ops.set_step(None)
    submit(ops)
    assert engine.calls == [8, "op", "op", NO_STEP, "op"]


def test_a_new_session_knows_no_step() -> None:
    engine = FakeEngine()
    ops = Ops(session_of(FakeEngine()), 1.0)
    ops.set_step(7)
    ops.use_session(session_of(engine))
    submit(ops)
    assert engine.calls == ["op"]
