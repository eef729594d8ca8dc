"""A timeline that Perfetto opens, whoever's clock a span was on."""

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.core.trace import Span, busy_s, from_perfetto, perfetto, shift_s, strips
from headwater.errors import ConfigError

seconds = st.floats(0, 1e4)


@given(seconds, seconds, seconds, st.floats(-1e6, 1e6), seconds)
def test_another_clock_is_off_by_half_of_the_difference_of_both_ways_at_most(asked, there, work, off, back):
    begun = asked + there + off
    shift = shift_s(asked, asked + there + work + back, begun, begun + work)
    assert shift == pytest.approx(-off + (back - there) / 2, abs=1e-6)


def test_the_file_names_places_and_lanes_and_begins_at_zero():
    spans = [
        Span("node", "compute-1", "decode", 11.0, 0.5, chunk=3),
        Span("trainer", "loop", "step", 10.0, 2.0),
        Span("node", "read-0", "read", 10.5, 0.25, chunk=3),
    ]
    events = json.loads(perfetto(spans, ("trainer",)))["traceEvents"]
    names = {(each["name"], each["args"].get("name")) for each in events if each["ph"] == "M"}
    assert {("process_name", "trainer"), ("process_name", "node"), ("thread_name", "read-0")} <= names
    found = [(each["name"], each["ts"], each["dur"], each["pid"]) for each in events if each["ph"] == "X"]
    assert found == [("step", 0.0, 2e6, 1), ("read", 5e5, 2.5e5, 2), ("decode", 1e6, 5e5, 2)]
    lanes = {(each["pid"], each["tid"]) for each in events if each["ph"] == "X"}
    assert len(lanes) == 3
    assert [each.get("args") for each in events if each["ph"] == "X"] == [None, {"chunk": 3}, {"chunk": 3}]


def test_a_trace_of_nothing_is_a_file_too():
    assert json.loads(perfetto([]))["traceEvents"] == []


def test_seconds_add_up_by_place_and_stage():
    spans = [Span("a", "x", "read", 0, 1), Span("a", "y", "read", 0, 2), Span("b", "x", "step", 0, 4)]
    assert busy_s(spans) == {"a": {"read": 3}, "b": {"step": 4}}


SPANS = st.lists(
    st.builds(
        Span,
        st.sampled_from(["trainer", "node"]),
        st.sampled_from(["one", "two"]),
        st.sampled_from(["read", "step"]),
        st.floats(0.0, 100.0),
        st.floats(0.0, 10.0),
        st.none(),
    ),
    min_size=1,
)


@given(SPANS)
def test_what_is_under_a_strip_is_the_time_of_its_spans(spans):
    found = strips(spans, num_bins=50)
    for strip in found["strips"]:
        under_s = sum(strip["busy"]) * found["bin_s"]
        expected_s = busy_s(spans)[strip["place"]][strip["name"]]
        assert under_s == pytest.approx(expected_s, abs=50 * found["bin_s"] * 1e-4)


@given(SPANS)
def test_a_timeline_is_read_back_as_it_was_written(spans):
    found = from_perfetto(json.loads(perfetto(spans)))
    begin = min(span.start_s for span in spans)
    written = [replace(each, start_s=each.start_s - begin) for each in sorted(spans, key=lambda each: each.start_s)]
    for one, other in zip(found, written, strict=True):
        assert (one.place, one.lane, one.name) == (other.place, other.lane, other.name)
        assert (one.start_s, one.seconds) == pytest.approx((other.start_s, other.seconds), abs=1e-6)


@pytest.mark.parametrize("data", [[], {"traceEvents": 5}, {"traceEvents": [{"ph": "X", "ts": "now", "dur": 1}]}])
def test_what_is_no_timeline_is_refused(data):
    with pytest.raises(ConfigError):
        from_perfetto(data)
