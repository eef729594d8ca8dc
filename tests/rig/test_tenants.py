"""A real node under a memory limit, with jobs at once: all finish with adaptation, and the kernel kills without."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from bench.rig import Host, Rig, RigUp
from onnx import TensorProto, numpy_helper
from onnx import helper as make

LIMIT_BYTES = 704 << 20
BATCH = 50  # with 12.8 MB a row in the engine as much as the limit, for each job


def prefix(path: Path, seed: int) -> str:
    """A convolution that keeps the size of its input, with 64 channels; and their means."""
    weights = np.random.default_rng(seed).normal(size=(64, 3, 3, 3)).astype(np.float32)
    nodes = [make.make_node("Conv", ["x", "w"], ["a"], pads=[1] * 4), make.make_node("Sigmoid", ["a"], ["b"]),
             make.make_node("ReduceMean", ["b"], ["rows"], axes=[2, 3], keepdims=0)]  # fmt: skip
    graph = make.make_graph(
        nodes,
        "prefix",
        [make.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 3, 224, 224])],
        [make.make_tensor_value_info("rows", TensorProto.FLOAT, ["n", 64])],
        [numpy_helper.from_array(weights, "w")],
    )
    onnx.save(make.make_model(graph, opset_imports=[make.make_opsetid("", 17)], ir_version=8), str(path))
    return str(path)


def test_jobs_that_ask_for_too_much_finish_with_adaptation_and_kill_the_node_without(
    can_rig: None, pictures: Path, tmp_path: Path
) -> None:
    rig = Rig(storage=(Host("storage", memory_bytes=LIMIT_BYTES),), trainers=(Host("trainer", cores=(1,)),))
    with RigUp(rig) as up, ExitStack() as stack:
        jobs = [stack.enter_context(up.open("trainer", "bench.tenancy:Tenant", folder=str(pictures), name=f"job-{each}",
                                            prefix=prefix(tmp_path / f"{each}.onnx", each), shape=[64]))
                for each in range(2)]  # fmt: skip

        def all_at_once(*options: str) -> list[dict[str, Any]]:
            node = up.start_node("storage", [pictures], options=("--threads", "1", *options))
            with ThreadPoolExecutor(len(jobs)) as pool:
                found = list(pool.map(lambda job: job.ask(address=node.address, rows=BATCH, batch=BATCH), jobs))
            node.process.kill()
            node.process.wait()
            return found

        found = all_at_once()
        assert all(each["finished"] for each in found), found
        assert up.usage("storage").num_memory_kills == 0
        found = all_at_once("--no-adaptation")
        assert not all(each["finished"] for each in found), found
        assert up.usage("storage").num_memory_kills >= 1
