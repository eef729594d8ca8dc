"""Who may do what on a node: the tokens file as data, and the decision about a token.

Owns `Grant`, `Quota`, the fields of the tokens file (docs/access.md) and `identify`. A node knows only the sha256 of a
token: tokens are random and long, so that the hash gives nothing away, and the file with the hashes opens no door.
"""

from __future__ import annotations

import difflib
import hashlib
import hmac
import ipaddress
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta
from typing import Any

from headwater.core.amount import num_bytes
from headwater.core.form import shown
from headwater.core.redact import TOKEN_START
from headwater.errors import ConfigError, RefusedError

_TOKEN = re.compile(rf"{TOKEN_START}[A-Za-z0-9_-]{{32,200}}")
_TENANT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")  # it becomes part of lines that are logged, and of file names
_DIGEST = re.compile(r"[0-9a-f]{64}")
_ASK = "ask whoever runs the node for one, and give it as token=… or in HEADWATER_TOKEN"
MOST = 2**31 - 1
WEIGHTS = (0.01, 100.0)


@dataclass(frozen=True)
class Quota:
    """What a tenant may take of a node; None: as much as there is."""

    max_chunks: int | None = None  # worked on at once; further ones wait
    max_upload_bytes: int | None = None  # of one prefix
    max_prefix_bytes: int | None = None  # of all its prefixes; those it used longest ago go
    rows_per_s: int | None = None  # faster ones wait
    weight: float = 1.0  # of each of its jobs, where jobs share memory and threads
    max_table_bytes: int | None = None  # of all its embedding tables, on disk

    def upload_bytes(self, most: int) -> int:
        """The largest prefix that may be uploaded, where the node itself allows `most`."""
        given = (self.max_upload_bytes, self.max_prefix_bytes)
        return min(most, *(each if each is not None else most for each in given))


@dataclass(frozen=True)
class Grant:
    """What one token allows. Without `roots`: everything that the node serves. An operator sees what all tenants do; it
    may read no more than others."""

    tenant: str
    digest: str
    roots: tuple[str, ...] = ()
    quota: Quota = Quota()
    expires_s: float | None = None  # seconds since 1970
    is_operator: bool = False


def token_digest(token: str) -> str:
    """What the tokens file has of a token."""
    return hashlib.sha256(token.encode(errors="replace")).hexdigest()


def token_fault(token: object) -> str | None:
    """Why this is no token, without telling it; None if it may be one."""
    if isinstance(token, str) and _TOKEN.fullmatch(token):
        return None
    found = f"{len(token)} characters" if isinstance(token, str) else type(token).__name__
    return f"a token begins with {TOKEN_START} and comes from `headwater token`; this has {found} and is none"


def identify(grants: Sequence[Grant], headers: Sequence[str], now_s: float) -> Grant:
    """The grant of a call with these authorization headers; RefusedError says why there is none."""
    if not headers:
        raise RefusedError(f"a token is needed, and none was sent; {_ASK}")
    kind, _, token = headers[0].partition(" ")
    digest = token_digest(token) if kind.lower() == "bearer" and len(headers) == 1 else ""
    found = None
    for grant in grants:  # all of them, each compared in constant time: how long it takes tells nothing
        if hmac.compare_digest(grant.digest, digest):
            found = grant
    if found is None:
        raise RefusedError(f"the token that was sent is not one of this node's; {_ASK}")
    _check_expiry(found, now_s)
    return found


def confirm(grants: Sequence[Grant], grant: Grant, now_s: float) -> Grant:
    """For a call that lasts: what the token that it came with allows now. RefusedError if it is no longer in force."""
    found = next((each for each in grants if (each.digest, each.tenant) == (grant.digest, grant.tenant)), None)
    if found is None:
        raise RefusedError(f"the token of tenant {grant.tenant} is not one of this node's any more; {_ASK}")
    _check_expiry(found, now_s)
    return found


def _check_expiry(grant: Grant, now_s: float) -> None:
    if grant.expires_s is not None and now_s >= grant.expires_s:
        when = datetime.fromtimestamp(grant.expires_s, UTC)
        raise RefusedError(f"the token of tenant {grant.tenant} expired at {when:%Y-%m-%d %H:%M} UTC; {_ASK}")


_FIELDS = ("tenant", "sha256", "roots", "expires", "max_chunks", "max_upload", "max_prefixes", "max_tables",
           "rows_per_second", "weight", "operator")  # fmt: skip


def read_grants(data: Mapping[str, Any], where: str) -> tuple[Grant, ...]:
    """The tokens file, parsed as TOML; one ConfigError with everything that is wrong with it."""
    faults = [f"{name} is not a part of it; it has [[token]] tables alone" for name in data if name != "token"]
    entries = data.get("token", [])
    if not isinstance(entries, list) or not all(isinstance(each, dict) for each in entries):
        entries, faults = [], [*faults, "[token] must be written [[token]]"]
    elif not entries:
        faults.append("it has no [[token]]; `headwater token TENANT` makes one")
    grants = []
    for place, entry in enumerate(entries, 1):
        grant, found = _read_grant(entry)
        title = f"[[token]] {place}" + (f" ({entry['tenant']})" if isinstance(entry.get("tenant"), str) else "")
        faults += [f"{title}: {fault}" for fault in found]
        grants += [grant] if grant else []
    digests = [grant.digest for grant in grants]
    faults += [f"{grant.tenant} has a sha256 that is there twice" for place, grant in enumerate(grants)
               if grant.digest in digests[:place]]  # fmt: skip
    if faults:
        raise ConfigError(
            "\n".join([f"the tokens file {where} has {len(faults)} faults:", *(f"  - {each}" for each in faults)])
        )
    return tuple(grants)


