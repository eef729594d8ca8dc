"""Texts without the secrets in them. Owns `redact`, which knows what secrets look like; imports nothing of ours.

`errors` uses it, so that no message of ours has a secret, wherever it is shown. `data.secrets` adds those that can only
be told by their value.
"""

from __future__ import annotations

import re

TOKEN_START = "hw_"  # of every token, so that one is recognised wherever it turns up
_RULES = (
    (re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)", re.S), "***"),
    (re.compile(rf"\b{TOKEN_START}[A-Za-z0-9_-]{{16,}}"), f"{TOKEN_START}***"),
    (re.compile(r"://[^/@\s]+@"), "://***@"),  # user:password
    (re.compile(r"(?i)([?&](?:sig|signature|token|x-(?:amz|goog)-[a-z-]+)=)[^&\s\"']+"), r"\1***"),
    (re.compile(r"(?i)\b(bearer|basic) [A-Za-z0-9._~+/=-]{8,}"), r"\1 ***"),
    # NAME=value, "name": "value" and name: value, as configurations and requests are printed.
    # A name has an end: with none, a text of nothing but such words would take time with the square of its length.
    (re.compile(r"(?i)((?:secret|password|passwd|session_?token|security_?token|account_?key|sas_?token)\w{0,64}[\"']?"
                r"\s*[=:]\s*[\"']?)(?!\*\*\*)[^\s\"'&,;(){}]{4,}"), r"\1***"),
)  # fmt: skip


def redact(text: str) -> str:
    """The text without tokens, passwords in URLs, signatures in queries, private keys and named secrets."""
    for pattern, instead in _RULES:
        text = pattern.sub(instead, text)
    return text
