"""Supervised fine-tuning of a MiniMind as a Job: pretraining on conversations, of which the answers alone are trained."""

import math
from collections.abc import Mapping

import torch

from dataset.chat.chat_corpus import ChatCorpus
from dataset.chat.embedded_questions import build_embedded_questions
from dataset.chat.encoder import ChatEncoder
from model.weight_record import THOUGHTS_FIELD
from trainer.job import Outlook, Progress
from trainer.pretrain.data import TextKind, UsualData
from trainer.pretrain.job import PretrainJob
from trainer.saving.weights import save_weights
from trainer.sft.defaults import note_on_little_change
from trainer.sft.settings import USUAL_FILE, SftSettings
from trainer.updates import rows_of_update

CONVERSATIONS = TextKind(
    ChatCorpus,
    UsualData(
        USUAL_FILE,
        "python_questions.jsonl",
        build_embedded_questions,
        "questions on the documentation inside the installed Python",
    ),
    lambda tokenizer, settings: ChatEncoder(tokenizer),
    answers=True,
    flags_of_data="--data_path, --skip_bad_lines",
)


class SftJob(PretrainJob):
    """train_sft.py's part of a run: what differs from pretraining."""

    settings: SftSettings
    corpus: ChatCorpus

    kind = CONVERSATIONS

    def outlook(self, progress: Progress) -> Outlook:
        outlook = super().outlook(progress)
        of_epoch = math.ceil(self.plan(0).n_rows / rows_of_update(self.settings, self.ranks))
        note = note_on_little_change(self.settings, self.settings.max_updates or self.length.epochs * of_epoch)
        outlook.notices = [*outlook.notices, *note]
        return outlook

    def save_weights(self, weights: Mapping[str, torch.Tensor], update: int, is_last: bool) -> None:
        fields = {**self.config.to_dict(), THOUGHTS_FIELD: self.corpus.trains_thoughts}
        vocabulary = self.first_model.vocabulary
        save_weights(dict(weights), fields, self.files.stem, vocabulary, parse_special_tokens=False)
