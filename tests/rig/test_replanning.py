"""A link that gets slow in the middle of an epoch: another plan takes over, and nothing else changes."""

import statistics

import numpy as np
import pytest
from bench import pictures
from bench.rig import Host, Link, Rig, RigUp
from bench.rig.upload import upload

STEPS_BEFORE = 10


@pytest.mark.timeout(600)
def test_a_link_that_drops_changes_the_plan_and_no_loss(tmp_path, can_rig):
    folder, _ = pictures.folder(tmp_path, 640)
    rig = Rig(
        storage=(Host("storage", cores=(0,)),),
        trainers=(Host("trainer", cores=(1,)),),
        links={"trainer": Link(200)},
        store=Host("store", cores=(0,)),
    )
    with RigUp(rig) as up:
        store = up.start_store()
        upload(up, store, folder, "photos/train")
        node = up.start_node("storage", ["s3://photos"], env=store.env)
        job = {"env": store.env, "url": "s3://photos/train", "address": node.address}
        with (
            up.open("trainer", "tests.rig.training:Training", **job) as disturbed,
            up.open("trainer", "tests.rig.training:Training", **job) as fresh,
        ):
            fresh.ask(what="begin")
            undisturbed = fresh.ask(what="steps", num_steps=1000)

            before = disturbed.ask(what="begin")
            losses = disturbed.ask(what="steps", num_steps=STEPS_BEFORE)
            up.set_rate("trainer", 5)
            losses += disturbed.ask(what="steps", num_steps=1000)
            after = disturbed.ask(what="about")

            assert not before["switches"]
            assert after["switches"], f"still {after['what']}"
            assert (after["cut"], -after["share"]) > (before["cut"], -before["share"]), "less has to cross now"
            assert len(losses) == len(undisturbed) == 40
            np.testing.assert_allclose(losses, undisturbed, rtol=1e-5)

            fresh.ask(what="begin")
            rates = [(disturbed.ask(what="rate", num_steps=12), fresh.ask(what="rate", num_steps=12)) for _ in range(3)]
            later, planned = (statistics.median(side) for side in zip(*rates, strict=True))
            assert later >= 0.75 * planned, (after["what"], fresh.ask(what="about")["what"], rates)
