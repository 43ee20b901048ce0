"""`.parquet` and `.arrow` files (IPC files, and the streams that Hugging Face datasets saves): one document per row, which is
the text of a column or, for chats and ANY_TEXT, the row as a JSON object.

pyarrow reads batch by batch. Rows are taken out one by one: a dictionary can expand to more than fits in memory.
"""

import json
import re
from collections.abc import Iterator
from numbers import Number
from pathlib import Path
from types import ModuleType
from typing import Any

from common.errors import DataError, optional_package
from common.wording import one_line
from dataset.reading import faults
from dataset.reading.chat_forms import shape_of
from dataset.reading.faults import BadLine, RawDocument, check_column, too_long
from dataset.reading.json_files import WHOLE_ROWS
from dataset.reading.streams import Stream

# pyarrow is optional and untyped: these names only show which of its classes is meant.
ArrowArray = Any
ArrowBatch = Any
ArrowSchema = Any

# Upper bounds of a parquet batch: rows, and their estimated bytes
MAX_BATCH_ROWS = 1024
BATCH_BYTES = 4 << 20

# Maximum bytes of texts for a byte of their file: pyarrow takes many times the memory of a text before its length is known.
MAX_EXPANSION = 1000
# In IPC files, an LZ4 or zstd frame behind the length of its buffer, an aligned number: one of a terabyte or more is a chance
# hit in an image or text. Where to look, since a longer file cannot expand as much.
FRAME = re.compile(rb"(?:\x04\x22\x4d\x18|\x28\xb5\x2f\xfd)(?<=\0\0\0....)", re.DOTALL)
SCANNED_BYTES = 64 << 20

# {type of texts: the type of their bytes}
BYTES_TYPES = {"string": "binary", "large_string": "large_binary", "string_view": "binary_view"}

# First bytes of an IPC file, which ends with a table of contents; a stream has neither
ARROW_FILE_MAGIC = b"ARROW1"

# End marks of a complete stream: a message of length 0, as written today and before Arrow 0.15
# (https://arrow.apache.org/docs/format/Columnar.html#ipc-streaming-format).
END_MARKS = (b"\xff\xff\xff\xff\0\0\0\0", b"\0\0\0\0")


