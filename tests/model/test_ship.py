from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch import Tensor, nn

from headwater.core.cut import Cut, find_cut, legal_cuts
from headwater.errors import ImpureError, ModelError, RefusedError
from headwater.model import ship as ship_module
from headwater.model.capture import Captured, capture
from headwater.model.cuts import cuts
from headwater.model.freeze import freeze
from headwater.model.ship import default_cache, ship
from headwater.model.split import prefix_module
from headwater.node.engine import Engine
from headwater.node.onnxfile import up_to


def prepared(model: nn.Module, cut: str, *inputs: Tensor) -> tuple[Captured, Cut]:
    captured = capture(freeze(model), inputs)
    return captured, find_cut(cuts(captured), cut)


def run(path: Path, outputs: list[str], feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
    return onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"]).run(outputs, feeds)


@pytest.fixture
def no_export(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("exported again")

    monkeypatch.setattr(torch.onnx, "export", refuse)


@pytest.mark.parametrize("rows", [1, 7])
def test_the_onnx_prefix_gives_the_boundary_in_order_for_any_batch(
    small: nn.Module, images: Tensor, tmp_path: Path, rows: int
) -> None:
    captured, cut = prepared(small, "block.0", images)
    shipped = ship(captured, cut, cache_dir=tmp_path)
    x = torch.randn(rows, 3, 8, 8)
    got = run(shipped.path, [spec.name for spec in shipped.outputs], {shipped.inputs[0].name: x.numpy()})
    assert shipped.outputs == cut.boundary
    for array, tensor in zip(got, prefix_module(captured, cut)(x), strict=True):
        assert np.allclose(array, tensor, atol=1e-4)


def test_one_file_gives_every_cut_what_its_own_prefix_gives(small: nn.Module, images: Tensor, tmp_path: Path) -> None:
    """In-place ReLUs included: what crosses before one is not what crosses after it."""
    captured = capture(freeze(small), (images,))
    wanted = legal_cuts(cuts(captured))[1:]
    shipped = ship(captured, *wanted, cache_dir=tmp_path)
    assert "bn1" in {cut.name for cut in wanted}
    for cut in wanted:
        engine = Engine(shipped.path.read_bytes(), shipped.names_at(cut))
        for array, tensor in zip(engine.run(images.numpy(), cut.boundary), prefix_module(captured, cut)(images),
                                 strict=True):  # fmt: skip
            assert np.allclose(array, tensor, atol=1e-5), cut.name


def test_a_part_of_a_file_has_only_the_operators_it_needs(small: nn.Module, images: Tensor, tmp_path: Path) -> None:
    captured = capture(freeze(small), (images,))
    wanted = legal_cuts(cuts(captured))[1:]
    shipped = ship(captured, *wanted, cache_dir=tmp_path)
    whole = shipped.path.read_bytes()
    parts = [onnx.load_from_string(up_to(whole, shipped.names_at(cut))) for cut in wanted]
    num_nodes = [len(part.graph.node) for part in parts]
    assert num_nodes == sorted(num_nodes)
    assert num_nodes[0] < num_nodes[-1]
    for part in parts:
        onnx.checker.check_model(part, full_check=True)
        used = {name for node in part.graph.node for name in node.input}
        assert {tensor.name for tensor in part.graph.initializer} <= used


def test_an_output_that_is_not_there_is_named(small: nn.Module, images: Tensor, tmp_path: Path) -> None:
    shipped = ship(*prepared(small, "conv1", images), cache_dir=tmp_path)
    with pytest.raises(RefusedError, match="gives no 'block'; it gives conv1"):
        up_to(shipped.path.read_bytes(), ["block"])
    for junk in (b"", b"\xff" * 20, shipped.path.read_bytes()[:-5]):
        with pytest.raises(RefusedError, match="not an ONNX file"):
            up_to(junk, ["conv1"])


def test_one_file_named_by_its_digest_is_all_that_is_left(small: nn.Module, images: Tensor, tmp_path: Path) -> None:
    shipped = ship(*prepared(small, "block", images), cache_dir=tmp_path)
    assert shipped.path == tmp_path / f"{shipped.digest}.onnx"
    assert shipped.num_bytes == shipped.path.stat().st_size
    assert sorted(file.suffix for file in tmp_path.rglob("*") if file.is_file()) == [".json", ".onnx"]


def test_exporting_says_nothing(
    small: nn.Module, images: Tensor, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    ship(*prepared(small, "conv1", images), cache_dir=tmp_path)
    assert capfd.readouterr() == ("", "")


def test_the_second_time_nothing_is_exported(
    small: nn.Module, images: Tensor, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    first = ship(*prepared(small, "block", images), cache_dir=tmp_path)
    request.getfixturevalue("no_export")
    assert ship(*prepared(small, "block", images), cache_dir=tmp_path) == first


def test_a_weight_behind_the_cut_does_not_matter_and_one_in_front_does(
    small: nn.Module, images: Tensor, tmp_path: Path
) -> None:
    first = ship(*prepared(small, "conv1", images), cache_dir=tmp_path)
    with torch.no_grad():
        small.fc.weight.add_(1)
    assert ship(*prepared(small, "conv1", images), cache_dir=tmp_path) == first
    with torch.no_grad():
        small.conv1.weight.add_(1)
    assert ship(*prepared(small, "conv1", images), cache_dir=tmp_path).digest != first.digest


@pytest.mark.parametrize("damage", [b"", b"not a model"])
def test_a_damaged_file_is_exported_again(small: nn.Module, images: Tensor, tmp_path: Path, damage: bytes) -> None:
    first = ship(*prepared(small, "conv1", images), cache_dir=tmp_path)
    first.path.write_bytes(damage)
    again = ship(*prepared(small, "conv1", images), cache_dir=tmp_path)
    assert again.num_bytes > 100
    run(again.path, None, {"x": images.numpy()})


@pytest.mark.parametrize("index", ["", '{"onnx": "../elsewhere"}'])
def test_a_damaged_index_is_made_anew(small: nn.Module, images: Tensor, tmp_path: Path, index: str) -> None:
    first = ship(*prepared(small, "conv1", images), cache_dir=tmp_path)
    (entry,) = (tmp_path / "index").iterdir()
    entry.write_text(index)
    assert ship(*prepared(small, "conv1", images), cache_dir=tmp_path).path.parent == first.path.parent


def test_racing_writers_leave_one_whole_file(small: nn.Module, images: Tensor, tmp_path: Path) -> None:
    def write(_: int) -> None:
        with ship_module._writing(tmp_path) as scratch:
            scratch.write_bytes(b"x" * 100_000)
            scratch.replace(tmp_path / "one.onnx")

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(write, range(40)))
    assert [file.stat().st_size for file in tmp_path.iterdir()] == [100_000]


class Passes(nn.Module):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return (x * 2) * mask


def test_an_input_that_crosses_as_it_is_gets_a_second_name(tmp_path: Path) -> None:
    x, mask = torch.randn(3, 2), torch.ones(3, 2, dtype=torch.int64)
    shipped = ship(*prepared(Passes(), "/mul", x, mask), cache_dir=tmp_path)
    got = run(shipped.path, [spec.name for spec in shipped.outputs], {"x": x.numpy(), "mask": mask.numpy()})
    assert [spec.name for spec in shipped.outputs] == ["mask.out", "/mul"]
    assert np.array_equal(got[0], mask)
    assert np.allclose(got[1], x * 2)


class Centres(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return (x - x.mean(0, keepdim=True)) * 2


def test_a_prefix_that_mixes_rows_is_refused_before_it_is_shipped(tmp_path: Path) -> None:
    with pytest.raises(ImpureError, match="depends on the other rows"):
        ship(*prepared(Centres(), "/sub", torch.ones(4, 3)), cache_dir=tmp_path)
    assert not list(tmp_path.iterdir())


def test_an_operator_without_an_onnx_form_is_named(small: nn.Module, tmp_path: Path) -> None:
    class Odd(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.special.bessel_j0(x) + 1

    with pytest.raises(ModelError, match=r"(?s)bessel_j0.*way out"):
        ship(*prepared(Odd(), 1, torch.randn(2, 3)), cache_dir=tmp_path)
    assert not [file for file in tmp_path.rglob("*") if file.is_file()]


def test_illegal_and_empty_prefixes_are_not_shipped(small: nn.Module, images: Tensor, tmp_path: Path) -> None:
    captured = capture(freeze(small, until="fc"), (images,))
    with pytest.raises(ImpureError, match=r"fc\.weight is trainable"):
        ship(captured, cuts(captured)[-1], cache_dir=tmp_path)
    with pytest.raises(ModelError, match="no prefix to ship"):
        ship(captured, cuts(captured)[0], cache_dir=tmp_path)


def test_the_cache_follows_xdg(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_cache() == tmp_path / "headwater" / "prefixes"
