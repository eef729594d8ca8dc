"""Sums in the network against Gloo's ring: how fast, how much CPU, and what training gains.

Claim: an all-reduce of 16 MB takes four workers at most 1/1.42 of Gloo's time on the same links, and eight 1/1.65; it
comes within 7 % of the bound, an array's bits ÷ the link's rate; at 64 KB and below it takes at most 0.3 of Gloo's
time; and a worker's CPU has at most 0.7 of Gloo's work with a megabyte.

Workers and the aggregator are hosts of the rig. Each worker has a shaped link. The aggregator has a port for each of
them, as a switch does, so its own link is not shaped. Both sides run in turns in the same processes.
"""

from __future__ import annotations

import statistics
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console

from bench.result import Result
from bench.rig import Host, Link, Rig, RigError, RigUp
from bench.rig.python import python, python_env
from bench.rig.remote import Remote

RATES = {2: 500.0, 4: 200.0, 8: 100.0}  # Mbit/s of each worker's link
WAYS = ("gloo", "headwater", "udp")  # headwater is by its usual lane, TCP
KB, MB = 1 << 10, 1 << 20
SIZES = (KB, 16 * KB, 64 * KB, 256 * KB, MB, 4 * MB, 16 * MB, 64 * MB)
QUICK_SIZES = (KB, 64 * KB, 16 * MB)
SMALL = 64 * KB
FAULTS = ((0.0, 0.0, 0.0), (0.01, 0.0, 0.0), (0.05, 0.0, 0.0), (0.01, 0.01, 0.01))  # loss, doubled, reordered
FAULTY_BYTES = 4 * MB
PORT, MEET_PORT = 8816, 29500
MOST = max(RATES)
Asking = Callable[..., list[Any]]


def run(*, quick: bool, console: Console) -> Result:
    sizes = QUICK_SIZES if quick else SIZES
    counts = (4, 8) if quick else (2, 4, 8)
    workers = tuple(Host(f"worker-{number}", cores=(number % 2,)) for number in range(MOST))
    rig = Rig(storage=(Host("aggregator", cores=(0, 1), cpu=2.0),), trainers=workers,
              links={worker.name: Link(RATES[4]) for worker in workers})  # fmt: skip
    cases: list[dict[str, Any]] = []
    faulty: list[dict[str, Any]] = []
    training: list[dict[str, Any]] = []
    with RigUp(rig) as up, aggregator(up) as (switch, pid):
        for count in counts:
            for worker in workers[:count]:
                up.set_rate(worker.name, RATES[count])
            with joined(up, switch, count) as ask:
                for size in sizes:
                    repeats = _repeats(size, quick)
                    before = up.usage("aggregator").cpu_s
                    found = ask(do="all_reduce", num_bytes=size, repeats=repeats)
                    used_s = up.usage("aggregator").cpu_s - before
                    cases.append(sums_case(count, size, found, used_s / (repeats + 1)))
                    console.print(_tell(cases[-1]), style="dim")
                if count == 4:
                    for fault in FAULTS:
                        faulty.append(fault_case(fault, ask, 1 if quick else 3))
                        console.print(str(faulty[-1]), style="dim")
                    for model in ("gpt",) if quick else ("resnet", "gpt"):
                        training += train_cases(model, ask(do="train", model=model, steps=4 if quick else 15))
                        console.print(str(training[-1]), style="dim")
        in_kernel = kernel_share(pid)
    return result(cases, faulty, training, in_kernel, quick)


