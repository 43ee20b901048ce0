"""Tokenizers of a run's own: byte-level BPEs of several sizes, trained on its training text and never on what it holds out.

Merges are nested: the first ones of a large tokenizer are those of a small one. So one training gives all sizes.
"""

import json
import math
import random
import time
from collections.abc import Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tokenizers import Tokenizer

from common.errors import DataError
from common.files import digest_of_json
from common.processes import WorkerDied, Workers
from common.wording import announce
from dataset.corpus import MIN_DOCUMENTS, is_low
from dataset.reading.bad_lines import BadLines
from dataset.reading.documents import read_documents
from dataset.reading.file_kinds import choose_files
from dataset.reading.settings import TextSettings
from dataset.shares import Curve, Source
from dataset.store.build import DataFiles, copy_hash_of, hash_of_text
from dataset.tokenizing.byte_level_bpe import SPECIAL_TOKENS, save, train_bpe
from dataset.tokenizing.encoder import DocumentEncoder, load_tokenizer
from dataset.tokenizing.tokenizer_files import DEFAULT
from trainer.budget.difficulty import difficulty_of_tokens

# Not 6,400: the law takes these for the repository's own entries.
SIZES = (1024, 1600, 3200, 6144, 12_800, 25_600, 51_200, 102_400)
# Minimum text for an own tokenizer, and for each entry of it, in bytes: rarer entries are hardly trained.
MIN_BYTES = 300_000
BYTES_PER_ENTRY = 150
# Bytes of text by which the sizes are compared, and of those among them that no tokenizer is trained on: at most this share of the text
COMPARED_BYTES = 4_500_000
EVALUATED_BYTES = 400_000
EVALUATED_SHARE = 0.05
# Raise this number when the same text gives other tokenizers or figures.
FORMAT = 3
FIGURES = "figures.json"
# What a plan holds out is decided later: at most about this share of the documents (`share_to_hold_out`), or the end of a long text. That
# end is a share of the tokens; here TAIL times that share of the bytes is left out.
HELD_OUT_SHARE, FEW_HELD_OUT_SHARE = 0.075, 0.02
TAIL = 1.25
# Parts of documents, in bytes: a small share of a book is some parts of it.
PART = 1 << 17


class Part(NamedTuple):
    """A part of a document. hash, copy_hash, length: of the whole, in bytes. begin: its first byte."""

    hash: int
    copy_hash: int
    length: int
    begin: int
    raw: bytes


class Request(NamedTuple):
    """What tokenizers are trained on. held_out: at most this share of the text is held out; None: a plan chooses it. max_bytes: of text, at most."""

    sources: Sequence[Source]
    reading: TextSettings
    held_out: float | None
    max_bytes: float


def own_tokenizers(request: Request, progress: bool) -> Path | None:
    """The folder of tokenizers of all sizes that suit the text, each in a folder of its size, and of FIGURES; None: too little text.

    They are trained in a process of their own, or found where the token stores of this text are. Errors: DataError, UserError.
    """
    reading, sources = request.reading, request.sources
    data = DataFiles([path for source in sources for path in source.paths], reading, progress)
    if data.size < MIN_BYTES:
        return None
    text = [data.digests, [(len(source.paths), source.shares) for source in sources]]
    options = [reading.text_field, reading.skip_bad_lines, reading.split_text, request.held_out, request.max_bytes]
    name = f"tokenizer-{digest_of_json([FORMAT, text, options])[:16]}"

    def open_folder(folder: Path) -> Path | None:
        return folder if (folder / FIGURES).is_file() else None

    def train(folder: Path) -> None:
        if progress:
            announce("planning: training a tokenizer on the text")
        # In a process of its own: it takes forty times the memory of its text, and leaves threads behind.
        try:
            with closing(Workers(1, partial(train_sizes, request))) as workers:
                list(workers.results(iter([folder]), ahead=1))
        except WorkerDied as lost:
            raise DataError(f"the trainer of a tokenizer: {lost}; --tokenizer_path model needs none") from None

    return data.open_or_make(name, name, open_folder, train)


