"""Training with the first layers on nodes gives what one process with the whole batch gives.

Small models, small pictures, real nodes in other processes. A handful of cases run always; `-m slow` runs every model
with 1, 2 and 4 nodes at an early, a middle and a late cut.
"""

from __future__ import annotations

import contextlib
import copy

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import headwater as hw
from headwater.core.cut import offered_cuts
from headwater.core.draw import Draw
from headwater.core.order import Dealing, Order
from headwater.data.layouts import list_samples
from headwater.data.transforms import HorizontalFlip, Normalize, Resize, ToFloat, Transforms
from headwater.model.capture import capture
from headwater.model.trainable import trainable_cuts
from headwater.train.client import NodeClient
from headwater.train.partition_measure import _suffix_s

SEED, BATCH, STEPS, SIZE = 3, 10, 50, 32
# A tensor whose elements are all below it is noise: the bias in front of another batch-norm has a gradient of zero, and
# Adam divides rounding by rounding.
FLOOR = 1e-6
PIXELS = Transforms([Resize((SIZE, SIZE)), HorizontalFlip(0.5), ToFloat(), Normalize((0.5,) * 3, (0.5,) * 3)])

STILL = Transforms([Resize((SIZE, SIZE)), ToFloat(), Normalize((0.5,) * 3, (0.5,) * 3)])


def vgg():
    layers: list[nn.Module] = []
    for wide_in, wide_out in ((3, 6), (6, 8), (8, 10)):
        layers += [nn.Conv2d(wide_in, wide_out, 3, padding=1), nn.ReLU(inplace=True), nn.MaxPool2d(2)]
    return nn.Sequential(nn.Sequential(*layers), nn.Flatten(), nn.Linear(10 * 16, 12), nn.ReLU(True), nn.Linear(12, 3))


def resnet():
    from torchvision.models.resnet import BasicBlock, ResNet

    model = ResNet(BasicBlock, [1, 1, 1, 1], num_classes=3)
    for module in model.modules():
        if isinstance(module, nn.Conv2d):  # an eighth of the width
            module.in_channels, module.out_channels = max(3, module.in_channels // 8), module.out_channels // 8
            module.weight = nn.Parameter(
                torch.randn(module.out_channels, module.in_channels, *module.kernel_size) * 0.1
            )
        elif isinstance(module, nn.BatchNorm2d):
            module.__init__(module.num_features // 8)
    model.fc = nn.Linear(64, 3)
    return model


def mobilenet():
    from torchvision.models import mobilenet_v2

    model = mobilenet_v2(num_classes=3, width_mult=0.1, dropout=0.0)
    model.features = model.features[:8]
    model.classifier = nn.Linear(8, 3)
    return model


def vit():
    import timm

    return timm.create_model("vit_tiny_patch16_224", img_size=SIZE, patch_size=8, embed_dim=24, depth=3, num_heads=2,
                             num_classes=3)  # fmt: skip


MODELS = {"vgg": vgg, "resnet": resnet, "mobilenet": mobilenet, "vit": vit}
PLACES = {"early": 0.15, "middle": 0.5, "late": 0.85}
OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.01),
    "nesterov": lambda params: torch.optim.SGD(params, lr=0.01, momentum=0.9, nesterov=True, weight_decay=1e-3),
    "adam": lambda params: torch.optim.Adam(params, lr=1e-3),
    "adamw": lambda params: torch.optim.AdamW(params, lr=1e-3),
}


def built(name, dtype=torch.float64):
    torch.manual_seed(0)
    return MODELS[name]().to(dtype).train()


def cut_at(model, place):
    """The name of a cut at the end of a module, so far through the model."""
    example = torch.zeros(2, 3, SIZE, SIZE, dtype=next(model.parameters()).dtype)
    found = [cut for cut in offered_cuts(trainable_cuts(capture(model, (example,)))) if cut.index > 0]
    return found[round(PLACES[place] * (len(found) - 1))].name


