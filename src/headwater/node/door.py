"""Who is let in: every call's token is looked at before anything else of it is.

Owns `Door`, a Flight middleware, and `grant_of`, which tells a call what its token allows.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow.flight as flight

from headwater.core.access import Grant, identify
from headwater.errors import RefusedError
from headwater.node.tokens import OneToken, TokensFile

KEY = "access"  # of the middleware
_TELL_EVERY_S = 10.0  # strangers must not fill the log

log = logging.getLogger(__name__)


class Visit(flight.ServerMiddleware):
    """One call that was let in."""

    def __init__(self, grant: Grant) -> None:
        super().__init__()
        self.grant = grant


class Door(flight.ServerMiddlewareFactory):
    """Lets in calls with a token that is known."""

    def __init__(self, tokens: TokensFile | OneToken) -> None:
        super().__init__()
        self._tokens = tokens
        self._lock = threading.Lock()
        self._refused = 0  # since it was last told
        self._told = float("-inf")

    def start_call(self, info: flight.CallInfo, headers: Mapping[str, Sequence[Any]]) -> Visit:
        try:
            given = [value for name, values in headers.items() if name.lower() == "authorization" for value in values]
            return Visit(identify(self._tokens.grants(), [str(each) for each in given], time.time()))
        except RefusedError as error:
            self._tell(error)
            raise flight.FlightUnauthenticatedError(str(error)) from None
        except Exception:
            log.exception("unexpected error while a token was looked at")
            raise flight.FlightUnauthenticatedError("the token can't be looked at; the node's log has more") from None

    def _tell(self, error: RefusedError) -> None:
        with self._lock:
            self._refused += 1
            if time.monotonic() - self._told < _TELL_EVERY_S:
                return
            count, self._refused, self._told = self._refused, 0, time.monotonic()
        log.warning("%d calls refused at the door; the last: %s", count, error)


def grant_of(context: flight.ServerCallContext) -> Grant | None:
    """What the call's token allows; None on a node without tokens, where everyone may do everything."""
    visit = context.get_middleware(KEY)
    return None if visit is None else visit.grant
