"""What lies in a store: manifests, packed sets, tars and pictures. Whoever can write there is a stranger, too."""

from __future__ import annotations

import hashlib
import io
import json
import shutil
import tarfile
from collections.abc import Callable, Sequence

import numpy as np
import pyarrow as pa
from PIL import Image
from pyarrow import parquet

from bench.fuzz.documents import chains
from bench.fuzz.target import SECRET, Harness, Room, Target
from headwater.core.draw import Draw
from headwater.data.decode import decode
from headwater.data.layouts import list_samples, table, tars
from headwater.data.layouts.listing import list_one, list_store
from headwater.data.samples import SampleRef, Samples
from headwater.data.shards import manifest as about
from headwater.data.shards.pack import pack
from headwater.data.shards.reading import read_sample
from headwater.data.shards.record import header_of
from headwater.data.store import Store, open_store
from headwater.errors import BadSampleError, ConfigError, DataError

MAX_PIXELS = 1 << 20  # a picture takes as long as it is large; ten thousand sides at once are the decoder's own limit


def _table(name: str) -> Callable[[Room], Harness]:
    """A manifest with these bytes. What stands before a NUL names its columns."""

    def make(room: Room) -> Harness:
        path, store = room.root / name, open_store(str(room.root))
        listing = list_store(store)

        def harness(data: bytes) -> None:
            asked: list[str | int | None] = [None, None]
            head, _, rest = data.partition(b"\0")
            if rest and not name.endswith(".parquet"):
                asked, data = [_column(each) for each in [*head.split(b"|", 1), b""][:2]], rest
            path.write_bytes(data)
            _read(store, table.read_table(listing, name, *asked))

        return harness

    return make


def _tar(room: Room) -> Harness:
    path, store = room.root / "set.tar", open_store(str(room.root))

    def harness(data: bytes) -> None:
        path.write_bytes(data)
        _read(store, tars.read_tars(list_one(store, "set.tar")))

    return harness


def _read(store: Store, samples: Samples) -> None:
    """The first few of what was listed."""
    for ref in samples.take(range(min(len(samples), 4))):
        assert SECRET not in bytes(read_sample(store, ref))


def _column(text: bytes) -> str | int | None:
    word = text.decode(errors="replace")
    is_number = word[:1] == "#" and word[1:].isdecimal() and len(word) < 1000  # Python itself refuses longer ones
    return None if not word else int(word[1:]) if is_number else word


def _csv_seeds() -> Sequence[bytes]:
    return [b"path,label\na/0.jpg,cat\na/1.png,dog\nb/2.jpg,cat\n", b"0\ta/0.jpg\n1\ta/1.png\n",
            b"#1|#0\x00cat,a/0.jpg\ndog,a/1.png\n", b"file|y\x00y;file\r\n3;./a/0.jpg\r\n\r\n4;b/2.jpg\r\n",
            b'path,label\n"a/0.jpg","a ""b"""\n']  # fmt: skip


def _parquet_seeds() -> Sequence[bytes]:
    tables = [
        pa.table({"path": ["a/0.jpg", "a/1.png"], "label": ["cat", "dog"]}),
        pa.table({"label": pa.array([1, 0], pa.int32()), "path": pa.array(["a/0.jpg", "b/2.jpg"]).dictionary_encode()}),
        pa.table({"path": ["a/0.jpg"] * 40, "label": [None, *["x"] * 39], "more": [[1, 2]] * 40}),
    ]
    seeds = []
    for rows, compression in zip(tables, ("none", "snappy", "zstd"), strict=True):
        sink = pa.BufferOutputStream()
        parquet.write_table(rows, sink, compression=compression)
        seeds.append(sink.getvalue().to_pybytes())
    return seeds


def _tar_seeds() -> Sequence[bytes]:
    seeds = []
    for form in (tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT):
        sink = io.BytesIO()
        with tarfile.open(fileobj=sink, mode="w", format=form) as tar:
            long = "f" * (90 if form == tarfile.USTAR_FORMAT else 150)
            for name, body in (("0.jpg", b"x" * 30), ("0.cls", b"1"), (f"{long}/1.png", b"y"),
                               (f"{long}/1.json", b'{"label": 2}'), ("readme.txt", b"")):  # fmt: skip
                member = tarfile.TarInfo(name)
                member.size = len(body)
                if form == tarfile.PAX_FORMAT:
                    member.pax_headers = {"mtime": "1.5"}
                tar.addfile(member, io.BytesIO(body))
        seeds.append(sink.getvalue()[: 512 * 18])
    return seeds


def _picture(room: Room) -> Harness:
    def harness(data: bytes) -> None:
        for exif in (False, True):
            image = decode(data, "a.jpg", exif=exif, max_pixels=MAX_PIXELS)
            assert image.mode == "RGB"

    return harness


