"""The direction of imports, and what a node must never do, read from the source itself."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parents[1] / "src" / "headwater"
# Per part: the parts of ours that it may import (besides itself and `errors`), and the others' packages it may not.
MAY_IMPORT = {
    "core": set(),
    "data": {"core"},
    "model": {"core"},
    "node": {"core", "data", "page", "version"},
    "train": {"core", "data", "model", "progress", "version"},
    "reduce": {"core", "version"},
    "fleet": {"core", "data", "node"},
    "sim": {"core"},
    "page": set(),
}
NEVER = {"data": {"torch"}, "node": {"torch"}, "fleet": {"torch"}, "sim": {"torch"}}
CORE_OTHERS = {"numpy"}


def files(part):
    return sorted((SOURCE / part).rglob("*.py"))


def imports(path):
    """(module, is it at import time) of every import in a file."""
    tree = ast.parse(path.read_text())
    late = {id(inner) for outer in ast.walk(tree) if isinstance(outer, ast.FunctionDef) for inner in ast.walk(outer)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((name.name, id(node) not in late) for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import"
            if node.module == "headwater":
                yield from ((f"headwater.{name.name}", id(node) not in late) for name in node.names)
            else:
                yield node.module, id(node) not in late


@pytest.mark.parametrize("part", MAY_IMPORT)
def test_imports_point_to_core(part):
    allowed = MAY_IMPORT[part] | {part, "errors"}
    for path in files(part):
        for module, _ in imports(path):
            if module.split(".")[0] == "headwater":
                assert module.split(".")[1] in allowed, f"{path} imports {module}"


# The one part of a node that needs torch; nothing may import it before a prefix is to be trained.
TRAINING = SOURCE / "node" / "training"


@pytest.mark.parametrize("part", NEVER)
def test_a_storage_box_needs_no_torch(part):
    for path in files(part):
        for module, at_import in imports(path):
            if path.is_relative_to(TRAINING):
                continue
            assert not module.startswith("headwater.node.training"), f"{path} imports {module}"
            assert not at_import or module.split(".")[0] not in NEVER[part], f"{path} imports {module}"


def test_ray_is_imported_in_two_places_and_only_when_a_fleet_on_ray_is_asked_for():
    found = {}
    for path in SOURCE.rglob("*.py"):
        for module, at_import in imports(path):
            if module.split(".")[0] == "ray":
                found[path.relative_to(SOURCE).as_posix()] = at_import
    assert found == {"data/cluster.py": False, "fleet/up.py": False}


def test_core_imports_numpy_and_the_standard_library_alone():
    for path in files("core"):
        for module, _ in imports(path):
            top = module.split(".")[0]
            assert top in CORE_OTHERS | {"headwater"} or top in sys.stdlib_module_names, f"{path} imports {module}"


@pytest.mark.parametrize("name", ["time", "threading", "socket", "random", "asyncio", "queue", "subprocess", "os"])
def test_core_has_no_clock_thread_or_socket(name):
    for path in files("core"):
        assert name not in {module.split(".")[0] for module, _ in imports(path)}, path


@pytest.mark.parametrize("part", ["core", "data", "node"])
def test_nothing_on_a_node_unpickles_or_runs_what_it_was_sent(part):
    banned_modules = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib", "torch", "runpy"}
    for path in files(part):
        for module, _ in imports(path):
            # data.torchvision looks at torchvision's own objects, on the trainer
            known = path.name == "torchvision.py" or (module == "torch" and path.is_relative_to(TRAINING))
            assert module.split(".")[0] not in banned_modules or known, f"{path}: {module}"
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                assert called not in ("eval", "exec", "compile", "__import__"), f"{path}:{node.lineno}: {called}"
                assert called not in ("np.load", "numpy.load", "np.fromfile"), f"{path}:{node.lineno}: {called}"
                assert not any(word.arg == "allow_pickle" for word in node.keywords), f"{path}:{node.lineno}"


def test_what_trains_on_a_node_uses_no_part_of_torch_that_runs_or_unpickles_what_it_is_given():
    allowed = {"Generator", "Tensor", "__version__", "autograd", "empty", "empty_like", "from_numpy", "get_num_threads",
               "no_grad", "ones_like", "ops", "rand", "rsqrt", "set_num_threads", "stack", "var_mean"}  # fmt: skip
    for path in sorted(TRAINING.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "torch":
                assert node.attr in allowed, f"{path}:{node.lineno}: torch.{node.attr}"


def python(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize(
    "name",
    [
        "headwater",
        "headwater.node.service",
        "headwater.node.serve",
        "headwater.cli",
        "headwater.reduce.aggregator",
        "headwater.reduce.reducer",
        "headwater.fleet.up",
        "headwater.sim.world",
    ],
)
def test_it_imports_where_torch_onnx_and_ray_are_missing(name):
    names = ["torch", "onnx", "onnxscript", "torchvision", "timm", "ray"]
    done = python(f"import sys; sys.modules.update(dict.fromkeys({names})); import {name}")
    assert done.returncode == 0, done.stderr


def test_a_running_node_has_not_imported_torch(tmp_path):
    code = f"""
import sys
from pathlib import Path
from headwater.node.service import Node
node = Node("grpc://127.0.0.1:0", ({str(tmp_path)!r},), state=Path({str(tmp_path)!r}), num_threads=1)
node.stop(5)
print(sorted({{name.split(".")[0] for name in sys.modules}} & {{"torch", "torchvision", "onnx", "onnxscript", "timm"}}))
"""
    done = python(code)
    assert done.stdout.strip() == "[]", done.stderr


# The parts of `reduce` that need torch; an aggregator, and sums of plain arrays, do without.
WITH_TORCH = {"carrier.py", "compression.py", "fallback.py", "hook.py"}


def test_of_the_reduction_only_the_hook_needs_torch():
    for path in files("reduce"):
        found = {module.split(".")[0] for module, _ in imports(path)}
        assert "torch" not in found or path.name in WITH_TORCH, path
        named = {module.rpartition(".")[2] + ".py" for module, at_import in imports(path) if at_import}
        assert path.name in WITH_TORCH or not named & WITH_TORCH or path.name == "__init__.py", path