def plain(model, folder, optimizer, steps=STEPS):
    """The loop that a user would write without Headwater."""
    samples = list_samples(str(folder))
    keys, order = samples.keys.to_pylist(), Order(len(samples), samples.fingerprint, SEED)
    dealing, losses, epoch = Dealing(len(samples), BATCH), [], 0
    while len(losses) < steps:
        ids = order.epoch(epoch)
        for step in dealing.steps():
            batch = ids[step.start : step.stop].tolist()
            pixels = [PIXELS.apply((folder / keys[i]).read_bytes(), keys[i], Draw(SEED, epoch, i)) for i in batch]
            x = torch.from_numpy(np.stack(pixels)).to(next(model.parameters()).dtype)
            optimizer.zero_grad()
            loss = cross_entropy(model(x), torch.from_numpy(samples.labels[batch]))
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            if len(losses) == steps:
                break
        epoch += 1
    return losses


def parted(model, folder, optimizer, steps=STEPS, **options):
    losses = []
    with hw.partition(model, folder, transforms=PIXELS, batch_size=BATCH, seed=SEED, **options) as job:
        while len(losses) < steps:
            for batch in job.steps():
                optimizer.zero_grad()
                losses.append(batch.backward(cross_entropy).item())
                optimizer.step()
                if len(losses) == steps:
                    break
        job.sync()
    return losses


def assert_equal_training(model, folder, nodes, cut, optimizer="sgd", steps=STEPS, rel=1e-9, **options):
    reference, ours = copy.deepcopy(model), model
    wanted = plain(reference, folder, OPTIMIZERS[optimizer](reference.parameters()), steps)
    found = parted(ours, folder, OPTIMIZERS[optimizer](ours.parameters()), steps, nodes=nodes, cut=cut, **options)
    assert found == pytest.approx(wanted, rel=rel)
    for name, tensor in reference.state_dict().items():
        other = ours.state_dict()[name]
        if not tensor.is_floating_point():
            assert torch.equal(tensor, other), name
        elif max(tensor.abs().max(), other.abs().max()) > FLOOR:
            assert (tensor - other).abs().max() <= rel * tensor.abs().max(), name


@pytest.fixture(scope="module")
def nodes(pictures, start_node_once):
    """Four real nodes over the same pictures."""
    return [start_node_once(pictures, options=("--threads", "1")).address for _ in range(4)]


def test_one_node_trains_as_one_process(pictures, nodes):
    model = built("vgg")
    assert_equal_training(model, pictures, nodes[:1], cut_at(model, "middle"))


@pytest.mark.parametrize(
    ("name", "count", "place", "optimizer"),
    [
        ("vgg", 4, "late", "nesterov"),
        ("resnet", 2, "middle", "sgd"),
        ("mobilenet", 4, "early", "adamw"),
        ("vit", 2, "late", "adam"),
    ],
)
def test_nodes_train_as_one_process(name, count, place, optimizer, pictures, nodes):
    """Batch-norms of resnet and mobilenet have the statistics of the whole batch, and so have their running ones."""
    model = built(name)
    assert_equal_training(model, pictures, nodes[:count], cut_at(model, place), optimizer, steps=12)


def test_micro_batches_and_uneven_shares_change_nothing(pictures, nodes):
    model = built("vgg")
    assert_equal_training(model, pictures, nodes[:3], cut_at(model, "middle"), "adam", 12, micro_batches=5,
                          shares=[1, 0.2, 3])  # fmt: skip


def test_frozen_batch_norms_let_a_batch_go_through_in_parts(pictures, nodes):
    model = built("resnet")
    reference = copy.deepcopy(model)
    for module in reference.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.eval()
    wanted = plain(reference, pictures, OPTIMIZERS["sgd"](reference.parameters()), 6)
    found = parted(model, pictures, OPTIMIZERS["sgd"](model.parameters()), 6, nodes=nodes[:2], cut="layer2",
                   batch_norm="frozen", micro_batches=3)  # fmt: skip
    assert found == pytest.approx(wanted, rel=1e-9)
    assert model.layer1[0].bn1.training  # the user's own modes are as they were


