"""Small pictures as SVG text: escaped elements, scales and ticks. Pure.

Colours come from classes and CSS variables of the page, so a picture follows its light or dark theme.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from math import ceil, floor, log10

from ringfold.observe.summary.wording import duration_text

_TIME_STEPS_S = (
    1e-6, 2e-6, 5e-6, 1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5,
    10, 15, 30, 60, 120, 300, 600, 900, 1_800, 3_600, 7_200, 10_800, 21_600, 43_200, 86_400, 172_800, 432_000, 864_000,
)  # fmt: skip


class Svg:
    """A picture that is written element by element. All text is escaped here."""

    def __init__(self, width: float, height: float, sentence: str) -> None:
        """`sentence` says what the picture shows, for those who do not see it."""
        self._parts = [
            f'<svg viewBox="0 0 {number(width)} {number(height)}" width="{number(width)}" height="{number(height)}" '
            f'role="img" aria-label="{escape(sentence)}">'
        ]

    def rect(
        self, x: float, y: float, width: float, height: float, kind: str, title: str = "", round_: float = 0
    ) -> None:
        corner = f' rx="{number(round_)}"' if round_ else ""
        self._add(
            f'<rect x="{number(x)}" y="{number(y)}" width="{number(max(0.0, width))}" '
            f'height="{number(max(0.0, height))}"{corner} class="{kind}"',
            "rect",
            title,
        )

    def line(self, x1: float, y1: float, x2: float, y2: float, kind: str, title: str = "") -> None:
        points = f'x1="{number(x1)}" y1="{number(y1)}" x2="{number(x2)}" y2="{number(y2)}"'
        self._add(f'<line {points} class="{kind}"', "line", title)

    def circle(self, x: float, y: float, radius: float, kind: str, title: str = "") -> None:
        self._add(f'<circle cx="{number(x)}" cy="{number(y)}" r="{number(radius)}" class="{kind}"', "circle", title)

    def path(self, points: Sequence[tuple[float, float]], kind: str, *, closed: bool = False) -> None:
        """Straight lines through points."""
        if points:
            steps = "L".join(f"{number(x)},{number(y)}" for x, y in points)
            self._parts.append(f'<path d="M{steps}{"Z" if closed else ""}" class="{kind}"/>')

    def text(self, x: float, y: float, text: str, kind: str = "", anchor: str = "start", title: str = "") -> None:
        place = f' text-anchor="{anchor}"' if anchor != "start" else ""
        named = f' class="{kind}"' if kind else ""
        tip = f"<title>{escape(title)}</title>" if title else ""
        self._parts.append(f'<text x="{number(x)}" y="{number(y)}"{place}{named}>{tip}{escape(text)}</text>')

    def done(self) -> str:
        return "".join([*self._parts, "</svg>"])

    def _add(self, head: str, name: str, title: str) -> None:
        self._parts.append(f"{head}><title>{escape(title)}</title></{name}>" if title else f"{head}/>")


def number(value: float) -> str:
    """A coordinate: a tenth of a pixel is enough."""
    return f"{value:.1f}".removesuffix(".0")


@dataclass(frozen=True, slots=True)
class Scale:
    """Maps values to pixels, linearly or by their logarithm."""

    low: float
    high: float
    first: float
    last: float
    is_log: bool = False

    def __call__(self, value: float) -> float:
        low, high = self.low, self.high
        if self.is_log:
            value, low, high = log10(max(value, low)), log10(low), log10(high)
        share = (value - low) / (high - low) if high > low else 0.5
        return self.first + min(1.0, max(0.0, share)) * (self.last - self.first)


def ticks(low: float, high: float, most: int) -> list[float]:
    """Round values between two others: at most so many, steps of 1, 2 or 5."""
    if high <= low:
        return [low]
    raw = (high - low) / max(1, most)
    power = 10.0 ** floor(log10(raw))
    step = next(step * power for step in (1, 2, 5, 10) if step * power >= raw * 0.999)
    first = ceil(low / step - 1e-9)
    return [round(place * step, 12) for place in range(first, floor(high / step + 1e-9) + 1)]


def log_ticks(low: float, high: float, most: int) -> list[float]:
    """Powers of ten between two values, and 2 and 5 times them where there is room."""
    powers = range(floor(log10(low)), ceil(log10(high)) + 1)
    for steps in ((1, 2, 5), (1, 3), (1,)):
        found = [step * 10.0**power for power in powers for step in steps if low <= step * 10.0**power <= high * 1.0001]
        if len(found) <= most:
            return found
    return found[:: ceil(len(found) / most)]


def time_ticks(seconds: float, most: int) -> list[float]:
    """Round times from 0 on."""
    step = next((step for step in _TIME_STEPS_S if seconds / step <= most), seconds or 1.0)
    return [place * step for place in range(floor(seconds / step + 1e-9) + 1)]


def time_label(seconds: float) -> str:
    """A tick of the time axis: 0, 30 s, 5 min, 1 h 30 min."""
    if seconds == 0:
        return "0"
    return duration_text(seconds).removesuffix(" 0 s").removesuffix(" 0 min").removesuffix(" 0 h")
