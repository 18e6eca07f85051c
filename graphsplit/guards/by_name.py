"""See which attributes of modules and classes code asks for by names that it computes.

``getattr(settings, name)`` and ``globals()["BETA"]`` leave no name in the code that reads, and a
module calls no hook. So where code uses one of these functions, another of its name stands among
the globals of that code while a network is captured.
"""

from __future__ import annotations

import builtins
import sys
from collections.abc import Callable, Collection, Mapping
from types import CodeType, FunctionType, ModuleType
from typing import Any

from graphsplit.guards.code_facts import CodeFacts
from graphsplit.torch_ext.replaced import note_real

Ask = Callable[[Any, str | None, bool], None]
FUNCTIONS = frozenset(("getattr", "hasattr", "setattr", "delattr", "vars", "globals"))


class AskedByName:
    """Puts such functions into the globals of code, and takes them away again.

    Args:
        ask: ``ask(holder, name, is_read)`` is called for modules, classes and functions before
            they are asked; the name is None where all of them may be read.

    Attributes:
        others: Functions that stand for more of Python's own, by name.
        ask_classes: Called where code names ``__class__`` of what may be a tensor.
    """

    def __init__(self, ask: Ask) -> None:
        self._ask = ask
        self.others: Mapping[str, Any] = {}
        self.ask_classes: Callable[[], None] = lambda: None
        self._put: list[tuple[dict[str, Any], str, Any]] = []

    def answer(self, code: CodeType, facts: CodeFacts, held: dict[str, Any]) -> None:
        """Answer what a piece of code asks in such ways."""
        if code.co_name != "<module>" or code.co_filename.startswith("<"):
            self.watch(held, facts.globals_read)  # what an import runs may keep them
        if "__class__" in facts.attributes:
            self.ask_classes()

    def watch(self, held: dict[str, Any], names: Collection[str]) -> None:
        """Let code with some globals use watched functions for those that it loads by name."""
        for name in (FUNCTIONS | self.others.keys()).intersection(names):
            if name not in held:
                held[name] = self.others.get(name) or self._watched(name, held)
                self._put.append((held, name, held[name]))
                note_real(held[name], getattr(builtins, name))

    def has_put(self, held: Any, name: Any) -> bool:
        """Whether what stands under a name among these globals is one of them."""
        return any(one is held and its == name for one, its, _ in self._put)

    def remove(self) -> None:
        """Let all globals be as they were."""
        for held, name, put in self._put:
            if held.get(name) is put:
                del held[name]
        self._put.clear()

    def _watched(self, name: str, held: dict[str, Any]) -> Callable[..., Any]:
        original: Any = getattr(builtins, name)

        def of_globals() -> dict[str, Any]:
            self._ask(held, None, True)
            for text in _texts():  # globals().get("BETA", 0.5)
                if text not in held:
                    self._ask(held, text, True)
            return held

        def of_all(*one: Any) -> Any:
            if not one:
                return sys._getframe(1).f_locals
            self._tell(one[0], None, is_read=True)
            for text in _texts() if isinstance(one[0], ModuleType) else ():
                self._tell(one[0], text, is_read=True)
            return original(*one)

        def of_one(one: Any, asked: str, *rest: Any) -> Any:
            self._tell(one, asked, is_read=name in ("getattr", "hasattr"))
            return original(one, asked, *rest)

        return {"globals": of_globals, "vars": of_all}.get(name, of_one)

    def _tell(self, one: Any, name: str | None, *, is_read: bool) -> None:
        if isinstance(one, (ModuleType, type, FunctionType)):
            self._ask(one, name, is_read)


def _texts() -> list[str]:
    """The texts in the code that has called a function which asks for this: names, perhaps."""
    texts = (one for one in sys._getframe(2).f_code.co_consts if isinstance(one, str))
    return [text for text in texts if text.isidentifier()]
