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
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from common.errors import DataError
from common.paths import user_cache
from dataset.glue.glue_tasks import Task
from dataset.loader import ceil_div, pinned, to_device
from dataset.packing import permutation
from dataset.reading.file_kinds import expanded
from dataset.store.interface import Ints
from dataset.tokenizing.sentence_encoder import SentenceEncoder

# Of a cached file; raised when the same input would give other features.
FORMAT = 1
# Of a batch's T: few shapes, and of the kind that tensor cores like.
MULTIPLE = 8


# ------------------------------------------------------------------------------------------------ reading


class Rows(NamedTuple):
    """What a file holds: sentences (one list per column of the task's `text`), labels (class numbers or scores; empty
    for a test file) and the number of lines that were skipped."""

    sentences: list[list[str]]
    labels: list[float]
    skipped: int


def read_tsv(path: str | Path, task: Task, labelled: bool = True) -> Rows:
    """The Rows of a TSV: fields lie between tabs, a quote is text like any other, a BOM and CRLF are taken off.

    Errors: DataError that names file and line, where one is not UTF-8, has another number of columns or no such label.
    """
    lines = _lines(path)
    # Some files have no header where they have labels.
    first_line = 1
    header = list(task.names)
    if not (labelled and task.names):
        header = lines[0].split("\t") if lines else []
        first_line = 2
    wanted = (*task.text, task.label) if labelled else task.text
    missing = [repr(name) for name in wanted if name not in header]
    if missing:
        raise DataError(f"{path}:1: no column {', '.join(missing)} in the header; this is no {task.folder} file")
    columns = [header.index(name) for name in task.text]
    sentences: list[list[str]] = [[] for _ in columns]
    labels: list[float] = []
    skipped = 0
    for number, line in enumerate(lines[first_line - 1 :], first_line):
        fields = line.split("\t")
        if len(fields) != len(header):
            if task.skip_short_lines and labelled and len(fields) < len(header):
                skipped += 1
                continue
            raise DataError(f"{path}:{number}: {len(fields)} columns where {len(header)} are wanted; mend the line")
        for sentence, column in zip(sentences, columns, strict=True):
            sentence.append(fields[column])
        if labelled:
            word = fields[header.index(task.label)]
            try:
                labels.append(_label(task, word))
            except (KeyError, ValueError):
                what = f"one of {', '.join(task.labels)}" if task.labels else "a score from 0 to 5"
                raise DataError(f"{path}:{number}: label {word!r} is not {what}; mend the line") from None
    if not sentences[0]:
        raise DataError(f"{path}: no example in there")
    return Rows(sentences, labels, skipped)


def _lines(path: str | Path) -> list[str]:
    """The lines of a file without their ends; not the empty ones at its end. Errors: DataError."""
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
    return lines


def _read(path: str | Path) -> bytes:
    """The content of a file. Errors: DataError."""
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from None


def _label(task: Task, word: str) -> float:
    """The class number or the score that a word means. Errors: KeyError or ValueError for one that means none."""
    if task.labels:
        return {label: i for i, label in enumerate(task.labels)}[word]
    value = float(word)
    # NaN is not between them either.
    if not 0 <= value <= 5:
        raise ValueError(word)
    return value


# ----------------------------------------------------------------------------------------------- features


