"""A prefix comes from a stranger: what it may name, and what it can't."""

import json

import pytest

from headwater.core.graph import NORM, Call, End, PrefixGraph, Value, Weight, crossing, last_uses, num_frozen
from headwater.core.spec import TensorSpec
from headwater.errors import ConfigError

X = TensorSpec("x", (3,), "float32")
W = {name: TensorSpec(name, (3, 3), "float32") for name in ("frozen", "learning")}


def graph():
    """x → linear with frozen weights → relu → linear with trained ones."""
    calls = (
        Call("aten.linear.default", (Value(0), Weight("frozen")), {}),
        Call("aten.relu.default", (Value(1),), {}),
        Call("aten.linear.default", (Value(2), Weight("learning")), {}),
        Call("aten.add.Tensor", (Value(3), Value(2)), {"alpha": float("inf")}),
    )
    return PrefixGraph(
        (X,), calls, W, frozenset({"learning"}), (End("middle", 2, (2,), (X,)), End("last", 4, (4,), (X,)))
    )


def test_a_graph_survives_the_wire():
    assert PrefixGraph.from_json(json.loads(graph().dumps())) == graph()


def test_what_is_used_to_an_end_and_what_is_frozen():
    found = graph()
    assert [found.used(end) for end in found.ends] == [("frozen",), ("frozen", "learning")]
    assert [num_frozen(found, end) for end in found.ends] == [2, 2]
    assert crossing(found, found.ends[1], 2) == (2,)
    assert last_uses(found, found.ends[1])[3] == [3, 2] or sorted(last_uses(found, found.ends[1])[3]) == [2, 3]


def changed(path, value):
    data = json.loads(graph().dumps())
    at = data
    for step in path[:-1]:
        at = at[step]
    at[path[-1]] = value
    return data


@pytest.mark.parametrize(("path", "value"), [
    (("version",), 2),
    (("calls", 0, 0), "aten.from_file.default"),
    (("calls", 0, 0), "aten.set_.source_Storage"),
    (("calls", 0, 0), "py.__import__"),
    (("calls", 0, 0), ["aten.relu.default"]),
    (("calls", 0, 1, 0), {"value": 1}),  # its own result
    (("calls", 0, 1, 0), {"value": -1}),
    (("calls", 0, 1, 0), {"value": True}),
    (("calls", 0, 1, 1), {"weight": "other"}),
    (("calls", 0, 1, 1), {"weight": "frozen", "value": 0}),
    (("calls", 0, 1, 1), 2**63),
    (("calls", 0, 1, 1), "x" * 65),
    (("calls", 0, 1, 1), [[[[[1]]]]]),
    (("calls", 0, 1, 1), {"dtype": "object"}),
    (("calls", 0, 1, 1), {"dtype": []}),
    (("calls", 0, 1, 1), {"layout": {}}),
    (("weights", 0, "dtype"), "bfloat16"),
    (("ends", 0, "boundary", 0, "dtype"), "bfloat16"),
    (("calls", 0), ["aten.relu.default", []]),
    (("trained",), ["other"]),
    (("weights",), [spec.to_json() for spec in W.values()] * 2),
    (("ends",), []),
    (("ends", 0, "num_calls"), 9),
    (("ends", 0, "values"), [9]),
    (("ends", 1, "name"), "middle"),
    (("inputs",), []),
    (("inputs", 0, "shape"), [-1]),
])  # fmt: skip
def test_what_a_stranger_may_not_send_is_refused(path, value):
    with pytest.raises(ConfigError):
        PrefixGraph.from_json(changed(path, value))


def test_batch_statistics_end_what_is_frozen():
    calls = (Call(NORM, (Value(0), None, None), {"eps": 1e-5}), Call("aten.relu.default", (Value(1),), {}))
    end = End("end", 2, (2,), (X,))
    found = PrefixGraph((X,), calls, {}, frozenset(), (end,))
    assert num_frozen(found, end) == 0
    assert found.num_norms(end) == 1
