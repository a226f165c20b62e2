"""Sizes of buffers as people write them: `4K` on a command line and in targets, `4 KiB` in a table."""

import re

import typer


def size_bytes(text: str) -> int:
    """`4K`, `1M`, `2G` or plain bytes."""
    found = re.fullmatch(r"(\d+)([KMG]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    if found is None:
        raise typer.BadParameter(f"{text!r} is not a size such as 4K, 1M or 512")
    return int(found[1]) << {"": 0, "K": 10, "M": 20, "G": 30}[found[2].upper()]


def size_text(value: object) -> str:
    """`4 KiB`, `64 MiB`, or plain bytes where no unit fits."""
    assert isinstance(value, int)
    for unit, shift in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if value >= 1 << shift and value % (1 << shift) == 0:
            return f"{value >> shift} {unit}"
    return f"{value} B"
