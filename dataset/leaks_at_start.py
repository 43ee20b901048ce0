"""What a start says of validation and evaluation texts that are in the training text too.

It looks at a part of large data, so that a start is not delayed: scripts/inspect_data.py looks at all of it.
"""

from collections.abc import Sequence

import numpy as np

from common.wording import counted
from dataset.corpus import Corpus
from dataset.quality.evaluation_texts import Evaluation, Sample
from dataset.quality.leaks import LEAKED, Runs, Search, read_through
from dataset.store.interface import Ints

# Tokens of the training text that are looked at, validation documents, and runs of each. About 0.2 s of one core and 10 MB.
LEAK_TOKENS = 1 << 24
LEAK_DOCUMENTS = 4096
LEAK_RUNS = 32
# Of each file of --against. To read so many characters and to tokenise four million of them takes two seconds.
AGAINST = Sample(items=1024, characters=1 << 26, text_characters=4096, runs=LEAK_RUNS)


def leak_notices(corpus: Corpus, against: Sequence[Evaluation] = ()) -> list[str]:
    """A line where validation documents are in the training text, though not to the letter: within other documents, or
    with small changes; and one for each evaluation file, whatever was found."""
    validation = _validation_search(corpus)
    searches = [Search(evaluation.runs) for evaluation in against]
    wanted = [*searches] if validation is None else [validation, *searches]
    if not wanted:
        return []
    texts = corpus.training_text()
    seen = read_through(wanted, texts, LEAK_TOKENS)
    part = "" if seen == 1 else f" in the {seen:.1%} of it that was looked at"
    lines = []
    if validation is not None:
        lines += _of_validation(validation, part)
    for evaluation, search in zip(against, searches, strict=True):
        lines.append(_of_evaluation(evaluation, search, part))
    return lines


def _validation_search(corpus: Corpus) -> Search | None:
    """What looks for validation documents; None where there are none to look for."""
    if corpus.val_documents is None:
        return None
    documents = corpus.val_documents.astype(np.int64)
    if corpus.val_shared is not None:
        # These have a line already.
        documents = documents[~corpus.val_shared]
    if not len(documents):
        return None
    runs: Runs = corpus.validation_runs(evenly_spread(documents, LEAK_DOCUMENTS), LEAK_RUNS)
    return Search(runs)


def evenly_spread(numbers: Ints, most: int) -> Ints:
    """At most so many of them."""
    if len(numbers) <= most:
        return numbers
    return numbers[np.arange(most) * len(numbers) // most]


def _of_validation(search: Search, part: str) -> list[str]:
    """part: what is to be said of the part of the training text that was looked at."""
    leaked = int((search.shares() >= LEAKED).sum())
    if not leaked:
        return []
    documents = search.runs.documents
    return [
        f"note: {leaked:,} of {counted(documents, 'validation document')} ({leaked / documents:.1%}) are in the training "
        f"text nearly whole{part}, so the validation loss may be too low; scripts/inspect_data.py names them"
    ]


def _of_evaluation(evaluation: Evaluation, search: Search, part: str) -> str:
    shares = search.shares()
    leaked = int((shares >= LEAKED).sum())
    too_short = int(np.isnan(shares).sum())
    told = len(shares) - too_short
    texts = counted(told, "text") if evaluation.is_whole else f"{counted(told, 'text')} that were looked at"
    if too_short:
        texts += f" ({too_short:,} more are too short to tell)"
    begin = f"--against {evaluation.path}: {leaked:,} of {texts}"
    if not leaked:
        return f"{begin} are in the training text nearly whole{part}"
    return f"note: {begin} are in the training text nearly whole{part}; scripts/inspect_data.py --against names them"
