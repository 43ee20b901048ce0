"""A sample of several sources in given shares, for training a tokenizer."""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from common.errors import DataError
from common.wording import announce
from dataset.reading.bad_lines import BadLines
from dataset.reading.beginnings import notices_on_texts
from dataset.reading.conversations import CONVERSATION, Notes, conversation_text, report_of
from dataset.reading.documents import is_chat_file, read_documents
from dataset.reading.file_kinds import choose_files
from dataset.reading.settings import PARAGRAPHS, FileSettings

# Characters of a part of a long document: a small share of a book is some parts of it.
PART = 1 << 17


def draw_sample(
    data_path: Sequence[str], weights: Sequence[float], sample_bytes: float, options: FileSettings
) -> Iterator[str]:
    """Yields texts of about `sample_bytes` in UTF-8, in proportion to the weights, source after source (order does not
    matter to BPE); prints the size from each. One document is held at a time.

    Errors: DataError for a path without text, and as `choose_files` and `read_documents`.
    """
    sources = [choose_files(path, options.text_suffixes) for path in data_path]
    # First pass: text bytes of each source, which decide how often its texts are used. Compressed or escaped files
    # count by their text, too.
    totals = []
    for path, (files, left_out) in zip(data_path, sources, strict=True):
        bad_lines = BadLines() if options.skip_bad_lines else None
        notes: Notes = Counter()
        totals.append(sum(len(text.encode("utf-8")) for text in _texts(files, options, bad_lines, notes)))
        if not totals[-1]:
            raise DataError(f"{path}: no text in it")
        skipped = bad_lines.report() if bad_lines else []
        for line in (*left_out, *report_of(notes), *skipped):
            announce(line, to_stderr=True)
    # Where a text ends does not matter here.
    for line in notices_on_texts([file for files, _ in sources for file in files], options.split_text or PARAGRAPHS):
        announce(line, to_stderr=True)
    sample_bytes = min(sample_bytes, sum(totals))
    for path, (files, _), weight, total in zip(data_path, sources, weights, totals, strict=True):
        wanted = sample_bytes * weight / sum(weights)
        share = wanted / total
        announce(f"{path}: {wanted / 1e6:.1f} of {total / 1e6:.1f} MB ({share:.2f} times the source)")
        # Spread evenly over the source; with a share above 1 texts repeat. After i texts ceil(i * share) have been
        # yielded. Texts are counted, not bytes: taking one whenever the sample falls behind in bytes would favour long ones.
        for i, text in enumerate(_texts(files, options, BadLines(), Counter())):
            # 1e-9: a share of 1.0000000000000002 repeats no text.
            for _ in range(math.ceil((i + 1) * share - 1e-9) - math.ceil(i * share - 1e-9)):
                yield text


def _texts(files: Sequence[Path], options: FileSettings, bad_lines: BadLines | None, notes: Notes) -> Iterator[str]:
    """Yields the documents, or the contents of chats; one of more than PART characters in parts."""
    for file in files:
        is_chat = is_chat_file(file, options.text_field)
        text_field = CONVERSATION if is_chat else options.text_field
        for _, text in read_documents(file, text_field, bad_lines, options.split_text, notes):
            text = conversation_text(text) if is_chat else text
            yield from (text[at : at + PART] for at in range(0, len(text), PART))
