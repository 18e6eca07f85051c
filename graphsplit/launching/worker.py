"""A worker of ``gs.launch``: the program ``python -m graphsplit.launching.worker FILE FILE...``."""

from __future__ import annotations

import os
import sys

from graphsplit.encoding import memory_files as files
from graphsplit.job import joined
from graphsplit.launching import call, outcome


def main() -> None:
    """Call the function of the first file; leave what it returns in the file of this rank."""
    first, *results = map(int, sys.argv[1:])
    own = results[int(os.environ["MS_NODE_ID"])]
    try:
        wanted = call.received(files.read(first))
        joined.init_for_call()
        value = wanted.fn(*wanted.args, **wanted.kwargs)
        pieces = outcome.returned(value, function=call.name_of(wanted.fn))
    except Exception as error:
        files.write(own, outcome.raised(error))
        raise
    files.write(own, pieces)


if __name__ == "__main__":
    main()
