"""Loops of the script's own that survive the loss of a worker: ``gs.loop``.

A loop's body cannot be taken back: it is Python. So after a loss *all* workers start their script
anew, and the loop begins at the batch of the last snapshot, with everything put back::

    lost      a process that is started again: it has nothing
    survivors put a new process in the place of their own, and hand over their parts of snapshots
    all       run the script from its first line; ``gs.loop`` goes on at an agreed snapshot

- ``anew``: a process that starts its script again, and what it hands over. I/O.
- ``text``: what a loop's body carries from one batch to the next, by its text. Pure.
- ``body``: what it changes, in its frame.
- ``kept``: objects of the script, copied and put back.
- ``networks``: distributed networks and their optimizers, copied and put back.
- ``snapshots``: taken, brought away, agreed on.
- ``rounds``: one loop that runs, and how it is begun in its middle.
- ``script``: the loops that run, one inside the other, and where they stand.
- ``loop``: what users call.
"""
