"""Build the API reference, as HTML, from the docstrings: ``python docs/build_api.py``."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import pdoc

import graphsplit

OUTPUT = Path(__file__).parent / "_build"
PAGES = (
    "graphsplit",
    "!graphsplit[.]distribute",  # the function of this name is public, not its package
    "graphsplit.train.steps",
    "graphsplit.train.callbacks",
    "graphsplit.train.metrics",
    "graphsplit.optimizers.clip",
    "graphsplit.marks.annotations",
    "graphsplit.capture.opaque.marks",
)


def main(output: Path = OUTPUT) -> None:
    """Write one page per module of ``PAGES``, and an index."""
    for name in graphsplit.__all__:
        # The package hands its names on lazily; pdoc looks at what is there.
        setattr(graphsplit, name, getattr(graphsplit, name))
    warnings.simplefilter("error", UserWarning)
    pdoc.render.configure(docformat="google", footer_text=f"graphsplit {graphsplit.__version__}")
    pdoc.pdoc(*PAGES, output_directory=output)
    print(f"open {output / 'index.html'}")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
