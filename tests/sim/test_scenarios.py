"""The scenarios' files: every number says where it is from, and those that are rig files are good ones."""

import re
from pathlib import Path

import pytest

from headwater.sim.inputs import read_inputs

FOLDER = Path(__file__).parents[2] / "examples" / "scenarios"
ORIGINS = ("paper", "datasheet", "here", "derived", "assumed")


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.toml")), ids=lambda path: path.stem)
def test_every_number_says_where_it_is_from(path):
    is_paper = False
    for line in path.read_text().splitlines():
        if line.startswith("["):
            is_paper = line.startswith("[paper]")  # what is in there is the paper's
        if re.match(r"\w+ = [\d\[{]", line) and not line.startswith("version") and not is_paper:
            assert re.search(rf"# \(({'|'.join(ORIGINS)})", line), line


def test_the_fleet_is_a_good_rig_file():
    found = read_inputs(FOLDER / "fleet-plan.json", FOLDER / "fleet.toml")
    assert found.rig.num_nodes == 10_000
    assert [cut.name for cut in found.cuts if cut.legal] == ["input", "stem", "middle", "top"]
