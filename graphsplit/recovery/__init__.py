"""Snapshots, and going on from them after workers were lost.

From what knows least to what knows most:

- ``shard``: one worker's part of a snapshot, in memory and as bytes. Pure, as the next two.
- ``results``: what calls returned, as lines of text.
- ``agreement``: from which snapshot all go on.
- ``disk``: snapshots on disk.
- ``replicator``: parts go to their holders beside compute, and count once all are there.
- ``exchange``: what workers tell each other after a loss.
- ``share``: what a worker holds of a Model, copied and put back.
- ``log``: calls since the last snapshot, and how they are run again.
- ``kinds``: what is remembered of each kind of call.
- ``snapshots``: taken, brought away, agreed on, and put back.
- ``script``: the calls of a script that can be taken back.
"""
