"""Tokenizers: files (tokenizer.json) that anyone may have written, named by their sha256.

Owns what such a file may have, the folders that they are kept in, and the loading of one. A tokenizer is data: names of
steps and a vocabulary. Left out is what a stranger's file could make slow or break with: regular expressions, whose
matching may take for ever, and tables in a binary form. What decodes tokens is not needed and dropped unread. The
`tokenizers` library is imported where it is used (extra `text`); it knows no torch.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

from headwater.core.form import shown
from headwater.data.memory import memory_bytes
from headwater.errors import ConfigError, RefusedError

MAX_BYTES = 16 << 20  # of a file; MiniLM's has 0.5 MB, XLM-R's 17
MAX_WORD = 1000  # characters that a WordPiece looks for in one word: its work grows with their square
MAX_LENGTH = 16_384  # tokens of a text
MAX_GROWTH = 16.0  # times, that normalizers may make a text longer
MAX_AFFIX = 256  # characters that a step puts in front of a text or of a part of it
MAX_UNIGRAM = 256  # characters of a Unigram's longest word: a text is looked through for it from each of its places
FILES_KEPT = 32
# Of a file's bytes, the memory that it takes while it is loaded, and afterwards. By hand (tokenizers 0.23), the peak
# and what stayed: vocabularies of 11 to 13 MB of WordPiece and WordLevel 27 and 14 times, BPE 32 and 10; of words of
# two letters 51 and 20; added tokens of 2,000 letters 77 and 17. A Unigram has a tree of its words beside that, 273
# bytes for each letter that no other word has at that place: 63 and 49 times in all, 73 and 51 for short words. One
# whose tree takes more than `LOADING_TIMES` leave is refused, since how much to wait for is known from a file's size.
LOADING_TIMES, READING_TIMES, HELD_TIMES, LETTER_BYTES = 96, 52, 20, 280
KEPT_PART = 64  # of the memory, for tokenizers that nothing uses now
UNKNOWN_TOKENIZER = "unknown tokenizer"  # in the text of a RefusedError: upload it, then ask again

_PARTS = ("version", "truncation", "padding", "added_tokens", "normalizer", "pre_tokenizer", "post_processor",
          "decoder", "model")  # fmt: skip
_KINDS: Mapping[str, frozenset[str]] = {
    "normalizer": frozenset({"BertNormalizer", "ByteLevel", "Lowercase", "NFC", "NFD", "NFKC", "NFKD", "Nmt", "Prepend",
                             "Replace", "Sequence", "Strip", "StripAccents"}),
    "pre_tokenizer": frozenset({"BertPreTokenizer", "ByteLevel", "CharDelimiterSplit", "Digits", "Metaspace",
                                "Punctuation", "Sequence", "Split", "UnicodeScripts", "Whitespace", "WhitespaceSplit"}),
    "post_processor": frozenset({"BertProcessing", "ByteLevel", "RobertaProcessing", "Sequence", "TemplateProcessing"}),
    "model": frozenset({"BPE", "Unigram", "WordLevel", "WordPiece"}),
}  # fmt: skip
_STEPS = {"normalizer": "normalizers", "pre_tokenizer": "pretokenizers", "post_processor": "processors"}
_MAX_STEPS = 50
_INSTALL = ("this machine has no `tokenizers` library, which texts need on nodes and trainer: pip install '.[text]' "
            "there, in a checkout")  # fmt: skip
_LOADING = threading.Lock()  # one after the other: a file takes many times its bytes while it is read

_folders: list[Path] = []  # of this process, beside the user's


def default_folder() -> Path:
    """The user's cache folder for tokenizers."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "headwater" / "tokenizers"


def look_in(folder: Path) -> None:
    """Look for tokenizers there as well, from now on in this process."""
    if folder not in _folders:
        _folders.append(folder)


