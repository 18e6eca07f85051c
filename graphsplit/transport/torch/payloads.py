"""Large payloads under way: the receive of one is posted while those before it still arrive.

Gloo sends a large payload once its receive is posted, and hears of that on the way back, behind all
that goes this way. Were each posted when the one before it is there, two workers that send to each
other would wait for that at every piece, and use half of a cable. So some are posted ahead: the
reader posts and reads on, and another thread waits for them, in their order::

    reader      header 0, post 0 | header 1, post 1 | header 2 | ...
    this        payload 0 ........ file, post 2 | payload 1 ........ file | ...

All pieces of a payload are posted at once; the next payload's when few are left to come, for what
they let come is in the way of what the peer says on its way here.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any, NamedTuple

import torch

from graphsplit.errors import GraphsplitError
from graphsplit.transport.torch.wire import FOREVER

NUM_POSTED = 3  # with fewer receives of pieces under way, those of the next payload are posted

Post = Callable[[torch.Tensor], Any]


class _Item(NamedTuple):
    """The receives of a payload, once they are posted, and what is done after them."""

    pieces: Sequence[torch.Tensor]
    post: Post
    works: SimpleQueue[list[Any]]
    act: Callable[[], object]


class Payloads:
    """The payloads of one link. Only who has the turn to read calls ``after``.

    Args:
        name: Of the thread, which begins with the first payload.
        end: Called with what ended the link.
    """

    def __init__(self, name: str, end: Callable[[Exception], None]) -> None:
        self._name, self._end = name, end
        self._items: SimpleQueue[_Item | None] = SimpleQueue()
        self._num_put = self._num_done = 0  # each is counted by one thread
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()  # of the two below
        self._to_post: deque[_Item] = deque()
        self._num_posted = 0

    def are_under_way(self) -> bool:
        """Whether some are, or something that waits for them."""
        return self._num_put > self._num_done

    def after(self, pieces: Sequence[torch.Tensor], post: Post, act: Callable[[], object]) -> None:
        """Receive, and then act; what came before is done first.

        Args:
            pieces: Memory to receive; without any it is done at once where nothing is under way.
            post: Posts the receive of a piece.
            act: Called then.
        """
        if not pieces and not self.are_under_way():
            act()
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
        item = _Item(pieces, post, SimpleQueue(), act)
        self._num_put += 1
        self._items.put(item)
        with self._lock:
            self._to_post.append(item)
            self._post()

    def stop(self, timeout_s: float) -> None:
        """End the thread of a link that has ended."""
        self._items.put(None)
        if self._thread is not None:
            self._thread.join(timeout_s)

    def _post(self) -> None:
        while self._to_post and self._num_posted < NUM_POSTED:
            item = self._to_post.popleft()
            item.works.put([item.post(piece) for piece in item.pieces])
            self._num_posted += len(item.pieces)

    def _run(self) -> None:
        while (item := self._items.get()) is not None:
            try:
                works, few = item.works.get(), NUM_POSTED - 1
                for part in (works[:-few], works[-few:]):
                    for work in reversed(part):  # they come in order: one wait for all of them
                        work.wait(FOREVER)
                    with self._lock:
                        self._num_posted -= len(part)
                        self._post()
                item.act()
            except (GraphsplitError, RuntimeError) as raised:
                self._end(raised)
                return
            del item  # it holds the value
            self._num_done += 1
