"""The data of a run as its flags name it, and the length of the run."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from common.errors import DataError
from common.start import ROOT
from common.wording import announce, counted
from dataset.corpus import Corpus
from dataset.embedded_corpus import build_embedded_corpus
from dataset.shares import Source, read_mixture
from dataset.tokenizing.encoder import DocumentEncoder
from trainer.batching import Batching
from trainer.machine.rank import Ranks
from trainer.pretrain.settings import DataSettings, PretrainSettings


class TextKind(NamedTuple):
    """Documents or conversations. make_encoder: builds the encoder of a tokenizer.

    default_file: default data. If that is absent, build_embedded writes an embedded corpus, unless it exists, and
    returns its path; embedded_description: its content.
    """

    corpus: type[Corpus]
    make_encoder: Callable[[Any, PretrainSettings], DocumentEncoder]
    default_file: Path
    build_embedded: Callable[[], Path]
    embedded_description: str


DOCUMENTS = TextKind(
    Corpus,
    lambda tokenizer, settings: DocumentEncoder(tokenizer, bool(settings.parse_special_tokens)),
    default_file=ROOT / "dataset" / "pretrain_hq.jsonl",
    build_embedded=build_embedded_corpus,
    embedded_description="the documentation inside the installed Python",
)


def open_corpus(settings: PretrainSettings, encoder: DocumentEncoder, ranks: Ranks, kind: TextKind) -> Corpus:
    """The Corpus of the settings. On several ranks call it through `first_rank_first`: one may have to tokenise what another finds cached.

    Errors: DataError for text that the tokenizer does not know; UserError.
    """
    n_rows = settings.max_updates * Batching.of(settings, ranks).rows
    return kind.corpus.of(settings, data_of(settings, kind), encoder, n_rows=n_rows, progress=ranks.is_main)


def refuse_too_little_text(settings: PretrainSettings, corpus: Corpus) -> None:
    """Errors: DataError if a run of so many updates repeats a source of its mixture more often than allowed."""
    mixture = corpus.mixture
    if mixture is None or not mixture.is_one_plan or not settings.max_updates:
        return
    excess = mixture.repeats_beyond_limit(corpus.plan(0))
    if excess:
        raise DataError(
            f"--data_path: too little text for {counted(settings.max_updates, 'update')}: {excess}; allow more "
            "passes, as in PATH:SHARE:x2 (repeat: 2 in a --mixture file), or train fewer updates"
        )


def data_of(settings: DataSettings, kind: TextKind = DOCUMENTS) -> Sequence[str | Source]:
    """The data of --data_path or --mixture, else the usual file, else the embedded corpus."""
    if settings.mixture:
        return read_mixture(Path(settings.mixture), settings.folder)
    if settings.data_path:
        return settings.data_path
    return [str(kind.default_file if kind.default_file.exists() else kind.build_embedded())]


def announce_embedded_corpus(settings: DataSettings, kind: TextKind) -> None:
    """Tell the user of the embedded corpus if the run trains on it."""
    if not (settings.mixture or settings.data_path or kind.default_file.exists()):
        announce(
            f"no {kind.default_file}: training on {kind.embedded_description} ({kind.build_embedded()}).\n"
            "dataset/README.md explains how to get a full corpus; --data_path trains on your own text."
        )
