"""Amounts of bytes as people write them. Owns `num_bytes`."""

from __future__ import annotations

import re

from headwater.errors import ConfigError

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
          "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}  # fmt: skip
_MOST = 1e18  # beyond any memory or disk, whatever the unit
_AMOUNT = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)")


def num_bytes(text: str, what: str) -> int:
    """The bytes that "10GB", "512 MiB" or "0" stand for; `what` names it in the error."""
    found = _AMOUNT.fullmatch(text.strip())
    if found is None or found[2].upper() not in _UNITS or not (amount := float(found[1])) < _MOST:
        raise ConfigError(f"{what} is {text[:40]!r}; it must be a number of bytes, such as 10GB, 512MiB or 0")
    return int(amount * _UNITS[found[2].upper()])
