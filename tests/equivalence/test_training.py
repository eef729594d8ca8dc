"""A plan never changes the numbers: training near the data gives the losses of a plain loop over the same order."""

import copy

import pytest
import torch
from torch.nn.functional import cross_entropy

import headwater as hw
from headwater.core.draw import Draw
from headwater.core.order import Order
from headwater.core.plan import Plan
from headwater.data.layouts import list_samples
from headwater.data.transforms import ColorJitter, HorizontalFlip, Normalize, RandomResizedCrop, ToFloat, Transforms

AUGMENT = Transforms(
    [
        RandomResizedCrop(64),
        HorizontalFlip(0.5),
        ColorJitter(0.3, 0.3, 0.3, 0.1),
        ToFloat(),
        Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    ]
)
BATCH, EPOCHS, SEED = 10, 2, 5


@pytest.fixture(scope="module")
def model():
    from torchvision.models import resnet18

    torch.manual_seed(0)
    return hw.freeze(resnet18(num_classes=3).eval(), until="layer4")


def optimizer_of(model):
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.002)


def plain_losses(model, folder):
    """The loop that a user would write without Headwater."""
    model = copy.deepcopy(model)
    optimizer, losses = optimizer_of(model), []
    samples = list_samples(str(folder))
    keys = samples.keys.to_pylist()
    order = Order(len(samples), samples.fingerprint, SEED)
    model.train()
    for epoch in range(EPOCHS):
        ids = order.epoch(epoch).tolist()
        for start in range(0, len(ids), BATCH):
            batch = ids[start : start + BATCH]
            pixels = [AUGMENT.apply((folder / keys[i]).read_bytes(), keys[i], Draw(SEED, epoch, i)) for i in batch]
            x = torch.stack([torch.from_numpy(each) for each in pixels])
            losses.append(step(model, optimizer, x, torch.from_numpy(samples.labels[batch])))
    return losses, model


def step(model, optimizer, x, y):
    loss = cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


def near_losses(model, folder, **options):
    model = copy.deepcopy(model)
    optimizer = optimizer_of(model)
    if "plan" not in options:
        options.setdefault("cut", "layer3")
    with hw.near(model, folder, transforms=AUGMENT, batch_size=BATCH, seed=SEED, **options) as job:
        job.model.train()
        losses = [step(job.model, optimizer, x, y) for _ in range(EPOCHS) for x, y in job.loader]
    return losses, model


@pytest.fixture(scope="module")
def plain(model, pictures):
    return plain_losses(model, pictures)


def assert_same_training(found, expected):
    (losses, trained), (wanted, reference) = found, expected
    assert losses == pytest.approx(wanted, rel=1e-3)
    for name, tensor in reference.state_dict().items():
        torch.testing.assert_close(trained.state_dict()[name], tensor, rtol=1e-3, atol=1e-3, msg=name)


def test_through_an_embedded_node(model, pictures, plain):
    assert_same_training(near_losses(model, pictures), plain)


def test_through_three_nodes(model, pictures, plain, start_node):
    nodes = [start_node(pictures).address for _ in range(3)]
    assert_same_training(near_losses(model, pictures, nodes=nodes), plain)


def test_through_the_inline_runtime(model, pictures, plain):
    assert_same_training(near_losses(model, pictures, nodes="inline"), plain)


def test_with_nothing_moved_to_the_storage(model, pictures, plain):
    assert_same_training(near_losses(model, pictures, plan=Plan()), plain)


def test_with_only_the_pixels_made_near_the_data(model, pictures, plain):
    assert_same_training(near_losses(model, pictures, cut="input"), plain)


@pytest.mark.parametrize("cut", ["layer2", "layer3.0.conv1"])
def test_with_other_cuts(model, pictures, plain, cut):
    assert_same_training(near_losses(model, pictures, cut=cut), plain)


def test_pictures_in_an_object_store_train_as_those_on_disk(model, pictures, plain, s3):
    from headwater.data.store import open_store

    store = open_store(s3)
    for path in pictures.rglob("*.jpg"):
        store._objects.put(str(path.relative_to(pictures)), path.read_bytes())
    assert_same_training(near_losses(model, s3), plain)


def test_a_reduced_codec_stays_within_its_error(model, pictures, plain):
    losses, _ = near_losses(model, pictures, codec="fp16")
    assert losses == pytest.approx(plain[0], rel=0.05)


def test_evaluation_runs_the_whole_model_on_plain_inputs(model, pictures):
    model = copy.deepcopy(model)
    with hw.near(model, pictures, transforms=AUGMENT, batch_size=BATCH, cut="layer3") as job:
        x, _ = next(iter(job.loader))
        assert isinstance(x, hw.Rows)
        job.model.eval()
        images = torch.randn(2, 3, 64, 64)
        assert torch.equal(job.model(images), model(images))
