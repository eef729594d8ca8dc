"""ONNX files that were uploaded, and the files of a node's cache."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from bench.fuzz.documents import chains
from bench.fuzz.target import Harness, Room, Target, join, split
from headwater.core.spec import TensorSpec
from headwater.core.tuning import Candidate
from headwater.data import wire
from headwater.data.samples import SampleRef
from headwater.errors import RefusedError
from headwater.node.cache import Cache
from headwater.node.engine import Engine
from headwater.node.onnxfile import check_self_contained, up_to
from headwater.node.rowfiles import FORMAT

_BOUNDARY = (TensorSpec("y", (3,), "float32"),)


def _onnx(room: Room) -> Harness:
    def harness(data: bytes) -> None:
        check_self_contained(data)
        for outputs in (["y"], ["m"], ["y", "m"]):
            try:
                part = up_to(data, outputs)
            except RefusedError:
                continue
            check_self_contained(part)

    return harness


def _session(engine: str) -> Callable[[Room], Harness]:
    """Load what was uploaded and run it, as the child does that has a first look at it."""

    def make(room: Room) -> Harness:
        rows = np.zeros((2, 3, 8, 8), np.float32)

        def harness(data: bytes) -> None:
            Engine(data, way=Candidate(engine)).run(rows, _BOUNDARY)

        return harness

    return make


def _onnx_seeds() -> Sequence[bytes]:
    from onnx import TensorProto, helper, numpy_helper

    def model(nodes: Sequence[object], weights: Sequence[object] = (), more: Sequence[str] = ()) -> bytes:
        shapes = {"y": ["n", 3], "m": ["n", 3, 8, 8]}
        graph = helper.make_graph(
            list(nodes), "prefix", [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 3, 8, 8])],
            [helper.make_tensor_value_info(name, TensorProto.FLOAT, shapes[name]) for name in ("y", *more)],
            list(weights),
        )  # fmt: skip
        made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
        return bytes(made.SerializeToString())

    node = helper.make_node
    mean = node("ReduceMean", ["x"], ["y"], axes=[2, 3], keepdims=0)
    weight = numpy_helper.from_array(np.ones((3, 3, 3, 3), np.float32), "w")
    branch = helper.make_graph([node("Abs", ["x"], ["b"])], "b", [],
                               [helper.make_tensor_value_info("b", TensorProto.FLOAT, None)])  # fmt: skip
    yes = numpy_helper.from_array(np.array(True), "yes")
    shape = numpy_helper.from_array(np.array([0, -1], np.int64), "s")
    dims = numpy_helper.from_array(np.array([2, 3], np.int64), "d")
    outside = TensorProto(name="w", dims=[3], data_type=TensorProto.FLOAT, data_location=TensorProto.EXTERNAL)
    entry = outside.external_data.add()
    entry.key, entry.value = "location", "../outside/secret.onnx"
    return [
        model([mean]),
        model([node("Conv", ["x", "w"], ["m"], pads=[1, 1, 1, 1]), node("Relu", ["m"], ["r"]),
               node("ReduceMean", ["r"], ["y"], axes=[2, 3], keepdims=0)], [weight], ["m"]),
        model([node("If", ["yes"], ["m"], then_branch=branch, else_branch=branch),
               node("ReduceMean", ["m"], ["y"], axes=[2, 3], keepdims=0)], [yes], ["m"]),
        model([node("MaxPool", ["x"], ["p"], kernel_shape=[8, 8]), node("Reshape", ["p", "s"], ["y"])], [shape]),
        model([node("ConstantOfShape", ["d"], ["c"]), mean, node("Add", ["y", "c"], ["z"])], [dims]),
        model([mean, node("Add", ["y", "w"], ["z"])], [outside]),
    ]  # fmt: skip


def _cache(room: Room) -> Harness:
    folder = room.state / "cache"
    want = wire.Extraction("file:///x", chains()[0], None, (TensorSpec("y", (3,), "float32"),))
    chunk = wire.Chunk(want, "job", 1, 2, 3, (SampleRef(0, "a", 0, -1, 5, "e"), SampleRef(1, "b", 0, -1, 5, "e")))
    shelf = _shelf_of(chunk, room)

    def harness(data: bytes) -> None:
        about, name, keys, form, rows = split(data, 5)
        shutil.rmtree(folder, ignore_errors=True)
        (folder / shelf).mkdir(parents=True)
        (folder / "format").write_bytes(form.replace(b"@FORMAT@", FORMAT.encode()))
        (folder / shelf / "about").write_bytes(about)
        number = name.decode(errors="replace").replace("/", "_").replace("\0", "_")[:40] or "1"
        for path, content in ((f"{number}.keys", keys), (f"{number}.rows", rows)):
            (folder / shelf / path).write_bytes(content)
        cache = Cache(folder, 1 << 20)
        try:
            kept = cache.look_up(chunk, "maker")
            if kept is not None:
                for ids, columns in kept.pieces():
                    assert len(ids) == len(columns[0])
                kept.keep(np.array([0, 1]), [np.zeros((2, 3), np.float32)])
                cache.wait(5)
        finally:
            cache.close()

    return harness


def _filled(folder: Path, chunk: wire.Chunk) -> Path:
    """A cache with the rows of a chunk; the folder of its shelf."""
    cache = Cache(folder, 1 << 20)
    kept = cache.look_up(chunk, "maker")
    assert kept is not None
    list(kept.pieces())
    kept.keep(np.array([0, 1]), [np.ones((2, 3), np.float32)])
    cache.wait(5)
    cache.close()
    return next(each for each in folder.iterdir() if each.is_dir())


def _shelf_of(chunk: wire.Chunk, room: Room) -> str:
    return _filled(room.state / "first", chunk).name


def _cache_seeds() -> Sequence[bytes]:
    about = json.dumps({"record_bytes": 32, "prefix": None, "codec": "raw"}).encode()
    return [join(about, b"1", bytes(range(16)), b"@FORMAT@", bytes(range(64))),
            join(about, b"000000007", b"", b"@FORMAT@", b""),
            join(b"{}", b"x", b"1", b"headwater-rows 0", b"")]  # fmt: skip


TARGETS = (
    Target("onnx", "an uploaded model: what a node itself looks at", _onnx, _onnx_seeds, (RefusedError,), 80,
           "protobuf"),
    Target("onnxruntime", "the same, loaded and run as in a child", _session("onnxruntime"), _onnx_seeds,
           (RefusedError,), 20, "protobuf", contained=True),
    Target("openvino", "the same in OpenVINO", _session("openvino"), _onnx_seeds, (RefusedError,), 2, "protobuf",
           contained=True),
    Target("cache", "the files of a cache", _cache, _cache_seeds, (), 10),
)  # fmt: skip
