"""Supervised fine-tuning of a MiniMind as a Job: pretraining on conversations, of which the answers alone are trained."""

from typing import Any

from transformers import PreTrainedTokenizerBase

from dataset.chat.chat_corpus import ChatCorpus
from dataset.chat.embedded_questions import build_embedded_questions
from dataset.chat.encoder import ChatEncoder
from dataset.packing import RowPlan
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
from trainer.sft.settings import SftSettings


class SftJob(PretrainJob):
    """train_sft.py's part of a run: what differs from pretraining."""

    settings: SftSettings
    corpus: ChatCorpus

    corpus_kind = ChatCorpus
    document = "conversation"
    usual_data = UsualData(
        "sft_mini_512.jsonl",
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

    def samples(self, engine: Engine, signals: StopSignals, is_last: bool) -> tuple[list[tuple[str, str]], int]:
        settings = self.settings
        return samples(
            engine, self.tokenizer, self.encoder, self.prompts, signals, settings.seed, is_last, with_prompt=False
        )

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
