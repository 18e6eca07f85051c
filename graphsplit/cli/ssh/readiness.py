"""The checks of a host before its processes start: its folder, the script, certificates."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import click

from graphsplit.cli.launch.environment import tls_files
from graphsplit.cli.ssh.frames import Setup
from graphsplit.errors import ConfigurationError
from graphsplit.security.options import SecurityOptions
from graphsplit.security.protection import load_protection


def enter(folder: Path) -> None:
    """Go on in a folder.

    Raises:
        click.ClickException: It is not there.
    """
    try:
        os.chdir(folder)
    except OSError as error:
        home = Path("~").expanduser()
        is_gone = not home.is_dir() and folder.is_relative_to(home)
        what = f"there is no home folder {home}, and so" if is_gone else "there is"
        raise click.ClickException(
            f"{what} no folder {folder} ({error.strerror})\n"
            f"  Fix: make or mount it, or name one that every host has: --workdir DIR"
        ) from None


def digest_of(script: Path) -> str:
    """SHA-256 of the script, in hexadecimal.

    Raises:
        click.ClickException: It is not there, or this user may not read it.
    """
    try:
        return hashlib.sha256(script.read_bytes()).hexdigest()
    except FileNotFoundError:
        raise click.ClickException(
            f"there is no file {script.absolute()}\n  Fix: copy it there, or name the "
            f"folder that has it on every host: --workdir DIR"
        ) from None
    except OSError as error:
        raise click.ClickException(
            f"{script.absolute()} cannot be read ({error.strerror})\n"
            f"  Fix: let this user read it there: chmod u+r"
        ) from None


def require_certificates_of(setup: Setup) -> None:
    """Look at the certificates of this host's processes as these will.

    Raises:
        click.ClickException: One is not there, has expired, or is for somebody else.
    """
    folder = setup.job.certificates
    for holder in setup.holders if folder is not None else ():
        role, _, rank = holder.partition("-")
        ca, certificate, key = tls_files(folder, holder).values()
        options = SecurityOptions(tls_ca=ca, tls_cert=certificate, tls_key=key)
        try:
            load_protection(options, role=role, rank=int(rank) if rank else None)
        except ConfigurationError as error:
            raise click.ClickException(str(error).replace("\n    ", "\n  ")) from None
