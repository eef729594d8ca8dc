"""Class folders, manifests and tars: what is read, and what is said when it can't be."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet

from headwater.data.decode import decode
from headwater.data.layouts import list_samples, tars
from headwater.data.store import open_store
from headwater.errors import ConfigError, DataError, EmptyDataError, LabelError, StoreError


def test_class_folders_are_read_to_any_depth_and_the_rest_is_counted(class_folders: Path) -> None:
    for name in ("readme.md", "cat/.hidden.png", ".cache/x.png", "dog/notes.txt"):
        (class_folders / name).parent.mkdir(exist_ok=True)
        (class_folders / name).write_bytes(b"x")
    seen: list[int] = []
    samples = list_samples(str(class_folders), on_page=seen.append)
    assert samples.keys.to_pylist() == ["cat/1.png", "cat/deep/2.PNG", "dog/3.png"]
    assert samples.classes == ("cat", "dog")
    assert samples.labels.tolist() == [0, 0, 1]
    assert samples.num_ignored == 4
    assert seen == [7]


def test_a_picture_outside_of_the_class_folders_is_named(class_folders: Path) -> None:
    (class_folders / "stray.jpg").write_bytes(b"x")
    with pytest.raises(LabelError, match=r"1 pictures lie in no class folder: stray\.jpg; move each into a folder"):
        list_samples(str(class_folders))


@pytest.mark.parametrize("layout", ["auto", "folders", "tars"])
def test_an_empty_folder_names_the_url_and_what_was_looked_for(tmp_path: Path, layout: str) -> None:
    (tmp_path / "readme.md").write_text("nothing here")
    with pytest.raises(EmptyDataError, match=r"file://.*1 objects.*looked for"):
        list_samples(str(tmp_path), layout)


def test_an_empty_folder_with_a_manifest_says_how_to_read_it(tmp_path: Path) -> None:
    (tmp_path / "train.csv").write_text("")
    with pytest.raises(EmptyDataError, match=r"a manifest is read by its own URL, such as file://.*/train\.csv"):
        list_samples(str(tmp_path))


def test_pictures_beside_tars_must_be_decided(class_folders: Path) -> None:
    (class_folders / "0.tar").write_bytes(b"")
    with pytest.raises(DataError, match=r"3 pictures and 1 tars; give layout="):
        list_samples(str(class_folders))
    assert len(list_samples(str(class_folders), "folders")) == 3


@pytest.mark.parametrize(
    ("url", "options", "match"),
    [
        ("{0}", {"layout": "webdataset"}, "auto, folders, table, tars"),
        ("{0}", {"layout": "table"}, "a manifest's URL ends in"),
        ("{0}", {"label_column": 1}, "are for manifests"),
        ("{0}/0.tar", {"layout": "folders"}, "not a folder"),
    ],
)
def test_options_that_make_no_sense_are_refused(
    class_folders: Path, url: str, options: dict[str, Any], match: str
) -> None:
    with pytest.raises(ConfigError, match=match):
        list_samples(url.format(class_folders), **options)


def test_data_that_is_not_there_is_named(tmp_path: Path) -> None:
    for name, error in (("none", StoreError), ("none.csv", EmptyDataError), ("none.tar", EmptyDataError)):
        with pytest.raises(error, match="does not exist"):
            list_samples(str(tmp_path / name))


def _manifest(folder: Path, text: str, name: str = "list.csv") -> str:
    (folder / name).write_text(text)
    return str(folder / name)


@pytest.mark.parametrize(
    ("text", "options"),
    [
        ("cat/1.png,cat\ndog/3.png,dog\n", {}),
        ("cat/1.png, cat, 7\n\ndog/3.png, dog, 8", {}),
        ("./cat/1.png;cat\r\ndog/3.png;dog\r\n", {}),
        ("path\tlabel\ncat/1.png\tcat\ndog/3.png\tdog\n", {}),
        ("\ufefflabel,path\ncat,cat/1.png\ndog,dog/3.png\n", {}),
        ('id,"file name",what\n1,cat/1.png,cat\n2,dog/3.png,dog\n', {"label_column": "what"}),
        ("a,b,c\ncat,1,cat/1.png\ndog,2,dog/3.png\n", {"path_column": "c", "label_column": 0}),
        ("cat,cat/1.png\ndog,dog/3.png\n", {"path_column": 1, "label_column": "0"}),
    ],
)
def test_a_manifest_is_read_with_and_without_a_header(class_folders: Path, text: str, options: dict[str, Any]) -> None:
    samples = list_samples(_manifest(class_folders, text), **options)
    assert samples.keys.to_pylist() == ["cat/1.png", "dog/3.png"]
    assert samples.classes == ("cat", "dog")
    assert samples.labels.tolist() == [0, 1]
    assert samples.sizes.tolist() == [(class_folders / key).stat().st_size for key in samples.keys.to_pylist()]


def test_whole_numbers_are_kept_as_labels(class_folders: Path) -> None:
    samples = list_samples(_manifest(class_folders, "cat/1.png,4\ndog/3.png,2\n"))
    assert samples.labels.tolist() == [4, 2]
    assert samples.classes == ("0", "1", "2", "3", "4")


@pytest.mark.parametrize(("label", "numbers"), [(["b", "a"], [1, 0]), ([3, 1], [3, 1])])
def test_a_parquet_manifest_is_read(class_folders: Path, label: list[Any], numbers: list[int]) -> None:
    table = pa.table({"extra": [0.5, 0.5], "file": ["cat/1.png", "dog/3.png"], "label": label})
    parquet.write_table(table, class_folders / "list.parquet")
    assert list_samples(str(class_folders / "list.parquet")).labels.tolist() == numbers


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("cat/1.png,1\n\ncat/9.png,1\n", r"1 of 2 rows name a file that is not in .*line 3: cat/9\.png; put the files"),
        ("cat/1.png,1\n../1.png,1\n", r"line 2: \.\./1\.png \(the key has .*'\.\.'"),
        ("path,label\ncat/1.png,\n", r"1 rows have no label: line 2: cat/1\.png"),
        ("cat/1.png,1\ndog/3.png,x\n", r'1 labels are not whole numbers .*line 2: "x"'),
        ("cat/1.png,1\ndog/3.png,-1\n", r'line 2: "-1"'),
        ("cat/1.png,1\ndog/3.png,99999999999\n", r"line 2"),
        (
            "cat/1.png,1\n\ndog/3.png\n\n1,2,3",
            r"2 rows do not have the 2 columns of the first: line 3: .*line 5: '1,2,3'",
        ),
        ("cat/1.png\n", r"can't tell the label"),
        ("a,b\n1,2\n", r"can't tell the path among its columns a, b; give path_column"),
    ],
)
def test_rows_that_can_not_be_used_are_listed_with_their_lines(class_folders: Path, text: str, match: str) -> None:
    with pytest.raises(LabelError, match=match):
        list_samples(_manifest(class_folders, text))


def test_only_the_first_few_faults_are_written_out(class_folders: Path) -> None:
    text = "".join(f"none/{number}.png,1\n" for number in range(100))
    with pytest.raises(LabelError, match=r"100 of 100 rows .*line 5: none/4\.png; and 95 more; put"):
        list_samples(_manifest(class_folders, text))


@pytest.mark.parametrize("column", ["colour", 7])
def test_a_column_that_is_not_there_is_named(class_folders: Path, column: str | int) -> None:
    with pytest.raises(ConfigError, match=rf"label_column is '?{column}'?, the manifest has"):
        list_samples(_manifest(class_folders, "path,label\ncat/1.png,1\n"), label_column=column)


def test_a_manifest_that_is_none_is_a_data_error(class_folders: Path) -> None:
    with pytest.raises(DataError, match="not a Parquet file"):
        list_samples(_manifest(class_folders, "nonsense", "list.parquet"))
    (class_folders / "list.csv").write_bytes(b"\xff\xfe,\x00\x01\n")
    with pytest.raises(DataError, match="UTF-8"):
        list_samples(str(class_folders / "list.csv"))
    for text in ("", "\n", "path,label\n"):
        with pytest.raises(EmptyDataError, match="no rows"):
            list_samples(_manifest(class_folders, text))
    parquet.write_table(pa.table({"path": ["cat/1.png"], "label": [0.5]}), class_folders / "list.parquet")
    with pytest.raises(LabelError, match="column label has type double"):
        list_samples(str(class_folders / "list.parquet"))


def test_the_grocery_lists_are_read(grocery: Path) -> None:
    fine = list_samples(str(grocery / "train.txt"))
    coarse = list_samples(str(grocery / "train.txt"), label_column=2)
    assert (len(fine), len(fine.classes), len(coarse.classes)) == (2640, 81, 43)
    ref = fine.take([7])[0]
    assert decode(open_store(fine.url).read(ref.key, etag=ref.etag), ref.key).size[1] >= 348


MakeTar = Callable[[Path, dict[str, bytes]], bytes]


def test_tars_are_indexed_and_their_samples_are_ranges(tmp_path: Path, make_tar: MakeTar) -> None:
    make_tar(tmp_path / "b" / "1.tar", {"x/7.jpg": b"seven", "x/7.cls": b"dog\n"})
    make_tar(
        tmp_path / "0.tar",
        {"1.jpg": b"one", "1.json": b'{"label": "cat"}', "1.txt": b"", "2.PNG": b"2", "2.cls": b"dog"},
    )
    samples = list_samples(str(tmp_path))
    assert samples.keys.to_pylist() == ["0.tar", "0.tar", "b/1.tar"]
    assert samples.classes == ("cat", "dog")
    assert samples.labels.tolist() == [0, 1, 1]
    assert samples.num_ignored == 1
    store = open_store(samples.url)
    parts = [bytes(store.read(ref.key, ref.offset, ref.length, ref.etag)) for ref in samples.take(range(3))]
    assert parts == [b"one", b"2", b"seven"]


def test_a_large_tar_gives_signs_of_life_while_it_is_indexed(
    tmp_path: Path, make_tar: MakeTar, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tars, "_PAGE", 2)
    make_tar(tmp_path / "0.tar", {f"{number}.{end}": b"3" for number in range(3) for end in ("jpg", "cls")})
    seen: list[int] = []
    assert len(list_samples(str(tmp_path), on_page=seen.append)) == 3
    assert seen == [1, 2, 3], "an object, then the samples in it"


def test_a_long_member_name_and_a_big_member_do_not_confuse_the_index(tmp_path: Path, make_tar: MakeTar) -> None:
    name = "folder/" * 30 + "é"
    make_tar(tmp_path / "0.tar", {f"{name}.jpg": bytes(100_000), f"{name}.cls": b"3", "z.jpg": b"z", "z.cls": b"4"})
    samples = list_samples(str(tmp_path / "0.tar"))
    assert samples.lengths.tolist() == [100_000, 1]
    assert samples.labels.tolist() == [3, 4]


@pytest.mark.parametrize(
    ("members", "match"),
    [
        ({"1.jpg": b"x"}, r"1 \(a picture without a label\); put name\.cls"),
        ({"1.cls": b"1"}, r"1 \(a label without a picture\)"),
        ({"1.jpg": b"x", "1.png": b"x", "1.cls": b"1"}, r"1 \(two pictures\)"),
        ({"1.jpg": b"x", "1.json": b"{}"}, r"without a label"),
        ({"1.jpg": b"x", "1.json": b"[1]"}, r"not an object"),
        ({"1.jpg": b"x", "1.json": b'{"label": [1]}'}, r"neither a whole number nor a name"),
        ({"1.jpg": b"x", "1.cls": b"3", "2.jpg": b"x", "2.cls": b"cat"}, r'0\.tar: 2: "cat"'),
    ],
)
def test_a_tar_with_samples_that_are_not_whole_is_refused(
    tmp_path: Path, make_tar: MakeTar, members: dict[str, bytes], match: str
) -> None:
    make_tar(tmp_path / "0.tar", members)
    with pytest.raises(LabelError, match=match):
        list_samples(str(tmp_path))


@pytest.mark.parametrize("length", [100, 700, 3000])
def test_a_truncated_tar_is_a_data_error_that_names_it(tmp_path: Path, make_tar: MakeTar, length: int) -> None:
    data = make_tar(tmp_path / "0.tar", {"1.jpg": bytes(5000), "1.cls": b"1"})
    (tmp_path / "0.tar").write_bytes(data[:length])
    with pytest.raises(DataError, match=rf"0\.tar: not a whole tar \({length:,} bytes\).*write it again"):
        list_samples(str(tmp_path))


def test_tars_without_samples_and_packed_tars_are_explained(tmp_path: Path, make_tar: MakeTar) -> None:
    make_tar(tmp_path / "a" / "0.tar", {"readme.md": json.dumps({}).encode()})
    with pytest.raises(EmptyDataError, match="1 tars hold no picture"):
        list_samples(str(tmp_path / "a"))
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "0.tar.gz").write_bytes(b"")
    with pytest.raises(EmptyDataError, match="compressed tars can't be read in place"):
        list_samples(str(tmp_path / "b"), "tars")
