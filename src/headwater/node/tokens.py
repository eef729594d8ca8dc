"""The tokens file of a running node: read at the start, and again whenever it changes.

Owns `TokensFile`, and `OneToken` for a node that has a single user. A version of the file that can't be
used is refused with a line in the log, and the one before stays in force.
"""

from __future__ import annotations

import logging
import os
import threading
import tomllib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from headwater.core.access import Grant, read_grants
from headwater.data.store import full_url
from headwater.errors import ConfigError
from headwater.node.roots import is_below

MAX_BYTES = 16 << 20

log = logging.getLogger(__name__)


class OneToken:
    """That of whoever started this node, who alone was told it."""

    def __init__(self, grant: Grant) -> None:
        self._grants = (grant,)

    def grants(self) -> tuple[Grant, ...]:
        return self._grants


class TokensFile:
    """The grants in a file. Roots in it must lie below those of the node."""

    def __init__(self, path: Path, roots: Sequence[str]) -> None:
        self._path = path
        self._roots = tuple(roots)
        self._lock = threading.Lock()
        self._state = self._look()
        self._grants = self._read()

    def grants(self) -> tuple[Grant, ...]:
        """Those in force now; looks whether the file has changed."""
        with self._lock:
            state = self._look()
            if state != self._state:
                self._state = state
                try:
                    self._grants = self._read()
                except ConfigError as error:
                    log.warning("the tokens file has changed, and the new one is not used; the one before stays in "
                                "force: %s", error)  # fmt: skip
                else:
                    log.warning("the tokens file has changed: %d tokens are in force now", len(self._grants))
            return self._grants

    def _look(self) -> tuple[int, ...] | None:
        try:
            found = os.stat(self._path)
        except OSError:
            return None
        return found.st_ino, found.st_size, found.st_mtime_ns

    def _read(self) -> tuple[Grant, ...]:
        try:
            with self._path.open("rb") as file:
                text = file.read(MAX_BYTES + 1)
            if len(text) > MAX_BYTES:
                raise ConfigError(f"the tokens file {self._path} has more than {MAX_BYTES:,} bytes")
            data = tomllib.loads(text.decode())
        except OSError as error:
            raise ConfigError(f"the tokens file {self._path} can't be read: {error.strerror}; `headwater token TENANT "
                              "--to FILE` begins one") from None  # fmt: skip
        except (ValueError, RecursionError) as error:  # a number of many digits is a plain ValueError
            raise ConfigError(f"the tokens file {self._path} is not TOML: {str(error)[:500]}") from None
        return tuple(self._placed(grant) for grant in read_grants(data, str(self._path)))

    def _placed(self, grant: Grant) -> Grant:
        """With roots in full; a root that the node does not serve is a slip of the pen."""
        roots = tuple(full_url(root) for root in grant.roots)
        for root in roots:
            if not any(is_below(root, served) for served in self._roots):
                raise ConfigError(f"the tokens file {self._path}: the root {root} of {grant.tenant} is not below "
                                  f"what this node serves ({', '.join(self._roots)})")  # fmt: skip
        return replace(grant, roots=roots)
