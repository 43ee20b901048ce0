"""A `.csv` or `.tsv` file: a header that names the columns, then a document a row. Python's csv module reads the rows,
so that a quoted field may hold commas, quotes and line breaks; this file bounds them and tells their faults.
"""

import csv
from collections.abc import Iterator

from common.errors import DataError
from dataset.reading import faults
from dataset.reading.faults import BadLine, Found, check_column, too_long
from dataset.reading.streams import BOM, LineReader, Stream


# Who pulls whom: `next` asks the csv module for a row, and the module asks `lines_of_row` for as many lines as the row
# has, since a quoted field may hold line breaks. So the module decides where a row ends, and this function knows the rest:
#
# 1. The number of a row's first line. Before a row is asked for, the LineReader has read all lines of the row before it
#    and no more, so the next row begins on the line after. A file of a hundred rows may well have a thousand lines.
# 2. The bound. A quote that is never closed would make the rest of the file one field, held in memory. `row_bytes`
#    counts what one row has taken, and `lines_of_row` raises BadLine in the middle of the module's own loop.
# 3. How to go on after a fault. A generator that has raised is finished, and the module keeps half a row. Both are made
#    anew; the LineReader stays, so the next row begins after the last line that was read.
def find_rows(stream: Stream, path: str, text_field: str, delimiter: str) -> Iterator[Found]:
    """(line where the row begins, bytes of its text or fault) of each row.

    Errors: DataError for a file without a header that has the column.
    """
    lines = LineReader(stream, most=faults.MAX_CSV_ROW_BYTES)
    # A field has fewer characters than bytes: the bound on a row is met first.
    csv.field_size_limit(faults.MAX_CSV_ROW_BYTES)
    # of the header
    names: list[str] = []
    row_bytes = 0
    ended = False

    def lines_of_row() -> Iterator[str]:
        nonlocal row_bytes, ended
        while (line := lines.read_line()) != b"":
            row_bytes += len(line or b"")
            if line is None or row_bytes > faults.MAX_CSV_ROW_BYTES:
                raise too_long("row", faults.MAX_CSV_ROW_BYTES)
            if not names:
                # Before the module sees it: a quote is one only at the very beginning of a field.
                line = line.removeprefix(BOM)
            # A column that is not the text's may hold any bytes: only the text is checked, once its row is known.
            yield line.decode("utf-8", "surrogateescape")
        ended = True

    reader: Iterator[list[str]] | None = None
    while not ended:
        # strict: a quote in the wrong place is a fault, and does not swallow the rows behind it without a word.
        reader = reader or csv.reader(lines_of_row(), delimiter=delimiter, strict=True)
        row_bytes = 0
        first_line = lines.number + 1
        row: list[str] | None = None
        fault: BadLine | None = None
        try:
            row = next(reader, None)
        except BadLine as bad:
            fault = bad
        except csv.Error as error:
            reason = f"not a row of CSV: {error}; a field with quotes is quoted, and they are doubled"
            # Where it asked for one more line and there was none, it stood within quotes.
            fault = BadLine("cut line", "the file ends within a quoted field") if ended else BadLine("not CSV", reason)
        if fault is not None:
            if not names:
                raise DataError(f"{path}:{first_line}: {fault.args[1]}")
            reader = None
            yield first_line, fault
        elif not row:
            # The module gives a blank line as an empty row; a long run of them is passed by the buffer.
            lines.skip_blank_lines()
        elif not names:
            names = row
            check_column(text_field, names, f"{path}:{first_line}")
        elif len(row) != len(names):
            # A comma in a text that is not quoted gives one field more: the text would be cut off without a word.
            reason = f"{len(row)} fields where the header has {len(names)}"
            yield first_line, BadLine("wrong number of fields", reason)
        else:
            # What is not UTF-8 comes as half a surrogate pair, which carries the byte.
            yield first_line, row[names.index(text_field)].encode("utf-8", "surrogateescape")
