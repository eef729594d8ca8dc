"""Epochs from the node's cache, against a cold one and against the plain loop.

Claim: over a link of 50 Mbit/s, with one core beside the storage and one at the trainer, an epoch of EfficientNet-lite0
whose rows were kept by the node runs at least 20 times as fast as the cold epoch that made them.

Warm epochs fill the link, so the bytes of a row decide: rows travel as int8, and as fp16 to compare. Each round starts
a node with an empty cache for each: a cold epoch, warm epochs; and the plain loop once. The cold rate leaves out the
start of its epoch, when the node loads its engine; the warm rate has everything in it.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from contextlib import closing
from pathlib import Path
from typing import Any

from rich.console import Console

from bench import pictures
from bench.offload import CLASSES, Side, settle
from bench.peers.common import BATCH, BUCKET
from bench.result import Result
from bench.rig import Host, Link, Rig, RigError, RigUp
from bench.rig.node import Node
from bench.rig.python import python_env
from bench.rig.remote import Remote
from bench.rig.traffic import mbit_per_s
from headwater.train.client import NodeClient

MBIT = 50.0
WARM_EPOCHS = 4
CODECS = ("int8", "fp16")  # the first is what is claimed
CHECKED = 640  # pictures whose first choice is compared with that of exact rows
PLAIN_S = 12.0
FULL, QUICK = (2640, 3), (640, 2)  # pictures, rounds


def run(*, quick: bool, console: Console) -> Result:
    num_pictures, rounds = QUICK if quick else FULL
    rig = Rig(
        storage=(Host("storage", cores=(0,)),),
        trainers=(Host("trainer", cores=(1,)),),
        links={"trainer": Link(MBIT)},
        store=Host("store", cores=(0,)),
    )
    with tempfile.TemporaryDirectory(prefix="headwater-bench-") as scratch, RigUp(rig) as up:
        folder, what = pictures.folder(Path(scratch), num_pictures)
        store = up.start_store()
        env = {**python_env(), **store.env, "XDG_CACHE_HOME": f"{scratch}/cache", "TMPDIR": scratch}
        about = {"scratch": scratch, "num_pictures": num_pictures, "num_classes": CLASSES, "node": ""}
        with (
            up.open("trainer", "bench.cached:Trainer", env=env, num_classes=CLASSES) as trainer,
            closing(Side(up, "plain", about, env)) as plain,
        ):
            with console.status("uploading the pictures"):
                up.call("storage", "bench.peers.prepare:prepare", env=env, folder=str(folder), sides=["plain"])
            link_bytes_per_s = mbit_per_s(up, "storage", "trainer", seconds=3.0) * 1e6 / 8
            plain.open("lite0", MBIT)
            cases, nodes, agreement = [], list[Node](), 0.0
            for number in range(rounds):
                loop: dict[str, float] = {}
                for codec in CODECS if number % 2 == 0 else CODECS[::-1]:
                    options = ("--threads", "1", "--cache-size", "4GB", "--cache-dir", f"{scratch}/rows-{len(nodes)}")
                    nodes.append(up.start_node("storage", [f"s3://{BUCKET}"], port=8815 + len(nodes), options=options,
                                               env=env))  # fmt: skip
                    address = nodes[-1].address
                    cut = trainer.ask(do="open", node=address, codec=codec)["cut"]
                    for earlier in nodes[:-1]:
                        earlier.process.kill()
                        earlier.process.wait()
                    if number % 2 and not loop:  # both sides take turns in going first
                        loop = measure_plain(up, plain, number)
                    found = one_round(up, trainer, address)
                    loop = loop or measure_plain(up, plain, number)
                    cases.append(case(number, codec, found, loop, cut))
                    console.print(tell(cases[-1]), style="dim")
                    if codec == CODECS[0] and number == rounds - 1:
                        agreement = trainer.ask(do="agreement", node=address, codec=codec, num_pictures=CHECKED)
            step_s = trainer.ask(do="step")
    return result(cases, link_bytes_per_s, step_s, agreement, what, quick)


def one_round(up: RigUp, trainer: Remote, address: str) -> dict[str, Any]:
    settle(up)
    cold = trainer.ask(do="epoch")
    made = counts(up, address)
    settle(up)
    before = up.usage("trainer"), up.usage("storage")
    warm = [trainer.ask(do="epoch") for _ in range(WARM_EPOCHS)]
    used = up.usage("trainer").since(before[0]), up.usage("storage").since(before[1])
    kept = counts(up, address)
    images, seconds = (sum(each[key] for each in warm) for key in ("images", "seconds"))
    if kept["num_rows"] != made["num_rows"] or kept["num_cache_hits"] - made["num_cache_hits"] != images:
        raise RigError(f"warm epochs were not served from the cache alone: {made} before, {kept} after")
    return {
        "cold_per_s": cold["steady_per_s"],
        "warm_per_s": images / seconds,
        "warm_epochs_s": " ".join(f"{each['seconds']:.2f}" for each in warm),
        "warm_bytes_per_image": used[0].received_bytes / images,
        "trainer_busy": used[0].cpu_s / seconds,
        "storage_busy": used[1].cpu_s / seconds,
        "cache_bytes_per_image": kept["cache_bytes"] / cold["images"],
    }


def case(number: int, codec: str, found: dict[str, Any], loop: dict[str, float], cut: str) -> dict[str, Any]:
    ratios = {"warm_over_cold": found["warm_per_s"] / found["cold_per_s"],
              "warm_over_plain": found["warm_per_s"] / loop["images_per_s"]}  # fmt: skip
    return {"round": number, "codec": codec, **found, "plain_per_s": loop["images_per_s"], **ratios, "cut": cut}


def measure_plain(up: RigUp, plain: Side, epoch: int) -> dict[str, float]:
    settle(up)
    return plain.measure(MBIT, PLAIN_S, epoch)


def counts(up: RigUp, address: str) -> dict[str, float]:
    """What the node says of itself, once it has written what it keeps."""
    found: dict[str, float] = up.call("storage", "bench.cache:busy", address=address)
    return found


def busy(address: str) -> dict[str, float]:
    client = NodeClient(address)
    try:
        found: dict[str, float] = client.hello()["busy"]
        while True:
            time.sleep(0.3)
            earlier, found = found, client.hello()["busy"]
            if found["cache_bytes"] == earlier["cache_bytes"]:
                return found
    finally:
        client.close()


def tell(case: dict[str, Any]) -> str:
    return (f"round {case['round']}, {case['codec']}: cold {case['cold_per_s']:.1f}/s, "
            f"warm {case['warm_per_s']:.0f}/s, plain {case['plain_per_s']:.1f}/s")  # fmt: skip


def result(
    cases: list[dict[str, Any]], link_bytes_per_s: float, step_s: float, agreement: float, what: str, quick: bool
) -> Result:
    def median(key: str, codec: str = CODECS[0]) -> float:
        return statistics.median(case[key] for case in cases if case["codec"] == codec)

    link_per_s = link_bytes_per_s / median("warm_bytes_per_image")
    loads = {
        "the link": median("warm_per_s") / link_per_s,
        "the trainer's core": median("trainer_busy"),
        "the storage core": median("storage_busy"),
    }
    said = ", ".join(f"{name} {share:.0%} of the time" for name, share in loads.items())
    return Result(
        name="cache",
        quick=quick,
        numbers={
            "warm_over_cold": median("warm_over_cold"),
            "warm_over_plain": median("warm_over_plain"),
            "warm_over_cold_fp16": median("warm_over_cold", "fp16"),
            "same_first_choice": agreement,
        },
        goals={"warm_over_cold": "≥ 20"},
        cases=cases,
        bound=f"warm pictures/s: {link_per_s:,.0f} by the link ({link_bytes_per_s * 8 / 1e6:.1f} Mbit/s of payload, "
        f"{median('warm_bytes_per_image'):,.0f} bytes a picture), {1 / step_s:,.0f} by the head's step alone on the "
        "trainer's core",
        limited_by=f"{max(loads, key=loads.__getitem__)}; busy in warm epochs: {said}",
        notes=[
            f"{what}; EfficientNet-lite0, real weights, cut where the fewest bytes cross, batch {BATCH}; "
            f"rows as {CODECS[0]} unless a name says fp16; store and node on one core, trainer on the other behind the "
            "link",
            f"same_first_choice: of the head after these epochs, from {CODECS[0]} rows and from exact ones, {CHECKED} "
            "pictures",
            f"each round: for each codec a node with an empty cache, one cold epoch, {WARM_EPOCHS} warm ones; the "
            f"plain loop for {PLAIN_S:g} s; warm epochs are whole, from asking for the first batch to the last step",
            "the plain loop reads JPEGs over the same link and runs the whole model; it has no cache: its "
            "epochs are all alike",
        ],
        draw=lambda path: draw([case for case in cases if case["codec"] == CODECS[0]], link_per_s, path),
    )


def draw(cases: list[dict[str, Any]], link_per_s: float, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(6.5, 3.2), layout="constrained")
    names = {"plain_per_s": "plain loop", "cold_per_s": "cold epoch", "warm_per_s": "from the cache"}
    values = [statistics.median(case[key] for case in cases) for key in names]
    bars = axis.barh(list(names.values()), values, color=["#444b54", "#9aa5b1", "#1f77b4"], height=0.6)
    axis.bar_label(bars, [f"{value:,.0f}" for value in values], padding=3)
    axis.axvline(link_per_s, color="#c0504d", linestyle="--", linewidth=1.2, label="what the link carries")
    axis.set(title="EfficientNet-lite0 over 50 Mbit/s, pictures/s", xscale="log")
    axis.margins(x=0.15)
    axis.legend(frameon=False, loc="lower right", fontsize=8)
    axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130)
