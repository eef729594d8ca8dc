"""Pages that promise every field of a file have them all: the job file, the rig file, the plan, the tokens file."""

from __future__ import annotations

import re
from dataclasses import fields

import pytest
from tests.docs.blocks import ROOT

from headwater.cli import jobfile
from headwater.core import access, plan
from headwater.data import transforms
from headwater.sim import rigfile


def words_of(page):
    return set(re.findall(r"\w+", (ROOT / "docs" / page).read_text()))


@pytest.mark.parametrize("part", jobfile._PARTS)
def test_every_field_of_a_job_file_is_told(part):
    named = words_of("job-file.md")
    # `trainer_…` stands for those that are named after the node's
    missing = [each.name for each in fields(jobfile._PARTS[part]) if each.name not in named
               and f"{each.name.split('_')[0]}_" not in named]  # fmt: skip
    assert not missing


def test_every_step_of_a_job_file_is_told_with_its_fields():
    page = (ROOT / "docs" / "job-file.md").read_text()
    for name, step in transforms.OPS.items():
        if name == "Tokenize":  # made by `Tokenize.of`, as text.md tells
            continue
        row = next((line for line in page.split("\n") if line.startswith("|") and f"`{name}`" in line), "")
        assert row, name
        assert not [each.name for each in fields(step) if f"`{each.name}" not in row], name


def test_every_field_of_a_rig_file_is_told():
    named = words_of("simulator.md")
    kinds = [kind for kind in vars(rigfile).values() if isinstance(kind, type) and kind.__module__ == rigfile.__name__
             and hasattr(kind, "__dataclass_fields__")]  # fmt: skip
    assert len(kinds) > 5
    for kind in kinds:
        assert not [each.name for each in fields(kind) if each.name not in named], kind.__name__


def test_every_field_of_a_plan_is_told():
    page = (ROOT / "docs" / "plan-format.md").read_text()
    told = {"cut.index", "cut.name", "stages"} | set(plan.Plan().to_json()) - {"format", "version", "cut"}
    assert not [name for name in told if f"`{name}`" not in page]
    assert not [stage for stage in plan.STAGES if f"`{stage}`" not in page]


def test_every_field_of_a_tokens_file_is_told():
    page = (ROOT / "docs" / "access.md").read_text()
    assert not [name for name in access._FIELDS if f"`{name}`" not in page]
