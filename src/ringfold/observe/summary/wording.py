"""Figures as text: durations, sizes, counts, lists. Pure."""

from collections.abc import Sequence

MAX_LISTED = 12


def duration_text(seconds: float) -> str:
    """Three digits at most: 0 s, 12 us, 4.2 ms, 3.1 s, 12 min 5 s, 3 h 20 min, 2 d 4 h."""
    if abs(seconds) < 0.5e-9:
        return "0 s"
    if seconds < 0:
        return f"-{duration_text(-seconds)}"
    if seconds < 0.9995e-3:
        return f"{seconds * 1e6:.3g} us"
    if seconds < 0.9995:
        return f"{seconds * 1e3:.3g} ms"
    if seconds < 59.95:
        return f"{seconds:.3g} s"
    whole = round(seconds)
    if whole < 3_600:
        return f"{whole // 60} min {whole % 60} s"
    if whole < 86_400:
        return f"{whole // 3_600} h {whole % 3_600 // 60} min"
    return f"{whole // 86_400} d {whole % 86_400 // 3_600} h"


def size_text(count: float) -> str:
    """A number of bytes: 512 B, 1.5 KiB, 64 MiB, 1.2 TiB."""
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if size < 999.5:
            return f"{size:.3g} {unit}"
        size /= 1024
    return f"{size:,.0f} PiB"


def rate_text(bytes_per_s: float) -> str:
    """As networks are sold: 940 Mbit/s, 9.4 Gbit/s."""
    bits = bytes_per_s * 8
    for unit in ("bit/s", "kbit/s", "Mbit/s"):
        if bits < 999.5:
            return f"{bits:.3g} {unit}"
        bits /= 1000
    return f"{bits:.3g} Gbit/s"


def number_text(value: float) -> str:
    """A figure of the program: five digits at most."""
    if value != value or value in (float("inf"), float("-inf")):
        return str(value)
    if abs(value) >= 99_999.5 and value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    return f"{value:.4g}" if value == 0 or abs(value) < 1e4 else f"{value:,.0f}" if abs(value) < 1e9 else f"{value:.3e}"


def times(count: int, noun: str, plural: str = "") -> str:
    """1 peer, 2 peers, 1,500 steps."""
    return f"{count:,} {noun if count == 1 else plural or f'{noun}s'}"


def join_words(words: Sequence[str]) -> str:
    """a, b and c; of many the first ones."""
    if len(words) > MAX_LISTED:
        return f"{', '.join(words[:MAX_LISTED])} and {len(words) - MAX_LISTED} others"
    if len(words) < 2:
        return "".join(words)
    return f"{', '.join(words[:-1])} and {words[-1]}"


def percent(share: float) -> str:
    return f"{share * 100:.0f} %" if share >= 0.095 or share == 0 else f"{share * 100:.2g} %"
