"""Values of any type that the wires have, at and beyond the limits of every field.

`Values.of(type)` follows msgspec's description of the type. Most numbers are ones that mean something at this moment
(`hints`, by the name of the field), because a message with eleven absurd numbers is refused at the first.
"""

from collections.abc import Mapping, Sequence
from functools import cache
from random import Random
from typing import Any

import msgspec

INTS = (0, 1, 2, -1, 255, 65_535, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**53, 2**63 - 1, 2**63, 2**64 - 1, -(2**63))
FLOATS = (0.0, -0.0, 1.0, -1.0, 0.5, float("nan"), float("inf"), float("-inf"), 1e308, -1e308, 5e-324, 2.0**53)
TEXTS = ("", "x", "10.0.0.1", "::1", "no address", "a\nb\x1b[31m", "\0", "é" * 70, "w" * 5_000, "\U0010ffff")
BLOBS = (b"", b"x", bytes(8), bytes(16), bytes(32), b"\xff" * 32, b"\x5a" * 3_000)


class Values:
    """A supply of values that starts again with the same randomness."""

    def __init__(self, rng: Random, hints: Mapping[str, Sequence[Any]] = {}) -> None:
        self.rng, self.hints = rng, hints

    def of(self, kind: object, *, absurd: float = 0.15) -> Any:  # noqa: ANN401 - of the type that was asked for
        """A value of a type or union; each leaf is at a limit with the probability `absurd`."""
        return self._value(_described(kind), "", absurd)

    def _value(self, hint: Any, name: str, absurd: float) -> Any:  # noqa: ANN401
        rng = self.rng
        known = [value for value in self.hints.get(name, ()) if _fits(hint, value)]
        if known and rng.random() >= absurd:
            return rng.choice(known)
        match hint:
            case msgspec.inspect.IntType():
                return rng.choice(INTS) if rng.random() < 0.5 else rng.choice((0, 1, 1, 2, 3))
            case msgspec.inspect.FloatType():
                return rng.choice(FLOATS) if rng.random() < 0.7 else rng.uniform(0, 1e9)
            case msgspec.inspect.StrType():
                return rng.choice(TEXTS)
            case msgspec.inspect.BytesType():
                return rng.choice(BLOBS) if rng.random() < 0.8 else rng.randbytes(rng.randrange(40))
            case msgspec.inspect.BoolType():
                return rng.random() < 0.5
            case msgspec.inspect.NoneType():
                return None
            case msgspec.inspect.LiteralType(values):
                return rng.choice(values)
            case msgspec.inspect.ListType():
                items = [self._value(hint.item_type, name, absurd) for _ in range(rng.choice((0, 1, 1, 2, 3)))]
                return items * 2 if rng.random() < 0.1 else items
            case msgspec.inspect.VarTupleType():
                return tuple(self._value(hint.item_type, name, absurd) for _ in range(rng.choice((0, 1, 2, 2, 3, 17))))
            case msgspec.inspect.DictType():
                keys = [self._value(hint.key_type, "key", absurd) for _ in range(rng.choice((0, 1, 2)))]
                return {key: self._value(hint.value_type, name, absurd) for key in keys}
            case msgspec.inspect.TupleType():
                return tuple(self._value(item, name, absurd) for item in hint.item_types)
            case msgspec.inspect.UnionType():
                return self._value(rng.choice(hint.types), name, absurd)
            case msgspec.inspect.StructType():
                fields = {}
                for field in hint.fields:
                    if not field.required and rng.random() < 0.3:
                        continue
                    fields[field.name] = self._value(field.type, field.name, absurd)
                return hint.cls(**fields)
            case msgspec.inspect.AnyType():
                return None
        raise AssertionError(f"no values of {hint}")


@cache
def _described(kind: object) -> object:
    """Of a type that is known by name; to describe the messages takes longer than to step a machine."""
    return msgspec.inspect.type_info(kind)


_PLAIN = {
    msgspec.inspect.IntType: int,
    msgspec.inspect.StrType: str,
    msgspec.inspect.BytesType: bytes,
    msgspec.inspect.BoolType: bool,
    msgspec.inspect.ListType: list,
}


def _fits(hint: object, value: object) -> bool:
    """Whether a hint is of the field's type: two fields of one name may differ."""
    if isinstance(hint, msgspec.inspect.UnionType):
        return any(_fits(each, value) for each in hint.types)
    if isinstance(hint, msgspec.inspect.NoneType):
        return value is None
    if isinstance(hint, msgspec.inspect.LiteralType):
        return value in hint.values
    if isinstance(hint, msgspec.inspect.StructType):
        return isinstance(value, hint.cls)
    return type(value) is _PLAIN.get(type(hint))


def damaged(rng: Random, raw: bytes) -> bytes:
    """The same bytes with a few of them changed, cut, doubled or put elsewhere."""
    content = bytearray(raw)
    for _ in range(rng.choice((1, 1, 2, 4))):
        at = rng.randrange(len(content) + 1)
        match rng.randrange(6):
            case 0 if content:
                content[at % len(content)] ^= 1 << rng.randrange(8)
            case 1 if content:
                content[at % len(content)] = rng.choice((0, 1, 0x7F, 0x80, 0x91, 0xC1, 0xDD, 0xDF, 0xFE, 0xFF))
            case 2:
                del content[at:]
            case 3:
                content[at:at] = rng.randbytes(rng.randrange(1, 9))
            case 4:
                content[at:at] = bytes(content[at : at + 20]) * rng.choice((1, 3))
            case _:
                content[at:at] = rng.choice((b"\x91", b"[", b"\xff\xfe", b"\xdd\xff\xff\xff\xff")) * rng.choice(
                    (1, 2_000)
                )
    return bytes(content)
