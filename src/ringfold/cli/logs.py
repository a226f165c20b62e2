"""Logging of commands: text for people, JSON lines for programs, always to standard error."""

import json
import logging
import sys
from datetime import UTC, datetime

import msgspec

from ringfold.wire.notices import Notice


class JsonLines(logging.Formatter):
    """One JSON object per record. A logged notice (`log.info("%s", notice)`) adds its own fields."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="microseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if (notice := _notice(record)) is not None:
            line |= msgspec.to_builtins(notice)
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def _notice(record: logging.LogRecord) -> Notice | None:
    candidates = (record.msg, *record.args) if isinstance(record.args, tuple) else (record.msg,)
    return next((thing for thing in candidates if isinstance(thing, Notice)), None)


def start(level: str, *, as_json: bool) -> None:
    """Send the log of Ringfold to standard error. A second call replaces the first."""
    handler: logging.Handler
    if as_json:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(JsonLines())
    elif sys.stderr.isatty():
        # Imported only here: a master that restarts should not load what it does not use.
        from rich.console import Console
        from rich.logging import RichHandler

        handler = RichHandler(console=Console(stderr=True), show_path=False, log_time_format="%H:%M:%S")
    else:
        # A log file gets whole lines: the rich handler would break them at the width of a terminal.
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logger = logging.getLogger("ringfold")
    logger.handlers[:] = [handler]
    logger.setLevel(level.upper())
    logger.propagate = False
