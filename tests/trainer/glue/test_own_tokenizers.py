"""Families whose tokenizer or config is unlike BERT's, with both as transformers makes them. Reference: what transformers
itself gives for a sentence, by the same tokenizer and model."""

import json
import sys
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch
import transformers
from transformers import AutoConfig, BertTokenizer

from dataset.glue.features import encode_rows
from dataset.glue.glue_dataset import GlueAssembler
from dataset.glue.glue_tasks import TASKS
from dataset.glue.tables import Rows
from dataset.tokenizing.encoder import load_tokenizer
from dataset.tokenizing.sentence_encoder import SentenceEncoder
from tests.trainer.glue.test_padding import BERT, FAMILIES, flags
from trainer.glue.loss import forward
from trainer.glue.model import init_model, save_model

# As in checkpoints of ESM and XLM: no SEP here, no CLS of its own there
ESM = ("<cls>", "<pad>", "<eos>", "<unk>", "L", "A", "G", "V", "S", "E", "R", "T", "<mask>")
XLM = {
    "<s>": 0,
    "</s>": 1,
    "<pad>": 2,
    "<unk>": 3,
    "a</w>": 4,
    "b</w>": 5,
    **{f"<special{i}>": 6 + i for i in range(10)},
}
BYTES = {"<s>": 0, "<pad>": 1, "</s>": 2, "<unk>": 3, "<mask>": 4, "a": 5, "b": 6, "Ġ": 7, "Ġa": 8, "Ġb": 9}
MERGES = [("Ġ", "a"), ("Ġ", "b")]
WORDS = {word: i for i, word in enumerate(("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "b"))}


@pytest.fixture
def packages(monkeypatch):
    """Quick tokenizers: stand-ins for two packages that cut text into words for their tokenizers, where they are not installed: here a word
    lies between blanks."""
    moses = ModuleType("sacremoses")
    moses.MosesPunctNormalizer = lambda lang: SimpleNamespace(normalize=lambda text: text)
    moses.MosesTokenizer = lambda lang: SimpleNamespace(tokenize=lambda text, **_: text.split())
    jieba = ModuleType("rjieba")
    jieba.tokenize = lambda text, hmm: [(word, 2 * i, 2 * i + 1) for i, word in enumerate(text.split(" "))]
    # Enough of Unicode for CANINE: all of it is a million entries, which take seconds.
    monkeypatch.setattr("transformers.models.canine.tokenization_canine.UNICODE_VOCAB_SIZE", 0xE010)
    for module in (moses, jieba):
        monkeypatch.setitem(sys.modules, module.__name__, module)


def tokenizer_of(family, folder):
    """A tokenizer of the class that checkpoints of a family have."""
    if family in ("xlm", "flaubert"):
        (folder / "vocab.json").write_text(json.dumps(XLM))
        (folder / "merges.txt").write_text("a </w>\nb </w>\n")
        made_by = {"xlm": transformers.XLMTokenizer, "flaubert": transformers.FlaubertTokenizer}[family]
        return made_by(str(folder / "vocab.json"), str(folder / "merges.txt"))
    if family == "esm":
        (folder / "vocab.txt").write_text("\n".join(ESM))
        return transformers.EsmTokenizer(str(folder / "vocab.txt"))
    if family in ("layoutlmv3", "lilt"):
        return transformers.LayoutLMv3Tokenizer(vocab=BYTES, merges=MERGES)
    if family == "markuplm":
        return transformers.MarkupLMTokenizer(vocab=BYTES, merges=MERGES, tags_dict={"html": 0})
    if family == "roformer":
        return transformers.RoFormerTokenizer(vocab=WORDS)
    named = {
        "canine": transformers.CanineTokenizer,
        "esmc": transformers.EsmcTokenizer,
        "perceiver": transformers.PerceiverTokenizer,
    }
    return named[family]()


def own_inputs(tokenizer, text):
    """What transformers makes of a sentence."""
    if isinstance(tokenizer, transformers.LayoutLMv3Tokenizer):
        words = text.split()
        return tokenizer(words, boxes=[[0, 0, 0, 0]] * len(words)).input_ids
    if isinstance(tokenizer, transformers.MarkupLMTokenizer):
        # All of it is the text of one element.
        return tokenizer([text], xpaths=["/html"]).input_ids
    return tokenizer(text).input_ids


SENTENCES = {"esm": "L A G V S E", "esmc": "LAGVSE"}


@torch.no_grad()
@pytest.mark.parametrize(
    "family",
    ["canine", "esm", "esmc", "flaubert", "layoutlmv3", "lilt", "markuplm", "perceiver", "roformer", "xlm"],
)
@pytest.mark.usefixtures("packages")
def test_a_sentence_is_computed_as_transformers_does(family, tmp_path):
    tokenizer = tokenizer_of(family, tmp_path)
    fields = {**FAMILIES[family], "pad_token_id": tokenizer.pad_token_id}
    if "vocab_size" in fields:
        fields["vocab_size"] = max(len(tokenizer), BERT["vocab_size"])
    AutoConfig.for_model(family, **fields).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)

    encoder = SentenceEncoder(load_tokenizer(tmp_path))
    torch.manual_seed(0)
    model, _ = init_model(flags(tmp_path), TASKS["cola"], tmp_path, encoder.vocab_size)
    text = SENTENCES.get(family, "a b a b b")
    features = encode_rows(Rows([[text, text[:1]]], [0, 1], 0), TASKS["cola"], encoder, 64)
    batch = GlueAssembler(features, encoder, 64)[np.array([0, 1])]

    ids = torch.tensor([own_inputs(tokenizer, text)])
    assert batch.ids[0, : ids.shape[1]].tolist() == ids[0].tolist()
    wanted = model.eval()(input_ids=ids, attention_mask=torch.ones_like(ids)).logits
    torch.testing.assert_close(forward(model, batch)[:1], wanted, atol=1e-5, rtol=1e-5)

    save_model(tmp_path / "saved", model, tokenizer, model.state_dict())
    assert SentenceEncoder(load_tokenizer(tmp_path / "saved")).encode([text]) == encoder.encode([text])


class OfTables(transformers.PerceiverTokenizer):
    """As TAPAS's, which wants a table beside a question."""

    def __call__(self, table):
        raise AssertionError("Table must be of type pd.DataFrame")


def test_a_tokenizer_that_takes_no_plain_sentence_is_refused():
    with pytest.raises(ValueError, match=r"OfTables cannot encode a plain sentence \(AssertionError: Table must be of"):
        SentenceEncoder(OfTables())


def test_a_tokenizer_that_puts_nothing_behind_a_sentence_is_refused():
    """Llama's begins with its BOS; there is no SEP, nor anything in its place."""
    from tokenizers.processors import TemplateProcessing

    tokenizer = BertTokenizer(vocab=WORDS, sep_token=None)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="[CLS] $A", special_tokens=[("[CLS]", 2)])
    tokenizer.sep_token = None
    with pytest.raises(ValueError, match="BertTokenizer has no SEP token; an encoder such as ELECTRA is wanted"):
        SentenceEncoder(tokenizer)
