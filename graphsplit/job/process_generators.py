"""The generators of random numbers that Python and NumPy keep for a whole process.

Data sets and samplers draw from them, and so may a script between steps. A state travels as numbers
of a fixed size, never as a pickle::

    Python    625 words u32 | whether a Gaussian is kept u8 | that Gaussian f64
    NumPy     624 words u32, position u32 | whether a Gaussian is kept u8 | that Gaussian f64
"""

from __future__ import annotations

import _random
import random
import struct
from ctypes import c_char
from typing import Any, NamedTuple

import numpy as np

from graphsplit.errors import ConfigurationError

_WORDS = 624  # of a Mersenne Twister; its position comes after them
_FORM = struct.Struct(f"<{_WORDS + 1}IBd")
STATE_BYTES = _FORM.size
_PYTHON_VERSION = 3  # of what random.getstate() returns
_NUMPY_KIND = "MT19937"
_PYTHON: Any = random.random.__self__  # type: ignore[attr-defined]  # what the module draws from
_HEAD_BYTES = object.__basicsize__  # of every Python object; its own memory comes behind it
_PYTHON_BYTES = _random.Random.__basicsize__ - _HEAD_BYTES
# The words and the position of Python's generator.
_PYTHON_MEMORY = (c_char * _PYTHON_BYTES).from_address(id(_PYTHON) + _HEAD_BYTES)


class ProcessStates(NamedTuple):
    """The states of Python's and NumPy's generators; empty where there is nothing to tell."""

    python: bytes = b""
    numpy: bytes = b""

    @classmethod
    def now(cls) -> ProcessStates:
        """Both, as they are; not that of a generator that the script has put in NumPy's place."""
        return cls(python_state(), numpy_state() if _is_numpys_own() else b"")

    def put(self) -> None:
        """Set what is told."""
        if self.python:
            set_python_state(self.python)
        if self.numpy:
            set_numpy_state(self.numpy)


NOTHING_DRAWN = ProcessStates()


def is_state(data: bytes) -> bool:
    """Whether some bytes from outside are a state of either generator."""
    if len(data) != STATE_BYTES:
        return False
    *_, position, has_gauss, _ = _FORM.unpack(data)
    return bool(position <= _WORDS and has_gauss <= 1)


def python_state() -> bytes:
    """The state of Python's generator."""
    _, words, gauss = random.getstate()
    return _FORM.pack(*words, gauss is not None, gauss or 0.0)


def set_python_state(data: bytes) -> None:
    """Set what ``python_state`` gave."""
    *words, has_gauss, gauss = _FORM.unpack(data)
    random.setstate((_PYTHON_VERSION, tuple(words), gauss if has_gauss else None))


def numpy_state() -> bytes:
    """The state of NumPy's generator.

    Raises:
        ConfigurationError: The script has put another kind of generator in its place.
    """
    state: Any = np.random.get_state(legacy=False)
    if state["bit_generator"] != _NUMPY_KIND:
        raise ConfigurationError(
            f"numpy.random draws from a {state['bit_generator']}; expected {_NUMPY_KIND}, whose "
            f"state workers can tell each other\n"
            f"  Fix: leave out numpy.random.set_bit_generator."
        )
    words, position = state["state"]["key"], state["state"]["pos"]
    return _FORM.pack(*words.tolist(), position, state["has_gauss"], state["gauss"])


def set_numpy_state(data: bytes) -> None:
    """Set what ``numpy_state`` gave."""
    *words, position, has_gauss, gauss = _FORM.unpack(data)
    key = np.array(words, dtype=np.uint32)
    np.random.set_state((_NUMPY_KIND, key, position, has_gauss, gauss))


class GeneratorWatch:
    """Tells cheaply whether Python's and NumPy's generators were drawn from since it last looked.

    It is asked once for each batch. A state is read, which takes 10 to 50 us, only where the memory
    that it lies in has changed; and of NumPy's always, once it was seen to keep a Gaussian, which
    lies elsewhere, and may have been taken or put back.
    """

    def __init__(self) -> None:
        self._python_memory: Any = None
        self._numpy: bytes | None = None
        self._generator: Any = None  # NumPy's, and the memory of its words and its position
        self._words: Any = None
        self._numpy_memory: Any = None
        self._has_kept_gauss = False

    def look(self) -> ProcessStates:
        """The states; empty where nothing was drawn.

        At the first look both are told.

        Raises:
            ConfigurationError: NumPy's has been drawn from, and is of another kind.
        """
        python, numpy = (_PYTHON_MEMORY.raw, _PYTHON.gauss_next), self._memory_of_numpy()
        is_same, self._python_memory = python == self._python_memory, python
        if is_same and numpy == self._numpy_memory and not self._has_kept_gauss:
            return NOTHING_DRAWN  # as at most steps
        return ProcessStates(b"" if is_same else python_state(), self._look_at_numpy(numpy))

    def _memory_of_numpy(self) -> Any:
        """The words and the position of NumPy's generator; a text for one of another kind."""
        generator: Any = np.random.get_bit_generator()  # type: ignore[attr-defined]
        if generator is not self._generator:
            self._generator, self._words = generator, None
            if _is_numpys_own():
                size, address = 4 * (_WORDS + 1), generator.ctypes.state_address
                self._words = (c_char * size).from_address(address)
        return str(generator.state) if self._words is None else self._words.raw

    def _look_at_numpy(self, memory: Any) -> bytes:
        is_first, before = self._numpy_memory is None, self._numpy_memory
        self._numpy_memory = memory
        if memory == before and not self._has_kept_gauss:
            return b""
        if isinstance(memory, str) and is_first:
            return b""
        state = numpy_state()
        self._has_kept_gauss |= state[-9] != 0
        if state == self._numpy:
            return b""
        self._numpy = state
        return state


def _is_numpys_own() -> bool:
    return type(np.random.get_bit_generator()) is np.random.MT19937  # type: ignore[attr-defined]
