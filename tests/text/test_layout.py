"""Texts in files that anyone may have written: what is listed is what is read, and faults are named by row."""

import json

import pyarrow as pa
import pytest
from pyarrow import parquet
from tests.text.conftest import reviews

from headwater.data import textfile
from headwater.data.layouts import list_samples
from headwater.data.shards.reading import read_sample
from headwater.data.store import open_store
from headwater.errors import BadSampleError, ChangedError, ConfigError, DataError, HeadwaterError, LabelError

ROWS = [('good, "very" good\nindeed', "1"), ("", "0"), ("ünïcode 🙂", "1"), ("plain", "0")]


def write(folder, kind, rows=ROWS, name="texts"):
    path = folder / f"{name}.{kind}"
    if kind == "parquet":
        parquet.write_table(pa.table({"text": [t for t, _ in rows], "label": [int(c) for _, c in rows]}), path)
    elif kind == "jsonl":
        path.write_text("\n".join(json.dumps({"text": t, "label": int(c)}) for t, c in rows) + "\n\n")
    else:
        mark = "\t" if kind == "tsv" else ","
        lines = [mark.join(("id", "label", "text"))]
        lines += [mark.join((str(n), c, '"' + t.replace('"', '""') + '"')) for n, (t, c) in enumerate(rows)]
        path.write_text("\n".join(lines) + "\n")
    return path


@pytest.mark.parametrize("kind", ["parquet", "jsonl", "csv", "tsv"])
def test_every_row_is_a_sample_with_its_text_and_label(tmp_path, kind):
    samples = list_samples(str(write(tmp_path, kind)), "text")
    store = open_store(samples.url)
    found = [bytes(read_sample(store, ref)).decode() for ref in samples.take(range(len(samples)))]
    assert found == [text for text, _ in ROWS]
    assert samples.labels.tolist() == [1, 0, 1, 0]
    assert samples.sizes.tolist() == [len(text.encode()) for text, _ in ROWS]


def test_a_folder_of_files_is_one_set(tmp_path):
    for number in range(3):
        write(tmp_path, ("jsonl", "csv", "parquet")[number], reviews_as_numbers(number), f"part-{number}")
    (tmp_path / "readme.md").write_text("not a text")
    samples = list_samples(str(tmp_path), "text")
    store = open_store(samples.url)
    texts = [bytes(read_sample(store, ref)).decode() for ref in samples.take(range(len(samples)))]
    assert sorted(texts) == sorted(text for number in range(3) for text, _ in reviews_as_numbers(number))
    assert samples.num_ignored == 1


def reviews_as_numbers(number):
    return [(f"{text} of {number}", str(int(label == "good"))) for text, label in reviews(5)]


def test_columns_may_have_any_name(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"what people say": "hm", "mood": "x", "label": 1}')
    samples = list_samples(str(path), "text", text_column="what people say", label_column="mood")
    assert samples.classes == ("x",)
    ref = samples.take([0])[0]
    assert bytes(read_sample(open_store(samples.url), ref)) == b"hm"


FAULTS = {
    "line 2 is not JSON": ("a.jsonl", b'{"text": "x", "label": 1}\nhm\n'),
    "line 1 is 7": ("a.jsonl", b"7\n"),
    "line 2: text is an object": ("a.jsonl", b'{"text": "x", "label": 1}\n{"text": {}, "label": 1}\n'),
    "2 rows have no text: row 1; row 3": ("a.jsonl", b'{"text":"x","label":1}\n{"label":1}\n{"text":"","label":1}\n'
                                          b'{"text":null,"label":1}\n'),
    "1 rows have no label: row 1": ("a.csv", b"text,label\nx,1\ny,\n"),
    "can't tell the text among": ("a.csv", b"x,label\n1,2\n"),
    "can't tell the label among": ("a.csv", b"text,x\n1,2\n"),
    "do not have the 2 columns": ("a.csv", b"text,label\nx,1\ny,1,2\n"),
    "must name the columns": ("a.csv", b"text,text\nx,1\n"),
    "not a text table in UTF-8": ("a.csv", b"text,label\n\xff\xfe,1\n"),
    "not a Parquet file": ("a.parquet", b"PAR1"),
    "lone surrogate": ("a.jsonl", b'{"text": "\\ud800", "label": 1}'),
    "not whole numbers": ("a.jsonl", b'{"text": "x", "label": 1}\n{"text": "x", "label": "one"}'),
    "have no row": ("a.csv", b"text,label\n"),
}  # fmt: skip


