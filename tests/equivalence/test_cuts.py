"""Any legal cut equals no cut: the same outputs, the same gradients, the same weights after training.

Models have random weights and small inputs. Sampled cuts of one model of each family run always; `-m slow` runs every
cut of every model.
"""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import onnxruntime
import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from headwater.core.cut import Cut, find_cut, legal_cuts
from headwater.model.capture import Captured, capture
from headwater.model.cuts import cuts
from headwater.model.flow import flow, module_path
from headwater.model.near import NearModel, Rows, tensors_in_front
from headwater.model.ship import ship
from headwater.model.split import prefix_module, suffix_module

# Relative to the largest element of what is compared; a tensor whose elements are all below the floor counts as noise.
TOLERANCE = 1e-4
FLOOR = 1e-2
NUM_CLASSES = 5


def vision(name: str, size: int) -> Callable[[], tuple[nn.Module, tuple[Tensor, ...]]]:
    def build() -> tuple[nn.Module, tuple[Tensor, ...]]:
        import torchvision

        # VGG's own initialisation takes seconds, and any weights will do.
        options = {"init_weights": False} if name.startswith("vgg") else {}
        model = torchvision.models.get_model(name, weights=None, num_classes=NUM_CLASSES, **options)
        if name.startswith(("vgg", "alexnet")):
            narrow(model.classifier)
        return model, (torch.randn(4, 3, size, size),)

    return build


def narrow(classifier: nn.Sequential) -> None:
    """The same layers, 64 wide instead of 4096: 120 million weights take minutes and show nothing more."""
    for position, layer in enumerate(classifier):
        if isinstance(layer, nn.Linear):
            wide_in, wide_out = layer.in_features, layer.out_features
            classifier[position] = nn.Linear(64 if wide_in == 4096 else wide_in, 64 if wide_out == 4096 else wide_out)


def from_timm(name: str, **options: int) -> Callable[[], tuple[nn.Module, tuple[Tensor, ...]]]:
    def build() -> tuple[nn.Module, tuple[Tensor, ...]]:
        import timm

        return timm.create_model(name, num_classes=NUM_CLASSES, **options), (torch.randn(4, 3, 64, 64),)

    return build


def efficientnet_lite0() -> tuple[nn.Module, tuple[Tensor, ...]]:
    from efficientnet_lite_pytorch import EfficientNet

    return EfficientNet.from_name("efficientnet-lite0", num_classes=NUM_CLASSES), (torch.randn(4, 3, 64, 64),)


def bert() -> tuple[nn.Module, tuple[Tensor, ...]]:
    from transformers import BertConfig, BertModel

    sizes = {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 2, "intermediate_size": 64}
    ids = torch.randint(0, 100, (4, 12))
    mask = (torch.arange(12) < torch.tensor([[12], [7], [9], [3]])).long()
    return BertModel(BertConfig(vocab_size=100, max_position_embeddings=32, **sizes)), (ids, mask)


MODELS = {
    "AlexNet": vision("alexnet", 64),
    "VGG11": vision("vgg11", 32),
    "VGG19": vision("vgg19", 32),
    "ResNet18": vision("resnet18", 64),
    "ResNet50": vision("resnet50", 64),
    "DenseNet121": vision("densenet121", 64),
    "MobileNetV3": vision("mobilenet_v3_small", 64),
    "EfficientNet-lite0": efficientnet_lite0,
    "ViT": from_timm("vit_tiny_patch16_224", img_size=64),
    "ConvNeXt": from_timm("convnext_atto"),
    "BERT": bert,
}


@dataclass(frozen=True)
class Subject:
    """A model, its inputs, and its capture in eval mode with nothing trainable: shapes alone decide on a cut."""

    model: nn.Module
    inputs: tuple[Tensor, ...]
    captured: Captured
    legal: tuple[Cut, ...]


@functools.cache
def subject(name: str) -> Subject:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # other people's imports
        torch.manual_seed(0)
        model, inputs = MODELS[name]()
    settle_batch_norms(model, inputs)
    model.eval().requires_grad_(False)
    captured = capture(model, inputs)
    return Subject(model, inputs, captured, legal_cuts(cuts(captured)))


