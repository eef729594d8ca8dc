"""What crosses the link: by what was counted, or by what the first steps took."""

import pytest

from headwater.core.travel import ROUNDS, Shape, Trial

LONG_BAGS = Shape(num_bags=64, num_ids=6400, num_distinct=3000, vector_bytes=256)
FEW_VECTORS = Shape(num_bags=64, num_ids=64, num_distinct=5, vector_bytes=256)


def run(shape, took):
    trial, ways = Trial(shape), []
    for _ in range(4 * ROUNDS + 8):
        ways.append(trial.way)
        trial.took(trial.way, took[trial.way])
    return trial, ways


def test_many_ids_a_bag_are_pooled_without_trying():
    trial, ways = run(LONG_BAGS, {"pooled": 9.0, "vectors": 1.0})
    assert set(ways) == {"pooled"}
    assert "counted" in trial.because


@pytest.mark.parametrize("faster", ["pooled", "vectors"])
def test_the_way_that_took_less_time_is_taken_in_the_end(faster):
    took = {"pooled": 2.0, "vectors": 2.0, faster: 1.0}
    trial, ways = run(FEW_VECTORS, took)
    assert trial.chosen == faster
    assert ways.count("pooled" if faster == "vectors" else "vectors") == ROUNDS + 1
    assert "measured" in trial.because
