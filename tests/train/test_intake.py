"""A DataLoader that a user of torchvision or timm has already becomes a job with the same pictures and labels."""

import shutil

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Subset, WeightedRandomSampler

import headwater as hw
from headwater.core.plan import Plan
from headwater.data.transforms import Normalize, Resize, ToFloat
from headwater.errors import ConfigError, LabelError

OURS = [Resize((16, 16)), ToFloat(), Normalize((0.5,) * 3, (0.25,) * 3)]
NOTHING_MOVES = {"nodes": "inline", "plan": Plan()}


@pytest.fixture(scope="module")
def model():
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * 16 * 16, 3))


def theirs():
    from torchvision.transforms import Compose, Normalize, Resize, ToTensor

    return Compose([Resize((16, 16)), ToTensor(), Normalize((0.5,) * 3, (0.25,) * 3)])


def folder_of(root, **options):
    from torchvision.datasets import ImageFolder

    return ImageFolder(root, **{"transform": theirs(), **options})


def batches(model, data, **options):
    with hw.near(model, data, **NOTHING_MOVES, **options) as job:
        return list(job.loader), job


def assert_same(found, expected):
    assert len(found) == len(expected)
    for (x, y), (wanted_x, wanted_y) in zip(found, expected, strict=True):
        assert torch.equal(x, wanted_x)
        assert torch.equal(y, wanted_y)


def test_its_root_transforms_batch_size_seed_and_dropping_are_taken(model, pictures):
    loader = DataLoader(folder_of(pictures), batch_size=8, shuffle=True, drop_last=True, num_workers=2,
                        generator=torch.Generator().manual_seed(5))  # fmt: skip
    found, _ = batches(model, loader)
    expected, _ = batches(model, pictures, transforms=OURS, batch_size=8, drop_last=True, seed=5)
    assert len(found) == 6
    assert_same(found, expected)


def test_without_shuffling_batches_are_the_loaders_own(model, pictures):
    loader = DataLoader(folder_of(pictures), batch_size=20)
    found, _ = batches(model, loader)
    assert_same(found, list(loader))


def test_the_seed_is_an_argument_where_the_loader_has_no_generator(model, pictures):
    loader = DataLoader(folder_of(pictures), batch_size=8, shuffle=True)
    expected, _ = batches(model, pictures, transforms=OURS, batch_size=8, seed=3)
    assert_same(batches(model, loader, seed=3)[0], expected)


def test_labels_are_those_of_timm_where_it_numbers_classes_in_another_order(model, pictures, tmp_path):
    from timm.data import ImageDataset, create_loader

    for name, digit in zip("abc", ("1", "2", "10"), strict=True):
        shutil.copytree(pictures / name, tmp_path / digit)
    dataset = ImageDataset(str(tmp_path))
    loader = create_loader(dataset, (3, 16, 16), 10, use_prefetcher=False, num_workers=0, crop_pct=1.0)
    found, job = batches(model, loader)
    labels = dict(zip(job.samples.keys.to_pylist(), job.samples.labels.tolist(), strict=True))
    assert {key.split("/")[0]: label for key, label in labels.items()} == {"1": 0, "2": 1, "10": 2}
    assert job.samples.classes == ("1", "2", "10")
    assert sum(len(y) for _, y in found) == 50


def test_nodes_may_have_the_folder_under_another_url(model, pictures, tmp_path, start_node):
    shutil.copytree(pictures, tmp_path / "there")
    node = start_node(tmp_path / "there", options=("--state", str(tmp_path / "state")))
    loader = DataLoader(folder_of(pictures), batch_size=20)
    url = (tmp_path / "there").as_uri()
    with hw.near(model, loader, url=url, nodes=[node.address], plan=None) as job:
        assert job.samples.url == url
        assert_same(list(job.loader), list(loader))


def test_other_pictures_under_that_url_are_an_error_that_names_some(model, pictures, tmp_path):
    shutil.copytree(pictures, tmp_path / "there")
    (tmp_path / "there" / "a" / "000.jpg").rename(tmp_path / "there" / "a" / "new.jpg")
    with pytest.raises(LabelError, match=r"1 are only at .*a/new\.jpg.*1 are only in the DataLoader.*a/000\.jpg.*url="):
        hw.near(model, DataLoader(folder_of(pictures)), url=(tmp_path / "there").as_uri(), **NOTHING_MOVES)


def of(dataset, **options):
    return lambda root: DataLoader(dataset(root), **{"batch_size": 8, **options})


def with_paths(root):
    from torchvision.datasets import ImageFolder

    class WithPaths(ImageFolder):
        def __getitem__(self, index):
            return (*super().__getitem__(index), self.samples[index][0])

    return WithPaths(root, theirs())


def oversampled(root):
    dataset = folder_of(root)
    dataset.samples += dataset.samples[:3]
    return dataset


CANNOT = {
    r"WithPaths.__getitem__ is not run here.*transform": of(with_paths),
    r"3 of its data set's samples come again.*manifest": of(oversampled),
    r"sampler WeightedRandomSampler .*shuffle=True": of(folder_of, sampler=WeightedRandomSampler([1.0] * 50, 50)),
    r"collate_fn .*list.* on batches": of(folder_of, collate_fn=list),
    r"worker_init_fn print": of(folder_of, worker_init_fn=print),
    r"target_transform .*manifest": of(lambda root: folder_of(root, target_transform=str)),
    r"has no transform": of(lambda root: folder_of(root, transform=None)),
    r"loader open can't run near": of(lambda root: folder_of(root, loader=open)),
    r"Subset, not an ImageFolder.*CSV": of(lambda root: Subset(folder_of(root), range(9))),
    r"batch_sampler list": lambda root: DataLoader(folder_of(root), batch_sampler=[[0, 1]]),
    r"replacement or num_samples": of(folder_of, sampler=torch.utils.data.RandomSampler(range(50), True)),
    r"data is list; .*DataLoader": lambda root: [1, 2],
}


@pytest.mark.parametrize("said", CANNOT)
def test_what_cannot_be_taken_is_named_with_the_way_out(model, pictures, said):
    with pytest.raises(ConfigError, match=said):
        hw.near(model, CANNOT[said](pictures))


def test_all_that_cannot_be_taken_is_named_at_once(model, pictures):
    loader = DataLoader(folder_of(pictures, target_transform=str), collate_fn=list, worker_init_fn=print)
    with pytest.raises(ConfigError, match=r"target_transform.*collate_fn.*worker_init_fn"):
        hw.near(model, loader)


def test_a_setting_beside_a_loader_that_has_its_own_is_an_error(model, pictures):
    with pytest.raises(ConfigError, match="transforms, batch_size is given beside a DataLoader"):
        hw.near(model, DataLoader(folder_of(pictures)), transforms=OURS, batch_size=9)
    seeded = DataLoader(folder_of(pictures), shuffle=True, generator=torch.Generator().manual_seed(5))
    with pytest.raises(ConfigError, match="a generator of its own"):
        hw.near(model, seeded, seed=7)
    with pytest.raises(ConfigError, match="url is for a DataLoader"):
        hw.near(model, pictures, url="s3://x/y", transforms=OURS)
    with pytest.raises(ConfigError, match="transforms are missing"):
        hw.near(model, pictures)
