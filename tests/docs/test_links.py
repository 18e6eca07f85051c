from __future__ import annotations

from pathlib import Path

import pytest
from documents import ROOT, anchors, documents, links


@pytest.mark.parametrize("document", documents(), ids=lambda path: str(path.relative_to(ROOT)))
def test_every_relative_link_leads_somewhere(document: Path) -> None:
    broken = [link for link in links(document) if not _resolves(document, link)]
    assert not broken, f"{document}: {broken}"


def test_the_index_lists_a_document_once() -> None:
    listed = links(ROOT / "docs" / "README.md")
    assert len(listed) == len(set(listed)), sorted(listed)


def test_every_document_is_reached_from_the_readme() -> None:
    reached, waiting = set[Path](), [ROOT / "README.md"]
    while waiting:
        document = waiting.pop()
        if document in reached:
            continue
        reached.add(document)
        waiting += [
            target
            for link in links(document)
            if (target := (document.parent / link.partition("#")[0]).resolve()).suffix == ".md"
            and target.is_file()
        ]
    # The index is for those who open the folder.
    assert set(documents()) - reached <= {ROOT / "docs" / "README.md"}


def _resolves(document: Path, link: str) -> bool:
    if link.startswith(("https://", "http://", "mailto:")):
        return True
    path, _, anchor = link.partition("#")
    target = (document.parent / path).resolve() if path else document
    if not target.exists() or not target.is_relative_to(ROOT):
        return False
    return not anchor or anchor in anchors(target)
