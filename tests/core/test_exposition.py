"""What is written is what Prometheus reads, whatever a tenant is called."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from headwater.core.exposition import Metric, Sample, exposition

ROWS = Metric("rows_total", "counter", 'what "rows" \\ are\nin two lines', ("tenant", "kind"))
BYTES = Metric("bytes", "gauge", "how many")
# The parser cuts the text at each of these, which the format does not.
texts = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"))
numbers = st.floats(allow_nan=False, allow_infinity=False) | st.integers(0, 2**60)


@settings(max_examples=50)
@given(st.dictionaries(st.tuples(texts, texts), numbers, max_size=5), numbers)
def test_prometheus_own_parser_reads_back_what_was_written(rows, size):
    samples = [Sample("rows_total", value, labels) for labels, value in rows.items()]
    text = exposition([ROWS, BYTES], [Sample("bytes", size), *samples])
    counter, gauge = text_string_to_metric_families(text)
    assert (counter.name, counter.type, counter.documentation) == ("rows", "counter", ROWS.meaning)
    found = {(each.labels["tenant"], each.labels["kind"]): each.value for each in counter.samples}
    assert found == rows
    (sample,) = gauge.samples
    assert math.isclose(sample.value, size)


def test_a_lone_surrogate_can_be_sent():
    assert exposition([ROWS], [Sample("rows_total", 1, ("\ud800", ""))]).encode()


@pytest.mark.parametrize("wrong", [("rows", "counter"), ("rows_total", "gauge"), ("Rows", "gauge"), ("rows", "other")])
def test_a_metric_that_prometheus_would_misread_is_our_mistake(wrong):
    with pytest.raises(AssertionError):
        Metric(*wrong, "…")
