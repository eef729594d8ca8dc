"""Engines are tried once for each prefix, in a process of their own, and what was found outlives the node."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from itertools import pairwise

import numpy as np
import pytest
from onnx import helper as make
from onnx import numpy_helper

from headwater.core.tuning import Candidate, Trial
from headwater.core.tuning import trials_to_json as to_json
from headwater.errors import RefusedError
from headwater.node import engines, tuning
from headwater.node.child import Children, Ended
from headwater.node.tuning import Subject, Tuning, _told


@pytest.fixture
def prefix(build, tmp_path):
    """A model that is no trifle: convolutions, on disk."""
    path = tmp_path / "prefix.onnx"
    path.write_bytes(convolution(build))
    return path


def convolution(build, last=None):
    weights = np.random.default_rng(0).normal(size=(64, 3, 3, 3)).astype(np.float32)
    more = np.random.default_rng(1).normal(size=(3, 64, 3, 3)).astype(np.float32)
    output = "mean" if last is None else "d"
    again = (np.random.default_rng(2).normal(size=(64, 64, 3, 3)) / 24).astype(np.float32)
    names = ["b", *(f"m{number}" for number in range(24))]  # many with one weight: a small file, and much to do
    nodes = [make.make_node("Conv", ["x", "w"], ["a"], pads=[1] * 4), make.make_node("Relu", ["a"], ["b"]),
             *(make.make_node("Conv", [before, "m"], [after], pads=[1] * 4) for before, after in pairwise(names)),
             make.make_node("Conv", [names[-1], "v"], ["c"], pads=[1] * 4),
             make.make_node("ReduceMean", ["c"], [output], axes=[2, 3], keepdims=0)]  # fmt: skip
    tensors = [numpy_helper.from_array(weights, "w"), numpy_helper.from_array(more, "v"),
               numpy_helper.from_array(again, "m")]  # fmt: skip
    return build.model(nodes + ([last] if last else []), tensors)


def subject_of(path, outputs=None):
    return Subject("0" * 64, outputs, "fp32")


def tuned(folder, path, outputs=None, engine="auto", budget_s=1.0):
    return Tuning(folder, 2, budget_s).tuned(subject_of(path, outputs), path, None, engine)


def never(monkeypatch):
    monkeypatch.setattr(Children, "run", lambda *args: pytest.fail("tried again"))


def test_what_was_found_outlives_the_node(prefix, state, monkeypatch):
    first = tuned(state, prefix)
    assert first.trials
    assert first.candidate in [trial.candidate for trial in first.trials]
    never(monkeypatch)
    assert tuned(state, prefix) == first


def test_for_other_outputs_of_the_same_file_only_the_best_is_tried(prefix, state):
    first = tuned(state, prefix, outputs=("a",))
    second = tuned(state, prefix, outputs=("b",))
    assert [trial.candidate for trial in second.trials] == [first.candidate]


def garbled(text):
    return text[: len(text) // 2]


def of_another_machine(text):
    kept = json.loads(text)
    kept["about"]["machine"] = "a toaster"
    return json.dumps(kept)


def with_nonsense(text):
    kept = json.loads(text)
    kept["trials"][0]["threads"] = -1
    return json.dumps(kept)


@pytest.mark.parametrize("damage", [garbled, of_another_machine, with_nonsense, lambda text: "[]", lambda text: ""])
def test_a_damaged_or_foreign_record_is_measured_again(prefix, state, damage, caplog):
    tuned(state, prefix)
    (record,) = state.iterdir()
    record.write_text(damage(record.read_text()))
    assert tuned(state, prefix).trials
    assert "trying engines again" in caplog.text
    (record,) = state.iterdir()
    assert json.loads(record.read_text())["about"]["machine"] != "a toaster"


def test_an_engine_that_fails_on_an_operator_is_left_for_the_other(build, tmp_path, state, caplog):
    """OpenVINO has no CDist of ONNX Runtime's own domain."""
    pytest.importorskip("openvino")
    path = tmp_path / "prefix.onnx"
    last = make.make_node("CDist", ["d", "corners"], ["mean"], metric="euclidean", domain="com.microsoft")
    corners = numpy_helper.from_array(np.eye(3, dtype=np.float32), "corners")
    model = build.onnx.load_from_string(convolution(build, last))
    model.graph.initializer.append(corners)
    model.opset_import.append(make.make_opsetid("com.microsoft", 1))
    path.write_bytes(model.SerializeToString())
    found = tuned(state, path)
    assert found.candidate.engine == "onnxruntime"
    assert "openvino can't be used" in found.why
    assert "openvino can't be used" in caplog.text
    with pytest.raises(RefusedError, match=r"openvino can't run this prefix.*\"auto\""):
        tuned(state, path, engine="openvino")
    assert tuned(state, path, engine="openvino or auto").candidate.engine == "onnxruntime"