def longest_first(first: Ints, second: Ints, budget: int) -> tuple[Ints, Ints]:
    """(tokens kept of the first, of the second): while both exceed the budget together, the longer one gives its last,
    at a tie the second. Arrays [N]; the lengths that ELECTRA's own loop of pops ends with."""
    kept = np.minimum(second, np.maximum(budget // 2, budget - first))
    return np.minimum(first, budget - kept), kept


class Features(NamedTuple):
    """A file's examples. tokens: the ids of all sentences, one after the other; the rest arrays [N]."""

    tokens: Ints
    # Of an example's first token.
    begin: Ints
    # Tokens of its first sentence.
    first: Ints
    # And of its second; 0 in single-sentence tasks.
    second: Ints
    # int64 classes or float32 scores; [0] for a test file.
    labels: Ints
    # 0-d: whether the task has two sentences.
    pair: Ints
    # 0-d: lines of the file that were left out.
    skipped: Ints

    @property
    def lengths(self) -> Ints:
        """Positions that the examples take, CLS and SEP included."""
        return self.first + self.second + 2 + int(self.pair)


def in_both_orders(rows: Rows) -> Rows:
    """The examples of two sentences, and behind them the same with the sentences swapped: `double_unordered` of
    https://github.com/google-research/electra, which does so for the training files of MRPC and STS-B."""
    first, second = rows.sentences
    return rows._replace(sentences=[first + second, second + first], labels=rows.labels + rows.labels)


def encode_rows(rows: Rows, task: Task, encoder: SentenceEncoder, max_seq_len: int) -> Features:
    """The Features of Rows, cut longest-first to max_seq_len positions."""
    ids = [encoder.encode(column) for column in rows.sentences]
    lengths = []
    for column in ids:
        lengths.append(np.array([len(sentence) for sentence in column], dtype=np.int64))
    pair = len(ids) == 2
    if pair:
        # CLS first SEP second SEP
        first, second = longest_first(lengths[0], lengths[1], max_seq_len - 3)
    else:
        # CLS first SEP
        first = np.minimum(lengths[0], max_seq_len - 2)
        second = np.zeros_like(first)
    tokens: list[int] = []
    for i in range(len(first)):
        tokens += ids[0][i][: first[i]]
        if pair:
            tokens += ids[1][i][: second[i]]
    dtype = np.uint16 if encoder.vocab_size <= 1 << 16 else np.uint32
    labels = np.array(rows.labels, dtype=np.int64 if task.labels else np.float32)
    begin = np.cumsum(first + second) - (first + second)
    return Features(
        tokens=np.array(tokens, dtype=dtype),
        begin=begin,
        first=first,
        second=second,
        labels=labels,
        pair=np.array(pair),
        skipped=np.array(rows.skipped),
    )


def cached_features(
    path: str | Path,
    task: Task,
    encoder: SentenceEncoder,
    max_seq_len: int,
    cache_dir: str | None = None,
    labelled: bool = True,
    overwrite: bool = False,
    say: Callable[[str], None] = print,
    both_orders: bool = False,
) -> Path:
    """Path of the .npz with the Features of a file, made now if there is none or it is damaged; read_features opens it.

    It lies in `.glue_cache` beside the data, in the user's cache folder where that cannot be written, or in `cache_dir`.
    Its name depends on the file's content, the tokenizer and all that decides the features. Errors: DataError.
    both_orders: see `in_both_orders`.
    """
    path = Path(path)
    options: list[object] = [FORMAT, task._replace(dev=(), test=()), labelled, max_seq_len, encoder.fingerprint]
    # Without it the name is that of earlier versions.
    if both_orders:
        options.append("both orders")
    key = hashlib.sha256(json.dumps(options).encode() + _read(path)).hexdigest()[:16]
    name = f"{task.folder}-{path.stem}-{key}.npz"
    places = [path.parent / ".glue_cache", user_cache() / "glue"]
    if cache_dir:
        places = [expanded(cache_dir)]
    if not overwrite:
        for place in places:
            with contextlib.suppress(OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
                read_features(place / name)
                return place / name
    rows = read_tsv(path, task, labelled)
    if both_orders:
        rows = in_both_orders(rows)
    features = encode_rows(rows, task, encoder, max_seq_len)
    for place in places:
        with contextlib.suppress(OSError):
            _write(place, name, features)
            if place != places[0]:
                say(f"{places[0]} cannot be written: the features go to {place}")
            return place / name
    raise DataError(f"{places[0]} cannot be written; --cache_dir names a folder for the features")


def _write(place: Path, name: str, features: Features) -> None:
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


def read_features(path: Path) -> Features:
    """The Features in a file of cached_features."""
    with np.load(path, allow_pickle=False) as arrays:
        return Features(**{name: arrays[name] for name in Features._fields})


# ------------------------------------------------------------------------------------------------ batches


class Totals(NamedTuple):
    """What an update trains, over all micro-batches and ranks."""

    # Tokens without padding.
    targets: int
    examples: int


class GluePlan:
    """The examples of one epoch in their order: a row is an example."""

    def __init__(self, features: Features, seed: int, epoch: int) -> None:
        self._lengths = features.lengths
        self.n_rows = len(features.first)
        self.T = int(self._lengths.max())
        # Batches are shorter: each is as long as its longest row.
        self.fill = float(self._lengths.mean()) / self.T
        self._order = permutation(np.random.PCG64([seed, epoch]), self.n_rows)

    def width(self, n: int) -> float:
        """The mean of the longest lengths in batches of n, which they are padded to."""
        first_of_batch = np.arange(0, self.n_rows, n)
        longest = np.maximum.reduceat(self._lengths[self._order], first_of_batch)
        return float(longest.mean())

    def totals(self, lo: int, hi: int) -> Totals:
        """The Totals of the rows [lo, hi)."""
        return Totals(int(self._lengths[self._order[lo:hi]].sum()), hi - lo)

    def recipe(self, rows: Sequence[int] | Ints) -> Ints:
        """Numbers of the examples, int64 [R]."""
        return self._order[np.asarray(rows, dtype=np.int64)].astype(np.int64)

    def documents_of(self, lo: int, hi: int) -> list[int]:
        """The numbers of the examples in the rows [lo, hi)."""
        numbers: list[int] = self._order[lo:hi].tolist()
        return numbers


class Batch(NamedTuple):
    """Examples, padded to one length."""

    # int64 [R, T].
    ids: torch.Tensor
    # int64 [R, T]: 1 where there is a token.
    mask: torch.Tensor
    # int64 [R, T]: 1 in the second sentence; CLS has the tokenizer's own.
    types: torch.Tensor
    labels: torch.Tensor  # [R]: int64 classes or float32 scores; [0] for a test file

    def to(self, device: torch.device | str) -> "Batch":
        return to_device(self, device)

    def pin_memory(self) -> "Batch":
        return pinned(self)


class GlueAssembler:
    """assembler[numbers] is the Batch of these examples: CLS first SEP [second SEP], padded to the longest of them, up
    to a multiple of MULTIPLE but never beyond `max_seq_len`. full: to the longest of all, so that T is `width`."""

    def __init__(self, features: Features, encoder: SentenceEncoder, max_seq_len: int, full: bool = False) -> None:
        self.features = features
        self.max_seq_len = max_seq_len
        self.full = full
        self.width = self._padded(features.lengths)
        self.cls_id = encoder.cls_id
        self.sep_id = encoder.sep_id
        self.pad_id = encoder.pad_id
        self.cls_type = encoder.cls_type

    def _padded(self, lengths: Ints) -> int:
        """The width of a batch with examples of these lengths."""
        return min(ceil_div(int(lengths.max()), MULTIPLE) * MULTIPLE, self.max_seq_len)

    def __getitem__(self, numbers: Ints) -> Batch:
        f = self.features
        lengths = f.lengths[numbers]
        R = len(numbers)
        T = self.width if self.full else self._padded(lengths)
        ids = np.full((R, T), self.pad_id, dtype=np.int64)
        types = np.zeros((R, T), dtype=np.int64)
        ids[:, 0] = self.cls_id
        types[:, 0] = self.cls_type
        for r, number in enumerate(numbers):
            begin = f.begin[number]
            # CLS, the first sentence, SEP: the second one begins behind it.
            split = begin + f.first[number]
            place = 1 + f.first[number]
            ids[r, 1:place] = f.tokens[begin:split]
            ids[r, place] = self.sep_id
            if f.pair:
                end = place + 1 + f.second[number]
                ids[r, place + 1 : end] = f.tokens[split : split + f.second[number]]
                ids[r, end] = self.sep_id
                types[r, place + 1 : end + 1] = 1
        mask = (np.arange(T) < lengths[:, None]).astype(np.int64)
        labels = f.labels[numbers] if len(f.labels) else f.labels
        return Batch(
            ids=torch.from_numpy(ids),
            mask=torch.from_numpy(mask),
            types=torch.from_numpy(types),
            labels=torch.from_numpy(labels),
        )
