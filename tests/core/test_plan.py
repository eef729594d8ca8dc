"""A plan survives its file, and everything wrong with one is said at once."""

import contextlib
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.core.cut import Cut, find_cut, smallest_cut
from headwater.core.plan import Plan, check, near_plan
from headwater.core.spec import TensorSpec
from headwater.errors import ImpureError, ModelError, PlanError


def cut(index, name, size, legal=True, why_not="", **more):
    return Cut(index, name, (TensorSpec("t", (size,), "float32"),), legal, why_not, 10 * index, 40 * index, **more)


CUTS = (cut(0, "input", 100), cut(1, "conv", 400), cut(2, "pool", 10), cut(3, "flat", 10),
        cut(4, "head", 2, legal=False, why_not="head.weight is trainable", impure=True))  # fmt: skip


def faults_of(plan):
    with pytest.raises(PlanError) as caught:
        check(plan, CUTS)
    return caught.value.faults


plans = st.builds(
    lambda chosen, codec, compression, batch, more, prefetch: near_plan(
        chosen,
        codec=codec if chosen.index or codec != "int8" else "raw",
        compression=compression,
        node_batch=batch,
        chunk_rows=batch + more,
        prefetch=prefetch,
    ),
    st.sampled_from(CUTS[:4]),
    st.sampled_from(["raw", "fp16", "bf16", "int8"]),
    st.sampled_from(["none", "lz4", "zstd"]),
    st.integers(1, 500),
    st.integers(0, 500),
    st.integers(1, 256),
)


@given(plans)
def test_a_plan_survives_its_file_and_is_legal(plan):
    assert Plan.loads(plan.dumps()) == plan
    check(plan, CUTS)


def test_move_nothing_is_a_legal_plan():
    check(Plan(), CUTS)
    assert not Plan().uses_storage


def test_every_fault_is_in_the_one_error():
    plan = Plan(read="host", decode="storage", augment="moon", prefix="storage", cut=4, cut_name="head",
                codec="gzip", precision="fp3", node_batch=0, chunk_rows=-1, prefetch=1000)  # fmt: skip
    faults = "\n".join(faults_of(plan))
    for part in ("decode is on storage but read", "augment is placed on 'moon'", "codec is 'gzip'",
                 "precision is 'fp3'", "node_batch is 0",
                 "chunk_rows is -1", "prefetch is 1000", "head.weight is trainable"):  # fmt: skip
        assert part in faults


def test_a_plan_for_another_model_is_recognised():
    assert "was the plan made for another model?" in faults_of(near_plan(cut(2, "layer9", 10)))[0]
    assert "it has 0 to 4" in faults_of(near_plan(cut(99, "pool", 10)))[0]


def test_a_prefix_that_does_not_fit_says_what_to_change():
    with pytest.raises(PlanError, match="cut earlier or lower node_batch"):
        check(near_plan(CUTS[3]), CUTS, node_memory_bytes=100)


@pytest.mark.parametrize("text", ["", "[]", "{", "null", '"plan"', "{}"])
def test_text_that_is_no_plan_is_a_plan_error(text):
    with pytest.raises(PlanError):
        Plan.loads(text)


def test_nonsense_edited_into_a_file_is_named_field_by_field():
    data = near_plan(CUTS[2]).to_json()
    data["stages"]["decode"] = 7
    data["cut"]["index"] = "two"
    data["colour"] = "blue"
    data["node_batch"] = 0
    data["version"] = 99
    del data["codec"]
    with pytest.raises(PlanError) as caught:
        Plan.loads(json.dumps(data))
    for part in (
        "decode is 7",
        "cut is 'two'",
        "colour is not a field",
        "version is 99",
        "codec is missing",
        "node_batch is 0",
    ):
        assert part in str(caught.value)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@given(plans, st.data())
def test_any_field_replaced_by_anything_is_read_or_refused_never_a_crash(plan, data):
    tree = plan.to_json()
    part = data.draw(st.sampled_from([tree, tree["stages"], tree["cut"]]))
    part[data.draw(st.sampled_from(sorted(part)))] = data.draw(json_values)
    with contextlib.suppress(PlanError):
        Plan.from_json(tree)


def test_the_smallest_cut_is_the_latest_of_the_smallest_legal_ones():
    assert smallest_cut(CUTS).name == "flat"


def test_a_cut_is_found_by_name_or_index_and_errors_name_others():
    assert find_cut(CUTS, "pool") == find_cut(CUTS, 2) == CUTS[2]
    with pytest.raises(ModelError, match="pool"):
        find_cut(CUTS, "pol")
    with pytest.raises(ImpureError, match=r"head\.weight"):
        find_cut(CUTS, "head")


def test_at_the_input_pixels_count_and_a_codec_counts_elsewhere():
    cuts = (cut(0, "input", 100), cut(1, "conv", 90))  # 400 and 360 bytes as floats
    assert smallest_cut(cuts).name == "conv"
    assert smallest_cut(cuts, pixel_bytes=100).name == "input"
    assert smallest_cut(cuts, "int8", pixel_bytes=100).name == "conv"  # 90 bytes and a scale of 4


def test_in_front_of_the_model_a_codec_sends_its_input_but_not_in_8_bits():
    assert near_plan(CUTS[0], codec="fp16").sends_input
    assert not near_plan(CUTS[0]).sends_input
    assert not near_plan(CUTS[1], codec="fp16").sends_input
    assert "no row crosses a wire" in faults_of(Plan(codec="fp16"))[0]
    assert "8 bits already" in faults_of(near_plan(CUTS[0], codec="int8"))[0]


def test_a_tier_that_is_not_there_yet_is_a_fault():
    assert "attach an aggregator" in faults_of(Plan(reduce="network"))[0]
