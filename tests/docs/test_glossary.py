"""Words that the glossary has put out do not come back."""

from __future__ import annotations

import re

import pytest
from documents import ROOT, table

_ROWS = table(ROOT / "docs" / "reference" / "glossary.md", "table: words")
OUT = sorted({word for row in _ROWS for word in re.findall(r"\w+", row[2])})
CODE = {path: path.read_text() for path in (ROOT / "graphsplit").rglob("*.py")}


@pytest.mark.parametrize("word", OUT)
def test_a_word_that_is_out_stays_out(word: str) -> None:
    found = re.compile(rf"\b{word}\b")
    assert not [str(path) for path, text in CODE.items() if found.search(text)]


def test_words_stand_in_the_order_of_the_alphabet() -> None:
    words = [row[0] for row in _ROWS]
    assert words == sorted(words)
