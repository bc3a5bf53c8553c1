"""Converts text to token ids: plain bytes, or any JSON file of the `tokenizers` package; exports both."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from agora_protocol.errors import DataError, DiskError, ManifestError
from numpy.typing import NDArray

from agora.core.hub_files import TOKENIZER_CONFIG_FILE, TOKENIZER_FILE
from agora.core.optional_packages import import_optional
from agora.core.user_paths import expand_home

Ids = NDArray[np.unsignedinteger[Any]]  # token ids [n] in the narrowest dtype that holds them, see token_dtype

BYTES = "bytes"
LFS_POINTER = b"version https://git-lfs.github.com/spec/"
LFS_WORDS = "a git-lfs pointer, which stands for a file that was not fetched; run `git lfs pull` in its folder"
# in the order in which a tokenizer's vocabulary is searched for them
END_OF_TEXT = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eot_id|>", "<|im_end|>", "[SEP]")


def token_dtype(vocabulary: int) -> np.dtype[np.unsignedinteger[Any]]:
    """Returns the narrowest little-endian unsigned dtype for ids below `vocabulary`: uint8, uint16 or uint32."""
    if vocabulary <= 1 << 8:
        return np.dtype("<u1")
    return np.dtype("<u2") if vocabulary <= 1 << 16 else np.dtype("<u4")


@dataclass(frozen=True, slots=True)
class EncodedText:
    """The tokens of a text. ids: [n]. is_added: [n], whether the tokenizer added the token, such as <s>, to the text.

    offsets: [n, 2], the index of the first character that a token stands for, and the index after its last one.
    """

    ids: NDArray[np.int32]
    offsets: NDArray[np.int32]
    is_added: NDArray[np.bool_]


class ByteTokenizer:
    """Tokenizer whose 256 ids are the bytes of UTF-8. Id 0 (NUL, which text does not contain) ends a document.

    See Tokenizer for the attributes.
    """

    vocabulary = 256
    separator: Ids = np.zeros(1, np.uint8)
    fingerprint = BYTES

    def encode(self, texts: Sequence[str]) -> list[Ids]:
        """Returns the UTF-8 bytes of each text, uint8 [n] each; no separator is added."""
        return [np.frombuffer(text.encode(), np.uint8) for text in texts]

    def encode_with_offsets(self, texts: Sequence[str], *, add_special: bool) -> list[EncodedText]:
        """Bytes as tokens; the offsets of a byte are those of its character. No special tokens are ever added."""
        return [_encode_bytes(text) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of the ids, separators included; bytes that are not valid UTF-8 become U+FFFD.

        Raises ValueError for an id that is not from 0 to 255.
        """
        return bytes(ids).decode(errors="replace")


