"""`.parquet` and `.arrow` files (IPC files, and the streams that Hugging Face datasets saves): a document a row.

pyarrow reads them batch by batch. Rows are taken out one by one: a dictionary may stand for far more than memory holds.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from common.errors import DataError
from common.packages import optional_package
from dataset.reading import faults
from dataset.reading.faults import BadLine, Item, check_column

# pyarrow is optional and has no types of its own: these names only tell the reader which of its classes is meant.
ArrowArray = Any
ArrowType = Any
ArrowSchema = Any
ParquetMetadata = Any

# A batch of a parquet file has at most so many rows, and fewer where these would take more than a few megabytes.
MOST_ROWS = 1024
BATCH_BYTES = 4 << 20

# A file with a table of contents at its end begins with this; a stream has neither.
ARROW_FILE_MAGIC = b"ARROW1"

# What a finished stream ends with: a message of length 0, as Arrow writes it today and as it did before 0.15
# (https://arrow.apache.org/docs/format/Columnar.html#ipc-streaming-format).
END_MARKS = (b"\xff\xff\xff\xff\0\0\0\0", b"\0\0\0\0")


class TableReader:
    """Reads one file. done: which share of it was read, from 0 to 1."""

    def __init__(self, path: Path, text_field: str) -> None:
        self.path = path
        self.text_field = text_field
        self.kind = path.suffix.lower()
        self.arrow = optional_package("pyarrow", f"to read {self.kind}")
        self.done = 0.0
        # The type of bytes that a column of texts or bytes can be viewed as
        self.bytes_type: dict[ArrowType, ArrowType] = {}
        for text, raw in (("string", "binary"), ("large_string", "large_binary"), ("string_view", "binary_view")):
            for name in (text, raw):
                self.bytes_type[getattr(self.arrow, name)()] = getattr(self.arrow, raw)()

    def rows(self) -> Iterator[Item]:
        """(row of the file from 1, text or (kind, reason) of a fault) of each row; empty texts are left out.

        Errors: DataError.
        """
        row = 0
        try:
            for column in self._parquet_columns() if self.kind == ".parquet" else self._ipc_columns():
                for raw in self._values(column):
                    row += 1
                    value = self._text(raw)
                    if value:
                        yield row, value
        except BadLine as bad:
            yield row + 1, bad.args
        except (self.arrow.ArrowException, OSError, MemoryError, UnicodeDecodeError) as error:
            reason = " ".join(str(error).split())[:120]
            name = "a parquet" if self.kind == ".parquet" else "an Arrow"
            raise DataError(f"{self.path}: not {name} file that can be read ({reason}); fetch it again") from None

    def _parquet_columns(self) -> Iterator[ArrowArray]:
        """The text column, an array of some rows at a time."""
        parquet = optional_package("pyarrow.parquet", "to read .parquet")
        # Before the file is opened with the column's name, of which one that is not there would be a KeyError of pyarrow.
        self._check_schema(parquet.read_schema(self.path))
        # With a dictionary, equal texts are held once; a buffer, so that a row group is not read whole.
        options = {"read_dictionary": [self.text_field], "buffer_size": 1 << 20}
        with parquet.ParquetFile(self.path, **options) as file:
            rows = 0
            for batch in file.iter_batches(batch_size=_batch_rows(file.metadata), columns=[self.text_field]):
                rows += len(batch)
                self.done = rows / max(file.metadata.num_rows, 1)
                # By name: "a.b" also asks for what is inside of a column "a", which comes before it.
                yield batch.column(self.text_field)

    def _ipc_columns(self) -> Iterator[ArrowArray]:
        """The text column, a record batch at a time, of a file with a table of contents or of a stream without one."""
        ipc = optional_package("pyarrow.ipc", "to read .arrow")
        size = max(self.path.stat().st_size, 1)
        with self.arrow.memory_map(str(self.path)) as source:
            is_file = source.read(len(ARROW_FILE_MAGIC)) == ARROW_FILE_MAGIC
            open_table = ipc.open_file if is_file else ipc.open_stream
            # Opened twice, as a .parquet: columns that are not read are not decompressed.
            source.seek(0)
            schema = open_table(source).schema
            self._check_schema(schema)
            source.seek(0)
            options = ipc.IpcReadOptions(included_fields=[schema.get_field_index(self.text_field)])
            table = open_table(source, options=options)
            if is_file:
                for i in range(table.num_record_batches):
                    self.done = (i + 1) / table.num_record_batches
                    yield table.get_batch(i).column(self.text_field)
                return
            end_of_batch = source.tell()
            for batch in table:
                end_of_batch = source.tell()
                self.done = end_of_batch / size
                yield batch.column(self.text_field)
            # pyarrow takes the end of the file for the end of the stream. A copy that was cut between two messages
            # would be a shorter corpus without a word.
            end = source.tell()
            source.seek(end_of_batch)
            if source.read(end - end_of_batch) not in END_MARKS:
                reason = "the stream ends without its end mark: the file is cut off, or its writer was stopped"
                raise BadLine("cut file", reason)

    def _check_schema(self, schema: ArrowSchema) -> None:
        """Errors: DataError where there is no text column of the name, or two."""
        check_column(self.text_field, schema.names, str(self.path))
        kind = schema.field(self.text_field).type
        of_values = kind.value_type if self.arrow.types.is_dictionary(kind) else kind
        if of_values != self.arrow.null() and of_values not in self.bytes_type:
            raise DataError(
                f"{self.path}: column {self.text_field!r} is of type {str(kind)[:80]}, not text "
                "(--text_field names another one)"
            )

    # Two things make a text column dangerous. A dictionary of one long text and a million indices stands for a million
    # times the memory of the file, so a text is made for one row at a time and never for a whole column. And pyarrow
    # believes the offsets and indices that a file gives: a wrong one would be followed out of the memory of the file,
    # which ends the process or reads what is not its own. So both are checked before any value is looked at. UTF-8 is
    # left out of that check (texts are viewed as bytes), for it would refuse the whole file where one row is bad.
    def _values(self, column: ArrowArray) -> Iterator[Any]:
        """pyarrow's binary scalar of each row of an array; None or an invalid one for a null."""
        is_dictionary = self.arrow.types.is_dictionary(column.type)
        values = column.dictionary if is_dictionary else column
        if values.type != self.arrow.null():
            values = values.view(self.bytes_type[values.type])
        values.validate(full=True)
        if not is_dictionary:
            for i in range(len(values)):
                yield values[i]
            return
        column.indices.validate(full=True)
        # Indices are small: they may be held as Python's numbers, which the texts may not.
        for index in column.indices.to_pylist():
            if index is not None and not 0 <= index < len(values):
                raise self.arrow.ArrowInvalid(f"index {index} into a dictionary of {len(values)} entries")
            yield None if index is None else values[index]

    def _text(self, scalar: Any) -> str | tuple[str, str]:
        """The text of one row, or (kind, reason) of its fault."""
        if scalar is None or not scalar.is_valid:
            return "text is null", f"{self.text_field!r} is a null, not a string"
        # A buffer points into the batch. The bytes are copied only once their number is known to be bounded.
        buffer = scalar.as_buffer()
        if buffer.size > faults.MAX_DOCUMENT_BYTES:
            return faults.too_long("value")
        raw: bytes = buffer.to_pybytes()
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError as error:
            return "bad UTF-8", f"{self.text_field!r} is not UTF-8: byte 0x{raw[error.start]:02x} at {error.start + 1}"


def _batch_rows(metadata: ParquetMetadata) -> int:
    """How many rows of a parquet file are read at a time, so that they take few megabytes by what the file says."""
    # Bytes of a row, as the mean of the row group where it is largest; all columns count, though one is read.
    largest = 1
    for i in range(metadata.num_row_groups):
        group = metadata.row_group(i)
        largest = max(largest, group.total_byte_size // max(group.num_rows, 1))
    return max(1, min(MOST_ROWS, BATCH_BYTES // largest))
