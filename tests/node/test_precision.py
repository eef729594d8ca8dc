"""An int8 prefix is calibrated on samples beside the data, keeps near fp32, and states how near."""

import functools
import json
import threading
from dataclasses import replace

import numpy as np
import pytest
import torch
from onnx import TensorProto, numpy_helper
from onnx import helper as make
from torch import nn

import headwater as hw
from headwater.core.plan import Plan
from headwater.data import wire
from headwater.data.transforms import CenterCrop, Normalize, Resize, ToFloat, Transforms
from headwater.errors import ConfigError, PlanError, RefusedError
from headwater.node import engines
from headwater.node.service import Node
from headwater.train.client import NodeClient

TRANSFORMS = Transforms([Resize(36), CenterCrop(32), ToFloat(), Normalize((0.5,) * 3, (0.5,) * 3)])

pytestmark = pytest.mark.usefixtures("moments")


def convolutions(build):
    """[n, 3, 8, 8] → [n, 3] by three convolutions, with outputs on the way."""
    generator = np.random.default_rng(0)
    sizes = {"u": (16, 3), "v": (16, 16), "w": (3, 16)}
    tensors = [numpy_helper.from_array(generator.normal(0, 0.3, (*size, 3, 3)).astype(np.float32), name)
               for name, size in sizes.items()]  # fmt: skip
    nodes = [make.make_node("Conv", ["x", "u"], ["a"], pads=[1] * 4), make.make_node("Relu", ["a"], ["b"]),
             make.make_node("Conv", ["b", "v"], ["c"], pads=[1] * 4), make.make_node("Relu", ["c"], ["d"]),
             make.make_node("Conv", ["d", "w"], ["e"], pads=[1] * 4),
             make.make_node("GlobalAveragePool", ["e"], ["f"]), make.make_node("Flatten", ["f"], ["mean"])]  # fmt: skip
    return build.model(nodes, tensors)


@pytest.fixture
def stopped():
    return threading.Event()


@pytest.fixture
def is_wary():
    return False


@pytest.fixture
def int8(build, upload, client, chunk_of):
    """A chunk of rows in int8, of a prefix that is uploaded and calibrated."""
    prefix = upload(convolutions(build))
    request = wire.Calibrate(chunk_of(prefix))
    client.calibrate(request)
    return chunk_of(prefix, precision="int8", calibration=request.digest)


@pytest.mark.parametrize("engine", engines.available())
def test_int8_rows_are_near_those_of_fp32(int8, client, stopped, engine):
    exact = replace(int8, extraction=replace(int8.extraction, precision="fp32"))
    int8 = replace(int8, extraction=replace(int8.extraction, engine=engine))
    full, reduced = (client.rows(chunk, stopped).tensors[0] for chunk in (exact, int8))
    cosine = (full * reduced).sum(1) / np.linalg.norm(full, axis=1) / np.linalg.norm(reduced, axis=1)
    assert cosine.min() > 0.999
    assert np.abs(full - reduced).max() > 0  # it is int8 indeed
    assert {each["precision"] for each in client.hello()["prefixes"]} == {"fp32", "int8"}


def test_a_calibration_outlives_the_node_and_a_damaged_file_is_made_again(int8, client, state, pictures, stopped):
    before = client.rows(int8, stopped).tensors[0]
    (made,) = (state / "int8").glob("*.onnx")
    made.write_bytes(made.read_bytes()[:-5])
    again = Node("grpc://127.0.0.1:0", (str(pictures),), state=state, num_threads=1)
    other = NodeClient(f"grpc://127.0.0.1:{again.port}")
    try:
        np.testing.assert_allclose(other.rows(int8, stopped).tensors[0], before, atol=1e-5)
    finally:
        other.close()
        again.stop(5)


def shifting():
    """Two outputs on the way, one of them used by what comes after it, and a whole number beside them."""
    generator = np.random.default_rng(1)
    tensors = [numpy_helper.from_array(generator.normal(0, 0.5, (16, size, 3, 3)).astype(np.float32), name)
               for name, size in (("u", 3), ("v", 16))]  # fmt: skip
    nodes = [make.make_node("Conv", ["x", "u"], ["a"], pads=[1] * 4), make.make_node("Relu", ["a"], ["b"]),
             make.make_node("Conv", ["b", "v"], ["c"], pads=[1] * 4), make.make_node("Relu", ["c"], ["d"]),
             make.make_node("GlobalAveragePool", ["d"], ["e"]), make.make_node("Flatten", ["e"], ["mean"]),
             make.make_node("ArgMax", ["mean"], ["top"], axis=1, keepdims=0)]  # fmt: skip
    return nodes, tensors


@pytest.mark.parametrize("outputs", [["c"], ["d"], ["mean"], ["c", "mean"], ["d", "top"]])
def test_int8_keeps_the_mean_of_every_channel(chunk_of, monkeypatch, outputs):
    """Rounding moves it; what comes behind an output gets the value as it was, and zeros stay zeros or more."""
    from headwater.node import quantise
    from headwater.node.engines.ort import OnnxRuntime

    nodes, tensors = shifting()
    kinds = {"c": (TensorProto.FLOAT, 4), "d": (TensorProto.FLOAT, 4), "mean": (TensorProto.FLOAT, 2),
             "top": (TensorProto.INT64, 1)}  # fmt: skip
    given = [
        make.make_tensor_value_info(name, kinds[name][0], ["n"] + [None] * (kinds[name][1] - 1)) for name in outputs
    ]
    taken = [make.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 3, 8, 8])]
    graph = make.make_graph(nodes, "g", taken, given, tensors)
    model = make.make_model(graph, opset_imports=[make.make_opsetid("", 18)], ir_version=9).SerializeToString()
    rows = list(np.random.default_rng(2).normal(size=(32, 3, 8, 8)).astype(np.float32))
    monkeypatch.setattr(quantise, "_rows_of", lambda chunk: rows)
    ranges = quantise.calibrate(chunk_of(), model)
    made = quantise.quantise(model, ranges, None, chunk_of())
    bare = quantise._rounded(model, ranges).SerializeToString()
    full, reduced, unshifted = (OnnxRuntime(each).run(np.stack(rows)) for each in (model, made, bare))
    for name, exact, found, without in zip(outputs, full, reduced, unshifted, strict=True):
        if name == "top":
            assert found.dtype == exact.dtype
            continue
        axes = (0, 2, 3)[: exact.ndim - 1]
        off, off_without = (np.abs((each - exact).mean(axes)).max() for each in (found, without))
        assert off <= (0.75 if name == "d" else 0.01) * off_without  # a floor takes some of it away again
        assert name == "c" or found.min() >= 0


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.unlink(),
        lambda path: path.write_text("{}"),
        lambda path: path.write_text('{"ranges": {"a": [1]}}'),
        lambda path: path.rename(path.with_name(path.name.replace("-2.json", ".json"))),
    ],
)
def test_a_node_that_lost_a_calibration_is_asked_again(int8, client, state, damage, stopped):
    for path in list((state / "int8").glob("*.json")):
        damage(path)
    assert client.rows(int8, stopped).good.all()
    assert list((state / "int8").glob("*-2.json"))


def test_too_few_samples_are_said_to_be_too_few(build, upload, client, chunk_of):
    chunk = chunk_of(upload(convolutions(build)))
    with pytest.raises(RefusedError, match=r"at least 16 samples, and 5 of 5.*fp32"):
        client.calibrate(wire.Calibrate(replace(chunk, samples=chunk.samples[:5])))


def test_int8_without_a_calibration_is_refused(build, upload, client, chunk_of, stopped):
    with pytest.raises(RefusedError, match="needs a calibration"):
        client.rows(chunk_of(upload(convolutions(build)), precision="int8"), stopped)


@pytest.mark.parametrize("wrong", [{"calibration": "x"}, {"calibration": 1}, {"engine": "tpu"}, {"engine": None}])
def test_a_request_that_makes_no_sense_is_refused(chunk_of, wrong):
    request = json.loads(chunk_of().dumps())
    request["extraction"].update(wrong)
    with pytest.raises(ConfigError):
        wire.loads(json.dumps(request).encode())


def test_a_calibration_names_its_samples_and_transforms_alone(chunk_of):
    chunk = chunk_of("0" * 64)
    other = replace(chunk, extraction=replace(chunk.extraction, codec="fp16", node_batch=2))
    fewer = replace(chunk, samples=chunk.samples[1:])
    assert wire.Calibrate(chunk).digest == wire.Calibrate(other).digest != wire.Calibrate(fewer).digest


def network():
    torch.manual_seed(0)
    body = [nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(4), nn.Conv2d(16, 32, 3),
            nn.ReLU(), nn.Conv2d(32, 32, 3), nn.ReLU()]  # fmt: skip
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 3)]
    return hw.freeze(nn.Sequential(nn.Sequential(*body), nn.Sequential(*head)), until="1.2")


def few(pictures, tmp_path, count=10):
    folder = tmp_path / "few"
    for number, path in enumerate(sorted(pictures.rglob("*.jpg"))[:count]):
        target = folder / "ab"[number % 2] / path.name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(path.read_bytes())
    return folder


def test_a_job_states_the_error_of_its_precision(pictures):
    with hw.near(network(), pictures, transforms=TRANSFORMS, batch_size=10, cut="0.7", precision="int8",
                 tolerance=0.5) as job:  # fmt: skip
        assert job.plan.precision == "int8"
        assert job.deviations["int8"].cosine > 0.99
        assert "int8: cosine" in job.describe()
        assert sum(len(y) for _, y in job.loader) == 50


def test_a_picture_that_cannot_be_read_is_left_out_of_the_error(pictures, tmp_path):
    folder = few(pictures, tmp_path, 40)
    sorted(folder.rglob("*.jpg"))[7].write_bytes(b"no picture")
    with hw.near(network(), folder, transforms=TRANSFORMS, batch_size=10, cut="0.7", precision="int8", tolerance=0.5,
                 on_bad_sample="skip") as job:  # fmt: skip
        assert job.plan.precision == "int8"
        assert job.deviations["int8"].num_samples == 39


def test_the_planner_measures_a_precision_and_its_error(pictures):
    with hw.near(network(), pictures, transforms=TRANSFORMS, batch_size=10, precision="int8", tolerance=0.5) as job:
        assert set(job.measured.profile.node.prefix_s) == {"fp32", "int8"}
        assert job.deviations["int8"].num_samples == 50
        assert sum(len(y) for _, y in job.loader) == 50


def test_an_error_above_the_tolerance_leaves_fp32_and_says_so(pictures, monkeypatch):
    from headwater.core.precision import Deviation
    from headwater.train import source

    monkeypatch.setattr(source, "deviation", lambda *args: Deviation(0.9, 1.0, 0.8, 50, "0.7"))
    with (
        pytest.warns(UserWarning, match=r"int8 is not used: .*80 % of 50 samples.*99 %"),
        hw.near(network(), pictures, transforms=TRANSFORMS, cut="0.7", precision="int8") as job,
    ):
        assert job.plan.precision == "fp32"


@pytest.mark.parametrize("options", [{}, {"cut": "0.7"}])
def test_too_few_pictures_leave_fp32_and_say_so(pictures, tmp_path, options):
    folder = few(pictures, tmp_path)
    with pytest.warns(UserWarning, match=r"fp32 is used: .*at least 16 samples, and there are 10"):
        job = hw.near(network(), folder, transforms=TRANSFORMS, batch_size=4, precision="int8", **options)
    with job:
        assert job.plan.precision == "fp32"
        assert sum(len(y) for _, y in job.loader) == 10


@functools.cache
def plan_of(pictures):
    with hw.near(network(), pictures, transforms=TRANSFORMS, cut="0.7") as job:
        return job.plan


def near_plan(pictures, **changes):
    return replace(plan_of(pictures), **changes)


def test_a_plan_with_an_engine_or_precision_that_a_node_lacks_is_found_before_work_starts(pictures, monkeypatch):
    plan = near_plan(pictures, engine="openvino", precision="bf16")
    hello = NodeClient.hello
    lacking = {"engines": ["onnxruntime"], "precisions": ["fp32"], "precision_faults": {"bf16": "use fp32"}}
    monkeypatch.setattr(NodeClient, "hello", lambda self: {**hello(self), **lacking})
    with pytest.raises(PlanError) as caught:
        hw.near(network(), pictures, transforms=TRANSFORMS, plan=plan)
    assert len(caught.value.faults) == 2
    assert "can't do precision bf16: use fp32" in str(caught.value)
    assert "has no engine openvino" in str(caught.value)


@pytest.mark.parametrize("engine", engines.available())
def test_a_plan_may_pin_an_engine(pictures, engine):
    with hw.near(network(), pictures, transforms=TRANSFORMS, plan=near_plan(pictures, engine=engine)) as job:
        assert sum(len(y) for _, y in job.loader) == 50
        (said,) = job._source._setting.clients[0].hello()["prefixes"]
        assert said["engine"] == engine