def test_a_preferred_engine_is_taken_where_it_can_be_even_if_it_is_not_the_fastest(prefix, state):
    pytest.importorskip("openvino")
    for engine in engines.available():
        assert tuned(state, prefix, engine=f"{engine} or auto").candidate.engine == engine


def test_a_pinned_engine_is_tried_even_where_a_trifle_is_not_worth_it(build, tmp_path, state):
    pytest.importorskip("openvino")
    path = tmp_path / "prefix.onnx"
    path.write_bytes(build.model())
    assert len(tuned(state, path).trials) == 1
    assert tuned(state, path, engine="openvino").candidate.engine == "openvino"


def test_a_pinned_engine_is_taken_even_if_it_is_slower(prefix, state):
    pytest.importorskip("openvino")
    for engine in engines.available():
        assert tuned(state, prefix, engine=engine, budget_s=3.0).candidate.engine == engine


def test_a_model_that_no_trial_can_run_leaves_onnx_runtime(tmp_path, state):
    path = tmp_path / "prefix.onnx"
    path.write_bytes(b"not a model")
    found = tuned(state, path)
    assert found.candidate.engine == "onnxruntime"
    assert "no trial succeeded" in found.why
    assert not state.exists()


def test_where_no_process_can_be_started_onnx_runtime_is_taken_untried(prefix, state, monkeypatch, caplog):
    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Children, "run", full)
    found = tuned(state, prefix)
    assert found.candidate.engine == "onnxruntime"
    assert "No space left" in caplog.text


