"""One object store behind a URL: list, read a range, ask a size, write an object.

Owns `Store` and the rule that a key never leaves its root. The environment is read here alone, as stores are told.
May import `headwater.errors` and obstore.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from obstore import store as obstores
from obstore.exceptions import BaseError, PermissionDeniedError, UnauthenticatedError

from headwater.data.mapped import Mapped, Maps
from headwater.data.secrets import redact
from headwater.errors import BadSampleError, ChangedError, ConfigError, StoreError

SCHEMES = ("file", "s3", "gs", "az")
PAGE = 1000  # entries in one page of a listing; what S3 itself returns at most
_MAX_KEY = 4096  # PATH_MAX of Linux; S3 allows 1,024 bytes
# A store that is down answers with an error in seconds. obstore's own default tries for three minutes.
_RETRY: Any = {"max_retries": 4, "retry_timeout": timedelta(seconds=20)}
_MAPS = Maps()  # of the whole process, which is what has a limit
_TIMEOUT = {"connect_timeout": timedelta(seconds=5), "timeout": timedelta(seconds=60)}
PIECE_BYTES = 8 << 20  # of a large object in one request, which has those 60 s for all of it: enough at 1.1 Mbit/s


@dataclass(frozen=True, slots=True)
class Entry:
    """One object of a listing. `key` is relative to the store's root."""

    key: str
    size: int
    etag: str


def key_fault(key: object) -> str | None:
    """Why `key` can't name an object below a root, or None if it can."""
    if not isinstance(key, str):
        return f"a key is text, not {type(key).__name__}"
    if not key:
        return "the key is empty"
    if len(key) > _MAX_KEY:
        return f"the key has {len(key)} characters; the limit is {_MAX_KEY}"
    if key.startswith("/"):
        return "the key is absolute; keys are relative to the root"
    if "\0" in key or "\\" in key or any("\ud800" <= letter <= "\udfff" for letter in key):
        return "the key has a NUL, a backslash or a lone surrogate"
    if any(part in ("", ".", "..") for part in key.split("/")):
        return "the key has an empty part, '.' or '..'"
    return None


def full_url(url: str) -> str:
    """`url` with a scheme and without a closing slash: a plain path becomes file://."""
    if not isinstance(url, str | os.PathLike) or not str(url):
        raise ConfigError(f"a data URL is text like s3://bucket/folder or a path, not {url!r}")
    url = str(url)
    scheme, separator, rest = url.partition("://")
    if not separator:
        try:
            return Path(url).expanduser().absolute().as_uri()
        except (RuntimeError, ValueError) as error:  # ~NAME of nobody
            raise ConfigError(f"{redact(url)[:200]!r} is not a path: {error}; write it from the root") from None
    if scheme not in SCHEMES:
        known = ", ".join(f"{name}://" for name in SCHEMES)
        raise ConfigError(f"{redact(url)}: {scheme}:// is not a store that can be read; use {known} or a path")
    if scheme != "file" and not rest.strip("/"):
        raise ConfigError(f"{redact(url)}: no bucket named; write {scheme}://bucket/folder")
    return url.rstrip("/") if url != "file:///" else url


def store_name(url: str) -> str:
    """Which store a URL is of, as this process reaches it: no folder in it, and nothing that is secret."""
    parts = urlsplit(full_url(url))
    if parts.scheme == "file":
        return parts.scheme
    of = {"s3": _server(_endpoint()), "az": os.environ.get("AZURE_STORAGE_ACCOUNT_NAME", "")}.get(parts.scheme)
    return f"{parts.scheme}://{_server(parts.geturl())}" + (f" of {of}" if of else "")


def _server(url: str) -> str:
    """Without user and password."""
    return urlsplit(url).netloc.rpartition("@")[2]


def _endpoint() -> str:
    return os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or ""


def split_url(url: str) -> tuple[str, str]:
    """The folder's URL and the name of the object in it."""
    folder, _, name = full_url(url).rpartition("/")
    return (folder or "/"), unquote(name) if folder.startswith("file:") else name


