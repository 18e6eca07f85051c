"""Makes ``python -m graphsplit`` the same as ``graphsplit``."""

from __future__ import annotations

from graphsplit.cli.main import main

if __name__ == "__main__":
    main(prog_name="graphsplit")
