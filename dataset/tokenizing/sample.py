"""A sample of several sources in given shares, for training a tokenizer."""

import math
from collections.abc import Iterator, Sequence

from common.errors import DataError
from common.wording import announce
from dataset.reading.documents import find_files, read_documents
from dataset.reading.faults import BadLines


class TextSource:
    """One --data_path: a file, a folder or a glob. Only one document is held at a time."""

    def __init__(
        self,
        data_path: str,
        text_field: str = "text",
        skip_bad_lines: bool = False,
        text_suffixes: Sequence[str] | None = None,
    ) -> None:
        self.name = data_path
        self.text_field = text_field
        self.files = find_files(data_path, text_suffixes)
        self.bad_lines = BadLines() if skip_bad_lines else None

    def documents(self) -> Iterator[str]:
        """All texts of the source, in order; its files are read anew each time."""
        for file in self.files:
            for _, text in read_documents(file, self.text_field, self.bad_lines):
                yield text

    def count_bytes(self) -> int:
        """Bytes of text, in UTF-8: a compressed file or one with escapes is weighed by its text."""
        total = sum(len(text.encode("utf-8")) for text in self.documents())
        if not total:
            raise DataError(f"{self.name}: no text in it")
        if self.bad_lines:
            for line in self.bad_lines.report():
                announce(line, to_stderr=True)
        return total

    def sample(self, share: float) -> Iterator[str]:
        """Documents worth about `share` times the source, spread evenly over it; above 1 documents come repeatedly.

        Documents are counted, not bytes: taking one whenever the sample falls behind in bytes favours long documents.
        """
        # After i documents ceil(i * share) have been given. So document i comes as often as this number grows by it, and
        # the sample is never more than one document ahead of its share.
        for i, text in enumerate(self.documents()):
            given = math.ceil(i * share)
            due = math.ceil((i + 1) * share)
            for _ in range(due - given):
                yield text


def draw_sample(sources: list[TextSource], weights: list[float], sample_bytes: float) -> Iterator[str]:
    """The mixture, source after source (the order does not matter to BPE); prints what each source gives."""
    # A first pass over all sources: how often a document comes depends on how much text there is.
    totals = [source.count_bytes() for source in sources]
    sample_bytes = min(sample_bytes, sum(totals))
    for source, weight, total in zip(sources, weights, totals, strict=True):
        wanted = sample_bytes * weight / sum(weights)
        announce(f"{source.name}: {wanted / 1e6:.1f} of {total / 1e6:.1f} MB ({wanted / total:.2f} times the source)")
        yield from source.sample(wanted / total)