def test_what_is_frozen_in_front_is_sent_once_and_what_is_trained_each_time(pictures, nodes):
    model = built("vgg")
    for parameter in model[0][0].parameters():
        parameter.requires_grad_(False)
    frozen = copy.deepcopy(model[0][0].state_dict())
    assert_equal_training(copy.deepcopy(model), pictures, nodes[:2], "0", steps=6)
    sent = []
    with hw.partition(model, pictures, transforms=PIXELS, batch_size=BATCH, seed=SEED, nodes=nodes[:1], cut="0") as job:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        (peer,) = job._replicas.peers.values()
        send = peer.send
        peer.send = lambda kind, about=None, arrays=None: (sent.append((kind, sorted(arrays or ()))),
                                                           send(kind, about, arrays))  # fmt: skip
        for batch in job.steps():
            optimizer.zero_grad()
            batch.backward(cross_entropy)
            optimizer.step()
    weights = [names for kind, names in sent if kind == "weights"]
    assert "0.0.weight" in weights[0]
    assert not any("0.0.weight" in names for names in weights[1:])
    assert all("0.3.weight" in names for names in weights)
    torch.testing.assert_close(dict(model[0][0].state_dict()), dict(frozen), rtol=0, atol=0)


def test_what_frozen_layers_made_is_kept_where_pictures_stay_the_same(pictures, start_node, monkeypatch):
    """In later epochs the node neither reads nor decodes them; the training is that of one process."""
    monkeypatch.setitem(globals(), "PIXELS", STILL)
    model = built("vgg")
    for parameter in model[0][0].parameters():
        parameter.requires_grad_(False)
    node = start_node(pictures)
    assert_equal_training(model, pictures, [node.address], "0", steps=12)
    with contextlib.closing(NodeClient(node.address)) as client:
        assert client.hello()["busy"]["num_rows"] < 12 * BATCH  # 50 pictures, and what was begun for the next epoch


def test_a_prefix_with_nothing_to_train_gets_no_gradients(pictures, nodes):
    model = built("vgg")
    for parameter in model[0].parameters():
        parameter.requires_grad_(False)
    assert_equal_training(model, pictures, nodes[:2], "0", steps=6)


@pytest.mark.parametrize("cut", ["input", "none"])
def test_with_pixels_alone_and_with_nothing_moved(cut, pictures, nodes):
    model = built("vit", torch.float64)
    assert_equal_training(model, pictures, nodes[:2], cut, steps=6)


@pytest.mark.parametrize(("codec", "rel"), [("fp16", 0.01), ("bf16", 0.05)])
def test_a_reduced_codec_stays_within_its_error(codec, rel, pictures, nodes):
    model = built("vgg", torch.float32)
    reference = copy.deepcopy(model)
    wanted = plain(reference, pictures, OPTIMIZERS["sgd"](reference.parameters()), 10)
    found = parted(model, pictures, OPTIMIZERS["sgd"](model.parameters()), 10, nodes=nodes[:2],
                   cut=cut_at(model, "middle"), codec=codec)  # fmt: skip
    assert found == pytest.approx(wanted, rel=rel)
    assert found != wanted


def test_a_planned_cut_trains_as_well(pictures, nodes):
    model = built("vgg")
    with hw.partition(
        copy.deepcopy(model), pictures, transforms=PIXELS, batch_size=BATCH, seed=SEED, nodes=nodes[:2]
    ) as job:
        assert job.ranking[0][1] == job.plan
        assert {plan.place for _, plan in job.ranking} == {"nodes", "trainer"}
        assert all(seconds > 0 for seconds, _ in job.ranking)
    assert_equal_training(model, pictures, nodes[:2], "auto", steps=6)


@pytest.mark.slow
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("name", MODELS)
def test_every_model_at_every_place_on_every_number_of_nodes(name, count, place, pictures, nodes):
    model = built(name)
    assert_equal_training(model, pictures, nodes[:count], cut_at(model, place))


@pytest.mark.slow
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("name", MODELS)
def test_every_model_in_float32(name, count, place, pictures, nodes):
    model = built(name, torch.float32)
    assert_equal_training(model, pictures, nodes[:count], cut_at(model, place), rel=1e-4)


def test_measuring_leaves_random_numbers_as_they_were():
    """Or a planned cut would draw other dropout than a pinned one."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Dropout(0.5), nn.Flatten(), nn.Linear(4 * 36, 2))
    captured = capture(model, (torch.zeros(2, 3, 8, 8),))
    before = torch.get_rng_state()
    assert _suffix_s(captured, trainable_cuts(captured)[0], 4) > 0
    assert torch.equal(torch.get_rng_state(), before)
