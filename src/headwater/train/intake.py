"""A DataLoader that somebody has already: what it says about pictures in class folders.

Owns `take`. Reads torchvision's ImageFolder and timm's ImageDataset by their attributes and imports neither. What it
can't carry over is an error that names it, all of them at once: a setting that is left out would change the training.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePath
from typing import Any

import numpy as np
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler, default_collate
from torch.utils.data.distributed import DistributedSampler

from headwater.data.samples import Samples
from headwater.data.secrets import redact
from headwater.errors import ConfigError, LabelError

_SHOWN = 3


@dataclass(frozen=True, eq=False)
class Taken:
    """What a DataLoader says. `seed` is None where it has no generator of its own."""

    root: str
    transforms: Any
    batch_size: int
    shuffle: bool
    drop_last: bool
    seed: int | None
    classes: Mapping[str, int]
    labels: Mapping[str, int]  # by the picture's path below the root

    def label(self, samples: Samples) -> Samples:
        """The listing with the data set's own labels; LabelError if the two don't have the same pictures."""
        keys, where = samples.keys.to_pylist(), redact(samples.url)
        only_listed = [key for key in keys if key not in self.labels]
        only_taken = sorted(set(self.labels) - set(keys)) if len(keys) - len(only_listed) != len(self.labels) else []
        if only_listed or only_taken:
            sides = (only_listed, f"at {where}"), (only_taken, "in the DataLoader's data set")
            faults = [f"{len(found):,} are only {side} ({', '.join(found[:_SHOWN])}{', …' if found[_SHOWN:] else ''})"
                      for found, side in sides if found]  # fmt: skip
            raise LabelError(
                f"the DataLoader's data set and {where} don't have the same pictures: {'; '.join(faults)}; make "
                "them the same, name the folder's URL where nodes read it (url=…), or give that URL as data"
            )
        labels = np.fromiter((self.labels[key] for key in keys), np.int64, len(keys))
        labels.flags.writeable = False
        classes = tuple(sorted(self.classes, key=self.classes.__getitem__))
        return replace(samples, labels=labels, classes=classes)


def take(loader: Any) -> Taken:
    """Read a DataLoader over pictures in class folders. ConfigError names all that can't be carried over."""
    if not isinstance(loader, DataLoader):
        raise ConfigError(f"data is {type(loader).__name__}; it must be a path, a URL, or a torch DataLoader over "
                          f"class folders{_hint(loader)}")  # fmt: skip
    faults: list[str] = []
    dataset: Any = loader.dataset
    root, samples, classes = _folder(dataset, faults)
    transforms = getattr(dataset, "transform", None)
    if transforms is None and not faults:
        faults.append("the data set has no transform; give it the ones that end in a tensor")
    if getattr(dataset, "target_transform", None) is not None:
        faults.append("target_transform can't be carried over; put the labels that it gives into a manifest (docs/"
                      "job-file.md), or apply it to y in your loop")  # fmt: skip
    if loader.collate_fn is not default_collate:
        faults.append(f"collate_fn {_name(loader.collate_fn)} can't be carried over; call it on batches in your loop")
    if loader.worker_init_fn is not None and not _is_timms(loader.worker_init_fn):
        faults.append(f"worker_init_fn {_name(loader.worker_init_fn)} has no worker to run in; leave it out")
    shuffle, generator, drop_last = _order(loader, faults)
    if faults:
        raise ConfigError("this DataLoader can't be taken over: " + "; ".join(faults))
    below = PurePath(os.path.abspath(root))
    if (num_paths := len({path for path, _ in samples})) < len(samples):
        raise ConfigError(f"this DataLoader can't be taken over: {len(samples) - num_paths:,} of its data set's "
                          "samples come again; every sample comes once in an epoch here, so repeat them in a manifest "
                          "(docs/job-file.md)")  # fmt: skip
    labels = {PurePath(os.path.abspath(path)).relative_to(below).as_posix(): int(label) for path, label in samples}
    seed = None if generator is None else generator % 2**63
    assert loader.batch_size is not None
    return Taken(os.path.abspath(root), transforms, loader.batch_size, shuffle, drop_last, seed, dict(classes), labels)


