"""Muon for the matrices of the hidden layers, with AdamW for the rest, behind the interface of one optimiser."""

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import torch

# Of the quintic iteration, https://kellerjordan.github.io/posts/muon/.
COEFFICIENTS = (3.4445, -4.7750, 2.0315)


def orthogonalise(matrices: torch.Tensor, steps: int = 5) -> torch.Tensor:
    """[n, rows, columns] -> the same in bf16 with singular values near 1, by Newton-Schulz iterations on all n at once.

    One iteration makes a x + b (x xT) x + c (x xT)^2 x of x. Written with the singular values s of x, that is the
    polynomial a s + b s^3 + c s^5 of each, while the singular vectors stay. Its coefficients are chosen so that after
    five iterations every s from 0.01 to 1 has come near 1: between 0.68 and 1.14, which is near enough for a direction.
    """
    a, b, c = COEFFICIENTS
    # The smaller of the two possible products of x with itself.
    wide = matrices.shape[1] <= matrices.shape[2]
    x = (matrices if wide else matrices.mT).bfloat16()
    # The iteration converges for singular values up to 1.
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x if wide else x.mT


class Muon(torch.optim.Optimizer):
    """Momentum, orthogonalised (https://kellerjordan.github.io/posts/muon/): the update of torch.optim.Muon.

    Matrices of one shape are orthogonalised as one batch, and `found_inf` is honoured as in torch's fused optimisers:
    where that tensor is 1, parameters and momentum stay as they are and the host need not know.
    """

    def __init__(
        self,
        params: Iterable[dict[str, Any]] | Iterable[torch.Tensor],
        lr: float = 0.02,
        momentum: float = 0.95,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})
        self.found_inf: torch.Tensor | None = None

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]  # without torch's `closure`, which nobody here has
        """Apply the gradients."""
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[torch.Tensor]] = defaultdict(list)
            for p in group["params"]:
                if p.grad is not None:
                    by_shape[p.shape].append(p)
            for shape, parameters in by_shape.items():
                self._step(parameters, shape, group)

    def _step(self, parameters: list[torch.Tensor], shape: torch.Size, group: dict[str, Any]) -> None:
        """One update of n matrices [rows, columns]."""
        buffers = []
        gradients_of_all = []
        for p in parameters:
            if "momentum_buffer" not in self.state[p]:
                self.state[p]["momentum_buffer"] = torch.zeros_like(p)
            buffers.append(self.state[p]["momentum_buffer"])
            assert p.grad is not None
            gradients_of_all.append(p.grad)
        gradients = torch.stack(gradients_of_all)  # [n, rows, columns]
        # 1, or 0 for an update that is not to be applied: then every change below is multiplied by 0.
        applied = torch.ones((), device=gradients.device)
        if self.found_inf is not None:
            applied = 1 - self.found_inf.view(())
            # 0 times NaN would be NaN.
            gradients = torch.where(applied > 0, gradients, 0.0)
        momentum = group["momentum"]
        lr = group["lr"]
        averaged = torch.lerp(torch.stack(buffers), gradients, (1 - momentum) * applied)
        torch._foreach_copy_(buffers, list(averaged.unbind()))
        # Nesterov's momentum: the average, once more mixed with the gradient itself.
        update = orthogonalise(gradients.lerp_(averaged, momentum))
        # So that an update changes each output about equally, whatever the shape of the matrix.
        scale = math.sqrt(max(1.0, shape[0] / shape[1]))
        update = update.float() * (-lr * scale * applied)
        torch._foreach_mul_(parameters, 1 - lr * group["weight_decay"] * applied)
        torch._foreach_add_(parameters, list(update.unbind()))


class Together:
    """Several optimisers of disjoint parameters as one, as far as engine.py and GradScaler.unscale_ ask."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self.optimizers = optimizers

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    @property
    def found_inf(self) -> torch.Tensor | None:
        return getattr(self.optimizers[0], "found_inf", None)

    @found_inf.setter
    def found_inf(self, value: torch.Tensor | None) -> None:
        for optimizer in self.optimizers:
            optimizer.found_inf = value  # type: ignore[attr-defined]  # which torch's own GradScaler sets too

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        return {"optimizers": [optimizer.state_dict() for optimizer in self.optimizers]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for optimizer, own in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(own)
