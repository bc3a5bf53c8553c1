"""Opens a data file, compressed or not; an error names the content of a file that does not match its suffix."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import re
import shlex
import zlib
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

from agora_protocol.errors import DataError, DiskError

from agora.core.optional_packages import import_optional
from agora.data.tokenizer import LFS_POINTER, LFS_WORDS

LONGEST_RECORD: Final = 64 << 20  # characters or bytes
CHUNK: Final = 1 << 20  # characters that are read at a time
# What opening, reading and decompressing a file raises.
READ_ERRORS: Final = (OSError, EOFError, zlib.error, lzma.LZMAError)


def changed_while_read(name: str) -> DataError:
    return DataError(
        f"{name} has changed while it was read, so that what was read is neither the old data nor the new; wait until "
        "nothing writes there, or name a copy, and start again."
    )


def unreadable_data(path: Path, error: Exception) -> DataError | DiskError:
    """The error for READ_ERRORS: DiskError if the operating system refused, DataError if what it read is damaged."""
    if isinstance(error, OSError) and error.errno is not None:
        return DiskError(f"Cannot read {path} ({error.strerror or error}); correct the path or its permissions.")
    return DataError(f"{path} is damaged or cut off ({str(error)[:200]!r}); fetch or write it again.")


COMPRESSIONS: Final = (".gz", ".bz2", ".xz", ".zst")
HEAD: Final = 512  # bytes at the beginning of a file by which it is judged
# The first bytes of a file -> what it is and what to do.
CONTENTS: Final[tuple[tuple[bytes, str], ...]] = (
    (LFS_POINTER, LFS_WORDS),
    (b"PAR1", "a parquet table; rename it to end in .parquet"),
    (b"ARROW1", "an arrow file; convert it to .parquet"),
    (b"\x1f\x8b", "compressed by gzip; rename it to end in .gz, such as x.jsonl.gz"),
    (b"\x28\xb5\x2f\xfd", "compressed by zstd; rename it to end in .zst, such as x.jsonl.zst"),
    (b"BZh", "compressed by bzip2; rename it to end in .bz2, such as x.jsonl.bz2"),
    (b"\xfd7zXZ\0", "compressed by xz; rename it to end in .xz, such as x.jsonl.xz"),
    (b"PK\x03\x04", "a zip archive; unpack it"),
    (b"SQLite format 3\0", "a database of SQLite; export its table as .csv"),
)
TAR: Final = slice(257, 262), b"ustar"
WEB_PAGES: Final = (b"<!doctype html", b"<html")
BOMS: Final = (
    (b"\xff\xfe\0\0", "UTF-32"),
    (b"\0\0\xfe\xff", "UTF-32"),
    (b"\xff\xfe", "UTF-16"),
    (b"\xfe\xff", "UTF-16"),
)


def format_suffix(path: Path) -> str:
    """Returns the suffix that says a file's format, in lower case: ".jsonl" for a.JSONL and for a.jsonl.gz."""
    name = Path(path.name.lower())
    return Path(name.stem).suffix if name.suffix in COMPRESSIONS else name.suffix


def known_suffixes(readers: Mapping[str, object]) -> str:
    """Returns the suffixes in `readers` for an error sentence: ".a, .b or .c"."""
    return " or ".join(", ".join(readers).rsplit(", ", 1))


def open_text(path: Path) -> io.BufferedReader:
    """Opens a file of text for reading bytes, and decompresses it if its suffix says so.

    Raises DataError, which names what the file is instead, for what is no text in UTF-8 by its first bytes; OSError.
    """
    with path.open("rb") as raw:
        beginning = raw.read(HEAD)
    if path.suffix.lower() not in COMPRESSIONS or beginning.startswith(LFS_POINTER):
        refuse_other_content(beginning, path)
    with ExitStack() as closing:
        file = closing.enter_context(_decompressed(path))
        head = file.peek(HEAD)[:HEAD]
        refuse_other_content(head, path)
        if encoding := _wide_encoding(head):
            raise DataError(f"{path} is {encoding} text, not UTF-8; {_iconv(path, encoding)}.")
        closing.pop_all()  # the caller closes it
    return file


def refuse_other_content(head: bytes, path: Path) -> None:
    """Raises DataError if the first bytes of a file are those of CONTENTS, a tar archive or a web page, and says so."""
    for beginning, kind in CONTENTS:
        if head.startswith(beginning):
            raise DataError(f"{path} is {kind}.")
    if head[TAR[0]] == TAR[1]:
        raise DataError(f"{path} is a tar archive; unpack it.")
    if head.lstrip().lower().startswith(WEB_PAGES):
        raise DataError(
            f"{path} is a web page, perhaps an error of the site that it came from; download the file again."
        )


def not_utf8(path: Path, where: str, text: bytes, error: UnicodeDecodeError) -> DataError:
    """The error for text that is not UTF-8: names the byte, the encoding that it looks like, and the command."""
    encoding = _guess_encoding(text)
    byte = error.object[error.start]
    return DataError(f"{where} is not UTF-8 text (byte 0x{byte:02x}), perhaps {encoding}; {_iconv(path, encoding)}.")


def _iconv(path: Path, encoding: str) -> str:
    into = shlex.quote(f"utf8-{path.name}")
    return f"convert it, for example with `iconv -f {encoding} -t UTF-8 {shlex.quote(path.name)} > {into}`"


def _decompressed(path: Path) -> io.BufferedReader:
    match path.suffix.lower():
        case ".gz":
            stream: Any = gzip.open(path)  # noqa: SIM115, closed with the reader
        case ".bz2":
            stream = bz2.open(path)  # noqa: SIM115
        case ".xz":
            stream = lzma.open(path)  # noqa: SIM115
        case ".zst":
            stream = import_pyarrow(path).input_stream(str(path), compression="zstd")
        case _:
            return path.open("rb")
    return io.BufferedReader(stream)


def _wide_encoding(head: bytes) -> str | None:
    for bom, name in BOMS:
        if head.startswith(bom):
            return name
    match [byte != 0 for byte in head[:4]]:
        case [True, False, True, False]:
            return "UTF-16LE"
        case [False, True, False, True]:
            return "UTF-16BE"
        case [True, False, False, False] | [False, False, False, True]:
            return "UTF-32"
    return None


def _guess_encoding(text: bytes) -> str:
    # Of two bytes each, GBK's frequent characters begin with 0xb0 to 0xd7, Cyrillic small letters are 0xe0 to 0xff, and
    # those of Japanese kana begin with 0x82 or 0x83. Letters of Latin-1 stand alone, or two together.
    text = text[:CHUNK]
    if len(re.findall(rb"[\x82\x83][\x40-\xf1]", text)) * 2 > len(re.findall(rb"[\x81-\xfc][\x40-\xfc]", text)):
        return "SHIFT_JIS"
    if not re.search(rb"[\x80-\xff]{3}", text):
        return "WINDOWS-1252"
    runs = re.findall(rb"[\x80-\xff]{2,}", text)
    leads = [run[index] for run in runs for index in range(0, len(run) - 1, 2)]
    if leads and sum(0xB0 <= lead <= 0xD7 for lead in leads) * 2 > len(leads):
        return "GBK"
    if leads and sum(lead >= 0xC0 for lead in leads) * 2 > len(leads):
        return "WINDOWS-1251"
    return "WINDOWS-1252"


def import_pyarrow(path: Path) -> Any:
    for module in ("pyarrow.ipc", "pyarrow.parquet"):
        import_optional(module, f"Reading {path}", "data")
    return import_optional("pyarrow", f"Reading {path}", "data")