@pytest.mark.parametrize("said", FAULTS)
def test_faults_are_named_with_their_row(tmp_path, said):
    name, data = FAULTS[said]
    (tmp_path / name).write_bytes(data)
    with pytest.raises(HeadwaterError, match=said):
        list_samples(str(tmp_path / name), "text")


def test_a_column_of_another_type_is_named(tmp_path):
    parquet.write_table(pa.table({"text": [[1.5]], "label": [1]}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match="column text has type list"):
        list_samples(str(tmp_path / "a.parquet"), "text")


def test_a_file_beyond_the_limit_is_refused_with_the_way_out(tmp_path, monkeypatch):
    monkeypatch.setattr(textfile, "MAX_FILE_BYTES", 10)
    with pytest.raises(DataError, match=r"limit for a file of texts is 10.*several files"):
        list_samples(str(write(tmp_path, "csv")), "text")


def test_a_set_larger_than_what_is_kept_in_memory_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(textfile, "KEPT_BYTES", 10)
    with pytest.raises(DataError, match="more than 10 bytes of texts"):
        list_samples(str(write(tmp_path, "csv")), "text")


def test_a_file_that_changed_since_it_was_listed_stops_the_job(tmp_path):
    path = write(tmp_path, "jsonl")
    samples = list_samples(str(path), "text")
    write(tmp_path, "jsonl", [*ROWS, ("one more", "1")])
    with pytest.raises(ChangedError):
        read_sample(open_store(samples.url), samples.take([0])[0])


def test_a_row_that_is_not_there_is_a_bad_sample(tmp_path):
    from dataclasses import replace

    samples = list_samples(str(write(tmp_path, "jsonl")), "text")
    with pytest.raises(BadSampleError, match="has 4 rows"):
        read_sample(open_store(samples.url), replace(samples.take([0])[0], offset=99))


def test_a_text_longer_than_its_ticket_says_is_not_handed_on(tmp_path):
    from dataclasses import replace

    samples = list_samples(str(write(tmp_path, "jsonl")), "text")
    ref = samples.take([0])[0]
    with pytest.raises(ChangedError, match=f"has {ref.length} bytes, listed with {ref.length - 1}"):
        read_sample(open_store(samples.url), replace(ref, length=ref.length - 1))


def test_columns_in_memory_stay_within_their_limit(tmp_path):
    texts = textfile.Texts(max_bytes=1)
    samples = [list_samples(str(write(tmp_path, "jsonl", name=name)), "text") for name in "ab"]
    store = open_store(samples[0].url)
    for each in samples:
        ref = each.take([0])[0]
        texts.column(store, ref.key, ref.etag.rpartition(" ")[0], "text")
    assert len(texts._kept) == 1


def test_texts_and_pictures_are_not_mixed_up(tmp_path, tokenizer, model):
    import headwater as hw
    from headwater.data.transforms import Resize, ToFloat, Tokenize

    path = write(tmp_path, "jsonl")
    with pytest.raises(ConfigError, match="Tokenize is for texts"):
        hw.near(model, path, transforms=[Tokenize.of(tokenizer, 8)], layout="folders", nodes="inline")
    with pytest.raises(ConfigError, match="transforms are for pictures"):
        hw.near(model, path, transforms=[Resize((8, 8)), ToFloat()], text_column="text", nodes="inline")
    (tmp_path / "b.jsonl").write_text('{"a": 1, "label": 2}')
    with pytest.raises(LabelError, match="can't tell the text"):
        hw.near(model, tmp_path / "b.jsonl", transforms=[Tokenize.of(tokenizer, 8)], nodes="inline")
