from __future__ import annotations

import pytest
from documents import ROOT, Block, blocks

MAX_QUOTE_CHARS = 60


@pytest.mark.parametrize("block", blocks("quoted"), ids=str)
def test_a_quotation_is_in_the_file_that_it_names(block: Block) -> None:
    source = (ROOT / block.name).read_text()
    first = block.text.splitlines()[0][:MAX_QUOTE_CHARS]
    assert block.text in source, (
        f"{block.document} quotes {block.name} as it was (the block that begins with {first!r}); "
        f"copy the new text into the document"
    )


def test_the_documents_name_no_workplace() -> None:
    # What was measured and printed elsewhere is shown as readers would see it.
    for block in [*blocks("snippet"), *blocks("quoted")]:
        assert "/work/" not in block.text
