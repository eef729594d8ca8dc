"""A node in this process, and a prefix that is made without torch."""

import hashlib
import shutil
import threading

import onnx
import pyarrow.flight as flight
import pytest
from onnx import TensorProto
from onnx import helper as make

from headwater.core.spec import TensorSpec
from headwater.data.layouts import list_samples
from headwater.data.transforms import Resize, ToFloat, Transforms
from headwater.data.wire import Chunk, Extraction
from headwater.node.service import Node
from headwater.train.client import NodeClient

PIXELS = Transforms([Resize((8, 8)), ToFloat()])
BOUNDARY = (TensorSpec("mean", (3,), "float32"),)


def onnx_model(nodes=None, weights=(), domain=""):
    """[n, 3, 8, 8] → [n, 3], by default the mean over each channel."""
    nodes = nodes or [make.make_node("ReduceMean", ["x"], ["mean"], axes=[2, 3], keepdims=0, domain=domain)]
    graph = make.make_graph(
        nodes,
        "prefix",
        [make.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 3, 8, 8])],
        [make.make_tensor_value_info("mean", TensorProto.FLOAT, ["n", 3])],
        list(weights),
    )
    opsets = [make.make_opsetid("", 17), *([make.make_opsetid(domain, 1)] if domain else [])]
    return make.make_model(graph, opset_imports=opsets, ir_version=8).SerializeToString()


def model_with_a_tensor_in(location):
    weight = TensorProto(name="w", dims=[3], data_type=TensorProto.FLOAT, data_location=TensorProto.EXTERNAL)
    for key, value in (("location", str(location)), ("offset", "0"), ("length", "12")):
        entry = weight.external_data.add()
        entry.key, entry.value = key, value
    mean = make.make_node("ReduceMean", ["x"], ["m"], axes=[2, 3], keepdims=0)
    return onnx_model([mean, make.make_node("Add", ["m", "w"], ["mean"])], [weight])


def digest_of(data):
    return hashlib.sha256(data).hexdigest()


@pytest.fixture
def build():
    """What the tests make models of."""

    class Build:
        model = staticmethod(onnx_model)
        with_a_tensor_in = staticmethod(model_with_a_tensor_in)
        digest = staticmethod(digest_of)
        onnx = onnx

    return Build


@pytest.fixture
def state(tmp_path):
    return tmp_path / "state"


@pytest.fixture(scope="session")
def records(tmp_path_factory):
    """What nodes of this session have found out about engines."""
    return tmp_path_factory.mktemp("records")


@pytest.fixture
def tried_before(records, state):
    """Engines that an earlier test tried with the same prefix are not tried again, as on a node that is restarted."""
    shutil.copytree(records, state / "tuning")
    yield
    shutil.copytree(state / "tuning", records, dirs_exist_ok=True)


@pytest.fixture
def is_wary():
    """Uploads are tried in a process of their own; files that are not about uploads say otherwise."""
    return True


@pytest.fixture
def node(pictures, state, tried_before, is_wary):
    """A node over the pictures; every test has its own, with no prefix yet."""
    node = Node("grpc://127.0.0.1:0", (str(pictures),), state=state, num_threads=2, max_upload_bytes=1_000_000,
                is_wary=is_wary)  # fmt: skip
    yield node
    node.stop(5)


@pytest.fixture
def client(node):
    client = NodeClient(f"grpc://127.0.0.1:{node.port}")
    yield client
    client.close()


@pytest.fixture
def raw(node):
    """A Flight client that knows nothing of our protocol."""
    with flight.connect(f"grpc://127.0.0.1:{node.port}") as raw:
        yield raw


@pytest.fixture
def upload(client, tmp_path):
    """upload(bytes, digest): as a client would, or as one who lies about the digest."""

    def send(data, digest=None):
        path = tmp_path / "upload.onnx"
        path.write_bytes(data)
        client.upload(digest or digest_of(data), path)
        return digest_of(data)

    return send


@pytest.fixture
def chunk_of(pictures):
    """chunk_of(prefix): a request for all pictures."""

    def make_chunk(prefix=None, folder=pictures, node_batch=8, transforms=PIXELS, **changes):
        samples = list_samples(str(folder))
        boundary = BOUNDARY if prefix else (transforms.pixel_spec,)
        want = Extraction(samples.url, transforms, prefix, boundary, node_batch=node_batch, **changes)
        return Chunk(want, "job", 0, 0, 0, tuple(samples.take(range(len(samples)))))

    return make_chunk


@pytest.fixture
def never():
    return threading.Event()
