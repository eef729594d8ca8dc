"""What a trainer shows at a node's door: a token, and certificates for TLS.

Owns `Access`, where it comes from (arguments, then the environment), and when a token may travel.
"""

from __future__ import annotations

import os
import ssl
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pyarrow.flight as flight

from headwater.core.access import is_loopback, token_fault
from headwater.errors import ConfigError

SCHEMES = ("grpc", "grpc+tcp", "grpc+tls", "grpc+unix")
TLS = "grpc+tls"
_NAMES = {"token": "HEADWATER_TOKEN", "tls_ca": "HEADWATER_TLS_CA", "tls_cert": "HEADWATER_TLS_CERT",
          "tls_key": "HEADWATER_TLS_KEY"}  # fmt: skip

PathLike = str | os.PathLike[str]


@dataclass(frozen=True)
class Access:
    """A token, and files in PEM: whom to trust as a node, and who we are. All of it is optional."""

    token: str | None = field(default=None, repr=False)
    tls_ca: PathLike | None = None
    tls_cert: PathLike | None = None
    tls_key: PathLike | None = None

    @classmethod
    def of(cls, **given: Any) -> Access:
        """What was given, and the environment where nothing was."""
        return cls(**{name: given.get(name) or os.environ.get(variable) or None for name, variable in _NAMES.items()})

    def __post_init__(self) -> None:
        if self.token is not None and (fault := token_fault(self.token)):
            raise ConfigError(f"token: {fault}")
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ConfigError("give tls_cert and tls_key together, a certificate and its key, or neither")

    def connect(self, address: str, options: Sequence[tuple[str, int]]) -> flight.FlightClient:
        """Open a way to a node; ConfigError if the token would be seen by others, or a certificate can't be used."""
        scheme = address.partition("://")[0]
        if scheme not in SCHEMES or "://" not in address:
            raise ConfigError(f"a node's address looks like grpc://host:8815 or grpc+tls://host:8815, not {address!r}")
        if self.token and scheme in ("grpc", "grpc+tcp") and not is_loopback(urlsplit(address).hostname or ""):
            raise ConfigError(f"a token is not sent to {address} in the open; use grpc+tls:// (a node speaks TLS with "
                              "--tls-cert and --tls-key), or give no token")  # fmt: skip
        tls = self._tls_options() if scheme == TLS else {}
        middleware = [_Bearer(self.token)] if self.token else []
        return flight.connect(address, generic_options=list(options), middleware=middleware, **tls)

    def _tls_options(self) -> dict[str, Any]:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        options: dict[str, Any] = {}
        if self.tls_ca is not None:
            try:
                context.load_verify_locations(self.tls_ca)
                options["tls_root_certs"] = Path(self.tls_ca).read_bytes()
            except (OSError, ValueError) as error:
                raise ConfigError(f"tls_ca {os.fspath(self.tls_ca)} can't be used: {_why(error)}; give the certificate "
                                  "in PEM of the authority that signed the node's") from None  # fmt: skip
        if self.tls_cert is not None and self.tls_key is not None:
            try:
                context.load_cert_chain(self.tls_cert, self.tls_key, password="")
                options["cert_chain"] = Path(self.tls_cert).read_bytes()
                options["private_key"] = Path(self.tls_key).read_bytes()
            except (OSError, ValueError) as error:
                raise ConfigError(
                    f"tls_cert {os.fspath(self.tls_cert)} and tls_key {os.fspath(self.tls_key)} can't be used: "
                    f"{_why(error)}; give a certificate in PEM and the key that it was made for, without a password"
                ) from None
        return options


def _why(error: Exception) -> str:
    return str(getattr(error, "reason", "") or getattr(error, "strerror", "") or error)


class _Bearer(flight.ClientMiddlewareFactory):
    """Every call carries the token, whoever makes it."""

    def __init__(self, token: str) -> None:
        super().__init__()
        self._call = _Call(token)

    def start_call(self, info: flight.CallInfo) -> flight.ClientMiddleware:
        return self._call


class _Call(flight.ClientMiddleware):
    def __init__(self, token: str) -> None:
        super().__init__()
        self._headers = {"authorization": f"Bearer {token}"}

    def sending_headers(self) -> dict[str, str]:
        return self._headers
