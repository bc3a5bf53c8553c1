"""Turns sources of text into one array of token ids, built once per machine and mapped into memory.

Knows: the cache folder. `index/SIGNATURE.json` names the token file that the sources gave when they had these names,
sizes and times; `DIGEST.tokens` holds the ids. Must not know: models, windows, who samples.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from agora_protocol.errors import DiskError, ManifestError

from agora.data.text_sources import Piece, SourceFile, find_files, unreadable_file
from agora.data.token_file import (
    Corpus,
    TokenWriter,
    disk_errors,
    open_token_file,
    remove_abandoned,
    unfinished_file,
    write_token_file,
)
from agora.data.tokenizer import Tokenizer, token_dtype

FORMAT = "agora corpus 1"
ENCODE_CHARACTERS = 1 << 20
LOCK_WAIT_S = 600.0
LOCK_POLL_S = 0.05


def open_corpus(sources: Sequence[str], tokenizer: Tokenizer, cache_dir: Path, *, base: Path | None = None) -> Corpus:
    """Returns the tokens of all sources: from the cache if the files have not changed, else tokenised now.

    sources: "stdlib", files, folders or globs (see text_sources.find_files), relative to `base`. The tokenizer's
    separator follows each document. Several processes may open the same corpus at once: one builds it, the others
    wait. A damaged cache file is built again. Raises ManifestError when data.corpus is wrong, DiskError or LocalError
    when this machine cannot.
    """
    files = find_files(sources, base or Path.cwd())
    signature = _signature(files, tokenizer)
    corpus = _look_up(cache_dir, signature)
    if corpus is None:
        with _build_lock(cache_dir, signature):
            corpus = _look_up(cache_dir, signature) or _build(sources, files, tokenizer, cache_dir, signature)
    return corpus


def _signature(files: Sequence[SourceFile], tokenizer: Tokenizer) -> str:
    """Returns the cache key: SHA-256 of the tokenizer and of each file's path, size and time of change."""
    known: list[object] = [FORMAT, tokenizer.fingerprint, tokenizer.vocabulary, tokenizer.separator.tolist()]
    for file in files:
        try:
            stat = file.path.stat()
        except OSError as error:
            raise unreadable_file(file.path, error) from error
        known.append((str(file.path), stat.st_size, stat.st_mtime_ns))
    return hashlib.sha256(json.dumps(known).encode()).hexdigest()


def _index_path(cache_dir: Path, signature: str) -> Path:
    """Returns the path of the index file of a signature."""
    return cache_dir / "index" / f"{signature}.json"


def _look_up(cache_dir: Path, signature: str) -> Corpus | None:
    """Returns the cached corpus of a signature, or None when it is missing or damaged."""
    try:
        digest = json.loads(_index_path(cache_dir, signature).read_bytes())["digest"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return open_token_file(cache_dir, digest) if isinstance(digest, str) else None


@contextlib.contextmanager
def _build_lock(cache_dir: Path, signature: str) -> Iterator[None]:
    """Lets one process at a time build a corpus. It only saves work: after LOCK_WAIT_S two may build side by side."""
    path = _index_path(cache_dir, signature).with_suffix(".lock")
    with disk_errors(cache_dir):
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = path.open("wb")
    with lock:
        deadline = time.monotonic() + LOCK_WAIT_S
        while time.monotonic() < deadline:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(LOCK_POLL_S)
            except OSError:  # a file system without locks
                break
        yield


def _build(
    sources: Sequence[str],
    files: Sequence[SourceFile],
    tokenizer: Tokenizer,
    cache_dir: Path,
    signature: str,
) -> Corpus:
    """Tokenises all files into the cache and returns the result as it reads back."""
    remove_abandoned(cache_dir)
    with write_token_file(cache_dir, token_dtype(tokenizer.vocabulary)) as writer:
        for pieces in _batches(files):
            _add(writer, pieces, tokenizer)
        if writer.count == writer.documents * len(tokenizer.separator):
            raise ManifestError(f"The corpus {', '.join(sources)} holds no text; name other files in [data] corpus.")
    path = _index_path(cache_dir, signature)
    with disk_errors(cache_dir), unfinished_file(path.parent) as index:
        index.file.write(json.dumps({"digest": writer.digest}).encode())
        index.path = path
    corpus = open_token_file(cache_dir, writer.digest)
    if corpus is None:
        raise DiskError(f"The token cache in {cache_dir} reads back damaged; check that disk, or use --dir on another.")
    return corpus


def _batches(files: Sequence[SourceFile]) -> Iterator[list[Piece]]:
    """Yields pieces in groups of about ENCODE_CHARACTERS: enough for a tokenizer's cores, and memory stays bounded."""
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


def _add(writer: TokenWriter, pieces: Sequence[Piece], tokenizer: Tokenizer) -> None:
    """Writes the tokens of some pieces, and the separator after each document that ends."""
    for piece, ids in zip(pieces, tokenizer.encode_many([piece.text for piece in pieces]), strict=True):
        if len(ids) and int(ids.max()) >= tokenizer.vocabulary:
            raise ManifestError(
                f"The tokenizer gave token id {int(ids.max())} but says that its vocabulary is {tokenizer.vocabulary}; "
                "use another tokenizer file."
            )
        writer.add(ids)
        if piece.ends_document:
            writer.add(tokenizer.separator)
            writer.documents += 1