def test_a_plan_keeps_its_precision_and_states_its_error(pictures):
    plan = near_plan(pictures, precision="int8")
    with hw.near(network(), pictures, transforms=TRANSFORMS, plan=plan, tolerance=0.5) as job:
        assert job.plan == plan
        assert "int8: cosine" in job.describe()


def test_a_plan_whose_precision_is_beyond_the_tolerance_says_so(pictures, monkeypatch):
    from headwater.core.precision import Deviation
    from headwater.train import source

    plan = near_plan(pictures, precision="int8")
    monkeypatch.setattr(source, "deviation", lambda *args: Deviation(0.95, 1.0, 0.8, 50, "0.7"))
    with (
        pytest.warns(UserWarning, match=r"the plan pins int8, which is further from fp32 than the tolerance of 99 %"),
        hw.near(network(), pictures, transforms=TRANSFORMS, plan=plan) as job,
    ):
        assert job.plan.precision == "int8"


def test_a_plan_that_is_adopted_states_its_error_too(pictures):
    plan = near_plan(pictures)
    with hw.near(network(), pictures, transforms=TRANSFORMS, plan=plan) as job:
        job.adopt(replace(plan, precision="int8"))
        assert "int8: cosine" in job.describe()


def test_nodes_that_refuse_a_precision_by_now_leave_fp32(pictures, monkeypatch):
    """A profile is kept that knows int8; then the node can't do it any more."""
    options = {"transforms": TRANSFORMS, "batch_size": 10, "precision": "int8", "tolerance": 0.5}
    hw.near(network(), pictures, **options).close()

    def refuse(self, request):
        raise RefusedError("no `onnx` here any more")

    monkeypatch.setattr(NodeClient, "calibrate", refuse)
    with (
        pytest.warns(UserWarning, match="fp32 is used: no `onnx` here any more"),
        hw.near(network(), pictures, **options) as job,
    ):
        assert job.plan.precision == "fp32"


class OneKind:
    """A node that says which kind it is, and gives rows that are as far off as that."""

    def __init__(self, name, off):
        self.name, self._off = name, off

    def hello(self):
        return {"machine": self._off, "engine_versions": "1"}

    def rows(self, chunk, stopped):
        from headwater.train.reply import Reply

        full = np.eye(3, dtype=np.float32)[np.arange(len(chunk.samples)) % 3]
        rows = full if chunk.extraction.precision == "fp32" else full + self._off * full[:, ::-1]
        return Reply(np.ones(len(rows), bool), [rows], (), 0)


def test_the_error_is_that_of_the_node_that_is_furthest_off(chunk_of, monkeypatch):
    from headwater.core.cut import Cut
    from headwater.data.layouts import list_samples
    from headwater.train import precision

    chunk = chunk_of("0" * 64, precision="int8", calibration="0" * 64)
    samples = list_samples(chunk.extraction.url)
    monkeypatch.setattr(precision, "_first_choice", lambda model, tensors, cut: tensors[0].argmax(1))
    cut = Cut(1, "mean", chunk.extraction.boundary, True, "", 0, 0)
    found = precision.deviation(chunk.extraction, cut, samples, 0, [OneKind("a", 0.1), OneKind("b", 0.5)], None)
    assert found.max_abs == 0.5


@pytest.mark.parametrize("count", [7, 64, 100, 127, 199])
def test_samples_are_taken_from_all_over_however_many_there_are(count):
    from headwater.train.precision import MIN_OTHERS, spread_out

    class All:
        def __len__(self):
            return count

        def take(self, ids):
            return ids.tolist()

    calibrated, checked = (spread_out(All(), 64, other=other) for other in (False, True))
    assert len(set(calibrated)) == min(count, 64)
    for found in (calibrated, checked):
        assert max(found) >= count - count / 32 - 1
        assert min(found) <= count / 32
    if count >= 64 + MIN_OTHERS:
        assert not set(calibrated) & set(checked)
        assert len(set(checked)) == min(count - 64, 64)
    else:
        assert len(set(checked)) == min(count, 64)  # too few others


@pytest.mark.parametrize("wrong", [{"precision": "int4"}, {"precision": "int8", "tolerance": 0.0},
                                   {"precision": "int8", "tolerance": 1.5}, {"precision": "int8", "nodes": "inline"},
                                   {"precision": "int8", "plan": Plan()}])  # fmt: skip
def test_arguments_that_make_no_sense_are_refused(pictures, wrong):
    with pytest.raises(ConfigError):
        hw.near(network(), pictures, transforms=TRANSFORMS, **wrong)
