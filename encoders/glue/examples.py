"""The files of a task: their examples, the features that an encoder's tokenizer makes of them, and the batches of an epoch.

In a TSV, as in the benchmark's, quotes are ordinary text. A line of a .jsonl file is an object. Files are validated as
they are read, and errors name the line. The order of the examples in an epoch depends only on the seed and the epoch, not
on ranks, workers or a resume.

Shapes. N: examples of a file, R: rows (examples) of a batch, T: positions of a row.
"""

import contextlib
import hashlib
import json
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from common.errors import DataError, library_errors
from common.files import atomic_file
from common.wording import announce, counted
from dataset.arrays import Ints
from dataset.packing import permutation
from dataset.reading.file_kinds import expand_user
from dataset.reading.streams import LineReader
from dataset.tokenizing.encoder import DocumentEncoder
from dataset.tokenizing.tokenizer_files import lost_text
from encoders.glue.tasks import Task

# Maximum characters of a sentence: a tokenizer needs many times its memory.
MAX_SENTENCE = 1 << 20
# Maximum bytes of a line: two such sentences, and other columns. Reading one takes seven times its bytes.
MAX_LINE = 16 << 20
# Version of the cached files; raised when the same input would give other features.
FORMAT = 3
# Examples that are encoded together
ENCODE_BATCH = 4096
# T of a batch is a multiple of this: few shapes, which suit tensor cores.
PAD_MULTIPLE = 8


# ---------------------------------------------------------------------------------------------------- examples


class Example(NamedTuple):
    """A line of a file: its one or two sentences, its label as text ("" in a test file), and its location (path:line)."""

    sentences: tuple[str, ...]
    label: str
    location: str


def examples_of(path: Path, task: Task, labelled: bool) -> Iterator[Example]:
    """The Examples of a file. Errors: DataError that names file and line, also if there is no example; OSError."""
    is_json = path.suffix.lower() == ".jsonl"
    if not is_json and path.suffix.lower() not in (".tsv", ".txt"):
        raise DataError(f"{path}: expected a .tsv with a header or a .jsonl: convert the file")
    # For a file without a header, the task has the columns.
    header = list(task.names) if labelled else []
    n_examples = 0
    n_short = 0
    n_blank = 0
    with path.open("rb") as file:
        reader = LineReader(file, MAX_LINE)
        for raw in iter(reader.read_line, b""):
            location = f"{path}:{reader.number}"
            try:
                if raw is None:
                    raise ValueError(f"a line of more than {MAX_LINE >> 20} MB")
                # Of the first line without the mark that Windows writes.
                line = raw.decode("utf-8-sig" if reader.number == 1 else "utf-8").removesuffix("\n").removesuffix("\r")
                # A row of one text may be empty.
                if not line.strip() if is_json else not line and len(header) > 1:
                    n_blank += 1
                    continue
                if n_blank and not is_json:
                    raise ValueError("a blank line before it")
                if is_json:
                    fields = json.loads(line)
                else:
                    columns = line.split("\t")
                    if not header:
                        header = columns
                        if twice := [name for name in (*task.text, task.label) if header.count(name) > 1]:
                            raise ValueError(f"two columns {twice[0]!r}")
                        continue
                    if task.skip_short_lines and labelled and len(columns) < len(header):
                        n_short += 1
                        continue
                    if len(columns) != len(header):
                        raise ValueError(f"{counted(len(columns), 'column')} where {len(header)} are expected")
                    fields = dict(zip(header, columns, strict=True))
                sentences = tuple(fields[name] for name in task.text)
                # In a .jsonl file it may be a number or a boolean.
                label = fields[task.label] if labelled else ""
                if isinstance(label, (int, float)) and not math.isnan(label):
                    label = json.dumps(label)
                if labelled and not (isinstance(label, str) and label):
                    raise ValueError(f"label {label!r} is no text, number or boolean")
                # Raises for a value that is no text, and for a lone surrogate.
                "".join((*sentences, label)).encode()
                # A line of a file of predictions has the label.
                if "\t" in label or "\n" in label:
                    raise ValueError(f"the label {label[:60]!r} has a tab or a line end")
                if max(map(len, sentences)) > MAX_SENTENCE:
                    raise ValueError(f"a sentence of more than {MAX_SENTENCE:,} characters")
            except KeyError as error:
                raise DataError(
                    f"{location}: {error} is not there; this is no file of {task.folder}, or --text and --label name other columns"
                ) from None
            except (ValueError, TypeError, RecursionError) as error:
                wanted = f"expected an object with the texts {', '.join(task.text)}, " if is_json else ""
                raise DataError(f"{location}: {wanted}{str(error)[:100]}; fix the line") from None
            n_examples += 1
            yield Example(sentences, label, location)
    if not n_examples:
        raise DataError(f"{path}: no example in there")
    if n_short:
        announce(f"{path}: {counted(n_short, 'line')} with too few columns left out, as the public file has them")


