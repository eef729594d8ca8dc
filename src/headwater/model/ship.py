"""Ship: the prefix of a model as one ONNX file, named by its sha256 and kept on disk.

One file may serve several cuts: it runs up to the last of them and gives what crosses at each. A node takes from it
what a request names, so going over to another of these cuts costs neither an export nor an upload.

Owns `ship`, `Shipped` and the cache folder's layout:

    prefixes/<sha256 of the file>.onnx     what nodes are sent
    prefixes/index/<key>.json              which file a prefix became; the key covers all that decides its content

Files appear whole or not at all, so processes may share the folder. May import core, errors and torch; the exporter
is imported where it is used.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path

import torch
from torch import Tensor
from torch.fx import GraphModule

from headwater.core.cut import Cut, offered_cuts, refusal
from headwater.core.spec import Boundary, TensorSpec
from headwater.errors import ImpureError, ModelError
from headwater.model.capture import Captured, first_lines
from headwater.model.quiet import quiet
from headwater.model.split import prefixes_module

# Part of every key: raise it when what `ship` writes for the same prefix changes.
FORMAT = 1
# A protobuf message, and so a self-contained ONNX file, ends here.
MAX_BYTES = 2**31 - 1
_NOT_WEIGHTS = 1 << 20  # what a file has beside the weights is taken to be less than this
# Rows run alone and in a batch differ by rounding only; a batch-dependent prefix differs by the size of the values.
ALONE_TOLERANCE = 1e-2


@dataclass(frozen=True)
class Shipped:
    """A prefix ready for a node. `inputs` and `outputs` carry the names inside the ONNX file.

    `cuts` has for each cut (by index) which of the outputs cross there, in the order of its boundary.
    """

    digest: str
    path: Path
    inputs: Boundary
    outputs: Boundary
    num_bytes: int
    cuts: Mapping[int, tuple[int, ...]]

    def names_at(self, cut: Cut) -> tuple[str, ...]:
        """What a node is asked for to get the boundary of `cut`."""
        return tuple(self.outputs[place].name for place in self.cuts[cut.index])


def default_cache() -> Path:
    """The user's cache folder for shipped prefixes."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "headwater" / "prefixes"


def ship(captured: Captured, *cuts: Cut, cache_dir: str | os.PathLike[str] | None = None) -> Shipped:
    """The prefix up to the last of `cuts`, with what crosses at each, as an ONNX file; exported once, then cached."""
    shipped = _shipped(captured, cuts, cache_dir, export=True)
    assert shipped is not None
    return shipped


def shipped_before(captured: Captured, *cuts: Cut, cache_dir: str | os.PathLike[str] | None = None) -> Shipped | None:
    """The same if it was exported before, else None."""
    return _shipped(captured, cuts, cache_dir, export=False)


def cuts_to_ship(cuts: Sequence[Cut], max_upload_bytes: Iterable[int] = ()) -> tuple[Cut, ...]:
    """The cuts to choose from that go into one file, which every node takes."""
    largest = min([MAX_BYTES, *(limit - _NOT_WEIGHTS for limit in max_upload_bytes)])
    return tuple(cut for cut in offered_cuts(cuts) if cut.index and cut.prefix_bytes < largest)


def _shipped(
    captured: Captured, cuts: Sequence[Cut], cache_dir: str | os.PathLike[str] | None, *, export: bool
) -> Shipped | None:
    for cut in cuts:
        _check(cut)
    folder = default_cache() if cache_dir is None else Path(cache_dir)
    prefix, places = prefixes_module(captured, cuts)
    specs = {place: (cut, spec) for cut, own in zip(cuts, places, strict=True)
             for place, spec in zip(own, cut.boundary, strict=True)}  # fmt: skip
    outputs = _output_names(captured.inputs, [specs[place][1] for place in range(len(specs))])
    key = _key(prefix, captured.inputs, outputs)
    found = _find(folder, key)
    if found is None and not export:
        return None
    if found is None:
        owners = [specs[place][0] for place in range(len(specs))]
        _check_rows_alone(prefix, captured, owners, outputs)
        found = _export(prefix, captured, max(cuts, key=lambda cut: cut.index), outputs, folder, key)
    of_cut = {cut.index: own for cut, own in zip(cuts, places, strict=True)}
    return Shipped(found.stem, found, captured.inputs, outputs, found.stat().st_size, of_cut)


def _check(cut: Cut) -> None:
    if not cut.legal:
        raise refusal(cut, f"can't be shipped: {cut.why_not}")
    if cut.index == 0:
        raise ModelError("cut 'input' (index 0) has no prefix to ship: send the inputs as they are, or cut later")
    if cut.prefix_bytes >= MAX_BYTES:
        raise ModelError(
            f"cut {cut.name!r}: the weights in front of it take {cut.prefix_bytes / 1e9:.1f} GB, and one ONNX file "
            f"holds {MAX_BYTES / 1e9:.1f} GB; cut earlier, or convert the model to half precision"
        )


