"""The figures of inspect_data.py as sections that a terminal and a page show alike."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby
from operator import attrgetter

from common.wording import first_to_last, printable
from dataset.quality.copies import NEAR_FROM
from dataset.quality.leaks import LEAKED, RUN
from dataset.quality.oddities import LONG_ROWS, VERY_LONG
from scripts.data_figures import Example, Figures
from scripts.data_rows import Row

# Characters of the longest bar on a terminal.
BAR = 40


@dataclass
class Section:
    """A table with a title. bars: a share from 0 to 1 for each row, drawn beside it."""

    title: str
    heads: list[str]
    rows: list[list[str]]
    remarks: list[str] = field(default_factory=list)
    bars: list[float] | None = None
    examples: list[Example] = field(default_factory=list)


def sections_of(figures: Figures) -> list[Section]:
    """What there is to show, in the order in which one looks."""
    sections = [sources(figures), lengths(figures), copies(figures)]
    if figures.languages is not None:
        sections.append(languages(figures))
    if figures.oddities is not None:
        sections.append(oddities(figures))
    if figures.leaks:
        sections.append(leaks(figures))
    return sections


def sources(figures: Figures) -> Section:
    heads = ["", "documents", "tokens", "MB of text", "bytes a token", "median length", "longest"]
    # All sources are conversations, or none is.
    is_chat = figures.sources[0].answers is not None
    if is_chat:
        heads = ["", "conversations", *heads[2:], "tokens of answers"]
    rows = []
    for source in figures.sources:
        of_answers = [] if source.answers is None else [share_of(source.answers, source.tokens)]
        rows.append(
            [
                source.name,
                f"{source.documents:,}",
                f"{source.tokens:,}",
                f"{source.n_bytes / 1e6:,.1f}",
                f"{source.bytes_per_token:.2f}",
                f"{source.median:,}",
                f"{source.longest:,}",
                *of_answers,
            ]
        )
    remarks = []
    if is_chat and figures.languages is None:
        remarks.append("MB of text: of the whole lines, since no text was read.")
    return Section("Sources", heads, rows, remarks)


def lengths(figures: Figures) -> Section:
    most = max(bin.documents for bin in figures.lengths)
    tokens = max(sum(bin.tokens for bin in figures.lengths), 1)
    rows = []
    for bin in figures.lengths:
        rows.append([first_to_last(bin.lowest, bin.highest), f"{bin.documents:,}", f"{bin.tokens / tokens:.1%}"])
    bars = [bin.documents / max(most, 1) for bin in figures.lengths]
    return Section("Lengths of documents", ["tokens", "documents", "of all tokens"], rows, bars=bars)


def copies(figures: Figures) -> Section:
    rows = []
    for source in figures.sources:
        near = "not looked for" if source.near is None else share_of(source.near, source.documents)
        rows.append([source.name, share_of(source.exact, source.documents), near])
    remarks = []
    if figures.near_missing:
        remarks.append(figures.near_missing)
    if (figures.copies.exact or figures.copies.near) and not figures.near_missing:
        remarks.append(
            f"Near: about {NEAR_FROM} and more of the runs of five characters are the same. --deduplicate exact or near leaves them "
            "out of training."
        )
    return Section(
        "Copies of earlier documents", ["", "to the letter", "nearly"], rows, remarks, None, figures.copy_examples
    )


def languages(figures: Figures) -> Section:
    assert figures.languages is not None
    n_bytes = max(sum(language.n_bytes for language in figures.languages), 1)
    rows = []
    for language in figures.languages:
        rows.append([language.name, f"{language.documents:,}", f"{language.n_bytes / n_bytes:.1%}"])
    bars = [language.n_bytes / n_bytes for language in figures.languages]
    return Section("Languages, roughly", ["", "documents", "of the bytes"], rows, bars=bars)


def oddities(figures: Figures) -> Section:
    assert figures.oddities is not None
    rows = []
    examples = []
    for odd in figures.oddities:
        kind = f"{odd.kind} ({LONG_ROWS} rows and more)" if odd.kind == VERY_LONG else odd.kind
        rows.append([kind, f"{odd.documents:,}"])
        for example in odd.examples:
            examples.append(Example(example.place, f"{odd.kind}; {example.said}", example.text))
    remarks = [] if rows else ["None."]
    return Section("Odd documents", ["", "documents"], rows, remarks, None, examples)


def leaks(figures: Figures) -> Section:
    heads = ["", "documents", "nearly whole", "half", "some", "too short to tell"]
    rows = []
    examples = []
    for leak in figures.leaks:
        told = leak.documents - leak.too_short
        rows.append(
            [
                leak.name,
                f"{leak.documents:,}",
                share_of(leak.leaked, told),
                share_of(leak.half, told),
                share_of(leak.some, told),
                f"{leak.too_short:,}",
            ]
        )
        examples += leak.examples
    remark = (
        f"Documents of which {LEAKED:.0%}, half, or any of the runs of {RUN} tokens stand in the training text. Some do in any "
        "text that is made by patterns; docs/data.md has the rates of clean corpora."
    )
    return Section("In the training text", heads, rows, [remark], None, examples)


def share_of(number: int, total: int) -> str:
    """As `12 (0.3%)`."""
    return f"{number:,} ({number / max(total, 1):.1%})" if number else "0"


# ------------------------------------------------------------------------------------------------ on a terminal


def text_of(sections: Sequence[Section], rows: Sequence[Row]) -> str:
    """What the command prints."""
    blocks = []
    for section in sections:
        lines = [section.title.upper()]
        if section.rows:
            lines += table_lines(section)
        lines += [f"  {remark}" for remark in section.remarks]
        for example in section.examples:
            lines += [f"  - {example.place}: {example.said}"]
            if example.text:
                lines.append(f"      {example.text}")
        blocks.append("\n".join(lines))
    for row in rows:
        blocks.append("\n".join(row_lines(row)))
    return printable("\n\n".join(blocks))


def table_lines(section: Section) -> list[str]:
    """The first column to the left, numbers to the right."""
    table = [section.heads, *section.rows]
    widths = [max(len(cells[column]) for cells in table) for column in range(len(section.heads))]
    lines = []
    for i, cells in enumerate(table):
        aligned = [cells[0].ljust(widths[0])]
        for cell, width in zip(cells[1:], widths[1:], strict=True):
            aligned.append(cell.rjust(width))
        bar = ""
        if section.bars is not None and i > 0:
            bar = "  " + "█" * round(BAR * section.bars[i - 1])
        lines.append(f"  {'  '.join(aligned)}{bar}".rstrip())
    return lines


def row_lines(row: Row) -> list[str]:
    """The texts of a row; what is read and not trained stands in ⟦ ⟧."""
    lines = [row.title, "  ⟦ ⟧: read, and not trained"]
    for piece in row.pieces:
        lines.append(f"──── {piece.title}")
        parts = []
        for is_trained, spans in groupby(piece.spans, key=attrgetter("is_trained")):
            text = "".join(span.text for span in spans)
            parts.append(text if is_trained else f"⟦{text}⟧")
        lines.append("".join(parts))
    return lines