def check(data: bytes) -> dict[str, Any]:
    """What the file says, less what is not needed; ConfigError names what it may not have."""
    if len(data) > MAX_BYTES:
        raise ConfigError(f"the tokenizer has {len(data):,} bytes, the limit is {MAX_BYTES:,}")
    try:
        said = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"the tokenizer is not JSON ({str(error)[:100]}); give a tokenizer.json") from None
    if not isinstance(said, dict) or not isinstance(said.get("model"), dict):
        raise ConfigError("the tokenizer is not a tokenizer.json: it has no model")
    if unknown := sorted(set(said) - set(_PARTS)):
        raise ConfigError(f"the tokenizer has a part {shown(unknown[0])}; it may have {', '.join(_PARTS)}")
    growth = 1.0
    for part in _KINDS:
        growth *= _check_part(part, said.get(part), 0)
    if growth > MAX_GROWTH:
        raise ConfigError(f"the tokenizer's normalizer may make a text {growth:.3g} times as long; the limit is "
                          f"{MAX_GROWTH:g}")  # fmt: skip
    if (num_bytes := _tree_bytes(said["model"])) > (most := (LOADING_TIMES - READING_TIMES) * len(data)):
        raise ConfigError(f"the tokenizer's Unigram takes {num_bytes / 1e6:,.3g} MB in memory for its {len(data):,} "
                          f"bytes; the limit is {most / 1e6:,.3g}; use one with shorter words")  # fmt: skip
    if not isinstance(said.get("added_tokens") or [], list):
        raise ConfigError("the tokenizer's added_tokens are not a list")
    word = said["model"].get("max_input_chars_per_word", 100)
    if type(word) is not int or not 0 <= word <= MAX_WORD:
        raise ConfigError(f"the tokenizer's max_input_chars_per_word is {shown(word)}; the limit is {MAX_WORD}")
    _check_model(said["model"])
    return {**said, "decoder": None, "truncation": None, "padding": None}


def _check_model(model: Mapping[str, Any]) -> None:
    """What would make ids depend on chance, or take ages."""
    if model.get("dropout"):
        raise ConfigError("the tokenizer's model has dropout, which draws at random: the same text would have other "
                          "tokens each time; set it to null")  # fmt: skip
    for name in ("continuing_subword_prefix", "end_of_word_suffix"):
        if len(str(model.get(name) or "")) > MAX_AFFIX:
            raise ConfigError(f"the tokenizer's {name} is longer than {MAX_AFFIX} characters")
    words = model.get("vocab")
    if model.get("type") == "Unigram" and isinstance(words, list):
        longest = max((len(str(each[0])) for each in words if isinstance(each, list) and each), default=0)
        if longest > MAX_UNIGRAM:
            raise ConfigError(f"the tokenizer's Unigram has a word of {longest:,} characters; the limit is "
                              f"{MAX_UNIGRAM}")  # fmt: skip


def _tree_bytes(model: Mapping[str, Any]) -> int:
    """What the tree of a Unigram's words takes."""
    words = model.get("vocab")
    if model.get("type") != "Unigram" or not isinstance(words, list):
        return 0
    found = sorted({str(each[0]).encode(errors="replace") for each in words if isinstance(each, list) and each})
    letters = sum(map(len, found))
    for word, after in pairwise(found):
        for one, other in zip(word, after, strict=False):
            if one != other:
                break
            letters -= 1
    return LETTER_BYTES * letters


