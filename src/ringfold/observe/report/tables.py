"""Pieces of HTML: escaped text, tables with captions, figures. Pure."""

from collections.abc import Iterable, Sequence
from html import escape

MAX_ROWS = 256
"""Of a table."""
LONG, FIRST = 24, 16
"""A table with more rows shows its first ones; the others are opened by the reader."""


def text(value: object) -> str:
    """Text of others, safe in elements and attributes."""
    return escape(str(value), quote=True)


def table(
    caption: str, columns: Sequence[str], rows: Sequence[Sequence[str]], kinds: str = "", *, cards: bool = False
) -> str:
    """A table of cells that are HTML already. `kinds` has a letter for each column: n (a number), w (it wraps), k (one
    line), or a space. With `cards` each row is a block on a narrow screen. Of a long table the rest can be opened."""
    shown = rows[:MAX_ROWS]
    more = f" The first {len(shown)} of {len(rows):,} rows." if len(rows) > len(shown) else ""
    if len(shown) <= LONG or cards:
        return _table(caption + more, columns, shown, kinds, cards=cards)
    first, rest = shown[:FIRST], shown[FIRST:]
    return (
        _table(caption + more, columns, first, kinds, cards=cards)
        + f"<details><summary>{len(rest)} more rows</summary>"
        + _table(f"The rows after the first {FIRST}.", columns, rest, kinds, cards=cards)
        + "</details>"
    )


def _table(caption: str, columns: Sequence[str], rows: Sequence[Sequence[str]], kinds: str, *, cards: bool) -> str:
    kinds = kinds.ljust(len(columns))
    head = "".join(
        f'<th scope="col"{_class("n" if kind == "n" else "")}>{text(column)}</th>'
        for column, kind in zip(columns, kinds, strict=True)
    )
    body = "".join(
        "<tr>"
        + "".join(
            f"<td{_class(kind.strip())}{_heading(column) if cards else ''}>{cell}</td>"
            for cell, column, kind in zip(row, columns, kinds, strict=True)
        )
        + "</tr>"
        for row in rows
    )
    return (
        f'<div class="scroll"><table{" class=cards" if cards else ""}>'
        f"<caption><span>{text(caption)}</span></caption>"
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _class(kind: str) -> str:
    return f' class="{kind}"' if kind else ""


def _heading(column: str) -> str:
    return f' data-h="{text(column)}"' if column and column != "what happened" else ""


def figures(entries: Iterable[tuple[str, str, str]]) -> str:
    return (
        '<dl class="figures">'
        + "".join(
            f"<div><dt>{text(name)}</dt><dd>{text(value)}<small>{text(detail)}</small></dd></div>"
            for name, value, detail in entries
        )
        + "</dl>"
    )
