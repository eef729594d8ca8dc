"""A profile survives its file, and is only used for what it was measured on."""

import contextlib
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.core.profile import Profile, cheaper, check_profile, least, profile_faults, spread
from headwater.data import extract
from headwater.errors import ConfigError

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
times = st.floats(0, 100)


@given(st.data())
def test_a_profile_survives_its_file(make, data):
    profile = data.draw(make.worlds)[1]
    assert Profile.loads(profile.dumps()) == profile


def test_a_cut_that_was_not_measured_is_null_in_the_file(make):
    profile = make.profile(make.PLACE_S, [*make.SUFFIX_S[:-1], None])
    assert json.loads(profile.dumps())["trainer"]["suffix_s"][-1] is None
    assert Profile.loads(profile.dumps()).trainer.suffix_s[-1] is None


def test_a_profile_fits_what_it_was_measured_on(make):
    check_profile(make.PROFILE, make.CUTS, key=make.KEY, age_s=3600)


def test_every_reason_not_to_use_a_profile_is_in_the_one_error(make):
    key = make.replace(make.KEY, model="model-2", trainer="trainer-9", headwater="9.9")
    profile = make.profile(make.PLACE_S, [5e-3, 16e-3, 12e-3, None, 4e-3, 5e-4, 4e-4],
                           node={"prefix_s": {"fp32": (0.0, 0.5, 0.1)}})  # fmt: skip
    with pytest.raises(ConfigError) as caught:
        check_profile(profile, make.CUTS, key=key, age_s=90 * 86400.0)
    for part in ("the model 'model-1', and this one is 'model-2'", "'trainer-9'", "Headwater '0.1.0'", "90.0 days old",
                 "the suffix was not measured for 1 of 6 legal cuts ('layer3')",
                 "the prefix at fp32 was not measured for 3 of 6 legal cuts ('layer3', 'layer4', 'layer5')",
                 "the prefix at fp32 costs 0.1 s at 'layer2' but 0.5 s at 'layer1'; a later cut can't cost less",
                 "the suffix costs 0.005 s at 'input' but 0.016 s at 'layer1'; an earlier cut can't cost less",
                 "headwater profile"):  # fmt: skip
        assert part in str(caught.value)


def test_noise_of_a_few_percent_is_not_a_fault(make):
    profile = make.profile(make.PLACE_S, make.SUFFIX_S, node={"prefix_s": {"fp32": (0, 0.1, 0.095, 0.2, 0.19, 0.2)}})
    assert profile_faults(profile, make.CUTS) == []


def test_a_profile_from_the_future_is_not_believed(make):
    assert "from the future" in profile_faults(make.PROFILE, make.CUTS, age_s=-5.0)[0]


def test_faults_of_a_file_are_named_field_by_field(make):
    data = make.PROFILE.to_json()
    data["node"]["decode_s"] = -1
    data["node"]["prefix_s"]["fp32"][2] = float("inf")
    data["trainer"]["suffix_on"] = "moon"
    data["sizes"]["colour"] = 3
    del data["sizes"]["sample_bytes"]
    data["key"]["model"] = None
    with pytest.raises(ConfigError) as caught:
        Profile.from_json(data)
    for part in ("node.decode_s is -1", "node.prefix_s.fp32[2] is inf", "trainer.suffix_on is 'moon'",
                 "sizes.colour is not a field", "sizes.sample_bytes is missing", "key.model is None"):  # fmt: skip
        assert part in str(caught.value)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "{}", '{"format": "headwater-profile", "version": 99}',
                                  "[" * 100_000])  # fmt: skip
def test_text_that_is_no_profile_is_a_config_error(text):
    with pytest.raises(ConfigError):
        Profile.loads(text)


@given(st.data())
def test_any_field_replaced_by_anything_is_read_or_refused(make, data):
    tree = make.PROFILE.to_json()
    part = data.draw(st.sampled_from([tree, tree["key"], tree["node"], tree["trainer"], tree["sizes"]]))
    part[data.draw(st.sampled_from(sorted(part)) | st.text(max_size=4))] = data.draw(json_values)
    with contextlib.suppress(ConfigError):
        assert isinstance(Profile.from_json(tree), Profile)


@given(times, st.lists(times, min_size=1, max_size=20))
def test_spread_rises_from_zero_to_the_total(total_s, place_s):
    curve = spread(total_s, place_s)
    assert len(curve) == len(place_s) + 1
    assert curve[0] == 0
    assert curve[-1] == pytest.approx(total_s)
    assert list(curve) == sorted(curve)


def test_how_a_node_is_built_is_what_the_defaults_say(make):
    node = pytest.importorskip("headwater.node.service")
    assert make.PROFILE.node.num_readers == extract.NEAR_READERS
    assert make.PROFILE.trainer.num_readers == extract.NUM_READERS
    assert make.PROFILE.node.num_slots == extract.SLOTS
    assert make.PROFILE.node.max_chunks == node.MAX_CHUNKS


@given(st.lists(st.tuples(times, times), min_size=1, max_size=6))
def test_the_smaller_of_two_curves_is_one_as_well(places):
    one, other = (spread(sum(each), each) for each in zip(*places, strict=True))
    found = least(one, other)
    assert list(found) == sorted(found)
    assert all(each in pair and each <= min(pair) for each, *pair in zip(found, one, other, strict=True))
    assert least((None, 2.0), (None, 1.0)) == (None, 1.0)


def test_of_two_answers_of_a_node_each_stage_counts_at_its_best_and_memory_at_its_worst():
    one = {"decode_s": 2.0, "prefix_s": 3.0, "kernels": [["a", 3.0]], "row_bytes": 5, "encode_s_per_byte": {"fp16": 1.0,
           "int8": 1.0}}  # fmt: skip
    other = {"decode_s": 1.0, "prefix_s": 4.0, "kernels": [["a", 4.0]], "row_bytes": 9, "encode_s_per_byte": {
             "fp16": 0.5}}  # fmt: skip
    want = {"decode_s": 1.0, "prefix_s": 3.0, "kernels": [["a", 3.0]], "row_bytes": 9}
    # Pictures twice as large may take twice as long.
    large = {**other, "decode_s": 6.0, "sample_bytes": 200.0}
    assert cheaper({**one, "sample_bytes": 100.0}, large)["decode_s"] == 2.0
    assert cheaper({**one, "sample_bytes": 50.0}, large)["decode_s"] == 1.5
    # A codec that could not hold the rows of one of the two is left out.
    assert cheaper(one, other) == cheaper(other, one) == {**want, "encode_s_per_byte": {"fp16": 0.5}}


def test_a_profile_can_carry_the_cuts_that_it_is_of(make):
    from dataclasses import replace

    from headwater.core.profile import Profile

    whole = replace(make.PROFILE, cuts=make.CUTS)
    read = Profile.loads(whole.dumps())
    assert [(cut.index, cut.name, cut.boundary, cut.legal, cut.prefix_bytes) for cut in read.cuts] == [
        (cut.index, cut.name, cut.boundary, cut.legal, cut.prefix_bytes) for cut in make.CUTS
    ]


def test_every_fault_of_its_cuts_is_in_the_one_error(make):
    from dataclasses import replace

    from headwater.core.profile import Profile

    data = replace(make.PROFILE, cuts=make.CUTS).to_json()
    data["cuts"][0]["index"] = -1
    data["cuts"][1]["boundary"] = [{"name": "t", "shape": [1], "dtype": "float31"}]
    data["cuts"][2] = 7
    with pytest.raises(ConfigError, match=r"(?s)3 faults.*index.*float31.*no cut"):
        Profile.from_json(data)
