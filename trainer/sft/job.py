"""Supervised fine-tuning of a MiniMind as a Job: pretraining on conversations, of which the answers alone are trained."""

from transformers import PreTrainedTokenizerBase

from dataset.chat.chat_corpus import ChatCorpus
from dataset.chat.embedded_questions import build_embedded_questions
from dataset.chat.encoder import ChatEncoder
from trainer.pretrain.data import UsualData
from trainer.pretrain.job import PretrainJob
from trainer.pretrain.settings import PretrainSettings
from trainer.sft.settings import SftSettings


class SftJob(PretrainJob):
    """train_sft.py's part of a run: what differs from pretraining."""

    settings: SftSettings
    corpus: ChatCorpus

    corpus_kind = ChatCorpus
    usual_data = UsualData(
        "sft_mini_512.jsonl",
        "python_questions.jsonl",
        build_embedded_questions,
        "questions on the documentation inside the installed Python",
    )
    answers = True
    mended_by = {
        "data": "--data_path, --skip_bad_lines",
        "tokenizer": "--tokenizer_path",
    }

    @classmethod
    def make_encoder(cls, tokenizer: PreTrainedTokenizerBase, settings: PretrainSettings) -> ChatEncoder:
        return ChatEncoder(tokenizer)
