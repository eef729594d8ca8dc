"""What a run left in files, as the page shows it: its report, its plan with alternatives, its timeline.

Owns `RunFiles`, which reads them again when they change. A file is known by what is in it, not by its name.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from headwater.core.form import shown
from headwater.core.plan import FORMAT as PLAN
from headwater.core.plan import Plan
from headwater.core.trace import from_perfetto, strips
from headwater.errors import ConfigError, HeadwaterError
from headwater.train.report import FORMAT as RUN_FORMAT
from headwater.train.report import PLANS, RUN
from headwater.train.report import VERSION as RUN_VERSION

MAX_BYTES = 128 << 20  # of JSON, which takes about eight times as much while it is read


class RunFiles:
    """A folder of a run, or files: a report, a plan, plans with their estimates, a timeline."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = list(paths)
        self._known: dict[Path, tuple[tuple[int, int], dict[str, Any]]] = {}
        for path in paths:
            if not path.exists():
                raise ConfigError(f"{path} is not there; name a run's folder, or a file that `headwater train`, "
                                  "`headwater plan --json` or --trace wrote")  # fmt: skip
            if path.is_dir() and not any((path / name).exists() for name in (RUN, PLANS)):
                raise ConfigError(f"{path} has neither {RUN} nor {PLANS}; `headwater train` writes them to its output "
                                  "folder, and job.report(FOLDER) in a script of your own")  # fmt: skip
        self.read()  # what can't be shown is found now

    @property
    def is_empty(self) -> bool:
        return not self._paths

    def version(self) -> str | None:
        """Another one whenever something has changed; None if there is nothing to show."""
        marks = [(str(path), *mark) for path in self._files() if (mark := _mark(path)) is not None]
        return str(hash(tuple(marks))) if self._paths else None

    def read(self) -> dict[str, Any]:
        """Everything, as of now. A file that is replaced meanwhile is read as it was before."""
        found: dict[str, Any] = {}
        for path in self._files():
            mark = _mark(path)
            before = self._known.get(path)
            if mark is None or (before is not None and before[0] == mark):
                found |= before[1] if before is not None else {}
                continue
            try:
                shown = _shown(path)
            except HeadwaterError:
                if before is None:
                    raise
                shown = before[1]
            self._known[path] = (mark, shown)
            found |= shown
        return found

    def _files(self) -> list[Path]:
        return [file for path in self._paths for file in ([path / PLANS, path / RUN] if path.is_dir() else [path])]


def _mark(path: Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size


def _shown(path: Path) -> dict[str, Any]:
    try:
        if path.stat().st_size > MAX_BYTES:
            raise ConfigError(f"{path} is too large to be shown ({path.stat().st_size / 1e6:,.0f} MB); ui.perfetto.dev "
                              "opens long timelines")  # fmt: skip
        data = json.loads(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"{path} can't be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not JSON: {str(error)[:200]}") from None
    if not isinstance(data, dict):
        raise ConfigError(f"{path} is no object of JSON")
    if data.get("format") == RUN_FORMAT:
        if data.get("version") != RUN_VERSION:
            raise ConfigError(f"{path} is of version {shown(data.get('version'))}; this Headwater reads {RUN_VERSION}")
        timeline = data.pop("timeline", None)
        return {"report": data, **({"timeline": timeline} if timeline else {})}
    if data.get("format") == PLAN:
        return {"plan": Plan.from_json(data).to_json()}
    if "estimates" in data and "plan" in data:
        Plan.from_json(data["plan"])
        return {"planned": data, "plan": data["plan"]}
    if "traceEvents" in data:
        return {"timeline": strips(from_perfetto(data))}
    raise ConfigError(f"{path} is none of what can be shown: a run's {RUN} or {PLANS}, a plan, what `headwater plan "
                      "--json` prints, or a timeline of --trace")  # fmt: skip
