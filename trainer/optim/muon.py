"""Muon for the matrices of the hidden layers, with AdamW for the rest, behind the interface of one optimiser."""

import math
from collections import defaultdict

import torch

# Of the quintic iteration, https://kellerjordan.github.io/posts/muon/.
COEFFICIENTS = (3.4445, -4.7750, 2.0315)


def orthogonalise(matrices, steps=5):
    """[n, rows, columns] -> the same in bf16 with singular values near 1, by Newton-Schulz iterations on all n at once."""
    a, b, c = COEFFICIENTS
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

    def __init__(self, params, lr=0.02, momentum=0.95, weight_decay=0.0) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})
        self.found_inf = None

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            by_shape = defaultdict(list)
            for p in group["params"]:
                if p.grad is not None:
                    by_shape[p.shape].append(p)
            for shape, parameters in by_shape.items():
                self._step(parameters, shape, group)

    def _step(self, parameters, shape, group) -> None:
        for p in parameters:
            if "momentum_buffer" not in self.state[p]:
                self.state[p]["momentum_buffer"] = torch.zeros_like(p)
        buffers = [self.state[p]["momentum_buffer"] for p in parameters]
        gradients = torch.stack([p.grad for p in parameters])  # [n, rows, columns]
        applied = torch.ones((), device=gradients.device)
        if self.found_inf is not None:
            applied = 1 - self.found_inf.view(())
            gradients = torch.where(applied > 0, gradients, 0.0)
        momentum, lr = group["momentum"], group["lr"]
        averaged = torch.lerp(torch.stack(buffers), gradients, (1 - momentum) * applied)
        torch._foreach_copy_(buffers, list(averaged.unbind()))
        # Nesterov.
        update = orthogonalise(gradients.lerp_(averaged, momentum))
        update = update.float() * (-lr * math.sqrt(max(1.0, shape[0] / shape[1])) * applied)
        torch._foreach_mul_(parameters, 1 - lr * group["weight_decay"] * applied)
        torch._foreach_add_(parameters, list(update.unbind()))


class Together:
    """Several optimisers of disjoint parameters as one, as far as engine.py and GradScaler.unscale_ ask."""

    def __init__(self, optimizers) -> None:
        self.optimizers = optimizers

    @property
    def param_groups(self):
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    @property
    def found_inf(self):
        return self.optimizers[0].found_inf

    @found_inf.setter
    def found_inf(self, value) -> None:
        for optimizer in self.optimizers:
            optimizer.found_inf = value

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()

    def zero_grad(self, set_to_none=True) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none)

    def state_dict(self):
        return {"optimizers": [optimizer.state_dict() for optimizer in self.optimizers]}

    def load_state_dict(self, state) -> None:
        for optimizer, own in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(own)
