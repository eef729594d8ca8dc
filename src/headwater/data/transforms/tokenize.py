"""Tokenize: a text as numbers of a fixed length."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from headwater.core.spec import TensorSpec
from headwater.data import tokenizerfile
from headwater.data.tokenizerfile import MAX_LENGTH
from headwater.data.transforms.op import TextOp, is_int
from headwater.errors import ConfigError


@dataclass(frozen=True)
class Tokenize(TextOp):
    """The ids of a text's tokens, `length` of them: longer texts are cut off, shorter ones filled up with `pad_id`.

    `tokenizer` is the sha256 of a tokenizer.json; `Tokenize.of` makes a step of the file itself. With `mask` the model
    gets two inputs, the ids and what of them is text (1) or filling (0); without, the ids alone.
    """

    tokenizer: str
    length: int
    pad_id: int = 0
    mask: bool = True

    def __post_init__(self) -> None:
        digest = self.tokenizer
        if not isinstance(digest, str) or len(digest) != 64 or set(digest) - set("0123456789abcdef"):
            raise self.fault("tokenizer", "a sha256 in hexadecimal; Tokenize.of(tokenizer, length) makes it")
        if not is_int(self.length, 1, MAX_LENGTH):
            raise self.fault("length", f"an int from 1 to {MAX_LENGTH:,}")
        if not is_int(self.pad_id, 0, 2**31 - 1):
            raise self.fault("pad_id", "an int from 0 to 2**31 - 1")
        if not isinstance(self.mask, bool):
            raise self.fault("mask", "true or false")

    @classmethod
    def of(cls, tokenizer: Any, length: int, *, pad_id: int | None = None, mask: bool = True) -> Tokenize:
        """From a tokenizer.json (or the folder of one), a tokenizers.Tokenizer, or a fast tokenizer of transformers.

        `pad_id` is by default what the tokenizer fills up with, or its [PAD] or <pad>.
        """
        data = tokenizerfile.text_of(tokenizer)
        digest = tokenizerfile.keep(data)
        if pad_id is None:
            pad_id = tokenizerfile.pad_id_of(digest, tokenizer)
        if pad_id is None:
            raise ConfigError("the tokenizer has no [PAD] or <pad>; say what texts are filled up with: pad_id=…")
        return cls(digest, length, pad_id, mask)

    @property
    def spec(self) -> TensorSpec:
        return TensorSpec("tokens", (2, self.length) if self.mask else (self.length,), "int32")

    @property
    def num_inputs(self) -> int:
        return 2 if self.mask else 1

    @property
    def num_ids(self) -> int:
        """How many different ids there are."""
        return int(self.loaded().tokenizer.get_vocab_size())

    @property
    def needs(self) -> str:
        return self.tokenizer

    def loaded(self) -> tokenizerfile.Loaded:
        return tokenizerfile.load(self.tokenizer, self.length)

    def apply(self, text: str) -> np.ndarray:
        ids = tokenizerfile.ids_of(self.loaded().tokenizer, text, self.length)
        rows = np.zeros((2, self.length), np.int32)
        rows[0] = self.pad_id
        rows[0, : len(ids)] = ids
        rows[1, : len(ids)] = 1
        return rows if self.mask else rows[0]
