"""Every block of code in the documents does what it says: Python runs, files are read by those who would read them.

Python runs as it is written, but for what `World.instead` lists: addresses, URLs, and sizes. What a block takes for
granted (a model, transforms, a job) is made by the function of its page below.
"""

from __future__ import annotations

import json
import tomllib
import warnings
from collections import Counter, OrderedDict
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from tests.docs.blocks import Block, all_blocks, pages
from tests.docs.world import World
from torch import nn
from torch.nn.functional import cross_entropy

import headwater as hw
from headwater.core.plan import near_plan
from headwater.data.transforms import HorizontalFlip, Normalize, RandomResizedCrop, Resize, ToFloat

BLOCKS = all_blocks()
# Blocks that take more than some seconds; (page, which of its Python blocks, from 0).
SLOW = {("docs/engines.md", 0), ("docs/partition.md", 0), ("docs/text.md", 0), ("docs/trainers.md", 1)}
MAY_WARN = {"docs/engines.md"}  # whether int8 is near enough depends on the CPU
# Without a language: commands (test_commands.py), pictures and formulas.
KINDS = {"", "python", "toml", "json", "yaml", "bash"}


def small_model(num_classes: int = 10) -> nn.Module:
    torch.manual_seed(0)
    features = nn.Sequential(nn.Conv2d(3, 8, 3, stride=2), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    return hw.freeze(nn.Sequential(OrderedDict(features=features, head=nn.Linear(8, num_classes))), until="head")


def small_vgg(num_classes: int) -> nn.Module:
    """Convolutions, pooling, and a layer behind them, as a VGG's."""
    torch.manual_seed(0)
    features = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.MaxPool2d(4), nn.Conv2d(4, 8, 3, padding=1),
                             nn.ReLU(), nn.AdaptiveAvgPool2d(2))  # fmt: skip
    return nn.Sequential(OrderedDict(features=features, flatten=nn.Flatten(), classifier=nn.Linear(32, num_classes)))


TRANSFORMS = [Resize((64, 64)), ToFloat(), Normalize((0.5,) * 3, (0.5,) * 3)]
AUGMENT = [RandomResizedCrop(64), HorizontalFlip(), *TRANSFORMS[1:]]
Names = dict[str, Any]


def nothing(world: World, stack: ExitStack) -> Names:
    return {}


def plain(world: World, stack: ExitStack) -> Names:
    """A small model, transforms, and the names that everybody imports."""
    import torchvision
    from torch.utils.data import DataLoader

    return {"hw": hw, "torch": torch, "nn": nn, "torchvision": torchvision, "DataLoader": DataLoader,
            "cross_entropy": cross_entropy, "model": small_model(), "transforms": TRANSFORMS, "augment": AUGMENT,
            "data": str(world.folder / "photos" / "train"), "small_vgg": small_vgg}  # fmt: skip


def with_job(world: World, stack: ExitStack) -> Names:
    names = plain(world, stack)
    job = stack.enter_context(
        hw.near(names["model"], names["data"], nodes=[world.nodes[0].address], transforms=TRANSFORMS, batch_size=16)
    )
    optimizer = torch.optim.SGD(names["model"].head.parameters(), lr=0.1)
    return {**names, "job": job, "epochs": 1, "optimizer": optimizer}


def with_transform(world: World, stack: ExitStack) -> Names:
    import torchvision

    steps = [torchvision.transforms.Resize((64, 64)), torchvision.transforms.ToTensor()]
    return {**plain(world, stack), "transform": torchvision.transforms.Compose(steps)}


def hf(world: World, stack: ExitStack) -> Names:
    """Trained for a step, so that there is a checkpoint to go on from."""
    from transformers import Trainer, TrainingArguments

    from headwater.train.hf import LoaderState, dataloader_of

    names = with_job(world, stack)
    told = partial(TrainingArguments, "hf-run", save_steps=1, use_cpu=True, report_to="none", disable_tqdm=True,
                   restore_callback_states_from_checkpoint=True)  # fmt: skip

    class First(Trainer):
        def get_train_dataloader(self) -> Any:
            return dataloader_of(names["job"].loader)

        def compute_loss(self, model: nn.Module, inputs: Any, **kwargs: Any) -> torch.Tensor:
            x, y = inputs
            return cross_entropy(model(x), y)

    First(names["job"].model, args=told(max_steps=1), callbacks=[LoaderState()]).train()
    return {**names, "Trainer": Trainer, "arguments": told(num_train_epochs=1)}


def repeated(world: World, stack: ExitStack) -> Names:
    """After a run of `headwater train` under mte, which met in the middle of its only epoch."""
    import json

    names = plain(world, stack)
    job = stack.enter_context(
        hw.near(names["model"], names["data"], nodes=[world.nodes[0].address], transforms=AUGMENT, batch_size=16)
    )
    job.adopt(near_plan(job.cuts[0], prongs="mte", host_share=0.5, chunk_rows=8, node_batch=8))
    Path("run").mkdir()
    Path("run/metrics.jsonl").write_text(json.dumps({"epoch": 0, "prongs": "mte", "meeting": 16}) + "\n")
    return {**names, "json": json, "job": job}


