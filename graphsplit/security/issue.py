"""Makes a test authority and certificates for a job: a folder that ``graphsplit certs`` fills.

::

    ca.pem  ca.key                    the authority; the key signs more, and belongs on no worker
    scheduler.pem  scheduler.key      scheduler.graphsplit.internal; can only be a server
    worker-0.pem  worker-0.key  ...   worker-0.graphsplit.internal

Keys are on the curve P-256, and only their owner can read them.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from graphsplit.errors import ConfigurationError
from graphsplit.security.names import DOMAIN, SCHEDULER, WORKER, CertifiedName
from graphsplit.security.private_files import write_new_file

_CLOCK_SKEW = timedelta(minutes=5)
_SERVER, _CLIENT = ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH
_Extension = tuple[x509.ExtensionType, bool]


@dataclass(frozen=True)
class Authority:
    """Signs certificates. Make one with ``create``, or read one from a folder."""

    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey

    @classmethod
    def create(cls, *, days: int) -> Authority:
        """A new authority, which trusts nobody and whom nobody trusts yet."""
        key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "graphsplit test authority")])
        extensions: list[_Extension] = [
            (x509.BasicConstraints(ca=True, path_length=0), True),
            (_key_usage(is_authority=True), True),
            (x509.SubjectKeyIdentifier.from_public_key(key.public_key()), False),
        ]
        return cls(_signed(name, name, key, key, days, extensions), key)

    @classmethod
    def read(cls, folder: Path) -> Authority:
        """The authority of a folder.

        Raises:
            ConfigurationError: Its files are not what ``write`` made.
        """
        try:
            certificate = x509.load_pem_x509_certificate((folder / "ca.pem").read_bytes())
            key = load_pem_private_key((folder / "ca.key").read_bytes(), None)
        except (OSError, ValueError, TypeError) as error:
            raise ConfigurationError(
                f"{folder} holds no authority that can sign: {error}\n"
                f"  Fix: choose a new folder, and give all processes its certificates"
            ) from None
        if not isinstance(key, ec.EllipticCurvePrivateKey):
            raise ConfigurationError(f"{folder / 'ca.key'} is no key on an elliptic curve")
        return cls(certificate, key)

    def write(self, folder: Path) -> None:
        """Write ``ca.pem`` and ``ca.key``, which must not be there."""
        write_new_file(folder / "ca.key", _pem_of(self.key), mode=0o600)
        write_new_file(folder / "ca.pem", self.pem, mode=0o644)

    @property
    def pem(self) -> bytes:
        """The authority's certificate."""
        return self.certificate.public_bytes(Encoding.PEM)

    def issue(
        self, holder: CertifiedName, *, days: int, hosts: Sequence[str] = ()
    ) -> tuple[bytes, bytes]:
        """A certificate, and its key, in PEM.

        The scheduler's is no good for a client, so it can never register as a worker.

        Args:
            holder: Whom it is for.
            days: How long it is valid; never longer than the authority.
            hosts: More names and addresses under which the holder may be reached.

        Raises:
            ConfigurationError: A host is a name of another holder, or the authority has expired.
        """
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, holder.dns)])
        names = [x509.DNSName(holder.dns), *map(_host_name, hosts)]
        uses = [_SERVER] if holder.role == SCHEDULER else [_SERVER, _CLIENT]
        authority_key = x509.AuthorityKeyIdentifier.from_issuer_public_key(self.key.public_key())
        extensions: list[_Extension] = [
            (x509.BasicConstraints(ca=False, path_length=None), True),
            (_key_usage(is_authority=False), True),
            (x509.ExtendedKeyUsage(uses), False),
            (x509.SubjectAlternativeName(names), False),
            (authority_key, False),
        ]
        last = self.certificate.not_valid_after_utc
        signed = _signed(
            subject, self.certificate.subject, key, self.key, days, extensions, not_after=last
        )
        return signed.public_bytes(Encoding.PEM), _pem_of(key)


def fill_folder(folder: Path, *, num_workers: int, hosts: Sequence[str], days: int) -> list[str]:
    """Make what is missing in a folder, and change nothing that is there.

    Returns:
        The names of the files that were made.

    Raises:
        ConfigurationError: The folder holds files that do not belong together.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    made = []
    if (folder / "ca.pem").exists() or (folder / "ca.key").exists():
        authority = Authority.read(folder)
    else:
        authority = Authority.create(days=days)
        authority.write(folder)
        made = ["ca.pem", "ca.key"]
    holders = [CertifiedName(SCHEDULER)]
    holders += [CertifiedName(WORKER, rank) for rank in range(num_workers)]
    for holder in holders:
        stem = holder.dns.removesuffix(f".{DOMAIN}")
        certificate, key = folder / f"{stem}.pem", folder / f"{stem}.key"
        if certificate.exists() and key.exists():
            continue
        pem, key_pem = authority.issue(holder, days=days, hosts=hosts)
        try:
            write_new_file(key, key_pem, mode=0o600)
            write_new_file(certificate, pem, mode=0o644)
        except FileExistsError as error:
            raise ConfigurationError(
                f"{error.filename} is there, but not the other one of the pair {stem}.pem and "
                f"{stem}.key\n  Fix: remove it, and run this again"
            ) from None
        made += [certificate.name, key.name]
    return made


def _host_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        pass
    if host.lower().rstrip(".").endswith(DOMAIN):
        raise ConfigurationError(
            f"--hosts {host}: names of {DOMAIN} say who holds a certificate\n"
            f"  Fix: give the names of machines alone"
        )
    try:
        return x509.DNSName(host)
    except ValueError:
        raise ConfigurationError(
            f"--hosts {host!r} is no host name and no address\n"
            f"  Fix: write it in ASCII, without a port"
        ) from None


def _key_usage(*, is_authority: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not is_authority,
        key_cert_sign=is_authority,
        crl_sign=is_authority,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _signed(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePrivateKey,
    signer: ec.EllipticCurvePrivateKey,
    days: int,
    extensions: Sequence[_Extension],
    *,
    not_after: datetime | None = None,
) -> x509.Certificate:
    now = datetime.now(timezone.utc)
    last = now + timedelta(days=days)
    if not_after is not None and not_after < now:
        raise ConfigurationError(
            f"the authority's certificate expired at {not_after:%Y-%m-%d %H:%M} UTC\n"
            f"  Fix: choose a new folder, and give all processes its certificates"
        )
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _CLOCK_SKEW)
        .not_valid_after(last if not_after is None else min(last, not_after))
    )
    for extension, is_critical in extensions:
        builder = builder.add_extension(extension, critical=is_critical)
    return builder.sign(signer, hashes.SHA256())


def _pem_of(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
