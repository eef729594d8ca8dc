"""Every engine gives the rows of PyTorch, in pieces and in threads; what a node lacks is refused with the way out."""

import functools
import importlib.util
import subprocess
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from onnx import helper as make

from headwater.core.cut import legal_cuts
from headwater.core.spec import TensorSpec
from headwater.core.tuning import ENGINES, Candidate
from headwater.errors import RefusedError
from headwater.model.capture import capture
from headwater.model.cuts import cuts
from headwater.model.ship import ship
from headwater.model.split import prefix_module
from headwater.node import engines
from headwater.node.engine import Engine
from headwater.node.prefixes import Wanted

BOUNDARY = (TensorSpec("mean", (3,), "float32"),)
FAMILIES = {
    "ResNet18": ("torchvision", "resnet18"),
    "MobileNetV3": ("torchvision", "mobilenet_v3_small"),
    "DenseNet121": ("torchvision", "densenet121"),
    "ViT": ("timm", "vit_tiny_patch16_224"),
    "ConvNeXt": ("timm", "convnext_atto"),
}
LARGE = ("MobileNetV3", "DenseNet121", "ConvNeXt")


@pytest.fixture(params=ENGINES)
def engine(request):
    pytest.importorskip(request.param)
    return request.param


@functools.cache
def shipped_and_expected(name):
    """The frozen part of a model as a file, inputs, and what PyTorch makes of them."""
    library, kind = FAMILIES[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # other people's imports
        torch.manual_seed(0)
        if library == "torchvision":
            import torchvision

            model = torchvision.models.get_model(kind, weights=None, num_classes=5)
        else:
            import timm

            model = timm.create_model(kind, num_classes=5, **({"img_size": 64} if kind.startswith("vit") else {}))
    inputs = torch.randn(5, 3, 64, 64)
    model.train()
    with torch.no_grad():
        model(inputs)  # settles batch-norms
    captured = capture(model.eval().requires_grad_(False), (inputs[:2],))
    cut = legal_cuts(cuts(captured))[-1]
    with torch.no_grad():
        expected = prefix_module(captured, cut)(inputs)
    return ship(captured, cut), cut, inputs.numpy(), [tensor.numpy() for tensor in expected]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name in LARGE else []) for name in FAMILIES]
)
def test_every_engine_gives_the_rows_of_pytorch(name, engine):
    shipped, cut, inputs, expected = shipped_and_expected(name)
    found = Engine(shipped.path.read_bytes(), way=Candidate(engine, 1, 2)).run(inputs, cut.boundary)
    for tensor, wanted in zip(found, expected, strict=True):
        assert np.abs(tensor - wanted).max() <= 1e-4 * max(1.0, np.abs(wanted).max())


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(num_rows=st.integers(1, 20), batch=st.integers(1, 9))
def test_rows_in_pieces_are_the_rows_at_once(build, num_rows, batch):
    rows = np.random.default_rng(num_rows).random((num_rows, 3, 8, 8), np.float32)
    found = Engine(build.model(), way=Candidate(batch=batch)).run(rows, BOUNDARY)[0]
    np.testing.assert_allclose(found, rows.mean((2, 3)), rtol=1e-5)


@pytest.mark.parametrize("threads", [1, 2])
def test_threads_may_run_an_engine_at_the_same_time(build, engine, threads):
    running = Engine(build.model(), way=Candidate(engine, threads, 4), at_once=3)
    groups = [np.random.default_rng(seed).random((1 + seed % 7, 3, 8, 8), np.float32) for seed in range(40)]
    with ThreadPoolExecutor(6) as pool:
        found = list(pool.map(lambda rows: running.run(rows, BOUNDARY)[0], groups))
    for rows, each in zip(groups, found, strict=True):
        np.testing.assert_allclose(each, rows.mean((2, 3)), rtol=1e-5)


def test_no_engine_follows_a_tensor_into_another_file(build, engine):
    with pytest.raises(RefusedError, match="weights in another file"):
        Engine(build.with_a_tensor_in("/etc/passwd"), way=Candidate(engine))


def test_what_an_engine_can_not_run_is_refused_with_its_words(build, engine):
    node = make.make_node("NoSuchOperator", ["x"], ["mean"])
    with pytest.raises(RefusedError, match="not a model that this node can run"):
        Engine(build.model([node]), way=Candidate(engine))


@pytest.fixture
def without(monkeypatch):
    """without("onnx"): as on a node where this package is not installed."""
    find = importlib.util.find_spec

    def hide(missing):
        monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == missing else find(name))
        engines.available.cache_clear()
        engines.why_not.cache_clear()

    yield hide
    monkeypatch.undo()
    engines.available.cache_clear()
    engines.why_not.cache_clear()


def test_a_node_without_openvino_has_onnx_runtime(without):
    without("openvino")
    assert engines.available() == ("onnxruntime",)
    engines.check_possible("auto", "fp32")
    with pytest.raises(RefusedError, match=r"pins the engine 'openvino'.*\[openvino\].*\"auto\""):
        engines.check_possible("openvino", "fp32")


def test_a_preferred_engine_that_a_node_lacks_is_no_reason_to_refuse(without, upload, build, node):
    wanted = Wanted(upload(build.model()), engine="openvino or auto")
    without("openvino")
    node._prefixes.check(wanted)
    with pytest.raises(RefusedError, match="pins the engine"):
        node._prefixes.check(replace(wanted, engine="openvino"))


def test_a_node_without_onnx_refuses_int8_and_says_what_to_install(without):
    without("onnx")
    assert "int8" not in engines.precisions()
    with pytest.raises(RefusedError, match=r"\[int8\]"):
        engines.check_possible("auto", "int8")


def test_a_precision_that_the_cpu_does_not_compute_in_is_refused(monkeypatch):
    monkeypatch.setattr(engines, "cpu_flags", frozenset)
    engines.why_not.cache_clear()
    try:
        with pytest.raises(RefusedError, match=r"bf16.*fp32"):
            engines.check_possible("auto", "bf16")
        assert "fp32" in engines.precisions()
    finally:
        engines.why_not.cache_clear()


def test_openvino_sends_no_records_of_its_use():
    """It would fork a process that does, from one with many threads."""
    pytest.importorskip("openvino")
    code = ("import sys\nfrom headwater.node.engines.ov import OpenVino\n"
            "try:\n    OpenVino(b'')\nexcept Exception:\n    pass\n"
            "assert 'openvino' in sys.modules\n"
            "assert sys.modules['openvino_telemetry'] is None\n")  # fmt: skip
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_first_runs_of_openvino_may_come_from_many_threads_at_once(build, tmp_path):
    """In a fresh process, where nothing has made its tables of element types yet."""
    pytest.importorskip("openvino")
    (tmp_path / "model.onnx").write_bytes(build.model())
    code = """
import pathlib, sys, threading
import numpy as np
from headwater.core.spec import TensorSpec
from headwater.core.tuning import Candidate
from headwater.node.engine import Engine
from headwater.node.prefixes import Wanted
engine = Engine(pathlib.Path(sys.argv[1]).read_bytes(), way=Candidate("openvino", 1, 4), at_once=8)
barrier = threading.Barrier(8)
def work():
    barrier.wait()
    engine.run(np.zeros((4, 3, 8, 8), np.float32), (TensorSpec("mean", (3,), "float32"),))
threads = [threading.Thread(target=work) for _ in range(8)]
for each in threads: each.start()
for each in threads: each.join()
"""
    for _ in range(3):  # without care it hangs in most
        subprocess.run([sys.executable, "-c", code, str(tmp_path / "model.onnx")], check=True, timeout=60)