def value_of_label(task: Task, example: Example) -> float:
    """The class number or score of an example's label. Errors: DataError for an invalid label."""
    if not task.is_regression:
        if example.label in task.labels:
            return task.labels.index(example.label)
        wanted = f"one of {', '.join(task.labels)[:200]}"
    else:
        low, high = task.bounds
        # NaN fails this too.
        with contextlib.suppress(ValueError):
            if low <= float(example.label) <= high:
                return float(example.label)
        wanted = f"a number from {low:g} to {high:g}"
    raise DataError(f"{example.location}: label {example.label[:60]!r} is not {wanted}; fix the line")


# ---------------------------------------------------------------------------------------------------- features


class Features(NamedTuple):
    """A file's examples: arrays [N], but the tokens and types of all examples are concatenated."""

    tokens: Ints  # ids, special tokens included
    types: Ints  # segment of each
    begin: Ints
    lengths: Ints
    labels: np.ndarray  # int64 classes or float32 scores; [0] for a test file


def encode_file(
    path: Path, task: Task, tokenizer: PreTrainedTokenizerBase, max_seq_len: int, labelled: bool
) -> Features:
    """The Features of a file, truncated to max_seq_len by the tokenizer: the longer sentence of a pair first.

    Errors: DataError, OSError.
    """
    tokens: list[int] = []
    types: list[int] = []
    lengths: list[int] = []
    examples = list(examples_of(path, task, labelled))
    if tokenizer.is_fast:
        # Of one that loses case or spaces nothing is said: most do.
        encoder = DocumentEncoder(tokenizer)
        lost_text((" ".join(example.sentences) for example in examples), encoder.round_trip, f"{path}: the tokenizer")
    labels = [value_of_label(task, example) for example in examples] if labelled else []
    for lo in range(0, len(examples), ENCODE_BATCH):
        columns = zip(*(example.sentences for example in examples[lo : lo + ENCODE_BATCH]), strict=True)
        with library_errors(f"{path}: the tokenizer cannot encode these texts"):
            encoded = tokenizer(
                *map(list, columns),
                truncation="longest_first",
                max_length=max_seq_len,
                return_token_type_ids=True,
                return_attention_mask=False,
            )
        for ids, segments in zip(encoded["input_ids"], encoded["token_type_ids"], strict=True):
            tokens += ids
            types += segments
            lengths.append(len(ids))
    if tokenizer.is_fast:
        # Otherwise truncation would be saved with the tokenizer.
        tokenizer.backend_tokenizer.no_truncation()
    n_tokens = np.array(lengths, dtype=np.int64)
    return Features(
        tokens=np.array(tokens, dtype=np.uint32),
        types=np.array(types, dtype=np.uint8),
        begin=np.cumsum(n_tokens) - n_tokens,
        lengths=n_tokens,
        labels=np.array(labels, dtype=np.float32 if task.is_regression else np.int64),
    )


