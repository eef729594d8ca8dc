"""What work costs: measured seconds and bytes of every stage, on each side, for each cut.

Owns `Profile`, its JSON format, and the check that it fits the job at hand. Whoever measures fills it in; nothing here
runs a clock. Seconds are CPU-seconds on one core for one sample unless a name says otherwise: `_s_per_byte`,
`_s_per_row`, `group_s` (a group of `node_batch` rows), `chunk_s` (a chunk), `wait_s` (nobody's CPU is busy).
A tuple with one value a cut is indexed by `Cut.index`; None stands for "not measured".
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from headwater.core import form
from headwater.core.cut import Cut
from headwater.core.form import Flag, Many, Number, Part, Table, Text, formed
from headwater.core.precision import Deviation
from headwater.core.spec import TensorSpec
from headwater.core.tuning import AUTO, ENGINES
from headwater.errors import ConfigError

FORMAT = "headwater-profile"
VERSION = 2
MAX_AGE_S = 30 * 86400.0  # machines and data drift; a month is short enough to notice and long enough to be of use
NOISE = 0.1  # a later cut may look this much cheaper than an earlier one before the measurement is not believed

# Limits that only a mistaken unit or a failed measurement leaves.
_SECONDS = Number(0.0, 1e5)
_PER_BYTE = Number(0.0, 1.0)
_RATIO = Number(1e-3, 1e3, optional=True)
_BYTES = Number(0.0, 1e13)
_WHOLE_BYTES = Number(0, 1e13, whole=True)
_COUNT = Number(1, 65536, whole=True)
_PLACE = Number(0, 1e6, whole=True)
_PER_CUT = Many(Number(0.0, 1e5, optional=True))
_BYTES_PER_CUT = Many(Number(0, 1e13, whole=True, optional=True))
_BY_CODEC = Table(_PER_BYTE)


class _Places:
    """The form of a list of cuts: which tensors cross at each."""

    def read(self, value: object, where: str, faults: list[str]) -> tuple[Cut, ...] | None:
        if isinstance(value, tuple) and all(isinstance(each, Cut) for each in value):
            return value
        if not isinstance(value, list):
            faults.append(f"{where} is {form.shown(value)}; it must be a list")
            return None
        found = [self._cut(each, f"{where}[{number}]", faults) for number, each in enumerate(value)]
        return tuple(each for each in found if each is not None)

    def _cut(self, value: object, where: str, faults: list[str]) -> Cut | None:
        if not isinstance(value, Mapping) or not isinstance(value.get("boundary"), list):
            faults.append(f"{where} is no cut: index, name, boundary, legal, prefix_bytes")
            return None
        try:
            boundary = tuple(TensorSpec.from_json(each) for each in value["boundary"])
        except ConfigError as error:
            faults.append(f"{where}.boundary: {error}")
            return None
        before = len(faults)
        index = _PLACE.read(value.get("index"), f"{where}.index", faults)
        name = Text().read(value.get("name"), f"{where}.name", faults)
        legal = Flag().read(value.get("legal"), f"{where}.legal", faults)
        num_bytes = _WHOLE_BYTES.read(value.get("prefix_bytes"), f"{where}.prefix_bytes", faults)
        if len(faults) > before:
            return None
        why_not = value.get("why_not")
        return Cut(int(index or 0), str(name), boundary, bool(legal), why_not if isinstance(why_not, str) else "", 0,
                   int(num_bytes or 0))  # fmt: skip


@dataclass(frozen=True)
class Key:
    """What a profile was measured on. Another model, data or machine has other costs."""

    model: str = field(metadata=formed(Text()))  # digest of the graph, its cuts, and its weights: shape, type, trained?
    transforms: str = field(metadata=formed(Text()))  # digest of their JSON
    data: str = field(metadata=formed(Text()))  # the data set's fingerprint, and the store it is in
    node: str = field(metadata=formed(Text()))  # id of the nodes' kind of machine
    trainer: str = field(metadata=formed(Text()))  # id of the trainer's machine
    headwater: str = field(metadata=formed(Text()))  # the version

    def __post_init__(self) -> None:
        form.check_record(self, "key")


@dataclass(frozen=True)
class NodeCosts:
    """Work on a node's cores.

    read_s               CPU of reading one sample, the store's own included if it shares the node's cores
    lone_read_s          the part of it that reading takes by itself, to compare with; None: not known
    overhead_s           CPU of the node's process for one sample when all stages run at once, beyond their sum
    read_wait_s          how long a lone read takes beyond its CPU; `num_readers` wait at once
    serve_s              CPU on the nodes' cores for one sample that the trainer reads by itself; 0 where the store has
                         machines of its own
    decode_s             decode and augment, to uint8 pixels
    finish_s             pixels to the model's floats, needed only in front of a prefix
    prefix_s             for each precision and cut: input up to the cut, at a large node batch; cumulative
    encode_s_per_byte    for each codec, per byte of the uncompressed boundary
    send_s_per_byte      per byte on the wire
    group_s, chunk_s     what each group and each chunk costs whatever its rows
    base_bytes           resident memory of a node that does nothing yet
    fixed_bytes          for each cut: weights and engine
    row_bytes            for each cut: what each row of a group takes while it is inferred
    engine               what ran the prefix, at full precision; preferred where several machines make rows
    num_readers, num_slots, max_chunks   as the node is built: reads at once, groups of one chunk and chunks under way
    """

    read_s: float = field(metadata=formed(_SECONDS))
    decode_s: float = field(metadata=formed(_SECONDS))
    prefix_s: Mapping[str, tuple[float | None, ...]] = field(metadata=formed(Table(_PER_CUT)))
    finish_s: float = field(default=0.0, metadata=formed(_SECONDS))
    overhead_s: float = field(default=0.0, metadata=formed(_SECONDS))
    read_wait_s: float = field(default=0.0, metadata=formed(_SECONDS))
    lone_read_s: float | None = field(default=None, metadata=formed(Number(0.0, 1e5, optional=True)))
    serve_s: float = field(default=0.0, metadata=formed(_SECONDS))
    encode_s_per_byte: Mapping[str, float] = field(default_factory=dict, metadata=formed(_BY_CODEC))
    send_s_per_byte: float = field(default=0.0, metadata=formed(_PER_BYTE))
    group_s: float = field(default=0.0, metadata=formed(_SECONDS))
    chunk_s: float = field(default=0.0, metadata=formed(_SECONDS))
    base_bytes: int = field(default=0, metadata=formed(_WHOLE_BYTES))
    fixed_bytes: tuple[int | None, ...] = field(default=(), metadata=formed(_BYTES_PER_CUT))
    row_bytes: tuple[int | None, ...] = field(default=(), metadata=formed(_BYTES_PER_CUT))
    num_readers: int = field(default=48, metadata=formed(_COUNT))
    num_slots: int = field(default=3, metadata=formed(_COUNT))
    max_chunks: int = field(default=16, metadata=formed(_COUNT))
    engine: str = field(default=AUTO, metadata=formed(Text((AUTO, *ENGINES))))

    def __post_init__(self) -> None:
        form.check_record(self, "node")


@dataclass(frozen=True)
class TrainerCosts:
    """Work on the trainer.

    fetch_s, fetch_s_per_byte   CPU of reading one stored sample over the link by itself
    fetch_wait_s                how long a lone read takes beyond its CPU and the link: the store's own time
    decode_s                    decode and augment, to uint8 pixels, if it does that itself
    finish_s                    pixels to the model's floats, in the training loop's own thread
    receive_s_per_byte, receive_s_per_row, receive_s_per_chunk   CPU of taking rows from the wire into place
    decode_s_per_byte           for each codec, per byte of the uncompressed boundary
    suffix_s                    for each cut: forward and backward of what is behind it, at the training batch; at cut 0
                                the whole model, its frozen part in inference mode. On the host: CPU-seconds of one
                                core; on an accelerator: its own seconds
    suffix_on                   "host" or "accelerator"
    engine_ratio                an engine's seconds on a core here ÷ on the node's; None: not measured, and then
                                taken to be as for decoding
    step_s                      what each step costs whatever its rows: optimizer, the loop itself; one thread
    base_bytes                  resident memory of a trainer with the model loaded
    suffix_row_bytes            for each cut: what each row of a batch takes in a step, where the suffix runs
    num_readers                 reads at once, if it reads by itself
    num_threads                 that the suffix spreads over, where there are as many cores
    """

    decode_s: float = field(metadata=formed(_SECONDS))
    suffix_s: tuple[float | None, ...] = field(metadata=formed(_PER_CUT))
    finish_s: float = field(default=0.0, metadata=formed(_SECONDS))
    fetch_s: float = field(default=0.0, metadata=formed(_SECONDS))
    fetch_s_per_byte: float = field(default=0.0, metadata=formed(_PER_BYTE))
    fetch_wait_s: float = field(default=0.0, metadata=formed(_SECONDS))
    receive_s_per_byte: float = field(default=0.0, metadata=formed(_PER_BYTE))
    receive_s_per_row: float = field(default=0.0, metadata=formed(_SECONDS))
    receive_s_per_chunk: float = field(default=0.0, metadata=formed(_SECONDS))
    decode_s_per_byte: Mapping[str, float] = field(default_factory=dict, metadata=formed(_BY_CODEC))
    suffix_on: str = field(default="host", metadata=formed(Text(("host", "accelerator"))))
    step_s: float = field(default=0.0, metadata=formed(_SECONDS))
    base_bytes: int = field(default=0, metadata=formed(_WHOLE_BYTES))
    suffix_row_bytes: tuple[int | None, ...] = field(default=(), metadata=formed(_BYTES_PER_CUT))
    num_readers: int = field(default=16, metadata=formed(_COUNT))
    num_threads: int = field(default=65536, metadata=formed(_COUNT))
    engine_ratio: float | None = field(default=None, metadata=formed(_RATIO))

    def __post_init__(self) -> None:
        form.check_record(self, "trainer")


@dataclass(frozen=True)
class Sizes:
    """Bytes on the links and in buffers; a boundary's own are known from its cut.

    sample_bytes                 mean stored size of a sample
    pixel_row_bytes              one decoded sample as uint8
    input_row_bytes              one sample as the model takes it
    fetch_down_bytes, fetch_up_bytes   around one sample that the trainer reads itself: headers of reply and request
    request_row_bytes, request_chunk_bytes   of the request for a chunk: for each sample, and once
    row_extra_bytes              on the wire beside the boundary's own: the sample id
    group_bytes, chunk_bytes     framing of a group (record batch) and of a chunk (schema, stream)
    """

    sample_bytes: float = field(metadata=formed(_BYTES))
    pixel_row_bytes: int = field(metadata=formed(_WHOLE_BYTES))
    input_row_bytes: int = field(metadata=formed(_WHOLE_BYTES))
    fetch_down_bytes: float = field(default=0.0, metadata=formed(_BYTES))
    fetch_up_bytes: float = field(default=0.0, metadata=formed(_BYTES))
    request_row_bytes: float = field(default=0.0, metadata=formed(_BYTES))
    request_chunk_bytes: float = field(default=0.0, metadata=formed(_BYTES))
    row_extra_bytes: float = field(default=8.0, metadata=formed(_BYTES))  # an int64
    group_bytes: float = field(default=0.0, metadata=formed(_BYTES))
    chunk_bytes: float = field(default=0.0, metadata=formed(_BYTES))

    def __post_init__(self) -> None:
        form.check_record(self, "sizes")


@dataclass(frozen=True)
class Profile:
    """Everything measured for one model, data set and pair of machines. `measured_at` is in Unix seconds.

    `cuts` are the places to choose from, in a profile that is to be used without the model (`headwater simulate`).
    """

    key: Key = field(metadata=formed(Part(Key)))
    measured_at: float = field(metadata=formed(Number(0.0, 1e12)))
    node: NodeCosts = field(metadata=formed(Part(NodeCosts)))
    trainer: TrainerCosts = field(metadata=formed(Part(TrainerCosts)))
    sizes: Sizes = field(metadata=formed(Part(Sizes)))
    export_s: float = field(default=0.0, metadata=formed(_SECONDS))  # once: making the file that a node runs
    # For each reduced precision that was measured.
    deviations: Mapping[str, Deviation] = field(default_factory=dict, metadata=formed(Table(Part(Deviation))))
    cuts: tuple[Cut, ...] = field(default=(), metadata=formed(_Places()))

    def __post_init__(self) -> None:
        form.check_record(self, "profile")

    def to_json(self) -> dict[str, Any]:
        return {"format": FORMAT, "version": VERSION, **form.to_json(self)}

    def dumps(self) -> str:
        """The profile as text, to be kept in a file."""
        return json.dumps(self.to_json(), indent=2) + "\n"

    @classmethod
    def from_json(cls, data: object) -> Profile:
        """Read a profile; every fault is in the one ConfigError."""
        if not isinstance(data, Mapping):
            raise ConfigError(f"a profile is a JSON object, not {type(data).__name__}")
        if data.get("format") != FORMAT or data.get("version") != VERSION:
            raise ConfigError(
                f"this is {form.shown(data.get('format'))} version {form.shown(data.get('version'))}; this Headwater "
                f"reads {FORMAT!r} version {VERSION}: measure again with `headwater profile`"
            )
        rest = {name: value for name, value in data.items() if name not in ("format", "version")}
        return form.from_json(cls, rest, "profile")

    @classmethod
    def loads(cls, text: str | bytes) -> Profile:
        try:
            data = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"the profile is not JSON: {error}") from error
        return cls.from_json(data)


def profile_faults(
    profile: Profile, cuts: Sequence[Cut], *, key: Key | None = None, age_s: float = 0.0, max_age_s: float = MAX_AGE_S
) -> list[str]:
    """Why this profile should not be used for this job; empty if it can be. The caller re-measures, or stops."""
    faults = []
    if key is not None:
        for each in fields(Key):
            found, wanted = getattr(profile.key, each.name), getattr(key, each.name)
            if found != wanted:
                faults.append(f"it was measured for {_KEY_WORDS[each.name]} {found!r}, and this one is {wanted!r}")
    if not 0 <= age_s <= max_age_s:
        age = f"{age_s / 86400:.1f} days old" if age_s >= 0 else "from the future"
        faults.append(f"it is {age}; at most {max_age_s / 86400:g} days are allowed")
    for precision, prefix_s in profile.node.prefix_s.items():
        faults += _curve_faults(f"the prefix at {precision}", prefix_s, [cut for cut in cuts if cut.legal], rising=True)
    if "fp32" not in profile.node.prefix_s:
        faults.append("the prefix was not measured at fp32")
    faults += _curve_faults("the suffix", profile.trainer.suffix_s, [cut for cut in cuts if cut.legal], rising=False)
    tables: tuple[tuple[str, tuple[int | None, ...]], ...] = (
        ("fixed memory", profile.node.fixed_bytes),
        ("memory a row", profile.node.row_bytes),
        ("memory a row of a step", profile.trainer.suffix_row_bytes),
    )
    for what, values in tables:
        if values:
            faults += _missing(what, values, [cut for cut in cuts if cut.legal])
    return faults


def check_profile(
    profile: Profile, cuts: Sequence[Cut], *, key: Key | None = None, age_s: float = 0.0, max_age_s: float = MAX_AGE_S
) -> None:
    """Raise one ConfigError with every reason not to use this profile."""
    if faults := profile_faults(profile, cuts, key=key, age_s=age_s, max_age_s=max_age_s):
        lines = "\n".join(f"  - {fault}" for fault in faults)
        raise ConfigError(f"the profile does not fit this job; measure again with `headwater profile`:\n{lines}")


def spread(total_s: float, place_s: Sequence[float]) -> tuple[float, ...]:
    """Cumulative seconds at every cut, from the time of each place and of the whole.

    Timing each place adds the cost of the clock itself, so only their proportions are used. There is one cut more than
    there are places; the last has `total_s`.
    """
    if any(not each >= 0 for each in place_s) or not total_s >= 0:
        raise ConfigError("times of places must be 0 or more")
    whole = sum(place_s)
    result, so_far = [0.0], 0.0
    for index, each in enumerate(place_s, start=1):
        so_far += each
        result.append(total_s * (so_far / whole if whole > 0 else index / len(place_s)))
    return tuple(result)


def least(one: Any, other: Any) -> Any:
    """Of two measurements of the same work, the smaller; of tuples and dicts, part by part, where both have it.

    What others do on a machine makes work there dearer and never cheaper, so the smaller is nearer to what it costs.
    The smaller of two curves over the cuts rises and falls as they do.
    """
    if isinstance(one, Mapping):
        return {name: least(each, other[name]) for name, each in one.items() if name in other}
    if isinstance(one, (tuple, list)):
        return tuple(least(each, again) for each, again in zip(one, other, strict=True))
    return one if one is None or other is None else min(one, other)


def cheaper(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """Of two answers of a node, what each stage costs at least; the memory it needs at most.

    What a prefix's kernels took is of the answer whose prefix took less. Other pictures were decoded each time: that
    cost counts as if they were as large.
    """
    if one.get("sample_bytes") and other.get("sample_bytes"):
        other = {**other, "decode_s": other["decode_s"] * one["sample_bytes"] / other["sample_bytes"]}
    kernels = min(one, other, key=lambda each: each.get("prefix_s", 0.0)).get("kernels")
    found = {}
    for name in (each for each in one if each != "kernels"):
        choose = max if name.endswith("_bytes") else least
        found[name] = choose(one[name], other[name])
    return found if kernels is None else {**found, "kernels": kernels}


_KEY_WORDS: Mapping[str, str] = {
    "model": "the model",
    "transforms": "the transforms",
    "data": "the data",
    "node": "the node machine",
    "trainer": "the trainer machine",
    "headwater": "Headwater",
}


def _missing(what: str, values: Sequence[float | None], cuts: Sequence[Cut]) -> list[str]:
    absent = [cut for cut in cuts if cut.index >= len(values) or values[cut.index] is None]
    if not absent:
        return []
    names = ", ".join(repr(cut.name) for cut in absent[:3]) + (", …" if len(absent) > 3 else "")
    return [f"{what} was not measured for {len(absent)} of {len(cuts)} legal cuts ({names})"]


def _curve_faults(what: str, values: Sequence[float | None], cuts: Sequence[Cut], *, rising: bool) -> list[str]:
    faults = _missing(what, values, cuts)
    known = [(cut, value) for cut in cuts if cut.index < len(values) and (value := values[cut.index]) is not None]
    if not rising:
        known.reverse()
    highest, at = 0.0, ""
    for cut, value in known:
        if value < highest * (1 - NOISE):
            more = "a later" if rising else "an earlier"
            faults.append(f"{what} costs {value:.3g} s at {cut.name!r} but {highest:.3g} s at {at!r}; "
                          f"{more} cut can't cost less")  # fmt: skip
            break
        if value > highest:
            highest, at = value, cut.name
    return faults
