"""The GLUE tasks: reading their TSVs, features with a cache, and the batches of an epoch.

A file's lines become *features* once: the token ids of one or two sentences, cut to fit, and a label. Which example
stands where in an epoch depends on the seed and the epoch alone, so that ranks, workers and a resume change nothing.

Shapes. N: examples of a file, R: rows (examples) of a batch, T: positions of a row.
"""

import contextlib
import hashlib
import json
import os
import tempfile
import zipfile
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch.utils.data import Dataset

from common.errors import DataError
from dataset.loader import pinned, to_device
from dataset.packing import permutation
from dataset.reading.file_kinds import expanded
from dataset.store.places import user_cache

# Of a cached file; raised when the same input would give other features.
FORMAT = 1
# Of a batch's T: few shapes, and of the kind that tensor cores like.
MULTIPLE = 8


# ------------------------------------------------------------------------------------------------ reading


class Rows(NamedTuple):
    """What a file holds: sentences (one list per column of the task's `text`), labels (class numbers or scores; empty
    for a test file) and the number of lines that were skipped."""

    sentences: list
    labels: list
    skipped: int


def read_tsv(path, task, labelled=True):
    """The Rows of a TSV: fields lie between tabs, a quote is text like any other, a BOM and CRLF are taken off.

    Errors: DataError that names file and line, where one is not UTF-8, has another number of columns or no such label.
    """
    content = _read(path)
    try:
        # Not splitlines(): a sentence may hold a U+2028.
        lines = content.decode("utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        number = content.count(b"\n", 0, error.start) + 1
        raise DataError(f"{path}:{number}: not UTF-8 text; mend the line") from None
    lines = [line.removesuffix("\r") for line in lines]
    while lines and not lines[-1]:
        lines.pop()
    no_header = labelled and task.names
    header = list(task.names) if no_header else lines[0].split("\t") if lines else []
    wanted = (*task.text, task.label) if labelled else task.text
    missing = [repr(name) for name in wanted if name not in header]
    if missing:
        raise DataError(f"{path}:1: no column {', '.join(missing)} in the header; this is no {task.folder} file")
    columns = [header.index(name) for name in wanted]
    convert = _converter(task)
    sentences, labels, skipped = [[] for _ in task.text], [], 0
    for number, line in enumerate(lines[not no_header :], 1 + (not no_header)):
        fields = line.split("\t")
        if len(fields) != len(header):
            if task.skip_short_lines and labelled and len(fields) < len(header):
                skipped += 1
                continue
            raise DataError(f"{path}:{number}: {len(fields)} columns where {len(header)} are wanted; mend the line")
        for sentence, column in zip(sentences, columns, strict=False):
            sentence.append(fields[column])
        if labelled:
            try:
                labels.append(convert(fields[columns[-1]]))
            except (KeyError, ValueError):
                what = f"one of {', '.join(task.labels)}" if task.labels else "a score from 0 to 5"
                raise DataError(
                    f"{path}:{number}: label {fields[columns[-1]]!r} is not {what}; mend the line"
                ) from None
    if not sentences[0]:
        raise DataError(f"{path}: no example in there")
    return Rows(sentences, labels, skipped)


def _read(path):
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from None


def _converter(task):
    """word -> class number or score; raises KeyError or ValueError."""
    if task.labels:
        return {word: i for i, word in enumerate(task.labels)}.__getitem__

    def score(word):
        value = float(word)
        # NaN neither.
        if not 0 <= value <= 5:
            raise ValueError(word)
        return value

    return score


# ----------------------------------------------------------------------------------------------- features


def longest_first(first, second, budget):
    """(tokens kept of the first, of the second): while both exceed the budget together, the longer one gives its last,
    at a tie the second. Arrays [N]; the lengths that ELECTRA's own loop of pops ends with."""
    kept = np.minimum(second, np.maximum(budget // 2, budget - first))
    return np.minimum(first, budget - kept), kept


class Features(NamedTuple):
    """A file's examples. tokens: the ids of all sentences, one after the other; the rest arrays [N]."""

    tokens: np.ndarray
    begin: np.ndarray  # of an example's first token
    first: np.ndarray  # tokens of its first sentence
    second: np.ndarray  # and of its second; 0 in single-sentence tasks
    labels: np.ndarray  # int64 classes or float32 scores; [0] for a test file
    pair: np.ndarray  # 0-d: whether the task has two sentences
    skipped: np.ndarray  # 0-d: lines of the file that were left out

    @property
    def lengths(self):
        """Positions that the examples take, CLS and SEP included."""
        return self.first + self.second + 2 + int(self.pair)


def encode_rows(rows, task, encoder, max_seq_len):
    """The Features of Rows, cut longest-first to max_seq_len positions."""
    ids = [encoder.encode(column) for column in rows.sentences]
    lengths = [np.array([len(sentence) for sentence in column], dtype=np.int64) for column in ids]
    pair = len(ids) == 2
    if pair:
        first, second = longest_first(*lengths, max_seq_len - 3)
    else:
        first, second = np.minimum(lengths[0], max_seq_len - 2), np.zeros_like(lengths[0])
    parts = [
        column[i][: length[i]] for i in range(len(first)) for column, length in zip(ids, (first, second), strict=False)
    ]
    dtype = np.uint16 if encoder.vocab_size <= 1 << 16 else np.uint32
    tokens = np.fromiter((token for part in parts for token in part), dtype=dtype)
    labels = np.array(rows.labels, dtype=np.int64 if task.labels else np.float32)
    begin = np.cumsum(first + second) - (first + second)
    return Features(tokens, begin, first, second, labels, np.array(pair), np.array(rows.skipped))


def cached_features(path, task, encoder, max_seq_len, cache_dir=None, labelled=True, overwrite=False, say=print):
    """Path of the .npz with the Features of a file, made now if there is none or it is damaged; read_features opens it.

    It lies in `.glue_cache` beside the data, in the user's cache folder where that cannot be written, or in `cache_dir`.
    Its name depends on the file's content, the tokenizer and all that decides the features. Errors: DataError.
    """
    path = Path(path)
    key = [FORMAT, task._replace(dev=(), test=()), labelled, max_seq_len, encoder.fingerprint]
    key = hashlib.sha256(json.dumps(key).encode() + _read(path)).hexdigest()[:16]
    name = f"{task.folder}-{path.stem}-{key}.npz"
    places = [expanded(cache_dir)] if cache_dir else [path.parent / ".glue_cache", user_cache().parent / "glue"]
    if not overwrite:
        for place in places:
            with contextlib.suppress(OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
                read_features(place / name)
                return place / name
    features = encode_rows(read_tsv(path, task, labelled), task, encoder, max_seq_len)
    for place in places:
        with contextlib.suppress(OSError):
            _write(place, name, features)
            if place != places[0]:
                say(f"{places[0]} cannot be written: the features go to {place}")
            return place / name
    raise DataError(f"{places[0]} cannot be written; --cache_dir names a folder for the features")


def _write(place, name, features) -> None:
    """One rename makes the file: another process never sees half of it."""
    place.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=place, prefix=f".{name}.")
    try:
        with open(handle, "wb") as file:
            np.savez(file, **features._asdict())
        os.replace(temporary, place / name)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def read_features(path):
    """The Features in a file of cached_features."""
    with np.load(path, allow_pickle=False) as arrays:
        return Features(**{name: arrays[name] for name in Features._fields})


# ------------------------------------------------------------------------------------------------ batches


class Totals(NamedTuple):
    """What an update trains, over all micro-batches and ranks."""

    targets: int  # tokens without padding
    examples: int


class GluePlan:
    """The examples of one epoch in their order: a row is an example."""

    def __init__(self, features, seed, epoch) -> None:
        self._lengths, self.n_rows = features.lengths, len(features.first)
        self.T = int(self._lengths.max())
        # Batches are shorter: each is as long as its longest row.
        self.fill = float(self._lengths.mean()) / self.T
        self._order = permutation(np.random.PCG64([seed, epoch]), self.n_rows)

    def width(self, n):
        """The mean of the longest lengths in batches of n, which they are padded to."""
        return float(np.maximum.reduceat(self._lengths[self._order], np.arange(0, self.n_rows, n)).mean())

    def totals(self, lo, hi):
        return Totals(int(self._lengths[self._order[lo:hi]].sum()), hi - lo)

    def recipe(self, rows):
        """Numbers of the examples, int64 [R]."""
        return self._order[np.asarray(rows, dtype=np.int64)].astype(np.int64)

    def documents_of(self, lo, hi):
        return self._order[lo:hi].tolist()


class Batch(NamedTuple):
    ids: torch.Tensor  # int64 [R, T]
    mask: torch.Tensor  # int64 [R, T]: 1 where there is a token
    types: torch.Tensor  # int64 [R, T]: 1 in the second sentence; CLS has the tokenizer's own
    labels: torch.Tensor  # [R]: int64 classes or float32 scores; [0] for a test file

    to = to_device
    pin_memory = pinned


class GlueAssembler(Dataset):
    """assembler[numbers] is the Batch of these examples: CLS first SEP [second SEP], padded to the longest of them, up
    to a multiple of MULTIPLE but never beyond `max_seq_len`. full: to the longest of all, so that T is `width`."""

    def __init__(self, features, encoder, max_seq_len, full=False) -> None:
        self.features, self.max_seq_len, self.full = features, max_seq_len, full
        self.width = self._padded(features.lengths)
        self.cls_id, self.sep_id, self.pad_id = encoder.cls_id, encoder.sep_id, encoder.pad_id
        self.cls_type = encoder.cls_type

    def _padded(self, lengths):
        return min(-(-int(lengths.max()) // MULTIPLE) * MULTIPLE, self.max_seq_len)

    def __getitem__(self, numbers):
        f = self.features
        lengths = f.lengths[numbers]
        T = self.width if self.full else self._padded(lengths)
        ids = np.full((len(numbers), T), self.pad_id, dtype=np.int64)
        types = np.zeros_like(ids)
        types[:, 0] = self.cls_type
        for r, (begin, first, second) in enumerate(
            zip(f.begin[numbers], f.first[numbers], f.second[numbers], strict=True)
        ):
            ids[r, 0], ids[r, first + 1] = self.cls_id, self.sep_id
            ids[r, 1 : first + 1] = f.tokens[begin : begin + first]
            if f.pair:
                end = first + second + 2
                ids[r, first + 2 : end], ids[r, end] = f.tokens[begin + first : begin + first + second], self.sep_id
                types[r, first + 2 : end + 1] = 1
        mask = (np.arange(T) < lengths[:, None]).astype(np.int64)
        labels = f.labels[numbers] if len(f.labels) else f.labels
        return Batch(*map(torch.from_numpy, (ids, mask, types, labels)))
