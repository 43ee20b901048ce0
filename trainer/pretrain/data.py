"""The data of a run as its flags name it."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from common.errors import UserError
from common.notices import announce
from common.paths import ROOT
from dataset.corpus import Corpus
from dataset.embedded_corpus import build_embedded_corpus
from dataset.mixture import RunLength
from dataset.shares import Source, read_mixture
from dataset.tokenizing.encoder import DocumentEncoder
from dataset.tokenizing.vocabulary import check_known
from trainer.machine.collectives import first_rank_first, until_all_are_ready
from trainer.machine.ranks import Ranks
from trainer.pretrain.first_model import FirstModel
from trainer.pretrain.settings import AUTO_ROWS, DataSettings, PretrainSettings
from trainer.updates import rows_of_update


class UsualData(NamedTuple):
    """What is trained on where no data is named: a file in dataset/, and where that is absent an embedded one.

    build: writes the embedded one to a path, unless it is there. what: what is in it.
    """

    file: str
    embedded: str
    build: Callable[[Path], Path]
    what: str


USUAL_TEXT = UsualData(
    "pretrain_hq.jsonl",
    "python_docs.jsonl",
    build_embedded_corpus,
    "the documentation inside the installed Python",
)


def document_encoder(tokenizer: Any, settings: PretrainSettings) -> DocumentEncoder:
    """What makes ids of a document."""
    return DocumentEncoder(tokenizer, bool(settings.parse_special_tokens))


class TextKind(NamedTuple):
    """What is read, and how. encoder: makes ids of a text. answers: conversations, of which the answers alone are trained.

    flags_of_data: what mends data that is not that of a resumed run.
    """

    corpus: type[Corpus]
    usual: UsualData
    encoder: Callable[[Any, PretrainSettings], DocumentEncoder]
    answers: bool
    flags_of_data: str


DOCUMENTS = TextKind(
    Corpus,
    USUAL_TEXT,
    document_encoder,
    answers=False,
    flags_of_data="--data_path, --text_field, --skip_bad_lines, --deduplicate",
)


def open_corpus(settings: PretrainSettings, encoder: DocumentEncoder, ranks: Ranks, kind: TextKind) -> Corpus:
    """The Corpus of the settings, when all ranks have theirs: one may have to tokenise or to fetch, where another finds all."""

    def open_own() -> Corpus:
        return kind.corpus(
            data_of(settings, kind.usual, tell=ranks.is_main),
            encoder,
            max_seq_len=settings.max_seq_len,
            seed=settings.seed,
            pack=settings.pack,
            long_documents=settings.long_documents,
            val_path=settings.val_path,
            val_fraction=settings.val_fraction,
            allow_val_overlap=settings.allow_val_overlap,
            deduplicate=settings.deduplicate,
            length=RunLength(settings.epochs, settings.max_updates, rows_before_auto_batch(settings, ranks)),
            cache_dir=settings.cache_dir,
            text_field=settings.text_field,
            text_suffixes=settings.text_suffixes,
            skip_bad_lines=settings.skip_bad_lines,
            progress=ranks.is_main,
        )

    return first_rank_first(ranks, open_own)


def rows_before_auto_batch(settings: PretrainSettings, ranks: Ranks) -> int:
    """Of an update of all ranks, also while --batch_size auto has no number yet: it has the rows that it has without."""
    rows = settings.usual_rows() if settings.batch_size == AUTO_ROWS else settings.batch_size
    return rows_of_update(replace(settings, batch_size=rows), ranks)


def data_of(settings: DataSettings, usual: UsualData = USUAL_TEXT, tell: bool = True) -> Sequence[str | Source]:
    """What --data_path or --mixture names; the embedded data where neither that nor the usual file is there."""
    if settings.mixture:
        return read_mixture(Path(settings.mixture))
    if settings.data_path:
        return settings.data_path
    default = ROOT / "dataset" / usual.file
    if default.exists():
        return [str(default)]
    embedded = usual.build(ROOT / "dataset" / usual.embedded)
    if tell:
        announce(
            f"{default} is not there: training on {embedded}, {usual.what}.\n"
            "dataset/README.md tells how to get a full corpus; --data_path trains on your own."
        )
    return [str(embedded)]


def open_data(settings: PretrainSettings, first: FirstModel, kind: TextKind, ranks: Ranks) -> Corpus:
    """The data of a run, which fits its tokenizer and model. Errors: DataError, UserError."""
    # The first run on a corpus tokenises it here, which may take long: whatever else can be wrong was looked at.
    corpus = open_corpus(settings, first.encoder, ranks, kind)
    what = f"--tokenizer_path {settings.tokenizer_path}"
    vocabulary = first.model.config.vocab_size
    # A rank may have to fetch the first group of documents.
    with until_all_are_ready(ranks):
        # Each document has them, so they do not count as known.
        added = (first.encoder.bos_id, first.encoder.eos_id)
        check_known(corpus.store.tokens, first.tokenizer.unk_token_id, f"--data_path, {what}", added)
        if corpus.max_token_id >= vocabulary:
            raise UserError(
                f"{what} gives token id {corpus.max_token_id}, beyond the model's vocabulary of {vocabulary}: use the "
                "tokenizer that the weights were trained with"
            )
        corpus.plan(0)
    return corpus