def embedding(world: World, stack: ExitStack) -> Names:
    class Dense(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.top = nn.Linear(128 + 4, 1)

        def forward(self, dense: torch.Tensor, pooled: torch.Tensor) -> torch.Tensor:
            return self.top(torch.cat([dense, pooled], 1)).squeeze(1)

    model, generator = Dense(), torch.Generator().manual_seed(0)
    ids = [torch.randint(20_000, (64,), generator=generator) for _ in range(3)]
    batches = [(torch.rand(16, 4), (each, torch.arange(0, 64, 4)), torch.ones(16)) for each in ids]
    return {**plain(world, stack), "model": model, "batches": batches, "criterion": nn.BCEWithLogitsLoss(),
            "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}  # fmt: skip


def reduce(world: World, stack: ExitStack) -> Names:
    """One worker, by itself."""
    import numpy as np
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{Path.cwd()}/meeting", rank=0, world_size=1)
    stack.callback(dist.destroy_process_group)
    return {**plain(world, stack), "rank": 0, "key": None, "array": np.ones(1000, np.float32)}


def text(world: World, stack: ExitStack) -> Names:
    from tests.text.conftest import WORDS, Classifier, Encoder

    def classifier(*given: object) -> nn.Module:
        return Classifier(Encoder(4 + len(WORDS), 32), 32).eval()

    return {**plain(world, stack), "SentenceClassifier": classifier}


# What a block takes for granted, by page; and of single ones, where others of their page take something else.
OF_ONE: dict[tuple[str, int], Callable[[World, ExitStack], Names]] = {
    ("README.md", 0): nothing,  # a newcomer's: it stands for itself
    ("docs/prongs.md", 1): repeated,
    ("docs/start.md", 0): nothing,
    ("docs/trainers.md", 1): hf,
    ("docs/trainers.md", 2): with_transform,
}
PREPARED: dict[str, Callable[[World, ExitStack], Names]] = {
    "docs/embedding.md": embedding,
    "docs/how-it-decides.md": with_job,
    "docs/reduce.md": reduce,
    "docs/text.md": text,
    "docs/trainers.md": with_job,
}


def counted(kind: str) -> list[tuple[int, Block]]:
    """Each with its place among those of its page."""
    seen: Counter[str] = Counter()
    found = []
    for block in BLOCKS:
        if block.kind == kind:
            found.append((seen[block.page], block))
            seen[block.page] += 1
    return found


def python_blocks() -> list[Any]:
    return [pytest.param(place, block, id=block.name, marks=[pytest.mark.slow] * ((block.page, place) in SLOW))
            for place, block in counted("python")]  # fmt: skip


def of(kind: str) -> list[Any]:
    return [pytest.param(block, id=block.name) for _, block in counted(kind)]


def run(block: Block, prepare: Callable[[World, ExitStack], Names], world: World) -> Names:
    source = block.text
    for written, instead in world.instead.items():
        source = source.replace(written, instead)
    code = compile("\n" * (block.line - 1) + source, block.page, "exec", dont_inherit=True)
    with ExitStack() as stack:
        given = {"__name__": "page", **prepare(world, stack)}
        names: Names = dict(given)
        try:
            with warnings.catch_warnings(record=True) as warned:
                warnings.simplefilter("always")
                exec(code, names)
        finally:
            for name, value in names.items():
                if value is not given.get(name) and type(value).__module__.startswith("headwater."):
                    end = getattr(value, "close", None) or getattr(value, "detach", None)
                    if end is not None:
                        end()
    told = [str(each.message) for each in warned if each.filename == block.page]  # others are frameworks'
    assert not told or block.page in MAY_WARN
    return names


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("place", "block"), python_blocks())
def test_python_runs(place: int, block: Block, here: World) -> None:
    compile(block.text, block.page, "exec")
    if block.why_not:
        pytest.skip(f"{block.name} is not run here: {block.why_not}")
    names = run(block, OF_ONE.get((block.page, place)) or PREPARED.get(block.page, plain), here)
    assert set(names) > {"__builtins__", "__name__"}


@pytest.mark.parametrize("block", of("toml"))
def test_toml_is_read_by_whoever_would_read_it(block: Block, tmp_path: Path) -> None:
    from headwater.cli.jobfile import read_job
    from headwater.core.access import read_grants
    from headwater.sim.rigfile import rig_faults, rig_of

    found = tomllib.loads(block.text)
    if "token" in found:
        assert read_grants(found, block.name)
    elif found.get("format") == "headwater-rig":
        faults: list[str] = []
        rig = rig_of(found, faults)
        assert not faults
        assert rig is not None
        assert not rig_faults(rig)
    else:
        path = tmp_path / "job.toml"
        path.write_text(block.text)
        assert read_job(path).model.name


@pytest.mark.parametrize("block", of("json"))
def test_json_is_read_by_whoever_would_read_it(block: Block) -> None:
    assert json.loads(block.text)["format"] == "headwater-plan", "nobody here reads it"
    assert hw.Plan.loads(block.text)


@pytest.mark.parametrize("block", of("yaml"))
def test_yaml_is_yaml(block: Block) -> None:
    assert yaml.safe_load(block.text)


def test_each_block_is_of_a_kind_that_is_looked_at() -> None:
    assert {block.kind for block in BLOCKS} <= KINDS


def test_few_blocks_are_not_run_and_each_says_why() -> None:
    left_out = [block for block in BLOCKS if block.why_not]
    assert len(left_out) <= 3, [block.name for block in left_out]
    assert all(block.kind == "python" and len(block.why_not) > 10 for block in left_out)
    marks = sum(page.read_text().count("<!-- not run here: ") for page in pages())
    assert marks == len(left_out), "one stands where it counts for nothing: it belongs right before its block"


def test_every_substitution_and_preparation_is_needed(world: World) -> None:
    everything = "\n".join(block.text for block in BLOCKS if block.kind == "python")
    assert not [written for written in world.instead if written not in everything]
    assert set(PREPARED) <= {block.page for _, block in counted("python")}
    assert set(OF_ONE) | SLOW <= {(block.page, place) for place, block in counted("python")}
