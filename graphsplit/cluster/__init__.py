"""The control plane: a scheduler and its workers, from registration to release.

::

    settings = ClusterSettings.from_environ(os.environ)

    serve(settings)                                 # scheduler.server: MS_ROLE=MS_SCHED

    member = Member.join(settings, endpoints={...}, identity=..., abort=AbortSignal())
    member.rank, member.num_workers, member.peers   # member.member: MS_ROLE=MS_WORKER
    member.agree("plan 0", plan.dump())
    member.position.progress += 1
    member.finish()
    member.close()

From what knows most to what knows least::

    scheduler/    the scheduler's process: who takes part, which generation runs, how the job ends
    member/       a worker's part in the job
    status/       what a visitor is told, and what is made of it
    wire/         the messages, their fields and bounds, and the bytes that they travel as
    text          sentences for people

All rules live in two pure state machines, ``scheduler.state_machine`` over
``scheduler.decisions``, and ``member.state_machine``, which map a message and a clock reading to
effects. ``scheduler.server`` and ``member.connection`` are thin shells that carry the effects out
over one gRPC stream per worker. Nothing here imports torch.
"""
