"""What an uploaded model may contain: the operators of real prefixes, and nothing that could do harm."""

import contextlib
import importlib.util
import re
from pathlib import Path

import numpy as np
import pytest
from onnx import TensorProto, numpy_helper
from onnx import helper as make

from headwater.errors import RefusedError
from headwater.node import allowed
from headwater.node.allowed import OPERATORS, check_upload

GB = 10**9
MEAN = make.make_node("ReduceMean", ["x"], ["mean"], axes=[2, 3], keepdims=0)


def weight(name, shape):
    return numpy_helper.from_array(np.ones(shape, np.float32), name)


def test_an_ordinary_model_passes(build):
    check_upload(build.model(), GB)


@pytest.mark.parametrize(
    "operator",
    ["Loop", "Scan", "SequenceMap", "RandomNormal", "Bernoulli", "StringNormalizer", "ImageDecoder", "NoSuch", ""],
)
def test_an_operator_that_loops_draws_or_is_unknown_is_named_and_refused(operator, build):
    model = build.model([MEAN, make.make_node(operator, ["x"], ["y"])])
    with pytest.raises(RefusedError, match=rf"operators that no node runs: {operator or r'[(]none[)]'};"):
        check_upload(model, GB)


@pytest.mark.parametrize("domain", ["com.microsoft", "ai.onnx.ml", "ai.onnx.training", "evil"])
def test_an_operator_of_another_domain_is_refused(domain, build):
    with pytest.raises(RefusedError, match=rf"no node runs: {domain}\.ReduceMean"):
        check_upload(build.model(domain=domain), GB)


def test_what_is_hidden_in_a_branch_is_found(build):
    inner = make.make_graph([make.make_node("RandomNormal", [], ["y"], shape=[1])], "inner", [], [])
    branch = make.make_node("If", ["x"], ["y"], then_branch=inner, else_branch=inner)
    with pytest.raises(RefusedError, match="no node runs: RandomNormal"):
        check_upload(build.model([MEAN, branch]), GB)


@pytest.mark.parametrize(("opset", "fits"), [(10, False), (11, True), (28, True), (29, False), (2**40, False)])
def test_the_opset_has_to_be_one_that_was_looked_at(opset, fits, build):
    model = build.onnx.load_from_string(build.model())
    model.opset_import[0].version = opset
    refused = pytest.raises(RefusedError, match=f"of opset {opset}; nodes run 11 to 28")
    with contextlib.nullcontext() if fits else refused:
        check_upload(model.SerializeToString(), GB)


def change(build, what):
    model = build.onnx.load_from_string(build.model())
    if what == "function":
        model.functions.add(name="f", domain="evil")
    elif what == "training":
        model.training_info.add()
    elif what == "sparse":
        model.graph.sparse_initializer.add(dims=[2**40, 2**40])
    elif what == "text":
        model.graph.initializer.add(name="t", data_type=TensorProto.STRING, dims=[1], string_data=[b"x"])
    elif what == "dims":
        model.graph.initializer.add(name="t", data_type=TensorProto.FLOAT, dims=[2**20, 2**20])
    elif what == "negative":
        model.graph.initializer.add(name="t", data_type=TensorProto.FLOAT, dims=[-1])
    elif what == "type":
        model.graph.initializer.add(name="t", data_type=99, dims=[1])
    elif what == "two":
        return model.SerializeToString() * 2
    return model.SerializeToString()


@pytest.mark.parametrize(
    ("what", "said"),
    [("function", "functions or training"), ("training", "functions or training"), ("sparse", "sparse weights"),
     ("text", "not of numbers"), ("dims", "weights of more than 1.00 GB.*--max-upload"), ("negative", "more than"),
     ("type", "not of numbers"), ("two", "not an ONNX file")],
)  # fmt: skip
def test_what_no_exported_prefix_has_is_refused(what, said, build):
    with pytest.raises(RefusedError, match=said):
        check_upload(change(build, what), GB)


def test_weights_count_as_they_are_in_memory_and_all_together(build):
    model = build.model([MEAN], [weight("a", (1000,)), weight("b", (1000,))])
    check_upload(model, 8000)
    with pytest.raises(RefusedError, match="weights of more than"):
        check_upload(model, 7999)


def test_a_file_that_is_mostly_not_weights_is_refused(build, monkeypatch):
    monkeypatch.setattr(allowed, "MAX_BESIDE_BYTES", 10_000)
    check_upload(build.model([MEAN], [weight("a", (20_000,))]), GB)
    with pytest.raises(RefusedError, match="bytes beside its weights"):
        check_upload(build.model([make.make_node("Identity", ["x"] + [""] * 6000, ["y"]), MEAN]), GB)


def test_the_list_has_what_the_exporter_writes_and_none_that_draw_or_loop():
    """As read from onnxscript's own sources: a new version may write more."""
    folder = Path(importlib.util.find_spec("onnxscript").origin).parent / "function_libs" / "torch_lib" / "ops"
    sources = [(folder / f"{name}.py").read_text() for name in ("core", "nn")]
    written = {name for source in sources for name in re.findall(r"\bop\d*\.([A-Z]\w+)\(", source)}
    assert len(written) > 100
    left_out = {"Bernoulli", "Multinomial", "RandomNormalLike", "RandomUniformLike", "RandomNormal", "RandomUniform",
                "SequenceMap", "SequenceEmpty", "SequenceInsert", "NegativeLogLikelihoodLoss",
                "SoftmaxCrossEntropyLoss"}  # fmt: skip
    assert written - OPERATORS <= left_out
    assert not left_out & OPERATORS


def test_a_small_file_that_takes_all_memory_is_refused_and_the_node_goes_on(build, upload, client):
    side = 100_000  # 40 GB as it runs
    nodes = [
        make.make_node("ReduceMean", ["x"], ["m"], axes=[2, 3], keepdims=0),
        make.make_node("Add", ["a", "b"], ["big"]),
        make.make_node("ReduceMean", ["big"], ["s"], keepdims=0),
        make.make_node("Add", ["m", "s"], ["mean"]),
    ]
    with pytest.raises(RefusedError, match=r"failed on one row within the memory that it may take .*cut earlier"):
        upload(build.model(nodes, [weight("a", (side, 1)), weight("b", (1, side))]))
    assert client.hello()["prefixes"] == []


def test_rows_of_no_fixed_shape_are_refused(build, upload):
    model = build.onnx.load_from_string(build.model())
    model.graph.input[0].type.tensor_type.shape.dim[2].dim_param = "height"
    with pytest.raises(RefusedError, match="only the number of rows may vary"):
        upload(model.SerializeToString())


def _field(number, payload):
    return bytes([number << 3 | 2]) + bytes([len(payload) & 0x7F | 0x80, len(payload) >> 7]) + payload


def test_a_tensor_of_a_thousand_dimensions_is_no_model():
    tensor = _field(1, b"\x01" * 1000) + b"\x10\x01"
    with pytest.raises(RefusedError, match="not an ONNX file"):
        check_upload(_field(7, _field(5, tensor)), GB)


def test_fields_that_mean_nothing_are_not_walked_for_ever(build, monkeypatch):
    monkeypatch.setattr(allowed, "MAX_FIELDS", 50)
    with pytest.raises(RefusedError, match="more than 50 fields"):
        check_upload(build.model() + b"\x98\x06\x01" * 60, GB)
