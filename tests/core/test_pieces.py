"""Entries in pieces: each in one, none with entries of other holders, and complete as soon as the rule says."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from headwater.core.pieces import Pieces

groups = st.lists(st.integers(0, 4), min_size=1, max_size=120)


@given(groups, st.integers(1, 20))
def test_every_entry_is_in_one_piece_with_its_like(groups, rows):
    groups = np.array(groups)
    pieces = Pieces(len(groups), rows, groups)
    every = [pieces.entries(number) for number in range(len(pieces))]
    assert sorted(np.concatenate(every).tolist()) == list(range(len(groups)))
    assert all(1 <= len(each) <= rows and len(set(groups[each].tolist())) == 1 for each in every)
    assert [int(each[0]) for each in every] == sorted(int(each[0]) for each in every)


@given(groups, st.integers(1, 20))
def test_what_is_called_complete_is_here_and_no_less_could_be(groups, rows):
    pieces = Pieces(len(groups), rows, np.array(groups))
    here = set()
    for number in range(len(pieces)):
        here |= set(pieces.entries(number).tolist())
        complete = pieces.complete(number)
        assert set(range(complete)) <= here
        assert complete == len(groups) or complete not in here
    assert complete == len(groups)


@given(st.integers(1, 200), st.integers(1, 20))
def test_without_holders_pieces_are_consecutive(num_entries, rows):
    plain, one = Pieces(num_entries, rows), Pieces(num_entries, rows, np.zeros(num_entries, int))
    assert len(plain) == len(one)
    for number in range(len(plain)):
        assert plain.entries(number).tolist() == one.entries(number).tolist()
        assert plain.complete(number) == one.complete(number)
