"""What `headwater doctor` looks at, one file a part. Each check says what it found, and what to do about it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

OK, NOTE, WRONG = "ok", "note", "wrong"


@dataclass(frozen=True)
class Finding:
    """`verdict`: ok; a note is worth knowing; what is wrong keeps something from working. `do` is the way out."""

    part: str
    what: str
    verdict: str
    said: str
    do: str = ""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)
