"""The node's side of TLS: which files, and whether they fit together. Owns `Tls`."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headwater.errors import ConfigError


@dataclass(frozen=True)
class Tls:
    """A node's certificate and key; with `client_ca`, only clients with a certificate of that authority get in."""

    cert: Path
    key: Path
    client_ca: Path | None = None

    def server_options(self) -> dict[str, Any]:
        """For `FlightServerBase`; ConfigError with the way out if the files can't be used."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            pair = self.cert.read_bytes(), self.key.read_bytes()
            context.load_cert_chain(self.cert, self.key, password="")  # one that is locked is refused, not asked for
        except (OSError, ValueError) as error:
            raise ConfigError(f"--tls-cert {self.cert} and --tls-key {self.key} can't be used: {_why(error)}; give a "
                              "certificate in PEM and the key that it was made for, without a password"
                              ) from None  # fmt: skip
        if self.client_ca is None:
            return {"tls_certificates": [pair]}
        try:
            context.load_verify_locations(self.client_ca)
            authority = self.client_ca.read_bytes()
        except (OSError, ValueError) as error:
            raise ConfigError(f"--tls-client-ca {self.client_ca} can't be used: {_why(error)}; give the certificate in "
                              "PEM of the authority that signs your clients' certificates") from None  # fmt: skip
        return {"tls_certificates": [pair], "verify_client": True, "root_certificates": authority}


def _why(error: Exception) -> str:
    return str(getattr(error, "reason", "") or getattr(error, "strerror", "") or error)
