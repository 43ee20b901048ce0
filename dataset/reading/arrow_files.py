"""`.parquet` and `.arrow` files (IPC files, and the streams that Hugging Face datasets saves): a document a row.

pyarrow reads them batch by batch. Rows are taken out one by one: a dictionary may stand for far more than memory holds.
"""

from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from common.errors import DataError, optional_package
from dataset.reading import faults
from dataset.reading.faults import BadLine, Found, check_column, too_long
from dataset.reading.streams import Stream

# pyarrow is optional and has no types of its own: these names only tell the reader which of its classes is meant.
ArrowArray = Any
ArrowType = Any
ArrowSchema = Any

# A batch of a parquet file has at most so many rows, and fewer where these would take more than a few megabytes.
MOST_ROWS = 1024
BATCH_BYTES = 4 << 20

# A file with a table of contents at its end begins with this; a stream has neither.
ARROW_FILE_MAGIC = b"ARROW1"

# What a finished stream ends with: a message of length 0, as Arrow writes it today and as it did before 0.15
# (https://arrow.apache.org/docs/format/Columnar.html#ipc-streaming-format).
END_MARKS = (b"\xff\xff\xff\xff\0\0\0\0", b"\0\0\0\0")


def find_values(stream: Stream, path: str, text_field: str) -> Iterator[Found]:
    """(row of the file from 1, bytes of its text or fault) of each row.

    pyarrow opens the file itself; where it stands is told by the position of `stream`, as of other formats.
    Errors: DataError.
    """
    suffix = Path(path).suffix.lower()
    arrow = optional_package("pyarrow", f"to read {suffix}")
    size = Path(path).stat().st_size
    columns = _parquet_columns if suffix == ".parquet" else _ipc_columns
    row = 0
    try:
        for share, column in columns(arrow, path, text_field):
            stream.seek(int(share * size))
            for scalar in _scalars(arrow, column):
                row += 1
                if scalar is None or not scalar.is_valid:
                    yield row, BadLine("text is null", f"{text_field!r} is a null, not a string")
                    continue
                # A buffer points into the batch. The bytes are copied only once their number is known to be bounded.
                buffer = scalar.as_buffer()
                yield row, too_long("value") if buffer.size > faults.MAX_DOCUMENT_BYTES else buffer.to_pybytes()
    except BadLine as bad:
        yield row + 1, bad
    except (arrow.ArrowException, OSError, MemoryError, UnicodeDecodeError) as error:
        reason = " ".join(str(error).split())[:120]
        name = "a parquet" if suffix == ".parquet" else "an Arrow"
        raise DataError(f"{path}: not {name} file that can be read ({reason}); fetch it again") from None


def text_of_value(raw: bytes, text_field: str) -> str:
    """The text of a value. Errors: BadLine."""
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        where = f"byte 0x{raw[error.start]:02x} at {error.start + 1}"
        raise BadLine("bad UTF-8", f"{text_field!r} is not UTF-8: {where}") from None