def settle_batch_norms(model: nn.Module, inputs: tuple[Tensor, ...]) -> None:
    """Fresh running statistics let random weights shrink activations to nothing, and nothing equals nothing."""
    norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
    before = [norm.momentum for norm in norms]
    for norm in norms:
        norm.momentum = 1.0
    with torch.no_grad():
        model.train()(*inputs)
    for norm, momentum in zip(norms, before, strict=True):
        norm.momentum = momentum


@pytest.fixture(scope="module", autouse=True)
def forget_models() -> Iterator[None]:
    yield
    subject.cache_clear()


def sampled(legal: tuple[Cut, ...], count: int = 6) -> list[Cut]:
    """The first, the last, and cuts spread evenly between them."""
    return [legal[round(step * (len(legal) - 1) / (count - 1))] for step in range(count)]


def loss_of(output: object) -> Tensor:
    """One number that every element of the output matters to."""
    leaves = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
    return torch.stack(
        [(leaf * torch.linspace(-1, 1, leaf.numel()).reshape(leaf.shape)).mean() for leaf in leaves]
    ).sum()


def gradients(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    if loss.requires_grad:
        loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_close(found: Tensor, expected: Tensor, what: str) -> None:
    found, expected = found.detach(), expected.detach()
    scale = max(FLOOR, float(expected.abs().max()))
    assert float((found - expected).abs().max()) <= TOLERANCE * scale, what


def freeze_in_front(model: nn.Module, captured: Captured, cut: Cut) -> None:
    """Training mode, but for what runs in front of the cut; finer than hw.freeze, which goes by registration."""
    graph = flow(captured)
    frozen = set(tensors_in_front(graph, cut.index))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name not in frozen)
    model.train()
    for place in graph.places[: cut.index]:
        model.get_submodule(module_path(place)).training = False


def assert_cut_equals_no_cut(it: Subject, cut: Cut) -> None:
    frozen = set(tensors_in_front(flow(it.captured), cut.index))
    for name, parameter in it.model.named_parameters():
        parameter.requires_grad_(name not in frozen)
    try:
        with torch.no_grad():
            rows = prefix_module(it.captured, cut)(*it.inputs)
        expected = it.model(*it.inputs)
        expected_gradients = gradients(it.model, loss_of(expected))
        output = suffix_module(it.captured, cut)(*(tensor.clone() for tensor in rows))
        found_gradients = gradients(it.model, loss_of(output))
    finally:
        it.model.zero_grad()
        it.model.requires_grad_(False)
    assert type(output) is type(expected)
    for found, wanted in zip(tree_leaves(output), tree_leaves(expected), strict=True):
        assert_close(found, wanted, f"output, cut at {cut.name}")
    assert found_gradients.keys() == expected_gradients.keys()
    for name, wanted in expected_gradients.items():
        assert_close(found_gradients[name], wanted, f"gradient of {name}, cut at {cut.name}")


def trained(model: nn.Module, forward: Callable[[], object]) -> dict[str, Tensor]:
    """The state after five steps of SGD with momentum."""
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(trainable, lr=0.01, momentum=0.9)
    for step in range(5):
        torch.manual_seed(step)
        optimizer.zero_grad()
        loss_of(forward()).backward()
        optimizer.step()
    return {name: value.detach() for name, value in model.state_dict().items()}


def assert_training_is_the_same(it: Subject, cut: Cut) -> None:
    """In training mode behind the cut: dropout draws, and batch-norm learns its statistics."""
    plain, near = copy.deepcopy(it.model), copy.deepcopy(it.model)
    for model in (plain, near):
        freeze_in_front(model, it.captured, cut)
    captured = capture(near, it.inputs)
    here = find_cut(cuts(captured), cut.index)
    with torch.no_grad():
        rows = Rows(prefix_module(captured, here)(*it.inputs), here.index)
    near_model = NearModel(captured)
    found = trained(near, lambda: near_model(rows))
    expected = trained(plain, lambda: plain(*it.inputs))
    assert found.keys() == expected.keys()
    assert any(moved(it.model.state_dict()[name], wanted) for name, wanted in expected.items()), "nothing was trained"
    for name, wanted in expected.items():
        assert_close(found[name].double(), wanted.double(), f"{name} after five steps, cut at {cut.name}")


