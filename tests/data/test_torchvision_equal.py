"""Equal to torchvision's own PIL pipeline, bit for bit.

Random steps run torchvision's real code on our numbers: its sources of chance are replaced by the sample's `Draw`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from headwater.core.draw import Draw
from headwater.data.torchvision import from_torchvision
from headwater.data.transforms import Transforms

torch = pytest.importorskip("torch")
v1 = pytest.importorskip("torchvision.transforms")
v2 = pytest.importorskip("torchvision.transforms.v2")

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
SIZES = [(40, 30), (30, 40), (33, 33), (7, 90), (224, 225), (101, 64)]
BILINEAR, BICUBIC = v1.InterpolationMode.BILINEAR, v1.InterpolationMode.BICUBIC
LANCZOS, NEAREST = v1.InterpolationMode.LANCZOS, v1.InterpolationMode.NEAREST


def _v1_end() -> list[Any]:
    return [v1.ToTensor(), v1.Normalize(MEAN, STD)]


def _v2_end() -> list[Any]:
    return [v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, STD)]


@pytest.fixture(params=SIZES, ids=str)
def image(request: pytest.FixtureRequest, picture: Callable[..., Image.Image]) -> Image.Image:
    return picture(*request.param, seed=sum(request.param))


def _assert_equal(ours: np.ndarray, theirs: Any) -> None:
    assert ours.dtype == np.float32
    assert ours.shape == tuple(theirs.shape)
    assert np.array_equal(ours, theirs.numpy())


@pytest.mark.parametrize(
    "steps",
    [
        [v1.Resize(32), v1.CenterCrop(28)],
        [v1.Resize((20, 31)), v1.CenterCrop((28, 19))],
        [v1.Resize(20, max_size=45), v1.CenterCrop(41)],
        [v1.Resize([24], interpolation=BICUBIC), v1.CenterCrop([21])],
        [v1.Resize(50, interpolation=LANCZOS), v1.CenterCrop(31)],
        [v1.Resize(17, interpolation=NEAREST), v1.CenterCrop(17)],
        [v1.Pad(3), v1.CenterCrop(29)],
        [v1.Pad((3, 5), fill=(10, 20, 30)), v1.CenterCrop(230)],
        [v1.Pad((1, 2, 3, 4), fill=7), v1.Grayscale(3), v1.CenterCrop(28)],
    ],
    ids=str,
)
def test_fixed_v1_steps_are_equal(image: Image.Image, steps: list[Any]) -> None:
    compose = v1.Compose([*steps, *_v1_end()])
    transforms, rest = from_torchvision(compose)
    assert rest == []
    _assert_equal(transforms.apply(image, "x"), compose(image))


@pytest.mark.parametrize(
    "steps",
    [
        [v2.Resize(32), v2.CenterCrop(28)],
        [v2.RGB(), v2.Resize((20, 31), interpolation="bicubic"), v2.CenterCrop((28, 19))],
        [v2.Resize(20, max_size=45, interpolation=3), v2.CenterCrop(41)],
        [v2.Pad([1, 2, 3, 4], fill=7), v2.Grayscale(3), v2.Identity(), v2.CenterCrop(28)],
        [v2.Compose([v2.Resize(40), v2.Compose([v2.CenterCrop(50)])])],
        [v2.Resize((20, 20)), v2.ToImage(), v2.Pad(2), v2.CenterCrop(23)],
    ],
    ids=lambda steps: str(len(steps)),
)
def test_fixed_v2_steps_are_equal(image: Image.Image, steps: list[Any]) -> None:
    compose = v2.Compose([*steps, *_v2_end()])
    transforms, rest = from_torchvision(compose)
    assert rest == []
    _assert_equal(transforms.apply(image, "x"), compose(image))


@pytest.mark.parametrize(
    "end",
    [
        [v1.ToTensor()],
        [v1.PILToTensor(), v1.ConvertImageDtype(torch.float32)],
        [v2.PILToTensor(), v2.ConvertImageDtype(torch.float32)],
        [v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.ToPureTensor()],
        [v2.ToImage(), v2.ToDtype(torch.float32, scale=False)],
        [v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.Normalize([0.5], [0.25]), v2.Normalize(MEAN, STD)],
    ],
    ids=str,
)
def test_every_way_to_floats_is_equal_for_all_256_values(end: list[Any]) -> None:
    values = np.arange(256, dtype=np.uint8).reshape(16, 16)
    image = Image.fromarray(np.dstack([values, values[::-1], values.T]))
    compose = v2.Compose([v1.CenterCrop(16), *end])
    _assert_equal(from_torchvision(compose)[0].apply(image, "x"), compose(image))


@pytest.mark.parametrize("name", ["ResNet50_Weights", "EfficientNet_B0_Weights", "ViT_B_16_Weights", "Swin_T_Weights"])
def test_the_presets_of_weights_are_equal(name: str, image: Image.Image) -> None:
    models = pytest.importorskip("torchvision.models")
    preset = getattr(models, name).DEFAULT.transforms()
    transforms, rest = from_torchvision(preset)
    assert rest == []
    _assert_equal(transforms.apply(image, "x"), preset(image))


def test_real_pictures_through_a_preset_are_equal(grocery: Path) -> None:
    models = pytest.importorskip("torchvision.models")
    preset = models.ResNet18_Weights.DEFAULT.transforms()
    transforms, _ = from_torchvision(preset)
    for path in sorted((grocery / "val").rglob("*.jpg"))[::60]:
        theirs = preset(Image.open(path).convert("RGB"))
        _assert_equal(transforms.apply(path.read_bytes(), path.name), theirs)


@pytest.fixture
def chance(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any, Draw], Any]:
    """chance(step, draw): the step with its chance taken from the draw."""
    source: list[Draw] = []

    def uniform_(tensor: Any, low: Any = 0.0, high: Any = 1.0) -> Any:
        return tensor.fill_(source[-1].uniform(float(low), float(high)))

    def randint(low: int, high: int, size: Any) -> Any:
        return torch.full(size, source[-1].integer(low, high))

    monkeypatch.setattr(torch.Tensor, "uniform_", uniform_)
    monkeypatch.setattr(torch, "randint", randint)
    monkeypatch.setattr(torch, "rand", lambda count: torch.tensor([source[-1].uniform()], dtype=torch.float64))
    monkeypatch.setattr(torch, "randperm", lambda count: torch.tensor(source[-1].permutation(count)))

    def run(step: Any, draw: Draw) -> Callable[[Image.Image], Any]:
        def call(image: Image.Image) -> Any:
            source.append(draw)
            return step(image)

        return call

    return run


RANDOM = [
    lambda v: [v.RandomResizedCrop(24)],
    lambda v: [v.RandomResizedCrop((20, 31), scale=(0.3, 0.9), ratio=(0.2, 0.4), interpolation=BICUBIC)],
    lambda v: [v.RandomResizedCrop(16, scale=(2.0, 3.0))],
    lambda v: [v.RandomResizedCrop(16, scale=(2.0, 3.0), ratio=(5.0, 6.0))],
    lambda v: [v.Resize((32, 32)), v.RandomCrop(32, padding=4)],
    lambda v: [v.Resize((32, 40)), v.RandomCrop((30, 36), padding=(1, 2, 3, 4), fill=(1, 2, 3))],
    lambda v: [v.Resize((32, 32)), v.RandomHorizontalFlip(), v.RandomVerticalFlip(0.3)],
    lambda v: [v.Resize((32, 32)), v.ColorJitter(0.4, 0.3, 0.5, 0.2)],
    lambda v: [v.Resize((32, 32)), v.ColorJitter(brightness=(0.2, 3.0), hue=(-0.5, 0.5))],
    lambda v: [v.Resize((32, 32)), v.ColorJitter(contrast=0.9, saturation=2.0)],
    lambda v: [v.RandomResizedCrop(24), v.RandomHorizontalFlip(), v.ColorJitter(0.4, 0.4, 0.4, 0.1)],
]


@pytest.mark.parametrize("make", RANDOM, ids=range(len(RANDOM)))
@pytest.mark.parametrize(("library", "end"), [(v1, _v1_end), (v2, _v2_end)], ids=["v1", "v2"])
def test_random_steps_are_equal_given_the_same_draw(
    chance: Callable[[Any, Draw], Any], image: Image.Image, make: Any, library: Any, end: Any
) -> None:
    steps = make(library)
    transforms, rest = from_torchvision(library.Compose([*steps, *end()]))
    assert rest == []
    for sample in range(4):
        draw = Draw(7, 1, sample)
        # Step 0 is Decode, so the first step of the Compose draws from stream 1.
        wired = [chance(step, draw.stream(place)) for place, step in enumerate(steps, 1)]
        theirs = library.Compose([*wired, *end()])(image)
        _assert_equal(transforms.apply(image, "x", draw), theirs)


def test_timms_evaluation_is_equal(image: Image.Image) -> None:
    timm = pytest.importorskip("timm.data")
    for mode in ("center", "squash"):
        compose = timm.create_transform(64, crop_pct=0.9, interpolation="bicubic", crop_mode=mode)
        transforms, rest = from_torchvision(compose)
        assert rest == []
        _assert_equal(transforms.apply(image, "x"), compose(image))


def test_timms_training_is_read_and_its_crop_is_equal(image: Image.Image, monkeypatch: pytest.MonkeyPatch) -> None:
    timm = pytest.importorskip("timm.data")
    compose = timm.create_transform(48, is_training=True, hflip=0.0, color_jitter=None, interpolation="bicubic")
    transforms, rest = from_torchvision(compose)
    assert (rest, [type(op).__name__ for op in transforms.ops][1]) == ([], "RandomResizedCrop")
    crop = transforms.ops[1]
    for sample in range(4):
        box = crop.box(image.height, image.width, Draw(0, 0, sample).stream(1))  # type: ignore[attr-defined]
        monkeypatch.setattr(compose.transforms[0], "get_params", lambda *_, box=box: box)
        _assert_equal(transforms.apply(image, "x", Draw(0, 0, sample)), compose(image))


def test_a_saved_chain_gives_the_same_as_the_compose_it_was_read_from(image: Image.Image) -> None:
    compose = v1.Compose([v1.Resize(32), v1.CenterCrop(28), *_v1_end()])
    saved = Transforms.from_json(from_torchvision(compose)[0].to_json())
    _assert_equal(saved.apply(image, "x"), compose(image))
