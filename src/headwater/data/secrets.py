"""Secrets of this process: how they are kept out of what is logged, sent and shown.

Owns `redact`, which also knows the secrets in the environment, and `Redacting`, which every log line passes. The
environment is read here alone.
"""

from __future__ import annotations

import logging
import os
import re

from headwater.core import redact as core

# Those that a store's client reads; not the names of files, nor AWS_ACCESS_KEY_ID, which is no secret.
_SECRET = re.compile(
    r"(?:AWS|AZURE|GOOGLE|GCP)_\w*(?:SECRET|TOKEN|PASSWORD|SAS|KEY)|AWS_SECRET_ACCESS_KEY|HEADWATER_TOKEN"
)
_SHORTEST = 6  # a shorter value would turn up in harmless words


def redact(text: str) -> str:
    """The text without anything that looks like a secret, and without the values of those in the environment."""
    for name, value in os.environ.items():
        if len(value) >= _SHORTEST and _SECRET.fullmatch(name) and value in text:
            text = text.replace(value, "***")
    return core.redact(text)


class Redacting(logging.Formatter):
    """Another formatter's lines, tracebacks included, without secrets."""

    def __init__(self, inner: logging.Formatter) -> None:
        super().__init__()
        self._inner = inner

    def format(self, record: logging.LogRecord) -> str:
        return redact(self._inner.format(record))


def keep_out_of_logs() -> None:
    """From now on, what the process logs passes `redact`; call it once handlers are set up, if there are any."""
    for handler in (*logging.getLogger().handlers, logging.lastResort):
        if handler is not None and not isinstance(handler.formatter, Redacting):
            handler.setFormatter(Redacting(handler.formatter or logging.Formatter()))
