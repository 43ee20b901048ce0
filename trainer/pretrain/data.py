"""The data of a run as its flags name it, and where a mixture ends whose shares change over the run."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from common.errors import DataError, UserError
from common.paths import ROOT
from common.wording import announce, counted
from dataset.corpus import Corpus, ValidationBatches
from dataset.embedded_corpus import build_embedded_corpus
from dataset.mixture import Move
from dataset.shares import Source, read_mixture
from dataset.tokenizing.encoder import DocumentEncoder
from dataset.tokenizing.tokenizer_files import check_known
from trainer.budget.clock import Clock, clock_of_plan
from trainer.job import UNLIMITED, Length, Progress
from trainer.machine.ranks import Ranks, first_rank_first, until_all_are_ready
from trainer.pretrain.first_model import FirstModel
from trainer.pretrain.settings import AUTO_ROWS, DataSettings, PretrainSettings
from trainer.updates import rows_of_update


class TextKind(NamedTuple):
    """What is read, and how. make_encoder: of a tokenizer; it makes ids of a text. answers: conversations, of which the answers
    alone are trained. flags_of_data: what mends data that is not that of a resumed run.

    usual_file: in dataset/, what is trained on where no data is named. Where that is absent, an embedded one: its name there,
    what writes it unless it is there, and what is in it.
    """

    corpus: type[Corpus]
    make_encoder: Callable[[Any, PretrainSettings], DocumentEncoder]
    answers: bool
    flags_of_data: str
    usual_file: str
    embedded: str
    build_embedded: Callable[[Path], Path]
    in_embedded: str


DOCUMENTS = TextKind(
    Corpus,
    lambda tokenizer, settings: DocumentEncoder(tokenizer, bool(settings.parse_special_tokens)),
    answers=False,
    flags_of_data="--data_path, --text_field, --skip_bad_lines, --deduplicate",
    usual_file="pretrain_hq.jsonl",
    embedded="python_docs.jsonl",
    build_embedded=build_embedded_corpus,
    in_embedded="the documentation inside the installed Python",
)


def open_corpus(settings: PretrainSettings, encoder: DocumentEncoder, ranks: Ranks, kind: TextKind) -> Corpus:
    """The Corpus of the settings, when all ranks have theirs: one may have to tokenise or to fetch, where another finds all."""
    # While --batch_size auto has no number yet, an update has the rows that it has without.
    batch_size = settings.usual_rows() if settings.batch_size == AUTO_ROWS else settings.batch_size
    rows = rows_of_update(replace(settings, batch_size=batch_size), ranks)

    def open_own() -> Corpus:
        return kind.corpus(
            data_of(settings, kind, tell=ranks.is_main),
            encoder,
            max_seq_len=settings.max_seq_len,
            seed=settings.seed,
            pack=settings.pack,
            long_documents=settings.long_documents,
            val_path=settings.val_path,
            val_fraction=settings.val_fraction,
            allow_val_overlap=settings.allow_val_overlap,
            deduplicate=settings.deduplicate,
            epochs=settings.epochs,
            n_rows=settings.max_updates * rows,
            cache_dir=settings.cache_dir,
            text_field=settings.text_field,
            text_suffixes=settings.text_suffixes,
            skip_bad_lines=settings.skip_bad_lines,
            progress=ranks.is_main,
        )

    return first_rank_first(ranks, open_own)


def data_of(settings: DataSettings, kind: TextKind = DOCUMENTS, tell: bool = True) -> Sequence[str | Source]:
    """What --data_path or --mixture names; the embedded data where neither that nor the usual file is there."""
    if settings.mixture:
        return read_mixture(Path(settings.mixture))
    if settings.data_path:
        return settings.data_path
    default = ROOT / "dataset" / kind.usual_file
    if default.exists():
        return [str(default)]
    embedded = kind.build_embedded(ROOT / "dataset" / kind.embedded)
    if tell:
        announce(
            f"{default} is not there: training on {embedded}, {kind.in_embedded}.\n"
            "dataset/README.md tells how to get a full corpus; --data_path trains on your own."
        )
    return [str(embedded)]


def open_data(settings: PretrainSettings, first: FirstModel, kind: TextKind, ranks: Ranks) -> Corpus:
    """The data of a run, which fits its tokenizer and model. Errors: DataError, UserError."""
    # The first run on a corpus tokenises it here, which may take long: whatever else can be wrong was looked at.
    corpus = open_corpus(settings, first.encoder, ranks, kind)
    what = f"--tokenizer_path {settings.tokenizer_path}"
    vocabulary = first.model.config.vocab_size
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


def length_of_run(
    settings: PretrainSettings,
    ranks: Ranks,
    corpus: Corpus,
    validation: ValidationBatches | None,
    layers: int,
    prompts: int,
) -> "tuple[Length, PlannedEnd | None]":
    """Where a run ends: by its flags or by the clock of a --budget; what keeps a plan that depends on it in step, None: none does.

    layers: of the model. prompts: how many samples it draws.
    """
    length = Length(settings.epochs, settings.max_updates or UNLIMITED)
    length.clock = clock_of_plan(settings, ranks, corpus, validation, layers=layers, prompts=prompts)
    if settings.max_updates:
        length.flag = "--max_updates"
    if corpus.is_one_plan:
        # All passes over all sources are one plan.
        length.epochs = 1
    if length.clock is not None or (corpus.is_one_plan and not settings.max_updates):
        # A plan is for one budget, and another number of passes would be another plan from the first row on.
        length.flag = ""
    follows_end = corpus.is_one_plan and settings.max_updates
    return length, PlannedEnd(settings, ranks, corpus, length.clock) if follows_end else None


class PlannedEnd:
    """Keeps the plan of a run of some updates in step with where the run ends.

    settings: with the final number of rows in an update. corpus: whose shares change.
    """

    def __init__(self, settings: PretrainSettings, ranks: Ranks, corpus: Corpus, clock: Clock | None) -> None:
        self.settings = settings
        self.ranks = ranks
        self.clock = clock
        assert corpus.mixture is not None
        self.mixture = corpus.mixture
        self.has_told_shortage = False

    def replan(self, progress: Progress) -> str | None:
        """As `Job.replan`."""
        # At its start a run has those of the plan.
        moves = [*(progress.moves or self.mixture.moves)]
        last = moves[-1]
        place = progress
        if progress.epoch:
            # The run was at its end. If it is given more updates, its one epoch goes on.
            place = replace(progress, epoch=0, row=last.end)
        # What is left of the run, in rows
        rows = rows_of_update(self.settings, self.ranks)
        course = self.clock.moved if self.clock is not None else None
        if course is None:
            end = place.row + max(self.settings.max_updates - place.update, 0) * rows
            move = Move(place.row, end, 1.0, end)
        else:
            end = place.row + max(course.end - place.update, 0) * rows
            fall_row = place.row + max(course.fall_from - place.update, 0) * rows
            move = Move(place.row, fall_row, 1 - self.settings.decay_share, end)
        # A resume finds the end where it was, unless there are other updates, or other rows in one. Within the fall, which has
        # no beginning any more, only the end matters.
        falls_elsewhere = move.fall_row not in (last.fall_row, move.row)
        is_new = move.end != last.end or falls_elsewhere
        if is_new:
            moves.append(move)
            progress.epoch, progress.row = place.epoch, place.row
        progress.moves = moves
        self.mixture.replan(moves)
        shortage = self.mixture.shortage()
        line = ""
        if shortage and not self.settings.has_budget:
            raise DataError(
                f"--data_path: too little text for {counted(self.settings.max_updates, 'update')}: {shortage}; allow more "
                "passes, as in PATH:SHARE:x2 (repeat: 2 in a --mixture file), or train fewer updates"
            )
        if shortage and not self.has_told_shortage:
            # A clock moves the end as the time asks for it.
            self.has_told_shortage = True
            line = f"warning: with the end that the budget sets, {shortage}"
        return line if line or is_new else None