def cached_features(
    path: Path,
    task: Task,
    tokenizer: PreTrainedTokenizerBase,
    fingerprint: str,
    max_seq_len: int,
    labelled: bool = True,
    cache_dir: str | None = None,
    overwrite: bool = False,
    say: Callable[[str], None] = print,
) -> tuple[Features, str]:
    """(Features of a file, a key of its content and all else that determines them). fingerprint: of the tokenizer.

    Cached in `cache_dir`, or in `.glue_cache` beside the data. Errors: DataError, OSError.
    """
    of_task = [task.text, task.label, task.labels, task.names, task.bounds]
    options = [FORMAT, *of_task, labelled, max_seq_len, fingerprint, tokenizer.truncation_side]
    begun = hashlib.sha256(json.dumps(options).encode())
    with path.open("rb") as file:
        key = hashlib.file_digest(file, lambda: begun).hexdigest()[:16]
    folder = expand_user(cache_dir) if cache_dir else path.parent / ".glue_cache"
    cache = folder / f"{task.folder}-{path.stem}-{key}.npz"
    # A damaged cache is rebuilt, whatever its reader raises: the archive has a checksum of each array.
    with contextlib.suppress(Exception):
        if not overwrite:
            with np.load(cache, allow_pickle=False) as arrays:
                return Features(**{field: arrays[field] for field in Features._fields}), key
    features = encode_file(path, task, tokenizer, max_seq_len, labelled)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with atomic_file(cache) as file:
            np.savez(file, **features._asdict())
    except OSError as error:
        say(f"{folder}: features cannot be kept there ({error.strerror}); --cache_dir names another folder")
    return features, key


# ------------------------------------------------------------------------------------------ batches of an epoch


class Totals(NamedTuple):
    """Totals of an update, over all micro-batches and ranks."""

    targets: int  # tokens without padding
    examples: int


class GluePlan:
    """The examples of one epoch in their order: a row is an example."""

    def __init__(self, features: Features, seed: int, epoch: int) -> None:
        self._lengths = features.lengths
        self.n_rows = len(features.lengths)
        self.T = int(self._lengths.max())
        # A lower bound: batches are only as long as their longest row.
        self.fill = float(self._lengths.mean()) / self.T
        self._order = permutation(np.random.PCG64([seed, epoch]), self.n_rows)

    def totals(self, lo: int, hi: int) -> Totals:
        """The Totals of the rows [lo, hi)."""
        return Totals(int(self._lengths[self._order[lo:hi]].sum()), hi - lo)

    def recipe(self, rows: Sequence[int] | Ints) -> Ints:
        """Numbers of the examples, int64 [R]."""
        return self._order[np.asarray(rows, dtype=np.int64)].astype(np.int64)

    def documents_of(self, lo: int, hi: int) -> list[int]:
        """The numbers of the examples in the rows [lo, hi)."""
        return self._order[lo:hi].tolist()


class Batch(NamedTuple):
    """Examples, padded to one length."""

    ids: torch.Tensor  # int64 [R, T]
    mask: torch.Tensor  # int64 [R, T]: 1 where there is a token
    types: torch.Tensor  # int64 [R, T]: segments, as the tokenizer has them
    labels: torch.Tensor  # [R]: int64 classes or float32 scores; [0]: a test file's


class GlueAssembler:
    """assembler[numbers] is the Batch of these examples, padded on the tokenizer's side to the longest of them, rounded up
    to a multiple of PAD_MULTIPLE, but at most to `max_seq_len`."""

    def __init__(self, features: Features, tokenizer: PreTrainedTokenizerBase, max_seq_len: int) -> None:
        self.features = features
        self.max_seq_len = max_seq_len
        self.pad_id: int = tokenizer.pad_token_id
        self.pad_type: int = tokenizer.pad_token_type_id
        self.pads_left: bool = tokenizer.padding_side == "left"

    def __getitem__(self, numbers: Ints) -> Batch:
        f = self.features
        lengths = f.lengths[numbers]
        T = min(math.ceil(int(lengths.max()) / PAD_MULTIPLE) * PAD_MULTIPLE, self.max_seq_len)
        shape = (len(numbers), T)
        ids = np.full(shape, self.pad_id, dtype=np.int64)
        types = np.full(shape, self.pad_type, dtype=np.int64)
        mask = np.zeros(shape, dtype=np.int64)
        for r, (begin, length) in enumerate(zip(f.begin[numbers], lengths, strict=True)):
            row = slice(T - length, None) if self.pads_left else slice(length)
            ids[r, row] = f.tokens[begin : begin + length]
            types[r, row] = f.types[begin : begin + length]
            mask[r, row] = 1
        labels = f.labels[numbers] if len(f.labels) else f.labels
        return Batch(*map(torch.from_numpy, (ids, mask, types, labels)))
