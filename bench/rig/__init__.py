"""The rig: hosts, links and a store on one machine, slow where you ask for it (docs/rig.md).

    rig = Rig(
        storage=(Host("storage", cores=(0,), cpu=0.25),),
        trainers=(Host("trainer", cores=(1,)),),
        links={"trainer": Link(10)},
        store=Host("store", cores=(0,)),
    )
    with RigUp(rig) as up:
        store = up.start_store()
        node = up.start_node("storage", ["s3://photos"], env=store.env)
        rows = up.call("trainer", "bench.offload:epoch", address=node.address)

Owns the public names; each file beside it owns one part. Nothing here imports torch.
"""

from bench.rig.description import Host, Link, Rig, RigError
from bench.rig.needs import missing
from bench.rig.node import Node
from bench.rig.store import Store
from bench.rig.up import RigUp
from bench.rig.usage import Usage

__all__ = ["Host", "Link", "Node", "Rig", "RigError", "RigUp", "Store", "Usage", "missing"]