def _output_names(inputs: Boundary, boundary: Sequence[TensorSpec]) -> Boundary:
    """Names as ONNX wants them, where every value has one of its own: inputs that cross as they are get a second one,
    and so does what crosses twice because it is changed in place in between."""
    taken = {spec.name for spec in inputs}
    named = []
    for spec in boundary:
        name = spec.name if spec.name not in taken else f"{spec.name}.out"
        again = 1
        while name in taken:
            again += 1
            name = f"{spec.name}.{again}"
        taken.add(name)
        named.append(replace(spec, name=name))
    return tuple(named)


def _key(prefix: GraphModule, inputs: Boundary, outputs: Boundary) -> str:
    """All that decides what the exported file computes."""
    digest = hashlib.sha256()
    specs = [spec.to_json() for spec in (*inputs, *outputs)]
    digest.update(json.dumps([FORMAT, version("torch"), version("onnxscript"), specs]).encode())
    digest.update(prefix.code.encode())
    for name, tensor in sorted(prefix.state_dict(keep_vars=True).items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(_bytes_of(tensor))
    return digest.hexdigest()


def _bytes_of(tensor: Tensor) -> memoryview:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


def _find(folder: Path, key: str) -> Path | None:
    """The file of an earlier export; None if there is none, or if it is damaged."""
    try:
        digest = str(json.loads((folder / "index" / f"{key}.json").read_text())["onnx"])
        path = folder / f"{digest}.onnx"
        with path.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return path if found == digest else None


def _export(prefix: GraphModule, captured: Captured, cut: Cut, outputs: Boundary, folder: Path, key: str) -> Path:
    import onnx  # noqa: F401  (the exporter's own imports log when they are first made)
    import onnxscript  # noqa: F401

    with _writing(folder) as scratch:
        try:
            with quiet(), torch.no_grad():
                torch.onnx.export(
                    prefix,
                    captured.example,
                    scratch,
                    dynamo=True,
                    dynamic_shapes=tuple({0: "batch"} for _ in captured.example),
                    input_names=[spec.name for spec in captured.inputs],
                    output_names=[spec.name for spec in outputs],
                    external_data=False,
                    verbose=False,
                )
        except Exception as error:
            raise ModelError(
                f"cut {cut.name!r}: the prefix can't be written as ONNX: {first_lines(error)}\n"
                "  way out: cut before the operator that is named, or replace the module that uses it"
            ) from error
        with scratch.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        path = folder / f"{digest}.onnx"
        os.replace(scratch, path)
    index = folder / "index"
    index.mkdir(exist_ok=True)
    with _writing(index) as scratch:
        scratch.write_text(json.dumps({"onnx": digest, "cut": cut.name}))
        os.replace(scratch, index / f"{key}.json")
    return path


@contextlib.contextmanager
def _writing(folder: Path) -> Iterator[Path]:
    """A file of our own beside its final place; gone afterwards unless it was moved there."""
    folder.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=".writing-", dir=folder)
    os.close(handle)
    try:
        yield Path(name)
    finally:
        Path(name).unlink(missing_ok=True)


def _check_rows_alone(prefix: GraphModule, captured: Captured, cuts: Sequence[Cut], outputs: Boundary) -> None:
    """A row must come out the same whatever rows are beside it: on a node the batch is another one."""
    probe = tuple(_probe(tensor) for tensor in captured.example)
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        together = prefix(*probe)
        alone = prefix(*(tensor[:1] for tensor in probe))
    for cut, spec, batch, row in zip(cuts, outputs, together, alone, strict=True):
        first, only = batch[:1].double(), row.double()
        scale = max(1e-6, float(first.abs().max())) if first.numel() else 1.0
        if first.numel() and float((first - only).abs().max()) > ALONE_TOLERANCE * scale:
            raise ImpureError(
                f"cut {cut.name!r}: {spec.name} of one row depends on the other rows of its batch; cut before the "
                "module that mixes them"
            )


def _probe(tensor: Tensor) -> Tensor:
    """Rows that differ from each other, with values the model can take."""
    generator = torch.Generator().manual_seed(0)
    if tensor.is_floating_point():
        return torch.randn(tensor.shape, generator=generator).to(tensor.dtype).to(tensor.device)
    order = torch.randperm(tensor.numel(), generator=generator).to(tensor.device)
    return tensor.reshape(-1)[order].reshape(tensor.shape)