def kernel_share(pid: int) -> float:
    """Of the CPU time of a process, how much was the kernel's on its behalf."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    own, kernel = int(fields[11]), int(fields[12])
    return kernel / max(1, own + kernel)


def _repeats(size: int, quick: bool) -> int:
    if size <= 256 * KB:
        return 15 if quick else 40
    return 3 if quick or size > 16 * MB else 5


@contextmanager
def aggregator(up: RigUp) -> Iterator[tuple[str, int]]:
    """`headwater reduce` in its host; its address and process."""
    switch = f"{up.address('aggregator')}:{PORT}"
    log = up.folder / "aggregator.log"
    with log.open("wb") as file:
        # --insecure: whoever reaches the address is a host of this rig.
        process = up.popen("aggregator", python("headwater.cli", "reduce", "--listen", switch, "--insecure"),
                           env=python_env(), stdout=file, stderr=file)  # fmt: skip
    deadline = time.monotonic() + 60
    while "adding up on" not in log.read_text(errors="replace"):
        if process.poll() is not None or time.monotonic() > deadline:
            raise RigError(f"the aggregator did not start; it wrote:\n{log.read_text(errors='replace')[-2000:]}")
        time.sleep(0.02)
    yield switch, process.pid
    process.terminate()
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        process.kill()


@contextmanager
def joined(up: RigUp, switch: str, count: int) -> Iterator[Asking]:
    """So many workers that have found each other; what asks all of them at once."""
    meet = f"{up.address('worker-0')}:{MEET_PORT + count}"
    with ExitStack() as stack:
        remotes: list[Remote] = [
            stack.enter_context(up.open(f"worker-{rank}", "bench.reducing:Worker",
                                        env={"GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1"}, rank=rank,
                                        num_workers=count, meet=meet, switch=switch))
            for rank in range(count)
        ]  # fmt: skip
        pool = stack.enter_context(ThreadPoolExecutor(count))

        def ask(**about: Any) -> list[Any]:
            return list(pool.map(lambda remote: remote.ask(**about), remotes))

        yield ask


def sums_case(
    count: int, size: int, found: Sequence[Sequence[dict[str, float]]], aggregator_cpu_s: float
) -> dict[str, Any]:
    """Of each worker's turns: a turn takes from its begin to the last worker's end."""
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    cpu_s: dict[str, list[tuple[float, float]]] = {way: [] for way in WAYS}
    for turn in zip(*found, strict=True):
        for way in seconds:
            seconds[way].append(max(each[f"{way}_end"] for each in turn) - turn[0][f"{way}_begin"])
            user, kernel = (statistics.mean(each[f"{way}_{whose}_s"] for each in turn) for whose in ("user", "kernel"))
            cpu_s[way].append((user, kernel))
    gloo, ours, packets = (statistics.median(seconds[way]) for way in WAYS)
    bound = size * 8 / (RATES[count] * 1e6)
    return {
        "part": "sums", "workers": count, "mbit_per_s": RATES[count], "kb": size / KB, "gloo_ms": gloo * 1e3,
        "headwater_ms": ours * 1e3,
        "udp_ms": packets * 1e3,
        "speedup": statistics.median(a / b for a, b in zip(seconds["gloo"], seconds["headwater"], strict=True)),
        "of_bound": bound / ours,
        **{f"{way}_cpu_s_per_mb": statistics.median(map(sum, cpu_s[way])) / (size / MB) for way in WAYS},
        **{f"{way}_kernel_s_per_mb": statistics.median(kernel for _, kernel in cpu_s[way]) / (size / MB)
           for way in WAYS},
        "aggregator_cpu_s_per_mb": aggregator_cpu_s / (size / MB),
    }  # fmt: skip


def fault_case(fault: tuple[float, float, float], ask: Asking, repeats: int) -> dict[str, Any]:
    loss, double, reorder = fault
    found = ask(do="faulty", num_bytes=FAULTY_BYTES, loss=loss, double=double, reorder=reorder, repeats=repeats)
    seconds = [max(each["ends"][turn] for each in found) - found[0]["begins"][turn] for turn in range(repeats)]
    return {
        "part": "faults", "workers": len(found), "mbit_per_s": RATES[4], "kb": FAULTY_BYTES / KB, "loss": loss,
        "doubled": double, "reordered": reorder, "headwater_ms": statistics.median(seconds) * 1e3,
        "packets_lost": sum(each["lost"] for each in found), "digest": found[0]["digest"][:12],
        "same_on_all": len({each["digest"] for each in found}) == 1,
    }  # fmt: skip


def train_cases(model: str, found: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Medians over steps of the mean over workers."""
    cases = []
    megabytes = found[0]["num_bytes"] / MB
    medians = {
        way: [statistics.median(statistics.mean(values) for values in zip(*numbers, strict=True))
              for numbers in ([[step[place] for step in each["ways"][way]] for each in found] for place in range(3))]
        for way in found[0]["ways"]
    }  # fmt: skip
    for way, (step_s, backward_s, cpu_s) in medians.items():
        cases.append({
            "part": "training", "model": model, "way": way, "workers": len(found), "mbit_per_s": RATES[4],
            "kb": megabytes * 1024, "step_ms": step_s * 1e3, "backward_ms": backward_s * 1e3,
            "step_cpu_ms": cpu_s * 1e3,
            "cpu_s_per_mb": (cpu_s - medians["alone"][2]) / megabytes,
        })  # fmt: skip
    return cases


def _tell(case: dict[str, Any]) -> str:
    cpu = ", ".join(f"{way} {case[f'{way}_cpu_s_per_mb'] * 1e3:.2f} ({case[f'{way}_kernel_s_per_mb'] * 1e3:.2f})"
                    for way in WAYS)  # fmt: skip
    return (f"{case['workers']} workers, {case['kb']:,.0f} KB: Gloo {case['gloo_ms']:.2f} ms, Headwater "
            f"{case['headwater_ms']:.2f} ms, {case['speedup']:.2f}×, {case['of_bound']:.1%} of the bound, by UDP "
            f"{case['udp_ms']:.2f} ms; ms of CPU per MB (the kernel's): {cpu}")  # fmt: skip


