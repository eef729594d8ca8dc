"""Texts take the way of pictures: the same batches and losses wherever they are tokenized and encoded."""

import copy
import json

import pytest
import torch
from torch.nn.functional import cross_entropy

import headwater as hw
from headwater.core.order import Order
from headwater.core.plan import Plan
from headwater.data.transforms import Tokenize, Transforms
from headwater.errors import ConfigError

BATCH, EPOCHS, SEED, LENGTH = 8, 2, 3, 16


def step(model, optimizer, x, y):
    loss = cross_entropy(model(*x) if isinstance(x, tuple) else model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


def plain_losses(model, path, tokenizer):
    """What a user would write: tokenizers and PyTorch, everything in this process, in Headwater's order."""
    from tokenizers import Tokenizer

    model = copy.deepcopy(model)
    optimizer, losses = torch.optim.SGD(model.head.parameters(), lr=0.1), []
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    loaded = Tokenizer.from_file(str(tokenizer))
    loaded.enable_truncation(LENGTH)
    loaded.enable_padding(length=LENGTH)
    with hw.near(model, path, transforms=[Tokenize.of(tokenizer, LENGTH)], nodes="inline", plan=Plan()) as job:
        fingerprint = job.samples.fingerprint
    order = Order(len(rows), fingerprint, SEED)
    for epoch in range(EPOCHS):
        ids = order.epoch(epoch).tolist()
        for start in range(0, len(ids), BATCH):
            batch = [rows[sample] for sample in ids[start : start + BATCH]]
            found = loaded.encode_batch([row["text"] for row in batch])
            x = torch.tensor([each.ids for each in found]), torch.tensor([each.attention_mask for each in found])
            losses.append(step(model, optimizer, x, torch.tensor([["bad", "good"].index(r["label"]) for r in batch])))
    return losses


@pytest.fixture(scope="module")
def plain(model, jsonl, tokenizer):
    return plain_losses(model, jsonl, tokenizer)


def near(model, path, tokenizer, **options):
    return hw.near(model, path, transforms=[Tokenize.of(tokenizer, LENGTH)], batch_size=BATCH, seed=SEED,
                   **({"plan": None} | options))  # fmt: skip


def near_losses(model, path, tokenizer, **options):
    model = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.head.parameters(), lr=0.1)
    with near(model, path, tokenizer, **options) as job:
        job.model.train()
        losses = [step(job.model, optimizer, x, y) for _ in range(EPOCHS) for x, y in job.loader]
        assert job.loader.state_dict()["epoch"] == EPOCHS
    return losses


WAYS = {
    "an embedded node, which also has the encoder": {},
    "an embedded node, cut in the middle of the encoder": {"cut": "encoder.embed"},
    "tokens from a node, the model here": {"cut": "input"},
    "one process, one text after the other": {"nodes": "inline"},
    "nothing moved": {"plan": Plan()},
    "what the planner chooses": {"plan": "auto"},
}
_SLOW = {"what the planner chooses": [pytest.mark.slow]}


@pytest.mark.parametrize("way", [pytest.param(way, marks=_SLOW.get(way, ())) for way in WAYS])
def test_losses_equal_those_of_everything_on_the_trainer(model, jsonl, tokenizer, plain, way):
    assert near_losses(model, jsonl, tokenizer, **WAYS[way]) == pytest.approx(plain, rel=1e-4)


def test_two_nodes_that_lack_the_tokenizer_are_sent_it(model, jsonl, tokenizer, plain, start_node, tmp_path):
    nodes = [start_node(jsonl.parent, options=("--state", str(tmp_path / str(number)))) for number in range(2)]
    found = near_losses(model, jsonl, tokenizer, nodes=[node.address for node in nodes])
    assert found == pytest.approx(plain, rel=1e-4)
    assert any((tmp_path / str(number) / "tokenizers").glob("*.json") for number in range(2))


def test_every_text_comes_once_and_a_resumed_epoch_has_the_rest(model, jsonl, tokenizer):
    with near(model, jsonl, tokenizer) as job:
        ids, mask = torch.ones(2, LENGTH, dtype=torch.int64), torch.ones(2, LENGTH, dtype=torch.int64)
        assert torch.equal(job.model(ids, mask), model(ids, mask)), "plain inputs run the whole model"
        whole = [x.samples.tolist() for x, _ in job.loader]
        labels = job.samples.labels
        batches = iter(job.loader)
        second = [next(batches)[0].samples.tolist() for _ in range(3)]
        state = job.loader.state_dict()
        batches.close()
    assert sorted(sample for batch in whole for sample in batch) == list(range(60))
    with near(model, jsonl, tokenizer) as job:
        job.loader.load_state_dict(state)
        rest = []
        for x, y in job.loader:
            rest.append(x.samples.tolist())
            assert y.tolist() == labels[x.samples].tolist()
    assert sorted(sample for batch in second + rest for sample in batch) == list(range(60))


def test_rows_are_small_and_kept(model, jsonl, tokenizer, start_node, tmp_path):
    node = start_node(jsonl.parent, options=("--state", str(tmp_path), "--cache-size", "100MB"))
    with near(model, jsonl, tokenizer, nodes=[node.address]) as job:
        first = {int(s): row for x, _ in job.loader for s, row in zip(x.samples, x.tensors[0], strict=True)}
        assert job.plan.cut > 0
        assert next(iter(first.values())).numel() == 32, "a mean of states: one vector a text"
        again = {int(s): row for x, _ in job.loader for s, row in zip(x.samples, x.tensors[0], strict=True)}
    assert all(torch.equal(first[sample], again[sample]) for sample in first)


def test_texts_are_nothing_for_partitioned_training(model, jsonl, tokenizer):
    chain = Transforms([Tokenize.of(tokenizer, 16)])
    with pytest.raises(ConfigError, match=r"on pictures.*headwater\.near"):
        hw.partition(model, str(jsonl), transforms=chain)
