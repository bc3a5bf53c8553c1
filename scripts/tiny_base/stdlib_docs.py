"""What the source of the standard library says: its files' text, and the functions and classes that it documents.

Nothing is imported or executed.
"""

from __future__ import annotations

import ast
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from agora.data.text_sources import SourceFile

LONGEST_SIGNATURE: Final = 80
SUMMARY_CHARACTERS: Final = range(12, 101)


@dataclass(frozen=True, slots=True)
class SourceText:
    """The text of one source file. module: its dotted name, such as "json.decoder"."""

    module: str
    text: str


@dataclass(frozen=True, slots=True)
class DocumentedName:
    """A function or class that has a docstring.

    name: dotted, with its module. signature: as it is written, without the module, such as "decode(self, s)". summary:
    the first line of the docstring, a sentence.
    """

    name: str
    signature: str
    summary: str


def read_sources(files: Sequence[SourceFile]) -> list[SourceText]:
    """Returns the text of each file that is UTF-8, in their order. Raises DiskError for a file that cannot be read."""
    root = _common_root([file.path for file in files])
    texts = ((file, "".join(piece.text for piece in file.pieces())) for file in files)
    return [SourceText(_module_name(file.path.relative_to(root)), text) for file, text in texts if text]


def _common_root(paths: Sequence[Path]) -> Path:
    return min((path.parent for path in paths), key=lambda folder: len(folder.parts))


def _module_name(path: Path) -> str:
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


def documented_names(sources: Sequence[SourceText]) -> list[DocumentedName]:
    """Returns the functions and classes with a usable docstring, in the order of the sources; each name once.

    Usable is one whose first line is a sentence of its own of SUMMARY_CHARACTERS printable ASCII characters. A source
    that this Python cannot parse is left out.
    """
    found: dict[str, DocumentedName] = {}
    for source in sources:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of escapes in the library's own strings
            try:
                tree = ast.parse(source.text)
            except (SyntaxError, ValueError):
                continue
        for documented in _names_within(tree, source.module):
            found.setdefault(documented.name, documented)
    return list(found.values())


def _names_within(tree: ast.Module | ast.ClassDef, prefix: str) -> Iterator[DocumentedName]:
    for node in tree.body:
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        name = f"{prefix}.{node.name}"
        signature, summary = _signature(node), _summary(ast.get_docstring(node) or "")
        if summary and len(signature) <= LONGEST_SIGNATURE and not node.name.startswith("_"):
            yield DocumentedName(name, signature, summary)
        if isinstance(node, ast.ClassDef):
            yield from _names_within(node, name)


def _signature(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> str:
    inside = ", ".join(map(ast.unparse, node.bases)) if isinstance(node, ast.ClassDef) else ast.unparse(node.args)
    return f"{node.name}({inside})"


def _summary(docstring: str) -> str:
    first, _, rest = docstring.partition("\n")
    first, next_line = first.strip(), rest.partition("\n")[0]
    is_whole = not next_line.strip() or first.endswith(".")
    if not (is_whole and first.isascii() and first.isprintable() and first[:1].isupper() and " " in first):
        return ""
    sentence = first.rstrip(".:") + "."
    return sentence if len(sentence) in SUMMARY_CHARACTERS else ""