def _check_part(part: str, said: Any, depth: int) -> float:
    """How many times as long a text may become by this part."""
    if said is None and part != "model":
        return 1.0
    # Older files don't say of which kind their model is.
    kind = said.get("type", "BPE" if part == "model" else None) if isinstance(said, dict) else None
    if not isinstance(kind, str) or kind not in _KINDS[part]:
        found = shown(said.get("type")) if isinstance(said, dict) else shown(said)
        raise ConfigError(f"the tokenizer's {part} is {found}; nodes run {', '.join(sorted(_KINDS[part]))}; tokenize "
                          "on the trainer, or use another tokenizer")  # fmt: skip
    pattern = said.get("pattern")
    if kind in ("Replace", "Split") and not (isinstance(pattern, dict) and set(pattern) == {"String"}):
        raise ConfigError(f"the tokenizer's {part} {kind} has a regular expression, whose matching may take for ever; "
                          "nodes run those with a plain text only")  # fmt: skip
    if kind == "TemplateProcessing":
        pieces = said.get("single")
        if not isinstance(pieces, list) or sum(isinstance(each, dict) and "Sequence" in each for each in pieces) != 1:
            raise ConfigError("the tokenizer's TemplateProcessing has the text more than once, or not at all; nodes "
                              "run those that have it once")  # fmt: skip
    if kind == "Replace":
        return _growth(str(pattern["String"]), str(said.get("content") or ""))
    if kind == "Prepend" and len(str(said.get("prepend") or "")) > MAX_AFFIX:
        raise ConfigError(f"the tokenizer's Prepend is longer than {MAX_AFFIX} characters")
    growth = 1.0
    if kind == "Sequence":
        steps = said.get(_STEPS[part])
        if not isinstance(steps, list) or len(steps) > _MAX_STEPS or depth > 2:
            raise ConfigError(f"the tokenizer's {part} is a Sequence of more than {_MAX_STEPS} steps, or of none")
        for step in steps:
            growth *= _check_part(part, step or {}, depth + 1)
    return growth


def _growth(pattern: str, content: str) -> float:
    """Of a text, where one is replaced by the other; an empty pattern is found between all characters."""
    return max(1.0, len(content) / len(pattern)) if pattern else 1.0 + len(content)


def keep(data: bytes, folder: Path | None = None, *, all_of_them: bool = False) -> str:
    """Keep this tokenizer, if it is one that can be loaded; its sha256. Of all, those used last are kept, unless
    somebody else sees to that."""
    with _LOADING:
        _load(check(data))
    digest = hashlib.sha256(data).hexdigest()
    folder = default_folder() if folder is None else folder
    folder.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=folder, prefix=".writing-")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.replace(name, folder / f"{digest}.json")
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    kept = sorted(folder.glob("*.json"), key=lambda path: path.stat().st_mtime)
    for path in [] if all_of_them else kept[:-FILES_KEPT]:
        path.unlink(missing_ok=True)
    return digest


def path_of(digest: str) -> Path:
    """Where this tokenizer is kept; RefusedError if it is not."""
    for folder in (*_folders, default_folder()):
        path = folder / f"{digest}.json"
        if path.exists():
            return path
    raise RefusedError(f"{UNKNOWN_TOKENIZER} {digest}")


@dataclass(frozen=True, eq=False)
class Loaded:
    """A tokenizer in memory, and what it takes. Threads may use it at the same time."""

    tokenizer: Any
    num_bytes: int


class Kept:
    """Tokenizers that are loaded: all that somebody holds, and those used last within so many bytes, but `at_least` so
    many."""

    def __init__(self, max_bytes: int, at_least: int = 1) -> None:
        self._max_bytes, self._at_least = max_bytes, at_least
        self._all: WeakValueDictionary[str, Loaded] = WeakValueDictionary()
        self._last: OrderedDict[str, Loaded] = OrderedDict()
        self._lock = threading.Lock()

    def allow(self, max_bytes: int, at_least: int) -> None:
        with self._lock:
            self._max_bytes, self._at_least = max_bytes, at_least

    def get(self, digest: str) -> Loaded | None:
        with self._lock:
            found = self._all.get(digest)
            if found is not None:
                self._use(digest, found)
            return found

    def put(self, digest: str, loaded: Loaded) -> None:
        with self._lock:
            self._all[digest] = loaded
            self._use(digest, loaded)

    def _use(self, digest: str, loaded: Loaded) -> None:
        self._last[digest] = loaded
        self._last.move_to_end(digest)
        total = sum(each.num_bytes for each in self._last.values())
        while total > self._max_bytes and len(self._last) > self._at_least:
            total -= self._last.popitem(last=False)[1].num_bytes


