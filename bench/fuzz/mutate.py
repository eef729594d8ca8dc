"""Other inputs from good ones: bytes changed anywhere, and changes that keep the form of JSON, protobuf, PNG and tar.

Owns the mutations. Everything is drawn from the generator that is handed in, so an input can be made again.
"""

from __future__ import annotations

import json
import random
import struct
import zlib
from collections.abc import Callable, Sequence
from typing import Any

MAX_BYTES = 1 << 16
Mutation = Callable[[random.Random, bytes, Sequence[bytes]], bytes]

# Where parsers stumble: edges of integer types, of floats, and of what a number may have as digits.
NUMBERS = (0, 1, -1, 2, 7, 127, 128, 255, 256, 32767, 65535, 65536, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**53, 2**62,
           2**63 - 1, 2**63, 2**64 - 1, 2**64, -(2**31), -(2**63), 10**18, 10**30, 10**310, 10**4299, 0.5, -0.0, 1e-320,
           1e300, 1.7e308, float("inf"), float("-inf"), float("nan"))  # fmt: skip
TEXTS = ("", "a", "..", ".", "/", "../outside/secret.jpg", "@OUTSIDE@/secret.jpg", "a/../../outside/secret.jpg",
         "file://@ROOT@/%00", "file://@ROOT@/../outside", "file://@ROOT@/%2e%2e/outside", "~nobody/x", "~",
         "link/secret.jpg", "\x00", "\n", "\ud800", "\udfff x", "ﬀ²", "٣", "²", "1" * 5000, "x" * 5000, "%s%n", "\\",
         "\u202e", "𝔘", "NaN", "__class__", "-1", "1e999", "auto", "true", "file:///", "s3://x", "{}",
         "A" * 64)  # fmt: skip


def mutate(generator: random.Random, data: bytes, kind: str, others: Sequence[bytes]) -> bytes:
    """A few changes to `data`, most of them of its own kind; `others` are inputs to take parts from."""
    for _ in range(generator.choice((1, 1, 1, 2, 2, 3, 5))):
        by_form = _FORMS.get(kind)
        if by_form is not None and generator.random() < (0.9 if kind == "json" else 0.7):
            data = by_form(generator, data, others)
        else:
            data = _bytes(generator, data, others)
    mend = _MENDS.get(kind)
    if mend is not None and generator.random() < 0.75:
        data = mend(data)
    return data[:MAX_BYTES]


def _bytes(generator: random.Random, data: bytes, others: Sequence[bytes]) -> bytes:
    raw = bytearray(data)
    place = generator.randrange(len(raw) + 1)
    span = min(len(raw) - place, generator.choice((1, 1, 2, 4, 8, 64, 1024)))
    match generator.randrange(9):
        case 0 if raw:
            raw[place - 1] ^= 1 << generator.randrange(8)
        case 1 if raw:
            raw[place - 1] = generator.choice((0, 1, 0x7F, 0x80, 0xFF, generator.randrange(256)))
        case 2:
            raw[place:place] = generator.randbytes(generator.choice((1, 2, 4, 16)))
        case 3:
            del raw[place : place + span]
        case 4:
            raw[place:place] = raw[place : place + span] * generator.choice((1, 1, 2, 30))
        case 5:
            del raw[place:]
        case 6:
            other = generator.choice(others)
            begin = generator.randrange(len(other) + 1)
            raw[place:] = other[begin:]
        case 7:
            number = generator.choice([each for each in NUMBERS if isinstance(each, int) and abs(each) < 2**64])
            size = generator.choice((1, 2, 4, 8))
            order = generator.choice(("little", "big"))
            raw[place : place + size] = (number % (1 << 8 * size)).to_bytes(size, order)  # type: ignore[arg-type]
        case _:
            begin = generator.randrange(len(raw) + 1)
            raw[place : place + span] = raw[begin : begin + span]
    return bytes(raw)


