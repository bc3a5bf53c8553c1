"""The pages lead somewhere: links and headings exist, the index lists every page."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "protocol" / "SPEC.md", *sorted((ROOT / "docs").rglob("*.md"))]
PAGES += sorted((ROOT / "deploy").rglob("*.md"))


def anchors_of(page: Path) -> set[str]:
    """Returns the anchors of a page's headings, as GitHub makes them: lower case, hyphens, no punctuation."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.M)
    plain = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower() for heading in headings]
    return {re.sub(r"[^\w\- ]", "", heading).replace(" ", "-") for heading in plain}


def leads_somewhere(page: Path, link: str) -> bool:
    """Returns whether a relative link of `page` names a file that exists and, after #, a heading of that file."""
    name, _, anchor = link.partition("#")
    target = (page.parent / name).resolve() if name else page
    return target.exists() and (not anchor or anchor in anchors_of(target))


def test_every_link_leads_to_a_file_and_a_heading_that_exist() -> None:
    dead = [
        f"{page.relative_to(ROOT)}: {link}"
        for page in PAGES
        for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8"))
        if not link.startswith("http") and not leads_somewhere(page, link)
    ]
    assert not dead, "\n".join(dead)


def test_the_index_lists_every_page() -> None:
    docs = ROOT / "docs"
    index = (docs / "README.md").read_text(encoding="utf-8")
    pages = [page.relative_to(docs).as_posix() for page in sorted(docs.rglob("*.md")) if page != docs / "README.md"]
    assert not [page for page in pages if f"({page})" not in index]


def test_the_readme_leads_to_the_index() -> None:
    assert "(docs/README.md)" in (ROOT / "README.md").read_text(encoding="utf-8")
