"""Turns sources of text into one array of token ids, built once per machine and mapped into memory."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from agora_protocol.errors import ManifestError

from agora.data.text_sources import Piece, SourceFile, find_files, unreadable_file
from agora.data.token_cache import CachedTokens
from agora.data.tokenizer import Ids, Tokenizer, token_dtype

FORMAT = "agora corpus 3"
ENCODE_CHARACTERS = 1 << 20  # characters that are tokenised at a time


def open_corpus(sources: Sequence[str], tokenizer: Tokenizer, cache_dir: Path, *, base: Path | None = None) -> Ids:
    """Returns the token ids [n] of all documents of all sources, memory-mapped from a cache file in `cache_dir`.

    If no intact cache exists for these files and this tokenizer, tokenises the files and writes the cache first. Of
    several processes, one writes the cache and the others wait. sources: see text_sources.find_files. base: the folder
    of relative paths, by default the current one. The tokenizer's separator follows each document that does not end
    with it. Raises ManifestError when data.corpus is wrong, DataError for a malformed file, DiskError when a file
    cannot be read or written, LocalError without the package that a file's format needs.
    """
    files = find_files(sources, base or Path.cwd())
    cached = CachedTokens(cache_dir, _signature(files, tokenizer), token_dtype(tokenizer.vocabulary))
    return cached.open_or_write(lambda: cached.write(_tokenise(sources, files, tokenizer)))


def _signature(files: Sequence[SourceFile], tokenizer: Tokenizer) -> str:
    parts: list[object] = [FORMAT, tokenizer.fingerprint, tokenizer.vocabulary, tokenizer.separator.tolist()]
    for file in files:
        try:
            stat = file.path.stat()
        except OSError as error:
            raise unreadable_file(file.path, error) from error
        parts.append((str(file.path), stat.st_size, stat.st_mtime_ns))
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def _tokenise(sources: Sequence[str], files: Sequence[SourceFile], tokenizer: Tokenizer) -> Iterator[Ids]:
    is_empty = True
    end = tokenizer.separator
    last = end[:0]  # as many ids of the present document as a separator has
    for pieces in _group_pieces(files):
        for piece, ids in zip(pieces, tokenizer.encode([piece.text for piece in pieces]), strict=True):
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
                    yield end
                last = end[:0]
    if is_empty:
        raise ManifestError(f"The corpus {', '.join(sources)} holds no text; name other files in [data] corpus.")


def _group_pieces(files: Sequence[SourceFile]) -> Iterator[list[Piece]]:
    batch: list[Piece] = []
    characters = 0
    for piece in (piece for file in files for piece in file.pieces()):
        batch.append(piece)
        characters += len(piece.text) + 1
        if characters >= ENCODE_CHARACTERS:
            yield batch
            batch = []
            characters = 0
    if batch:
        yield batch