def _read_grant(entry: Mapping[str, Any]) -> tuple[Grant | None, list[str]]:
    faults = []
    for name in entry:
        if name not in _FIELDS:
            close = difflib.get_close_matches(name, _FIELDS, n=1)
            faults.append(
                f"{name} is not a field; "
                + (f"did you mean {close[0]}?" if close else f"there are {', '.join(_FIELDS)}")
            )
    tenant, digest, roots = entry.get("tenant"), entry.get("sha256"), entry.get("roots", [])
    if not isinstance(tenant, str) or not _TENANT.fullmatch(tenant):
        faults.append("tenant must be a name of letters, digits, '.', '_' and '-', at most 64")
    if not isinstance(digest, str) or not _DIGEST.fullmatch(digest):  # not shown: it may be the token itself
        faults.append("sha256 must be the 64 hexadecimal digits that `headwater token` printed")
    if not isinstance(roots, list) or not all(isinstance(root, str) and root for root in roots):
        faults.append("roots must be a list of URLs or paths")
    elif "roots" in entry and not roots:
        faults.append("roots is empty; leave it out to allow everything that the node serves")
    numbers = {}
    for name in ("max_chunks", "rows_per_second"):
        numbers[name] = entry.get(name)
        if name in entry and not (type(entry[name]) is int and 1 <= entry[name] <= MOST):
            faults.append(f"{name} is {shown(entry[name])}; it must be a whole number, 1 or more")
    for name in ("max_upload", "max_prefixes", "max_tables"):
        numbers[name] = None
        if name in entry:
            try:
                numbers[name] = num_bytes(_amount(entry[name]), name)
            except ConfigError as error:
                faults.append(str(error))
    weight = entry.get("weight", 1.0)
    if type(weight) not in (int, float) or not WEIGHTS[0] <= weight <= WEIGHTS[1]:
        faults.append(f"weight is {shown(weight)}; it must be a number from {WEIGHTS[0]:g} to {WEIGHTS[1]:g}")
    operator = entry.get("operator", False)
    if type(operator) is not bool:
        faults.append(f"operator is {shown(operator)}; it must be true or false, without quotes")
    expires_s = None
    if "expires" in entry and (expires_s := _end_of(entry["expires"])) is None:
        faults.append(
            f"expires is {shown(entry['expires'])}; it must be a date or a time without quotes, such as 2030-12-31"
        )
    if faults:
        return None, faults
    assert isinstance(tenant, str)
    assert isinstance(digest, str)
    quota = Quota(numbers["max_chunks"], numbers["max_upload"], numbers["max_prefixes"], numbers["rows_per_second"],
                  float(weight), numbers["max_tables"])  # fmt: skip
    return Grant(tenant, digest, tuple(roots), quota, expires_s, operator), []


def _amount(value: object) -> str:
    """As `num_bytes` reads it; a number of many digits can't be written out."""
    is_plain = isinstance(value, str | float) or (isinstance(value, int) and abs(value) < 10**18)
    return str(value) if is_plain else shown(value)


def _end_of(expires: object) -> float | None:
    """When that is over: a day at its end; a time without a zone is UTC."""
    if isinstance(expires, datetime):  # what is long over may be before the first year of a calendar
        return max(0.0, (expires if expires.tzinfo else expires.replace(tzinfo=UTC)).timestamp())
    if isinstance(expires, date) and expires < date.max:
        return max(0.0, datetime.combine(expires + timedelta(days=1), time(), UTC).timestamp())
    return None


def entry_text(tenant: str, digest: str, fields: Mapping[str, Any]) -> str:
    """An entry for the tokens file; `fields` that are None or empty are left out. ConfigError if it is refused."""
    given = {"tenant": tenant, "sha256": digest, **{name: value for name, value in fields.items() if value}}
    if faults := _read_grant(given)[1]:
        raise ConfigError(f"no token can be made so: {'; '.join(faults)}")
    return "\n".join(["[[token]]", *(f"{name} = {_toml(value)}" for name, value in given.items())]) + "\n"


def _toml(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, str):
        plain = value.replace("\\", "\\\\").replace('"', '\\"')
        return '"' + "".join(each if each >= " " and each != "\x7f" else f"\\u{ord(each):04x}" for each in plain) + '"'
    if isinstance(value, bool):
        return str(value).lower()
    return value.isoformat() if isinstance(value, date) else str(value)


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches that address; a name is never asked for, and only localhost is taken for it."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def check_exposed(host: str, has_tokens: bool, has_tls: bool, insecure: bool, roots: Sequence[str]) -> list[str]:
    """What a node at this address lacks to keep others out; ConfigError if that is something and nobody said
    `insecure`."""
    if is_loopback(host):
        return []
    without = [what for given, what in ((has_tokens, "tokens file"), (has_tls, "TLS")) if not given]
    if without and not insecure:
        raise ConfigError(f"{host} can be reached by others, and it has no {' and no '.join(without)} to keep "
                          "them out; give --tokens FILE (`headwater token` makes one), --tls-cert and --tls-key "
                          "(docs/access.md), or say --insecure on a network where everyone may read "
                          f"{', '.join(roots)}")  # fmt: skip
    return without
