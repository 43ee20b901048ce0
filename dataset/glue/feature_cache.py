"""The features of a file, kept beside it, so that they are made once."""

import contextlib
import hashlib
import json
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np

from common.errors import DataError
from common.files import atomic_file, refuse_irregular
from common.paths import user_cache
from dataset.glue.feature_check import check_features
from dataset.glue.features import Features, encode_rows, in_both_orders
from dataset.glue.glue_tasks import QUESTIONS, TAGS, TASKS, Task
from dataset.glue.questions import encode_questions, read_questions
from dataset.glue.tables import read_bytes, read_rows
from dataset.glue.tagging import encode_sentences, read_sentences
from dataset.reading.file_kinds import expanded
from dataset.tokenizing.long_texts import TooLongToEncode
from dataset.tokenizing.sentence_encoder import SentenceEncoder

# Of a cached file; raised when the same input would give other features.
FORMAT = 1
# What a file raises that is damaged, or none of ours.
UNREADABLE = (OSError, ValueError, TypeError, EOFError, AttributeError, MemoryError, zipfile.BadZipFile)
# How many fields a task of the benchmark is described by.
N_OF_BENCHMARK = Task._fields.index("kind")


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
    """Path of the .npz with the Features of a file, made now if there is none, or one that is damaged or none of ours; read_features opens it.

    It lies in `.glue_cache` beside the data, in the user's cache folder where that cannot be written, or in `cache_dir`.
    Its name depends on the file's content, the tokenizer and all that decides the features. Errors: DataError.
    both_orders: see `in_both_orders`.
    """
    path = Path(path)
    described = of_features(task)
    # Of the benchmark's tasks, and without both orders, the name is that of earlier versions.
    options: list[object] = [FORMAT, described[:N_OF_BENCHMARK], labelled, max_seq_len, encoder.fingerprint]
    if task not in TASKS.values():
        options.append(described[N_OF_BENCHMARK:])
    if both_orders:
        options.append("both orders")
    key = hashlib.sha256(json.dumps(options).encode() + read_bytes(path)).hexdigest()[:16]
    name = f"{task.folder}-{path.stem}-{key}.npz"
    places = [path.parent / ".glue_cache", user_cache() / "glue"]
    if cache_dir:
        places = [expanded(cache_dir)]
    if not overwrite:
        for place in places:
            with contextlib.suppress(*UNREADABLE):
                # Anybody may have put it there.
                check_features(read_features(place / name), task, encoder, max_seq_len, labelled)
                return place / name
    features = make_features(path, task, encoder, max_seq_len, labelled, both_orders)
    for place in places:
        with contextlib.suppress(OSError):
            _write(place, name, features)
            if place != places[0]:
                say(f"{places[0]} cannot be written: the features go to {place}")
            return place / name
    raise DataError(f"{places[0]} cannot be written; --cache_dir names a folder for the features")


def of_features(task: Task) -> Task:
    """A task without what changes no feature: its other files, and for one's own task metrics, epochs and how long an answer
    may be. (Those of the benchmark never change.)"""
    described = task._replace(dev=(), test=(), train="")
    if task in TASKS.values():
        return described
    return described._replace(metrics=(), epochs=0, windows=task.windows._replace(longest_answer=0))


def make_features(
    path: Path, task: Task, encoder: SentenceEncoder, max_seq_len: int, labelled: bool, both_orders: bool
) -> Features:
    """The Features of a file. Errors: DataError, ValueError."""
    try:
        if task.kind == TAGS:
            return encode_sentences(read_sentences(path, task, labelled), encoder, max_seq_len)
        if task.kind == QUESTIONS:
            return encode_questions(read_questions(path, labelled), task.windows, encoder, max_seq_len)
        rows = read_rows(path, task, labelled)
        if both_orders:
            rows = in_both_orders(rows)
        return encode_rows(rows, task, encoder, max_seq_len)
    except TooLongToEncode as error:
        raise DataError(f"{path}: {error}") from error


def _write(place: Path, name: str, features: Features) -> None:
    """Another process never sees half of the file."""
    place.mkdir(parents=True, exist_ok=True)
    with atomic_file(place / name) as file:
        np.savez(file, **features._asdict())


def read_features(path: Path) -> Features:
    """The Features in a file of cached_features. Errors: UNREADABLE."""
    refuse_irregular(path)
    with np.load(path, allow_pickle=False) as arrays:
        # A compressed one may be larger than any memory; those of ours are not.
        if any(member.compress_type != zipfile.ZIP_STORED for member in arrays.zip.infolist()):
            raise ValueError(f"{path}: compressed")
        # Those of earlier versions lack the fields that have a default.
        return Features(**{name: arrays[name] for name in Features._fields if name in arrays})
