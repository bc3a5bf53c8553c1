"""Turns sources of text into one array of token ids, built once per machine and mapped into memory.

Knows: sources, tokenizers, the cache. Must not know: models, windows, who samples.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from agora_protocol.errors import ManifestError

from agora.data.text_sources import Piece, SourceFile, find_files, unreadable_file
from agora.data.token_cache import CachedTokens
from agora.data.tokenizer import Ids, Tokenizer, token_dtype

FORMAT = "agora corpus 2"
ENCODE_CHARACTERS = 1 << 20


def open_corpus(sources: Sequence[str], tokenizer: Tokenizer, cache_dir: Path, *, base: Path | None = None) -> Ids:
    """Returns the token ids [n] of all sources, memory-mapped; tokenises and caches them unless the cache is current.

    sources: see text_sources.find_files. base: the folder of relative paths, by default the current one. The
    tokenizer's separator follows each document. Of several processes, one builds the cache and the others wait; a
    damaged cache is built again. Raises ManifestError when data.corpus is wrong, DiskError or LocalError when this
    machine cannot.
    """
    files = find_files(sources, base or Path.cwd())
    cached = CachedTokens(cache_dir, _signature(files, tokenizer), token_dtype(tokenizer.vocabulary))
    return cached.open_or_write(lambda: cached.write(_tokenise(sources, files, tokenizer)))


def _signature(files: Sequence[SourceFile], tokenizer: Tokenizer) -> str:
    """Returns the cache key: SHA-256, in hex, of the tokenizer and of each file's path, size and time of change.

    Raises DiskError for a file that cannot be read.
    """
    known: list[object] = [FORMAT, tokenizer.fingerprint, tokenizer.vocabulary, tokenizer.separator.tolist()]
    for file in files:
        try:
            stat = file.path.stat()
        except OSError as error:
            raise unreadable_file(file.path, error) from error
        known.append((str(file.path), stat.st_size, stat.st_mtime_ns))
    return hashlib.sha256(json.dumps(known).encode()).hexdigest()


def _tokenise(sources: Sequence[str], files: Sequence[SourceFile], tokenizer: Tokenizer) -> Iterator[Ids]:
    """Yields the token ids of all files piece by piece, and the separator after each document.

    Raises ManifestError if there is no text, and for a token id outside of the tokenizer's vocabulary.
    """
    is_empty = True
    for pieces in _batches(files):
        for piece, ids in zip(pieces, tokenizer.encode([piece.text for piece in pieces]), strict=True):
            is_empty &= len(ids) == 0
            if len(ids) and (highest := int(ids.max())) >= tokenizer.vocabulary:
                raise ManifestError(
                    f"The tokenizer gave token id {highest} but says that its vocabulary is {tokenizer.vocabulary}; "
                    "use another tokenizer file."
                )
            yield ids
            if piece.ends_document:
                yield tokenizer.separator
    if is_empty:
        raise ManifestError(f"The corpus {', '.join(sources)} holds no text; name other files in [data] corpus.")


def _batches(files: Sequence[SourceFile]) -> Iterator[list[Piece]]:
    """Yields all pieces of text in lists of at least ENCODE_CHARACTERS: work for all cores, but little memory."""
    batch: list[Piece] = []
    characters = 0
    for piece in (piece for file in files for piece in file.pieces()):
        batch.append(piece)
        characters += len(piece.text) + 1
        if characters >= ENCODE_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch
