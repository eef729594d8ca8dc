"""The pages, and the blocks of code in them.

A block is a fence (```python), or lines indented by four spaces behind an empty line. What can't be run in a test says
so in a comment right before it, with the reason: <!-- not run here: it needs root -->.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_MARK = re.compile(r"<!-- not run here: (.+?) -->")
_FENCE = re.compile(r"^(\s*)(```+|~~~+)\s*(\w*)")


@dataclass(frozen=True)
class Block:
    page: str  # from the repository's root
    line: int  # of its first line of code
    kind: str  # python, toml, …; empty for one without a name
    text: str
    why_not: str  # the reason for not running it, if there is one

    @property
    def name(self) -> str:
        return f"{self.page}:{self.line}"


def pages() -> list[Path]:
    """What people read, in the order of their names; what was decided and what was measured is history."""
    found = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return [page for page in found if page.relative_to(ROOT).parts[1:2] not in (("decisions",), ("results",))]


def blocks_of(page: Path) -> Iterator[Block]:
    lines, where = page.read_text().split("\n"), str(page.relative_to(ROOT))
    place = 0
    while place < len(lines):
        if fence := _FENCE.match(lines[place]):
            stop = next(each for each in range(place + 1, len(lines)) if lines[each].strip().startswith(fence[2]))
            indent = len(fence[1])
            text = "\n".join(line[indent:] for line in lines[place + 1 : stop])
            yield Block(where, place + 2, fence[3], text, _mark_before(lines, place))
            place = stop + 1
        elif lines[place].startswith("    ") and (not place or not lines[place - 1].strip()):
            stop = place
            while stop < len(lines) and (lines[stop].startswith("    ") or not lines[stop].strip()):
                stop += 1
            text = "\n".join(line[4:] for line in lines[place:stop]).rstrip()
            yield Block(where, place + 1, "", text, _mark_before(lines, place))
            place = stop
        else:
            place += 1


def all_blocks() -> list[Block]:
    return [block for page in pages() for block in blocks_of(page)]


def prose_of(page: Path) -> str:
    """A page without its blocks."""
    lines = page.read_text().split("\n")
    for block in blocks_of(page):
        for place in range(block.line - 1, block.line - 1 + block.text.count("\n") + 1):
            lines[place] = ""
    return "\n".join(lines)


def _mark_before(lines: list[str], place: int) -> str:
    before = next((line for line in reversed(lines[:place]) if line.strip()), "")
    mark = _MARK.search(before)
    return mark[1] if mark else ""
