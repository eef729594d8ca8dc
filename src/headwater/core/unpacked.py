"""How much memory a JSON text can turn into, found in one cheap pass, without unpacking it.

Owns `most_values` and `most_bytes`. Of 48 MB of `[[],[],[],…` become 16 million lists, more than a gigabyte: a limit on
bytes alone is none on memory. A text is refused by these before it is read.

What holds (tests/core/test_unpacked.py): no text has more values, and none takes more bytes.
"""

from __future__ import annotations

VALUE_BYTES = 128  # that CPython takes for one at most, its place in what holds it included; texts are longer


def most_values(text: bytes) -> int:
    """Values in it at most, keys included: each but the first stands behind one of these. Those in texts count, too."""
    return 1 + sum(text.count(mark) for mark in (b",", b":", b"[", b"{"))


def most_bytes(text: bytes) -> int:
    """What it takes in memory at most: its values, and its texts with four bytes a letter."""
    return VALUE_BYTES * most_values(text) + 4 * len(text)
