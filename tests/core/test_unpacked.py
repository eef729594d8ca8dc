"""What a JSON text can turn into is never more than was said before it was read."""

import json
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.core.unpacked import most_bytes, most_values

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


def counted(value, seen):
    """(values, bytes of those not seen before, with the collector's 16 of each that holds others)."""
    inner, own = [], 0 if id(value) in seen else sys.getsizeof(value)
    seen.add(id(value))
    if isinstance(value, dict):
        inner, own = [*value, *value.values()], own + 16
    elif isinstance(value, list):
        inner, own = value, own + 16
    found = [counted(each, seen) for each in inner]
    return 1 + sum(num for num, _ in found), own + sum(size for _, size in found)


@given(VALUES, st.sampled_from([None, 1]), st.booleans(), st.sampled_from(["utf-8", "utf-16", "utf-32"]))
def test_no_text_has_more_values_or_takes_more_memory(value, indent, ascii_only, encoding):
    text = json.dumps(value, indent=indent, ensure_ascii=ascii_only).encode(encoding, "surrogatepass")
    num, size = counted(json.loads(text), set())
    assert num <= most_values(text)
    assert size <= most_bytes(text)


@pytest.mark.parametrize("piece", ["[]", "{}", "[[]]", '{"":{}}', '{"":0}', "[0]", '"\U0001f600"', "0.5", "12345678901",
                                   '{"a":0,"b":0,"c":0,"d":0,"e":0,"f":0}', "[0,0,0,0,0]"])  # fmt: skip
def test_texts_made_to_take_much_take_no_more(piece):
    text = f"[{','.join([piece] * 10_000)}]".encode()
    assert counted(json.loads(text), set())[1] <= most_bytes(text)


def test_deep_texts_take_no_more():
    for opens, closes in (("[", "]"), ('{"":', "}")):
        text = (opens * 300 + "0" + closes * 300).encode()
        assert counted(json.loads(text), set())[1] <= most_bytes(text)
