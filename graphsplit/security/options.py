"""Reads the variables of protection. Pure: files are read by ``protection``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from ipaddress import ip_network
from typing import Protocol

TRUSTED_NETWORK = "I_TRUST_THIS_NETWORK"
MIN_TOKEN_CHARS, MAX_TOKEN_CHARS = 16, 1024

_TRANSPORT_NAME = re.compile(r"[a-z][a-z0-9_-]{0,31}")
_FILES = ("GS_TLS_CA", "GS_TLS_CERT", "GS_TLS_KEY")
_PROTECTIONS = ("GS_JOB_TOKEN", "GS_JOB_TOKEN_FILE", "GS_TLS_CA", "GS_INSECURE")


class Reader(Protocol):
    """Reads variables and collects what is wrong with them."""

    def text(self, name: str) -> str:
        """The value without the spaces around it; empty if it is not set."""

    def problem(self, name: str, expected: str, fix: str, *, is_secret: bool = False) -> None:
        """Note that a variable is not as it should be."""


@dataclass(frozen=True)
class SecurityOptions:
    """The protection that the user asked for.

    Attributes:
        tls_ca: File with the certificates of the authority that signed all others; empty: no TLS.
        tls_cert: File with this process's certificate.
        tls_key: File with its private key.
        job_token: The secret that all processes of the job share; empty if there is none.
        job_token_file: A file that holds it.
        trusts_network: Whether to listen beyond loopback without any protection.
        unencrypted: Transports that may be used under TLS although they do not encrypt.
        networks: Where workers may listen, other than at the address from which they reach the
            scheduler; in the normal form of ``ipaddress``.
    """

    tls_ca: str = ""
    tls_cert: str = ""
    tls_key: str = ""
    job_token: str = field(default="", repr=False)
    job_token_file: str = ""
    trusts_network: bool = False
    unencrypted: tuple[str, ...] = ()
    networks: tuple[str, ...] = ()

    @property
    def has_tls(self) -> bool:
        """Whether connections are to be encrypted, and both ends to show a certificate."""
        return bool(self.tls_ca)


def token_problem(token: str) -> str | None:
    """The rule for job tokens, if this one breaks it; never shows it."""
    if MIN_TOKEN_CHARS <= len(token) <= MAX_TOKEN_CHARS and token.isascii() and token.isprintable():
        return None
    return f"{MIN_TOKEN_CHARS} to {MAX_TOKEN_CHARS} printable ASCII characters"


TOKEN_FIX = "make one by: python3 -c 'import secrets; print(secrets.token_urlsafe(32))'"


def names_protection(environ: Mapping[str, str]) -> bool:
    """Whether the variables name something that protects a job, or say that it needs nothing."""
    return any(environ.get(name, "").strip() for name in _PROTECTIONS)


def read_options(reader: Reader) -> SecurityOptions:
    """Read the variables of protection; what is wrong is noted with the reader."""
    files = {name: reader.text(name) for name in _FILES}
    for name, value in files.items():
        if not value and any(files.values()):
            fix = "set all three, or none; `graphsplit certs` makes them"
            reader.problem(name, f"a file, as {' and '.join(_FILES)} belong together", fix)
    token, token_file = reader.text("GS_JOB_TOKEN"), reader.text("GS_JOB_TOKEN_FILE")
    expected = token_problem(token) if token else None
    if expected is not None:
        reader.problem("GS_JOB_TOKEN", expected, TOKEN_FIX, is_secret=True)
    if token and token_file:
        expected = "unset, as GS_JOB_TOKEN is set"
        reader.problem("GS_JOB_TOKEN_FILE", expected, "unset one of the two")
    return SecurityOptions(
        tls_ca=files["GS_TLS_CA"],
        tls_cert=files["GS_TLS_CERT"],
        tls_key=files["GS_TLS_KEY"],
        job_token=token,
        job_token_file=token_file,
        trusts_network=_trusts_network(reader),
        unencrypted=_unencrypted(reader),
        networks=_networks(reader),
    )


def _trusts_network(reader: Reader) -> bool:
    value = reader.text("GS_INSECURE")
    if value not in ("", TRUSTED_NETWORK):
        fix = "better: unset it, and protect the job by certificates or by GS_JOB_TOKEN"
        reader.problem("GS_INSECURE", f"{TRUSTED_NETWORK}, or unset", fix)
    return value == TRUSTED_NETWORK


def _networks(reader: Reader) -> tuple[str, ...]:
    try:
        return tuple(str(ip_network(one)) for one in _listed(reader, "GS_WORKER_NETWORKS"))
    except ValueError:
        expected = "IP addresses or networks, with commas between them"
        fix = "for example GS_WORKER_NETWORKS=10.1.0.0/16,192.168.7.3"
        reader.problem("GS_WORKER_NETWORKS", expected, fix)
        return ()


def _listed(reader: Reader, name: str) -> list[str]:
    parts = (part.strip() for part in reader.text(name).split(","))
    return [part for part in parts if part]


def _unencrypted(reader: Reader) -> tuple[str, ...]:
    names = tuple(_listed(reader, "GS_ALLOW_UNENCRYPTED"))
    if not all(_TRANSPORT_NAME.fullmatch(name) for name in names):
        expected = "names of transports, with commas between them"
        reader.problem("GS_ALLOW_UNENCRYPTED", expected, "for example GS_ALLOW_UNENCRYPTED=gloo")
        return ()
    return names
