"""The texts of an evaluation file, whatever its objects are like, and the runs of tokens that stand for them."""

import json
from array import array
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from common.errors import DataError
from dataset.quality.leaks import RUNS_OF_DOCUMENT, Runs, runs_of
from dataset.reading.conversations import CONVERSATION
from dataset.reading.documents import read_documents
from dataset.reading.faults import BadLines, Fault, pass_over
from dataset.reading.file_kinds import OBJECTS, find_files, kind_of
from dataset.reading.json_lines import ANY_TEXT
from dataset.store.interface import Ints
from dataset.tokenizing.encoder import DocumentEncoder
from dataset.tokenizing.long_texts import TooLongToEncode

# Items that are encoded together, and the characters that they may have in all. A longer item is encoded alone.
BATCH = 256
BATCH_CHARACTERS = 1 << 20
# Runs of a file above which they are thinned: 128 MB.
MANY_RUNS = 1 << 23


class Item(NamedTuple):
    """A document or an object of an evaluation file. line: from 1."""

    file: str
    line: int
    texts: list[str]

    @property
    def place(self) -> str:
        return f"{self.file}:{self.line}"


class Sample(NamedTuple):
    """How much of an evaluation file is looked at: at most so many items, evenly spread over its first characters.

    characters: of the file; text_characters, runs: of an item.
    """

    items: int
    characters: int
    text_characters: int
    runs: int


class Evaluation(NamedTuple):
    """What stands for an evaluation file, a folder or a glob. is_whole: all of it was read."""

    path: str
    runs: Runs
    places: list[str]
    is_whole: bool


def evaluation_of(
    path: str,
    encoder: DocumentEncoder,
    text_field: str,
    skip_bad_lines: bool = False,
    sample: Sample | None = None,
    cache_dir: str | None = None,
) -> Evaluation:
    """The runs of the items of a path, or of a sample of them. cache_dir: as of `find_files`. Errors: DataError."""
    bad_lines = BadLines() if skip_bad_lines else None
    items = evaluation_items(path, text_field, bad_lines, cache_dir)
    is_whole = True
    most = RUNS_OF_DOCUMENT
    if sample is not None:
        chosen, is_whole = sampled(items, sample)
        items = iter(chosen)
        most = sample.runs
    runs, places = _runs_of_items(items, encoder, most, bad_lines)
    if not places:
        raise DataError(f"--against {path}: no text in there")
    return Evaluation(path, runs, places, is_whole)


def evaluation_items(
    path: str, text_field: str, bad_lines: BadLines | None = None, cache_dir: str | None = None
) -> Iterator[Item]:
    """Each document; of an object without `text_field` all texts that it has."""
    if text_field == CONVERSATION:
        # What is trained on are conversations. An evaluation file has any form, and tables have a column of texts.
        text_field = "text"
    for file in find_files(path, cache_dir=cache_dir):
        if kind_of(file).suffix not in OBJECTS:
            for line, text in read_documents(file, text_field, bad_lines):
                yield Item(str(file), line, [text])
            continue
        for line, record in read_documents(file, ANY_TEXT, bad_lines):
            value = json.loads(record)
            named = value.get(text_field)
            texts = list(texts_in(named if isinstance(named, str) else value))
            if texts:
                yield Item(str(file), line, texts)


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


def sampled(items: Iterator[Item], sample: Sample) -> tuple[list[Item], bool]:
    """(some of the items, their texts cut; whether these are all of them, and whole)."""
    kept: list[Item] = []
    is_whole = True
    characters = 0
    # Every second one that is held goes once there are too many: so memory is bounded, and what stays is evenly spread.
    every = 1
    for number, item in enumerate(items):
        if number % every == 0:
            texts, is_cut = _beginnings(item.texts, sample.text_characters)
            kept.append(Item(item.file, item.line, texts))
            is_whole = is_whole and not is_cut
        if len(kept) > sample.items:
            kept = kept[::2]
            every *= 2
            is_whole = False
        characters += sum(map(len, item.texts))
        if characters > sample.characters:
            # There may be none behind it, which is not worth a look.
            return kept, False
    return kept, is_whole


def _beginnings(texts: list[str], most: int) -> tuple[list[str], bool]:
    """(the texts up to so many characters in all, whether something was cut off)."""
    kept: list[str] = []
    for text in texts:
        if most <= 0:
            return kept, True
        kept.append(text[:most])
        most -= len(text)
    return kept, most < 0


def _batches(items: Iterator[Item]) -> Iterator[list[Item]]:
    """The items in lists that are small enough to be encoded together; a long item in a list of its own."""
    batch: list[Item] = []
    characters = 0
    for item in items:
        size = sum(map(len, item.texts))
        if batch and (len(batch) == BATCH or characters + size > BATCH_CHARACTERS):
            yield batch
            batch = []
            characters = 0
        batch.append(item)
        characters += size
    if batch:
        yield batch


def _runs_of_items(
    items: Iterator[Item], encoder: DocumentEncoder, most: int, bad_lines: BadLines | None
) -> tuple[Runs, list[str]]:
    """(runs of the items, at most so many of each text; the place of each item)."""
    places: list[str] = []
    hashes: list[Ints] = [np.empty(0, np.uint64)]
    document = [np.empty(0, np.int64)]
    kept = 0
    many = MANY_RUNS
    for batch in _batches(items):
        # Each text by itself: what joins two of them stands in no training text.
        texts = []
        of_text = []
        for number, item in enumerate(batch, len(places)):
            texts += item.texts
            of_text += [number] * len(item.texts)
        try:
            runs = _runs_of_texts(texts, encoder, most)
        except TooLongToEncode as error:
            # Texts of a batch are short, so it is an item that stands alone.
            (item,) = batch
            pass_over(Fault(item.file, item.line, "too long", str(error)), bad_lines)
            continue
        places += [item.place for item in batch]
        hashes.append(runs.hashes)
        document.append(np.array(of_text, np.int64)[runs.document])
        kept += len(runs.hashes)
        if kept > many:
            # A file of millions of texts.
            hashes, document = [np.concatenate(hashes)], [np.concatenate(document)]
            stays = thinned(hashes[0], document[0])
            hashes, document = [hashes[0][stays]], [document[0][stays]]
            kept = len(stays)
            # Each item keeps a run, so there may still be as many.
            many = max(MANY_RUNS, 2 * kept)
    return Runs(np.concatenate(hashes), np.concatenate(document), len(places)), places


def thinned(hashes: Ints, document: Ints) -> Ints:
    """Which runs stay where half of them are to go, int64, ascending: of each document those with the smallest hashes.

    So the runs themselves decide, wherever they stand in a file, and a document that has a run keeps one.
    """
    order = np.lexsort((hashes, document))
    counts = np.bincount(document)
    before = np.cumsum(counts) - counts
    of_document = document[order]
    rank = np.arange(len(order)) - before[of_document]
    return np.sort(order[2 * rank < counts[of_document]])


def _runs_of_texts(texts: list[str], encoder: DocumentEncoder, most: int) -> Runs:
    # An int of Python takes nine times the memory of one in an array.
    tokens = array("I")
    bounds = [0]
    if sum(map(len, texts)) <= BATCH_CHARACTERS:
        for ids in encoder.encode_bare(texts):
            tokens.extend(ids)
            bounds.append(len(tokens))
    else:
        for text in texts:
            for ids in encoder.encode_bare_in_parts(text):
                tokens.extend(ids)
            bounds.append(len(tokens))
    begins = np.array(bounds[:-1], np.int64)
    ends = np.array(bounds[1:], np.int64)
    return runs_of(np.array(tokens, np.uint32), begins, ends, most)
