"""Steps of a table: explored in all orders of loss, repeats, kills and takeovers."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from headwater.core.once import Apply, Once, Refuse, Repeat, meeting

MOST = 4


def moves(state):
    """What may happen next, to two parts and a trainer that is at `sent`: (parts, confirmed by each, sent, settled)."""
    parts, confirmed, sent = state
    if sent < MOST and min(confirmed) == sent:
        yield parts, confirmed, sent + 1  # the trainer begins a step
    for which in (0, 1):
        part = replace(parts[which])
        if sent:
            answer = part.step("a", sent, sent - 1)  # it comes, maybe again
            assert not isinstance(answer, Refuse)
            assert isinstance(answer, Repeat) == (parts[which].version >= sent)
            if isinstance(answer, Apply):
                assert answer.version == part.version + 1 == sent
                part.applied(answer.version)
            yield _with(parts, which, part), _with(confirmed, which, sent), sent
            yield _with(parts, which, part), confirmed, sent  # the answer is lost
        if parts[which].may_checkpoint:
            part = replace(parts[which])
            part.checkpointed()
            yield _with(parts, which, part), confirmed, sent
        # It is killed: its log has all that was applied; what was settled, it has forgotten.
        yield _with(parts, which, replace(parts[which], settled=parts[which].checkpoint)), confirmed, sent


def _with(items, which, item):
    return tuple(item if place == which else each for place, each in enumerate(items))


def frozen(state):
    parts, confirmed, sent = state
    return tuple(map(repr, parts)), confirmed, sent


def test_parts_can_meet_wherever_the_trainer_ends():
    start = ((Once("a"), Once("a")), (0, 0), 0)
    seen, todo, most = {frozen(start)}, [start], 0
    while todo:
        state = todo.pop()
        parts, confirmed, _ = state
        target = meeting([(part.version, part.checkpoint) for part in parts])
        assert target is not None  # every part can go back to where the last one is
        assert target >= min(confirmed)  # and no step that was confirmed by all is lost
        assert max(part.version for part in parts) - target <= 1
        most = max(most, target)
        for after in moves(state):
            if frozen(after) not in seen:
                seen.add(frozen(after))
                todo.append(after)
    assert most == MOST
    assert len(seen) > 100


@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(1, 6)), max_size=40))
def test_a_version_is_made_once_and_by_who_has_the_lease(sent):
    once, made = Once("a"), []
    for lease, version in sent:
        answer = once.step(lease, version, version - 1)
        if isinstance(answer, Apply):
            made.append(answer.version)
            once.applied(answer.version)
        assert isinstance(answer, Refuse) == (lease != "a" or version > once.version)
    assert made == list(range(1, len(made) + 1))


def test_going_back_is_possible_to_the_checkpoint_and_not_further():
    once = Once("a")
    for version in (1, 2, 3):
        once.step("a", version, version - 1)
        once.applied(version)
        if version == 2:
            once.settled = 2
            once.checkpointed()
    assert [once.may_go_back(version) for version in range(5)] == [False, False, True, True, False]
    once.went_back(2)
    assert isinstance(once.step("a", 3, 2), Apply)


def test_a_read_is_of_the_version_that_was_asked_for():
    once = Once("a", version=3)
    assert once.look("a", 3) is None
    assert "behind" in once.look("a", 4)
    assert "taken over" in once.look("b", 3)


def test_parts_meet_at_the_one_that_is_behind_or_not_at_all():
    assert meeting([(3, 0), (4, 3)]) == 3
    assert meeting([(3, 0), (5, 4)]) is None
