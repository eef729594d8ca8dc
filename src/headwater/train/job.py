"""A job: a model, data, nodes and a plan, joined into a loader and a model for the user's own loop.

Owns `near` and `Job`. Everything that can be wrong is found here, before the first step.
"""

from __future__ import annotations

import os
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from headwater.core.amount import num_bytes
from headwater.core.codecs import CODECS
from headwater.core.cut import Cut, find_cut, smallest_cut
from headwater.core.loads import JobSize
from headwater.core.plan import FILE, PRECISIONS, WIRE, Plan, near_plan
from headwater.core.precision import FULL, TOLERANCE, Deviation, allowed
from headwater.core.profile import Profile
from headwater.core.prongs import MTE, ORDERED, STRATEGIES
from headwater.core.search import Ranking, carried, search, share_words
from headwater.data.cores import usable_cores
from headwater.data.holdings import Holdings, unite
from headwater.data.layouts import list_samples, root_of
from headwater.data.memory import memory_bytes
from headwater.data.samples import Samples
from headwater.data.secrets import redact
from headwater.data.shards.manifest import check_transforms
from headwater.data.store import full_url
from headwater.data.textfile import is_text
from headwater.data.torchvision import as_transforms, from_torchvision
from headwater.data.transforms import Transforms
from headwater.data.transforms.op import Op
from headwater.data.wire import Listing
from headwater.errors import ConfigError, ImpureError, PlanError, RefusedError, TransformError
from headwater.model.capture import capture
from headwater.model.cuts import cuts as find_cuts
from headwater.model.freeze import keep_frozen
from headwater.model.near import NearModel
from headwater.progress import Progress
from headwater.train.access import Access
from headwater.train.carry import Counts, Setting, rest_fault
from headwater.train.client import NodeClient
from headwater.train.directory import Directory, directory_of
from headwater.train.embedded import EmbeddedNode
from headwater.train.following import Clients, Following, first_nodes
from headwater.train.intake import take
from headwater.train.loader import Loader
from headwater.train.measure import Measured, check_room, measure, trainers_here
from headwater.train.own import PLACE, OwnNode
from headwater.train.report import Report
from headwater.train.source import Source
from headwater.train.speeds import measure_here
from headwater.train.trace import Trace
from headwater.train.usage import Meter, Usage
from headwater.train.watch import Switch, Watch

PATIENCE_S = 60.0
AUTO_PRONGS = "auto"
EPOCHS_AHEAD = 3  # over which the planner spreads the cost of setting a prefix up
_HELD_BACK = "some transforms stay on the trainer, in front of the model; use ones that can run near the data"


