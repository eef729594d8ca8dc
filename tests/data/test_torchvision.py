"""What is read from torchvision and timm, what stays with the trainer, and what is refused."""

from __future__ import annotations

import warnings
from typing import Any

import pytest

from headwater.data.torchvision import as_transforms, from_torchvision
from headwater.data.transforms import (
    CenterCrop,
    ColorJitter,
    HorizontalFlip,
    Normalize,
    RandomResizedCrop,
    Resize,
    ToFloat,
    Transforms,
)
from headwater.errors import TransformError

torch = pytest.importorskip("torch")
v1 = pytest.importorskip("torchvision.transforms")
v2 = pytest.importorskip("torchvision.transforms.v2")


def test_nested_composes_and_sequentials_are_flattened() -> None:
    inner = torch.nn.Sequential(v1.CenterCrop(8), v1.RandomHorizontalFlip(0.25))
    transforms, rest = from_torchvision(v2.Compose([v1.Compose([v1.Resize(9)]), inner, v1.ToTensor()]))
    assert rest == []
    assert transforms == Transforms([Resize(9), CenterCrop(8), HorizontalFlip(0.25), ToFloat("div")])


def test_timms_simple_training_is_read() -> None:
    timm = pytest.importorskip("timm.data")
    transforms, rest = from_torchvision(timm.create_transform(32, is_training=True, interpolation="bilinear"))
    assert rest == []
    kinds = [type(op) for op in transforms.ops[1:]]
    assert kinds == [RandomResizedCrop, HorizontalFlip, ColorJitter, ToFloat, Normalize]


def test_timms_own_tensor_step_keeps_0_to_255() -> None:
    timm = pytest.importorskip("timm.data.transforms")
    transforms, _ = from_torchvision([v1.CenterCrop(8), timm.ToTensor()])
    assert transforms.ops[-1] == ToFloat("none")


def _read(*steps: Any) -> tuple[Transforms, list[Any]]:
    with pytest.warns(UserWarning, match="stay on the trainer") as seen:
        result = from_torchvision(v2.Compose(list(steps)))
    assert len(seen) == 1
    assert type(result[1][0]).__name__ in str(seen[0].message) or "<lambda>" in str(seen[0].message)
    return result


def test_what_follows_an_unreadable_step_stays_on_the_trainer_in_order() -> None:
    erase, blur, tensor = v1.RandomErasing(), v1.GaussianBlur(3), v1.ToTensor()
    transforms, rest = _read(v1.CenterCrop(8), tensor, erase)
    assert (transforms.is_float, rest) == (True, [erase])
    transforms, rest = _read(v1.CenterCrop(8), blur, tensor)
    assert (transforms.is_float, rest) == (False, [blur, tensor])
    own = lambda x: x  # noqa: E731
    assert _read(v1.CenterCrop(8), own, tensor)[1] == [own, tensor]


@pytest.mark.parametrize(
    "step",
    [
        v2.Resize((4, 4)),
        v2.ColorJitter(0.5),
        v2.RandomResizedCrop(4),
        v2.Grayscale(3),
    ],
    ids=lambda step: type(step).__name__,
)
def test_a_step_on_tensors_that_differs_from_pictures_is_not_read(step: Any) -> None:
    to_image, to_float = v2.ToImage(), v2.ToDtype(torch.float32, scale=True)
    with pytest.warns(UserWarning, match=rf"{type(step).__name__}: gives other numbers on tensors"):
        transforms, rest = from_torchvision(v2.Compose([v2.CenterCrop(9), to_image, v2.CenterCrop(8), step, to_float]))
    assert transforms == Transforms([CenterCrop(9), CenterCrop(8)])
    assert rest == [to_image, step, to_float]


@pytest.mark.parametrize(
    "step",
    [
        v1.Grayscale(1),
        v1.RandomCrop(4, pad_if_needed=True),
        v1.Pad(2, padding_mode="reflect"),
        v2.Pad(2, fill={"others": 3}),
        v2.ToDtype({"others": None}),
        v1.RandomHorizontalFlip,
    ],
    ids=str,
)
def test_a_setting_without_a_counterpart_stays_on_the_trainer(step: Any) -> None:
    with pytest.warns(UserWarning, match="stay on the trainer"):
        assert from_torchvision([v1.CenterCrop(8), step, v1.ToTensor()])[1][0] is step


def test_timms_random_interpolation_is_not_read() -> None:
    timm = pytest.importorskip("timm.data")
    with pytest.raises(TransformError, match="interpolation at random"):
        from_torchvision(timm.create_transform(32, is_training=True, interpolation="random"))


def test_a_class_of_the_users_own_with_a_known_name_is_not_read() -> None:
    class Resize:
        def __call__(self, image: Any) -> Any:
            return image

    with pytest.warns(UserWarning, match="Resize: is not a transform that can be read"):
        from_torchvision([v1.CenterCrop(8), Resize(), v1.ToTensor()])


@pytest.mark.parametrize("steps", [[v1.GaussianBlur(3)], [v1.Resize(9), v1.GaussianBlur(3), v1.CenterCrop(8)]])
def test_a_remainder_without_a_fixed_size_is_an_error_with_the_fix(steps: list[Any]) -> None:
    with pytest.raises(TransformError, match=r"GaussianBlur: .*different sizes.*put CenterCrop"):
        from_torchvision([*steps, v1.ToTensor()])
    with pytest.raises(TransformError, match=r"Resize: gives other numbers on tensors.*before the tensor step"):
        from_torchvision([v2.ToImage(), v2.Resize(9), v2.CenterCrop(8), v2.ToDtype(torch.float32, scale=True)])


@pytest.mark.parametrize("steps", [[v1.CenterCrop(8)], [v1.CenterCrop(8), v2.ToImage()], []])
def test_a_compose_without_the_float_step_is_told_so(steps: list[Any]) -> None:
    with pytest.raises(TransformError, match=r"no step that makes float tensors; add a ToTensor"):
        from_torchvision(v1.Compose(steps))


def test_normalize_before_the_float_step_is_an_error() -> None:
    for before in ([], [v2.ToImage()]):
        with pytest.raises(TransformError, match="Normalize needs a float tensor"):
            from_torchvision([v1.CenterCrop(8), *before, v1.Normalize([0.5], [0.5]), v1.ToTensor()])


def test_what_is_no_transform_is_an_error() -> None:
    with pytest.raises(TransformError, match="is not a transform; give a Compose"):
        from_torchvision("resnet50")


def test_reading_a_readable_compose_warns_of_nothing() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        from_torchvision([v1.RandomResizedCrop(8), v1.ToTensor()])


def test_as_transforms_takes_chains_lists_json_and_composes() -> None:
    half = Normalize((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
    chain = Transforms([CenterCrop(8), ToFloat(), half])
    assert as_transforms(chain) is chain
    assert as_transforms([CenterCrop(8), ToFloat(), half]) == chain
    assert as_transforms(chain.to_json()) == chain
    assert as_transforms([{"op": "CenterCrop", "size": 8}, ToFloat(), half.to_json()]) == chain
    assert as_transforms(v1.Compose([v1.CenterCrop(8), v1.ToTensor(), v1.Normalize([0.5] * 3, [0.5] * 3)])) == chain
    with (
        pytest.warns(UserWarning, match="trainer"),
        pytest.raises(TransformError, match="RandomErasing can't run near"),
    ):
        as_transforms(v1.Compose([v1.CenterCrop(8), v1.ToTensor(), v1.RandomErasing()]))
