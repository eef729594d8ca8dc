"""Made-up reviews, a tokenizer of their words, and a small encoder of random weights; jobs measure for a moment."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

WORDS = ["the", "a", "film", "book", "was", "is", "good", "bad", "great", "dull", "not", "very", "i", "liked", "it",
         "hated", "loved", "story", "plot", "ending"]  # fmt: skip


def wordpiece(words: list[str] = WORDS, **changes: object) -> bytes:
    """A tokenizer.json as of BERT, with these words."""
    vocab = {word: number for number, word in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", *words])}
    said = {
        "version": "1.0", "truncation": None, "padding": None,
        "added_tokens": [{"id": number, "content": name, "single_word": False, "lstrip": False, "rstrip": False,
                          "normalized": False, "special": True} for name, number in list(vocab.items())[:4]],
        "normalizer": {"type": "BertNormalizer", "clean_text": True, "handle_chinese_chars": True,
                       "strip_accents": None, "lowercase": True},
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "[CLS]", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}},
                       {"SpecialToken": {"id": "[SEP]", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {name: {"id": name, "ids": [vocab[name]], "tokens": [name]}
                               for name in ("[CLS]", "[SEP]")},
        },
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True},
        "model": {"type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "##",
                  "max_input_chars_per_word": 100, "vocab": vocab},
    }  # fmt: skip
    return json.dumps(said | changes).encode()


def reviews(count: int = 60) -> list[tuple[str, str]]:
    """(text, label): some of them longer than the inputs."""
    generator = np.random.default_rng(1)
    found = []
    for number in range(count):
        label = ("bad", "good")[number % 2]
        words = [*generator.choice(WORDS, int(generator.integers(1, 20))), label]
        found.append((" ".join(words) + f", said {number}", label))
    return found


@pytest.fixture(autouse=True)
def brief(moments: None) -> None:
    """One thread, and moments."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    path.write_bytes(wordpiece())
    return path


@pytest.fixture(scope="session")
def jsonl(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("texts")
    lines = [json.dumps({"text": text, "label": label}) for text, label in reviews()]
    (folder / "reviews.jsonl").write_text("\n".join(lines))
    return folder / "reviews.jsonl"


class Encoder(nn.Module):
    """Embeddings that attend to each other where there is text."""

    def __init__(self, num_ids: int, width: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(num_ids, width)
        self.norm = nn.LayerNorm(width)

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        states = self.embed(ids)
        scores = states @ states.transpose(1, 2) / 8
        weights = scores.masked_fill(mask.unsqueeze(1) == 0, -1e4).softmax(-1)
        return self.norm(states + weights @ states)


class Classifier(nn.Module):
    """An encoder's states to their mean to classes: what one writes around a BERT."""

    def __init__(self, encoder: nn.Module, width: int, num_classes: int = 2) -> None:
        super().__init__()
        self.encoder = encoder
        self.head = nn.Linear(width, num_classes)

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        states = self.encoder(ids, mask)
        weights = mask.unsqueeze(-1).to(states.dtype)
        return self.head((states * weights).sum(1) / weights.sum(1))


@pytest.fixture(scope="session")
def model() -> Classifier:
    import headwater as hw

    torch.manual_seed(0)
    return hw.freeze(Classifier(Encoder(4 + len(WORDS), 32), 32).eval(), until="head")
