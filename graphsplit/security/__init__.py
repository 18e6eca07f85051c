"""Protects a job: certificates and a job token decide who takes part, and who reads what travels.

::

    protection = load_protection(settings.security, role=..., rank=...)   # protection
    require_protection(host, protection, what="the scheduler")            # before listening
    add_port(server, address, protection)                                 # grpc_ports
    open_channel(address, protection, expected=SCHEDULER_NAME, options=[])

Both planes use the same few functions, and so does whatever else listens. ``names`` binds a
certificate to a role and a rank, ``handshake`` proves on both sides that a secret is known, and
``issue`` makes certificates for ``graphsplit certs``. Nothing here imports torch.
"""
