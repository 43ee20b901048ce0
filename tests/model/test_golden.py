"""The model against the outputs of the public implementations (docs/corpora.md)."""

import pytest
import torch
import torch.nn.functional as F

from model.model_minimind import MiniMindConfig, MiniMindForCausalLM
from tests.helpers import SHARED, a_document_a_row, needs_shared

NAMES = ["minimind2_dense", "minimind2_moe", "minimind2_moe_batch_aux", "minimind3_dense", "minimind3_moe"]
pytestmark = needs_shared


def load(name):
    golden = torch.load(SHARED / "golden" / f"{name}.pt", weights_only=True)
    model = MiniMindForCausalLM(MiniMindConfig(generation=name.split("_")[0], **golden["config"]))
    model.load_state_dict(golden["state_dict"], strict=True)
    return golden, model.eval()


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_logits(name, tmp_path):
    """Also by the config that the names and shapes of the public file tell."""
    golden, model = load(name)
    torch.save(golden["state_dict"], tmp_path / "public.pth")
    known = {"num_attention_heads": 4} if name.startswith("minimind2") else {}  # no q_norm, and not the default 8 / 2
    if "moe" in name:
        known["num_experts_per_tok"] = golden["config"]["num_experts_per_tok"]
    loaded = MiniMindForCausalLM.from_pth(tmp_path / "public.pth", **known)
    assert loaded.config.generation == name.split("_")[0] and loaded.dtype == torch.float32
    for one in (model, loaded):
        torch.testing.assert_close(one(golden["input_ids"]).logits, golden["logits"], atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", NAMES)
def test_train_loss_and_aux_loss(name):
    """The public MoE rounds expert outputs to fp16 in train mode: 2e-3 there, 1e-4 elsewhere."""
    golden, model = load(name)
    tolerance = 2e-3 if "moe" in name else 1e-4
    inputs, kept = golden["input_ids"][:, :-1], golden["loss_mask"].bool()
    targets = golden["input_ids"][:, 1:].masked_fill(~kept, -100)
    loss, aux_loss = model.train().training_losses(inputs, targets, *a_document_a_row(inputs))
    assert loss.item() / kept.sum().item() == pytest.approx(golden["train_loss"], abs=tolerance)
    assert aux_loss.item() == pytest.approx(golden["aux_loss"], abs=1e-4)
    out = model(inputs)  # the Hugging Face interface gives the same two numbers
    theirs = F.cross_entropy(out.logits.flatten(0, 1), targets.flatten())
    assert theirs.item() == pytest.approx(golden["train_loss"], abs=tolerance)
    assert out.aux_loss.item() == pytest.approx(golden["aux_loss"], abs=1e-4)


@pytest.mark.parametrize("name", NAMES)
def test_greedy_tokens(name):
    golden, model = load(name)
    tokens = model.generate(golden["greedy"][:, :8], max_new_tokens=12, do_sample=False, eos_token_id=None)
    assert tokens.tolist() == golden["greedy"].tolist()
