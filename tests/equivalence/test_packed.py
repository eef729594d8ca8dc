"""A packed set trains as its source does: same batches bit for bit, same losses, on every way to carry a plan out."""

import copy

import pytest
import torch
from torch.nn.functional import cross_entropy

import headwater as hw
from headwater.core.plan import Plan
from headwater.data.shards.pack import pack
from headwater.data.transforms import CenterCrop, HorizontalFlip, Normalize, Resize, ToFloat, Transforms
from headwater.errors import BadSampleError, TransformError

TRANSFORMS = Transforms(
    [
        Resize(48),
        CenterCrop(32),
        HorizontalFlip(0.5),
        ToFloat(),
        Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    ]
)
BATCH, SEED = 8, 3

pytestmark = pytest.mark.usefixtures("moments")


@pytest.fixture(scope="module")
def packed(pictures, tmp_path_factory):
    target = tmp_path_factory.mktemp("packed") / "set"
    pack(str(pictures), str(target), TRANSFORMS, shard_bytes=30_000)
    return target


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    body = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3, stride=2), torch.nn.ReLU(), torch.nn.AdaptiveAvgPool2d(2),
                               torch.nn.Flatten())  # fmt: skip
    return hw.freeze(torch.nn.Sequential(body, torch.nn.Linear(32, 3)).eval(), until="1")


def near(model, data, **options):
    options = {"transforms": TRANSFORMS, "batch_size": BATCH, "seed": SEED, "plan": None, **options}
    return hw.near(copy.deepcopy(model), data, **options)


def batches(model, data, epochs=2, **options):
    """Every batch's tensors, labels and loss."""
    found = []
    with near(model, data, **options) as job:
        for _ in range(epochs):
            for x, y in job.loader:
                tensors = x.tensors if isinstance(x, hw.Rows) else (x,)
                found.append((*(each.clone() for each in tensors), y, cross_entropy(job.model(x), y).detach()))
    return found


def assert_equal(found, expected):
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize(
    "options",
    [{}, {"cut": "input"}, {"nodes": "inline"}, {"nodes": "inline", "cut": "input"}, {"plan": Plan()}],
    ids=["node", "pixels near the data", "inline", "inline pixels", "nothing moves"],
)
def test_batches_and_losses_are_those_of_the_source(model, pictures, packed, options):
    assert_equal(batches(model, packed, **options), batches(model, pictures, **options))


def test_through_two_nodes(model, pictures, packed, start_node):
    nodes = [start_node(packed).address for _ in range(2)]
    assert_equal(batches(model, packed, nodes=nodes), batches(model, pictures))


def test_in_an_object_store(model, pictures, s3):
    from obstore.store import S3Store

    S3Store.from_url(s3, client_options={"allow_http": True}).put("other", b"")
    pack(str(pictures), f"{s3}/packed", TRANSFORMS, shard_bytes=30_000)
    expected = batches(model, pictures)
    assert_equal(batches(model, f"{s3}/packed"), expected)
    assert_equal(batches(model, f"{s3}/packed", plan=Plan()), batches(model, pictures, plan=Plan()))


def test_a_run_on_the_pictures_goes_on_with_the_packed_set(model, pictures, packed):
    expected = batches(model, pictures, epochs=1)
    with near(model, pictures) as job:
        stream = iter(job.loader)
        for _ in range(3):
            next(stream)
        state = job.loader.state_dict()
        stream.close()
    with near(model, packed) as job:
        job.loader.load_state_dict(state)
        found = [(*x.tensors, y) for x, y in job.loader]
    assert_equal(found, [each[:-1] for each in expected[3:]])


def test_with_a_plan_of_its_own(model, pictures, packed):
    """Planned from measured costs, which are not those of the pictures."""
    with near(model, pictures, plan="auto") as job:
        before = job.measured.profile
    with near(model, packed, plan="auto") as job:
        assert job.measured.profile.key != before.key
        labels = torch.cat([y for _, y in job.loader])
    assert torch.equal(labels, torch.cat([each[-2] for each in batches(model, pictures, epochs=1)]))


def test_other_transforms_are_refused_before_work_starts(model, packed):
    other = Transforms([Resize(49), CenterCrop(32), ToFloat()])
    with pytest.raises(TransformError, match=r"Resize\(size=48.*step 1.*Resize\(size=49.*headwater pack SRC DST"):
        near(model, packed, transforms=other)


def test_a_damaged_shard_stops_the_run_or_its_samples_are_skipped(model, pictures, tmp_path):
    target = tmp_path / "packed"
    pack(str(pictures), str(target), TRANSFORMS, shard_bytes=30_000)
    shard = target / "shards" / "00000001.hws"
    data = bytearray(shard.read_bytes())
    data[1000] ^= 1
    shard.write_bytes(data)
    with pytest.raises(BadSampleError, match=r"shards/00000001\.hws: the record at byte 0 is damaged.*--verify"):
        batches(model, target)
    with near(model, target, on_bad_sample="skip") as job:
        assert sum(len(y) for _, y in job.loader) == 49
        assert [each.key for each in job.loader.skipped] == ["shards/00000001.hws"]
