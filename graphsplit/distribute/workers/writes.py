"""When tensors of networks were written to, as far as all workers know."""

from __future__ import annotations

from collections.abc import Iterable

_MOST = 100


class CountedWrites:
    """Counts writes that all workers make; each may be to some of the tensors.

    Attributes:
        count: How many there were.
    """

    def __init__(self) -> None:
        self.count = 0
        self._latest: dict[frozenset[int], int] = {}
        self._to_all = 0

    def note(self, ids: Iterable[int] | None) -> None:
        """Count one.

        Args:
            ids: The ids of the tensors, and of the optimizer, that it may have written to; None:
                of all.
        """
        self.count += 1
        if ids is None or len(self._latest) >= _MOST:
            self._latest, self._to_all = {}, self.count
        if ids is not None:
            self._latest[frozenset(ids)] = self.count

    def latest(self, ids: frozenset[int], *, is_sure: bool = True) -> int:
        """The number of the latest one to any of some tensors or optimizers.

        Args:
            ids: Their ids.
            is_sure: Whether those that no write was counted for were written to by none.
        """
        found = (n for noted, n in self._latest.items() if not ids.isdisjoint(noted))
        return max(found, default=self._to_all if is_sure else self.count)
