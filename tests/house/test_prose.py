"""Names in docstrings, comments and pages exist: members of classes, files of code, pages."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FILES = [
    path for package in ("agora", "protocol", "scripts", "tests") for path in sorted((ROOT / package).rglob("*.py"))
]
TREES = {path: ast.parse(path.read_text(encoding="utf-8")) for path in FILES}
PAGES = [ROOT / "README.md", ROOT / "protocol" / "SPEC.md", *sorted((ROOT / "docs").rglob("*.md"))]
PAGES += [ROOT / "CHANGELOG.md", ROOT / "SECURITY.md"]
NAMED = re.compile(r"(?<![\w./])([A-Z]\w*[a-z]\w*)\.([a-z_]\w*)\b(?!/)")
# A file of code by the end of its path, a page by its whole path. NAME in capitals stands for any.
NAMED_FILES = re.compile(r"(?<![\w/.*{}-])(?:\./)?((?:[a-z_0-9]+/)*[a-z_0-9]+\.py)\b|(?<![\w/])(docs/[a-z_0-9/]+\.md)")
ALL_FILES = [
    path.relative_to(ROOT)
    for folder in ("agora", "deploy", "docs", "protocol", "scripts", "tests")
    for path in (ROOT / folder).rglob("*.*")
]
PLAIN_BASES = {"ABC", "Enum", "Exception", "Generic", "IntEnum", "NamedTuple", "Protocol", "StrEnum", "object"}


class Members:
    """What the classes of one name have; `is_open` if a base class of another project may add more."""

    def __init__(self) -> None:
        self.names: set[str] = set(dir(object))
        self.bases: set[str] = set()

    def add(self, node: ast.ClassDef) -> None:
        self.bases |= {ast.unparse(base).split("[")[0].rsplit(".", 1)[-1] for base in node.bases}
        for inner in ast.walk(node):
            match inner:
                case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                    self.names.add(name)
                case ast.Attribute(value=ast.Name(id="self" | "cls"), attr=name):
                    self.names.add(name)
                case ast.AnnAssign(target=ast.Name(id=name)) | ast.Assign(targets=[ast.Name(id=name)]):
                    self.names.add(name)


def classes() -> dict[str, Members]:
    found: dict[str, Members] = {}
    for tree in TREES.values():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                found.setdefault(node.name, Members()).add(node)
    return found


def has(known: dict[str, Members], name: str, member: str) -> bool:
    members = known[name]
    if member in members.names:
        return True
    return any(
        has(known, base, member) if base in known else base not in PLAIN_BASES for base in members.bases - {name}
    )


def prose_of(path: Path) -> Iterator[str]:
    """The docstrings, the strings that stand alone, and whatever follows a # in a file."""
    for node in ast.walk(TREES[path]):
        match node:
            case ast.Expr(value=ast.Constant(value=str(text))):
                yield text
    yield from re.findall(r"#.*", path.read_text(encoding="utf-8"))


def everywhere(find: Callable[[Iterator[str]], list[str]]) -> list[str]:
    """What `find` finds in the prose of each file of code and of each page, after the file's name."""
    texts = [(path, prose_of(path)) for path in FILES]
    texts += [(page, iter([page.read_text(encoding="utf-8")])) for page in PAGES]
    return [f"{path.relative_to(ROOT)}: {name}" for path, prose in texts for name in find(prose)]


def missing(prose: Iterator[str], known: dict[str, Members]) -> list[str]:
    named = {pair for text in prose for pair in NAMED.findall(text)}
    return sorted(f"{name}.{member}" for name, member in named if name in known and not has(known, name, member))


def test_every_member_of_a_class_that_prose_names_exists() -> None:
    known = classes()
    dead = everywhere(lambda prose: missing(prose, known))
    assert not dead, "\n".join(dead)


def test_a_member_that_is_not_there_is_found() -> None:
    known = classes()
    assert missing(
        iter(["`Members.add` walks, `Members.lost` does not, `Unknown.lost` is no class of ours"]), known
    ) == ["Members.lost"]


def missing_files(prose: Iterator[str], known: set[str]) -> list[str]:
    named = {code or page for text in prose for code, page in NAMED_FILES.findall(text)}
    return sorted(named - known)


def ends_of_paths() -> set[str]:
    return {"/".join(path.parts[start:]) for path in ALL_FILES for start in range(len(path.parts))}


def test_every_file_that_prose_names_exists() -> None:
    known = ends_of_paths()
    dead = everywhere(lambda prose: missing_files(prose, known))
    assert not dead, "\n".join(dead)


def test_a_file_that_is_not_there_is_found() -> None:
    text = (
        "`test_prose.py`, `house/test_prose.py::walk`, docs/README.md, lost.py, `house/lost.py`, NAME.py, docs/lost.md"
    )
    assert missing_files(iter([text]), ends_of_paths()) == ["docs/lost.md", "house/lost.py", "lost.py"]
