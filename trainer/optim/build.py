"""Parameter groups and the optimisers of `--optimizer`."""

import inspect
import re
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim.adamw import adamw

from trainer.machine.ranks import ONE_RANK, Ranks
from trainer.optim.muon import BareOptimizer, Muon, Orthogonalise, divided_orthogonalise, orthogonalise
from trainer.settings import OptimizerSettings
from trainer.sharding import is_sharded

# torch.optim's parameter groups: {"params": [...], "weight_decay": ...}
Groups = list[dict[str, Any]]
# AdamW's names for them
MOMENTS = ("exp_avg", "exp_avg_sq")


def build_optimizers(
    model: nn.Module, settings: OptimizerSettings, ranks: Ranks = ONE_RANK, **adam_options: Any
) -> list[torch.optim.Optimizer]:
    """The optimisers of `--optimizer`, with rates and weight decay; their parameters are disjoint. adam_options: see build_adamw.

    ranks: all of them must call it, and may share Muon's work.
    """
    lr = settings.learning_rate
    groups = [group for group in parameter_groups(model, settings.weight_decay) if group["params"]]
    if settings.optimizer == "adamw":
        return [build_adamw(groups, lr, **adam_options)]
    assert settings.optimizer == "muon"
    # Muon for the matrices of attention and feed-forward layers; AdamW for embeddings, head, a router's few rows, and vectors.
    matrices = []
    for name, parameter in model.named_parameters():
        in_a_layer = re.search(r"\.layers?\.", name) and not name.endswith("mlp.gate.weight")
        if in_a_layer and parameter.requires_grad and parameter.dim() == 2:
            matrices.append(parameter)
    # By identity, since `==` compares the numbers in tensors.
    muon_ids = {id(p) for p in matrices}
    for group in groups:
        group["params"] = [p for p in group["params"] if id(p) not in muon_ids]
        # --embed_lr is for the matrices that Muon leaves, not for vectors. The engine multiplies the schedule's rate, which already
        # includes --learning_rate, by a group's `lr_scale`: all rates follow the same schedule.
        if settings.embed_lr and any(p.dim() >= 2 for p in group["params"]):
            group["lr_scale"] = settings.embed_lr / lr
    muon_group = {"params": matrices, "weight_decay": settings.weight_decay, "lr_scale": settings.muon_lr / lr}
    method: Orthogonalise = orthogonalise
    if ranks.world_size > 1:
        method = partial(divided_orthogonalise, ranks, any(is_sharded(p) for p in matrices))
    return [build_adamw(groups, lr, **adam_options), Muon([muon_group], lr=settings.muon_lr, orthogonalise=method)]


def parameter_groups(model: nn.Module, weight_decay: float) -> Groups:
    """Two groups that hold every trainable parameter exactly once: matrices (decayed), and biases and norms (not)."""
    # A tied matrix is listed once.
    parameters = [p for p in model.parameters() if p.requires_grad]
    matrices = [p for p in parameters if p.dim() >= 2]
    vectors = [p for p in parameters if p.dim() < 2]
    return [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]


class AdamW(BareOptimizer, torch.optim.AdamW):
    """torch.optim.AdamW without the wrappers that BareOptimizer leaves out, and for sparse gradients too.

    Of these it updates only the rows that are there, without momentum. That is AdamW with a beta1 of 0, but for the weight decay of the
    other rows, which waits. In torch.optim.SparseAdam both moments wait: a rare row gets a tenth of its gradient, and the rest at its
    next uses, if there are any. 160 x 2 with 51,200 entries, 3.9 M tokens: 0.7 % fewer bits per byte than with momentum for all rows;
    SparseAdam's way had 0.4 % more loss after 0.8 M.
    """

    dense_step = inspect.unwrap(torch.optim.AdamW.step)

    # The engine has no closure.
    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and parameter.grad.is_sparse:
                    self._step_rows(parameter, parameter.grad, group)
                    # The base class refuses it.
                    parameter.grad = None
        self.dense_step()

    def _step_rows(self, parameter: torch.Tensor, gradient: torch.Tensor, group: dict[str, Any]) -> None:
        """gradient: of a parameter [V, H], sparse and coalesced."""
        state = self.state[parameter]
        if not state:
            # The momentum stays 0, for a resume that updates all rows.
            state.update({name: torch.zeros_like(parameter) for name in MOMENTS}, step=torch.zeros(()))
        # Steps by which the second moment of each row has yet to decay: 0 also after a resume from dense gradients
        waits, before = state.setdefault("waits", torch.zeros(len(parameter))), state["step"].clone()
        ids, beta2 = gradient.indices()[0], group["betas"][1]
        rows = parameter.index_select(0, ids)
        squares = state["exp_avg_sq"].index_select(0, ids)
        squares *= (beta2 ** waits[ids]).unsqueeze(1)
        options = {name: group[name] for name in ("lr", "weight_decay", "eps", "amsgrad", "maximize", "fused")}
        options.update(beta1=0.0, beta2=beta2, found_inf=getattr(self, "found_inf", None))
        adamw([rows], [gradient.values()], [torch.zeros_like(rows)], [squares], [], [state["step"]], **options)
        parameter.index_copy_(0, ids, rows)
        state["exp_avg_sq"].index_copy_(0, ids, squares)
        # No step if the update is not applied
        waits += state["step"] - before
        waits[ids] = 0


def build_adamw(groups: Groups, lr: float, bias_correction: bool = True, **options: Any) -> AdamW:
    """AdamW with the fused kernel, which torch has for all devices that --device takes.

    bias_correction: False: the moments are used uncorrected, as in the original code of BERT and ELECTRA.
    """
    adamw = AdamW(groups, lr=lr, fused=True, **options)
    if not bias_correction:
        # The corrections are 1 - beta ** step. At step 2 ** 24 they are 1, and the count stays there: float32 has no
        # next integer.
        for group in groups:
            for p in group["params"]:
                moments = {name: torch.zeros_like(p) for name in MOMENTS}
                adamw.state[p] = {"step": torch.tensor(2.0**24, device=p.device), **moments}
    return adamw
