"""What a start says of validation texts that are in the training text too.

It looks at a part of large data, so that a start is not delayed.
"""

import numpy as np

from common.wording import counted
from dataset.corpus import Corpus
from dataset.quality.leaks import LEAKED, Search, read_through
from dataset.store.interface import Ints

# Tokens of the training text that are looked at, validation documents, and runs of each. About 0.2 s of one core and 10 MB.
LEAK_TOKENS = 1 << 24
LEAK_DOCUMENTS = 4096
LEAK_RUNS = 32


def leak_notices(corpus: Corpus) -> list[str]:
    """A line where validation documents are in the training text, though not to the letter: within other documents, or
    with small changes."""
    if corpus.val_documents is None:
        return []
    documents = corpus.val_documents.astype(np.int64)
    if corpus.val_shared is not None:
        # These have a line already.
        documents = documents[~corpus.val_shared]
    if not len(documents):
        return []
    search = Search(corpus.validation_runs(evenly_spread(documents, LEAK_DOCUMENTS), LEAK_RUNS))
    seen = read_through([search], corpus.training_text(), LEAK_TOKENS)
    leaked = int((search.shares() >= LEAKED).sum())
    if not leaked:
        return []
    part = "" if seen == 1 else f" in the {seen:.1%} of it that was looked at"
    n = search.runs.documents
    return [
        f"note: {leaked:,} of {counted(n, 'validation document')} ({leaked / n:.1%}) are in the training "
        f"text nearly whole{part}, so the validation loss may be too low"
    ]


def evenly_spread(numbers: Ints, most: int) -> Ints:
    """At most so many of them."""
    if len(numbers) <= most:
        return numbers
    return numbers[np.arange(most) * len(numbers) // most]
