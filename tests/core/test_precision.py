"""A reduced precision is used only with an error that was measured and is within the tolerance."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.core.precision import Deviation, allowed
from headwater.errors import ConfigError


def deviation(agreement):
    return Deviation(0.999, 0.1, agreement, 100, "layer4")


@given(st.floats(0, 1), st.floats(0.01, 1))
def test_it_is_allowed_exactly_when_enough_first_choices_stay(agreement, tolerance):
    usable, reasons = allowed(["fp32", "int8"], {"int8": deviation(agreement)}, tolerance)
    assert usable[0] == "fp32"
    assert ("int8" in usable) == (agreement >= tolerance)
    assert len(reasons) == 2 - len(usable)


def test_a_head_that_says_the_same_of_every_row_does_not_excuse_other_rows():
    usable, (reason,) = allowed(["int8"], {"int8": Deviation(0.3, 0.1, 1.0, 100, "layer4")}, 0.99)
    assert usable == ("fp32",)
    assert "cosine of at least 0.9" in reason


def test_without_a_measured_error_it_is_not_allowed_and_the_reason_says_so():
    usable, (reason,) = allowed(["int8"], {}, 0.5)
    assert usable == ("fp32",)
    assert "was not measured" in reason


def test_the_reason_has_the_measured_error_and_the_tolerance():
    _, (reason,) = allowed(["int8"], {"int8": deviation(0.97)}, 0.99)
    assert "97 % of 100 samples" in reason
    assert "99 %" in reason


@pytest.mark.parametrize("wrong", [{"agreement": 1.5}, {"cosine": float("nan")}, {"num_samples": 0}, {"max_abs": -1.0}])
def test_a_deviation_that_can_not_be_is_refused(wrong):
    values = {"cosine": 1.0, "max_abs": 0.0, "agreement": 1.0, "num_samples": 1, "cut": "x", **wrong}
    with pytest.raises(ConfigError):
        Deviation(**values)
