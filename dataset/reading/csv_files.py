"""`.csv` and `.tsv` files: a header that names the columns, then one document per row, which is the text of a column or, for
WHOLE_ROWS, the row as a JSON object. Python's csv module parses rows, so a quoted field may hold commas, quotes and line
breaks; this file bounds rows and reports faults.
"""

import csv
import json
import re
from collections import Counter
from collections.abc import Iterator

from common.errors import DataError
from dataset.reading import faults
from dataset.reading.chat_forms import shape_of
from dataset.reading.faults import BadLine, RawDocument, check_column, too_long
from dataset.reading.json_files import WHOLE_ROWS
from dataset.reading.streams import BOM, LineReader, Stream

# A short text that is no number and no sentence
NAME = re.compile(r"(?![+-]?\d).{0,40}(?<![.!?。！？])")


# `next` asks the csv module for a row, and the module pulls the row's lines from `lines_of_row`: several, if a quoted
# field holds line breaks. So the LineReader, which has read the lines of all rows before, knows the line number of a row. A
# quote that is never closed would make the rest of the file one field: `lines_of_row` raises BadLine for a long row inside
# the module's own loop. Then the generator is finished and the module holds half a row: both are replaced.
def find_rows(stream: Stream, path: str, text_field: str, delimiter: str) -> Iterator[RawDocument]:
    """Yields (first line of a row, bytes of its text or fault).

    Errors: DataError if no header has the column.
    """
    lines = LineReader(stream, faults.MAX_CSV_ROW_BYTES)
    # A field has no more characters than bytes: the bound on a row is reached first.
    csv.field_size_limit(faults.MAX_CSV_ROW_BYTES)
    # column names
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
                # Removed first: the module knows a quote only at the very start of a field.
                line = line.removeprefix(BOM)
            # Other columns may hold any bytes: only the text is checked, when its row is complete.
            yield line.decode("utf-8", "surrogateescape")
        ended = True

    reader: Iterator[list[str]] | None = None
    while not ended:
        # strict: a misplaced quote is a fault, and does not silently swallow the rows after it.
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
            reason = f"not a row of CSV: {error}; a field with quotes or line breaks is quoted, its quotes doubled"
            # The module asked for a line beyond the end: it was inside quotes.
            fault = BadLine("cut line", "the file ends within a quoted field") if ended else BadLine("not CSV", reason)
        if fault is not None:
            if not names:
                raise DataError(f"{path}:{first_line}: {fault.args[1]}")
            reader = None
            yield first_line, fault
        elif not row or (len(row) == 1 != len(names) and row[0].isspace()):
            # A blank line is an empty row, or a single field of white space.
            continue
        elif not names and (names := _names_of(row, text_field, f"{path}:{first_line}")) is row:
            # a header
            continue
        elif len(row) != len(names):
            # A comma in an unquoted text gives an extra field: the text would silently be cut off.
            reason = f"{len(row)} fields where the header has {len(names)}"
            yield first_line, BadLine("wrong number of fields", reason)
        elif text_field in WHOLE_ROWS:
            fields = {name: value for name, value in zip(names, row, strict=True) if name}
            yield first_line, json.dumps(fields, ensure_ascii=False).encode("utf-8", "surrogateescape")
        else:
            # surrogateescape restores bytes that are not UTF-8.
            yield first_line, row[names.index(text_field)].encode("utf-8", "surrogateescape")


def _names_of(first_row: list[str], text_field: str, where: str) -> list[str]:
    """The names of the columns: the first row, or their numbers from 1 if `text_field` is one. Errors: DataError."""
    names = first_row
    if text_field in WHOLE_ROWS:
        # The most frequent name: two columns would be one field.
        text_field = max(filter(None, names), key=Counter(names).__getitem__, default=names[0])
    elif text_field.isdecimal() and text_field not in names:
        names = [str(number + 1) for number in range(len(first_row))]
    check_column(text_field, names, where, is_chat=shape_of(dict.fromkeys(names[:100], "")) is not None)
    # A header is neither lost nor trained.
    if names is not first_row and len({*first_row}) == len(names) and all(map(NAME.fullmatch, first_row)):
        advice = f"name the column ({first_row[int(text_field) - 1]!r}), or put a header above it if it is none"
        raise DataError(f"{where}: looks like a header, and --text_field {text_field} is for tables without; {advice}")
    return names