def _picture_seeds() -> Sequence[bytes]:
    pixels = np.random.default_rng(0).integers(0, 256, (9, 11, 3), np.uint8)
    colour = Image.fromarray(pixels)
    grey16 = Image.fromarray(pixels[..., 0].astype(np.uint16) * 257)
    exif = Image.Exif()
    exif[0x0112] = 6
    ways = [
        (colour, "JPEG", {"exif": exif}), (colour, "JPEG", {"progressive": True}), (colour.convert("CMYK"), "JPEG", {}),
        (colour, "PNG", {}), (colour.convert("P"), "PNG", {"transparency": 3}), (grey16, "PNG", {}),
        (colour.convert("RGBA"), "PNG", {"exif": exif}), (colour, "WEBP", {}), (colour, "WEBP", {"lossless": True}),
        (colour, "BMP", {}), (colour.convert("L"), "BMP", {}), (colour, "GIF", {"transparency": 1}),
        (colour, "TIFF", {"compression": "tiff_lzw"}), (colour, "TIFF", {"compression": "jpeg"}),
        (grey16, "TIFF", {"compression": "tiff_adobe_deflate"}), (colour.convert("F").convert("L"), "TIFF", {}),
        (colour, "PPM", {}), (grey16, "PPM", {}),
    ]  # fmt: skip
    seeds = []
    for image, form, options in ways:
        sink = io.BytesIO()
        image.save(sink, form, **options)
        seeds.append(sink.getvalue())
    return seeds


def _packed(room: Room) -> str:
    target = room.root / "packed"
    pack(str(room.root / "good"), str(target), chains()[0].fixed_part(), shard_bytes=1 << 20)
    return str(target)


def _make_good(room: Room) -> None:
    for name in ("a/0.jpg", "b/2.jpg"):
        (room.root / "good" / name).parent.mkdir(parents=True)
        shutil.copy(room.root / name, room.root / "good" / name)


def _manifest(room: Room) -> Harness:
    _make_good(room)
    url = _packed(room)
    path = room.root / "packed" / about.MANIFEST
    good = json.loads(path.read_bytes())

    def harness(data: bytes) -> None:
        text = data.replace(b"@SHA@", good["index_sha256"].encode())
        path.write_bytes(text)
        samples = list_samples(url, "shards")
        about.check_transforms(samples, chains()[0])
        _read(open_store(url), samples)

    return harness


def _manifest_seeds() -> Sequence[bytes]:
    note = about.Note("file:///x", "f" * 64, chains()[0].fixed_part().to_json(), 1 << 20, 2)
    shards = [about.Shard(0, 2, 1000, "0" * 64)]
    good = about.Manifest(note, "f" * 64, 2, ["a", "b"], [], 4000, "@SHA@", shards, {"pillow": "1"})
    return [good.dumps()]


def _index(room: Room) -> Harness:
    _make_good(room)
    url = _packed(room)
    index, path = room.root / "packed" / about.INDEX, room.root / "packed" / about.MANIFEST
    good = json.loads(path.read_bytes())

    def harness(data: bytes) -> None:
        index.write_bytes(data)
        path.write_bytes(json.dumps({**good, "index_sha256": hashlib.sha256(data).hexdigest()}).encode())
        _read(open_store(url), list_samples(url, "shards"))

    return harness


def _index_seeds() -> Sequence[bytes]:
    rows = {"key": ["a/0.jpg", "b/2.jpg"], "source_offset": [0, 0], "source_length": [-1, -1], "source_size": [5, 5],
            "source_etag": ["x", "y"], "label": [0, 1], "shard": [0, 0], "offset": [0, 256], "length": [256, 256],
            "height": [8, 8], "width": [8, 8], "crc32": [1, 2], "fault": ["", ""]}  # fmt: skip
    tables = [pa.table(rows, schema=about.INDEX_SCHEMA),
              pa.table({**rows, "offset": [None, 2**62], "crc32": [None, 0]}, schema=about.INDEX_SCHEMA)]  # fmt: skip
    return [about.table_bytes(each).to_pybytes() for each in tables]


def _record(room: Room) -> Harness:
    path, chain = room.root / "one.hws", chains()[0]

    def harness(data: bytes) -> None:
        path.write_bytes(data)
        store = open_store(str(room.root))
        found = read_sample(store, SampleRef(0, "one.hws", 0, len(data), len(data), ""))
        row = np.empty(chain.output_spec.shape, np.float32)
        chain.apply(found, "one.hws", out=row)
        for other in chains()[1:]:
            try:
                other.pixels(found, "one.hws", Draw(0, 0, 0))
            except DataError:
                continue

    return harness


def _record_seeds() -> Sequence[bytes]:
    seeds = []
    for chain, side in ((chains()[0], 8), (chains()[1], 8), (chains()[2], 12), (chains()[0], 1)):
        pixels = np.arange(side * side * 3, dtype=np.uint8).reshape(side, side, 3)
        count = len(chain.fixed_part().ops)
        seeds.append(header_of(pixels, count, chain.start_digest(count))[0] + pixels.tobytes())
    return seeds


TARGETS = (
    Target("csv", "a manifest as text, with columns named", _table("list.csv"), _csv_seeds,
           (DataError, ConfigError), 60, "lines"),
    Target("parquet", "a manifest as Parquet", _table("list.parquet"), _parquet_seeds, (DataError, ConfigError), 40),
    Target("tar", "a WebDataset tar", _tar, _tar_seeds, (DataError,), 60, "tar"),
    Target("picture", "a picture of any format that is read", _picture, _picture_seeds, (BadSampleError,), 150,
           "picture"),
    Target("manifest", "the manifest of a packed set", _manifest, _manifest_seeds, (DataError,), 30, "json"),
    Target("index", "the index of a packed set", _index, _index_seeds, (DataError,), 20),
    Target("record", "a record of a shard", _record, _record_seeds, (DataError,), 40, "record"),
)  # fmt: skip