def _parquet_columns(arrow: ModuleType, path: str, text_field: str) -> Iterator[tuple[float, ArrowArray]]:
    """(share of the file from 0 to 1, the text column up to there) of some rows at a time."""
    parquet = optional_package("pyarrow.parquet", "to read .parquet")
    # Before the file is opened with the column's name, of which one that is not there would be a KeyError of pyarrow.
    _check_schema(arrow, parquet.read_schema(path), path, text_field)
    # With a dictionary, equal texts are held once; a buffer, so that a row group is not read whole.
    with parquet.ParquetFile(path, read_dictionary=[text_field], buffer_size=1 << 20) as file:
        # Bytes of a row, as the mean of the row group where it is largest; all columns count, though one is read.
        row_bytes = 1
        for i in range(file.metadata.num_row_groups):
            group = file.metadata.row_group(i)
            row_bytes = max(row_bytes, group.total_byte_size // max(group.num_rows, 1))
        batch_rows = max(1, min(MOST_ROWS, BATCH_BYTES // row_bytes))
        rows = 0
        for batch in file.iter_batches(batch_size=batch_rows, columns=[text_field]):
            rows += len(batch)
            # By name: "a.b" also asks for what is inside of a column "a", which comes before it.
            yield rows / max(file.metadata.num_rows, rows), batch.column(text_field)


def _ipc_columns(arrow: ModuleType, path: str, text_field: str) -> Iterator[tuple[float, ArrowArray]]:
    """The same of a record batch at a time, of a file with a table of contents or of a stream without one."""
    ipc = optional_package("pyarrow.ipc", "to read .arrow")
    with arrow.memory_map(path) as source:
        is_file = source.read(len(ARROW_FILE_MAGIC)) == ARROW_FILE_MAGIC
        open_table = ipc.open_file if is_file else ipc.open_stream
        # Opened twice, as a .parquet: columns that are not read are not decompressed.
        source.seek(0)
        schema = open_table(source).schema
        _check_schema(arrow, schema, path, text_field)
        source.seek(0)
        table = open_table(source, options=ipc.IpcReadOptions(included_fields=[schema.get_field_index(text_field)]))
        if is_file:
            for i in range(table.num_record_batches):
                yield (i + 1) / table.num_record_batches, table.get_batch(i).column(text_field)
            return
        end_of_batch = source.tell()
        for batch in table:
            end_of_batch = source.tell()
            yield end_of_batch / source.size(), batch.column(text_field)
        # pyarrow takes the end of the file for the end of the stream. A copy that was cut between two messages
        # would be a shorter corpus without a word.
        end = source.tell()
        source.seek(end_of_batch)
        if source.read(end - end_of_batch) not in END_MARKS:
            reason = "the stream ends without its end mark: the file is cut off, or its writer was stopped"
            raise BadLine("cut file", reason)


def _bytes_types(arrow: ModuleType) -> dict[ArrowType, ArrowType]:
    """{type of a column of texts or bytes: the type of bytes that it can be viewed as}."""
    types = {}
    for text, raw in (("string", "binary"), ("large_string", "large_binary"), ("string_view", "binary_view")):
        for name in (text, raw):
            types[getattr(arrow, name)()] = getattr(arrow, raw)()
    return types


def _check_schema(arrow: ModuleType, schema: ArrowSchema, path: str, text_field: str) -> None:
    """Errors: DataError where there is no text column of the name, or two."""
    check_column(text_field, schema.names, path)
    kind = schema.field(text_field).type
    of_values = kind.value_type if arrow.types.is_dictionary(kind) else kind
    if of_values != arrow.null() and of_values not in _bytes_types(arrow):
        raise DataError(
            f"{path}: column {text_field!r} is of type {str(kind)[:80]}, not text (--text_field names another one)"
        )


# Two things make a text column dangerous. A dictionary of one long text and a million indices stands for a million
# times the memory of the file, so a text is made for one row at a time and never for a whole column. And pyarrow
# believes the offsets and indices that a file gives: a wrong one would be followed out of the memory of the file,
# which ends the process or reads what is not its own. So both are checked before any value is looked at. UTF-8 is
# left out of that check (texts are viewed as bytes), for it would refuse the whole file where one row is bad.
def _scalars(arrow: ModuleType, column: ArrowArray) -> Iterator[Any]:
    """pyarrow's binary scalar of each row of an array; None or an invalid one for a null."""
    is_dictionary = arrow.types.is_dictionary(column.type)
    values = column.dictionary if is_dictionary else column
    if values.type != arrow.null():
        values = values.view(_bytes_types(arrow)[values.type])
    values.validate(full=True)
    if not is_dictionary:
        for i in range(len(values)):
            yield values[i]
        return
    column.indices.validate(full=True)
    # Indices are small: they may be held as Python's numbers, which the texts may not.
    for index in column.indices.to_pylist():
        if index is not None and not 0 <= index < len(values):
            raise arrow.ArrowInvalid(f"index {index} into a dictionary of {len(values)} entries")
        yield None if index is None else values[index]