def train_sizes(request: Request, folder: Path) -> None:
    """Write the tokenizers, and FIGURES: {"sizes": {size: bytes per token, 0 for this repository's}, "difficulty": for it, ...}: of text that
    no tokenizer has seen; "trained" as `training_texts` returns it."""
    began = time.monotonic()
    folder.mkdir()
    encoders = {0: DocumentEncoder(load_tokenizer(DEFAULT))}
    texts, text_bytes, trained = training_texts(request, encoders[0])
    # What is compared comes from all sources.
    random.Random(0).shuffle(texts)
    ends = np.cumsum([len(text.encode()) for text in texts])
    n_bytes = int(ends[-1]) if texts else 0
    limits = min(EVALUATED_SHARE * n_bytes, EVALUATED_BYTES), COMPARED_BYTES
    n_evaluated, n_compared = np.searchsorted(ends, limits) + 1
    evaluated, compared = texts[:n_evaluated], texts[n_evaluated:n_compared]
    sizes = [size for size in SIZES if n_bytes >= max(MIN_BYTES, size * BYTES_PER_ENTRY)]
    if sizes and compared:
        tokenizer = train_bpe(texts[n_evaluated:], sizes[-1], may_be_fewer=True)
        for size in filter(tokenizer.get_vocab_size().__ge__, sizes):
            save(first_entries(tokenizer, size), folder / str(size))
            encoders[size] = DocumentEncoder(load_tokenizer(folder / str(size)))
    figures, difficulty = {}, 1.0
    if len(encoders) > 1:
        usual = [np.concatenate(encoders[0].encode(part)) for part in (compared, evaluated)]
        difficulty = difficulty_of_tokens(*usual)
        for size, encoder in encoders.items():
            # BOS is no target.
            figures[size] = int(ends[n_evaluated - 1]) / sum(len(ids) - 1 for ids in encoder.encode(evaluated))
    content = {"sizes": figures, "difficulty": difficulty, "bytes": n_bytes, "text_bytes": text_bytes}
    (folder / FIGURES).write_text(json.dumps({**content, "seconds": time.monotonic() - began, "trained": trained}))


def first_entries(tokenizer: Tokenizer, size: int) -> Tokenizer:
    """The tokenizer of `size` entries that the same training would have given."""
    content: dict[str, Any] = json.loads(tokenizer.to_str())
    model = content["model"]
    model["vocab"] = {token: i for token, i in model["vocab"].items() if i < size}
    model["merges"] = model["merges"][: size - len(SPECIAL_TOKENS) - 256]
    return Tokenizer.from_str(json.dumps(content))


def training_texts(request: Request, encoder: DocumentEncoder) -> tuple[list[str], int, dict[int, int]]:
    """(texts of at most max_bytes, spread over the sources by their shares, without what a run is likely to hold out; bytes of all;
    {hash of a document, whatever its line ends are: its bytes up to the last one in these texts}). Whether it is held out after all is
    checked later, once the run's split is known: `knows_held_out`."""
    # Areas under the shares; without shares there is one source.
    areas = [1.0 if source.shares is None else float(Curve(source.shares).area(1.0)) for source in request.sources]
    parts: list[Part] = []
    lengths: list[int] = []
    for source, area in zip(request.sources, areas, strict=True):
        parts += sampled_parts(source, request.reading, encoder, request.max_bytes * area / sum(areas), lengths)
    # Of few texts a plan holds out less (`share_to_hold_out`).
    share = request.held_out
    if share is None:
        share = FEW_HELD_OUT_SHARE if len(lengths) < MIN_DOCUMENTS else HELD_OUT_SHARE
    # Any long text may be the one whose end is held out, which has the most tokens, not bytes. It is never held out whole.
    longest = max(lengths, default=0) if len(lengths) < MIN_DOCUMENTS else math.inf
    tail = math.ceil(TAIL * share * sum(lengths))
    texts: list[str] = []
    trained: dict[int, int] = {}
    for part in parts:
        is_long = part.length >= min(2 * tail, longest)
        raw = part.raw[: max(0, part.length - tail * is_long - part.begin)]
        if raw and (is_long or not is_low(np.array(part.hash, np.uint64), share)):
            # A part may begin or end within a character.
            texts.append(raw.decode(errors="ignore"))
            trained[part.copy_hash] = max(trained.get(part.copy_hash, 0), part.begin + len(raw))
    return texts, sum(lengths), trained


def sampled_parts(
    source: Source, reading: TextSettings, encoder: DocumentEncoder, max_bytes: float, lengths: list[int]
) -> list[Part]:
    """Parts of a source's documents, of max_bytes at most, spread evenly. lengths: gets the bytes of each document. Errors: DataError."""
    kept: list[Part] = []
    step, number, size = 1, 0, 0
    files = (file for path in source.paths for file in choose_files(path, reading.text_suffixes)[0])
    for file in files:
        bad_lines = BadLines() if reading.skip_bad_lines else None
        for _, whole in read_documents(file, reading.text_field, bad_lines, reading.split_text):
            text = encoder.body(whole)
            raw = text.encode()
            lengths.append(len(raw))
            begins = range(0, len(raw), PART)
            taken = begins[-number % step :: step]
            number += len(begins)
            if taken:
                # Once, however many parts of it are taken
                hashes = hash_of_text(raw), copy_hash_of(text)
                kept += [Part(*hashes, len(raw), begin, raw[begin : begin + PART]) for begin in taken]
                size += sum(len(part.raw) for part in kept[-len(taken) :])
            while size > max_bytes and len(kept) > 1:
                # Every other one, of what follows too
                kept, step = kept[::2], 2 * step
                size = sum(len(part.raw) for part in kept)
    return kept