class Store:
    """Objects below one root. All methods may be called from many threads at once; waiting releases the GIL."""

    def __init__(self, url: str) -> None:
        self.url = full_url(url)
        self._shown = redact(self.url)
        self._root = self._local_root()
        self._objects = self._connect()

    def __repr__(self) -> str:
        return f"Store({self._shown!r})"

    @property
    def is_local(self) -> bool:
        """Whether the objects are files that this machine sees."""
        return self._root is not None

    @property
    def is_current(self) -> bool:
        """Whether the folder is still where it was: a link to it may lead elsewhere by now."""
        return self._root is None or os.path.realpath(unquote(urlsplit(self.url).path)) == self._root

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Keep others who ask for the same from this folder; only files of this machine can be locked."""
        if self._root is None:
            yield
            return
        folder = os.open(self._root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            try:
                fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ConfigError(f"another process is writing to {self._shown}; wait for it, or choose another "
                                  "folder") from None  # fmt: skip
            yield
        finally:
            os.close(folder)

    def _local_root(self) -> str | None:
        if not self.url.startswith("file://"):
            return None
        path = unquote(urlsplit(self.url).path)
        if not os.path.isdir(path):
            found = "is a file" if os.path.exists(path) else "does not exist"
            raise StoreError(f"{self._shown}: {path} {found}; give the URL of a folder that this machine can read")
        return os.path.realpath(path)

    def _connect(self) -> Any:
        try:
            if self._root is not None:
                return obstores.LocalStore(self._root)
            options: Any = dict(_TIMEOUT)
            if self.url.startswith("s3://"):
                endpoint = _endpoint()
                config: Any = {"endpoint": endpoint} if endpoint else {}
                if endpoint.startswith("http://"):
                    # A store of one's own: no certificate, and rarely a host name for each bucket.
                    config["virtual_hosted_style_request"] = False
                    options["allow_http"] = True
                return obstores.S3Store.from_url(self.url, config=config, client_options=options, retry_config=_RETRY)
            return obstores.from_url(self.url, client_options=options, retry_config=_RETRY)
        except (BaseError, ValueError, OSError) as error:
            raise self._refusal("can't be opened", error) from None

    def list(self, prefix: str = "") -> Iterator[list[Entry]]:
        """All objects below `prefix`, a page at a time, in the store's own order."""
        if prefix.strip("/") and (fault := key_fault(prefix.strip("/"))):
            raise ConfigError(f"{self._shown}: can't list {prefix!r}: {fault}")
        inside: dict[str, bool] = {}
        try:
            for page in self._objects.list(prefix.strip("/") or None, chunk_size=PAGE):
                entries = [Entry(meta["path"], meta["size"], self._etag(meta)) for meta in page]
                if self._root is not None:
                    for entry in entries:
                        self._check_listed(entry.key, inside)
                yield entries
        except (BaseError, ValueError, OSError) as error:
            raise self._refusal("can't be listed", error) from None

    def _check_listed(self, key: str, inside: dict[str, bool]) -> None:
        """Refuse a link that leads out of the root when it is listed, not when a job is half done."""
        assert self._root is not None
        folder = os.path.dirname(key)
        if folder not in inside:
            inside[folder] = self._is_inside(folder)
        path = os.path.join(self._root, key)
        if not inside[folder] or (os.path.islink(path) and not self._is_inside(key)):
            raise StoreError(
                f"{self._shown}: {key} is a link to {os.path.realpath(path)}, outside of the folder; "
                "copy the files into it, or use the folder that holds them"
            )

    def _is_inside(self, key: str) -> bool:
        assert self._root is not None
        path = os.path.realpath(os.path.join(self._root, key))
        return path == self._root or path.startswith(self._root.rstrip("/") + "/")

    def _check(self, key: str) -> None:
        fault = key_fault(key)
        if fault is None and self._root is not None and not self._is_inside(key):
            fault = "leads out of the folder through a link; copy the file in, or use the folder that holds it"
        if fault is not None:
            raise BadSampleError(str(key)[:200], f"refused in {self._shown}: {fault}")

    def read(
        self,
        key: str,
        offset: int = 0,
        length: int | None = None,
        etag: str | None = None,
        max_bytes: int | None = None,
        listed_bytes: int | None = None,
    ) -> Any:
        """The bytes of an object (a buffer), or `length` of them from `offset`.

        With `etag`, an object that is not the one with that etag is a ChangedError; so are more than `listed_bytes`.
        More than `max_bytes` are not read.
        """
        self._check(key)
        if offset < 0 or (length is not None and length < 0):
            raise ConfigError(f"{key}: can't read {length} bytes from {offset}; both must be 0 or more")
        options: Any = None
        if length is not None:
            if length == 0:
                return b""
            options = {"range": (offset, offset + length)}
        elif offset:
            options = {"range": {"offset": offset}}
        try:
            result = self._objects.get(key, options=options)
            self.check_etag(key, self._etag(result.meta), etag)
            start, stop = result.range
            if listed_bytes is not None and stop - start > listed_bytes:
                raise self._changed(key, f"has {stop - start:,} bytes", f"with {listed_bytes:,}")
            if max_bytes is not None and stop - start > max_bytes:
                raise BadSampleError(key, f"has {stop - start:,} bytes in {self._shown}, the limit for one sample is "
                                     f"{max_bytes:,}; make it smaller")  # fmt: skip
            data = result.bytes()
        except FileNotFoundError:
            raise BadSampleError(key, f"is not in {self._shown}; put it back, or list the data again") from None
        except (BaseError, ValueError, OSError) as error:
            if length is not None and "range" in str(error).lower() and self.size(key) < offset + length:
                raise self._short(key, offset, length) from None
            raise self._refusal(f"{key} can't be read", error) from None
        if length is not None and len(data) != length:
            raise self._short(key, offset, length)
        return data

    def read_whole(self, key: str) -> memoryview:
        """The bytes of a large object, which may come slowly: in several requests, one after the other."""
        size = self.size(key)
        data = bytearray(size)
        for start in range(0, size, PIECE_BYTES):
            stop = min(start + PIECE_BYTES, size)
            data[start:stop] = memoryview(self.read(key, start, stop - start))
        return memoryview(data)

    def check_etag(self, key: str, found: str, listed: str | None) -> None:
        """ChangedError if the object was listed with another etag than it has."""
        if listed and found != _bare(listed):
            raise self._changed(key, f"etag {found!r}", f"as {_bare(listed)!r}")

    def _changed(self, key: str, found: str, listed: str) -> ChangedError:
        return ChangedError(
            f"{key} in {self._shown} has changed since it was listed: {found}, listed {listed}; list the data again "
            "(start a new job), or put the old object back"
        )

    def map(self, key: str) -> Mapped:
        """A file of a local store as memory, as it is now; no bytes are copied."""
        assert self._root is not None
        try:
            return _MAPS.get(os.path.join(self._root, key), lambda: self.etag(key), self._root)
        except FileNotFoundError:
            raise BadSampleError(key, f"is not in {self._shown}; put it back, or list the data again") from None
        except OSError as error:
            raise self._refusal(f"{key} can't be read", error) from None

    def write(self, key: str, data: Any) -> None:
        """Put an object there, whole or not at all; one of that name is replaced."""
        self._check(key)
        try:
            self._objects.put(key, memoryview(data).cast("B"))
        except (BaseError, ValueError, OSError) as error:
            raise self._refusal(f"{key} can't be written", error) from None

    def delete(self, keys: Sequence[str]) -> None:
        """Take objects away; those that are not there are gone already."""
        for key in keys:
            self._check(key)
            try:
                self._objects.delete(key)
            except FileNotFoundError:
                continue
            except (BaseError, ValueError, OSError) as error:
                raise self._refusal(f"{key} can't be deleted", error) from None

    def unlisted(self, folder: str) -> Sequence[str]:
        """Files in a folder of a local store that no listing shows: NAME#1, as a writer that was killed leaves them.

        Others may have files that are called so, too.
        """
        if self._root is None or not self._is_inside(folder) or not os.path.isdir(os.path.join(self._root, folder)):
            return []
        with os.scandir(os.path.join(self._root, folder)) as entries:
            names = [entry.name for entry in entries if entry.is_file(follow_symlinks=False)]
        return [os.path.join(folder, name) for name in sorted(names) if re.fullmatch(r"[^#]*#\d+", name)]

    def drop_unlisted(self, keys: Sequence[str]) -> None:
        """Take away files that `unlisted` has named."""
        for key in keys:
            assert self._root is not None
            assert self._is_inside(key)
            Path(self._root, key).unlink(missing_ok=True)

    def _short(self, key: str, offset: int, length: int) -> BadSampleError:
        return BadSampleError(
            key,
            f"ends before byte {offset + length:,} (it has {self.size(key):,}), so {length:,} bytes can't be read from "
            f"{offset:,} in {self._shown}; the object was cut short or replaced: list the data again",
        )

    def size(self, key: str) -> int:
        """Bytes of one object."""
        return int(self._head(key)["size"])

    def etag(self, key: str) -> str:
        """The object's etag now."""
        return self._etag(self._head(key))

    def _etag(self, meta: Any) -> str:
        """A file's is made of inode, time and size; without the inode, copies of a folder on several nodes agree."""
        etag = _bare(meta["e_tag"])
        return etag.partition("-")[2] or etag if self._root is not None else etag

    def _head(self, key: str) -> Any:
        self._check(key)
        try:
            return self._objects.head(key)
        except FileNotFoundError:
            raise BadSampleError(key, f"is not in {self._shown}; put it back, or list the data again") from None
        except (BaseError, ValueError, OSError) as error:
            raise self._refusal(f"{key} can't be found", error) from None

    def _refusal(self, what: str, error: Exception) -> StoreError:
        # obstore appends a dump of its internals after an empty line, and S3 a page of XML.
        first = redact(str(error).split("\n\nDebug", 1)[0].split(": <?xml", 1)[0]).replace("\n", "\\n")[:500]
        if "os error 28" in first or "no space left" in first.lower():
            way_out = "the disk is full: make room there, and run this again"
        elif "invalid path" in first.lower():
            way_out = "rename what is called so: names are UTF-8 without control characters"
        elif isinstance(error, PermissionDeniedError | UnauthenticatedError) or re.search(r"\b40[13] ", first):
            way_out = ("check the credentials (for s3://: AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_REGION), and "
                       "what they allow")  # fmt: skip
        elif self._root is not None:
            way_out = f"check that the folder is there and may be {'written to' if 'written' in what else 'read'}"
        elif self.url.startswith("s3://") and not _endpoint():
            way_out = ("AWS_ENDPOINT_URL is not set, so Amazon's S3 was asked: set it if the store is another one, and "
                       "check the bucket's name")  # fmt: skip
        else:
            way_out = "check the bucket's name, the endpoint (for s3://: AWS_ENDPOINT_URL) and that the store is up"
        return StoreError(f"{self._shown} {what}: {first}; {way_out}")


def _bare(etag: str | None) -> str:
    """An etag without its quotes: listings and replies of some stores differ in them."""
    return (etag or "").strip('"')


def make_folder(url: str) -> None:
    """Make the folder of a file:// URL if it is not there; other stores have no folders."""
    url = full_url(url)
    if url.startswith("file://"):
        path = unquote(urlsplit(url).path)
        try:
            os.makedirs(path, exist_ok=True)
        except OSError as error:
            raise StoreError(f"{redact(url)}: the folder can't be made: {error.strerror}; choose another") from None


def open_store(url: str) -> Store:
    """The store at `url`: file://, s3://, gs://, az://, or a plain path to a folder."""
    return Store(url)
