"""Checks of this process's own certificate, before a peer finds fault with it.

A TLS library tells only that a handshake failed, and mostly on the other machine. Here the reason
is known: a key of another certificate, another authority, a date, a wrong role or rank.
"""

from __future__ import annotations

from datetime import datetime, timezone

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    PublicFormat,
    load_pem_private_key,
)

from graphsplit.errors import ConfigurationError
from graphsplit.security.names import DOMAIN, SCHEDULER, CertifiedName, holder_of
from graphsplit.security.options import SecurityOptions

_MAKE = "make new ones by `graphsplit certs`, or ask whoever made this one"


def checked_name(
    options: SecurityOptions,
    authority: bytes,
    chain: bytes,
    key: bytes,
    *,
    role: str,
    rank: int | None,
) -> CertifiedName:
    """The holder of this process's certificate, after checking that it may be that.

    Raises:
        ConfigurationError: The files are not what they should be, or do not fit each other, or
            this process; names the file.
    """
    authorities = _certificates("GS_TLS_CA", options.tls_ca, authority)
    certificates = _certificates("GS_TLS_CERT", options.tls_cert, chain)
    own = certificates[0]
    where = f"GS_TLS_CERT={options.tls_cert!r}"
    _check_key(options, own, key)
    _check_dates(where, own)
    # With certificates in between, finding the way to the authority is the TLS library's task.
    if len(certificates) == 1:
        _check_signature(where, options, own, authorities)
    return _check_name(where, own, role=role, rank=rank)


def _certificates(variable: str, path: str, content: bytes) -> list[x509.Certificate]:
    try:
        return x509.load_pem_x509_certificates(content)
    except ValueError:
        raise ConfigurationError(
            f"{variable}={path!r} holds no certificate\n    expected: PEM, which begins with "
            f"-----BEGIN CERTIFICATE-----\n    Fix: {_MAKE}"
        ) from None


def _check_key(options: SecurityOptions, own: x509.Certificate, key: bytes) -> None:
    where = f"GS_TLS_KEY={options.tls_key!r}"
    try:
        private = load_pem_private_key(key, None)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        raise ConfigurationError(
            f"{where} holds no private key that can be used\n    expected: PEM without a "
            f"password\n    Fix: {_MAKE}"
        ) from None
    form = Encoding.DER, PublicFormat.SubjectPublicKeyInfo
    if private.public_key().public_bytes(*form) != own.public_key().public_bytes(*form):
        raise ConfigurationError(
            f"{where} is not the key of the certificate in GS_TLS_CERT={options.tls_cert!r}\n"
            f"    Fix: name the two files that were made together"
        )


def _check_dates(where: str, own: x509.Certificate) -> None:
    now = datetime.now(timezone.utc)
    first, last = own.not_valid_before_utc, own.not_valid_after_utc
    if not first <= now <= last:
        raise ConfigurationError(
            f"{where} is valid from {first:%Y-%m-%d %H:%M} to {last:%Y-%m-%d %H:%M} UTC; now it is "
            f"{now:%Y-%m-%d %H:%M}\n    Fix: {_MAKE}, and look at this machine's clock"
        )


def _check_signature(
    where: str,
    options: SecurityOptions,
    own: x509.Certificate,
    authorities: list[x509.Certificate],
) -> None:
    for authority in authorities:
        try:
            own.verify_directly_issued_by(authority)
            return
        except (ValueError, TypeError, InvalidSignature):
            continue
    raise ConfigurationError(
        f"{where} was signed by {own.issuer.rfc4514_string() or 'nobody'}, which is not in "
        f"GS_TLS_CA={options.tls_ca!r}\n    Fix: all processes need certificates of one authority"
    )


def _check_name(where: str, own: x509.Certificate, *, role: str, rank: int | None) -> CertifiedName:
    wanted = CertifiedName(role, rank)
    try:
        extension = own.extensions.get_extension_for_class(x509.SubjectAlternativeName)
        dns_names = extension.value.get_values_for_type(x509.DNSName)
    except x509.ExtensionNotFound:
        dns_names = []
    holder = holder_of(dns_names)
    if holder is None:
        shown = ", ".join(dns_names[:8]) or "none"
        raise ConfigurationError(
            f"{where} does not say who holds it: its DNS names are {shown}\n"
            f"    expected: one name of {DOMAIN}, here {wanted.dns}\n    Fix: {_MAKE}"
        )
    if holder.role != role or (None not in (rank, holder.rank) and rank != holder.rank):
        variable = "MS_ROLE" if holder.role != role or role == SCHEDULER else "MS_NODE_ID"
        raise ConfigurationError(
            f"{where} is for {holder} ({holder.dns}), and this process is {wanted} ({variable})\n"
            f"    expected: a certificate for {wanted.dns}\n"
            f"    Fix: give every process the certificate of its own role and rank"
        )
    return holder
