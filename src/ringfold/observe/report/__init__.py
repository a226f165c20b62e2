"""The report of a finished run: one HTML page that needs nothing else.

Reading order: `page.py` writes the page from a summary, with the tables of `tables.py` and the style sheet
`report.css`; `charts.py` draws its charts with the elements and scales of `svg.py`.
"""

from importlib import metadata
from pathlib import Path

from ringfold.errors import UsageError
from ringfold.observe.report.page import page
from ringfold.observe.summary import Summary


def page_of(summary: Summary) -> str:
    """The page as text."""
    return page(summary, metadata.version("ringfold"))


def write_page(summary: Summary, path: Path) -> None:
    """Write the page. UsageError if the file cannot be written."""
    try:
        path.write_text(page_of(summary), encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}") from None
