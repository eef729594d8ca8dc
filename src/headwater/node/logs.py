"""The lines that a node writes about itself: for people, or one JSON object each.

Owns `set_up_logs`. Whoever logs may add fields: log.info("…", extra={"fields": {"tenant": …}}).
"""

from __future__ import annotations

import json
import logging
import sys
import threading
from datetime import UTC, datetime

from headwater.core.plain import plain
from headwater.data.store import redact
from headwater.errors import ConfigError

FORMATS = ("text", "json")
LEVELS = ("debug", "info", "warning", "error")
MAX_TEXT = 4000  # characters of a line's text; what a stranger sends may turn up there


class Text(logging.Formatter):
    """Time, level, text, and the fields behind it. One line, but for a traceback, whatever it says."""

    def format(self, record: logging.LogRecord) -> str:
        fields = " ".join(f"{name}={plain(str(value))}" for name, value in _fields(record).items())
        line = f"{_time(record)} {record.levelname} {plain(_text(record))}" + (f" ({fields})" if fields else "")
        return "\n".join([line, *_traceback(self, record)])


class Json(logging.Formatter):
    """One JSON object a line: time, level, event, logger, the fields, and a traceback if there is one."""

    def format(self, record: logging.LogRecord) -> str:
        said = {"time": _time(record), "level": record.levelname.lower(), "event": _text(record),
                "logger": record.name, **_fields(record)}  # fmt: skip
        for trace in _traceback(self, record):
            said["traceback"] = trace
        return json.dumps(said, default=str)


def set_up_logs(style: str, level: str) -> None:
    """From now on, everything that this process logs goes to standard error in this form."""
    for name, value, allowed in (("--log-format", style, FORMATS), ("--log-level", level, LEVELS)):
        if value not in allowed:
            raise ConfigError(f"{name} is {value!r}; it must be one of {', '.join(allowed)}")
    handler = logging.StreamHandler()
    handler.setFormatter(Json() if style == "json" else Text())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    logging.captureWarnings(True)
    threading.excepthook = _in_a_thread
    sys.excepthook = _at_last


def _in_a_thread(args: threading.ExceptHookArgs) -> None:
    name = args.thread.name if args.thread is not None else "?"
    logging.getLogger(__name__).error("unexpected error in the thread %s", name, exc_info=args.exc_value)


def _at_last(kind: type[BaseException], error: BaseException, trace: object) -> None:
    logging.getLogger(__name__).critical("unexpected error", exc_info=error)


def _time(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _text(record: logging.LogRecord) -> str:
    text = redact(record.getMessage())
    return text if len(text) <= MAX_TEXT else f"{text[:MAX_TEXT]} …"


def _fields(record: logging.LogRecord) -> dict[str, object]:
    return getattr(record, "fields", {})


def _traceback(formatter: logging.Formatter, record: logging.LogRecord) -> list[str]:
    return [redact(formatter.formatException(record.exc_info))] if record.exc_info else []
