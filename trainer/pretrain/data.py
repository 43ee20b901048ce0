"""The data of a run as its flags name it."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from common.notices import announce
from common.paths import ROOT
from dataset.corpus import Corpus
from dataset.embedded_corpus import build_embedded_corpus
from dataset.planned_mixture import RunLength
from dataset.shares import Source, read_mixture
from dataset.tokenizing.encoder import DocumentEncoder
from trainer.machine.collectives import first_rank_first
from trainer.machine.ranks import Ranks
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


def open_corpus(
    settings: PretrainSettings, encoder: DocumentEncoder, ranks: Ranks, kind: type[Corpus], usual: UsualData
) -> Corpus:
    """The Corpus of the settings, when all ranks have theirs: one may have to tokenise or to fetch, where another finds all."""

    def open_own() -> Corpus:
        return kind(
            data_of(settings, usual, tell=ranks.is_main),
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
