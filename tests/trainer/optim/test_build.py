"""Parameter groups; that the steps are those of torch's AdamW is tests/trainer/test_tour.py."""

import pytest
import torch
from torch import nn

from tests.helpers import tiny_model
from trainer.optim.build import AdamW, build_optimizers, parameter_groups
from trainer.settings import OptimizerSettings


def test_muon_takes_the_matrices_of_the_blocks_and_adamw_the_rest():
    """Every parameter once; the rate of Muon is --muon_lr on the same schedule (lr_scale)."""
    model = tiny_model(use_moe=True)
    adamw, muon = build_optimizers(model, OptimizerSettings(learning_rate=1e-3, optimizer="muon", muon_lr=0.02))
    names = {id(p): name for name, p in model.named_parameters()}
    (hidden,) = muon.param_groups
    listed = [names[id(p)] for group in (*adamw.param_groups, hidden) for p in group["params"]]
    assert sorted(listed) == sorted(names.values())
    assert hidden["lr_scale"] == pytest.approx(20)
    assert {names[id(p)].split(".")[-2] for p in hidden["params"]} == {
        "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"
    }  # fmt: skip


def test_the_matrices_outside_the_blocks_have_a_rate_of_their_own():
    """--embed_lr moves embeddings, head and routers alone; without it they have --learning_rate, in the same groups."""
    model = tiny_model(use_moe=True)
    settings = [OptimizerSettings(learning_rate=1e-3, optimizer="muon", embed_lr=rate) for rate in (0.0, 4e-3)]
    usual, own = (build_optimizers(model, one)[0] for one in settings)
    names = {id(p): name for name, p in model.named_parameters()}
    changed = {}
    for before, after in zip(usual.param_groups, own.param_groups, strict=True):
        assert list(map(id, before["params"])) == list(map(id, after["params"]))
        scales = before.get("lr_scale", 1.0), after.get("lr_scale", 1.0)
        if scales[0] != scales[1]:
            changed |= {names[id(p)]: scales for p in after["params"]}
    outside = ("embed", "lm_head", "mlp.gate.weight")
    assert changed == {name: (1.0, 4.0) for name in names.values() if any(part in name for part in outside)}


class WithBias(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.norm, self.frozen = nn.Linear(4, 3), nn.LayerNorm(3), nn.Linear(3, 3)
        self.tied = nn.Linear(4, 3, bias=False)
        self.tied.weight = self.linear.weight
        self.frozen.requires_grad_(False)


@pytest.mark.parametrize("model", [WithBias(), tiny_model(use_moe=True, generation="minimind3")])
def test_every_trainable_parameter_is_in_one_group_and_vectors_are_not_decayed(model):
    """Reference: the module tree, walked here by name."""
    decayed, plain = parameter_groups(model, 0.01)
    assert decayed["weight_decay"] == 0.01 and plain["weight_decay"] == 0
    listed = [id(p) for group in (decayed, plain) for p in group["params"]]
    assert len(listed) == len(set(listed))
    assert set(listed) == {id(p) for p in model.parameters() if p.requires_grad}
    for module in model.modules():
        if "Norm" in type(module).__name__:
            assert all(id(p) in map(id, plain["params"]) for p in module.parameters())
        if getattr(module, "bias", None) is not None and module.bias.requires_grad:
            assert id(module.bias) in map(id, plain["params"])


def test_the_state_of_an_optimiser_is_that_of_torchs_adamw():
    """A checkpoint of either continues in the other, with the same bits. Reference: torch's own steps."""
    found = []
    for classes in ((AdamW, torch.optim.AdamW), (torch.optim.AdamW, AdamW), (torch.optim.AdamW,) * 2):
        weight, state = nn.Parameter(torch.linspace(-1, 1, 100)), None
        for adamw in classes:
            optimizer = adamw([weight], lr=0.1, fused=True)
            if state:
                optimizer.load_state_dict(state)
            weight.grad = weight.detach().sin()
            optimizer.step()
            state = optimizer.state_dict()
        found.append([weight.tolist(), state["state"][0]["exp_avg_sq"].tolist(), state["param_groups"]])
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("decay", [0.0, 0.3])
def test_rows_without_a_gradient_cost_nothing(decay):
    """Reference: torch's AdamW without momentum on all rows; the decay of rows without a gradient is taken back."""
    torch.manual_seed(0)
    table = nn.Parameter(torch.randn(6, 4))
    whole = nn.Parameter(table.detach().clone())
    options = {"lr": 0.1, "weight_decay": decay, "fused": True}
    ours, theirs = AdamW([table], **options), torch.optim.AdamW([whole], betas=(0.0, 0.999), **options)
    for used in ([0, 1], [1, 4, 1], [4], [0, 1, 2], [0]):
        # An update that is not applied changes nothing.
        for ours.found_inf in (torch.tensor(1.0), torch.tensor(0.0)):
            nn.functional.embedding(torch.tensor(used), table, sparse=True).sin().sum().backward()
            whole.grad = table.grad.to_dense()
            table.grad = table.grad.coalesce()
            ours.step()
        before = whole.detach().clone()
        theirs.step()
        unused = sorted({*range(6)} - {*used})
        whole.data[unused] = before[unused]
    torch.testing.assert_close(table, whole)
    assert ours.state[table]["step"] == 5


@pytest.mark.parametrize("kinds", ["sssss", "ddsss", "sdddds", "dsdss"])
def test_second_moments_are_those_of_dense_gradients(kinds):
    """d: an update with a dense gradient, as after a resume without a sample. Reference: torch's AdamW."""
    generator = torch.Generator().manual_seed(0)
    table, whole = (nn.Parameter(torch.zeros(4, 2)) for _ in range(2))
    ours, theirs = AdamW([table], fused=True), torch.optim.AdamW([whole])
    for number, kind in enumerate(kinds):
        # All rows are used before the last update with dense gradients, and at the end.
        used = [0, 1] if kind == "s" and "s" in kinds[number + 1 :] and "d" not in kinds[number:] else [0, 1, 2, 3]
        rows = torch.randn(len(used), 2, generator=generator)
        whole.grad = torch.zeros(4, 2).index_copy_(0, torch.tensor(used), rows)
        table.grad = whole.grad.to_sparse(1) if kind == "s" else whole.grad.clone()
        ours.step()
        theirs.step()
    torch.testing.assert_close(ours.state[table]["exp_avg_sq"], theirs.state[whole]["exp_avg_sq"])
