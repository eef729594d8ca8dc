"""Pictures that are broken, changed, gone or unlabelled, through a real node: a clear error, or a full epoch."""

import shutil

import pytest

from headwater.errors import BadSampleError, ChangedError, EmptyDataError, LabelError, StoreError


@pytest.fixture
def own(pictures, tmp_path):
    """The pictures, free to be damaged."""
    return shutil.copytree(pictures, tmp_path / "own")


def first_in(job):
    """The path, below the data, of the first picture that the job will read."""
    sample = int(job.loader._order.epoch(0)[0])
    return job.samples.take([sample])[0].key, sample


def truncate(path):
    path.write_bytes(path.read_bytes()[:300])


@pytest.mark.parametrize("damage", [truncate, lambda path: path.write_bytes(b"not a picture")], ids=["cut", "text"])
def test_a_broken_picture_stops_the_run_with_its_name_and_the_way_out(damage, near, own):
    damage(own / "b" / "001.jpg")
    with pytest.raises(BadSampleError, match=r'b/001.jpg: .*on_bad_sample="skip"'):
        list(near(own).loader)


def test_a_broken_picture_is_skipped_and_listed_and_batches_stay_full(near, own):
    truncate(own / "b" / "001.jpg")
    (own / "c" / "002.jpg").write_bytes(b"")
    job = near(own, on_bad_sample="skip")
    sizes = [len(y) for _, y in job.loader]
    assert sizes == [4] * 12
    assert sorted(skipped.key for skipped in job.loader.skipped) == ["b/001.jpg", "c/002.jpg"]
    assert all(skipped.reason for skipped in job.loader.skipped)


def test_a_file_that_changes_during_the_run_is_an_error(near, own):
    job = near(own)
    key, _ = first_in(job)
    (own / key).write_bytes((own / key).read_bytes() + b"\0")
    with pytest.raises(ChangedError, match=f"{key}.*start a new job, or put|{key}.*start a new job.*put the old"):
        list(job.loader)


@pytest.mark.parametrize("on_bad_sample", ["raise", "skip"])
def test_a_file_that_goes_missing_during_the_run_is_a_bad_sample(on_bad_sample, near, own, ids_of):
    job = near(own, on_bad_sample=on_bad_sample)
    key, sample = first_in(job)
    (own / key).unlink()
    if on_bad_sample == "skip":
        assert sorted(ids_of(job.loader)) == [each for each in range(50) if each != sample]
        assert [each.key for each in job.loader.skipped] == [key]
    else:
        with pytest.raises(BadSampleError, match=key):
            list(job.loader)


def test_an_empty_folder_says_what_was_looked_for(near, tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(EmptyDataError, match="looked for"):
        near(tmp_path / "empty")


def test_a_folder_that_is_not_there_is_named(near, tmp_path):
    with pytest.raises(StoreError, match="absent does not exist"):
        near(tmp_path / "absent")


def test_a_picture_without_a_label_is_named(near, own):
    shutil.copy(own / "a" / "000.jpg", own / "stray.jpg")
    with pytest.raises(LabelError, match=r"stray\.jpg"):
        near(own)


def test_with_nothing_moved_to_the_storage_the_same_errors_come(near, own):
    from headwater.core.plan import Plan

    truncate(own / "b" / "001.jpg")
    with pytest.raises(BadSampleError, match=r'b/001.jpg: .*on_bad_sample="skip"'):
        list(near(own, plan=Plan()).loader)
