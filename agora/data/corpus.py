"""Sources of text -> one array of token ids, built once per machine and mapped into memory.

Knows the cache folder: `index/SIGNATURE.json` says which token file the sources gave when their names, sizes and times
were these, `DIGEST.tokens` holds the ids. Must not know models, windows or who samples.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from agora_protocol.errors import DiskError, ManifestError

from agora.data.formats import Piece, SourceFile, expand, unreadable
from agora.data.token_file import (
    TokenFile,
    TokenWriter,
    disk_errors,
    open_token_file,
    remove_abandoned,
    unfinished,
    writing,
)
from agora.data.tokenizer import Ids, Tokenizer, token_dtype

FORMAT = "agora corpus 1"
ENCODE_CHARACTERS = 1 << 20
LOCK_WAIT_S = 600.0
LOCK_POLL_S = 0.05

Progress = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class Corpus:
    """tokens: [n] unsigned, mapped read-only, every id below `vocabulary`; digest: 64 hex characters that name them."""

    tokens: Ids
    vocabulary: int
    documents: int
    digest: str


def open_corpus(
    sources: Sequence[str],
    tokenizer: Tokenizer,
    cache_dir: Path,
    *,
    base: Path | None = None,
    progress: Progress | None = None,
) -> Corpus:
    """The tokens of all sources, from the cache if the files have not changed, else tokenised now.

    sources: "stdlib", files, folders or globs (see formats.expand), relative to `base`. After each document come the
    tokenizer's separator ids. progress: told the number of tokens written, now and then, while the cache is built.
    Several processes may open the same corpus at once: one builds, the others wait for it. A damaged cache file is
    rebuilt. Raises ManifestError (what data.corpus says is wrong), DiskError or LocalError (this machine cannot).
    """
    files = expand(sources, base or Path.cwd())
    signature = _signature(files, tokenizer)
    found = _lookup(cache_dir, signature)
    if found is None:
        with _locked(cache_dir, signature):
            found = _lookup(cache_dir, signature) or _build(sources, files, tokenizer, cache_dir, signature, progress)
    return Corpus(found.ids, tokenizer.vocabulary, found.documents, found.digest)


def _signature(files: Sequence[SourceFile], tokenizer: Tokenizer) -> str:
    known: list[object] = [FORMAT, tokenizer.fingerprint, tokenizer.vocabulary, tokenizer.separator.tolist()]
    for file in files:
        try:
            stat = file.path.stat()
        except OSError as error:
            raise unreadable(file.path, error) from error
        known.append((str(file.path), stat.st_size, stat.st_mtime_ns))
    return hashlib.sha256(json.dumps(known).encode()).hexdigest()


def _index_path(cache_dir: Path, signature: str) -> Path:
    return cache_dir / "index" / f"{signature}.json"


def _lookup(cache_dir: Path, signature: str) -> TokenFile | None:
    try:
        digest = json.loads(_index_path(cache_dir, signature).read_bytes())["digest"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return open_token_file(cache_dir, digest) if isinstance(digest, str) else None


@contextlib.contextmanager
def _locked(cache_dir: Path, signature: str) -> Iterator[None]:
    """Lets one process at a time build this corpus. Only saves work: after LOCK_WAIT_S we build beside the other."""
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
    progress: Progress | None,
) -> TokenFile:
    remove_abandoned(cache_dir)
    with writing(cache_dir, token_dtype(tokenizer.vocabulary)) as writer:
        for pieces in _batches(files):
            _add(writer, pieces, tokenizer)
            if progress is not None:
                progress(writer.count)
        if writer.count == writer.documents * len(tokenizer.separator):
            raise ManifestError(f"The corpus {', '.join(sources)} holds no text; name other files in [data] corpus.")
        digest = writer.digest()
    _write_index(cache_dir, signature, digest)
    found = open_token_file(cache_dir, digest)
    if found is None:
        raise DiskError(f"The token cache in {cache_dir} reads back damaged; check that disk, or use --dir on another.")
    return found


def _batches(files: Sequence[SourceFile]) -> Iterator[list[Piece]]:
    """Pieces in groups of about ENCODE_CHARACTERS, so that a tokenizer can use its cores and memory stays bounded."""
    batch: list[Piece] = []
    held = 0
    for file in files:
        for piece in file.pieces():
            batch.append(piece)
            held += len(piece.text) + 1
            if held >= ENCODE_CHARACTERS:
                yield batch
                batch, held = [], 0
    if batch:
        yield batch


def _add(writer: TokenWriter, pieces: Sequence[Piece], tokenizer: Tokenizer) -> None:
    for piece, ids in zip(pieces, tokenizer.encode_many([piece.text for piece in pieces]), strict=True):
        if len(ids) and int(ids.max()) >= tokenizer.vocabulary:
            raise ManifestError(
                f"The tokenizer gave token id {int(ids.max())} but says that its vocabulary is {tokenizer.vocabulary}; "
                "use another tokenizer file."
            )
        writer.add(ids)
        if piece.ends:
            writer.add(tokenizer.separator)
            writer.documents += 1


def _write_index(cache_dir: Path, signature: str, digest: str) -> None:
    path = _index_path(cache_dir, signature)
    with disk_errors(cache_dir), unfinished(path.parent) as new:
        new.file.write(json.dumps({"digest": digest}).encode())
        new.path = path
