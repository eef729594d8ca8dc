"""Every target, by name. A target is one line in the table of its file."""

from __future__ import annotations

from bench.fuzz import datasets, documents, files, models, pages, reducing, replies, requests, tables, texts, training
from bench.fuzz.target import Target

TARGETS: dict[str, Target] = {
    target.name: target
    for part in (requests, documents, datasets, texts, models, replies, training, tables, reducing, pages, files)
    for target in part.TARGETS
}  # fmt: skip
