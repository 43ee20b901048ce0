"""Examples as the tokenizer of an encoder makes them, pairs included; kept in a cache beside the data.

Shapes. N: examples of a file.
"""

import contextlib
import hashlib
import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from common.errors import DataError
from common.files import atomic_file
from common.paths import user_cache
from dataset.glue.glue_tasks import Task
from dataset.glue.tables import read_rows
from dataset.reading.file_kinds import expanded
from dataset.store.format import Ints

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Of a cached file; raised when the same input would give other features.
FORMAT = 2
# Examples that are encoded together: what the library holds of them beside their ids is many times as large.
LINES = 4096


class Features(NamedTuple):
    """A file's examples: arrays [N], but the tokens of all examples, one after the other."""

    # The ids, special tokens included, and to which segment each belongs.
    tokens: Ints
    types: Ints
    begin: Ints
    lengths: Ints
    # int64 classes or float32 scores; [0] for a test file.
    labels: np.ndarray
    # 0-d: lines of the file that were left out.
    skipped: Ints


def encode_file(
    path: Path, task: Task, tokenizer: "PreTrainedTokenizerBase", max_seq_len: int, labelled: bool
) -> Features:
    """The Features of a file, cut to max_seq_len as the tokenizer cuts: of a pair the longer sentence first.

    Errors: DataError.
    """
    rows = read_rows(path, task, labelled)
    tokens: list[int] = []
    types: list[int] = []
    lengths: list[int] = []
    for lo in range(0, len(rows.sentences[0]), LINES):
        columns = [column[lo : lo + LINES] for column in rows.sentences]
        encoded = tokenizer(
            *columns,
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
        # It would be saved with the tokenizer.
        tokenizer.backend_tokenizer.no_truncation()
    n_tokens = np.array(lengths, dtype=np.int64)
    return Features(
        tokens=np.array(tokens, dtype=np.uint32),
        types=np.array(types, dtype=np.uint8),
        begin=np.cumsum(n_tokens) - n_tokens,
        lengths=n_tokens,
        labels=np.array(rows.labels, dtype=np.float32 if task.is_regression else np.int64),
        skipped=np.array(rows.skipped),
    )


def cached_features(
    path: Path,
    task: Task,
    tokenizer: "PreTrainedTokenizerBase",
    fingerprint: str,
    max_seq_len: int,
    labelled: bool = True,
    cache_dir: str | None = None,
    overwrite: bool = False,
    say: Callable[[str], None] = print,
) -> tuple[Features, str]:
    """(Features of a file, a key that changes with its content and with all that decides on them). fingerprint: of the
    tokenizer.

    They are kept in `.glue_cache` beside the data, in the user's cache folder where that cannot be written, or in
    `cache_dir`. Errors: DataError.
    """
    options = [FORMAT, task.text, task.label, task.labels, task.names, task.bounds, labelled, max_seq_len, fingerprint]
    try:
        key = hashlib.sha256(json.dumps(options).encode() + path.read_bytes()).hexdigest()[:16]
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from None
    name = f"{task.folder}-{path.stem}-{key}.npz"
    places = [expanded(cache_dir)] if cache_dir else [path.parent / ".glue_cache", user_cache() / "glue"]
    for place in places:
        # A damaged one is made anew: the archive has a check sum of each array.
        with contextlib.suppress(OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
            if not overwrite:
                with np.load(place / name, allow_pickle=False) as arrays:
                    return Features(**{field: arrays[field] for field in Features._fields}), key
    features = encode_file(path, task, tokenizer, max_seq_len, labelled)
    for place in places:
        with contextlib.suppress(OSError):
            place.mkdir(parents=True, exist_ok=True)
            with atomic_file(place / name) as file:
                np.savez(file, **features._asdict())
            if place != places[0]:
                say(f"{places[0]} cannot be written: the features go to {place}")
            return features, key
    raise DataError(f"{places[0]} cannot be written; --cache_dir names a folder for the features")
