"""Transforms as data: their JSON, their specs, their order, and their pixels."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from headwater.core.draw import Draw
from headwater.core.spec import TensorSpec
from headwater.data.transforms import (
    OPS,
    CenterCrop,
    ColorJitter,
    Decode,
    Grayscale,
    HorizontalFlip,
    Normalize,
    Pad,
    RandomCrop,
    RandomResizedCrop,
    Resize,
    ToFloat,
    Transforms,
    VerticalFlip,
)
from headwater.data.transforms.op import INTERPOLATIONS, Op
from headwater.errors import BadSampleError, ConfigError, TransformError

sides = st.integers(1, 40)
sizes = st.one_of(sides, st.tuples(sides, sides))
shares = st.floats(0, 1)
pads = st.one_of(st.integers(0, 9), st.tuples(*[st.integers(0, 9)] * 2), st.tuples(*[st.integers(0, 9)] * 4))
fills = st.one_of(st.integers(0, 255), st.tuples(*[st.integers(0, 255)] * 3))
modes = st.sampled_from(list(INTERPOLATIONS))
scales = st.tuples(shares, shares).map(sorted).map(tuple)
ratios = st.tuples(st.floats(0.1, 10), st.floats(0.1, 10)).map(sorted).map(tuple)
jitter = st.one_of(st.none(), st.floats(0, 0.5))
picture_ops: list[st.SearchStrategy[Op]] = [
    st.builds(Resize, sizes, modes),
    st.builds(CenterCrop, sizes),
    st.builds(RandomResizedCrop, sizes, scales, ratios, modes),
    st.builds(Pad, pads, fills),
    st.builds(HorizontalFlip, shares),
    st.builds(VerticalFlip, shares),
    st.builds(ColorJitter, jitter, jitter, jitter, jitter),
    st.just(Grayscale()),
    st.builds(lambda side, padding: RandomCrop(side, padding + 40), sides, st.integers(0, 9)),
]
normalizes = st.builds(Normalize, st.tuples(*[shares] * 3), st.tuples(*[st.floats(0.1, 2)] * 3))
chains = st.builds(
    lambda first, pictures, last, scale, values: Transforms([*first, *pictures, last, ToFloat(scale), *values]),
    st.lists(st.builds(Decode, st.booleans()), max_size=1),
    st.lists(st.one_of(picture_ops), max_size=4),
    st.builds(CenterCrop, sizes),
    st.sampled_from(["div", "mul", "none"]),
    st.lists(normalizes, max_size=2),
)
PICTURE = Image.fromarray(np.random.default_rng(0).integers(0, 256, (23, 31, 3), np.uint8))


@given(chains)
def test_a_chain_survives_json_and_keeps_its_digest(chain: Transforms) -> None:
    again = Transforms.from_json(json.loads(json.dumps(chain.to_json())))
    assert again == chain
    assert (again.digest, hash(again)) == (chain.digest, hash(chain))


@settings(deadline=None)
@given(chains, st.integers(0, 2**40), st.integers(0, 99), st.integers(0, 2**40))
def test_the_same_draw_gives_the_same_pixels_of_the_size_that_was_promised(
    chain: Transforms, seed: int, epoch: int, sample: int
) -> None:
    first, second = (chain.pixels(PICTURE, "x", Draw(seed, epoch, sample)) for _ in range(2))
    assert np.array_equal(first, second)
    assert TensorSpec("pixels", first.shape, str(first.dtype)) == chain.pixel_spec
    output = chain.finish(first)
    assert TensorSpec("input", output.shape, str(output.dtype)) == chain.output_spec


@given(scales, ratios, st.integers(1, 300), st.integers(1, 300), st.integers(0, 2**40))
def test_a_random_resized_crop_lies_within_the_picture(
    scale: Any, ratio: Any, height: int, width: int, seed: int
) -> None:
    top, left, tall, wide = RandomResizedCrop(8, scale, ratio).box(height, width, Draw(seed, 0, 0))
    assert 0 <= top <= top + tall <= height
    assert 0 <= left <= left + wide <= width


@given(st.tuples(sides, sides), st.integers(0, 50), st.integers(0, 50), st.integers(0, 2**40))
def test_a_random_crop_lies_within_the_picture(size: tuple[int, int], more: int, wider: int, seed: int) -> None:
    height, width = size[0] + more, size[1] + wider
    top, left = RandomCrop(size).corner(height, width, Draw(seed, 0, 0))
    assert 0 <= top <= more
    assert 0 <= left <= wider


def test_a_step_draws_the_same_however_much_the_one_before_it_draws() -> None:
    # Neither changes a pixel; the flip draws one number, the jitter an order and a factor.
    first, second = (
        Transforms([before, RandomCrop(10)]).pixels(PICTURE, "x", Draw(1, 2, 3))
        for before in (HorizontalFlip(0.0), ColorJitter(brightness=(1.0, 1.0 + 1e-12)))
    )
    assert np.array_equal(first, second)


def test_decode_written_or_not_draws_the_same() -> None:
    assert Transforms([Decode(), RandomCrop(10)]) == Transforms([RandomCrop(10)])


def test_samples_and_epochs_draw_differently() -> None:
    chain = Transforms([RandomResizedCrop(8)])
    drawn = {chain.pixels(PICTURE, "x", Draw(0, epoch, sample)).tobytes() for epoch in range(3) for sample in range(3)}
    assert len(drawn) == 9


def test_threads_share_a_chain() -> None:
    chain = Transforms([RandomResizedCrop(16), HorizontalFlip(), ColorJitter(0.4, 0.4, 0.4, 0.1), ToFloat()])
    alone = [chain.apply(PICTURE, "x", Draw(0, 0, sample)) for sample in range(50)]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda sample: chain.apply(PICTURE, "x", Draw(0, 0, sample)), range(50)))
    assert all(np.array_equal(one, other) for one, other in zip(alone, together, strict=True))


def test_finish_writes_batches_into_the_array_it_is_given() -> None:
    chain = Transforms([CenterCrop((5, 7)), ToFloat(), Normalize((0.1, 0.2, 0.3), (0.4, 0.5, 0.6))])
    batch = np.random.default_rng(0).integers(0, 256, (3, 5, 7, 3), np.uint8)
    out = np.empty((3, 3, 5, 7), np.float32)
    assert chain.finish(batch, out) is out
    assert all(np.array_equal(row, chain.finish(pixels)) for row, pixels in zip(out, batch, strict=True))
    with pytest.raises(ConfigError, match=r"finish writes float32 \(3, 3, 5, 7\)"):
        chain.finish(batch, np.empty((3, 5, 7, 3), np.float32))
    with pytest.raises(ConfigError, match="finish takes uint8"):
        chain.finish(batch.astype(np.float32))


def test_apply_decodes_and_names_the_sample_that_can_not_be(encode: Callable[..., bytes]) -> None:
    chain = Transforms([RandomCrop(30), ToFloat()])
    assert not np.isnan(chain.apply(encode(PICTURE.resize((40, 40))), "x", Draw(0, 0, 0))).any()
    with pytest.raises(BadSampleError, match=r"^cat/1\.jpg: RandomCrop: the picture has 31×23 .*pad more"):
        chain.apply(encode(PICTURE), "cat/1.jpg", Draw(0, 0, 0))
    with pytest.raises(BadSampleError, match=r"^cat/1\.jpg: "):
        chain.apply(b"junk", "cat/1.jpg", Draw(0, 0, 0))
    with pytest.raises(BadSampleError, match=r"max_pixels"):
        Transforms([Decode(max_pixels=9), CenterCrop(3)]).pixels(encode(PICTURE), "x")


def test_resizing_a_sliver_into_a_giant_is_refused() -> None:
    with pytest.raises(BadSampleError, match="give Resize both height and width, or a max_size"):
        Transforms([Resize(3000)]).pixels(Image.new("RGB", (1, 5000)), "x")


def test_random_transforms_need_a_draw_and_others_do_not() -> None:
    assert not Transforms([Resize(8)]).is_random
    Transforms([Resize(8)]).pixels(PICTURE, "x")
    assert Transforms([HorizontalFlip()]).is_random
    with pytest.raises(ConfigError, match=r"give the sample's Draw"):
        Transforms([HorizontalFlip()]).pixels(PICTURE, "x")


@pytest.mark.parametrize(
    ("ops", "size"),
    [
        ([Resize((4, 6))], (4, 6)),
        ([Resize((4, 6)), Pad((1, 2))], (8, 8)),
        ([Resize((4, 6)), Resize(8)], (8, 12)),
        ([CenterCrop(9), HorizontalFlip(), Grayscale()], (9, 9)),
        ([RandomCrop((3, 5), 4)], (3, 5)),
    ],
)
def test_the_size_is_known_without_running(ops: list[Op], size: tuple[int, int]) -> None:
    assert Transforms(ops).pixel_spec == TensorSpec("pixels", (*size, 3), "uint8")
    assert Transforms([*ops, ToFloat()]).output_spec == TensorSpec("input", (3, *size), "float32")
    assert Transforms(ops).output_spec == Transforms(ops).pixel_spec


@pytest.mark.parametrize("ops", [[], [Resize(8)], [Pad(2), HorizontalFlip()]])
def test_pictures_of_different_sizes_are_an_error_that_names_the_fix(ops: list[Op]) -> None:
    with pytest.raises(TransformError, match=r"different sizes after .*end with CenterCrop"):
        _ = Transforms(ops).pixel_spec


@pytest.mark.parametrize(
    ("ops", "match"),
    [
        ([Resize(8), Decode()], "only be the first"),
        ([ToFloat(), Resize(8)], r"Resize is step 2, after ToFloat; move it before"),
        ([ToFloat(), ToFloat()], "second time"),
        ([Normalize((0, 0, 0), (1, 1, 1))], r"put ToFloat\(\) before it"),
        (["Resize"], "must be one of"),
    ],
)
def test_steps_in_the_wrong_place_are_refused(ops: list[Any], match: str) -> None:
    with pytest.raises(TransformError, match=match):
        Transforms(ops)


def test_a_chain_without_floats_ends_in_pixels() -> None:
    chain = Transforms([CenterCrop(8)])
    assert not chain.is_float
    assert chain.apply(PICTURE, "x").dtype == np.uint8
    with pytest.raises(TransformError, match=r"add ToFloat\(\)"):
        chain.finish(chain.pixels(PICTURE, "x"))


@pytest.mark.parametrize(
    ("data", "match"),
    [
        ({}, "a list"),
        ([{}] * 101, "at most 100"),
        ([3], "step 0 is 3"),
        ([{"op": "Blur"}], r"one of .*Resize"),
        ([{"op": ["Resize"]}], "one of"),
        ([{"op": "Resize"}], "Resize: field 'size' is missing"),
        ([{"op": "Resize", "size": 8, "colour": 1}], "Resize: unknown field 'colour'; it has size"),
        ([{"op": "Resize", "size": "8"}], "Resize: size is '8'; it must be an int or"),
        ([{"op": "Resize", "size": 0}], "from 1 to"),
        ([{"op": "Resize", "size": True}], "from 1 to"),
        ([{"op": "Resize", "size": 8, "max_size": 8}], r"above size \(8\)"),
        ([{"op": "Resize", "size": [8, 8], "max_size": 9}], "left out"),
        ([{"op": "Resize", "size": 8, "interpolation": ["nearest"]}], "one of nearest, bilinear"),
        ([{"op": "CenterCrop", "size": [1, 2, 3]}], r"\(height, width\)"),
        ([{"op": "CenterCrop", "size": 65500}], "at most 178,956,970 pixels"),
        ([{"op": "RandomResizedCrop", "size": 8, "scale": [1, 0.5]}], "min ≤ max"),
        ([{"op": "RandomResizedCrop", "size": 8, "ratio": [0, 1]}], "ratio"),
        ([{"op": "RandomCrop", "size": 8, "padding_mode": "reflect"}], "'constant'"),
        ([{"op": "Pad", "padding": [1, 2, 3]}], "2 or 4 ints"),
        ([{"op": "Pad", "padding": -1}], "0 or more"),
        ([{"op": "Pad", "padding": 1, "fill": 256}], "0 to 255"),
        ([{"op": "HorizontalFlip", "p": float("nan")}], "from 0 to 1"),
        ([{"op": "ColorJitter", "brightness": -1}], "brightness is -1"),
        ([{"op": "ColorJitter", "hue": 0.6}], "hue is"),
        ([{"op": "Grayscale", "num_output_channels": 1}], "3: rows have three channels"),
        ([{"op": "ToFloat", "scale": "half"}], '"div"'),
        ([{"op": "ToFloat"}, {"op": "Normalize", "mean": 0.5, "std": [1, 0, 1]}], "std is .* above 0"),
        ([{"op": "ToFloat"}, {"op": "Normalize", "mean": [1, 2], "std": 1}], "three finite numbers"),
        ([{"op": "Decode", "exif": 1}], "true or false"),
        ([{"op": "Decode", "max_pixels": 10**12}], "where Pillow refuses"),
    ],
)
def test_json_with_anything_wrong_names_step_field_and_what_is_allowed(data: Any, match: str) -> None:
    with pytest.raises(TransformError, match=match):
        Transforms.from_json(data)


def test_the_table_has_every_step_once() -> None:
    assert all(op.__name__ == name for name, op in OPS.items())
    assert {"Decode", "Resize", "Normalize", "ToFloat"} < set(OPS)
