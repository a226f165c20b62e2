"""What an op is and which call it is, in 48 bytes, so that an error can show what two peers called differently.

A call has a *name* that is the same on all members: its tag, its step, and how many calls on that tag were made before
it in the step (without steps: since an admission). Sequences count the ops of an epoch and restart with each epoch; a
name stays with its call, however often the op is retried.

The layout is fixed and little-endian because the engine writes it and compares it:

    u8 kind | u8 dtype (255 mixed) | u8 reduce op | u8 quantisation | u8 retry | u8 zero | u16 root |
    u32 arrays | u32 CRC of the arrays' dtypes and counts | u64 elements | u64 bytes |
    u64 step (2^64 - 1 without a step) | u32 call | u32 zero
"""

import struct
from functools import lru_cache
from typing import NamedTuple

from ringfold.wire.frames import DESCRIPTOR_BYTES

KINDS = ("all_reduce", "broadcast", "all_gather", "reduce_scatter", "barrier")
REDUCE_OPS = ("sum", "avg", "prod", "min", "max")
DTYPES = ("u8", "i8", "u16", "i16", "u32", "i32", "u64", "i64", "f16", "bf16", "f32", "f64")
QUANTISATIONS = ("none", "minmax8", "minmax4", "zeroscale8", "zeroscale4")
RETRIES = ("False", "True", "True, by the caller")
MIXED = 255
NO_STEP = (1 << 64) - 1
"""The step of a call that is in no step."""

_LAYOUT = struct.Struct("<BBBBBxHIIQQQI4x")
_SHAPE_BYTES = 32
"""The part that is the same in every iteration of a training loop; its CRC is cached."""
assert _LAYOUT.size == DESCRIPTOR_BYTES


class Descriptor(NamedTuple):
    """The fields of a descriptor, as numbers."""

    kind: int
    dtype: int = MIXED
    reduce_op: int = 0
    quantisation: int = 0
    retry: int = 0
    root: int = 0
    arrays: int = 0
    layout: int = 0
    elements: int = 0
    nbytes: int = 0
    step: int = NO_STEP
    call: int = 0

    def pack(self) -> bytes:
        return _LAYOUT.pack(*self)

    @classmethod
    def unpack(cls, packed: bytes) -> "Descriptor":
        return cls(*_LAYOUT.unpack(packed))


def describe(packed: bytes) -> str:
    """A descriptor as text. Two different ones have different texts; unknown values are shown as numbers."""
    if len(packed) != DESCRIPTOR_BYTES:
        return f"an op with a descriptor of {len(packed)} bytes"
    op = Descriptor.unpack(packed)
    kind = _name(KINDS, op.kind, "kind")
    facts = []
    if op.arrays or op.elements or op.nbytes or op.dtype != MIXED:
        facts.append(f"{op.elements} x {'mixed' if op.dtype == MIXED else _name(DTYPES, op.dtype, 'dtype')}")
        facts.append(f"{op.nbytes} bytes in {op.arrays} array{'' if op.arrays == 1 else 's'}")
    if op.arrays > 1 or op.layout:
        facts.append(f"layout {op.layout:08x}")
    if kind in ("all_reduce", "reduce_scatter"):
        facts.insert(0, f"op={_name(REDUCE_OPS, op.reduce_op, 'reduce op')}")
    elif op.reduce_op:
        facts.append(f"op={op.reduce_op}")
    if kind == "broadcast" or op.root:
        facts.append(f"root={op.root}")
    if op.quantisation:
        facts.append(f"quantize={_name(QUANTISATIONS, op.quantisation, 'quantisation')}")
    facts.append(f"retry={_name(RETRIES, op.retry, 'retry')}")
    return f"{kind}({', '.join(facts)}) as {place(packed)}"


def place(packed: bytes) -> str:
    """The place of a call in its program, as text: "call 2 of step 7"."""
    op = Descriptor.unpack(packed)
    return f"call {op.call + 1}" if op.step == NO_STEP else f"call {op.call + 1} of step {op.step}"


def step_of(packed: bytes) -> str:
    """The step of a call, as text."""
    step = Descriptor.unpack(packed).step
    return "no step" if step == NO_STEP else f"step {step}"


def fingerprint(packed: bytes) -> int:
    """CRC-32C of a descriptor."""
    return _crc(packed[_SHAPE_BYTES:], _crc_of_shape(packed[:_SHAPE_BYTES])) ^ 0xFFFFFFFF


@lru_cache(maxsize=4096)
def _crc_of_shape(shape: bytes) -> int:
    return _crc(shape, 0xFFFFFFFF)


def _crc(data: bytes, crc: int) -> int:
    for byte in data:
        crc = _TABLE[(crc ^ byte) & 0xFF] ^ crc >> 8
    return crc


def _name(names: tuple[str, ...], number: int, what: str) -> str:
    return names[number] if number < len(names) else f"{what} {number}"


def _crc_table() -> tuple[int, ...]:
    table = []
    for byte in range(256):
        crc = byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
        table.append(crc)
    return tuple(table)


_TABLE = _crc_table()
