"""A tokenizer that anyone may have written: what is let in gives the library's own ids, what is not is named."""

import contextlib
import json

import numpy as np
import pytest
from tests.text.conftest import wordpiece

from headwater.data import tokenizerfile
from headwater.data.transforms import Resize, Tokenize, Transforms
from headwater.errors import BadSampleError, ConfigError, HeadwaterError, RefusedError, TransformError


def test_ids_and_mask_are_those_of_the_library_cut_off_and_filled_up(tokenizer):
    from tokenizers import Tokenizer

    loaded = Tokenizer.from_file(str(tokenizer))
    loaded.enable_truncation(8)
    loaded.enable_padding(length=8)
    chain = Transforms([Tokenize.of(tokenizer, 8)])
    for text in ("", "The film was good", "a " * 50, "ünknown Wörds! 🙂"):
        wanted = loaded.encode(text)
        found = chain.apply(text.encode(), "x")
        assert found.tolist() == [wanted.ids, wanted.attention_mask]
        assert found.dtype == np.int64


@pytest.mark.parametrize("kind", ["TemplateProcessing", "BertProcessing", "RobertaProcessing", "ByteLevel", "Sequence"])
def test_texts_of_any_length_are_cut_off_as_the_library_does_it(kind):
    from tokenizers import Tokenizer

    ends = {"sep": ["[SEP]", 3], "cls": ["[CLS]", 2]}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    roberta = {"type": "RobertaProcessing", **ends, "trim_offsets": True, "add_prefix_space": False}
    template = json.loads(wordpiece())["post_processor"]
    steps = {"TemplateProcessing": template, "BertProcessing": {"type": "BertProcessing", **ends},
             "RobertaProcessing": roberta, "ByteLevel": level,
             "Sequence": {"type": "Sequence", "processors": [level, template]}}  # fmt: skip
    data = wordpiece(post_processor=steps[kind])
    found = tokenizerfile._load(tokenizerfile.check(data))
    for length in (3, 4, 7, 50):
        wanted = Tokenizer.from_str(data.decode())
        wanted.enable_truncation(length)
        for text in ("", "good", "the film was not very good, i liked it", "ünknown 🙂 " * 9):
            assert tokenizerfile.ids_of(found, text, length) == wanted.encode(text).ids


def test_one_that_is_held_stays_loaded_and_others_within_their_bytes(tmp_path, monkeypatch):
    monkeypatch.setattr(tokenizerfile, "_folders", [tmp_path])
    monkeypatch.setattr(tokenizerfile, "KEPT", tokenizerfile.Kept(1, at_least=0))
    first, second = (tokenizerfile.keep(wordpiece([word]), tmp_path) for word in ("held", "not"))
    before = tokenizerfile.needs_bytes(first)
    held = tokenizerfile.load(first, 8)
    tokenizerfile.load(second, 8)
    assert tokenizerfile.load(first, 99) is held, "one for all lengths"
    assert tokenizerfile.needs_bytes(first) == held.num_bytes < before
    assert tokenizerfile.KEPT.get(second) is None
    del held
    assert tokenizerfile.KEPT.get(first) is None


def test_without_a_mask_ids_are_the_only_input(tokenizer):
    chain = Transforms([Tokenize.of(tokenizer, 8, mask=False)])
    assert chain.output_spec.shape == (8,)
    assert len(chain.inputs_of(chain.apply(b"good", "x")[None])) == 1


def test_it_is_plain_data_and_comes_back_from_it(tokenizer):
    chain = Transforms([Tokenize.of(tokenizer, 8)])
    assert Transforms.from_json(json.loads(json.dumps(chain.to_json()))) == chain


def test_a_fast_tokenizer_of_transformers_is_taken_as_it_is(tokenizer):
    from transformers import PreTrainedTokenizerFast

    fast = PreTrainedTokenizerFast(tokenizer_file=str(tokenizer))
    chain = Transforms([Tokenize.of(fast, 8, pad_id=0)])
    assert chain.apply(b"the film", "x")[0].tolist() == [*fast("the film").input_ids, 0, 0, 0, 0]


def test_texts_are_filled_up_with_what_the_file_says_or_its_pad_token(tmp_path):
    (tmp_path / "tokenizer.json").write_bytes(wordpiece(["x"], padding={"pad_id": 5, "strategy": "BatchLongest"}))
    assert Tokenize.of(tmp_path, 8).pad_id == 5
    (tmp_path / "tokenizer.json").write_bytes(wordpiece(["x"]))
    assert Tokenize.of(tmp_path, 8).pad_id == 0
    nameless = {"type": "WordLevel", "vocab": {"x": 0, "?": 1}, "unk_token": "?"}
    (tmp_path / "tokenizer.json").write_bytes(wordpiece(model=nameless, added_tokens=[], post_processor=None))
    with pytest.raises(ConfigError, match=r"no \[PAD\] or <pad>; .*pad_id="):
        Tokenize.of(tmp_path, 8)


def regex(part, kind):
    return wordpiece(**{part: {"type": kind, "pattern": {"Regex": "(a+)+$"}, "content": "", "behavior": "Isolated",
                               "invert": False}})  # fmt: skip


def doubling(times):
    """A text becomes twice as long, again and again."""
    step = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}
    return wordpiece(normalizer={"type": "Sequence", "normalizers": [step] * times})


