"""Texts that others wrote, as a terminal or a log may show them. Owns `plain`."""

from __future__ import annotations

from typing import Any


def plain(text: str) -> str:
    """Without line ends and other control characters, which could pass for another line or steer a terminal."""
    return "".join(letter if letter.isprintable() else letter.encode("unicode_escape").decode() for letter in text)


def all_plain(said: Any) -> Any:
    """The same of every text in what JSON holds, names of fields left as they are."""
    if isinstance(said, str):
        return plain(said)
    if isinstance(said, list | tuple):
        return [all_plain(each) for each in said]
    if isinstance(said, dict):
        return {name: all_plain(each) for name, each in said.items()}
    return said