class Job:
    """`loader` and `model` go into the user's loop; `close` (or `with`) lets go of everything.

    loader      the batches: an iterable of (x, labels), one epoch each time it is iterated
    model       runs what is behind the cut on rows of the loader, and the whole model on plain inputs
    ranking     the best plans with their estimates, best first (`ranking.plans`), and `ranking.explain()`; None if
                nothing was planned
    cuts        every place where the model could be cut, the illegal ones with the reason
    samples     what was listed: keys, sizes, labels, classes
    deviations  for each reduced precision that was tried, how far its rows are from fp32's
    trace       what was done when, if it was asked for: `trace.write(path)`
    """

    def __init__(
        self,
        model: NearModel,
        loader: Loader,
        source: Source,
        cuts: tuple[Cut, ...],
        samples: Samples,
        counts: Counts,
        resources: ExitStack,
        ranking: Ranking | None = None,
        measured: Measured | None = None,
        watch: Watch | None = None,
        deviations: Mapping[str, Deviation] | None = None,
        trace: Trace | None = None,
        meter: Meter | None = None,
    ) -> None:
        self.trace = trace  # what was done when, if it was asked for
        self._meter = meter
        self.model = model
        self.loader = loader
        self.cuts = cuts
        self.samples = samples
        self.counts = counts
        self.ranking = ranking
        self.measured = measured
        self.deviations = dict(deviations or {})  # of each reduced precision that was measured
        # With the loader, which the job holds: who keeps only `job.loader` can still iterate.
        self._close = weakref.finalize(loader, resources.close)
        self._source = source
        self._watch = watch
        self._report: Report | None = None

    @property
    def switches(self) -> tuple[Switch, ...]:
        """The plans that took over while the job ran, because links, nodes or this machine changed."""
        return () if self._watch is None else tuple(self._watch.switches)

    @property
    def plan(self) -> Plan:
        """The plan in use."""
        return self._source.plan

    def describe(self) -> str:
        """In one line: what moves, where the model is cut, and what a picture weighs on its way."""
        plan, stored = self.plan, float(self.samples.sizes.mean())
        what = "texts" if is_text(str(self.samples.keys[0])) else "pictures"
        if not plan.uses_storage and not plan.has_prefix:
            return f"nothing moves; {what} are read as stored ({stored:,.0f} bytes each)"
        row = self._source.row_bytes
        share = f"; {share_words(plan)} of the {what} are read and done here" if plan.host_share else ""
        share += f", from both ends of an epoch ({plan.prongs})" if plan.prongs != ORDERED else ""
        if not plan.uses_storage:
            return (f"{what} are read as stored ({stored:,.0f} bytes each); an engine beside the trainer runs the "
                    f"model up to {plan.cut_name}")  # fmt: skip
        if not plan.has_prefix:
            way = f", as the model's input in {plan.codec}: {CODECS[plan.codec].error}" if plan.sends_input else ""
            way += ", handed over as files" if plan.hand_over == FILE else ""
            done = "tokenized" if what == "texts" else "decoded"
            return f"{what} are {done} near the data ({row:,} bytes each; {stored:,.0f} as stored){way}{share}"
        text = (f"the model is cut at {plan.cut_name}; rows travel as {plan.codec} ({row:,} bytes each; {stored:,.0f} "
                f"as stored){share}")  # fmt: skip
        if plan.precision != FULL:
            error = self.deviations.get(plan.precision, "error not measured")
            text += f"; the prefix runs in {plan.precision}: {error}"
        return text

    def usage(self) -> dict[str, Usage]:
        """What the trainer and each node took since this was last asked, or since the job began: CPU-seconds, memory,
        and energy, which is modelled, where `power` was given for trainer and nodes. A node counts for all of its jobs
        together; of a machine that several trainers share, each counts its part of the idle watts."""
        return {} if self._meter is None else self._meter.lap()

    def waited_s(self) -> float:
        """How long the loop has waited for rows so far, in seconds."""
        return self._source.waited_s()

    def report(self, folder: str | os.PathLike[str]) -> None:
        """Write how the run goes, and what was planned, to this folder from now on: `headwater ui FOLDER` shows it."""
        if self._report is not None:
            self._report.close()
        self._report = Report(self, Path(folder))

    def adopt(self, plan: Plan) -> None:
        """Go over to this plan from the next batch on, in the middle of an epoch, too: the batches stay the same.

        From then on the plan is pinned: nothing is watched any more. Raises, and changes nothing, if the plan
        can't be carried out.
        """
        if plan.precision not in (FULL, *self.deviations) and plan.has_prefix:
            self.deviations[plan.precision] = self._source.deviation(plan, self.model)
        self._source.adopt(plan)
        self._source.rebalances = False
        if self._watch is not None:
            self._watch.close()
            if self._source.plan != plan:  # it had another one under way in the same moment
                self._source.adopt(plan)

    def close(self) -> None:
        """Hang up, and end the embedded node if there is one. The model stays as it is."""
        if self._report is not None:
            self._report.close()
        self._close()

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def near(
    model: nn.Module,
    data: str | os.PathLike[str] | DataLoader[Any],
    *,
    transforms: Any = None,
    nodes: Sequence[str] | str | None = None,
    batch_size: int = 32,
    seed: int = 0,
    shuffle: bool = True,
    drop_last: bool = False,
    cut: str | int | None = None,
    plan: Plan | str | os.PathLike[str] | None = "auto",
    codec: str = "raw",
    precision: str = FULL,
    tolerance: float = TOLERANCE,
    profile: Profile | str | os.PathLike[str] | None = None,
    measure_again: bool = False,
    on_bad_sample: str = "raise",
    layout: str = "auto",
    path_column: str | int | None = None,
    label_column: str | int | None = None,
    text_column: str | int | None = None,
    url: str | None = None,
    rank: int | None = None,
    world: int | None = None,
    node_threads: int | None = None,
    node_cache: str | None = None,
    views: int = 0,
    share: bool = True,
    prongs: str = AUTO_PRONGS,
    trace: bool = False,
    patience_s: float = PATIENCE_S,
    power: Mapping[str, tuple[float, float]] | None = None,
    token: str | None = None,
    tls_ca: str | os.PathLike[str] | None = None,
    tls_cert: str | os.PathLike[str] | None = None,
    tls_key: str | os.PathLike[str] | None = None,
) -> Job:
    """Train `model` on the pictures at `data`, with its frozen part beside them.

    Returns a Job. What can be found to be wrong is found before the first step: ConfigError for arguments that make no
    sense, DataError for data that can't be used, ModelError for a model that can't be captured or cut there, PlanError
    for a plan that can't be carried out, NodeError where a node does not answer or says no.

    model          any module that torch.export can capture; freeze its first part (`hw.freeze` or requires_grad)
    data           file://, s3://, gs:// or az:// URL (or a path) of class folders, a CSV/Parquet manifest, tars,
                   or a set that `headwater pack` made. Or a DataLoader over an ImageFolder of torchvision or an
                   ImageDataset of timm: then root, transforms, labels, batch size, shuffle, drop_last and the
                   generator's seed are its own (docs/trainers.md)
    text_column    which column of Parquet, CSV or JSON lines has the text, where the transforms are
                   [Tokenize.of(tokenizer, length)] (docs/text.md)
    url            where nodes read the folder of such a DataLoader, if not under the path that it has here
    transforms     a torchvision or timm Compose, `weights.transforms()`, or a list of Headwater transforms
    batch_size     samples in a batch of one trainer
    seed           of the order and of random transforms
    shuffle        whether each epoch has an order of its own, by seed and epoch; if not, all have that of the listing
    drop_last      leave out what does not fill a batch of every trainer at the end of an epoch
    layout         how the data lies there: "folders", "table", "tars", "shards" or "text" (docs/job-file.md); "auto"
                   finds out
    path_column, label_column   which columns a list has them in, by name or number from 0; by default found by name
    nodes          addresses such as ["grpc://store-1:8815"]; None starts a node beside this process;
                   "inline" does everything slowly in this process, as a yardstick. Several nodes share a store, or
                   have folders of the same name (file://) on disks of their own, with or without replicas.
                   "ray://photos" are those of a fleet on Ray (`headwater up --ray`): nodes that come while the job runs
                   are used from then on, and those that went no longer (docs/fleets.md)
    plan           "auto" measures nodes, links and this machine (once; the result is kept) and takes the fastest plan;
                   `job.ranking` tells why. A Plan or a file with one pins it. None measures nothing and cuts where the
                   fewest bytes cross, and so does nodes="inline". A pinned plan needs the memory that it was measured
                   to need, where that was measured once
    cut            pins where the model is split, by name or index
    codec          how rows may travel: "raw" (exact), or also as "fp16", "bf16", "int8"; the planner decides whether it
                   pays, and a pinned cut uses it
    precision      what the prefix may compute in on the nodes: "fp32" (exact), or also "int8", "fp16", "bf16"; the
                   planner decides whether it pays, and a pinned cut uses it. Its error is measured first
                   (`job.deviations`), and it is only used if the model's first choice stays the same for at least
                   `tolerance` of the samples that were tried
    profile        a file with measured costs (`headwater profile`), or a Profile, to plan from; by default one is
                   measured and kept, and used again for the same model, data and machines. `measure_again` makes a
                   new one
    on_bad_sample  "raise", or "skip" and list it in `job.loader.skipped`
    views          how many random versions of each picture there are: epoch e draws as epoch e mod views did, so rows
                   that a node kept can be used again. 0: every epoch draws anew, and rows of random transforms are
                   not kept. Without random transforms rows are always kept
    node_threads   how many threads the node that nodes=None starts may use; by default one a core
    node_cache     how much the node that nodes=None starts may keep on disk, such as "10GB"; "0" keeps nothing
    share          whether the planner may have this machine do a share of the nodes' work, in a process beside this one
                   that reads the store
    prongs         how this machine and the nodes go through an epoch where both make rows: "auto" leaves it to the
                   planner whether they do, in the order of a plain run. "ordered" has both of them work, in that order;
                   "mte" has this machine begin at the front and nodes at the end, with one switch, which repeats
                   exactly from the plan; "wrr" takes whatever is ready, in an order that depends on timing
    trace          note what is done when, on this machine and on nodes: `job.trace.write("run.json")` writes a timeline
                   that ui.perfetto.dev opens
    rank, world    which of how many trainers this is; taken from torch.distributed if it is initialised
    patience_s     how long to wait for a node to come back once none answers, or for a store that fails
    power          what devices draw in watts, idle and busy, for modelled energy beside each plan's time, and of a run
                   (`job.usage`): {"node": (2, 6), "trainer": (60, 180)}, and "accelerator" (for plans only)
    token          what whoever runs the nodes gave you; the environment's HEADWATER_TOKEN by default. It is sent over
                   TLS only (grpc+tls://), or within this machine
    tls_ca         for grpc+tls://: a file with the authority that signed the nodes' certificates, where that is not one
                   that every machine knows; HEADWATER_TLS_CA by default
    tls_cert, tls_key   for nodes that want a certificate from you: files with it and its key; HEADWATER_TLS_CERT and
                   HEADWATER_TLS_KEY by default
    """
    taken = None
    if not isinstance(data, str | os.PathLike):
        _check_beside(transforms=transforms, batch_size=batch_size, shuffle=shuffle, drop_last=drop_last, layout=layout)
        taken = take(data)
        if taken.seed is not None and seed:
            raise ConfigError(f"seed is {seed} and the DataLoader has a generator of its own; leave one of them out")
        data, transforms = url or taken.root, taken.transforms
        batch_size, shuffle, drop_last = taken.batch_size, taken.shuffle, taken.drop_last
        seed = seed if taken.seed is None else taken.seed
    elif url is not None:
        raise ConfigError("url is for a DataLoader, whose folder nodes may see under another name; give it as data")
    elif transforms is None:
        raise ConfigError("transforms are missing: give a Compose, weights.transforms(), or a list of hw.transforms")
    pinned = plan is not None and plan != "auto"
    if pinned and (cut is not None or codec != "raw" or precision != FULL):
        raise ConfigError("a plan fixes cut, codec and precision; give either a plan, or these")
    if precision not in PRECISIONS:
        raise ConfigError(f"precision {precision!r} is not one of {', '.join(PRECISIONS)}")
    if not 0 < tolerance <= 1:
        raise ConfigError(f"tolerance is {tolerance}; it is a part of the samples, above 0 and at most 1")
    if nodes == "inline" and precision != FULL:
        raise ConfigError('nodes="inline" computes with PyTorch in fp32; leave out precision, or use nodes')
    if (profile is not None or measure_again) and (pinned or plan is None or cut is not None or nodes == "inline"):
        raise ConfigError("profile and measure_again are for planning, and nothing is planned here: leave out plan and "
                          "cut, and use nodes")  # fmt: skip
    if prongs not in (AUTO_PRONGS, *STRATEGIES):
        raise ConfigError(f"prongs is {prongs!r}; it must be one of {', '.join((AUTO_PRONGS, *STRATEGIES))}")
    if prongs != AUTO_PRONGS and (pinned or plan is None or cut is not None or nodes in (None, "inline") or not share):
        raise ConfigError(f"prongs={prongs!r} is planned for, with nodes elsewhere and a share of this machine's: name "
                          "nodes, and leave out plan, cut and share; a plan has prongs of its own")  # fmt: skip
    if codec not in CODECS:
        raise ConfigError(f"codec {codec!r} is not one of {', '.join(CODECS)}")
    if node_threads is not None and nodes is not None:
        raise ConfigError("node_threads is for the node that nodes=None starts; a node of your own takes --threads")
    if node_cache is not None and nodes is not None:
        raise ConfigError("node_cache is for the node that nodes=None starts; a node of your own takes --cache-size")
    given = {"token": token, "tls_ca": tls_ca, "tls_cert": tls_cert, "tls_key": tls_key}
    if (nodes is None or nodes == "inline") and any(given.values()):
        raise ConfigError(f"{', '.join(name for name in given if given[name])} is for nodes of your own, and no "
                          "address is given; name them in nodes=[…]")  # fmt: skip
    if type(views) is not int or not 0 <= views < 2**31:
        raise ConfigError(f"views is {views!r}; it must be a whole number, 0 or more")
    if unknown := sorted(set(power or {}) - {"node", "trainer", "accelerator"}):
        raise ConfigError(f"power is given for {', '.join(map(str, unknown))}; it is for node, trainer and accelerator")
    cache_bytes = None if node_cache is None else num_bytes(node_cache, "node_cache")
    rank, world = _place(rank, world)
    if prongs == MTE and world > 1 and not _is_group(world):
        raise ConfigError(f'prongs="mte" with {world} trainers needs torch.distributed, with as many: all must agree '
                          'where the two ends meet; initialise it first, pin a plan, or use "ordered"')  # fmt: skip
    pipeline, rest = read_transforms(transforms)
    if views and not pipeline.is_random:
        warnings.warn(f"views={views} has nothing to do: the transforms near the data are not random", stacklevel=2)
    where = full_url(os.fspath(data))
    if pipeline.text is not None:
        if layout not in ("auto", "text"):
            raise ConfigError(f"layout is {layout!r}, and Tokenize is for texts: leave it out")
        if precision == "int8":
            raise ConfigError("precision is int8, which is calibrated on pictures only; leave it out for texts")
        layout = "text"
    elif layout == "text" or text_column is not None:
        raise ConfigError("layout='text' and text_column are for texts, and the transforms are for pictures: give "
                          "transforms=[Tokenize.of(tokenizer, length)]")  # fmt: skip
    progress = Progress()
    with ExitStack() as stack:
        clients: list[NodeClient] = []
        directory: Directory | None = None
        if nodes is None:
            node = EmbeddedNode(root_of(where), node_threads, cache_bytes, is_far=not where.startswith("file://"))
            stack.callback(node.close)
            clients = [NodeClient(node.address, node.access, PLACE)]
            stack.callback(clients[0].close)
        elif nodes != "inline":
            directory = directory_of(nodes)
            stack.callback(directory.close)
            connections = Clients(Access.of(**given))
            stack.callback(connections.close)
            with progress.step("finding the nodes"):
                clients = first_nodes(directory, connections, patience_s)
        may_grow = directory is not None and directory.may_change
        memories = [int(client.hello().get("memory_bytes", 0)) for client in clients]

        with progress.step(f"listing {redact(where)}") as tick:
            listing = Listing(where, layout, path_column, label_column, text_column)
            samples, holdings = list_on(clients, listing, tick, patience_s)
            listed = samples
            if taken is not None:
                samples = taken.label(samples)
                holdings = None if holdings is None else replace(holdings, samples=samples)
        if may_grow and holdings is not None:  # copies, too: who comes later would have others than were listed
            raise ConfigError(f"the nodes of {nodes} have files of their own in {redact(where)}, and a fleet's nodes "
                              "come and go: give them a store or a folder that all of them see, or name nodes one by "
                              "one")  # fmt: skip
        check_transforms(samples, pipeline)
        with progress.step("capturing the model"):
            keep_frozen(model)
            captured = capture(model, example_of(model, pipeline))
            all_cuts = find_cuts(captured)
        if cut is None and not pinned and not rest:
            _check_norms(model)
        setting = Setting(captured, all_cuts, pipeline, rest, samples, clients, seed, patience_s,
                          min(memories, default=None), progress, holdings=holdings, views=views,
                          trace=Trace() if trace else None, trainers=trainers_here(world),
                          rebalances=plan == "auto" and cut is None and (world == 1 or _is_group(world)))  # fmt: skip
        if nodes is not None and holdings is None and share:
            beside = trainers_here(world)
            setting.start_own = partial(OwnNode, root_of(where), max(1, round(usable_cores() / beside)),
                                        memory_bytes() // beside if beside > 1 else None)  # fmt: skip
        ranking, measured, codecs = None, None, tuple(dict.fromkeys(("raw", codec)))
        precisions: tuple[str, ...] = (FULL,)
        deviations = dict[str, Deviation]()
        if plan == "auto" and cut is None and clients:
            open_cuts = all_cuts
            if rest:  # what stays on the trainer comes before the model, so no part of the model can go ahead of it
                held = tuple(replace(each, legal=False, why_not=_HELD_BACK) for each in all_cuts[1:])
                open_cuts = all_cuts[:1] + held
            measured = measure(captured, open_cuts, pipeline, samples, clients, batch_size=batch_size, seed=seed,
                               world=world, embedded=nodes is None, given=_read_profile(profile), again=measure_again,
                               progress=progress, holdings=holdings, precision=precision, power=power,
                               share=share, start_own=partial(_start_and_close, setting.start_own, stack)
                               if setting.start_own else None)  # fmt: skip
            deviations |= measured.profile.deviations
            precisions, refused = allowed([precision] if deviations else [], deviations, tolerance)
            for reason in refused:
                warnings.warn(reason, stacklevel=2)
            setting.shipped = measured.shipped
            size = JobSize(-(-len(samples) // world), batch_size, EPOCHS_AHEAD, setup_s=measured.setup_s,
                           starts_own=measured.own is None)  # fmt: skip
            strategy = ORDERED if prongs == AUTO_PRONGS else prongs
            ranking = search(measured.offered, measured.profile, measured.rig, size, codecs=codecs,
                             precisions=precisions, shared=prongs != AUTO_PRONGS, prongs=strategy,
                             may_grow=may_grow)  # fmt: skip
            by_file = all(client.finds_folder() for client in clients)
            ranking = ranking.map(partial(carried, prongs=strategy, hand_over=FILE if by_file else WIRE))
            plan = ranking.best.plan
        fixed = None if plan == "auto" else plan
        chosen = _plan(fixed, all_cuts, cut, codec, bool(rest), pipeline.pixel_spec.row_bytes)
        if measured is not None and measured.own is not None:
            if chosen.uses_own and chosen.has_prefix:
                setting.own = measured.own
            else:
                measured.own.close()
        if measured is None and clients:
            check_room(chosen, captured, all_cuts, pipeline, samples, clients, batch_size=batch_size,
                       precision=precision, world=world)  # fmt: skip
        source = Source(setting, chosen)
        # Before the nodes go: an iterator that somebody still holds must not wait for them.
        stack.callback(source.close)
        watch, joined = None, NearModel(captured)
        if measured is None and chosen.has_prefix and (chosen.precision, precision) != (FULL, FULL):
            deviations |= _settle(source, joined, chosen, precision, tolerance)
        if measured is not None:
            source.warm()
            watch = Watch(source, clients, measured.offered, measured.profile, measured.rig, size, codecs,
                          partial(measure_here, samples, pipeline, measured.profile, seed, holdings),
                          joined.check_cut, precisions,
                          measured.shipped.num_bytes if measured.shipped else 0,
                          chosen.prongs, chosen.hand_over, may_grow)  # fmt: skip
            stack.callback(watch.close)
        loader = Loader(
            samples,
            source,
            batch_size=batch_size,
            seed=seed,
            shuffle=shuffle,
            drop_last=drop_last,
            rank=rank,
            world=world,
            on_bad_sample=on_bad_sample,
        )
        meter = Meter(lambda: source.clients, source.own_nodes, power, setting.trainers)
        if directory is not None and may_grow:
            following = Following(source, directory, connections, partial(_check_data, listing, listed, patience_s))
            stack.callback(following.close)
        return Job(joined, loader, source, all_cuts, samples, setting.counts, stack.pop_all(), ranking,
                   measured, watch, deviations, setting.trace, meter)  # fmt: skip


def _check_beside(**given: Any) -> None:
    """A DataLoader says these things itself."""
    plain = {"transforms": None, "batch_size": 32, "shuffle": True, "drop_last": False, "layout": "auto"}
    if both := [name for name, value in given.items() if value is not plain[name] and value != plain[name]]:
        raise ConfigError(f"{', '.join(both)} is given beside a DataLoader, which has its own; set it there")


def _start_and_close(start: Callable[[], OwnNode], stack: ExitStack) -> OwnNode:
    """Start it, and end it with whatever the stack ends."""
    own = start()
    stack.callback(own.close)
    return own


def _settle(source: Source, model: NearModel, plan: Plan, precision: str, tolerance: float) -> dict[str, Deviation]:
    """Without a planner: measure the error of the precision, and go over to it if that is within the tolerance.

    A plan that was given keeps its precision, whatever the error.
    """
    if plan.precision != FULL:
        deviations = {plan.precision: source.deviation(plan, model)}
        if allowed([plan.precision], deviations, tolerance)[1]:
            warnings.warn(f"the plan pins {plan.precision}, which is further from fp32 than the tolerance of "
                          f"{100 * tolerance:.3g} %: {deviations[plan.precision]}", stacklevel=3)  # fmt: skip
        return deviations
    reduced = replace(plan, precision=precision)
    try:
        found = {precision: source.deviation(reduced, model)}
    except (RefusedError, PlanError) as error:
        warnings.warn(f"fp32 is used: {error}", stacklevel=3)
        return {}
    _, refused = allowed([precision], found, tolerance)
    for reason in refused:
        warnings.warn(reason, stacklevel=3)
    if not refused:
        source.adopt(reduced)
    return found


def list_on(
    clients: Sequence[NodeClient], listing: Listing, tick: Callable[[int], None], patience_s: float
) -> tuple[Samples, Holdings | None]:
    """The samples; and which node holds which, where they lie in folders that are not the same everywhere."""
    if not clients:
        return list_samples(listing.url, listing.layout, path_column=listing.path_column,
                            label_column=listing.label_column, text_column=listing.text_column,
                            on_page=tick), None  # fmt: skip
    if len(clients) == 1 or not listing.url.startswith("file://"):
        return clients[0].list_samples(listing, tick, patience_s), None  # a store is the same for all
    with ThreadPoolExecutor(len(clients)) as pool:
        listed = list(pool.map(lambda client: client.list_samples(listing, tick, patience_s), clients))
    if all(each.fingerprint == listed[0].fingerprint and each.etags.equals(listed[0].etags) for each in listed):
        return listed[0], None  # one folder that all of them see
    holdings = unite({client.name: each for client, each in zip(clients, listed, strict=True)})
    return holdings.samples, holdings


def _check_data(listing: Listing, listed: Samples, patience_s: float, client: NodeClient) -> None:
    """A node that comes later must have the samples of the others. A store is the same for all."""
    if listing.url.startswith("file://"):
        found = client.list_samples(listing, patience_s=patience_s)
        if found.fingerprint != listed.fingerprint or not found.etags.equals(listed.etags):
            raise ConfigError(f"{client.name} has other files in {redact(listing.url)} than the nodes that the job "
                              "began with")  # fmt: skip


def _place(rank: int | None, world: int | None) -> tuple[int, int]:
    if (rank is None) != (world is None):
        raise ConfigError("give rank and world together, or neither")
    if rank is not None and world is not None:
        return rank, world
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    return 0, 1


def _is_group(world: int) -> bool:
    """Are there so many processes to talk to?"""
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    return distributed and torch.distributed.get_world_size() == world


def read_transforms(transforms: Any) -> tuple[Transforms, list[Any]]:
    """The transforms that run near the data, and those that stay here."""
    steps = transforms if isinstance(transforms, list | tuple) else [transforms]
    ours = isinstance(transforms, Transforms) or all(isinstance(step, Op | dict) for step in steps)
    pipeline, rest = (as_transforms(transforms), []) if ours else from_torchvision(transforms)
    if not rest and not pipeline.is_whole:
        raise TransformError("the transforms end in pixels; add ToFloat(), and Normalize(…) if the model needs it")
    pipeline.pixel_spec  # noqa: B018  pictures of different sizes are found now, not in the middle of an epoch
    return pipeline, rest


def example_of(model: nn.Module, pipeline: Transforms) -> tuple[torch.Tensor, ...]:
    if pipeline.text is not None:
        return _tokens(model, pipeline)
    height, width, channels = pipeline.pixel_spec.shape
    device = next((tensor.device for tensor in model.parameters()), torch.device("cpu"))
    return (torch.zeros(2, channels, height, width, device=device),)


def _tokens(model: nn.Module, pipeline: Transforms) -> tuple[torch.Tensor, ...]:
    """Two texts that differ, the second one shorter than the inputs."""
    assert pipeline.text is not None
    values = torch.ones(2, *pipeline.text.spec.shape, dtype=torch.int64)
    inputs = pipeline.inputs_of(values)
    inputs[0].copy_((torch.arange(inputs[0].numel()) % pipeline.text.num_ids).reshape(inputs[0].shape))
    for mask in inputs[1:]:
        mask[1, mask.shape[1] // 2 + 1 :] = 0
    device = next((tensor.device for tensor in model.parameters()), torch.device("cpu"))
    return tuple(each.contiguous().to(device) for each in inputs)


def _plan(
    plan: Plan | str | os.PathLike[str] | None,
    cuts: tuple[Cut, ...],
    cut: str | int | None,
    codec: str,
    has_rest: bool,
    pixel_bytes: int,
) -> Plan:
    """The plan that was given, or the one that moves the fewest bytes."""
    if plan is not None:
        given = plan if isinstance(plan, Plan) else _read_plan(plan)
        if has_rest and given.has_prefix:
            raise rest_fault(given.cut_name)
        return given
    if has_rest and cut not in (None, 0, "input"):
        raise rest_fault(cut)
    found = cuts[0] if has_rest else smallest_cut(cuts, codec, pixel_bytes) if cut is None else find_cut(cuts, cut)
    if found.index == 0 and codec != "raw":
        # They have fewer bytes than the floats that are made of them: only a plan says that those shall travel.
        warnings.warn(f"codec {codec!r} has nothing to do: rows are pixels, which travel as they are", stacklevel=3)
    return near_plan(found, codec=codec if found.index else "raw")


def _check_norms(model: nn.Module) -> None:
    """A frozen batch-norm that still learns from its batch would end every cut in front of it, unnoticed."""
    for name, module in model.named_modules():
        params = list(module.parameters(recurse=False))
        is_norm = isinstance(module, nn.modules.batchnorm._BatchNorm)
        if is_norm and module.training and params and not any(each.requires_grad for each in params):
            raise ImpureError(
                f"{name} is frozen but in training mode, so its result depends on the batch and it can't run near the "
                f"data: call hw.freeze(model, until=...), or model.get_submodule({name!r}).eval()"
            )


def _read_profile(profile: Profile | str | os.PathLike[str] | None) -> Profile | None:
    if profile is None or isinstance(profile, Profile):
        return profile
    try:
        return Profile.loads(Path(profile).read_bytes())
    except OSError as error:
        raise ConfigError(f"the profile {os.fspath(profile)!r} can't be read: {error}") from error


def _read_plan(path: str | os.PathLike[str]) -> Plan:
    try:
        return Plan.loads(Path(path).read_bytes())
    except OSError as error:
        raise ConfigError(f"the plan {os.fspath(path)!r} can't be read: {error}") from error
