"""The families of encoders, tiny ones with the tokenizers that transformers has for them. References: what transformers itself
gives for each pair alone, from the saved folder; for the rates the names of layers and embeddings, read in each family's code."""

import json
import re
import sys
from types import ModuleType, SimpleNamespace
from unittest import mock

import pytest
import torch
import transformers
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

from encoders.glue import job
from encoders.glue.job import FAMILIES, layer_groups, order_classes
from tests.encoders.glue.glue_helpers import arguments, complaint
from tests.helpers import change_json
from trainer import train_glue

# Those that differ most in pairs, padding and parts; `make test-all` trains the others too.
QUICK = ("bert", "deberta-v2", "roberta", "xlm", "xlnet")
LETTERS = "abcdefgh"
PIECES = [(f"▁{letter}", -1.0 - i) for i, letter in enumerate(LETTERS)]
BERT = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
FIELDS = {
    "albert": {"embedding_size": 8, "num_hidden_groups": 2},
    "deberta-v2": {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "type_vocab_size": 0},
    "distilbert": {"dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 32},
    "electra": {"embedding_size": 8},
    "xlm": {"emb_dim": 16, "n_layers": 2, "n_heads": 2, "embed_init_std": 0.2, "init_std": 0.2},
    "xlnet": {"d_model": 16, "n_layer": 2, "n_head": 2, "d_inner": 32},
}
# {family: (its tokenizer, specials in the order of their ids)}; of XLNet, RoBERTa and XLM-R two of them stand where BERT has one.
UNIGRAM = {
    "albert": (transformers.AlbertTokenizer, "<pad> <unk> [CLS] [SEP] [MASK]"),
    "deberta-v2": (transformers.DebertaV2Tokenizer, "[PAD] [CLS] [SEP] [UNK] [MASK]"),
    "xlnet": (transformers.XLNetTokenizer, "<unk> <s> </s> <cls> <sep> <pad> <mask> <eod> <eop>"),
    "xlm-roberta": (transformers.XLMRobertaTokenizer, "<s> <pad> </s> <unk>"),
    "camembert": (transformers.CamembertTokenizer, "<s> <pad> </s> <unk>"),
}
# Parameters of a layer, and those that lie below all layers; all others are the head's.
LAYERS = r"\.layers?\.(\d+)\.|layer_groups\.(\d+)\.|\.(?:attentions|layer_norm1|ffns|layer_norm2)\.(\d+)\."
BELOW = r"embedding|encoder\.LayerNorm|relative_attention_bias|layer_norm_emb|mask_emb"


def tokenizer_of(family, folder):
    if family in UNIGRAM:
        kind, specials = UNIGRAM[family]
        pieces = [(name, 0.0) for name in specials.split()] + PIECES
        if family in ("xlm-roberta", "camembert"):
            pieces.append(("<mask>", 0.0))
        return kind(vocab=pieces)
    if family == "xlm":
        entries = ["<s>", "</s>", "<pad>", "<unk>", *(f"{x}</w>" for x in LETTERS)]
        entries += [f"<special{i}>" for i in range(10)]
        (folder / "vocab.json").write_text(json.dumps({entry: i for i, entry in enumerate(entries)}))
        (folder / "merges.txt").write_text("".join(f"{x} </w>\n" for x in LETTERS))
        return transformers.XLMTokenizer(str(folder / "vocab.json"), str(folder / "merges.txt"))
    if family == "roberta":
        entries = ["<s>", "<pad>", "</s>", "<unk>", "<mask>", "Ġ", *LETTERS, *(f"Ġ{x}" for x in LETTERS)]
        merges = [("Ġ", x) for x in LETTERS]
        return transformers.RobertaTokenizer(vocab={entry: i for i, entry in enumerate(entries)}, merges=merges)
    kind, specials = transformers.BertTokenizer, ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
    if family == "mpnet":
        kind, specials = transformers.MPNetTokenizer, ("<s>", "<pad>", "</s>", "[UNK]", "<mask>")
    return kind(vocab={entry: i for i, entry in enumerate((*specials, *LETTERS))})


def config_of(family, tokenizer, **fields):
    own = {"initializer_range": 0.2, **fields}
    if family not in ("distilbert", "xlm", "xlnet"):
        own |= {**BERT, "type_vocab_size": 1 if "roberta" in family or family == "camembert" else 2}
    own |= FIELDS.get(family, {})
    if family != "xlnet":
        own["max_position_embeddings"] = 40
    specials = {name: getattr(tokenizer, name) for name in ("pad_token_id", "cls_token_id", "sep_token_id")}
    return AutoConfig.for_model(family, **own, **specials, vocab_size=len(tokenizer))


@pytest.fixture
def moses(monkeypatch):
    """What XLM's tokenizer cuts text with, where it is not installed: a word lies between blanks."""
    module = ModuleType("sacremoses")
    module.MosesPunctNormalizer = lambda lang: SimpleNamespace(normalize=lambda text: text)
    module.MosesTokenizer = lambda lang: SimpleNamespace(tokenize=lambda text, **_: text.split())
    monkeypatch.setitem(sys.modules, "sacremoses", module)


def write_pairs(folder):
    """STS-B of pairs of several lengths, one of them too long. Returns the development pairs."""
    texts = ["a b c", "h", "c d e f g h a b", "a " * 30, "b a"]
    pairs = [(texts[i], texts[-1 - j]) for i in range(5) for j in range(3)]
    lines = ["index\tsentence1\tsentence2\tscore"]
    lines += [f"{i}\t{a}\t{b}\t{i % 5}.5".replace("4.5", "4.0") for i, (a, b) in enumerate(pairs)]
    folder.mkdir(parents=True)
    for name in ("train.tsv", "dev.tsv"):
        (folder / name).write_text("\n".join(lines) + "\n")
    return pairs


@pytest.mark.parametrize("family", [f if f in QUICK else pytest.param(f, marks=pytest.mark.slow) for f in FAMILIES])
@pytest.mark.usefixtures("moses")
def test_the_saved_folder_gives_in_transformers_what_the_evaluation_said(family, tmp_path):
    """Pairs as the family's own tokenizer makes them: two separators in RoBERTa, CLS last and padding first in XLNet."""
    tokenizer = tokenizer_of(family, tmp_path)
    torch.manual_seed(0)
    AutoModelForSequenceClassification.from_config(config_of(family, tokenizer)).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    # Whatever a folder says: XLNet's head reads the last position.
    change_json(tmp_path / "model" / "tokenizer_config.json", padding_side="right")
    pairs = write_pairs(tmp_path / "glue" / "STS-B")
    said = []

    def watched(task, logits, labels):
        said.append(logits)
        return dict.fromkeys(task.metrics, 0.0)

    flags = {"task": "stsb", "data_dir": tmp_path / "glue", "model_path": tmp_path / "model", "epochs": 1}
    with mock.patch.object(job, "metrics_of", watched):
        assert train_glue.main(arguments(tmp_path, tmp_path / "out", **flags)) == 0

    folder = tmp_path / "out" / "stsb" / "seed_42" / "model"
    saved, model = AutoTokenizer.from_pretrained(folder), AutoModelForSequenceClassification.from_pretrained(folder)
    inputs = (saved(a, b, truncation=True, max_length=16, return_tensors="pt") for a, b in pairs)
    with torch.no_grad():
        wanted = [model.eval()(**one).logits for one in inputs]
    # The outputs are about 1; both differ this much from float64.
    assert (said[0] - torch.cat(wanted)).abs().max() < 1e-6
    if family in ("roberta", "xlm-roberta", "camembert", "mpnet"):
        assert saved("a", "b").input_ids.count(saved.sep_token_id) == 3
    if family in ("bert", "xlnet", "albert", "electra"):
        assert set(saved("a", "b").token_type_ids) >= {0, 1}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.usefixtures("moses")
def test_every_parameter_has_the_rate_of_its_depth(family, tmp_path):
    model = AutoModelForSequenceClassification.from_config(config_of(family, tokenizer_of(family, tmp_path)))
    depth_of = {}
    for group in layer_groups(model, 0.01, 0.5):
        assert group["lr_scale"] == 0.5 ** group["depth"]
        for parameter in group["params"]:
            assert id(parameter) not in depth_of
            depth_of[id(parameter)] = group["depth"]
    assert set(depth_of.values()) == {0, 1, 2, 3}
    for name, parameter in model.named_parameters():
        match = re.search(LAYERS, name)
        wanted = 2 - int(match[match.lastindex]) if match else 3 if re.search(BELOW, name) else 0
        assert depth_of[id(parameter)] == wanted, name


@pytest.mark.parametrize("family", ["bert", "roberta", "xlnet"])
def test_classes_in_another_order_are_put_into_the_tasks(family, tmp_path):
    """As in public RoBERTas of MNLI. Reference: the same columns of what the head gave before."""
    tokenizer = tokenizer_of(family, tmp_path)
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_config(config_of(family, tokenizer, num_labels=3)).eval()
    inputs = tokenizer("a b", "c", return_tensors="pt")
    before = model(**inputs).logits
    order_classes(model, ["CONTRADICTION", "NEUTRAL", "ENTAILMENT"], ["contradiction", "entailment", "neutral"])
    assert torch.equal(model(**inputs).logits, before[:, [0, 2, 1]])
    order_classes(model, ["LABEL_0", "LABEL_1", "LABEL_2"], ["contradiction", "entailment", "neutral"])
    assert torch.equal(model(**inputs).logits, before[:, [0, 2, 1]])


def test_other_families_are_refused_in_a_line(tmp_path, capsys):
    tokenizer = tokenizer_of("bert", tmp_path)
    write_pairs(tmp_path / "glue" / "STS-B")
    for family, fields, reason in (("gpt2", {}, "gpt2 is none of the"), ("bert", {"is_decoder": True}, "is_decoder")):
        AutoConfig.for_model(family, **fields).save_pretrained(tmp_path / "model")
        tokenizer.save_pretrained(tmp_path / "model")
        assert reason in complaint(capsys, tmp_path, tmp_path / "out", task="stsb", model_path=tmp_path / "model")
