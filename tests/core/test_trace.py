"""A timeline that Perfetto opens, whoever's clock a span was on."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.core.trace import Span, busy_s, perfetto, shift_s

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
