"""Look at the data before training on it: sizes, copies, languages, odd documents, leaks, rows.

The flags, and what they do, stand in scripts/inspect_settings.py.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# Run by path: nothing in scripts/ may shadow a dependency.
if __package__ in (None, ""):
    sys.path[0] = str(ROOT)
if __name__ == "__main__":
    from common.start import begin

    begin()
    # --help and wrong flags are answered before torch is imported, which takes seconds.
    from scripts.inspect_settings import parse_args

    parse_args()

from collections.abc import Sequence

from common.errors import UserError, user_errors
from common.notices import announce
from scripts.data_figures import DataLook
from scripts.data_rows import Row, check_rows, row_of
from scripts.data_sections import Section, sections_of, text_of
from scripts.inspect_settings import parse_args
from trainer.machine.command_line import run_cli

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    settings = parse_args(argv)
    if settings.out is not None and Path(settings.out).suffix != ".html":
        raise UserError(f"--out {settings.out}: a name that ends in .html is wanted")
    with user_errors():
        look = DataLook(settings)
        for line in (*look.notices, *look.corpus.notices):
            announce(line)
        for bad_lines in look.corpus.bad_lines:
            for line in bad_lines.report():
                announce(line)
        # A row that is not there is told before all texts are read.
        check_rows(look, settings.row)
    sections = sections_of(look.figures())
    rows = [row_of(look, number) for number in settings.row]
    announce(text_of(sections, rows))
    if settings.out is not None:
        write_page(settings.out, sections, rows)
        announce(f"page: {settings.out}")
    return 0


def write_page(path: str, sections: Sequence[Section], rows: Sequence[Row]) -> None:
    """Errors: UserError where the page cannot be written."""
    # It brings matplotlib along, which takes a second to import.
    from trainer.reporting.html_report import write_page_of_flag

    write_page_of_flag("--out", "inspect_data.html", path, Path(__file__).parent, sections=sections, rows=rows)


if __name__ == "__main__":
    run_cli(main)
