"""How inspect_data.py reads the data: as texts or as conversations, as their trainers do, and for a run of which length."""

from collections.abc import Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from common.settings import default_of
from common.wording import counted
from dataset.chat.chat_corpus import ChatCorpus, holds_conversations, refuse_other_kinds
from dataset.chat.encoder import ChatEncoder
from dataset.corpus import Corpus, sources_of
from dataset.planned_mixture import RunLength
from dataset.reading.conversations import CONVERSATION
from dataset.shares import Source
from dataset.tokenizing.encoder import DocumentEncoder
from scripts.inspect_settings import InspectSettings
from trainer.pretrain.data import USUAL_TEXT, data_of
from trainer.pretrain.settings import PretrainSettings
from trainer.sft.job import SftJob
from trainer.sft.settings import SftSettings
from trainer.without_effect import is_changed, warnings_of


@dataclass(frozen=True)
class Reading:
    """What differs between texts and conversations. length: of the run whose rows are shown."""

    is_chat: bool
    encoder: DocumentEncoder
    corpus_kind: type[Corpus]
    text_field: str
    text_suffixes: Sequence[str] | None
    long_documents: str
    length: RunLength


def named_sources(settings: InspectSettings) -> list[Source]:
    """The data of a command line. Errors: DataError, UserError."""
    return sources_of(data_of(settings, SftJob.usual_data if settings.conversations else USUAL_TEXT))


def reading_of(settings: InspectSettings, paths: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> Reading:
    """paths: of the data. Errors: DataError for missing files and for conversations in files of other kinds, ValueError for a
    tokenizer without our chat template."""
    is_chat = settings.conversations
    if is_chat is None:
        is_chat = holds_conversations(paths[0], settings.text_field, settings.text_suffixes, settings.cache_dir)
    if is_chat:
        for path in paths:
            refuse_other_kinds(path)
        return Reading(
            is_chat=True,
            encoder=ChatEncoder(tokenizer),
            corpus_kind=ChatCorpus,
            text_field=CONVERSATION,
            text_suffixes=None,
            long_documents="truncate",
            length=run_length(settings, SftSettings),
        )
    return Reading(
        is_chat=False,
        encoder=DocumentEncoder(tokenizer, bool(settings.parse_special_tokens)),
        corpus_kind=Corpus,
        text_field=settings.text_field,
        text_suffixes=settings.text_suffixes,
        long_documents=settings.long_documents,
        length=run_length(settings, PretrainSettings),
    )


def run_length(settings: InspectSettings, trainer: type[PretrainSettings]) -> RunLength:
    """Of a run in one process that the flags describe. trainer: what has the others."""
    said = {}
    for name in ("epochs", "batch_size", "accumulation_steps"):
        value = getattr(settings, name)
        said[name] = default_of(trainer, name) if value is None else value
    return RunLength(said["epochs"], settings.max_updates, said["batch_size"] * said["accumulation_steps"])


def notices_of(settings: InspectSettings, reading: Reading, is_planned: bool) -> list[str]:
    """Lines on how the data is read, and on flags that decide nothing. is_planned: shares change over the run."""
    lines = []
    if reading.is_chat and settings.conversations is None:
        lines.append(
            "the data holds conversations: they are shown as train_sft.py trains them (--conversations 0: as texts)"
        )
    cases = []
    for name in ("text_field", "text_suffixes", "long_documents", "parse_special_tokens"):
        cases.append((name, reading.is_chat and is_changed(settings, name), "conversations are read"))
    for name in ("epochs", "max_updates"):
        cases.append((name, not is_planned and is_changed(settings, name), "no share changes over the run"))
    for name in ("batch_size", "accumulation_steps"):
        decides = is_planned and settings.max_updates > 0
        cases.append((name, not decides and is_changed(settings, name), "only with --max_updates and changing shares"))
    lines += warnings_of(settings, cases)
    if is_planned and settings.row:
        length = reading.length
        told = counted(length.epochs, "epoch")
        if length.rows is not None:
            told = f"{counted(length.updates, 'update')} of {counted(length.rows_of_update, 'row')}"
        lines.append(
            f"rows of a run of {told}: where shares change, --epochs, or --max_updates with --batch_size and "
            "--accumulation_steps, decide which rows a run has"
        )
    return lines
