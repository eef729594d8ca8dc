"""Embeddings by the storage train as `nn.EmbeddingBag` does, on one node and on three."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import headwater as hw
from headwater.errors import ConfigError, RefusedError

spec = importlib.util.spec_from_file_location("embedding_peers", Path(__file__).with_name("embedding.py"))
side = importlib.util.module_from_spec(spec)
spec.loader.exec_module(side)

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}


@pytest.fixture(scope="module")
def nodes(start_node_once, tmp_path_factory):
    """Three, each with a folder for tables."""
    folders = [tmp_path_factory.mktemp("node") for _ in range(3)]
    return [start_node_once(each, options=("--tables", str(each / "tables"))).address for each in folders]


@pytest.fixture
def name(request):
    return "t-" + "".join(letter if letter.isalnum() else "-" for letter in request.node.name)[-60:]


def train(module, optimizer, head, batches):
    losses = []
    for batch in batches:
        loss = head(module(*batch))
        loss.backward()
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad() if hasattr(optimizer, "zero_grad") else None
        head.weight.grad = None
        losses.append(loss.item())
    return np.array(losses)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["32", "64"])
@pytest.mark.parametrize("optimizer", ["sgd", "rowwise_adagrad"])
@pytest.mark.parametrize("mode", ["sum", "mean"])
@pytest.mark.parametrize("count", [1, 3])
def test_fifty_steps_have_the_losses_and_the_vectors_of_a_local_one(nodes, name, count, mode, optimizer, dtype):
    near, local, local_step = side.peers(nodes[:count], name, dtype=dtype, optimizer=optimizer, mode=mode)
    generator, head = np.random.default_rng(0), side.Head(8, dtype)
    batches = [side.ragged(generator, 200) for _ in range(50)]
    with near:
        ours = train(near, None, head, near.ahead(batches, lambda batch: batch))
        theirs = train(local, local_step, head, batches)
        np.testing.assert_allclose(ours, theirs, rtol=TOLERANCE[dtype])
        torch.testing.assert_close(near.export(), local.weight.detach(), rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
        assert near.version == 50


def ids_of(number, num=200):
    return side.ragged(np.random.default_rng(number), num)


CALLS = {
    "two dimensions": (lambda ids: (ids[:20].reshape(4, 5),), {}),
    "offsets": (lambda ids: (ids[:20], torch.tensor([0, 0, 7, 20])), {}),
    "last offset": (lambda ids: (ids[:20], torch.tensor([0, 3, 20])), {"include_last_offset": True}),
    "padding": (lambda ids: (ids[:20].reshape(4, 5),), {"padding_idx": 0}),
    "padding from the end": (lambda ids: (ids[:20].reshape(4, 5) + 180,), {"padding_idx": -1}),
    "weights": (lambda ids: (ids[:20].reshape(4, 5), None, torch.linspace(-1, 1, 20).double().reshape(4, 5)), {}),
    "no ids at all": (lambda ids: (ids[:0], torch.tensor([0, 0])), {}),
    "32 bits": (lambda ids: (ids[:20].int(), torch.tensor([0, 7]).int()), {}),
}


@pytest.mark.parametrize("travels", ["pooled", "vectors"])
@pytest.mark.parametrize("call", CALLS)
def test_it_is_called_as_embedding_bag_is(nodes, name, call, travels):
    make, options = CALLS[call]
    mode = "sum" if call == "weights" else "mean"
    near = hw.EmbeddingBag(200, 8, mode=mode, dtype=torch.float64, name=name, nodes=nodes, lr=1.0, travels=travels,
                           **options)  # fmt: skip
    with near:
        local = torch.nn.EmbeddingBag(200, 8, mode=mode, dtype=torch.float64, **options)
        with torch.no_grad():
            local.weight.copy_(near.export())
        given = make(torch.arange(40) % 19)
        with torch.no_grad():
            torch.testing.assert_close(near(*given), local(*given))
        for module in (near, local):
            module(*given).square().sum().backward()
        with torch.no_grad():
            local.weight -= 0 if local.weight.grad is None else local.weight.grad
        torch.testing.assert_close(near.export(), local.weight.detach())


def test_prefetching_changes_no_bit(nodes, name):
    """Also where a batch is used out of turn, never, or after several steps."""
    order, found = [0, 1, 3, 2, 4, 5, 5, 8, 7, 6, 9], []
    for staged in ([], [0, 1, 2, 3], [0, 5, 6, 8]):
        near = hw.EmbeddingBag(
            200, 8, mode="sum", name=f"{name[:50]}-{len(found)}", nodes=nodes, travels="pooled", lr=0.5
        )
        with near:
            for turn, number in enumerate(order):
                if staged and turn % 2 == 0:
                    near.prefetch(*ids_of((staged[turn % len(staged)] + turn) % 10))
                near(*ids_of(number)).square().sum().backward()
            with torch.no_grad():
                near.eval()
                near.prefetch(*ids_of(3))
                found.append((near(*ids_of(3)), near.export()))
            near.drop()
    for pooled, vectors in found[1:]:
        assert torch.equal(pooled, found[0][0])
        assert torch.equal(vectors, found[0][1])


@pytest.mark.parametrize("optimizer", ["sgd", "rowwise_adagrad"])
@pytest.mark.parametrize("count", [1, 3])
def test_a_copy_here_is_trained_to_the_same_bits_as_the_table_on_its_nodes(nodes, name, count, optimizer):
    """Sums, losses, vectors and what the optimizer keeps; also of a table that others had trained before, and whose
    bags have weights."""
    found = []
    for place in ("nodes", "here"):
        generator, head = np.random.default_rng(0), side.Head(8, torch.float32)
        bag = hw.EmbeddingBag(200, 8, mode="sum", name=f"{name[:50]}-{place}", nodes=nodes[:count], lr=0.3,
                              optimizer=optimizer, travels="pooled", padding_idx=3)  # fmt: skip
        with bag:
            train(bag, None, head, [side.ragged(generator, 200) for _ in range(5)])
        bag = hw.EmbeddingBag(200, 8, mode="sum", name=f"{name[:50]}-{place}", nodes=nodes[:count], lr=0.3,
                              optimizer=optimizer, travels="pooled", padding_idx=3, place=place)  # fmt: skip
        with bag:
            batches = [side.ragged(generator, 200) for _ in range(30)]
            weighted = [(ids, starts, torch.rand(len(ids), generator=torch.Generator().manual_seed(1)))
                        for ids, starts in batches[:10]]  # fmt: skip
            before = bag.version
            losses = train(bag, None, head, bag.ahead([*batches, *weighted], lambda batch: batch))
            assert bag.version - before == (40 if place == "nodes" else 0)
            vectors, state = bag.export(), bag.table.read(np.arange(200))[1]
            bag.drop()
        found.append((losses, vectors, state))
    np.testing.assert_array_equal(found[1][0], found[0][0])
    assert torch.equal(found[1][1], found[0][1])
    np.testing.assert_array_equal(found[1][2], found[0][2])


def test_what_was_trained_in_a_copy_is_on_the_nodes_after_a_state_dict_and_gone_when_that_is_loaded(nodes, name):
    def bag_of(place):
        return hw.EmbeddingBag(200, 8, mode="sum", name=name, nodes=nodes, lr=0.5, place=place)

    with bag_of("here") as near:
        for number in range(3):
            near(*ids_of(number)).square().sum().backward()
        state = near.state_dict()
        then = torch.from_numpy(near.table.read(np.arange(200))[0])
        with torch.no_grad():
            pooled = near(*ids_of(7))
        for number in range(3, 6):
            near(*ids_of(number)).square().sum().backward()
        near.load_state_dict(state)
        with torch.no_grad():
            assert torch.equal(near(*ids_of(7)), pooled)
        assert torch.equal(near.export(), then)
        near(*ids_of(6)).square().sum().backward()  # written back by close
    with bag_of("nodes") as again:
        assert not torch.equal(again.export(), then)
        again.drop()


@pytest.mark.parametrize("change", ["load_tensor", "resize"])
def test_a_copy_follows_what_is_done_to_the_table(nodes, name, change):
    with hw.EmbeddingBag(200, 8, mode="sum", name=name, nodes=nodes, lr=0.5, place="here") as near:
        near(*ids_of(0)).square().sum().backward()
        if change == "resize":
            before = near.export()
            near.resize(300)
            assert torch.equal(near.export()[:200], before)
            assert near(torch.tensor([[299]])).shape == (1, 8)
        else:
            near.load_tensor(torch.ones(200, 8))
        with torch.no_grad():
            found = near(torch.tensor([[5, 6]]))
            torch.testing.assert_close(found, near.export()[5:7].sum(0, keepdim=True))
        near.drop()


@pytest.mark.parametrize("travels", ["pooled", "auto"])
def test_wherever_a_small_table_is_cheaper_losses_are_the_same(nodes, name, travels):
    """Which it is depends on this machine; that all was priced, and that the first was taken, does not."""
    generator, found = np.random.default_rng(0), []
    batches = [side.ragged(generator, 200) for _ in range(30)]
    for place in ("nodes", "auto"):
        with hw.EmbeddingBag(200, 8, mode="sum", name=f"{name[:50]}-{place}", nodes=nodes, lr=0.1, dtype=torch.float64,
                             travels=travels, place=place) as near:  # fmt: skip
            found.append(train(near, None, side.Head(8, torch.float64), near.ahead(batches, lambda batch: batch)))
            if place == "auto":
                ways = {"pooled", "vectors"} if travels == "auto" else {"pooled"}
                assert {each.way for each in near.ranking} == {*ways, "here"}
                assert near._way.place == near.ranking[0].place
                assert "estimated" in near.ranking[0].describe()
            near.drop()
    np.testing.assert_allclose(found[1], found[0], rtol=1e-9)


def test_a_table_that_does_not_fit_is_not_kept_here(nodes, name, monkeypatch):
    monkeypatch.setattr("headwater.train.table_measure.available_bytes", lambda: 10_000)
    with pytest.raises(ConfigError, match="more than 50% of the memory"):
        hw.EmbeddingBag(200, 8, mode="sum", name=name, nodes=nodes, place="here")
    with hw.EmbeddingBag(200, 8, mode="sum", name=name, nodes=nodes, place="auto") as near:
        near(torch.tensor([[199]]))
        assert near._way.place == "nodes"
        near.drop()


COPY_TO_THE_END = """
import sys, torch, headwater as hw
bag = hw.EmbeddingBag(500, 32, mode="sum", name=sys.argv[1], nodes=sys.argv[2:], place="here")
bag(torch.arange(500).view(-1, 1)).sum().backward()
"""


def test_a_copy_is_written_back_when_a_script_just_ends(nodes, name):
    done = subprocess.run(
        [sys.executable, "-c", COPY_TO_THE_END, name, *nodes[:2]], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    with hw.EmbeddingBag(500, 32, mode="sum", name=name, nodes=nodes[:2]) as near:
        assert near.version > 0
        near.drop()


LAST_STEP = """
import sys, torch, headwater as hw
bag = hw.EmbeddingBag(200_000, 32, mode="sum", name=sys.argv[1], nodes=sys.argv[2:], travels="pooled")
bag(torch.arange(200_000).view(-1, 1)).sum().backward()
"""


def test_the_last_step_of_a_script_that_just_ends_is_done(nodes, name):
    done = subprocess.run([sys.executable, "-c", LAST_STEP, name, *nodes[:2]], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    with hw.EmbeddingBag(200_000, 32, mode="sum", name=name, nodes=nodes[:2]) as near:
        assert near.version == 1
        near.drop()


def test_a_loop_that_is_left_early_leaves_nothing_staged(nodes, name):
    """What was staged and never used would come along with every later step."""
    with hw.EmbeddingBag(200, 8, mode="sum", name=name, nodes=nodes[:1], travels="pooled") as near:
        for asked in near.ahead((ids_of(number) for number in range(10)), lambda ids: ids, depth=2):
            near(*asked).sum().backward()
            break
        assert near.table.ahead.staged == []
        near.prefetch(*ids_of(1))  # passed over by whoever comes next
        near.prefetch(*ids_of(2))
        near(*ids_of(2)).sum().backward()
        assert near.table.ahead.staged == []
        near.drop()


def test_one_call_in_two_places_of_a_model_is_two_steps(nodes, name):
    near, local, optimizer = side.peers(nodes[:1], name)
    with near:
        for module in (near, local):
            (module(*ids_of(1)).sum() + 2 * module(*ids_of(2)).sum()).backward()
        optimizer.step()
        torch.testing.assert_close(near.export(), local.weight.detach())
        assert near.version == 2


def test_evaluation_and_a_frozen_table_change_nothing(nodes, name):
    with hw.EmbeddingBag(200, 8, name=name, nodes=nodes) as near:
        with torch.no_grad():
            near(*ids_of(1))
        near.requires_grad_(False)
        assert not near(*ids_of(1)).requires_grad
        assert near.version == 0


@pytest.mark.parametrize("optimizer", ["sgd", "rowwise_adagrad"])
def test_a_saved_table_goes_on_on_another_number_of_nodes(nodes, name, tmp_path, optimizer):
    near, local, step = side.peers(nodes, name[:50], optimizer=optimizer)
    head = side.Head(8, torch.float64)
    batches = [ids_of(number) for number in range(20)]
    with near:
        train(near, None, head, batches[:10])
        assert 0 < near.save(str(tmp_path / "saved")) <= 200
        near.drop()
    train(local, step, head, batches[:10])
    with hw.EmbeddingBag(200, 8, mode="sum", dtype=torch.float64, name=f"{name[:50]}-2", nodes=nodes[:1], lr=0.1,
                         scale=0.1, optimizer=optimizer) as again:  # fmt: skip
        again.load(tmp_path.as_uri() + "/saved")
        ours, theirs = train(again, None, head, batches[10:]), train(local, step, head, batches[10:])
        np.testing.assert_allclose(ours, theirs, rtol=1e-9)
        torch.testing.assert_close(again.export(), local.weight.detach(), rtol=1e-9, atol=1e-12)


def test_a_table_grows_and_keeps_what_it_has(nodes, name):
    with hw.EmbeddingBag(200, 8, mode="sum", name=name, nodes=nodes) as near:
        near(*ids_of(1)).sum().backward()
        before = near.export()
        near.resize(500)
        after = near.export()
        assert torch.equal(after[:200], before)
        assert after.shape == (500, 8)
        near(torch.tensor([[499, 3]])).sum().backward()
        assert not torch.equal(near.export()[499], after[499])
        with pytest.raises(RefusedError, match="can't shrink"):
            near.resize(10)


def test_a_table_is_taken_up_where_it_stands(nodes, name):
    with hw.EmbeddingBag(200, 8, mode="sum", name=name, nodes=nodes) as near:
        near(*ids_of(1)).sum().backward()
        before = near.export()
    with hw.EmbeddingBag(200, 8, mode="sum", name=name, nodes=nodes) as again:
        assert again.version == 1
        assert torch.equal(again.export(), before)
    with pytest.raises(RefusedError, match="is there with dim 8"):
        hw.EmbeddingBag(200, 9, mode="sum", name=name, nodes=nodes)


def test_a_state_dict_says_which_version_and_goes_back_to_it(nodes, name):
    with hw.EmbeddingBag(200, 8, mode="sum", name=name, nodes=nodes) as near:
        for number in range(5):
            near(*ids_of(number)).sum().backward()
        state, then = near.state_dict(), near.export()
        assert list(near.parameters()) == []
        assert sum(each.numel() for each in state.values() if isinstance(each, torch.Tensor)) == 0
        for number in range(5, 8):
            near(*ids_of(number)).sum().backward()
        near.load_state_dict(state)
        assert near.version == 5
        assert torch.equal(near.export(), then)
        state["_extra_state"]["version"] = 77
        with pytest.raises(ConfigError, match="is of version 77"):
            near.load_state_dict(state)


def test_without_nodes_one_is_started_and_leaves_nothing():
    near = hw.EmbeddingBag(50, 4, _weight=torch.arange(200.0).reshape(50, 4), mode="sum")
    assert torch.equal(near(torch.tensor([[1, 2]])).detach(), torch.tensor([[12.0, 14, 16, 18]]))
    scratch, pid = Path(near._scratch.name), near._node.pid
    near.close()
    assert not scratch.exists()
    assert not Path(f"/proc/{pid}").exists()


def test_a_folder_keeps_the_table_of_a_node_of_ones_own(tmp_path):
    for version in (0, 1):
        with hw.EmbeddingBag(50, 4, mode="sum", folder=str(tmp_path)) as near:
            assert near.version == version
            near(torch.tensor([[1, 2]])).sum().backward()


@pytest.mark.parametrize(
    ("options", "said"),
    [({"mode": "max"}, "mode is 'max'"), ({"max_norm": 1.0}, "max_norm"), ({"dtype": torch.float16}, "float16"),
     ({"padding_idx": 9}, "padding_idx is 9"), ({"nodes": ["grpc://h:1"]}, "name="),
     ({"travels": "x"}, "travels is 'x'"), ({"place": "x"}, "place is 'x'"),
     ({"scale_grad_by_freq": True}, "scale_grad_by_freq"), ({"nodes": [], "name": "x"}, "nodes is empty"),
     ({"optimizer": "adam"}, "optimizer")],
)  # fmt: skip
def test_what_is_not_done_near_the_storage_is_refused_at_once(options, said):
    with pytest.raises(ConfigError, match=said):
        hw.EmbeddingBag(5, 2, **options)


@pytest.mark.parametrize(
    ("given", "said"),
    [((torch.tensor([[1.0]]),), "float32"), ((torch.tensor([1]),), "need offsets"), ((torch.tensor([[5000]]),), "5000"),
     ((torch.tensor([1, 2]), torch.tensor([1])), "begin with 0"), ((torch.tensor(1),), "0 dimensions"),
     ((torch.tensor([[1]]), None, torch.ones(1, 1)), "mode='sum'")],
)  # fmt: skip
def test_ids_that_make_no_sense_are_refused(nodes, given, said):
    with hw.EmbeddingBag(200, 8, name="refused", nodes=nodes) as near, pytest.raises(ConfigError, match=said):
        near(*given)
