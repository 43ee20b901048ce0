"""What stands in the padding, and how much of it, changes nothing that an encoder gives: of tiny networks of 20 families
with random weights. Reference: each row alone, without padding."""

import json
from argparse import Namespace

import pytest
import torch
from transformers import AutoConfig, ElectraForPreTraining

from common.errors import UserError
from dataset.glue.glue_dataset import Batch
from dataset.glue.glue_tasks import TASKS
from model.electra.compiled_encoder import compile_layers
from trainer.glue import model as glue_model
from trainer.glue.model import Layers, forward, init_model, loss_sum
from trainer.glue.padding import computes_in, with_own_mask, with_ready_mask, without_padding

VOCABULARY, PAD = 60, 0
BERT = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 64, "max_position_embeddings": 80, "pad_token_id": PAD,
}  # fmt: skip
SMALL = {"vocab_size": VOCABULARY, "pad_token_id": PAD}
DISENTANGLED = {"relative_attention": True, "pos_att_type": ["c2p", "p2c"], "position_biased_input": False}
KNOWN = {
    "albert": {**BERT, "embedding_size": 16},
    "bert": BERT,
    "camembert": BERT,
    "distilbert": {**SMALL, "dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 64, "max_position_embeddings": 80},
    "electra": {**BERT, "embedding_size": 16},
    "roberta": {**BERT, "type_vocab_size": 1},
    "xlm-roberta": {**BERT, "type_vocab_size": 1},
}
OWN_MASK = {
    "big_bird": {**BERT, "attention_type": "block_sparse", "block_size": 4, "num_random_blocks": 1},
    "deberta": {**BERT, **DISENTANGLED},
    "deberta-v2": {**BERT, **DISENTANGLED, "position_buckets": 8, "share_att_key": True, "type_vocab_size": 0},
    "ernie": BERT,
    "funnel": {**SMALL, "block_sizes": [1, 1], "d_model": 32, "n_head": 4, "d_head": 8, "d_inner": 64},
    "modernbert": {**BERT, "global_attn_every_n_layers": 2, "local_attention": 8},
    "mpnet": BERT,
    "rembert": {**BERT, "input_embedding_size": 16, "output_embedding_size": 16},
    "roformer": {**BERT, "embedding_size": 32},
}
# A convolution, a Fourier transform, neighbours' embeddings, the last position, landmarks
MIXING = {
    "convbert": {**BERT, "embedding_size": 16, "conv_kernel_size": 3, "head_ratio": 2},
    "fnet": BERT,
    "mobilebert": {**BERT, "embedding_size": 16, "intra_bottleneck_size": 16, "true_hidden_size": 16},
    "nystromformer": {**BERT, "segment_means_seq_len": 4, "num_landmarks": 4, "conv_kernel_size": 3},
    "xlnet": {**SMALL, "d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 64},
}
FAMILIES = {**KNOWN, **OWN_MASK, **MIXING}
NO_DROPOUT = ("hidden_dropout_prob", "attention_probs_dropout_prob")
HEADS = ("classifier_dropout", "classifier_dropout_prob", "seq_classif_dropout")
LENGTHS = torch.tensor([20, 11, 6, 11])


def flags(folder, **changes):
    settings = {
        "model_path": folder, "max_seq_len": 64, "from_scratch": True, "dropout": None, "do_train": True,
        "head": "huggingface", "score_divisor": 1.0,
        "use_compile": "1",
    }  # fmt: skip
    return Namespace(**{**settings, **changes})


def config_folder(tmp_path, family, **changes):
    AutoConfig.for_model(family, **{**FAMILIES[family], **changes}).save_pretrained(tmp_path)
    return tmp_path


def model_of(tmp_path, family, **changes):
    """A classifier of MNLI in eval mode, with weights large enough for differences to show."""
    folder = config_folder(tmp_path, family, **changes)
    torch.manual_seed(0)
    model, _ = init_model(flags(folder), TASKS["mnli"], folder, VOCABULARY)
    for parameter in model.parameters():
        parameter.data.add_(0.05 * torch.randn_like(parameter))
    return model.eval()


def padded(T, filler=None):
    """A Batch of rows of LENGTHS with T positions. filler: a seed of the tokens that stand in place of the padding."""
    tokens = torch.randint(5, VOCABULARY, (len(LENGTHS), 64), generator=torch.Generator().manual_seed(1))[:, :T]
    mask = (torch.arange(T) < LENGTHS[:, None]).long()
    others = torch.full_like(tokens, PAD)
    if filler is not None:
        others = torch.randint(5, VOCABULARY, tokens.shape, generator=torch.Generator().manual_seed(filler))
    types = torch.zeros_like(tokens)
    types[:, 4:6] = 1
    return Batch(torch.where(mask.bool(), tokens, others), mask, types, torch.tensor([0, 1, 2, 1]))


def alone(model):
    """Logits of each row by itself."""
    rows = padded(64)
    parts = [Batch(*(t[r : r + 1, :n] for t in rows[:3]), rows.labels) for r, n in enumerate(LENGTHS.tolist())]
    return torch.cat([forward(model, part) for part in parts])


@torch.no_grad()
def differences(model):
    """How far the logits of several paddings are from those without."""
    reference = alone(model)
    assert reference.std() > 1e-3
    batches = [padded(20), padded(24), padded(24, filler=2), padded(40), padded(40, filler=3)]
    return [float((forward(model, batch) - reference).abs().max()) for batch in batches]


@pytest.mark.parametrize("family", FAMILIES)
def test_padding_changes_no_logit(family, tmp_path):
    model = model_of(tmp_path, family)
    assert max(differences(model)) < 1e-5


@pytest.mark.parametrize("family", FAMILIES)
def test_padding_changes_no_gradient(family, tmp_path):
    """Reference: the gradients of the rows by themselves. Without dropout, whose masks depend on a batch's shape."""
    model, batch = model_of(tmp_path, family), padded(24, filler=2)

    def gradients(logits):
        model.zero_grad(set_to_none=True)
        loss_sum(TASKS["mnli"], logits, batch.labels).backward()
        return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}

    found = gradients(forward(model, batch))
    assert found and all(grad.isfinite().all() for grad in found.values())
    torch.testing.assert_close(found, gradients(alone(model)), atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("family", FAMILIES)
def test_in_bf16_padding_changes_rounding_alone(family, tmp_path):
    """Those that cannot compute in bf16 are found."""
    model = model_of(tmp_path, family)
    assert computes_in(model, torch.bfloat16, 64) == (family != "deberta")
    if family == "deberta":
        return
    with torch.autocast("cpu", torch.bfloat16):
        scale = float(alone(model).abs().max())
        assert max(differences(model)) < 0.05 * scale


@pytest.mark.parametrize("family", KNOWN)
def test_padding_changes_nothing_in_compiled_layers(family, tmp_path, monkeypatch):
    """The compiled form of attention and dropout, run by eager kernels. Reference: the same model, not compiled."""
    compiled, compile_it = [], torch.nn.Module.compile

    def quick(module):
        compiled.append(module)
        compile_it(module, backend="eager")

    monkeypatch.setattr(torch.nn.Module, "compile", quick)
    fields = ("dropout", "attention_dropout") if family == "distilbert" else NO_DROPOUT
    model = model_of(tmp_path, family, **dict.fromkeys((*fields, *HEADS), 0.0)).train()
    reference = forward(model, padded(24))
    Layers(model).compile_training((4, 24))
    assert compiled or family == "albert"  # whose layers are one, under another name
    for filler in (None, 2):
        torch.testing.assert_close(forward(model, padded(24, filler)), reference, atol=1e-5, rtol=1e-5)


def test_a_compiled_encoder_does_not_drop_a_mask_of_rows_and_positions():
    """transformers leaves the mask out for an implementation of attention that registers none."""
    torch.manual_seed(0)
    config = AutoConfig.for_model("electra", **FAMILIES["electra"])
    model = ElectraForPreTraining(config).eval()
    compile_layers(model)
    with torch.compiler.set_stance("force_eager"):
        found = [model(input_ids=b.ids, attention_mask=b.mask).logits for b in (padded(24), padded(24, filler=2))]
    real = padded(24).mask.bool()
    torch.testing.assert_close(found[0][real], found[1][real], atol=1e-6, rtol=1e-6)


def test_ways_are_those_of_the_families(tmp_path):
    """The quick one for the known ones alone; a config that asks for eager attention gets its own mask."""
    ways = {family: model_of(tmp_path / family, family).padding_way for family in FAMILIES}
    assert {family for family, way in ways.items() if way is with_ready_mask} == set(KNOWN)
    assert {family for family, way in ways.items() if way is without_padding} == set(MIXING)
    folder = config_folder(tmp_path / "eager", "bert")
    written = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**written, "attn_implementation": "eager"}))
    model, _ = init_model(flags(folder), TASKS["mnli"], folder, VOCABULARY)
    assert model.config._attn_implementation == "eager" and model.padding_way is with_own_mask
    assert max(differences(model.eval())) < 1e-5


def test_what_cannot_be_computed_is_refused_with_the_encoders_reason(tmp_path):
    """A Nystromformer with landmarks wants rows of one length alone."""
    with pytest.raises(UserError) as refused:
        model_of(tmp_path, "nystromformer", segment_means_seq_len=16)
    assert "cannot compute examples of 24 tokens and less (RuntimeError: " in str(refused.value)


def test_a_family_that_mixes_padding_and_one_without_a_compiled_form_are_named(tmp_path):
    lines = {}
    for family in ("bert", "mpnet", "fnet"):
        folder = config_folder(tmp_path / family, family)
        found = glue_model.check_models(flags(folder), [TASKS["cola"]], folder, VOCABULARY)
        lines[family] = " ".join(found.lines)
    assert lines["bert"] == ""
    assert lines["mpnet"] == "MPNetForSequenceClassification has no compiled form here: training without torch.compile"
    assert "FNetForSequenceClassification lets padding into its outputs" in lines["fnet"]
