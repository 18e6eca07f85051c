"""The control plane: a scheduler and its workers, from registration to release.

::

    settings = ClusterSettings.from_environ(os.environ)

    serve(settings)                                 # cluster.scheduler: MS_ROLE=MS_SCHED

    member = Member.join(settings, endpoints={...}, identity=..., abort=AbortSignal())
    member.rank, member.num_workers, member.peers   # cluster.member: MS_ROLE=MS_WORKER
    member.agree("plan 0", plan.dump())
    member.position.progress += 1
    member.finish()
    member.close()

All rules live in two pure state machines, ``scheduler_state`` over ``decisions``, and
``member_state``, which map a message and a clock reading to effects. ``scheduler`` and
``connection`` are thin shells that carry the effects out over one gRPC stream per worker.
Nothing here imports torch.
"""