def moved(before: Tensor, after: Tensor) -> bool:
    """By so much that training differently would show."""
    return after.is_floating_point() and float((after - before).abs().max()) > 100 * TOLERANCE * FLOOR


def assert_onnx_equals_torch(it: Subject, cut: Cut, folder: Path) -> None:
    shipped = ship(it.captured, cut, cache_dir=folder)
    session = onnxruntime.InferenceSession(shipped.path, providers=["CPUExecutionProvider"])
    feeds = {spec.name: tensor.numpy() for spec, tensor in zip(shipped.inputs, it.inputs, strict=True)}
    with torch.no_grad():
        expected = prefix_module(it.captured, cut)(*it.inputs)
    found = session.run([spec.name for spec in shipped.outputs], feeds)
    for spec, array, wanted in zip(shipped.outputs, found, expected, strict=True):
        assert (array.shape[1:], str(array.dtype)) == (spec.shape, spec.dtype)
        assert_close(torch.from_numpy(array).double(), wanted.double(), f"{spec.name}, cut at {cut.name}")


def trainable_behind(it: Subject) -> list[Cut]:
    """The cuts with something left to train."""
    return [cut for cut in it.legal if cut.prefix_params < it.legal[-1].prefix_params]


# The full sweep has all of these for the larger ones of a family, too.
LARGER = ("VGG11", "VGG19", "ResNet50", "DenseNet121")
MOST = [pytest.param(name, marks=[pytest.mark.slow] if name in LARGER else []) for name in MODELS]


@pytest.mark.parametrize("name", MOST)
def test_sampled_cuts_give_the_outputs_and_gradients_of_no_cut(name: str) -> None:
    for cut in sampled(subject(name).legal):
        assert_cut_equals_no_cut(subject(name), cut)


@pytest.mark.parametrize("name", MOST)
def test_five_steps_behind_a_cut_end_at_the_weights_of_no_cut(name: str) -> None:
    candidates = trainable_behind(subject(name))
    assert_training_is_the_same(subject(name), candidates[len(candidates) // 2])


@pytest.mark.parametrize("name", MOST)
def test_the_onnx_prefix_gives_what_the_torch_prefix_gives(name: str, tmp_path: Path) -> None:
    legal = subject(name).legal
    assert_onnx_equals_torch(subject(name), legal[len(legal) // 3], tmp_path)


@pytest.mark.parametrize(
    ("name", "cut", "count"),
    [
        ("ResNet18", "layer2.0.bn2", 2),
        pytest.param("DenseNet121", "features.denseblock1.denselayer3.conv1", 4, marks=pytest.mark.slow),
        ("BERT", "encoder.layer.1", 2),
    ],
)
def test_a_boundary_of_several_tensors_equals_no_cut(name: str, cut: str, count: int) -> None:
    found = find_cut(cuts(subject(name).captured), cut)
    assert len(found.boundary) == count
    assert_cut_equals_no_cut(subject(name), found)
    assert_training_is_the_same(subject(name), found)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", MODELS)
def test_every_cut_gives_the_outputs_and_gradients_of_no_cut(name: str) -> None:
    for cut in subject(name).legal:
        assert_cut_equals_no_cut(subject(name), cut)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", MODELS)
def test_five_steps_behind_sampled_cuts_end_at_the_weights_of_no_cut(name: str) -> None:
    for cut in sampled(tuple(trainable_behind(subject(name)))):
        assert_training_is_the_same(subject(name), cut)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", MODELS)
def test_the_onnx_prefix_of_sampled_cuts_gives_what_the_torch_prefix_gives(name: str, tmp_path: Path) -> None:
    for cut in sampled(subject(name).legal)[1:]:
        assert_onnx_equals_torch(subject(name), cut, tmp_path)
