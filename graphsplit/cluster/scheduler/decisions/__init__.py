"""The scheduler's decisions: one concern per file, as functions over ``JobState``. Pure.

Who comes and goes is told in the order in which a job lives; each file calls only those below it::

    joining       a process registers: it is enlisted, refused, or waits for a rank
    returning     a known worker is back on another stream
    liveness      a worker is heard from, falls silent, fails, is lost
    gathering     all workers meet at a barrier, an agreement or the finish
    recovery      a generation is left because a worker was lost
    generations   vacant ranks are filled, a generation is planned, and runs
    ending        the job finishes, fails, or is stopped; everybody leaves
    durable       what is written down, and how a job goes on from it
    view          what is going on, for those who ask

``state_machine`` hands every event to one of them; all look at the values in ``job``.
"""