KEPT = Kept(memory_bytes() // KEPT_PART)  # of the process


def load(digest: str, length: int) -> Loaded:
    """The tokenizer of this sha256, for texts that are cut off after `length` tokens."""
    found = KEPT.get(digest)
    if found is None:
        with _LOADING:
            found = KEPT.get(digest)  # another thread has loaded it meanwhile
            if found is None:
                found = _read(digest)
                KEPT.put(digest, found)
    special = found.tokenizer.num_special_tokens_to_add(is_pair=False)
    if special >= length:
        raise ConfigError(f"Tokenize: length is {length}, and the tokenizer adds {special} tokens to each text; give "
                          f"at least {special + 1}")  # fmt: skip
    return found


def _read(digest: str) -> Loaded:
    path = path_of(digest)
    try:
        data = path.read_bytes()
    except FileNotFoundError:  # made room for another one just now
        raise RefusedError(f"{UNKNOWN_TOKENIZER} {digest}") from None
    if hashlib.sha256(data).hexdigest() != digest:
        path.unlink(missing_ok=True)
        raise RefusedError(f"{UNKNOWN_TOKENIZER} {digest}: the stored file was damaged and is gone")
    said = check(data)
    found = Loaded(_load(said), HELD_TIMES * len(data) + _tree_bytes(said["model"]))
    with contextlib.suppress(OSError):
        os.utime(path)  # used now: the last to go
    return found


def needs_bytes(digest: str) -> int:
    """The memory that this tokenizer takes now, or will take while it is loaded. RefusedError if it is not here."""
    found = KEPT.get(digest)
    return LOADING_TIMES * size_of(digest) if found is None else found.num_bytes


def size_of(digest: str) -> int:
    """The bytes of its file. RefusedError if it is not here."""
    try:
        return path_of(digest).stat().st_size
    except FileNotFoundError:
        raise RefusedError(f"{UNKNOWN_TOKENIZER} {digest}") from None


def pad_id_of(digest: str, source: Any) -> int | None:
    """What texts are filled up with: by the object that the tokenizer came from, by its file, or by its name."""
    said = json.loads(path_of(digest).read_bytes()).get("padding")
    of_file = said.get("pad_id") if isinstance(said, dict) else None
    found = load(digest, MAX_LENGTH).tokenizer
    named = (found.token_to_id(name) for name in ("[PAD]", "<pad>", "<|padding|>"))
    candidates = (getattr(source, "pad_token_id", None), of_file, *named)
    return next((each for each in candidates if type(each) is int), None)


def version() -> str:
    """Of the library, or why there is none."""
    try:
        import tokenizers
    except ImportError:
        return "none"
    return str(tokenizers.__version__)


def _load(said: Mapping[str, Any]) -> Any:
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise RefusedError(_INSTALL) from None
    with _plain("the tokenizer can't be loaded"):
        return Tokenizer.from_str(json.dumps(said))


def ids_of(tokenizer: Any, text: str, length: int) -> list[int]:
    """The ids of a text's tokens, at most `length`: cut off as the library does it, but without telling the tokenizer
    how long, which other threads use with other lengths."""
    with _plain("the tokenizer failed on a text"):
        encoded = tokenizer.encode(text, add_special_tokens=False)
        encoded.truncate(length - tokenizer.num_special_tokens_to_add(is_pair=False))
        found: list[int] = tokenizer.post_process(encoded).ids
    if any(not 0 <= each < 2**31 for each in found[:length]):
        raise ConfigError("the tokenizer gives ids beyond 2**31 - 1")
    return found[:length]


@contextlib.contextmanager
def _plain(what: str) -> Iterator[None]:
    """The library is Rust: what it trips over comes as an exception that no `except Exception` catches."""
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise ConfigError(f"{what}: {str(error)[:200]}") from None


def text_of(source: Any) -> bytes:
    """The tokenizer.json of a file, a tokenizer of `tokenizers`, or a fast one of transformers."""
    inner = getattr(source, "backend_tokenizer", source)
    if hasattr(inner, "to_str"):
        return str(inner.to_str()).encode()
    if not isinstance(source, str | os.PathLike):
        raise ConfigError(f"a tokenizer is a path of a tokenizer.json, a tokenizers.Tokenizer or a fast tokenizer of "
                          f"transformers, not {type(source).__name__}")  # fmt: skip
    path = Path(source)
    path = path / "tokenizer.json" if path.is_dir() else path
    try:
        with path.open("rb") as file:
            return file.read(MAX_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"the tokenizer {path} can't be read: {error.strerror}") from None
