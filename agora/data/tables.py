"""The rows of tables, parquet and the arrow files of a `datasets` folder, in batches of bounded size."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
from agora_protocol.errors import DataError
from numpy.typing import NDArray

from agora.data.data_file import (
    CHUNK,
    HEAD,
    LONGEST_RECORD,
    import_pyarrow,
    refuse_other_content,
)

ROWS: Final = 256  # rows of a table that are decoded at a time
STATE_FILE: Final = "state.json"
SPLITS_FILE: Final = "dataset_dict.json"
# A file of some hundred bytes can decode to gigabytes: a column says once what all of its rows hold, and compresses. So
# texts stay shared (dictionary-encoded) until their decoded bytes are known, and only so many rows are decoded at once.
DECODED_BYTES: Final = 16 << 20  # decoded bytes of rows that are in memory together, if not one row has more
BATCH_BYTES: Final = 32 << 20  # of a table's column, not decoded, that are read at once
MOST_VALUES: Final = 1 << 26  # of a column's chunk, in lists too
MOST_EXPANSION: Final = 1000  # uncompressed by compressed bytes of a chunk that is larger than LARGE_CHUNK
LARGE_CHUNK: Final = 1 << 30
VALUE_BYTES: Final = 16  # at least, of any value


def parquet_batches(path: Path, columns: Collection[str] | None) -> Iterator[Any]:
    """Yields the rows of a parquet table as pyarrow.RecordBatch, each with at most DECODED_BYTES or one row.

    columns: None for all. Raises DataError for a malformed table and for a value longer than LONGEST_RECORD, before it
    is decoded; OSError, LocalError without pyarrow.
    """
    pyarrow = import_pyarrow(path)
    with path.open("rb") as file:
        head = file.read(HEAD)
    if not head.startswith(b"PAR1"):
        refuse_other_content(head, path)
    try:
        with pyarrow.parquet.ParquetFile(path) as table:
            names = [name for name in table.schema_arrow.names if columns is None or name in columns]
            shared = _dictionary_columns(table.metadata)
        row = 0
        # Without pre_buffer, and with a buffer, pages are read one by one instead of whole row groups.
        options = {"read_dictionary": sorted(shared), "pre_buffer": False, "buffer_size": CHUNK}
        with pyarrow.parquet.ParquetFile(path, **options) as table:
            for group in range(table.num_row_groups):
                rows = _rows_at_once(table.metadata.row_group(group), names, shared, path)
                for batch in table.iter_batches(rows, row_groups=[group], columns=names, use_threads=False):
                    yield from bounded_slices(batch, path, row)
                    row += batch.num_rows
    except (pyarrow.ArrowException, UnicodeDecodeError) as error:
        raise unreadable_table(path, error) from error
    except OSError as error:
        if error.errno is not None:
            raise
        raise unreadable_table(path, error) from error


def _dictionary_columns(metadata: Any) -> set[str]:
    # pyarrow cannot read the encodings DELTA_* of texts as dictionaries.
    groups = [metadata.row_group(index) for index in range(metadata.num_row_groups)]
    chunks = [group.column(index) for group in groups for index in range(group.num_columns)]
    texts = {chunk.path_in_schema for chunk in chunks if chunk.physical_type == "BYTE_ARRAY"}
    return texts - {chunk.path_in_schema for chunk in chunks if any("DELTA" in name for name in chunk.encodings)}


def _rows_at_once(group: Any, names: Collection[str], shared: Collection[str], path: Path) -> int:
    # Many at once where texts are shared: each batch has the texts of all batches before it.
    rows = max(int(group.num_rows), 1)
    for chunk in (group.column(index) for index in range(group.num_columns)):
        if chunk.path_in_schema.partition(".")[0] not in names:
            continue
        size = max(int(chunk.total_uncompressed_size), 1)
        expansion = size / max(chunk.total_compressed_size, 1)
        if chunk.num_values > MOST_VALUES or (size > LARGE_CHUNK and expansion > MOST_EXPANSION):
            raise DataError(
                f"{path} has {chunk.num_values:,} values of {size >> 20:,} MiB in one row group of the column "
                f"{chunk.path_in_schema!r}, made of {chunk.total_compressed_size:,} bytes; write it again with smaller "
                "row groups, or do not trust it."
            )
        if chunk.path_in_schema in shared or chunk.physical_type != "BYTE_ARRAY":
            limit = max(group.num_rows * BATCH_BYTES // size, ROWS)
        else:
            limit = min(BATCH_BYTES // size, ROWS)  # each row may decode to as much as the whole chunk has
        rows = min(rows, max(limit, 1))
    return rows


def arrow_batches(path: Path, columns: Collection[str] | None) -> Iterator[Any]:
    pyarrow = import_pyarrow(path)
    row = 0
    for file in arrow_files(path):
        with file.open("rb") as opened:
            refuse_other_content(opened.read(HEAD), file)
        try:
            with pyarrow.memory_map(str(file)) as source, pyarrow.ipc.open_stream(source) as stream:
                for batch in stream:
                    wanted = [name for name in batch.schema.names if columns is None or name in columns]
                    yield from bounded_slices(batch.select(wanted), path, row)
                    row += batch.num_rows
        except (pyarrow.ArrowException, UnicodeDecodeError) as error:
            raise unreadable_table(file, error) from error


def bounded_slices(batch: Any, path: Path, rows_before: int) -> Iterator[Any]:
    """Cuts a pyarrow.RecordBatch into slices of at most ROWS rows and DECODED_BYTES, or of one row.

    Raises DataError, with the row's number, for a row that decodes to more than LONGEST_RECORD.
    """
    for start in range(0, batch.num_rows, ROWS):
        part = batch.slice(start, ROWS)
        sizes = sum((_row_bytes(column) for column in part.columns), np.zeros(part.num_rows, np.int64))
        if len(sizes) and int(sizes.max()) > LONGEST_RECORD:
            number = rows_before + start + int(sizes.argmax()) + 1
            raise DataError(f"{path} row {number} is longer than {LONGEST_RECORD >> 20} MiB; split that record.")
        first = 0
        while first < part.num_rows:
            count = max(1, int(np.searchsorted(np.cumsum(sizes[first:]), DECODED_BYTES, side="right")))
            yield part.slice(first, count)
            first += count


def _row_bytes(array: Any) -> NDArray[np.int64]:
    # What each row of a pyarrow.Array decodes to, [n], although its texts may be stored once for many rows.
    return np.asarray(_decoded_bytes(array), np.int64)


def _decoded_bytes(array: Any) -> Any:
    import pyarrow
    import pyarrow.compute

    types, kind = pyarrow.types, array.type
    if isinstance(kind, pyarrow.BaseExtensionType):
        return _row_bytes(array.storage)
    if types.is_dictionary(kind):
        sizes = np.append(_row_bytes(array.dictionary), 0)  # the last: of a null
        indices = array.indices.fill_null(len(sizes) - 1) if array.null_count else array.indices
        return sizes[indices.to_numpy(zero_copy_only=False).astype(np.int64)]
    if types.is_struct(kind):
        children = (_row_bytes(array.field(index)) for index in range(kind.num_fields))
        return sum(children, np.full(len(array), VALUE_BYTES, np.int64))
    if types.is_list(kind) or types.is_large_list(kind) or types.is_map(kind):
        offsets = array.offsets.to_numpy(zero_copy_only=False).astype(np.int64)
        inner = _row_bytes(array.values.slice(offsets[0], offsets[-1] - offsets[0]))  # of a slice only its own
        ends = np.concatenate([[0], np.cumsum(inner)])
        offsets -= offsets[0]
        return ends[offsets[1:]] - ends[offsets[:-1]] + VALUE_BYTES
    if types.is_fixed_size_list(kind):
        values = array.values.slice(array.offset * kind.list_size, len(array) * kind.list_size)
        return _row_bytes(values).reshape(len(array), kind.list_size).sum(axis=1) + VALUE_BYTES
    if types.is_string(kind) or types.is_large_string(kind) or types.is_binary(kind) or types.is_large_binary(kind):
        lengths = pyarrow.compute.binary_length(array).fill_null(0)
        return lengths.to_numpy(zero_copy_only=False).astype(np.int64) + VALUE_BYTES
    if types.is_null(kind) or types.is_boolean(kind) or types.is_primitive(kind) or types.is_decimal(kind):
        return np.full(len(array), VALUE_BYTES, np.int64)
    if types.is_fixed_size_binary(kind):
        return np.full(len(array), kind.byte_width + VALUE_BYTES, np.int64)
    raise DataError(f"A column of the type {kind} is not read; write it as text, numbers, lists or structs.")


def arrow_files(folder: Path) -> list[Path]:
    if (folder / SPLITS_FILE).is_file():
        splits = sorted(path.parent.name for path in folder.glob(f"*/{STATE_FILE}"))
        raise DataError(f"{folder} holds the splits {', '.join(map(repr, splits))}; give the folder of one of them.")
    if not (folder / STATE_FILE).is_file():
        problem = f"{folder} is not a folder that `Dataset.save_to_disk` wrote: it has no {STATE_FILE}; give a file."
        raise DataError(problem)
    try:
        state = json.loads((folder / STATE_FILE).read_bytes())
        names = [entry["filename"] for entry in state["_data_files"]]
        if any(Path(name).name != name for name in names):
            raise ValueError("a file outside of the folder")
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        problem = f"{folder / STATE_FILE} does not list the arrow files of its folder; save the data set again."
        raise DataError(problem) from error
    return [folder / name for name in names]


def unreadable_table(path: Path, error: Exception) -> DataError:
    return DataError(f"{path} is not a readable table ({str(error)[:200]!r}); fetch or write it again.")
