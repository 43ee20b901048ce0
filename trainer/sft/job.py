"""Supervised fine-tuning of a MiniMind as a Job: pretraining on conversations, with a loss on the answers only."""

import math
from dataclasses import replace
from typing import Any

from common.wording import counted
from dataset.chat.chat_corpus import ChatCorpus
from dataset.reading.file_kinds import find_files
from dataset.shares import group_sources
from model.weight_record import THOUGHTS_FIELD
from trainer.batching import Batching
from trainer.machine.rank import ONE_RANK
from trainer.pretrain.job import PretrainJob
from trainer.pretrain.settings import AUTO_ROWS
from trainer.sft.data import CONVERSATIONS
from trainer.sft.settings import SftSettings


class SftJob(PretrainJob):
    """train_sft.py's part of a run: what differs from pretraining."""

    settings: SftSettings
    corpus: ChatCorpus

    kind = CONVERSATIONS

    def weight_record(self) -> dict[str, Any]:
        return {**super().weight_record(), THOUGHTS_FIELD: self.corpus.trains_thoughts}


# ------------------------------------------------------------------------------ defaults that depend on the data's size


# MiniMind's rate of 1e-5 is for corpora of gigabytes: in the few updates of six conversations it changes no answer. Little
# text is memorised, at high rates and in many passes.

# Bytes of files from which MiniMind's own defaults apply
LARGE_BYTES = 40 << 20
# Bytes of a JSON file per token, field names included
BYTES_OF_TOKEN = 4
OPTIMIZER, LEARNING_RATE, SCHEDULE, ROWS = "muon", 2e-3, "linear", 8
# As many passes as make about this many updates, within these bounds
UPDATES = 450
FEWEST_PASSES, MOST_PASSES = 2, 40
# A rate fits one optimizer and one length of run: if the user gives one of these, the others are MiniMind's.
RECIPE_FLAGS = frozenset({"epochs", "max_updates", "optimizer", "learning_rate", "muon_lr", "embed_lr"})
# Bytes of the embedded questions, which may not be written yet
EMBEDDED_BYTES = 1_000_000


def defaults_for_data_size(settings: SftSettings) -> tuple[SftSettings, str | None]:
    """Returns (settings, with other defaults for little text; a line about them). Errors: DataError for missing data."""
    # These rates would spoil weights from a Hugging Face folder. Who writes a mixture file chooses rates too.
    if settings.mixture or settings.weight_folder() is not None:
        return settings, None
    if chosen := RECIPE_FLAGS & settings.user_set:
        line = f"note: with --{min(chosen)} the other defaults are MiniMind's, whose learning rate is for large data (docs/sft.md)"
        is_for_others = chosen <= {"epochs", "max_updates"} and bytes_of_data(settings) < LARGE_BYTES
        return settings, line if is_for_others else None
    if settings.has_budget:
        # A plan chooses batch and passes. A budget allows far fewer updates than MiniMind's rate needs.
        return replace(settings, optimizer=OPTIMIZER, learning_rate=LEARNING_RATE), None
    n_bytes = bytes_of_data(settings)
    if n_bytes >= LARGE_BYTES:
        return settings, None
    is_auto = settings.batch_size == AUTO_ROWS
    batch_size = settings.batch_size if is_auto or "batch_size" in settings.user_set else ROWS
    rows = Batching.of(replace(settings, batch_size=batch_size), ONE_RANK).rows
    schedule = settings.lr_schedule if "lr_schedule" in settings.user_set else SCHEDULE
    rows_of_pass = n_bytes / BYTES_OF_TOKEN / settings.max_seq_len
    updates_of_pass = max(1, math.ceil(rows_of_pass / rows))
    passes = min(max(math.ceil(UPDATES / updates_of_pass), FEWEST_PASSES), MOST_PASSES)
    line = (
        f"note: the data is small ({n_bytes / 1e6:.2g} MB), so it is learned in {counted(passes, 'pass', 'passes')}: --optimizer "
        f"{OPTIMIZER} --learning_rate {LEARNING_RATE:g} --lr_schedule {schedule} --batch_size {batch_size or 'auto'} --epochs {passes}; "
        "give --learning_rate, --epochs or --optimizer to choose yourself (to continue with more --epochs, add --config and "
        "the .settings.yaml of this run)"
    )
    fitted = replace(
        settings,
        optimizer=OPTIMIZER,
        learning_rate=LEARNING_RATE,
        lr_schedule=schedule,
        batch_size=batch_size,
        epochs=passes,
    )
    return fitted, line


def bytes_of_data(settings: SftSettings) -> float:
    """Size of the files on disk, compressed or not."""
    if not settings.data_path and not CONVERSATIONS.default_file.exists():
        return EMBEDDED_BYTES
    total = 0.0
    for source in group_sources(settings.data_path or [str(CONVERSATIONS.default_file)]):
        for path in source.paths:
            total += sum(file.stat().st_size for file in find_files(path))
    return total
