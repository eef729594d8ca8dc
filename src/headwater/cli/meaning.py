"""What a job file stands for: its model, its transforms, the arguments of `near`. Imports torch when it is asked."""

from __future__ import annotations

import sys
from typing import Any

from headwater.cli.jobfile import JobFile, PlanPart
from headwater.cli.models import build_model
from headwater.errors import ConfigError


def near_options(file: JobFile) -> dict[str, Any]:
    """The arguments of `near` that training, validation and planning share."""
    options = {
        "transforms": transforms_of(file, file.data.transforms),
        "batch_size": file.train.batch_size,
        "seed": file.train.seed,
        "layout": file.data.layout,
        "path_column": file.data.path_column,
        "label_column": file.data.label_column,
        "text_column": file.data.text_column,
        "on_bad_sample": file.data.on_bad_sample,
        "nodes": file.nodes.addresses or None,
        "patience_s": file.nodes.patience_s,
        "share": file.nodes.share,
        "views": file.data.views,
        "node_cache": file.nodes.cache or None,
        "node_threads": file.nodes.threads or None,
        "power": file.power.known(),
        "token": file.nodes.token or None,
        **{
            name: file.path(getattr(file.nodes, name)) if getattr(file.nodes, name) else None
            for name in ("tls_ca", "tls_cert", "tls_key")
        },
    }
    if file.plan.file not in ("", "auto", "none"):
        given = [name for name in ("profile", "cut", "codec", "precision", "prongs")
                 if getattr(file.plan, name) != getattr(PlanPart(), name)]  # fmt: skip
        if given:
            raise ConfigError(f"[plan] file fixes all of the plan, and {', '.join(given)} is given as well; leave out "
                              "file, or the others")  # fmt: skip
        return {**options, "plan": file.path(file.plan.file), "tolerance": file.plan.tolerance}
    if file.plan.file == "none":
        options["plan"] = None
    if file.plan.profile:
        options["profile"] = file.path(file.plan.profile)
    return {**options, "cut": file.plan.cut, "codec": file.plan.codec, "precision": file.plan.precision,
            "tolerance": file.plan.tolerance, "prongs": file.plan.prongs}  # fmt: skip


def model_of(file: JobFile) -> Any:
    import torch

    from headwater.model.freeze import freeze

    _look_beside(file)
    model = build_model(file.model.name, file.model.arguments)
    if file.model.weights:
        path = file.path(file.model.weights)
        try:
            model.load_state_dict(torch.load(path, weights_only=True))
        except Exception as error:
            raise ConfigError(f"[model] weights {path} can't be loaded: {str(error)[:500]}") from error
    if file.model.freeze_until:
        freeze(model, until=file.model.freeze_until)
    if not any(each.requires_grad for each in model.parameters()):
        raise ConfigError("[model] nothing is left to train; freeze_until must name a later part of the model")
    return model


def _look_beside(file: JobFile) -> None:
    """Modules that a job file names may lie beside it."""
    if (folder := str(file.folder)) not in sys.path:
        sys.path.append(folder)


def transforms_of(file: JobFile, given: list[Any] | str) -> Any:
    """The transforms that a field of the job file stands for."""
    if not isinstance(given, str):
        return given
    from importlib import import_module

    _look_beside(file)
    module, _, function = given.partition(":")
    try:
        return getattr(import_module(module), function)()
    except Exception as error:
        raise ConfigError(f"[data] transforms = {given!r} must be a list, or package.module:FUNCTION "
                          f"that returns them: {type(error).__name__}: {error}") from error  # fmt: skip