def _json(generator: random.Random, data: bytes, others: Sequence[bytes]) -> bytes:
    try:
        tree = json.loads(data)
    except (ValueError, RecursionError):
        return _bytes(generator, data, others)
    places = _places(tree)
    holder, key = generator.choice(places) if places else (None, None)
    what = generator.randrange(9)
    if holder is None or what == 0:
        return _deep(generator, data)
    old = holder[key]
    if what == 1:
        del holder[key]
    elif what == 2:
        other, at = generator.choice(places)
        holder[key], other[at] = other[at], holder[key]
    elif what == 3 and isinstance(holder, list):
        holder.insert(key, old)
    elif what == 3:
        holder[generator.choice(TEXTS)] = old
    elif what == 4:
        inner, at = generator.choice(_places(_loads(generator.choice(others)) or [0]) or [([0], 0)])
        holder[key] = inner[at]
    elif what == 5 and isinstance(old, (int, float)) and not isinstance(old, bool):
        holder[key] = generator.choice((old + 1, old - 1, -old, old * 2, str(old)[:4000]))
    elif what == 6 and isinstance(old, str):
        at = generator.randrange(len(old) + 1)
        holder[key] = old[:at] + generator.choice(TEXTS)[:500] + old[at:]
    elif what == 7:
        holder[key] = generator.choice((None, True, False, [], {}, [[]], [old], {"a": old}, [old, old]))
    else:
        holder[key] = generator.choice(generator.choice((NUMBERS, TEXTS)))
    try:
        return json.dumps(tree).encode()
    except (ValueError, RecursionError):
        return data


def _loads(data: bytes) -> Any:
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        return None


def _places(tree: Any) -> list[tuple[Any, Any]]:
    """Every (container, key) of a tree."""
    found: list[tuple[Any, Any]] = []
    left = [tree]
    while left:
        each = left.pop()
        keys = each.keys() if isinstance(each, dict) else range(len(each)) if isinstance(each, list) else ()
        for key in keys:
            found.append((each, key))
            left.append(each[key])
    return found


def _deep(generator: random.Random, data: bytes) -> bytes:
    """Something nested, as deep as parsers just allow or deeper, in place of a value."""
    depth = generator.choice((50, 500, 900, 960, 975, 985, 990, 995, 2000, 20000))
    nest = b"[" * depth + b"]" * depth if generator.random() < 0.5 else b'{"a":' * depth + b"1" + b"}" * depth
    values = [at + 1 for at, byte in enumerate(data) if byte in b":,["]
    if not values:
        return nest
    at = generator.choice(values)
    stop = next((place for place in range(at, len(data)) if data[place] in b",]}"), len(data))
    return data[:at] + nest + data[stop:]


def _lines(generator: random.Random, data: bytes, others: Sequence[bytes]) -> bytes:
    lines = data.split(b"\n")
    at = generator.randrange(len(lines))
    cells = lines[at].split(b",")
    cell = generator.randrange(len(cells))
    match generator.randrange(7):
        case 0:
            cells[cell] = generator.choice(TEXTS).encode(errors="replace")
        case 1:
            cells.append(generator.choice((b"", b"x", b'"', b'"a\nb"', b"\r")))
        case 2:
            del cells[cell]
        case 3:
            cells[cell] = b'"' + cells[cell] + generator.choice((b'"', b"", b'\n"', b'""'))
        case 4:
            lines.insert(at, generator.choice((b"", b"\r", b" ", b"\t\t", b"\x00", b"\xff\xfe", b'"')))
            return b"\n".join(lines)
        case 5:
            return data.replace(b"\n", generator.choice((b"\r", b"\r\n", b"\n\n", b"\x0b")))
        case _:
            return data.replace(b",", generator.choice((b"\t", b";", b"\t,", b",,")))
    lines[at] = b",".join(cells)
    return b"\n".join(lines)


Field = tuple[int, int, Any]  # number, wire type, value


