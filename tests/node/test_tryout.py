"""What breaks an engine ends the child that had a first look, and not the node."""

import contextlib
import hashlib
import os

import numpy as np
import pyarrow as pa
import pyarrow.flight as flight
import pytest
from onnx import helper as make
from onnx import numpy_helper

from headwater.data import wire
from headwater.errors import ConfigError, RefusedError
from headwater.node.child import Children
from headwater.node.prefixes import Prefixes
from headwater.node.tryout import try_out

ENDS = {"a crash": "os.kill(os.getpid(), signal.SIGSEGV)", "an abort": "os.abort()", "no answer": "os._exit(0)",
        "an answer that is none": "print('[]')", "an error": "raise OSError"}  # fmt: skip


class Broken(Children):
    """Children that run another module than the one that is asked for."""

    def run(self, module, request, within_s, abandoned=lambda: False):
        return super().run("broken_engine", request, within_s, abandoned)


@pytest.mark.parametrize("end", ENDS)
def test_an_engine_that_breaks_is_a_refusal_and_nothing_is_kept(end, build, tmp_path, monkeypatch):
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "broken_engine.py").write_text(f"import os, signal\n{ENDS[end]}\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path / "code"), os.environ.get("PYTHONPATH", "")]))
    kept = Prefixes(tmp_path / "kept", 1 << 20, try_out=lambda path: try_out(Broken(), path))
    model = build.model()
    with pytest.raises(RefusedError, match="broke the engine that tried it"):
        kept.put(build.digest(model), [model])
    assert list((tmp_path / "kept").iterdir()) == []


def test_a_small_file_that_becomes_a_huge_tensor_is_refused_and_the_node_stays_up(build, upload, client):
    shape = numpy_helper.from_array(np.array([1 << 18, 1 << 18], np.int64), "shape")
    nodes = [make.make_node("ConstantOfShape", ["shape"], ["huge"]),
             make.make_node("ReduceSum", ["huge"], ["sum"], keepdims=0),
             make.make_node("ReduceMean", ["x"], ["m"], axes=[2, 3], keepdims=0),
             make.make_node("Add", ["m", "sum"], ["mean"])]  # fmt: skip
    with pytest.raises(RefusedError, match=r"the prefix .*(alloc|memory)"):
        upload(build.model(nodes, [shape]))
    assert client.hello()["protocol"] == wire.PROTOCOL


def test_an_upload_whose_offsets_lead_out_of_its_buffer_is_refused_and_the_node_stays_up(raw, client):
    """Arrow takes them on trust: reading such a piece would end the process."""
    offsets, body = np.array([0, 1 << 30, 3], np.int32), b"abc"
    piece = pa.Array.from_buffers(pa.binary(), 2, [None, pa.py_buffer(offsets), pa.py_buffer(body)])
    batch = pa.RecordBatch.from_arrays([piece], ["piece"])
    digest = hashlib.sha256(b"").hexdigest().encode()
    writer, _ = raw.do_put(flight.FlightDescriptor.for_command(digest), batch.schema)
    with pytest.raises(flight.FlightServerError) as caught, contextlib.closing(writer):
        writer.write_batch(batch)
    assert isinstance(wire.error_from_wire(caught.value.extra_info), ConfigError)
    assert client.hello()["protocol"] == wire.PROTOCOL


def test_a_child_that_met_an_error_of_python_did_not_break():
    ended = Children().run("headwater.node.tryout", b"not json", 60)
    assert ended.code == 1
    assert not ended.broke
