"""Which chunks are the trainer's own follows from the plan alone, and neither side waits for the other."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.core.share import SHARES, is_own, more_ahead

shares = st.one_of(st.sampled_from(SHARES), st.floats(0.001, 0.99))


@given(shares, st.integers(1, 2000))
def test_of_the_first_n_chunks_the_share_is_own(share, count):
    own = sum(is_own(chunk, share) for chunk in range(count))
    assert own <= count * share + 1e-6
    assert own > count * share - 1 - 1e-6


@given(st.sampled_from(SHARES), st.integers(0, 500))
def test_whoever_has_fewer_chunks_finds_some_of_its_own_within_what_may_be_ahead(share, start):
    ahead = [is_own(chunk, share) for chunk in range(start, start + more_ahead(share))]
    assert min(sum(ahead), len(ahead) - sum(ahead)) >= 2


def test_without_a_share_nothing_is_own_and_nothing_more_is_ahead():
    assert not any(is_own(chunk, 0.0) for chunk in range(100))
    assert more_ahead(0.0) == 0


@pytest.mark.parametrize("share", SHARES)
def test_the_first_chunk_is_own_only_where_most_are(share):
    assert is_own(0, share) == (share >= 1)
