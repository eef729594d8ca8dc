"""What a benchmark hands back, and how it is shown and kept.

Owns `Result`. Every number in it was measured in the run that made it; nothing here is computed from constants.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "results"


@dataclass
class Result:
    """One run of one benchmark."""

    name: str
    quick: bool
    numbers: dict[str, float]  # the keys of the contract
    goals: dict[str, str]  # key → the goal in words, such as "≥ 0.85"
    cases: list[dict[str, Any]]  # one a measured point
    bound: str  # what the numbers could not exceed, and why
    limited_by: str  # what held them there
    notes: list[str] = field(default_factory=list)
    draw: Callable[[Path], None] | None = None

    def to_json(self) -> str:
        return json.dumps({"name": self.name, "quick": self.quick, "cases": self.cases, **self.numbers})

    def show(self, console: Console) -> None:
        """For a person: cases, numbers against their goals, the bound, what limited."""
        console.print(self._cases_table(console.width))
        table = Table(
            title=f"{self.name}{' (quick)' if self.quick else ''}: measured against the goal", title_justify="left"
        )
        for title in ("number", "measured", "goal"):
            table.add_column(title, justify="left" if title == "number" else "right")
        for key, value in self.numbers.items():
            table.add_row(key, _plain(value), self.goals.get(key, "report"))
        console.print(table)
        console.print(f"bound: {self.bound}")
        console.print(f"limited by: {self.limited_by}")
        for note in self.notes:
            console.print(f"note: {note}")

    def keep(self) -> list[Path]:
        """Write the result, and its picture, where the documents cite them from."""
        FOLDER.mkdir(parents=True, exist_ok=True)
        command = f"python -m bench {self.name}{' --quick' if self.quick else ''}"
        stem = self._stem
        lines = [
            f"# {self.name}",
            "",
            f"Made by `{command}` on {date.today()}{_commit()}, Python {platform.python_version()}, {machine()}. "
            "Measured.",
            "",
        ]
        lines += ["| number | measured | goal |", "|---|---|---|"]
        lines += [
            f"| `{key}` | {_plain(value)} | {self.goals.get(key, 'report')} |" for key, value in self.numbers.items()
        ]
        lines += ["", f"Bound: {self.bound}", "", f"Limited by: {self.limited_by}", ""]
        lines += [f"- {note}" for note in self.notes]
        keys = list(dict.fromkeys(key for case in self.cases for key in case))
        lines += ["", "| " + " | ".join(keys) + " |", "|" + "---|" * len(keys)]
        lines += ["| " + " | ".join(_plain(case.get(key, "")) for key in keys) + " |" for case in self.cases]
        written = [FOLDER / f"{stem}.md", FOLDER / f"{stem}.json"]
        if self.draw is not None:
            picture = FOLDER / f"{stem}.png"
            self.draw(picture)
            written.append(picture)
            lines[3:3] = ["", f"![{self.name}]({picture.name})"]
        written[0].write_text("\n".join(lines) + "\n")
        written[1].write_text(self.to_json() + "\n")
        return written

    def _cases_table(self, width: int) -> Table:
        """As many columns as there is room for; the others are in the file."""
        keys = list(dict.fromkeys(key for case in self.cases for key in case))
        texts = {key: [_plain(case.get(key, "")) for case in self.cases] for key in keys}
        needed = {key: 3 + max(map(len, [key, *texts[key]])) for key in keys}
        shown = [
            key for number, key in enumerate(keys) if 1 + sum(needed[each] for each in keys[: number + 1]) <= width
        ]
        hidden = [key for key in keys if key not in shown]
        more = f"in docs/results/{self._stem}.md: {', '.join(hidden)}" if hidden else None
        table = Table(title=f"{self.name}: every measured point", caption=more, title_justify="left",
                      caption_justify="left")  # fmt: skip
        for key in shown:
            table.add_column(key, justify="right")
        for row in zip(*(texts[key] for key in shown), strict=True):
            table.add_row(*row)
        return table

    @property
    def _stem(self) -> str:
        return f"{self.name}-quick" if self.quick else self.name


def machine() -> str:
    """The machine in words that say what matters and no name."""
    pages = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return f"{os.cpu_count()} cores ({_cpu()}), {pages / 2**30:.0f} GiB, {platform.machine()}"


def _cpu() -> str:
    """Its kind, and what it has for small numbers; engines differ by that more than by anything else."""
    try:
        said = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor() or "unknown"
    lines = dict(line.partition(":")[::2] for line in said.splitlines() if ":" in line)
    about = {name.strip(): value.strip() for name, value in lines.items()}
    flags = set(about.get("flags", "").split())
    has = [title for title, wanted in (("AVX-512", {"avx512f"}), ("VNNI", {"avx512_vnni", "avx_vnni"}),
                                       ("AMX", {"amx_int8"})) if wanted & flags]  # fmt: skip
    return ", ".join([about.get("model name", "unknown"), *has])


def _commit() -> str:
    """The commit that ran, where it can be told; with a mark if files differed from it."""
    try:
        found = subprocess.run(["git", "describe", "--always", "--dirty=, changed"], cwd=FOLDER.parent, text=True,
                               capture_output=True, check=True)  # fmt: skip
    except (OSError, subprocess.CalledProcessError):
        return ""
    return f" at {found.stdout.strip()}"


def _plain(value: Any) -> str:
    if isinstance(value, bool | str):
        return str(value)
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:,.4g}" if abs(value) < 1e5 else f"{value:,.0f}"
