"""Muon, for the matrices of the hidden layers.

The momentum of a matrix's gradients, M = U S V^T, is usually dominated by a few directions: few singular values in S are
large. Muon takes U V^T in its place, so that all directions of the matrix learn at the same pace.

A singular value decomposition would be slow. A Newton-Schulz iteration needs only matrix products:

    X <- a X + b (X X^T) X + c (X X^T)^2 X

It keeps U and V, and maps each singular value s to a s + b s^3 + c s^5. With the coefficients below, small values grow as
fast as possible. They do not converge to 1: five steps bring each s between 0.01 and 1 to between 0.68 and 1.14, which
trains as well and saves steps. Source: https://kellerjordan.github.io/posts/muon/
"""

import inspect
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from trainer.machine.devices import pick_dtype
from trainer.machine.ranks import Ranks
from trainer.sharding import own_part, rows_of_ranks

# ([n, rows, columns], shape of a whole matrix) -> each matrix orthogonalised. If the matrices are sharded among ranks
# (trainer/sharding.py), `rows` are this rank's.
Orthogonalise = Callable[[torch.Tensor, torch.Size], torch.Tensor]

# a, b, c of the quintic iteration above
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
NEWTON_SCHULZ_STEPS = 5


def iteration_dtype(device: torch.device) -> torch.dtype:
    """dtype of the iterations: bfloat16, whose precision is enough, if the device multiplies it natively. An AMD Zen 3 does not,
    and took 14 s for the matrices of a 256 x 8 model instead of 0.6 s in float32."""
    dtype, _ = pick_dtype("bfloat16", device)
    return dtype if dtype is torch.bfloat16 else torch.float32


def orthogonalise(matrices: torch.Tensor, shape: torch.Size | None = None) -> torch.Tensor:
    """[n, rows, columns] -> the same with singular values near 1, by Newton-Schulz iterations on all n at once.

    shape: unused; for the other Orthogonalise functions.
    """
    a, b, c = COEFFICIENTS
    # X X^T is smaller if X is wider than high; a high matrix is transposed.
    wide = matrices.shape[1] <= matrices.shape[2]
    x = matrices if wide else matrices.mT
    # The iteration converges for singular values up to 1, and none is larger than this norm.
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    for _ in range(NEWTON_SCHULZ_STEPS):
        gram = x @ x.mT
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, polynomial, x, beta=a)
    return x if wide else x.mT


