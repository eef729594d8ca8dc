"""Views of nodes: what holds of rates, sums and limits whatever nodes say."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.core.looks import STAGES, Look, Looks, only, together, view

TENANTS = st.sampled_from(["a", "b", "c"])
COUNTS = st.dictionaries(
    st.one_of(
        TENANTS.map(lambda name: ("headwater_rows_sent_total", name)),
        TENANTS.map(lambda name: ("headwater_requests_under_way", name, "rows")),
        st.sampled_from(STAGES).map(lambda stage: ("headwater_busy_seconds_total", stage)),
        st.sampled_from([("headwater_cores",), ("process_start_time_seconds",), ("headwater_read_bytes_total",)]),
    ),
    st.integers(0, 10**6).map(float),
)
LOOKS = st.lists(st.tuples(st.floats(0.01, 30.0), COUNTS), min_size=1, max_size=8)


def seen_of(steps):
    looks, at_s = Looks(), 100.0
    for apart_s, numbers in steps:
        at_s += apart_s
        looks.add(Look(at_s, numbers))
    return looks.seen()


@given(LOOKS)
def test_a_view_has_the_newest_numbers_and_no_rate_below_zero(steps):
    seen = seen_of(steps)
    shown = view(seen)
    assert {(name, *labels): value for name, labels, value in shown["numbers"]} == steps[-1][1]
    assert all(rate is None or rate >= 0 for rate in shown["per_s"].values())
    assert all(rate >= 0 for rate in seen.per_s.values())
    assert shown["limit"]["on"] in ("", *STAGES)


@given(st.lists(LOOKS, min_size=2, max_size=4))
def test_nodes_together_have_the_sums_of_what_each_has(nodes):
    seen = [seen_of(steps) for steps in nodes]
    whole = together(seen)
    for metric in ("headwater_rows_sent_total", "headwater_cores"):
        assert whole.number(metric) == sum(each.number(metric) for each in seen)
    rates = sum(each.rate("headwater_rows_sent_total") or 0.0 for each in seen)
    assert (whole.rate("headwater_rows_sent_total") or 0.0) == pytest.approx(rates)


def looked(*looks, **about):
    seen = Looks()
    for at_s, numbers in looks:
        seen.add(Look(at_s, {tuple(key.split()): value for key, value in numbers.items()}, about))
    return seen.seen()


def test_a_rate_is_what_was_counted_over_the_time_between():
    seen = looked((0.0, {"headwater_rows_sent_total a": 10.0}), (4.0, {"headwater_rows_sent_total a": 30.0}))
    assert view(seen)["per_s"]["rows_sent"] == 5.0


def test_one_look_tells_no_rate_and_says_so():
    shown = view(looked((0.0, {"headwater_rows_sent_total a": 10.0})))
    assert (shown["per_s"]["rows_sent"], shown["window_s"], shown["limit"]["said"]) == (None, None, "measuring")


def test_a_node_that_was_started_anew_begins_anew():
    before = {"process_start_time_seconds": 1.0, "headwater_rows_sent_total a": 1000.0}
    after = {"process_start_time_seconds": 2.0, "headwater_rows_sent_total a": 10.0}
    assert looked((0.0, before), (4.0, after)).window_s is None


def test_looks_long_ago_say_nothing_about_now():
    assert looked((0.0, {}), (60.0, {})).window_s is None


@pytest.mark.parametrize(
    ("busy", "more", "on", "said"),
    [
        ({"decode": 0.2, "infer": 0.7}, {}, "infer", "the CPU"),
        ({"decode": 0.7, "infer": 0.2}, {}, "decode", "the CPU"),
        ({"infer": 0.1, "send": 0.9}, {"headwater_chunks_working": 1.0}, "send", "the link"),
        ({"infer": 0.1, "send": 0.9}, {"headwater_chunks_working": 4.0, "headwater_rows_sent_total a": 9.0}, "",
         "nothing here"),
        ({"read": 3.0, "decode": 0.1}, {}, "read", "the store"),
        ({}, {}, "", "idle"),
    ],
)  # fmt: skip
def test_what_limits_is_the_resource_that_is_busy(busy, more, on, said):
    now = {"headwater_cores": 1.0, **{f"headwater_busy_seconds_total {name}": value for name, value in busy.items()}}
    shown = view(looked((0.0, {"headwater_cores": 1.0}), (1.0, {**now, **more})))
    assert shown["limit"]["on"] == on
    assert shown["limit"]["said"].startswith(said)


def test_requests_that_wait_for_memory_are_what_limits():
    shown = view(looked((0.0, {}), (1.0, {}), memory={"num_waiting": 2, "tenants": []}))
    assert (shown["limit"]["on"], shown["limit"]["said"]) == ("infer", "memory: 2 requests wait for it")


def test_tenants_are_told_apart_with_their_jobs_memory():
    share = {"tenant": "a/job-1", "group_rows": 8, "held_rows": 0, "row_bytes": 100}
    numbers = {"headwater_requests_under_way a rows": 1.0, "headwater_requests_under_way b rows": 0.0,
               "headwater_rows_sent_total b": 7.0}  # fmt: skip
    memory = {"tenants": [share, {**share, "tenant": "a/job-2"}]}
    rows = view(looked((0.0, {}), (1.0, numbers), memory=memory))["tenants"]
    assert [(each["name"], each["memory_bytes"], each["num_jobs"]) for each in rows] == [("b", 0, 0), ("a", 200, 2)]


def test_whoever_may_see_less_sees_the_same_rates_of_that():
    seen = looked((0.0, {}), (1.0, {"headwater_rows_sent_total a": 3.0, "headwater_rows_sent_total b": 9.0}))
    mine = only(seen, lambda key: key[1:] != ("b",), {})
    assert (mine.rate("headwater_rows_sent_total"), mine.number("headwater_rows_sent_total", "b")) == (3.0, 0.0)
