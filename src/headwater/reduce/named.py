"""The aggregator that a node's operator has named, for the sessions of trainers there (docs/partition.md).

Owns `NamedAggregator`. `node` and `reduce` don't import each other: `headwater serve` gives the one to the other.
"""

from __future__ import annotations

from pathlib import Path

from headwater.errors import ConfigError
from headwater.reduce.control import KEY_VARIABLE, address, key_bytes, read_keys
from headwater.reduce.joining import Ticket, join
from headwater.reduce.reducer import Reducer

# A sum waits for the slowest node's backward pass, of which the trainer knows more than whoever waits for it here.
TIMEOUT_S = 3600.0


class NamedAggregator:
    """Where it is, and a key for it."""

    def __init__(self, where: str, key_file: Path | None) -> None:
        """ConfigError for an address that is none, or a key that is missing or that others can read."""
        self._text, self._where = where, address(where, "--reduce")
        if key_file is None:
            self._key = key_bytes(None)
        elif not key_file.exists():
            raise ConfigError(f"the key file {key_file} (--reduce-key-file) is not there; copy the one that `headwater "
                              f"reduce --key-file` made, or set {KEY_VARIABLE}")  # fmt: skip
        else:
            self._key = read_keys(key_file)[0]

    def join(self, job: str, session: str, rank: int, num_workers: int, within_s: float) -> Reducer:
        """A place in a job there, once all others have one; the errors of `Reducer`."""
        ticket = Ticket(job, session, rank, num_workers, key=self._key)
        return Reducer.of(self._text, join(self._where, ticket, within_s), rank, TIMEOUT_S)
