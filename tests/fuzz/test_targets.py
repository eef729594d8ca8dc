"""Every parser that strangers' bytes reach takes them or refuses them plainly. The long run is bench.fuzz."""

import random
from pathlib import Path

import pytest
from bench.fuzz.guard import Guard
from bench.fuzz.mutate import mutate
from bench.fuzz.table import TARGETS
from bench.fuzz.target import Room
from hypothesis import given, settings
from hypothesis import strategies as st

from headwater.errors import DamagedError

CORPUS = Path(__file__).with_name("corpus")
FOUND = sorted(path.relative_to(CORPUS) for path in CORPUS.rglob("*") if path.is_file())
SLOW = {"onnxruntime": 50, "openvino": 5, "cache": 20, "request": 50, "manifest": 50, "index": 50, "session": 40,
        "steps": 50, "table": 40, "table-files": 40, "table-answers": 60, "shown": 50, "checkpoint": 50, "web": 80,
        "ui": 80, "packets": 80}  # fmt: skip
MANY = 200


@pytest.fixture(scope="module")
def guard(tmp_path_factory, request):
    """guard(target): what judges its inputs, made once."""
    made = {}

    def guard_of(name):
        if name not in made:
            made[name] = Guard(TARGETS[name], Room.make(tmp_path_factory.mktemp(name)))
        return made[name]

    return guard_of


@pytest.mark.parametrize("place", FOUND, ids=str)
def test_an_input_that_once_broke_something_is_taken_plainly(place, guard):
    assert guard(place.parts[0]).run((CORPUS / place).read_bytes()) is None


@pytest.mark.parametrize("name", TARGETS)
def test_good_inputs_and_changed_ones_are_taken_plainly(name, guard):
    target, judge = TARGETS[name], guard(name)
    seeds = list(target.seeds())
    generator = random.Random(name)
    changed = [mutate(generator, generator.choice(seeds), target.kind, seeds) for _ in range(SLOW.get(name, MANY))]
    for data in [*seeds, *changed]:
        assert judge.run(data) is None, data

    @settings(max_examples=min(SLOW.get(name, 20), 20), derandomize=True, database=None)
    @given(place=st.floats(0, 1), data=st.binary(max_size=30), seed=st.sampled_from(seeds))
    def with_anything_inside(place, data, seed):
        at = int(place * len(seed))
        assert judge.run(seed[:at] + data + seed[at + len(data) :]) is None

    with_anything_inside()


def test_each_target_has_a_line_in_the_docs():
    text = (Path(__file__).parents[2] / "docs" / "fuzzing.md").read_text()
    assert [name for name in TARGETS if f"| `{name}` |" not in text] == []


def test_good_files_that_were_handed_over_are_taken_and_others_are_not(tmp_path):
    target = TARGETS["handed"]
    harness = target.make(Room.make(tmp_path / "room"))

    def is_taken(data):
        try:
            harness(data)
        except DamagedError:
            return False
        return True

    taken = [is_taken(data) for data in target.seeds()]
    assert taken == [True] * 3 + [False] * (len(taken) - 3)
