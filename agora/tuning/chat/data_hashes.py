"""Hashes the files that decide what a run trains on, and compares them with the hashes in its manifest."""

from __future__ import annotations

import hashlib
from pathlib import Path

from agora_protocol.errors import DataError

from agora.data.record_files import data_files, unreadable_data
from agora.tuning.chat.model_tokenizer import ModelTokenizer

READ_BYTES = 4 << 20


def hash_samples(path: Path) -> str:
    """Returns the SHA-256, in hex, of a data file's content.

    Of a `datasets` folder it is the hash of its data files' contents, concatenated in the order in which they are read
    (in folders written by `Dataset.save_to_disk`, the order of their names). Raises DiskError when a file cannot be
    read, DataError for any other folder.
    """
    digest = hashlib.sha256()
    for file in data_files(path):
        try:
            with file.open("rb") as stream:
                while block := stream.read(READ_BYTES):
                    digest.update(block)
        except OSError as error:
            raise unreadable_data(file, error) from error
    return digest.hexdigest()


def hash_tokenizer(tokenizer: ModelTokenizer) -> str:
    """Returns ModelTokenizer.fingerprint: a SHA-256, in hex, of tokenizer, special tokens, end of turn and template."""
    return tokenizer.fingerprint


def check_samples(path: Path, expected: str) -> None:
    """Raises DataError unless the samples in `path` have the SHA-256 `expected`; does nothing if `expected` is "".

    Reads all of the data. Raises DiskError when a file cannot be read, DataError also for a folder that is not a
    `datasets` folder.
    """
    if expected and (found := hash_samples(path)) != expected:
        raise DataError(
            f"{path} has the SHA-256 {found}, but the run trains on samples with {expected} ([data] samples_hash); "
            "copy the file from a peer that trains, or found a new run with yours."
        )


def check_tokenizer(tokenizer: ModelTokenizer, expected: str) -> None:
    """Raises DataError unless the tokenizer has the SHA-256 `expected`; does nothing if `expected` is ""."""
    if expected and (found := hash_tokenizer(tokenizer)) != expected:
        raise DataError(
            f"The tokenizer of {tokenizer.name}, with {tokenizer.template_name}, has the SHA-256 {found}, but the run "
            f"was made with {expected} ([data] tokenizer_hash); copy tokenizer.json, tokenizer_config.json and "
            "chat_template.jinja from a peer that trains, or found a new run with yours."
        )
