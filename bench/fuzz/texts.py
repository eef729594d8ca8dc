"""Files of texts, and tokenizers: whoever can write to the store, and whoever reaches a node."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

import pyarrow as pa
from pyarrow import parquet

from bench.fuzz.target import SECRET, Harness, Room, Target
from headwater.data import textfile, tokenizerfile
from headwater.data.layouts import texts
from headwater.data.layouts.listing import list_one
from headwater.data.shards.reading import read_sample
from headwater.data.store import open_store
from headwater.errors import ConfigError, DataError, RefusedError

_TEXTS = ("", "the film was good", "ünïcode \U0001f642 and\ttabs", "a " * 40)


def _texts(name: str) -> Callable[[Room], Harness]:
    """A file of texts with these bytes: what is listed can be read again, and is of that length."""

    def make(room: Room) -> Harness:
        path, store = room.root / name, open_store(str(room.root))

        def harness(data: bytes) -> None:
            path.write_bytes(data)
            samples = texts.read_texts(list_one(store, name))
            textfile._TEXTS._kept.clear()  # two files in one tick of the clock may have the same etag
            for ref in samples.take(range(min(len(samples), 4))):
                text = bytes(read_sample(store, ref))
                assert len(text) == ref.length
                assert SECRET not in text

        return harness

    return make


def _lines_seeds() -> Sequence[bytes]:
    rows = [{"text": text, "label": number} for number, text in enumerate(_TEXTS)]
    named = [{"label": "x", "Review": text, "more": {"a": [1]}} for text in _TEXTS]
    return ["\n".join(map(json.dumps, each)).encode() for each in (rows, named)]


def _csv_seeds() -> Sequence[bytes]:
    return [b'text,label\n"a, ""b""\nc",1\n,0\nplain,1\n', b"\xef\xbb\xbfid,Class,Sentence\r\n1,x,hm\r\n2,y,oh\r\n"]


def _parquet_seeds() -> Sequence[bytes]:
    tables = [pa.table({"text": list(_TEXTS), "label": [0, 1, 0, 1]}),
              pa.table({"label": ["x"] * 40, "review": pa.array(["hm", "oh"] * 20).dictionary_encode()})]  # fmt: skip
    seeds = []
    for rows, compression in zip(tables, ("none", "zstd"), strict=True):
        sink = pa.BufferOutputStream()
        parquet.write_table(rows, sink, compression=compression)
        seeds.append(sink.getvalue().to_pybytes())
    return seeds


def _tokenizer(room: Room) -> Harness:
    """What is let in is loaded, and takes any text."""

    def harness(data: bytes) -> None:
        found = tokenizerfile._load(tokenizerfile.check(data))
        for text in _TEXTS:
            tokenizerfile.ids_of(found, text, 16)

    return harness


def _tokenizer_seeds() -> Sequence[bytes]:
    words = {word: number for number, word in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "the", "film", "##s"])}
    special = {name: {"id": name, "ids": [words[name]], "tokens": [name]} for name in ("[CLS]", "[SEP]")}
    single = [{"SpecialToken": {"id": "[CLS]", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}},
              {"SpecialToken": {"id": "[SEP]", "type_id": 0}}]  # fmt: skip
    bert = {
        "version": "1.0",
        "added_tokens": [{"id": 1, "content": "[UNK]", "single_word": False, "lstrip": False, "rstrip": False,
                          "normalized": False, "special": True}],
        "normalizer": {"type": "BertNormalizer", "clean_text": True, "handle_chinese_chars": True,
                       "strip_accents": None, "lowercase": True},
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "post_processor": {"type": "TemplateProcessing", "single": single, "pair": single, "special_tokens": special},
        "decoder": None,
        "model": {"type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "##",
                  "max_input_chars_per_word": 100, "vocab": words},
    }  # fmt: skip
    byte_level = {
        "version": "1.0",
        "normalizer": {"type": "Sequence", "normalizers": [{"type": "NFC"}, {"type": "Lowercase"}]},
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "model": {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
                  "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False,
                  "vocab": {"t": 0, "h": 1, "e": 2, "th": 3, "the": 4}, "merges": ["t h", "th e"]},
    }  # fmt: skip
    pieces = {
        "version": "1.0",
        "pre_tokenizer": {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True},
        "model": {"type": "Unigram", "unk_id": 0, "vocab": [["<unk>", 0.0], ["▁the", -1.0], ["▁", -2.0], ["e", -3.0]]},
    }
    return [json.dumps(each).encode() for each in (bert, byte_level, pieces)]


TARGETS = (
    Target("texts-jsonl", "texts as JSON lines", _texts("texts.jsonl"), _lines_seeds, (DataError, ConfigError), 20,
           "lines"),
    Target("texts-csv", "texts as CSV", _texts("texts.csv"), _csv_seeds, (DataError, ConfigError), 20, "lines"),
    Target("texts-parquet", "texts as Parquet", _texts("texts.parquet"), _parquet_seeds, (DataError, ConfigError), 20),
    Target("tokenizer", "a tokenizer.json, loaded and used", _tokenizer, _tokenizer_seeds,
           (ConfigError, RefusedError), 20, "json"),
)  # fmt: skip
