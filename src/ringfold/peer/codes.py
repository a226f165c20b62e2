"""The numbers that Python and the native engine share. They are sent in an op's descriptor: append, never reorder."""

from enum import IntEnum
from typing import Self

from ringfold.wire.descriptor import Descriptor
from ringfold.wire.messages import Verdict


class OpKind(IntEnum):
    ALL_REDUCE = 0
    BROADCAST = 1
    ALL_GATHER = 2
    REDUCE_SCATTER = 3
    BARRIER = 4


class OpStatus(IntEnum):
    """How an op ended."""

    OK = 0
    ABORTED = 1
    TOO_FEW = 2
    FAILED = 3
    CANCELLED = 4


class Retry(IntEnum):
    """What retries an aborted op: nothing, the engine, or the caller, because its arguments depend on the ring."""

    NEVER = 0
    ENGINE = 1
    CALLER = 2


class Final(IntEnum):
    """Whether an aborted op may be retried, or is over."""

    NO = 0
    OVER = 1

    @classmethod
    def of(cls, verdict: Verdict) -> Self:
        """Whether a call ended for good without success: its deadline passed, or it was called without retry."""
        kind = None if verdict.commit or verdict.reason is None else verdict.reason.kind
        is_single = not verdict.commit and Descriptor.unpack(verdict.descriptor).retry == Retry.NEVER
        return cls.OVER if kind == "deadline" or is_single else cls.NO


REDUCE_OPS = {"sum": 0, "avg": 1, "prod": 2, "min": 3, "max": 4}
QUANTISATIONS = {"minmax8": 1, "minmax4": 2, "zeroscale8": 3, "zeroscale4": 4}
"""How the segments of an all_reduce are quantised; 0: not at all."""
DTYPES = {
    "uint8": 0,
    "int8": 1,
    "uint16": 2,
    "int16": 3,
    "uint32": 4,
    "int32": 5,
    "uint64": 6,
    "int64": 7,
    "float16": 8,
    "bfloat16": 9,
    "float32": 10,
    "float64": 11,
}
BFLOAT16 = DTYPES["bfloat16"]
QUANTISABLE = frozenset(DTYPES[name] for name in ("float16", "bfloat16", "float32"))