def test_folders_of_children_whose_node_was_killed_are_swept(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    ended = subprocess.Popen(["true"])
    ended.wait()
    theirs, ours = (tmp_path / f"headwater-child-{pid}-x" for pid in (ended.pid, os.getpid()))
    other = tmp_path / "headwater-children"
    for folder in (theirs, ours, other):
        folder.mkdir()
        (folder / "model.onnx").write_bytes(b"x")
    Children()
    assert not theirs.exists()
    assert ours.exists()
    assert other.exists()


def test_an_engine_that_ends_its_process_is_a_fault_and_the_trials_before_count():
    trial = to_json([Trial(Candidate(batch=4), 10.0)])[0]
    trying = {"trying": {"engine": "openvino", "threads": 1, "batch": 4}}
    lines = [json.dumps(each).encode() for each in ({"trying": trial}, trial, trying)] + [b'{"engi']
    found = _told(Ended(-11, b"\n".join(lines), "bad_alloc\n", in_time=True))
    fault = "the process that tried it ended with exit code -11; is it memory? (bad_alloc)"
    assert [each.fault for each in found] == ["", fault]
    assert (found[1].candidate, found[1].ended) == (Candidate("openvino", 1, 4), True)


def test_an_engine_that_took_too_long_is_said_to_have():
    said = json.dumps({"trying": {"engine": "openvino", "threads": 1, "batch": 4}}).encode()
    assert "took too long" in _told(Ended(-9, said, "", in_time=False))[0].fault


ORT, OV = ("onnxruntime", 1, 4), ("openvino", 1, 4)


def breaking(monkeypatch, *broken):
    """Children in which these engines end the process; a list of what each was asked to try."""
    asked = []

    def run(self, module, request, within_s):
        asked.append(json.loads(request)["engines"])
        lines = []
        for name in asked[-1]:
            about = {"engine": name, "threads": 1, "batch": 4}
            lines.append({"trying": about})
            if name in broken:
                return Ended(-9, "\n".join(map(json.dumps, lines)).encode(), "", in_time=True)
            lines.append({**about, "rows_per_s": 10.0, "fault": "", "fixed_bytes": 0, "row_bytes": 0})
        return Ended(0, "\n".join(map(json.dumps, lines)).encode(), "", in_time=True)

    monkeypatch.setattr(Children, "run", run)
    monkeypatch.setattr(engines, "available", lambda: ("onnxruntime", "openvino"))
    return asked


def test_when_one_engine_breaks_the_process_the_other_is_still_tried_and_nothing_is_kept(tmp_path, state, monkeypatch):
    asked = breaking(monkeypatch, "onnxruntime")
    found = tuned(state, tmp_path)
    assert found.candidate == Candidate(*OV)
    assert asked == [["onnxruntime", "openvino"], ["openvino"]]
    assert found.trials[1] == Trial(Candidate(*OV), 10.0)
    assert not state.exists(), "the next start tries again"


def test_an_engine_that_broke_is_tried_again_if_a_plan_pins_it(tmp_path, state, monkeypatch):
    node = Tuning(state, 2)
    breaking(monkeypatch, "openvino")
    assert node.tuned(subject_of(tmp_path), tmp_path, None).candidate == Candidate(*ORT)
    with pytest.raises(RefusedError, match="openvino can't run this prefix"):
        node.tuned(subject_of(tmp_path), tmp_path, None, "openvino")
    breaking(monkeypatch)
    assert node.tuned(subject_of(tmp_path), tmp_path, None, "openvino").candidate == Candidate(*OV)


def test_an_old_record_is_measured_again(prefix, state, monkeypatch):
    tuned(state, prefix)
    (record,) = state.iterdir()
    month_ago = time.time() - tuning.KEPT_S - 1
    os.utime(record, (month_ago, month_ago))
    asked = breaking(monkeypatch)
    tuned(state, prefix)
    assert asked


def test_openvino_says_what_is_wrong_rather_than_where():
    from headwater.node.engine import first_line

    said = "Exception from src/core.cpp:107:\nCheck 'ok' failed at frontend.cpp:124:\nno such operation: CDist\n\n"
    assert first_line(RuntimeError(said)) == "no such operation: CDist"
    assert first_line(RuntimeError("plain\nand more")) == "plain"
    assert first_line(MemoryError()) == "MemoryError"


def test_a_child_ends_with_the_node_that_was_killed(prefix):
    asked = {"path": str(prefix), "outputs": None, "precision": "fp32", "engines": ["onnxruntime"], "cores": 1,
             "like": None, "budget_s": 1e6}  # fmt: skip
    slow = ("import headwater.core.tuning as t; t.TRIAL_S = 300.0; t.TRIFLE_ROWS_PER_S = 1e30; "
            "import headwater.node.tuning as n; n.TRIAL_S = 300.0; n.main()")  # fmt: skip
    parent = f"""
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", {slow!r}], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
child.stdin.write({json.dumps(asked).encode()!r} + b"\\n"); child.stdin.flush()
print(child.pid, flush=True)
time.sleep(600)
"""
    node = subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE, text=True)
    child = int(node.stdout.readline())
    try:
        os.kill(child, 0)
        node.kill()
        node.wait()
        deadline = time.monotonic() + 60
        while alive(child):
            assert time.monotonic() < deadline, "the child outlived its node"
            time.sleep(0.05)
    finally:
        node.stdout.close()
        if alive(child):
            os.kill(child, signal.SIGKILL)


def alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_hello_says_what_was_chosen_for_each_prefix_and_why(build, upload, client, chunk_of, never_set):
    prefix = upload(convolution(build))
    assert client.hello()["prefixes"] == []
    client.rows(chunk_of(prefix), never_set)
    (said,) = client.hello()["prefixes"]
    assert (said["digest"], said["outputs"], said["precision"]) == (prefix, None, "fp32")
    assert said["engine"] in engines.available()
    assert said["threads"] >= 1
    assert said["batch"] >= 1
    assert "rows/s" in said["why"]
    assert all(trial["rows_per_s"] > 0 or trial["fault"] for trial in said["trials"])
    assert client.hello()["engines"] == list(engines.available())


def test_a_request_that_pins_an_engine_the_node_lacks_is_refused(
    build, upload, client, chunk_of, never_set, monkeypatch
):
    prefix = upload(build.model())
    monkeypatch.setattr(engines, "available", lambda: ("onnxruntime",))
    with pytest.raises(RefusedError, match="pins the engine 'openvino'"):
        client.rows(chunk_of(prefix, engine="openvino"), never_set)


@pytest.fixture
def never_set():
    import threading

    return threading.Event()
