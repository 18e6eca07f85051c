"""A job on other hosts, over the system's SSH client: ``graphsplit run -H a:2,b:3 train.py``.

The launcher supervises every process by itself, as on one machine. An agent on each host starts
them, hands on what they write, and ends them all when its connection closes.
"""
