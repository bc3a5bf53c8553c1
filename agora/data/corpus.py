"""Turns sources of text into one array of token ids, built once per machine and mapped into memory."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from agora_protocol.errors import ManifestError

from agora.data.data_file import changed_while_read
from agora.data.text_sources import Piece, SourceFile, find_files, unreadable_file
from agora.data.token_cache import CachedTokens
from agora.data.tokenizer import Ids, Tokenizer, token_dtype

FORMAT = "agora corpus 3"
ENCODE_CHARACTERS = 1 << 20  # characters that are tokenised at a time


ENDS = "ends"  # in the details of a cache: for each source how many ids it and those before it have


def open_corpus(sources: Sequence[str], tokenizer: Tokenizer, cache_dir: Path, *, base: Path | None = None) -> Ids:
    """Returns the token ids of a corpus, see open_corpus_parts."""
    return open_corpus_parts(sources, tokenizer, cache_dir, base=base)[0]


def open_corpus_parts(
    sources: Sequence[str], tokenizer: Tokenizer, cache_dir: Path, *, base: Path | None = None
) -> tuple[Ids, tuple[int, ...]]:
    """Returns the token ids [n] of all documents of all sources, memory-mapped from a cache file in `cache_dir`.

    If no intact cache exists for these files and this tokenizer, tokenises the files and writes the cache first. Of
    several processes, one writes the cache and the others wait. sources: see text_sources.find_files. base: the folder
    of relative paths, by default the current one. The tokenizer's separator follows each document that does not end
    with it. The second value has for each source how many ids it and those before it have; a file that two sources name
    is of the first. Raises ManifestError when data.corpus is wrong, DataError for a malformed file, DiskError when a
    file cannot be read or written, LocalError without the package that a file's format needs.
    """
    base = base or Path.cwd()
    files = find_files(sources, base)
    signature = _signature(files, tokenizer)
    cached = CachedTokens(cache_dir, signature, token_dtype(tokenizer.vocabulary))
    counts = [0] * len(files)  # ids of each file

    def details() -> dict[str, list[int]]:
        # Called once all is read, before it is kept: under this signature nobody else may find what was read of both.
        if _signature(find_files(sources, base), tokenizer) != signature:
            raise changed_while_read(", ".join(sources))
        return {ENDS: _ends(sources, base, files, counts)}

    def write() -> None:
        cached.write(_tokenise(sources, files, tokenizer, counts), details)

    ids = cached.open_or_write(write)
    if len(sources) == 1:
        return ids, (len(ids),)
    if len(ends := cached.details.get(ENDS, ())) != len(sources):  # an earlier version has written the cache
        with cached.lock():
            write()
        ids = cached.open_or_write(write)
        ends = cached.details[ENDS]
    return ids, tuple(ends)


def _ends(sources: Sequence[str], base: Path, files: Sequence[SourceFile], counts: Sequence[int]) -> list[int]:
    by_path = {file.path: count for file, count in zip(files, counts, strict=True)}
    ends, end = [], 0
    for source in sources:
        end += sum(by_path.pop(file.path, 0) for file in find_files([source], base))
        ends.append(end)
    return ends


def _signature(files: Sequence[SourceFile], tokenizer: Tokenizer) -> str:
    parts: list[object] = [FORMAT, tokenizer.fingerprint, tokenizer.vocabulary, tokenizer.separator.tolist()]
    for file in files:
        try:
            stat = file.path.stat()
        except OSError as error:
            raise unreadable_file(file.path, error) from error
        parts.append((str(file.path), stat.st_size, stat.st_mtime_ns))
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def _tokenise(
    sources: Sequence[str], files: Sequence[SourceFile], tokenizer: Tokenizer, counts: list[int]
) -> Iterator[Ids]:
    # Adds to `counts` the ids of each file.
    is_empty = True
    end = tokenizer.separator
    last = end[:0]  # as many ids of the present document as a separator has
    for group in _group_pieces(files):
        encoded = tokenizer.encode([piece.text for _, piece in group])
        for (number, piece), ids in zip(group, encoded, strict=True):
            counts[number] += len(ids)
            is_empty &= len(ids) == 0
            if len(ids) and (highest := int(ids.max())) >= tokenizer.vocabulary:
                raise ManifestError(
                    f"The tokenizer gave token id {highest} but says that its vocabulary is {tokenizer.vocabulary}; "
                    "use another tokenizer file."
                )
            yield ids
            last = np.concatenate([last, ids])[-len(end) :]
            if piece.ends_document:
                if not np.array_equal(last, end):
                    counts[number] += len(end)
                    yield end
                last = end[:0]
    if is_empty:
        raise ManifestError(f"The corpus {', '.join(sources)} holds no text; name other files in [data] corpus.")


def _group_pieces(files: Sequence[SourceFile]) -> Iterator[list[tuple[int, Piece]]]:
    # With the number of each piece's file.
    batch: list[tuple[int, Piece]] = []
    characters = 0
    for number, piece in ((number, piece) for number, file in enumerate(files) for piece in file.pieces()):
        batch.append((number, piece))
        characters += len(piece.text) + 1
        if characters >= ENCODE_CHARACTERS:
            yield batch
            batch = []
            characters = 0
    if batch:
        yield batch
