"""Numbers as Prometheus reads them: its text format, version 0.0.4.

Owns `Metric`, `Sample` and `exposition`. Written out here rather than by a library, because the numbers are counted
elsewhere already and the format is a page; the tests have Prometheus' own parser read it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
KINDS = ("counter", "gauge")
_NAME = re.compile(r"[a-z_][a-z0-9_]*")


@dataclass(frozen=True)
class Metric:
    """A number that is watched over time. A counter only grows, until the node is started again."""

    name: str
    kind: str
    meaning: str
    labels: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        assert _NAME.fullmatch(self.name), self.name
        assert self.kind in KINDS
        assert (self.kind == "counter") == self.name.endswith("_total"), self.name
        assert all(_NAME.fullmatch(label) for label in self.labels)


@dataclass(frozen=True)
class Sample:
    """A metric's value for these values of its labels."""

    metric: str
    value: float
    labels: tuple[str, ...] = ()


def exposition(metrics: Sequence[Metric], samples: Iterable[Sample]) -> str:
    """All samples, under what their metrics mean; a metric without samples is still named."""
    by_metric: dict[str, list[Sample]] = {metric.name: [] for metric in metrics}
    for sample in samples:
        by_metric[sample.metric].append(sample)
    lines = []
    for metric in metrics:
        lines += [f"# HELP {metric.name} {_escaped(metric.meaning)}", f"# TYPE {metric.name} {metric.kind}"]
        for sample in by_metric[metric.name]:
            pairs = zip(metric.labels, sample.labels, strict=True)
            labels = ",".join(f'{name}="{_quoted(value)}"' for name, value in pairs)
            lines.append(f"{metric.name}{f'{{{labels}}}' if labels else ''} {_number(sample.value)}")
    return "\n".join(lines) + "\n"


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace("\n", r"\n")


def _quoted(text: str) -> str:
    return _escaped(text).replace('"', r"\"").encode(errors="replace").decode()  # a lone surrogate can't be sent


def _number(value: float) -> str:
    return str(int(value)) if value == int(value) else repr(float(value))