def _hint(loader: Any) -> str:
    if type(loader).__name__ == "PrefetchLoader":
        return "; make timm's with create_loader(…, use_prefetcher=False)"
    return ""


def _folder(dataset: Any, faults: list[str]) -> tuple[str, Sequence[tuple[str, int]], Mapping[str, int]]:
    """Root, (path, label) of each picture, and class_to_idx."""
    folder = getattr(dataset, "reader", dataset)  # timm's data set has a reader that knows them
    found = tuple(getattr(folder, name, None) for name in ("root", "samples", "class_to_idx"))
    if any(each is None for each in found):
        way_out = "; give a CSV of its samples as data instead" if type(dataset).__name__ == "Subset" else ""
        faults.append(f"its data set is {type(dataset).__name__}, not an ImageFolder of torchvision or an ImageDataset "
                      f"of timm over class folders{way_out}")  # fmt: skip
        return "", (), {}
    getting = next((each for each in type(dataset).__mro__ if "__getitem__" in vars(each)), type(dataset))
    if getting.__module__.partition(".")[0] not in ("torchvision", "timm"):
        faults.append(f"{getting.__qualname__}.__getitem__ is not run here, and what it does would be left out; put it "
                      "into the transform, or into your loop")  # fmt: skip
    read = getattr(dataset, "loader", None)
    if read is not None and getattr(read, "__name__", "") != "default_loader":
        faults.append(f"loader {_name(read)} can't run near the data; pictures are decoded as default_loader does it")
    if getattr(dataset, "load_bytes", False):
        faults.append("load_bytes gives undecoded pictures; set it to False")
    if getattr(dataset, "input_img_mode", None) not in (None, "", "RGB"):
        faults.append(f"input_img_mode is {dataset.input_img_mode!r}; pictures are decoded as RGB")
    if getattr(dataset, "additional_features", None):
        faults.append("additional_features can't be carried over; leave them out")
    root, samples, classes = found
    return str(root), samples, classes  # type: ignore[return-value]


def _order(loader: DataLoader[Any], faults: list[str]) -> tuple[bool, int | None, bool]:
    """Whether it shuffles, the seed of its generator, and whether it drops the last incomplete batch."""
    sampler: Any = loader.sampler
    drop_last = bool(loader.drop_last)
    if type(loader.batch_sampler) is not BatchSampler:
        way_out = "use a plain DataLoader with batch_size and shuffle"
        faults.append(f"batch_sampler {_name(loader.batch_sampler)} can't be carried over; {way_out}")
        return False, None, drop_last
    if type(sampler) is SequentialSampler:
        return False, None, drop_last
    if type(sampler) is DistributedSampler:  # trainers share an epoch by themselves
        return bool(sampler.shuffle), int(sampler.seed), drop_last
    if type(sampler) is not RandomSampler:
        faults.append(f"sampler {_name(sampler)} can't be carried over; use shuffle=True or False, and for samples "
                      "that come more often repeat them in a manifest (docs/job-file.md)")  # fmt: skip
        return False, None, drop_last
    if sampler.replacement or sampler.num_samples != len(loader.dataset):  # type: ignore[arg-type]
        faults.append("its RandomSampler has replacement or num_samples; every sample comes once in an epoch here")
    generator = sampler.generator if sampler.generator is not None else loader.generator
    return True, None if generator is None else int(generator.initial_seed()), drop_last


def _is_timms(seeding: Any) -> bool:
    """timm's own only seeds the draws of its workers; here draws are by sample."""
    return str(getattr(getattr(seeding, "func", seeding), "__module__", "")).startswith("timm.")


def _name(thing: Callable[..., Any] | object) -> str:
    return str(getattr(thing, "__qualname__", type(thing).__name__))
