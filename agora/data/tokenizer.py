"""Converts text to token ids: plain bytes, or any JSON file of the `tokenizers` package.

Knows: what an id means, and which ids stand between two documents. Must not know: files of text, batches, models.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from agora_protocol.errors import DiskError, LocalError, ManifestError
from numpy.typing import NDArray

Ids = NDArray[np.unsignedinteger[Any]]
"""Token ids [n] in the narrowest type that holds them, see token_dtype."""

BYTES = "bytes"
DATA_EXTRA = "install it with: pip install 'agora-swarm[data]'"
END_OF_TEXT = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eot_id|>", "<|im_end|>", "[SEP]")


def token_dtype(vocabulary: int) -> np.dtype[np.unsignedinteger[Any]]:
    """Returns the narrowest unsigned type that holds every id below `vocabulary`: uint8, uint16 or uint32."""
    if vocabulary <= 1 << 8:
        return np.dtype("<u1")
    return np.dtype("<u2") if vocabulary <= 1 << 16 else np.dtype("<u4")


class Tokenizer(Protocol):
    """Converts text to token ids."""

    @property
    def vocabulary(self) -> int:
        """Number of ids: every id is below it."""

    @property
    def separator(self) -> Ids:
        """The ids that open_corpus writes after each document."""

    @property
    def fingerprint(self) -> str:
        """A name that is different whenever the same text could give other ids; part of the cache's key."""

    def encode(self, texts: Sequence[str]) -> list[Ids]:
        """Returns the ids of each text, without special ids; may use several cores."""


class ByteTokenizer:
    """Tokenizer whose ids are UTF-8 bytes, vocabulary 256. Id 0 (NUL, which text does not contain) ends a document."""

    vocabulary = 256
    separator: Ids = np.zeros(1, np.uint8)
    fingerprint = BYTES

    def encode(self, texts: Sequence[str]) -> list[Ids]:
        """Returns the bytes of each text."""
        return [np.frombuffer(text.encode(), np.uint8) for text in texts]


class JsonTokenizer:
    """Tokenizer that a `tokenizer.json` of the Hugging Face package `tokenizers` defines; `content`: the file's bytes.

    Documents are separated by `end_of_text`, the first token of END_OF_TEXT that the vocabulary has, else (None) by the
    ids of a newline.
    """

    def __init__(self, path: Path | str) -> None:
        """Reads the file. Raises DiskError, ManifestError for another kind of file, LocalError without the package."""
        self.content = _read(Path(path))
        self._tokenizer = _parse(self.content, Path(path))
        # ids may have gaps, so that the number of tokens does not bound them
        self.vocabulary = 1 + max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
        self.fingerprint = f"json:{hashlib.sha256(self.content).hexdigest()}"
        self._dtype = token_dtype(self.vocabulary)
        ids = {token: self._tokenizer.token_to_id(token) for token in END_OF_TEXT}
        self.end_of_text = next((token for token in END_OF_TEXT if ids[token] is not None), None)
        self.separator: Ids = (
            np.array([ids[self.end_of_text]], self._dtype) if self.end_of_text else self.encode(["\n"])[0]
        )

    def encode(self, texts: Sequence[str]) -> list[Ids]:
        """Returns the ids of each text; the package uses several cores."""
        encodings = self._tokenizer.encode_batch(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, self._dtype) for encoding in encodings]


def open_tokenizer(source: str, vocabulary: int, *, base: Path | None = None) -> Tokenizer:
    """Returns the tokenizer that a manifest names: "bytes", or the path of a tokenizer JSON (relative to `base`).

    Raises ManifestError when the model has fewer ids (`vocabulary`) than the tokenizer, and what JsonTokenizer raises.
    """
    tokenizer: Tokenizer = ByteTokenizer() if source == BYTES else JsonTokenizer((base or Path()) / source)
    if tokenizer.vocabulary > vocabulary:
        raise ManifestError(
            f"Tokenizer {source!r} has token id {tokenizer.vocabulary - 1} but [model] vocabulary is {vocabulary}; "
            f"use vocabulary = {tokenizer.vocabulary} or more."
        )
    return tokenizer


def _read(path: Path) -> bytes:
    """Returns the bytes of a tokenizer file. Raises DiskError when it cannot be read."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise DiskError(
            f"Cannot read the tokenizer file {path} ({error.strerror or error}); "
            f"give the path of a tokenizer.json in [data] tokenizer, or {BYTES!r}."
        ) from error


def _parse(content: bytes, path: Path) -> Any:
    """Makes a tokenizer of the `tokenizers` package from a tokenizer.json, with truncation and padding switched off.

    path: the file's name in errors. Raises LocalError without the package, ManifestError for malformed content.
    """
    try:
        from tokenizers import Tokenizer as Implementation
    except ImportError as error:
        raise LocalError(f"Tokenizer {path} needs the package tokenizers; {DATA_EXTRA}") from error
    try:
        tokenizer = Implementation.from_str(content.decode())
    except Exception as error:  # the extension raises plain Exception for every malformed file
        raise ManifestError(
            f"{path} is not a tokenizer file ({str(error)[:200]}); "
            "give one as the tokenizers package saves it in [data] tokenizer."
        ) from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer
