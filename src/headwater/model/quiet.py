"""Silence for the exporters: they warn, log and print about their own insides.

Owns `quiet`. Loggers other than the exporters' and output from other threads pass through, so a progress bar or
a server in the same process goes on undisturbed. Imports nothing of ours.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import warnings
from collections.abc import Iterator
from typing import Any

CHATTY = ("torch", "onnx", "onnxscript", "onnx_ir")


class _DeafTo:
    """A stream that drops what one thread writes and passes everything else on."""

    def __init__(self, stream: Any, thread: int) -> None:
        self._stream = stream
        self._thread = thread

    def write(self, text: str) -> int:
        if threading.get_ident() == self._thread:
            return len(text)
        return int(self._stream.write(text))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _chatty_loggers() -> list[logging.Logger]:
    loggers = list(logging.Logger.manager.loggerDict.items())
    return [
        logger
        for name, logger in loggers
        if isinstance(logger, logging.Logger) and not logger.disabled and name.split(".")[0] in CHATTY
    ]


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Drop the warnings, log lines and prints of the exporters that this thread runs."""
    loggers = _chatty_loggers()
    thread = threading.get_ident()
    with (
        warnings.catch_warnings(),
        contextlib.redirect_stdout(_DeafTo(sys.stdout, thread)),
        contextlib.redirect_stderr(_DeafTo(sys.stderr, thread)),
    ):
        warnings.simplefilter("ignore")
        for logger in loggers:
            logger.disabled = True
        try:
            yield
        finally:
            for logger in loggers:
                logger.disabled = False
