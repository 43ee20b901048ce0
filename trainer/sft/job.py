"""Supervised fine-tuning of a MiniMind as a Job: pretraining on conversations, of which the answers alone are trained."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from common.wording import counted
from dataset.chat.chat_corpus import ChatCorpus
from dataset.chat.embedded_questions import build_embedded_questions
from dataset.chat.encoder import ChatEncoder
from dataset.packing import RowPlan
from model.weight_record import THOUGHTS_FIELD
from trainer.budget.forecast import Forecast
from trainer.engine import Engine
from trainer.job import Progress
from trainer.machine.signals import StopSignals
from trainer.pretrain.data import UsualData
from trainer.pretrain.job import PretrainJob
from trainer.pretrain.settings import PretrainSettings
from trainer.reporting.next_commands import NextCommand
from trainer.reporting.records import ANSWERS
from trainer.sampling import samples
from trainer.saving.weights import save_weights
from trainer.sft import defaults
from trainer.sft.settings import USUAL_FILE, SftSettings
from trainer.updates import rows_of_update

# What a weight can move by, updates times rate, for answers to change. Weights are some hundredths large; 200 updates at 1e-5
# changed none of six answers.
LEAST_CHANGE = 5e-3


class SftJob(PretrainJob):
    """train_sft.py's part of a run: what differs from pretraining."""

    settings: SftSettings
    corpus: ChatCorpus

    corpus_kind = ChatCorpus
    document = "conversation"
    usual_data = UsualData(
        USUAL_FILE,
        "python_questions.jsonl",
        build_embedded_questions,
        "questions on the documentation inside the installed Python",
    )

    mended_by = {
        "data": "--data_path, --skip_bad_lines",
        "tokenizer": "--tokenizer_path",
    }

    # Of an answer nobody knows how many bytes of its text are left to predict.
    charts = tuple(chart for chart in PretrainJob.charts if "bits_per_byte" not in chart.fields)

    @classmethod
    def make_encoder(cls, tokenizer: PreTrainedTokenizerBase, settings: PretrainSettings) -> ChatEncoder:
        return ChatEncoder(tokenizer)

    def save_weights(self, weights: Mapping[str, torch.Tensor], update: int, is_last: bool) -> None:
        fields = {**self.config.to_dict(), THOUGHTS_FIELD: self.corpus.trains_thoughts}
        save_weights(dict(weights), fields, self.stem, self.vocabulary, parse_special_tokens=False)

    def samples(self, engine: Engine, signals: StopSignals, is_last: bool) -> tuple[list[tuple[str, str]], int]:
        settings = self.settings
        return samples(
            engine, self.tokenizer, self.encoder, self.prompts, signals, settings.seed, is_last, with_prompt=False
        )

    def _notices(self, first: RowPlan, n_rows: float, parameters: int) -> list[str]:
        notices = super()._notices(first, n_rows, parameters)
        settings = self.settings
        updates = settings.max_updates or self.epochs * math.ceil(first.n_rows / rows_of_update(settings, self.ranks))
        rate = max(getattr(settings, name) for name in settings.names_of_rates())
        if updates * rate < LEAST_CHANGE:
            notices.append(
                f"warning: this run will change next to nothing: {counted(updates, 'update')} at a rate of {rate:g} move a weight "
                f"by {updates * rate:.1g} at most. Little text is learned with --optimizer {defaults.OPTIMIZER} --learning_rate "
                f"{defaults.LEARNING_RATE:g} --lr_schedule {defaults.SCHEDULE} --epochs {defaults.MOST_PASSES}"
            )
        return notices

    def _note_on_special_tokens(self) -> list[str]:
        """The chat template writes them, and a message that spells one stays text."""
        return []

    def _forecast(self, first: RowPlan, flops: float) -> Forecast | None:
        """Nothing is known of the loss of answers."""
        return None

    def _data_fields(self, progress: Progress) -> dict[str, object]:
        fields: dict[str, Any] = {}
        if self.ranks.is_main:
            fields["sources"] = self.corpus.sources_of_epoch(progress.epoch)
            # Whoever shows a sample of the run must ask as it did.
            fields["trained"] = ANSWERS
        return fields

    def next_commands(self) -> list[NextCommand]:
        weight = self._weight_flags()
        return [
            NextCommand("chat", f"python {{top}}scripts/generate.py {weight} --chat"),
            NextCommand("the same on a page in your browser", f"python {{top}}scripts/play.py {weight}"),
            NextCommand("export to Hugging Face", f"python {{top}}scripts/export_hf.py {weight} --out_dir {{stem}}_hf"),
        ]
