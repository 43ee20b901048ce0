"""Parameter groups and the optimiser."""

import re

import torch

from trainer.optim.muon import Muon, Together


def parameter_groups(model, weight_decay):
    """Two groups that hold every trainable parameter exactly once: matrices (decayed), and biases and norms (not)."""
    parameters = [p for p in model.parameters() if p.requires_grad]  # a tied matrix is listed once
    matrices = [p for p in parameters if p.dim() >= 2]
    vectors = [p for p in parameters if p.dim() < 2]
    assert len(matrices) + len(vectors) == len({id(p) for p in parameters})
    return [
        {"params": matrices, "weight_decay": weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]


def build_optimizer(model, lr, weight_decay=0.01, kind="adamw", muon_lr=0.02, **adam_options):
    """The optimiser of `--optimizer`: "adamw", or "muon" for the matrices inside the blocks and AdamW for the rest.

    adam_options: see build_adamw. A group's `lr_scale` is what the schedule's rate is multiplied with: Muon's own rate follows the same schedule.
    """
    groups = [group for group in parameter_groups(model, weight_decay) if group["params"]]
    if kind == "adamw":
        return build_adamw(groups, lr, **adam_options)
    matrices = hidden_matrices(model)
    hidden = {id(p) for p in matrices}
    for group in groups:
        group["params"] = [p for p in group["params"] if id(p) not in hidden]
    muon = Muon([{"params": matrices, "weight_decay": weight_decay, "lr_scale": muon_lr / lr}], lr=muon_lr)
    return Together([build_adamw(groups, lr, **adam_options), muon])


def build_adamw(groups, lr, bias_correction=True, **options):
    """AdamW with the fused kernel where the device has one (torch raises RuntimeError where it has not)."""
    try:
        adamw = torch.optim.AdamW(groups, lr=lr, fused=True, **options)
    except RuntimeError:
        adamw = torch.optim.AdamW(groups, lr=lr, **options)
    return adamw if bias_correction else without_bias_correction(adamw)


def without_bias_correction(optimizer):
    """Let a fresh torch.optim.AdamW take its moments as they are, as the original code of BERT and ELECTRA does.

    The corrections are 1 - beta ** step. With the count at 2 ** 24 they are 1 from the start, and there it stays: one
    more is no float32 number.
    """
    for group in optimizer.param_groups:
        for p in group["params"]:
            moments = {name: torch.zeros_like(p) for name in ("exp_avg", "exp_avg_sq")}
            step = torch.tensor(2.0**24, device=p.device if group["fused"] else None)
            optimizer.state[p] = {"step": step, **moments}
    return optimizer


def hidden_matrices(model):
    """The matrices of attention and feed-forward layers: neither embeddings and head, nor a router's few rows."""
    return [
        p
        for name, p in model.named_parameters()
        if p.requires_grad and p.dim() == 2 and re.search(r"\.layers?\.", name) and not name.endswith("mlp.gate.weight")
    ]
