"""A `.csv` or `.tsv` file: a header that names the columns, then a document a row. Python's csv module reads the rows,
so that a quoted field may hold commas, quotes and line breaks; this file bounds them and tells their faults.
"""

import csv
from collections.abc import Iterator, Sequence

from common.errors import DataError
from dataset.reading import limits
from dataset.reading.faults import BadLine, Item, not_utf8, nul_in_text
from dataset.reading.json_lines import BOM
from dataset.reading.line_reader import LineReader, Stream

# Of a header, in a line on what is wrong with it.
MOST_NAMES_SHOWN = 8
LONGEST_NAME_SHOWN = 40


def read_csv(stream: Stream, path: str, text_field: str, delimiter: str) -> Iterator[Item]:
    """(line where the row begins, text or (kind, reason) of a fault) of each row; empty texts are left out.

    Errors: DataError for a file without a header that has the column.
    """
    rows = CsvRows(stream, delimiter)
    try:
        names = rows.next()
    except BadLine as bad:
        raise DataError(f"{path}:{rows.first_line}: {bad.args[1]}") from None
    if names is None:
        return
    if names.count(text_field) != 1:
        what = "no column" if text_field not in names else "more than one column"
        raise DataError(f"{path}:{rows.first_line}: {what} {text_field!r} in the header ({columns_shown(names)})")
    while True:
        try:
            row = rows.next()
            if row is None:
                return
            # A comma in a text that is not quoted gives one field more: the text would be cut off without a word.
            if len(row) != len(names):
                raise BadLine("wrong number of fields", f"{len(row)} fields where the header has {len(names)}")
            text = row[names.index(text_field)]
            if "\0" in text:
                raise nul_in_text()
            try:
                text.encode("utf-8")
            except UnicodeEncodeError as error:
                # What is not UTF-8 comes as half a surrogate pair, which carries the byte.
                byte = ord(text[error.start]) & 0xFF
                raw = text.encode("utf-8", "surrogateescape")
                raise not_utf8(raw, f"the text is not UTF-8: byte 0x{byte:02x}") from None
        except BadLine as bad:
            yield rows.first_line, bad.args
        else:
            if text:
                yield rows.first_line, text


def columns_shown(names: Sequence[str]) -> str:
    """Part of a line: the columns of a header, and what to do."""
    shown = ", ".join(name[:LONGEST_NAME_SHOWN] for name in names[:MOST_NAMES_SHOWN]) or "none"
    # Bytes that are not UTF-8 stand in the names as halves of surrogate pairs, which no terminal prints.
    shown = shown.encode("utf-8", "backslashreplace").decode("utf-8")
    advice = "--text_field names another one"
    if "\0" in shown:
        shown, advice = "not to be read", "it is binary, or in UTF-16; convert it to UTF-8"
    elif len(names) == 1 and ";" in shown:
        advice = "they are to be separated by commas, in a .tsv by tabs"
    return f"its columns: {shown}; {advice}"


# Who pulls whom: `next` asks the csv module for a row, and the module asks `_row_lines` for as many lines as the row
# has, since a quoted field may hold line breaks. So the module decides where a row ends, and this class knows the rest:
#
# 1. The number of a row's first line. Before a row is asked for, the LineReader has read all lines of the row before it
#    and no more, so the next row begins on the line after. A file of a hundred rows may well have a thousand lines.
# 2. The bound. A quote that is never closed would make the rest of the file one field, held in memory. `row_bytes`
#    counts what one row has taken, and `_row_lines` raises BadLine in the middle of the module's own loop.
# 3. How to go on after a fault. A generator that has raised is finished, and the module keeps half a row. Both are made
#    anew; the LineReader stays, so the next row begins after the last line that was read.
class CsvRows:
    """The rows of a stream. first_line: where the row that was asked for last begins."""

    def __init__(self, stream: Stream, delimiter: str) -> None:
        self.lines = LineReader(stream, most=limits.MAX_CSV_ROW_BYTES)
        self.delimiter = delimiter
        self.first_line = 1
        self.row_bytes = 0
        self.has_header = False
        self.ended = False
        self.reader = self._new_reader()

    def _new_reader(self) -> Iterator[list[str]]:
        """A reader of what comes next; one that has met a fault cannot go on."""
        # A field has fewer characters than bytes: the bound on a row, below, is met first.
        csv.field_size_limit(limits.MAX_CSV_ROW_BYTES)
        # strict: a quote in the wrong place is a fault, and does not swallow the rows behind it without a word.
        return csv.reader(self._row_lines(), delimiter=self.delimiter, strict=True)

    def _row_lines(self) -> Iterator[str]:
        """What the csv module asks for, line by line, until a row is complete."""
        while line := self.lines.read_line():
            self.row_bytes += len(line)
            if self.row_bytes > limits.MAX_CSV_ROW_BYTES:
                raise BadLine(*limits.too_long("row", limits.MAX_CSV_ROW_BYTES))
            if not self.has_header:
                # Before the module sees it: a quote is one only at the very beginning of a field.
                line = line.removeprefix(BOM)
            # A column that is not the text's may hold any bytes: only the text is checked, once its row is known.
            yield line.decode("utf-8", "surrogateescape")
        # None is a line that is too long by itself, b"" the end.
        if line is None:
            raise BadLine(*limits.too_long("row", limits.MAX_CSV_ROW_BYTES))
        self.ended = True

    def next(self) -> list[str] | None:
        """The next row that is not blank, None at the end. Errors: BadLine, after which the next row may be asked for."""
        while not self.ended:
            self.row_bytes = 0
            self.first_line = self.lines.number + 1
            try:
                row = next(self.reader, None)
            except BadLine:
                self.reader = self._new_reader()
                raise
            except csv.Error as error:
                if self.ended:
                    # The module asked for one more line and there was none: it stood within quotes.
                    raise BadLine("cut line", "the file ends within a quoted field") from None
                self.reader = self._new_reader()
                raise BadLine(
                    "not CSV", f"not a row of CSV: {error}; a field with quotes is quoted, and they are doubled"
                ) from None
            if row:
                self.has_header = True
                return row
            # The module gives a blank line as an empty row; a long run of them is passed by the buffer.
            self.lines.skip_blank_lines()
        return None
