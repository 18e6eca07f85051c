"""The protection that variables ask for. Pure: files are read by ``protection``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

TRUSTED_NETWORK = "I_TRUST_THIS_NETWORK"
MIN_TOKEN_CHARS, MAX_TOKEN_CHARS = 16, 1024

_PROTECTIONS = ("GS_JOB_TOKEN", "GS_JOB_TOKEN_FILE", "GS_TLS_CA", "GS_INSECURE")


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