class JsonTokenizer:
    """Tokenizer that a `tokenizer.json` of the Hugging Face package `tokenizers` defines.

    content: the file's bytes.
    added_ids: ids of the tokens that are never split or merged, such as special tokens.
    unknown_id: the id for text that no token stands for; None without one.
    end_of_text: the first of END_OF_TEXT in the vocabulary, or None.
    separator: the ids that end each document: the id of end_of_text, or those of a newline if end_of_text is None.
    See Tokenizer for the other attributes.
    """

    def __init__(self, path: Path, rows: int | None = None) -> None:
        """rows: how many ids the model has rows for, None: for all.

        An added token that has none does no harm until a text has it; other ids must have rows. Raises DiskError if the
        file cannot be read, ManifestError if it is none or needs more rows, LocalError without `tokenizers`.
        """
        try:
            self.content = path.read_bytes()
        except OSError as error:
            raise DiskError(
                f"Cannot read the tokenizer file {path} ({error.strerror or error}); "
                f"give the path of a tokenizer.json in [data] tokenizer, or {BYTES!r}."
            ) from error
        if self.content.startswith(LFS_POINTER):
            raise ManifestError(f"{path} is {LFS_WORDS}.")
        self._tokenizer = _parse(self.content, path)
        # ids may have gaps, so an id may be higher than the number of tokens
        self.vocabulary = 1 + max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
        self.fingerprint = f"json:{hashlib.sha256(self.content).hexdigest()}"
        self.unknown_id = self._find_unknown()
        self.added_ids = frozenset(int(number) for number in self._tokenizer.get_added_tokens_decoder())
        self._dtype = token_dtype(self.vocabulary)
        ids = {token: self._tokenizer.token_to_id(token) for token in END_OF_TEXT}
        self.end_of_text = next((token for token in END_OF_TEXT if ids[token] is not None), None)
        self.separator: Ids = (
            np.array([ids[self.end_of_text]], self._dtype) if self.end_of_text else self.encode(["\n"])[0]
        )
        if rows is not None and rows < self.vocabulary:
            ordinary = set(self._tokenizer.get_vocab(with_added_tokens=False).values()) - self.added_ids
            highest = max([*ordinary, *self.separator.tolist()], default=-1)
            if highest >= rows:
                raise ManifestError(
                    f"Tokenizer {str(path)!r} has token id {highest} but [model] vocabulary is {rows}; "
                    f"use vocabulary = {highest + 1} or more, or the model's own tokenizer."
                )
            self.vocabulary = rows

    def _find_unknown(self) -> int | None:
        model: dict[str, Any] = json.loads(self.content)["model"]
        if model.get("unk_token") is not None:
            found: int | None = self._tokenizer.token_to_id(str(model["unk_token"]))
            return found
        return int(model["unk_id"]) if type(model.get("unk_id")) is int else None

    def has_token(self, text: str) -> bool:
        return self._tokenizer.token_to_id(text) is not None

    def encode(self, texts: Sequence[str]) -> list[Ids]:
        """Returns the ids of each text, without added special tokens or separator. The package uses several cores."""
        encodings = self._tokenizer.encode_batch(list(texts), add_special_tokens=False)
        return [np.array(self._with_rows(encoding.ids), self._dtype) for encoding in encodings]

    def _with_rows(self, ids: list[int]) -> list[int]:
        if ids and (highest := max(ids)) >= self.vocabulary:
            raise DataError(
                f"A text has the token {self._tokenizer.id_to_token(highest)!r} (id {highest}), and the model's "
                f"vocabulary is {self.vocabulary}: it has no row for it; remove it from the text."
            )
        return ids

    def encode_with_offsets(self, texts: Sequence[str], *, add_special: bool) -> list[EncodedText]:
        """Returns the tokens of each text, with their offsets in it; white space belongs to the token that contains it.

        add_special: also adds the special tokens that the file puts around a text, such as <s>.
        """
        encodings = self._tokenizer.encode_batch(list(texts), add_special_tokens=add_special)
        return [
            EncodedText(
                np.array(self._with_rows(encoding.ids), np.int32),
                np.array(encoding.offsets, np.int32).reshape(-1, 2),
                np.array(encoding.special_tokens_mask, np.bool_) if add_special else np.zeros(len(encoding), np.bool_),
            )
            for encoding in encodings
        ]

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of the ids, without special tokens; ids that the tokenizer lacks are left out."""
        return str(self._tokenizer.decode(list(ids)))


# vocabulary: every id is below this number. separator: the ids that end each document. fingerprint: a text that differs
# if two tokenizers may give different ids.
Tokenizer = ByteTokenizer | JsonTokenizer


def tokenizer_path(source: str, base: Path | None = None) -> Path | None:
    """Returns the path of the tokenizer file that a manifest names (in a folder, TOKENIZER_FILE); None for "bytes".

    base: the folder of a relative path, by default the current one. "~" is expanded. The file need not exist.
    """
    if source == BYTES:
        return None
    path = (base or Path()) / expand_home(source)
    return path / TOKENIZER_FILE if path.is_dir() else path


def open_tokenizer(source: str, vocabulary: int, *, base: Path | None = None) -> Tokenizer:
    """Opens the tokenizer that a manifest names. source: "bytes", or the path of a tokenizer JSON or of its folder.

    base: the folder of a relative path, by default the current one. vocabulary: the model's number of ids. Raises
    ManifestError if the tokenizer needs more (see JsonTokenizer) or the file is not a tokenizer file, DiskError if it
    cannot be read, LocalError without the package `tokenizers`.
    """
    path = tokenizer_path(source, base)
    tokenizer: Tokenizer = ByteTokenizer() if path is None else JsonTokenizer(path, vocabulary)
    if tokenizer.vocabulary > vocabulary:
        raise ManifestError(
            f"Tokenizer {source!r} has token id {tokenizer.vocabulary - 1} but [model] vocabulary is {vocabulary}; "
            f"use vocabulary = {tokenizer.vocabulary} or more."
        )
    return tokenizer


def _parse(content: bytes, path: Path) -> Any:
    implementation = import_optional("tokenizers", f"Tokenizer {path}", "data").Tokenizer
    try:
        rules = json.loads(content)
        _keep_space_in_offsets(rules.get("post_processor"))
        tokenizer = implementation.from_str(json.dumps(rules))
    except Exception as error:  # the extension raises plain Exception for every malformed file
        raise ManifestError(
            f"{path} is not a tokenizer file ({str(error)[:200]}); "
            "give one as the tokenizers package saves it in [data] tokenizer."
        ) from error
    if rules["model"].get("dropout"):
        raise ManifestError(
            f"{path} draws other tokens for the same text each time (its model has a dropout), so that no two machines "
            'would train on the same rows; write "dropout": null there.'
        )
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _keep_space_in_offsets(rule: Any) -> None:
    if isinstance(rule, dict):
        if "trim_offsets" in rule:
            rule["trim_offsets"] = False
        for part in rule.get("processors") or ():
            _keep_space_in_offsets(part)


def _encode_bytes(text: str) -> EncodedText:
    ids = np.frombuffer(text.encode(), np.uint8).astype(np.int32)
    code_points = np.frombuffer(text.encode("utf-32-le"), np.uint32)
    widths = 1 + (code_points > 0x7F) + (code_points > 0x7FF) + (code_points > 0xFFFF)
    starts = np.repeat(np.arange(len(code_points), dtype=np.int32), widths)
    return EncodedText(ids, np.stack([starts, starts + 1], axis=1), np.zeros(len(ids), np.bool_))


def tokenizer_files(
    source: str, vocabulary: int, context: int, base: Path | None = None
) -> tuple[dict[str, bytes], int | None]:
    """Returns the tokenizer files of a manifest's tokenizer for transformers, and the id that ends a document.

    The files are tokenizer.json and tokenizer_config.json: file name -> content; nothing is written. "bytes" becomes an
    equivalent byte-level tokenizer, with id 0 as the end; another tokenizer file is returned unchanged, with a new
    tokenizer_config.json, and None as the end if it has no end_of_text. context: the longest input in tokens. source,
    vocabulary, base: see open_tokenizer. Raises ManifestError if the tokenizer has more ids than `vocabulary` or the
    file is not a tokenizer file, DiskError if it cannot be read, LocalError without the package `tokenizers`.
    """
    tokenizer = open_tokenizer(source, vocabulary, base=base)
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": context,
        "model_input_names": ["input_ids", "attention_mask"],  # transformers 4 would add token_type_ids
        "clean_up_tokenization_spaces": False,
    }
    end_of_text: int | None = None
    if isinstance(tokenizer, JsonTokenizer):
        content = tokenizer.content
        if tokenizer.end_of_text is not None:
            config["eos_token"] = tokenizer.end_of_text
            end_of_text = int(tokenizer.separator[0])
    else:
        content = _json_content(byte_tokenizer_json())
        end_of_text = int(tokenizer.separator[0])
    return {TOKENIZER_FILE: content, TOKENIZER_CONFIG_FILE: _json_content(config)}, end_of_text


def byte_tokenizer_json() -> dict[str, Any]:
    """Returns the content of a tokenizer.json whose ids are the bytes of UTF-8: a byte-level BPE without merges.

    It has no special tokens: a special token for id 0, the byte 0, would need a spelling, which a text could contain.
    """
    # GPT-2's spelling of bytes: a visible one is itself, the others are U+0100 and the characters after it.
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = [byte for byte in range(256) if byte not in visible]
    spelling = [chr(byte) if byte in visible else chr(0x100 + hidden.index(byte)) for byte in range(256)]
    bytewise = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    model: dict[str, Any] = {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        "vocab": {character: byte for byte, character in enumerate(spelling)},
        "merges": [],
    }
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": bytewise,
        "post_processor": None,
        "decoder": bytewise,
        "model": model,
    }


def _json_content(value: dict[str, Any]) -> bytes:
    return json.dumps(value, indent=2).encode() + b"\n"
