"""What a scenario hands back: tables, each with what the paper has beside what the simulator says.

Owns `Page`, and how a scenario's parameters are read. Nothing in a page was measured here unless its line says so.
"""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headwater.errors import ConfigError
from headwater.sim.layers import Layer, read_layers

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "examples" / "scenarios"
RESULTS = ROOT / "docs" / "results"
NAMES = {
    "ssd-off": "ssdoff",
    "partitioned": "partitioned",
    "hapi": "hapi",
    "ddlp": "ddlp",
    "in-network": "innetwork",
    "fleet": "fleet",
}


@dataclass
class Page:
    """Tables under their titles."""

    name: str
    tables: list[tuple[str, list[str], list[list[Any]]]] = field(default_factory=list)

    def table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        self.tables.append((title, list(columns), [list(row) for row in rows]))
        self.keep()  # a long scenario that is broken off leaves what it has

    def text(self) -> str:
        lines = [f"# Scenario {self.name}", "",
                 f"Made by `python -m bench.scenarios {self.name}` from `examples/scenarios/{self.name}.toml`. What is "
                 "ours is simulated; what is the paper's is said so.", ""]  # fmt: skip
        for title, columns, rows in self.tables:
            lines += [f"## {title}", "", "| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
            lines += ["| " + " | ".join(_plain(each) for each in row) + " |" for row in rows] + [""]
        return "\n".join(lines).rstrip() + "\n"

    def keep(self) -> Path:
        path = RESULTS / f"scenario-{self.name}.md"
        path.write_text(self.text())
        return path.relative_to(ROOT)


def parameters(name: str) -> dict[str, Any]:
    return tomllib.loads((FOLDER / f"{name}.toml").read_text())


def layers(model: str) -> tuple[Layer, ...]:
    faults: list[str] = []
    found = read_layers(FOLDER / "layers" / f"{model}.csv", faults)
    if faults:
        raise ConfigError("; ".join(faults))
    return found


def _plain(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return str(value)