def divided_orthogonalise(ranks: Ranks, is_sharded: bool, matrices: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """[n, own rows, columns] -> the same rows of the orthogonalised matrices of `shape` (rows, columns). All ranks must call it.

    Orthogonalising needs a whole matrix, and is not repeated: each matrix has an owner, which orthogonalises it and sends each rank
    its rows of the result. Each rank owns about the same number of matrices of a shape, consecutive ones. is_sharded: each rank
    has only some rows (trainer/sharding.py), and sends those to the owner first. Otherwise each has all.
    """
    n, own_rows, columns = matrices.shape
    rows = rows_of_ranks(shape[0], ranks.world_size) if is_sharded else [shape[0]] * ranks.world_size
    assert own_rows == rows[ranks.rank]
    matrices_of = rows_of_ranks(n, ranks.world_size)
    mine = matrices_of[ranks.rank]
    # What an owner and this rank exchange: this rank's rows of the owner's matrices, one matrix after the other.
    of_owners = [count * own_rows * columns for count in matrices_of]
    # What this rank, as an owner, exchanges with each rank: the other's rows of this rank's matrices.
    of_mine = [mine * count * columns for count in rows]
    whole = matrices.split(matrices_of)[ranks.rank]
    if is_sharded:
        received = matrices.new_empty(sum(of_mine))
        dist.all_to_all_single(received, matrices.flatten(), of_mine, of_owners)
        parts = zip(received.split(of_mine), rows, strict=True)
        whole = torch.cat([part.view(mine, count, columns) for part, count in parts], dim=1)
    # There may be fewer matrices of a shape than ranks.
    if mine:
        whole = orthogonalise(whole)
    to_ranks = whole.split(rows, dim=1) if is_sharded else [whole] * ranks.world_size
    result = torch.empty_like(matrices)
    returned = torch.cat([part.flatten() for part in to_ranks])
    dist.all_to_all_single(result.view(-1), returned, of_owners, of_mine)
    return result


class BareOptimizer(torch.optim.Optimizer):
    """torch.optim.Optimizer without the wrappers that keep torch.compile out of its methods: nothing compiles these, and the
    first call of each imports torch._dynamo, which takes as long as torch itself."""

    add_param_group = inspect.unwrap(torch.optim.Optimizer.add_param_group)
    load_state_dict = inspect.unwrap(torch.optim.Optimizer.load_state_dict)
    state_dict = inspect.unwrap(torch.optim.Optimizer.state_dict)
    zero_grad = inspect.unwrap(torch.optim.Optimizer.zero_grad)


class Muon(BareOptimizer):
    """Momentum, orthogonalised (https://kellerjordan.github.io/posts/muon/): the update of torch.optim.Muon.

    Matrices of one shape are orthogonalised as one batch, and `found_inf` is honoured as in torch's fused optimisers:
    where that tensor is 1, parameters and momentum do not change, without a sync with the host.
    """

    def __init__(
        self,
        params: Sequence[torch.nn.Parameter] | Sequence[dict[str, Any]],
        lr: float = 0.02,
        momentum: float = 0.95,
        weight_decay: float = 0.0,
        orthogonalise: Orthogonalise = orthogonalise,
    ) -> None:
        """orthogonalise: the function of this name, or one that shares the work among ranks (divided_orthogonalise)."""
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})
        self.found_inf: torch.Tensor | None = None
        self.orthogonalise = orthogonalise
        # no device: a model without such matrices, all of which AdamW trains
        device = next((p.device for p in self.param_groups[0]["params"]), torch.device("cpu"))
        self.iteration_dtype = iteration_dtype(device)

    # The base class takes a closure that recomputes the loss; the engine has none.
    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            # A batched product takes less time than one matrix after the other.
            by_shape: defaultdict[torch.Size, list[torch.Tensor]] = defaultdict(list)
            for p in group["params"]:
                if p.grad is not None:
                    by_shape[p.shape].append(p)
            for shape, parameters in by_shape.items():
                self._step(parameters, shape, group)

    def _step(self, parameters: list[torch.Tensor], shape: torch.Size, group: dict[str, Any]) -> None:
        """Update matrices of one shape (rows, columns), of which this rank may have only some rows."""
        buffers = []
        for p in parameters:
            if "momentum_buffer" not in self.state[p]:
                self.state[p]["momentum_buffer"] = torch.zeros_like(p)
            buffers.append(own_part(self.state[p]["momentum_buffer"]))
        gradients = torch.stack([own_part(p.grad) for p in parameters if p.grad is not None])  # [n, rows, columns]
        parameters = [own_part(p) for p in parameters]
        # 1, or 0 for an update that must change nothing. A tensor on the device: the host does not wait for it.
        applied = torch.ones((), device=gradients.device)
        if self.found_inf is not None:
            applied = 1 - self.found_inf.view(())
            # NaN times 0 is NaN, so an unused gradient is set to 0.
            gradients = torch.where(applied > 0, gradients, 0.0)
        momentum = group["momentum"]
        lr = group["lr"]
        averaged = torch.lerp(torch.stack(buffers), gradients, (1 - momentum) * applied)
        torch._foreach_copy_(buffers, list(averaged.unbind()))
        # Nesterov's momentum: the gradient is mixed in once more.
        nesterov = gradients.lerp_(averaged, momentum)
        update = self.orthogonalise(nesterov.to(self.iteration_dtype), shape)
        # This gives the entries of each matrix a root mean square of 1 / sqrt(columns), for any height.
        rate = -lr * math.sqrt(max(1.0, shape[0] / shape[1]))
        update = update.float() * (rate * applied)
        torch._foreach_mul_(parameters, 1 - lr * group["weight_decay"] * applied)
        torch._foreach_add_(parameters, list(update.unbind()))
