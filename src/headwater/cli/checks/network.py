"""A node over the network: is it reached, does TLS hold, does the token open, how fast, what time is it there."""

from __future__ import annotations

import socket
import ssl
import time
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

from headwater.cli.checks import NOTE, OK, WRONG, Finding
from headwater.core.access import is_loopback
from headwater.data.secrets import redact
from headwater.errors import ConfigError, HeadwaterError, RefusedError, VersionError
from headwater.train.access import TLS, Access
from headwater.train.client import NodeClient
from headwater.version import VERSION

CONNECT_WITHIN_S = 5.0
SKEW_S = 30.0  # certificates and tokens go by clocks; logs of two machines are hard to lay over each other well before
CERTIFICATE_DAYS = 14.0
NUM_ASKED = 5


def check(address: str, access: Access, seconds: float) -> Iterator[Finding]:
    """From the wire up: what fails first is what is told, with the rest left out."""
    part, where = redact(address), _where(address)
    if where is None:
        yield Finding(part, "address", WRONG, "is none of a node", "it looks like grpc+tls://store-1:8815")
        return
    scheme, host, port = where
    try:
        begin = time.perf_counter()
        with socket.create_connection((host, port), timeout=CONNECT_WITHIN_S):
            taken_s = time.perf_counter() - begin
    except OSError as error:
        yield Finding(part, "reach", WRONG, f"no connection: {error.strerror or error}", _why_unreached(error))
        return
    yield Finding(part, "reach", OK, f"a connection takes {1e3 * taken_s:.1f} ms")
    if scheme == TLS:
        yield _certificate(part, host, port, access)
    elif not is_loopback(host):
        yield Finding(
            part,
            "TLS",
            NOTE,
            "none: rows, prefixes and names travel in the open",
            "serve with --tls-cert and --tls-key (docs/access.md), and name the node as grpc+tls://",
        )
    client = None
    try:
        client = NodeClient(address, access)
        yield from _node(part, client, seconds)
    except (VersionError, RefusedError, ConfigError) as error:
        what = "version" if isinstance(error, VersionError) else "token"
        yield Finding(part, what, WRONG, redact(str(error)))
    except HeadwaterError as error:
        yield Finding(part, "answer", WRONG, redact(str(error)))
    finally:
        if client is not None:
            client.close()


def _where(address: str) -> tuple[str, str, int] | None:
    """Scheme, host and port; None if it is no node's address."""
    try:
        where = urlsplit(address)
        host, port = where.hostname, where.port
    except ValueError:  # a port that is no number, half a pair of brackets
        return None
    return (where.scheme, host, port) if where.scheme in ("grpc", "grpc+tcp", TLS) and host and port else None


def _why_unreached(error: OSError) -> str:
    if isinstance(error, socket.gaierror):
        return "the name is not known here: check it, or use the address"
    if isinstance(error, ConnectionRefusedError):
        return "nothing listens there: start headwater serve, and check --listen and the port"
    return "a firewall, a wrong address, or a machine that is down: ask whoever runs the network to open the port"


def _certificate(part: str, host: str, port: int, access: Access) -> Finding:
    try:
        context = ssl.create_default_context(cafile=None if access.tls_ca is None else str(access.tls_ca))
        if access.tls_cert is not None:
            context.load_cert_chain(access.tls_cert, access.tls_key)
    except OSError as error:  # SSLError is one
        return Finding(part, "TLS", WRONG, f"a file of ours can't be used: {error.strerror or error}",
                       "HEADWATER_TLS_CA, HEADWATER_TLS_CERT and HEADWATER_TLS_KEY name files in PEM")  # fmt: skip
    context.set_alpn_protocols(["h2"])
    try:
        with (
            socket.create_connection((host, port), timeout=CONNECT_WITHIN_S) as plain,
            context.wrap_socket(plain, server_hostname=host) as found,
        ):
            said: Any = found.getpeercert()
    except ssl.SSLCertVerificationError as error:
        return Finding(
            part,
            "TLS",
            WRONG,
            error.verify_message,
            "name who signed it in HEADWATER_TLS_CA, or make one for this name (docs/access.md)",
        )
    except (ssl.SSLError, OSError) as error:
        return Finding(
            part,
            "TLS",
            WRONG,
            f"no TLS there ({getattr(error, 'reason', None) or error})",
            "name it as grpc://, or serve with --tls-cert; with --tls-client-ca it wants a certificate of "
            "yours (HEADWATER_TLS_CERT, HEADWATER_TLS_KEY)",
        )
    left_days = (ssl.cert_time_to_seconds(said["notAfter"]) - time.time()) / 86400
    fine = left_days >= CERTIFICATE_DAYS
    return Finding(
        part,
        "TLS",
        OK if fine else NOTE,
        f"the certificate is good for {left_days:.0f} days",
        "" if fine else "make a new one soon, and start the node with it",
    )


def _node(part: str, client: NodeClient, seconds: float) -> Iterator[Finding]:
    trips, skews, said = [], [], {}
    for _ in range(NUM_ASKED):
        asked, asked_s = time.perf_counter(), time.time()
        said = client.hello()
        trips.append(time.perf_counter() - asked)
        if isinstance(there := said.get("at_s"), int | float):
            skews.append(there - (asked_s + trips[-1] / 2))
    yield Finding(part, "token", OK, "lets us in to " + redact(", ".join(said["roots"])))
    same = said.get("headwater") == VERSION
    yield Finding(
        part,
        "version",
        OK if same else NOTE,
        f"{said.get('headwater')}" + ("" if same else f", here {VERSION}"),
        "" if same else "they speak the same protocol; numbers in the last bits may differ: install one version",
    )
    if skews:
        skew = min(skews, key=abs)
        fine = abs(skew) < SKEW_S
        yield Finding(
            part,
            "clock",
            OK if fine else WRONG,
            f"{abs(skew):.1f} s {'ahead of' if skew > 0 else 'behind'} ours",
            "" if fine else "tokens and certificates go by it: turn on NTP (timedatectl set-ntp true) on both",
        )
    yield Finding(part, "latency", OK, f"{1e3 * min(trips):.1f} ms a question, there and back")
    if said.get("draining"):
        yield Finding(
            part, "state", NOTE, "it is being stopped and takes nothing new", "start it again, or name others"
        )
    if said.get("cache_fault"):
        yield Finding(
            part,
            "cache",
            NOTE,
            f"keeps no rows: {said['cache_fault']}",
            "epochs after the first are made anew; headwater serve --cache-size, --cache-dir",
        )
    if not said.get("draining"):
        down, up, _ = client.measure_link(seconds)
        yield Finding(part, "link", OK, f"{down / 1e6:,.3g} MB/s from the node, {up / 1e6:,.3g} MB/s to it (measured)")
    yield Finding(
        part, "node", OK, f"{said['cores']:g} cores, {said['memory_bytes'] / 1e9:.1f} GB, {said.get('engine_versions')}"
    )
