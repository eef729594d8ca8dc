"""What a node says in JSON: the fields that a trainer counts with are there, and are what they should be.

Owns the checks of the answers to "hello", to "status" and to a probe. Other fields are taken as they come: another
version of the same protocol may say more.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from headwater.errors import DamagedError

_HELLO = ("num_threads", "cores", "memory_bytes", "max_upload_bytes", "cpu_s")
_PROBE = ("base_bytes", "read_s", "read_wait_s", "sample_bytes", "decode_s", "pipeline_s", "pipeline_cpu_s")
_OF_A_PREFIX = ("finish_s", "prefix_s", "fixed_bytes", "row_bytes")
# What may be missing, and is used where it is not.
_AMOUNTS = ("resident_bytes", "page_cache_bytes", "at_s")
_TEXTS = ("machine", "engine_versions")
_LISTS = ("codecs", "precisions", "engines")
_MEMORY = ("budget_bytes", "used_bytes", "num_waiting")
_TOO_MUCH = 1e18
_LAST_S = 1e11  # seconds since 1970; calendars end a little later
_MAX_LABELS = 8


def check_hello(answer: Mapping[str, Any], where: str) -> None:
    """DamagedError if this is not what a node says of itself."""
    faults = [name for name in _HELLO if not _is_amount(answer.get(name))]
    if not _are_amounts(answer.get("busy")):
        faults.append("busy")
    if answer.get("cores") == 0 or answer.get("num_threads") == 0:
        faults.append("cores")
    told = {name: value for name, value in answer.items() if value is not None}
    faults += [name for name in _AMOUNTS if name in told and not _is_amount(told[name])]
    faults += [name for name in _TEXTS if name in told and not isinstance(told[name], str)]
    faults += [name for name in _LISTS if name in told and not _are_texts(told[name])]
    if not _are_texts(list(why.values()) if isinstance(why := told.get("precision_faults", {}), dict) else None):
        faults.append("precision_faults")
    if not _are_texts(answer.get("roots")):
        faults.append("roots")
    _refuse(faults, f"{where} does not say who it is as a node does")


def check_probe(found: Mapping[str, Any], with_prefix: bool, where: str) -> None:
    """DamagedError if these are not the costs of something."""
    faults = [name for name in _PROBE + (_OF_A_PREFIX if with_prefix else ()) if not _is_amount(found.get(name))]
    if not _are_amounts(found.get("encode_s_per_byte")):
        faults.append("encode_s_per_byte")
    if with_prefix and not _are_kernels(found.get("kernels")):
        faults.append("kernels")
    _refuse(faults, f"{where}: the answer to a probe can't be used")


def check_status(answer: object, where: str) -> None:
    """DamagedError if this is not what a node shows of itself."""
    found = answer if isinstance(answer, Mapping) else {}
    faults = [] if isinstance(about := found.get("about"), dict) else ["about"]
    if isinstance(about, dict) and not _is_memory(about.get("memory")):
        faults.append("memory")
    if isinstance(about, dict) and not _are_faults(about.get("faults", [])):
        faults.append("faults")
    if not _are_numbers(found.get("numbers")):
        faults.append("numbers")
    _refuse(faults, f"{where} does not show itself as a node does")
    check_hello(found["about"], where)


def _refuse(faults: list[str], what: str) -> None:
    if faults:
        raise DamagedError(
            f"{what}: {', '.join(faults)} missing or out of range; is it a Headwater node of this version?"
        )


def _is_amount(value: object) -> bool:
    """A number that can be counted with; one of many digits can't even be made a float."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return 0 <= value <= _TOO_MUCH and (isinstance(value, int) or math.isfinite(value))


def _are_texts(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(each, str) for each in value)


def _are_amounts(value: object) -> bool:
    return isinstance(value, dict) and all(isinstance(name, str) and _is_amount(each) for name, each in value.items())


def _are_numbers(value: object) -> bool:
    """[[metric, [label, …], amount], …]"""
    return isinstance(value, list) and all(
        isinstance(each, list) and len(each) == 3 and isinstance(each[0], str) and isinstance(each[1], list)
        and len(each[1]) <= _MAX_LABELS and all(isinstance(label, str) for label in each[1])
        and _is_amount(each[2]) for each in value
    )  # fmt: skip


def _is_memory(value: object) -> bool:
    """What is shown of it, where a node says so: amounts, and tenants with theirs."""
    if value is None:
        return True
    if not isinstance(value, dict) or not isinstance(tenants := value.get("tenants", []), list):
        return False
    return all(value.get(name) is None or _is_amount(value[name]) for name in _MEMORY) and all(
        isinstance(each, dict) and isinstance(each.get("tenant"), str) and _is_amount(each.get("row_bytes"))
        for each in tenants
    )


def _are_faults(value: object) -> bool:
    return isinstance(value, list) and all(
        isinstance(each, dict) and all(isinstance(each.get(name), str) for name in ("kind", "tenant", "said"))
        and _is_amount(each.get("times")) and _is_amount(each.get("at_s")) and each["at_s"] <= _LAST_S for each in value
    )  # fmt: skip


def _are_kernels(value: object) -> bool:
    return isinstance(value, list) and all(
        isinstance(each, list) and len(each) == 2 and isinstance(each[0], str) and _is_amount(each[1]) for each in value
    )
