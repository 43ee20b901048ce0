"""The text that fine-tuning trains on."""

from common.start import ROOT
from dataset.chat.chat_corpus import ChatCorpus
from dataset.chat.encoder import ChatEncoder
from dataset.embedded_corpus import build_embedded_questions
from trainer.pretrain.data import TextKind
from trainer.sft.settings import USUAL_FILE

CONVERSATIONS = TextKind(
    ChatCorpus,
    lambda tokenizer, settings: ChatEncoder(tokenizer),
    default_file=ROOT / "dataset" / USUAL_FILE,
    build_embedded=build_embedded_questions,
    embedded_description="questions on the documentation inside the installed Python",
)
