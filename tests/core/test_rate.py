"""A rate lets through what it says, whoever asks when."""

from itertools import accumulate

from hypothesis import given
from hypothesis import strategies as st

from headwater.core.rate import Rate

asked = st.lists(st.tuples(st.floats(0, 10), st.integers(1, 1000)), min_size=1, max_size=30)


@given(asked, st.integers(1, 500))
def test_over_any_time_no_more_begins_than_the_rate_allows(asked, per_s):
    rate, begun = Rate(per_s), []
    for now, amount in zip(accumulate(pause for pause, _ in asked), (amount for _, amount in asked), strict=True):
        begun.append((now + rate.wait_s(amount, now), amount))
    for first in range(len(begun)):
        for last in range(first, len(begun)):
            before_last = sum(amount for _, amount in begun[first:last])
            assert before_last <= per_s * (begun[last][0] - begun[first][0]) * (1 + 1e-9) + 1e-6


def test_who_comes_after_a_pause_does_not_wait():
    rate = Rate(10)
    assert rate.wait_s(100, 0.0) == 0.0
    assert rate.wait_s(1, 4.0) == 6.0
    assert rate.wait_s(1, 20.0) == 0.0