def result(
    cases: list[dict[str, Any]],
    faulty: list[dict[str, Any]],
    training: list[dict[str, Any]],
    in_kernel: float,
    quick: bool,
) -> Result:
    at = {(case["workers"], int(case["kb"] * KB)): case for case in cases}
    four, eight = at[4, 16 * MB], at[8, 16 * MB]
    digests = {each["digest"] for each in faulty}
    steps = {(each["model"], each["way"]): each for each in training}
    numbers = {
        "speedup_4_16mb": four["speedup"],
        "speedup_8_16mb": eight["speedup"],
        "of_bound": min(four["of_bound"], eight["of_bound"]),
        "cpu_vs_gloo": max(each["headwater_cpu_s_per_mb"] / each["gloo_cpu_s_per_mb"] for each in (four, eight)),
        "udp_cpu_vs_gloo": max(each["udp_cpu_s_per_mb"] / each["gloo_cpu_s_per_mb"] for each in (four, eight)),
        "udp_of_bound": min(
            size_bound / (each["udp_ms"] / 1e3)
            for each, size_bound in ((each, 16 * MB * 8 / (each["mbit_per_s"] * 1e6)) for each in (four, eight))
        ),
        "small_latency_vs_gloo": max(1 / case["speedup"] for case in cases if case["kb"] * KB <= SMALL),
        "same_bits_with_faults": int(len(digests) == 1 and all(each["same_on_all"] for each in faulty)),
    }
    numbers["aggregator_kernel_share"] = in_kernel
    for model in dict.fromkeys(each["model"] for each in training):
        gloo, ours = steps[model, "gloo"], steps[model, "headwater"]
        numbers[f"{model}_step_vs_gloo"] = ours["step_ms"] / gloo["step_ms"]
        numbers[f"{model}_training_cpu_vs_gloo"] = ours["cpu_s_per_mb"] / gloo["cpu_s_per_mb"]
    return Result(
        name="reduce",
        quick=quick,
        numbers=numbers,
        goals={"speedup_4_16mb": "≥ 1.42", "speedup_8_16mb": "≥ 1.65", "of_bound": "≥ 0.93", "cpu_vs_gloo": "≤ 0.7",
               "small_latency_vs_gloo": "≤ 0.3", "same_bits_with_faults": "1"},
        cases=[*cases, *faulty, *training],
        bound="S ÷ the rate of a worker's link: each byte goes up once and comes down once, at the same time. Headers "
        "of Ethernet, IP and TCP take 4.4 % of it. A ring moves 2(n-1)/n·S each way: 1.5 times as much at four "
        "workers, 1.75 times at eight",
        limited_by=f"headers, and how long the first and the last block are under way: {four['of_bound']:.1%} of the "
        f"bound at four workers, {eight['of_bound']:.1%} at eight; the aggregator used "
        f"{four['aggregator_cpu_s_per_mb'] * 1e3:.2f} ms of CPU for a megabyte of four workers' sums, "
        "one by each lane; of all its CPU "
        f"time {in_kernel:.0%} was the kernel's, which moves the packets, and the rest Python's and NumPy's",
        notes=[
            "links: 2 workers 500, 4 workers 200, 8 workers 100 Mbit/s each; the aggregator's own link is not shaped",
            "a turn begins at a moment that all workers agreed on, with idle links, and ends with the last worker's "
            "sum; ratios are within a turn, medians over turns",
            "cpu_vs_gloo: CPU time of a worker's process for 16 MB, the worse of four and eight workers; "
            "NAME_training_cpu_vs_gloo: the same in training, as what a step takes beyond one without sums",
            "headwater goes by TCP, its usual lane; udp by packets. *_kernel_s_per_mb is the kernel's part of "
            "*_cpu_s_per_mb",
            "faults are made at the workers' ends of UDP, in both directions, to the given share of packets; the "
            "kernel here has no netem",
            f"training: buckets of {2:g} MB, four workers on two cores, a thread each; alone: a step without sums",
        ],
        draw=lambda path: draw(cases, path),
    )  # fmt: skip


def draw(cases: list[dict[str, Any]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(6.8, 4), layout="constrained")
    for count, colour in ((2, "#9aa5b1"), (4, "#1f77b4"), (8, "#c0504d")):
        own = [case for case in cases if case["workers"] == count]
        if own:
            axis.plot([case["kb"] for case in own], [case["speedup"] for case in own], "o-", color=colour,
                      label=f"{count} workers, {RATES[count]:g} Mbit/s")  # fmt: skip
            axis.axhline(2 * (count - 1) / count, color=colour, linewidth=0.8, linestyle="--")
    axis.set(title="Gloo's time ÷ Headwater's (dashed: by bytes alone)", xscale="log",
             xlabel="KB of an array", ylabel="times", ylim=(0, None))  # fmt: skip
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False)
    figure.savefig(path, dpi=130)