BPE = {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": ["a b"]}

TWICE = {"type": "TemplateProcessing", "single": [{"Sequence": {"id": "A", "type_id": 0}}] * 2, "pair": [],
         "special_tokens": {}}  # fmt: skip

WRONG = {
    "the text more than once": wordpiece(post_processor=TWICE),
    "times as long": doubling(40),
    "an empty pattern": wordpiece(normalizer={"type": "Replace", "pattern": {"String": ""}, "content": "x" * 100}),
    "a pattern of nothing": wordpiece(normalizer={"type": "Replace", "pattern": [{}], "content": ""}),
    "Prepend": wordpiece(normalizer={"type": "Prepend", "prepend": "x" * 1000}),
    "draws at random": wordpiece(model={**BPE, "dropout": 0.5}),
    "long affix": wordpiece(model={**BPE, "continuing_subword_prefix": "#" * 1000}),
    "long word": wordpiece(model={"type": "Unigram", "unk_id": 0, "vocab": [["?", 0.0], ["a" * 5000, -1.0]]}),
    "Unigram takes": wordpiece(model={"type": "Unigram", "unk_id": 0, "vocab": [["?", 0.0]] + [
        [f"{number}{chr(97 + number) * 250}", -1.0] for number in range(20)]}),
    "not JSON": b"{",
    "no model": b"{}",
    "not an object": b"[]",
    "deep": b"[" * 100_000,
    "a part": wordpiece(extra=1),
    "Split has a regular expression": regex("pre_tokenizer", "Split"),
    "Replace has a regular expression": regex("normalizer", "Replace"),
    "normalizer is 'Precompiled'": wordpiece(normalizer={"type": "Precompiled", "precompiled_charsmap": "AAAA"}),
    "Sequence of more": wordpiece(normalizer={"type": "Sequence", "normalizers": [{"type": "NFC"}] * 99}),
    "inside": wordpiece(normalizer={"type": "Sequence", "normalizers": [{"type": "Sequence", "normalizers": [None]}]}),
    "model is": wordpiece(model={"type": "Remote", "vocab": {}}),
    "can't be loaded": wordpiece(model={"type": "WordPiece", "vocab": [1, 2]}),
    "max_input_chars_per_word": wordpiece(model={"type": "WordPiece", "vocab": {"[UNK]": 0}, "unk_token": "[UNK]",
                                                 "continuing_subword_prefix": "##",
                                                 "max_input_chars_per_word": 10**9}),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_what_a_strangers_file_may_not_have_is_refused(name, tmp_path):
    with pytest.raises(ConfigError, match="tokenizer"):
        tokenizerfile.keep(WRONG[name], tmp_path)
    assert not list(tmp_path.iterdir())


def test_replacing_that_makes_texts_little_longer_is_let_in():
    tokenizerfile.check(doubling(4))


def test_a_file_beyond_the_limit_is_refused(monkeypatch):
    monkeypatch.setattr(tokenizerfile, "MAX_BYTES", 100)
    with pytest.raises(ConfigError, match="the limit is 100"):
        tokenizerfile.check(wordpiece())


def test_damaged_bytes_are_an_error_of_ours_and_nothing_else():
    whole = wordpiece()
    generator = np.random.default_rng(0)
    for _ in range(150):
        data = bytearray(whole)
        for place in generator.integers(0, len(data), 3):
            data[place] = generator.integers(0, 256)
        with contextlib.suppress(HeadwaterError):
            tokenizerfile._load(tokenizerfile.check(bytes(data)))


def test_a_stored_file_that_was_damaged_is_gone_and_asked_for_again(tmp_path, monkeypatch):
    monkeypatch.setattr(tokenizerfile, "_folders", [tmp_path])
    digest = tokenizerfile.keep(wordpiece(["word"]), tmp_path)
    (tmp_path / f"{digest}.json").write_bytes(wordpiece(["another"]))
    with pytest.raises(RefusedError, match=f"unknown tokenizer {digest}.*damaged"):
        tokenizerfile.load(digest, 8)
    assert not list(tmp_path.iterdir())


def test_the_folder_keeps_those_used_last(tmp_path, monkeypatch):
    monkeypatch.setattr(tokenizerfile, "FILES_KEPT", 2)
    digests = [tokenizerfile.keep(wordpiece([word]), tmp_path) for word in ("x", "y", "z")]
    assert {path.stem for path in tmp_path.iterdir()} <= set(digests)
    assert len(list(tmp_path.iterdir())) == 2


FIELDS = {
    "tokenizer is": {"tokenizer": "../../etc/passwd", "length": 8},
    "length is": {"tokenizer": "0" * 64, "length": 10**9},
    "length is ": {"tokenizer": "0" * 64, "length": True},
    "pad_id is": {"tokenizer": "0" * 64, "length": 8, "pad_id": -1},
    "mask is": {"tokenizer": "0" * 64, "length": 8, "mask": 1},
    "unknown field": {"tokenizer": "0" * 64, "length": 8, "path": "/"},
}


@pytest.mark.parametrize("said", FIELDS)
def test_its_fields_are_checked(said):
    with pytest.raises(TransformError, match=said):
        Transforms.from_json([{"op": "Tokenize", **FIELDS[said]}])


def test_it_stands_alone(tokenizer):
    with pytest.raises(TransformError, match="stands alone"):
        Transforms([Tokenize.of(tokenizer, 8), Resize((8, 8))])


def test_a_length_with_no_room_for_text_is_refused(tokenizer):
    with pytest.raises(ConfigError, match="at least 3"):
        Transforms([Tokenize.of(tokenizer, 2)]).apply(b"x", "x")


def test_bytes_that_are_no_text_are_a_bad_sample(tokenizer):
    with pytest.raises(BadSampleError, match="Tokenize"):
        Transforms([Tokenize.of(tokenizer, 8)]).apply(b"\xff\xfe", "x")
