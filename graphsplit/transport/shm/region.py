"""Memory that two processes share, without a name that could outlive them.

A region is a memfd: it belongs to whoever holds its descriptor or maps it, so the kernel frees
it in every ending, SIGKILL included. Once mapped, the descriptor is closed; the mapping lives
exactly as long as the buffer object that stands for it.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import sys
import weakref

from graphsplit.errors import TransportError

_MAP_SHARED = 0x01
_PROT_READ_WRITE = 0x1 | 0x2
_MADV_POPULATE_WRITE = 23
_MAP_FAILED = ctypes.c_void_p(-1).value
_PAGE = mmap.PAGESIZE
# Values of linux/fcntl.h; the fcntl module has them only where it was built on Linux.
_F_ADD_SEALS, _F_GET_SEALS = 1033, 1034
_F_SEAL_SEAL, _F_SEAL_SHRINK, _F_SEAL_GROW = 0x1, 0x2, 0x4

num_mapped = 0
"""The number of regions that this process has mapped now; for tests."""


def is_supported() -> bool:
    """True where regions can be made."""
    return sys.platform == "linux" and hasattr(os, "memfd_create")


def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [
        *(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int),
        *(ctypes.c_int, ctypes.c_int, ctypes.c_long),
    ]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return libc


_LIBC = _libc() if is_supported() else None


def _unmap(address: int, size_bytes: int) -> None:
    global num_mapped
    assert _LIBC is not None
    num_mapped -= 1
    _LIBC.munmap(address, size_bytes)


class SharedRegion:
    """A mapping of a memfd. It is unmapped when the last view of ``buffer`` is gone.

    Attributes:
        buffer: The mapped bytes, for ``memoryview`` and ``torch.frombuffer``, which keep it alive.
        address: Address of the first byte; valid as long as ``buffer``.
        size_bytes: Size of the mapping.
    """

    def __init__(self, fd: int, size_bytes: int) -> None:
        global num_mapped
        assert _LIBC is not None
        address = _LIBC.mmap(None, size_bytes, _PROT_READ_WRITE, _MAP_SHARED, fd, 0)
        if address == _MAP_FAILED:
            reason = os.strerror(ctypes.get_errno())
            raise TransportError(f"cannot map {size_bytes} bytes of shared memory: {reason}")
        num_mapped += 1
        self.address: int = address
        self.size_bytes = size_bytes
        self.buffer = (ctypes.c_ubyte * size_bytes).from_address(address)
        # At exit the kernel unmaps; doing it earlier could pull memory from under a live thread.
        weakref.finalize(self.buffer, _unmap, address, size_bytes).atexit = False

    def reserve(self, offset: int, size_bytes: int) -> None:
        """Make the pages of a range real, so that touching them can never fail.

        Without this a machine without memory would answer the first touch with SIGBUS.

        Raises:
            TransportError: There is not enough memory.
        """
        assert _LIBC is not None
        start = offset // _PAGE * _PAGE
        length = min(offset + size_bytes, self.size_bytes) - start
        if length > 0 and _LIBC.madvise(self.address + start, length, _MADV_POPULATE_WRITE):
            reason = os.strerror(ctypes.get_errno())
            raise TransportError(
                f"cannot reserve {length} bytes of shared memory: {reason}\n"
                f"  Fix: give the job more memory, or use fewer microbatches"
            )


def _can_populate() -> bool:
    """Whether this kernel knows MADV_POPULATE_WRITE (Linux 5.14)."""
    fd = os.memfd_create("graphsplit-probe", os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, _PAGE)
        SharedRegion(fd, _PAGE).reserve(0, _PAGE)
    except TransportError:
        return False
    finally:
        os.close(fd)
    return True


_populates: bool | None = None


def can_populate() -> bool:
    """Whether pages of a region become real only when they are needed, on this kernel."""
    global _populates
    if _populates is None:
        _populates = _can_populate()
    return _populates


def create_region(name: str, size_bytes: int) -> tuple[SharedRegion, int]:
    """A new region that can never change its size, and the descriptor to pass to the peer.

    Pages become real in ``SharedRegion.reserve``, so memory that is never used is never taken.
    Kernels that cannot do that get all of it at once, here.
    """
    populates = can_populate()
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, size_bytes)
        if not populates:
            os.posix_fallocate(fd, 0, size_bytes)
        fcntl.fcntl(fd, _F_ADD_SEALS, _F_SEAL_SHRINK | _F_SEAL_GROW | _F_SEAL_SEAL)
        return SharedRegion(fd, size_bytes), fd
    except OSError as error:
        os.close(fd)
        raise TransportError(f"cannot make {size_bytes} bytes of shared memory: {error}") from error
    except BaseException:
        os.close(fd)
        raise


def adopt_region(fd: int, size_bytes: int, *, what: str) -> SharedRegion:
    """Map a region that a peer made. Closes ``fd``.

    Raises:
        TransportError: It is not of exactly this size, or could shrink under us (SIGBUS).
    """
    try:
        actual = os.fstat(fd).st_size
        if actual != size_bytes:
            raise TransportError(
                f"{what}: expected {size_bytes} bytes of shared memory, got {actual}"
            )
        try:
            seals = fcntl.fcntl(fd, _F_GET_SEALS)
        except OSError as error:
            raise TransportError(f"{what}: expected a sealed memfd, got another file") from error
        if not seals & _F_SEAL_SHRINK:
            raise TransportError(f"{what}: expected memory sealed against shrinking, got no seal")
        return SharedRegion(fd, size_bytes)
    finally:
        os.close(fd)