def _protobuf(generator: random.Random, data: bytes, others: Sequence[bytes]) -> bytes:
    tree = _read_message(data, 0)
    if not tree:
        return _bytes(generator, data, others)
    fields = tree
    while True:  # down to some level
        inner = [each for each in fields if isinstance(each[2], list) and each[2]]
        if not inner or generator.random() < 0.25:
            break
        fields = generator.choice(inner)[2]
    at = generator.randrange(len(fields))
    number, wire_type, value = fields[at]
    match generator.randrange(7):
        case 0:
            del fields[at]
        case 1:
            fields.insert(at, fields[generator.randrange(len(fields))])
        case 2:
            other = generator.randrange(len(fields))
            fields[at], fields[other] = fields[other], fields[at]
        case 3:
            fields[at] = (generator.choice((1, 2, 5, 6, 7, 8, 13, 14, 20, 22, 25, number + 1)), wire_type, value)
        case 4 if isinstance(value, int):
            fields[at] = (number, wire_type, generator.choice([n for n in NUMBERS if isinstance(n, int)]) % 2**64)
        case 5 if isinstance(value, bytes):
            fields[at] = (number, wire_type, _bytes(generator, value, others))
        case 4 | 5:
            fields[at] = (number, 2, [fields[at]] * generator.choice((1, 2, 20)))
        case _:
            nest: Any = value if wire_type == 2 else b""
            for _ in range(generator.choice((2, 40, 120, 1000))):
                nest = [(number, 2, nest)]
            fields[at] = (number, 2, nest)
    try:
        return _write_message(tree)[:MAX_BYTES]
    except RecursionError:
        return data


def _read_message(data: bytes, depth: int) -> list[Field] | None:
    """The fields of a message, those that look like messages as such; None if it is none."""
    place, fields = 0, []
    try:
        while place < len(data):
            tag, place = _read_number(data, place)
            wire_type = tag & 7
            value: Any
            if wire_type == 0:
                value, place = _read_number(data, place)
            else:
                size = {1: 8, 5: 4}.get(wire_type)
                if size is None:
                    if wire_type != 2:
                        return None
                    size, place = _read_number(data, place)
                if size > len(data) - place:
                    return None
                value, place = data[place : place + size], place + size
                if wire_type == 2 and depth < 8 and len(value) > 1:
                    value = _read_message(value, depth + 1) or value
            fields.append((tag >> 3, wire_type, value))
    except IndexError:
        return None
    return fields


def _read_number(data: bytes, place: int) -> tuple[int, int]:
    number = shift = 0
    while shift < 70:
        byte = data[place]
        number |= (byte & 0x7F) << shift
        place += 1
        if byte < 0x80:
            return number, place
        shift += 7
    raise IndexError


def _write_message(fields: Any) -> bytes:
    if isinstance(fields, bytes):
        return fields
    parts = []
    for number, wire_type, value in fields:
        parts.append(_write_number(number << 3 | wire_type))
        if isinstance(value, int):
            parts.append(_write_number(value))
            continue
        body = _write_message(value)
        parts.append((_write_number(len(body)) if wire_type == 2 else b"") + body)
    return b"".join(parts)


def _write_number(value: int) -> bytes:
    encoded = bytearray()
    while value >= 0x80:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*encoded, value])


def mend_png(data: bytes) -> bytes:
    """Right checksums, or a reader looks no further. Other pictures stay as they are."""
    if not data.startswith(b"\x89PNG\r\n\x1a\n"):
        return data
    raw, place = bytearray(data), 8
    while place + 12 <= len(raw):
        (size,) = struct.unpack_from(">I", raw, place)
        end = place + 8 + size
        if end + 4 > len(raw):
            break
        struct.pack_into(">I", raw, end, zlib.crc32(raw[place + 4 : end]))
        place = end + 4
    return bytes(raw)


def mend_tar(data: bytes) -> bytes:
    """The same for the headers of a tar, wherever a block looks like one."""
    raw = bytearray(data)
    for place in range(0, len(raw) - 511, 512):
        if raw[place + 257 : place + 262] == b"ustar":
            raw[place + 148 : place + 156] = b" " * 8
            raw[place + 148 : place + 156] = f"{sum(raw[place : place + 512]):06o}\0 ".encode()
    return bytes(raw)


def mend_record(data: bytes) -> bytes:
    """The same for a record of a shard."""
    if len(data) < 64:
        return data
    return data[:36] + struct.pack("<I", zlib.crc32(data[64:], zlib.crc32(data[:36]))) + data[40:]


_FORMS: dict[str, Mutation] = {"json": _json, "lines": _lines, "protobuf": _protobuf}
_MENDS: dict[str, Callable[[bytes], bytes]] = {"picture": mend_png, "tar": mend_tar, "record": mend_record}
