"""Lines in the log: bounded however often something happens, and none is left out untold."""

from hypothesis import given
from hypothesis import strategies as st

from headwater.core.seldom import Seldom


@given(st.integers(1, 5), st.lists(st.sampled_from([0.0, 0.25, 1.0, 10.0]), max_size=60))
def test_lines_are_bounded_and_those_left_out_are_told(burst, pauses):
    seldom, now, written, told = Seldom(burst, every_s=1.0), 0.0, 0, 0
    for pause in pauses:
        now += pause
        left_out = seldom.may(now)
        if left_out is not None:
            written, told = written + 1, told + left_out
        assert written <= burst + now
    last = seldom.may(now + 1.0)
    assert last is not None, "after a pause there is always a line"
    assert written + told + last == len(pauses)
