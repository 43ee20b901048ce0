"""The texts of an evaluation file, whatever its objects are like, and the runs of tokens that stand for them."""

from collections.abc import Iterator
from itertools import islice

import numpy as np

from common.errors import DataError
from dataset.quality.leaks import RUNS_OF_DOCUMENT, Runs, runs_of
from dataset.reading.documents import read_documents
from dataset.reading.file_kinds import find_files, kind_of
from dataset.tokenizing.encoder import DocumentEncoder
from scripts.common import read_records

# Texts that are encoded together.
BATCH = 256
# Runs of a file that are kept at most: 128 MB.
MOST_RUNS = 1 << 23


def runs_of_file(path: str, encoder: DocumentEncoder, text_field: str) -> tuple[Runs, list[str]]:
    """(the runs of the documents or objects of a file, a folder or a glob; the place of each, as file:line).

    Errors: DataError, UserError.
    """
    places: list[str] = []
    hashes = [np.empty(0, np.uint64)]
    document = [np.empty(0, np.int64)]
    kept = 0
    most = RUNS_OF_DOCUMENT
    items = evaluation_texts(path, text_field)
    while batch := list(islice(items, BATCH)):
        # Each text by itself: what joins two of them stands in no training text.
        texts = []
        of_text = []
        for place, texts_of_item in batch:
            texts += texts_of_item
            of_text += [len(places)] * len(texts_of_item)
            places.append(place)
        runs = _runs_of_texts(texts, encoder, most)
        hashes.append(runs.hashes)
        document.append(np.array(of_text, np.int64)[runs.document])
        kept += len(runs.hashes)
        if kept > MOST_RUNS:
            # A file of millions of texts: from here on half as many of each, and every second one of those before.
            most = max(most // 2, 1)
            hashes = [np.concatenate(hashes)[::2]]
            document = [np.concatenate(document)[::2]]
            kept = len(hashes[0])
    if not places:
        raise DataError(f"--against {path}: no text in there")
    return Runs(np.concatenate(hashes), np.concatenate(document), len(places)), places


def _runs_of_texts(texts: list[str], encoder: DocumentEncoder, most: int) -> Runs:
    encoded = encoder.encode(texts)
    tokens = np.array([token for ids in encoded for token in ids], np.uint32)
    ends = np.cumsum([len(ids) for ids in encoded], dtype=np.int64)
    begins = np.concatenate((np.zeros(1, np.int64), ends[:-1]))
    return runs_of(tokens, begins + (encoder.bos_id is not None), ends - (encoder.eos_id is not None), most)


def evaluation_texts(path: str, text_field: str) -> Iterator[tuple[str, list[str]]]:
    """(file:line, texts) of each document; of an object of a plain .jsonl without `text_field` all texts that it has."""
    for file in find_files(path):
        kind = kind_of(file)
        if kind.suffix != ".jsonl" or kind.compression:
            for line, text in read_documents(file, text_field):
                yield f"{file}:{line}", [text]
            continue
        for line, record in read_records(file, {}):
            named = record.get(text_field)
            texts = list(texts_in(named if isinstance(named, str) else record))
            if texts:
                yield f"{file}:{line}", texts


def texts_in(value: object) -> Iterator[str]:
    """All texts in what JSON can hold."""
    # No recursion: the lists of a file may be as deep as its reader allows.
    waiting = [value]
    while waiting:
        value = waiting.pop()
        if isinstance(value, str):
            # Half a surrogate pair, which an escape can spell, is no text.
            yield value.encode("utf-8", "replace").decode("utf-8")
        elif isinstance(value, dict):
            waiting += reversed(value.values())
        elif isinstance(value, list):
            waiting += reversed(value)
