"""Which engine is taken is a pure rule over what was measured; what is tried stays within the time there is."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.core.tuning import (
    BATCHES,
    ENGINES,
    EQUAL,
    TRIFLE_ROWS_PER_S,
    Candidate,
    Trial,
    Tuner,
    choose,
    trials_from_json,
    trials_to_json,
)
from headwater.errors import ConfigError

ORT, OV = ENGINES
candidates = st.builds(Candidate, st.sampled_from(ENGINES), st.sampled_from([1, 2]), st.sampled_from(BATCHES))
good = st.builds(Trial, candidates, st.floats(0.1, 1e5))
trials = st.lists(st.one_of(good, st.builds(Trial, candidates, st.just(0.0), st.just("no such operator"))), max_size=12)


def played(rates, cores=2, left_s=100.0):
    """Every candidate that a tuner asks for, at these rates by engine; a rate of None is a fault."""
    tuner, asked = Tuner(list(rates), cores), []
    while (candidate := tuner.next(left_s)) is not None:
        asked.append(candidate)
        left_s -= tuner.seconds(candidate)
        rate = rates[candidate.engine]
        tuner.record(Trial(candidate, fault="no such operator") if rate is None else Trial(candidate, float(rate)))
    return tuner, asked


@given(trials)
def test_what_is_taken_worked_and_nothing_is_clearly_faster(trials):
    found = choose(trials)
    working = [each for each in trials if not each.fault]
    if not working:
        assert found is None
        return
    taken = [each.rows_per_s for each in working if each.candidate == found.candidate]
    assert max(taken) >= (1 - EQUAL) * max(each.rows_per_s for each in working)


@given(trials, st.sampled_from(ENGINES))
def test_a_pinned_engine_is_the_one_that_is_taken(trials, engine):
    found = choose(trials, engine)
    assert found is None or found.candidate.engine == engine


@given(trials)
def test_trials_are_the_same_after_being_written_and_read(trials):
    assert trials_from_json(trials_to_json(trials)) == tuple(trials)


def test_equal_speed_goes_to_onnx_runtime_with_one_thread_and_few_rows():
    tried = [Trial(Candidate(OV, 1, 4), 101.0), Trial(Candidate(ORT, 2, 1), 100.0), Trial(Candidate(ORT, 1, 16), 100.0),
             Trial(Candidate(ORT, 1, 4), 99.0)]  # fmt: skip
    assert choose(tried).candidate == Candidate(ORT, 1, 4)


def test_the_reason_names_the_other_engine_and_what_is_wrong_with_it():
    tried = [Trial(Candidate(ORT, 1, 4), 50.0), Trial(Candidate(OV, 1, 4), fault="no kernel for Einsum")]
    assert "openvino can't be used: no kernel for Einsum" in choose(tried).why
    assert "openvino at best 80" in choose([tried[0], Trial(Candidate(OV, 1, 4), 80.0)], ORT).why


def test_every_engine_is_tried_with_one_thread_and_with_all():
    _, asked = played({ORT: 100, OV: 90})
    assert {(each.engine, each.threads) for each in asked} == {(ORT, 1), (ORT, 2), (OV, 1), (OV, 2)}
    assert {each.batch for each in asked} == set(BATCHES)
    assert len(asked) == len(set(asked))


def test_a_node_of_one_core_has_no_choice_of_threads():
    assert {each.threads for each in played({ORT: 100}, cores=1)[1]} == {1}


def test_an_engine_that_failed_is_not_tried_again():
    _, asked = played({ORT: 100, OV: None})
    assert [each.engine for each in asked].count(OV) == 1


@given(st.floats(0.01, 1e4), st.floats(0.0, 10.0))
def test_trials_stay_within_the_time_there_is_but_for_the_first(rate, left_s):
    tuner, asked = played({ORT: rate, OV: rate}, left_s=left_s)
    assert asked
    again = Tuner([ORT, OV], 2)
    again.record(tuner.trials[0])
    assert sum(again.seconds(each) for each in asked[1:]) <= left_s + 1e-6


def test_what_was_best_for_another_cut_is_tried_alone_unless_it_fails():
    like = Candidate(OV, 1, 16)
    tuner = Tuner([ORT, OV], 2, like)
    assert tuner.next(0.0) == like
    tuner.record(Trial(like, 10.0))
    assert tuner.next(100.0) is None
    tuner = Tuner([ORT, OV], 2, like)
    tuner.record(Trial(tuner.next(0.0), fault="no such operator"))
    assert tuner.next(0.0).engine == ORT


@pytest.mark.parametrize("cores", [1, 2, 32])
def test_a_trifle_is_tried_once_however_many_cores_there_are(cores):
    assert len(played({ORT: 1.1 * cores * TRIFLE_ROWS_PER_S, OV: 1}, cores)[1]) == 1
    assert len(played({ORT: 0.9 * cores * TRIFLE_ROWS_PER_S, OV: 1}, cores)[1]) > 1


def test_an_engine_that_ended_its_process_is_left_out_whatever_it_did_before():
    tried = [Trial(Candidate(ORT, 1, 4), 50.0), Trial(Candidate(OV, 1, 4), 80.0),
             Trial(Candidate(OV, 2, 4), fault="gone", ended=True)]  # fmt: skip
    assert choose(tried).candidate.engine == ORT
    assert choose(tried, OV) is None


def told(**changes):
    return [
        {
            "engine": ORT,
            "threads": 1,
            "batch": 1,
            "rows_per_s": 1.0,
            "fault": "",
            "fixed_bytes": 9,
            "row_bytes": 1,
            **changes,
        }
    ]


@pytest.mark.parametrize("data", [None, {}, [1], [{}], told(engine="tpu"), told(threads=0), told(threads=True),
                                  told(rows_per_s=float("nan")), told(fault=None), told(batch="4")])  # fmt: skip
def test_a_damaged_record_is_noticed(data):
    with pytest.raises(ConfigError):
        trials_from_json(data)