def find_values(stream: Stream, path: str, text_field: str) -> Iterator[RawDocument]:
    """Yields (row number from 1, bytes of its text or fault); for WHOLE_ROWS the bytes of a JSON object with all columns.

    pyarrow opens the file itself; `stream` is only moved along, to show progress as for other formats.
    Errors: DataError.
    """
    suffix = Path(path).suffix.lower()
    arrow = optional_package("pyarrow", f"to read {suffix}")
    size = Path(path).stat().st_size
    batches = _parquet_batches if suffix == ".parquet" else _ipc_batches
    is_whole = text_field in WHOLE_ROWS
    row = 0
    try:
        for share, batch in batches(arrow, path, None if is_whole else text_field):
            stream.seek(int(share * size))
            for raw in _objects(arrow, batch) if is_whole else _texts(arrow, batch, text_field):
                row += 1
                yield row, raw
    except BadLine as bad:
        yield row + 1, bad
    except (arrow.ArrowException, OSError, MemoryError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read as {suffix} ({one_line(error)[:120]}); fetch it again") from None


def text_of_value(raw: bytes, text_field: str) -> str:
    """The text of a value. Errors: BadLine."""
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        where = f"byte 0x{raw[error.start]:02x} at {error.start + 1}"
        raise BadLine("bad UTF-8", f"{text_field!r} is not UTF-8: {where}") from None


def _parquet_batches(arrow: ModuleType, path: str, text_field: str | None) -> Iterator[tuple[float, ArrowBatch]]:
    """Yields (share of the file read, from 0 to 1; the next rows). text_field: the only column that is read; None: all are."""
    parquet = optional_package("pyarrow.parquet", "to read .parquet")
    metadata = parquet.read_metadata(path)
    # Before the file is opened with the column's name: pyarrow raises KeyError for a missing column.
    _check_schema(arrow, metadata.schema.to_arrow_schema(), path, text_field)
    names = [column.path for column in metadata.schema] if text_field is None else [text_field]
    # Mean bytes of a row in the row group where they are largest; all columns count, though one is read.
    row_bytes = 1
    for group in map(metadata.row_group, range(metadata.num_row_groups)):
        row_bytes = max(row_bytes, group.total_byte_size // max(group.num_rows, 1))
        for column in map(group.column, range(group.num_columns)):
            if column.path_in_schema in names:
                _check_size(path, column.total_uncompressed_size, column.total_compressed_size, column.num_values)
    # read_dictionary: equal texts are held once. buffer_size: row groups are not read whole.
    with parquet.ParquetFile(path, read_dictionary=names, buffer_size=1 << 20) as file:
        batch_rows = max(1, min(MAX_BATCH_ROWS, BATCH_BYTES // row_bytes))
        rows = 0
        for batch in file.iter_batches(batch_size=batch_rows, columns=text_field and [text_field]):
            rows += len(batch)
            yield rows / max(metadata.num_rows, rows), batch


def _ipc_batches(arrow: ModuleType, path: str, text_field: str | None) -> Iterator[tuple[float, ArrowBatch]]:
    """The same for an IPC file or stream, one record batch at a time."""
    ipc = optional_package("pyarrow.ipc", "to read .arrow")
    with arrow.memory_map(path) as source:
        beginning = memoryview(source.read_buffer(SCANNED_BYTES))
        is_file = beginning[: len(ARROW_FILE_MAGIC)] == ARROW_FILE_MAGIC
        open_table = ipc.open_file if is_file else ipc.open_stream
        for at in map(re.Match.start, FRAME.finditer(beginning)):
            if at % 8 == 0:
                _check_size(path, int.from_bytes(beginning[at - 8 : at], "little"), source.size())
        # Opened twice, like a .parquet: unread columns are not decompressed.
        source.seek(0)
        schema = open_table(source).schema
        _check_schema(arrow, schema, path, text_field)
        source.seek(0)
        columns = text_field and [i for i, name in enumerate(schema.names) if f"{text_field}.".startswith(f"{name}.")]
        table = open_table(source, options=ipc.IpcReadOptions(included_fields=columns))
        if is_file:
            for i in range(table.num_record_batches):
                yield (i + 1) / table.num_record_batches, table.get_batch(i)
            return
        end_of_batch = source.tell()
        for batch in table:
            end_of_batch = source.tell()
            yield end_of_batch / source.size(), batch
        # pyarrow takes the end of the file for the end of the stream: a copy that was cut off between two messages
        # would silently be a shorter corpus.
        end = source.tell()
        source.seek(end_of_batch)
        if source.read(end - end_of_batch) not in END_MARKS:
            reason = "the stream ends without its end mark: the file is cut off, or its writer was stopped"
            raise BadLine("cut file", reason)


def _check_size(path: str, size: int, compressed: int, n_values: int = 1 << 30) -> None:
    """Errors: DataError if so many values, of `size` bytes once they are decompressed, hold one that is too long, or a bomb."""
    if size > faults.MAX_DOCUMENT_BYTES * n_values or size > max(faults.MAX_DOCUMENT_BYTES, MAX_EXPANSION * compressed):
        raise DataError(f"{path}: {too_long('text').args[1]} (by the file's own sizes, {size >> 20:,} MB)")


def _check_schema(arrow: ModuleType, schema: ArrowSchema, path: str, text_field: str | None) -> None:
    """Errors: DataError unless exactly one text column has the name, if one is named."""
    if text_field is None:
        return
    # A row, as far as the form of a chat shows in it
    row = {column.name: [""] if arrow.types.is_nested(column.type) else "" for column in schema}
    schema = _flattened(schema.empty_table(), text_field).schema
    check_column(text_field, schema.names, path, is_chat=shape_of(row) is not None)
    column_type = schema.field(text_field).type
    value_type = column_type.value_type if arrow.types.is_dictionary(column_type) else column_type
    if str(value_type) not in ("null", *BYTES_TYPES, *BYTES_TYPES.values()):
        raise DataError(
            f"{path}: column {text_field!r} is of type {str(column_type)[:80]}, not text (--text_field names another one)"
        )


def _flattened(table: Any, text_field: str) -> Any:
    """A table with the fields of structs, such as `translation.en`, as columns, as far down as `text_field` is."""
    for _ in range(text_field.count(".")):
        table.validate()
        table = table.flatten()
    return table


# A text column is dangerous in two ways. A dictionary of one long text and a million indices expands to a million times
# the size of the file, so texts are made row by row, never for a whole column. And pyarrow trusts the offsets and
# indices in a file: a wrong one would read outside of the file's memory, and crash or return foreign bytes. So both are
# validated before any value is read. UTF-8 is not (texts are viewed as bytes): one bad row would reject the whole file.
def _texts(arrow: ModuleType, batch: ArrowBatch, text_field: str) -> Iterator[bytes | BadLine]:
    """Yields the bytes of each text, or a fault."""
    column: ArrowArray = _flattened(arrow.Table.from_batches([batch]), text_field).column(text_field).chunk(0)
    is_dictionary = arrow.types.is_dictionary(column.type)
    values = column.dictionary if is_dictionary else column
    values = values.view(BYTES_TYPES.get(str(values.type), values.type))
    values.validate(full=True)
    if is_dictionary:
        column.indices.validate(full=True)
        # Errors: for an index out of bounds
        values = arrow.DictionaryArray.from_arrays(column.indices, values)
    for scalar in values:
        if is_dictionary and scalar.is_valid:
            scalar = scalar.value
        if not scalar.is_valid:
            yield BadLine("text is null", f"{text_field!r} is a null, not a string")
            continue
        # A buffer points into the batch: its bytes are copied only after its size is checked.
        buffer = scalar.as_buffer()
        yield too_long("value") if buffer.size > faults.MAX_DOCUMENT_BYTES else buffer.to_pybytes()


def _objects(arrow: ModuleType, batch: ArrowBatch) -> Iterator[bytes | BadLine]:
    """Yields the JSON object of each row, or a fault."""
    rows = batch.to_struct_array()
    rows.validate(full=True)
    for row in rows:
        try:
            value = _value(arrow, row, [faults.MAX_CONVERSATION_BYTES])
            yield json.dumps(value, ensure_ascii=False, default=_as_json).encode()
        except BadLine as bad:
            yield bad


# Value by value: a small row may have a million indices of one long text, or a list of a million nulls.
def _value(arrow: ModuleType, scalar: Any, bytes_left: list[int]) -> Any:
    """The value in Python, without null fields: Arrow gives each struct the fields of all.

    bytes_left: a number, which is lowered. Errors: BadLine if they do not suffice.
    """
    if isinstance(scalar, arrow.DictionaryScalar):
        scalar = scalar.value
    # 64: of a Python object
    bytes_left[0] -= 64
    if isinstance(scalar, arrow.BinaryScalar) and scalar.is_valid:
        bytes_left[0] -= scalar.as_buffer().size
    if bytes_left[0] < 0:
        raise too_long("conversation", faults.MAX_CONVERSATION_BYTES)
    if not scalar.is_valid:
        return None
    if isinstance(scalar, arrow.StructScalar):
        fields = {name: _value(arrow, value, bytes_left) for name, value in scalar.items()}
        return {name: value for name, value in fields.items() if value is not None}
    if isinstance(scalar, arrow.ListScalar):
        return [_value(arrow, value, bytes_left) for value in scalar.values]
    return scalar.as_py()


def _as_json(value: Any) -> Any:
    """A text in a binary column, a decimal; of images, dates and the like only what they are, which is no text."""
    try:
        return float(value) if isinstance(value, Number) else value.decode()  # type: ignore[arg-type]
    except (AttributeError, UnicodeDecodeError):
        return {"type": type(value).__name__}
