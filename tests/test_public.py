"""What users rely on by name: a change here is a change for them, and belongs in the changelog."""

import os
import subprocess
import sys

import headwater as hw
from headwater.core.plan import Plan


def test_the_public_names():
    expected = ["EmbeddingBag", "HeadwaterError", "Job", "Plan", "Rows", "__version__", "freeze", "from_torchvision",
                "near", "partition", "reduce", "transforms"]  # fmt: skip
    assert sorted(hw.__all__) == expected
    assert all(getattr(hw, name) is not None for name in expected)
    assert dir(hw) == sorted(hw.__all__)


def test_the_verbs_of_the_command_line():
    import typer

    from headwater.cli import typer_app

    command = typer.main.get_command(typer_app)
    verbs = ["compare", "cuts", "doctor", "down", "nodes", "pack", "plan", "profile", "reduce", "serve", "simulate",
             "token", "top", "train", "ui", "up"]  # fmt: skip
    assert sorted(command.commands) == verbs
    options = {name: sorted(option for each in verb.params for option in each.opts if option.startswith("--"))
               for name, verb in command.commands.items()}  # fmt: skip
    assert options == {
        "compare": ["--json"],
        "cuts": ["--all", "--json", "--size", "--until"],
        "doctor": ["--json", "--seconds", "--store"],
        "down": ["--name", "--ray"],
        "nodes": ["--follow", "--json", "--seconds"],
        "pack": ["--crop", "--job", "--layout", "--on-bad-sample", "--resize", "--shard-size", "--threads", "--verify"],
        "plan": ["--json", "--output", "--picture"],
        "profile": ["--again", "--json", "--output"],
        "reduce": [
            "--insecure",
            "--key-file",
            "--listen",
            "--log-format",
            "--log-level",
            "--memory",
            "--mtu",
            "--place",
            "--root",
            "--window",
            "--workers",
        ],
        "serve": [
            "--cache-dir",
            "--cache-size",
            "--drain-s",
            "--hand-over",
            "--http",
            "--insecure",
            "--listen",
            "--log-format",
            "--log-level",
            "--max-upload",
            "--memory",
            "--no-adaptation",
            "--reduce",
            "--reduce-key-file",
            "--state",
            "--table-memory",
            "--table-size",
            "--tables",
            "--threads",
            "--tls-cert",
            "--tls-client-ca",
            "--tls-key",
            "--tokens",
        ],
        "simulate": [
            "--job",
            "--json",
            "--layers",
            "--output",
            "--picture",
            "--profile",
            "--rig",
            "--stages",
            "--sweep",
            "--trace",
        ],
        "token": [
            "--days",
            "--max-chunks",
            "--max-prefixes",
            "--max-tables",
            "--max-upload",
            "--operator",
            "--root",
            "--rows-per-second",
            "--to",
            "--weight",
        ],
        "top": ["--every", "--json", "--once"],
        "train": ["--resume", "--trace"],
        "ui": ["--listen", "--open"],
        "up": [
            "--cache-dir",
            "--cache-size",
            "--drain-s",
            "--insecure",
            "--max",
            "--max-upload",
            "--memory",
            "--min",
            "--name",
            "--port",
            "--ray",
            "--state",
            "--threads",
            "--tls-cert",
            "--tls-client-ca",
            "--tls-key",
            "--tokens",
        ],
    }


def test_the_fields_of_the_plan_format():
    assert Plan().to_json() == {
        "format": "headwater-plan",
        "version": 1,
        "stages": {"read": "host", "decode": "host", "augment": "host", "prefix": "host", "suffix": "host",
                   "loss": "host", "gradients": "host", "reduce": "host"},
        "cut": {"index": 0, "name": "input"},
        "precision": "fp32",
        "codec": "raw",
        "compression": "none",
        "node_batch": 32,
        "chunk_rows": 64,
        "prefetch": 3,
        "engine": "auto",
        "host_share": 0.0,
        "split": "place",
        "hand_over": "wire",
        "prongs": "ordered",
    }  # fmt: skip


def test_the_tree_of_errors():
    from headwater import errors

    tree = {name: kind.__base__.__name__ for name, kind in vars(errors).items() if isinstance(kind, type)
            and issubclass(kind, errors.HeadwaterError)}  # fmt: skip
    assert tree == {
        "HeadwaterError": "Exception", "ConfigError": "HeadwaterError", "PlanError": "HeadwaterError",
        "ModelError": "HeadwaterError", "CaptureError": "ModelError", "ImpureError": "ModelError",
        "DataError": "HeadwaterError", "EmptyDataError": "DataError", "LabelError": "DataError",
        "BadSampleError": "DataError", "ChangedError": "DataError", "StoreError": "DataError",
        "TransformError": "DataError", "NodeError": "HeadwaterError", "UnreachableError": "NodeError",
        "VersionError": "NodeError", "RefusedError": "NodeError", "DamagedError": "NodeError",
        "ReduceError": "HeadwaterError", "AggregatorGoneError": "ReduceError", "WorkerGoneError": "ReduceError",
        "JoinRefusedError": "ReduceError",
    }  # fmt: skip


def test_the_model_in_the_readme_is_frozen_where_rows_are_smaller_than_pixels():
    """With layer4 trainable, for one, everything that could cross is larger than the pictures."""
    import re
    from pathlib import Path

    import timm
    import torch

    from headwater.core.cut import smallest_cut
    from headwater.model.capture import capture
    from headwater.model.cuts import cuts

    text = (Path(__file__).parents[1] / "README.md").read_text()
    name, until = (re.search(pattern, text)[1] for pattern in (r'create_model\("(\w+)"', r'until="(\w+)"'))
    model = hw.freeze(timm.create_model(name, num_classes=10), until=until)
    assert smallest_cut(cuts(capture(model, (torch.zeros(2, 3, 224, 224),)))).row_bytes < 3 * 224 * 224


def test_every_public_name_is_there_in_a_fresh_interpreter():
    """Each with nothing of ours imported before it; one interpreter for all, since torch takes a second to import."""
    code = """
import sys
for name in sys.argv[1:]:
    for module in [each for each in sys.modules if each.partition(".")[0] == "headwater"]:
        del sys.modules[module]
    import headwater
    getattr(headwater, name)
"""
    subprocess.run([sys.executable, "-c", code, *hw.__all__], check=True)


def test_the_engine_keeps_no_records_of_its_use(tmp_path):
    """Left alone, ONNX Runtime 1.31 begins a database of telemetry below the cache folder."""
    code = """
import headwater.node.engine as engine, numpy as np, onnx
from onnx import TensorProto, helper
value = lambda name: helper.make_tensor_value_info(name, TensorProto.FLOAT, [None, 1])
graph = helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "g", [value("x")], [value("y")])
model = helper.make_model(graph, ir_version=9, opset_imports=[helper.make_opsetid("", 17)])
engine.Engine(model.SerializeToString())
"""
    env = {**os.environ, "XDG_CACHE_HOME": str(tmp_path), "HOME": str(tmp_path)}
    env.pop("ORT_DISABLE_TELEMETRY", None)
    subprocess.run([sys.executable, "-c", code], env=env, check=True)
    assert list(tmp_path.iterdir()) == []
