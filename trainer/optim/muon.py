"""Muon, for the matrices of the hidden layers.

The momentum of a matrix's gradients, M = U S V^T, is usually dominated by a few directions: few singular values in S are
large. Muon takes U V^T in its place, so that all directions of the matrix learn at the same pace.

A singular value decomposition would be slow. A Newton-Schulz iteration needs only matrix products:

    X <- a X + b (X X^T) X + c (X X^T)^2 X

It keeps U and V, and maps each singular value s to a s + b s^3 + c s^5. With the coefficients below, small values grow as
fast as possible. They do not converge to 1: five steps bring each s between 0.01 and 1 to between 0.68 and 1.14, which
trains as well and saves steps. Source: https://kellerjordan.github.io/posts/muon/
"""

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from trainer.machine.devices import pick_dtype
from trainer.machine.ranks import Ranks
from trainer.optim.bare import BareOptimizer
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


class SharedOrthogonalise:
    """`orthogonalise` for matrices that all ranks have: each computes every world_size-th matrix, and reads the others.

    A rank writes its results to shared memory, waits until all have done so, and reads. It writes there again in the next
    update. By then all have read, since the sum of that update's gradients needed every rank.
    """

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        # {shape of the matrices: shared results}
        self._results: dict[torch.Size, torch.Tensor] = {}

    def __call__(self, matrices: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        """[n, rows, columns] -> each matrix orthogonalised, valid until the next update. All ranks must call it."""
        memory = self.ranks.memory
        assert memory is not None
        if matrices.shape not in self._results:
            taken = memory.take(matrices.nbytes)
            self._results[matrices.shape] = taken.view(matrices.dtype).view(matrices.shape)
        results = self._results[matrices.shape]
        own = slice(self.ranks.rank, None, self.ranks.world_size)
        # There may be fewer matrices of a shape than ranks.
        if len(matrices[own]):
            results[own] = orthogonalise(matrices[own])
        memory.wait(self.ranks.rank)
        return results


def sharded_orthogonalise(ranks: Ranks, matrices: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """[n, own rows, columns] -> the same rows of the orthogonalised matrices of `shape` (rows, columns).

    The rows are sharded among the ranks (trainer/sharding.py), all of which must call it. Orthogonalising needs a whole matrix. So each
    matrix has an owner: all ranks send their rows to it, it orthogonalises the matrix, and sends the rows back. Each rank owns
    about the same number of matrices of a shape, consecutive ones.
    """
    n, own_rows, columns = matrices.shape
    rows = rows_of_ranks(shape[0], ranks.world_size)
    assert own_rows == rows[ranks.rank]
    matrices_of = rows_of_ranks(n, ranks.world_size)
    mine = matrices_of[ranks.rank]

    # Sent to each owner: this rank's rows of the owner's matrices, one matrix after the other.
    sent = matrices.flatten()
    sent_sizes = [count * own_rows * columns for count in matrices_of]
    # Received from each rank: its rows of the matrices that this rank owns.
    received_sizes = [mine * count * columns for count in rows]
    received = sent.new_empty(sum(received_sizes))
    dist.all_to_all_single(received, sent, received_sizes, sent_sizes)
    parts = received.split(received_sizes)
    shaped = [part.view(mine, count, columns) for part, count in zip(parts, rows, strict=True)]
    if mine:
        whole = orthogonalise(torch.cat(shaped, dim=1))
        parts = torch.split(whole, rows, dim=1)

    # Back to the ranks that hold the rows.
    returned = torch.cat([part.flatten() for part in parts])
    result = torch.empty_like(sent)
    dist.all_to_all_single(result, returned, sent_sizes, received_sizes)
    return result.view(n, own_rows, columns)


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
        """orthogonalise: the function of this name, or one that shares the work among ranks (SharedOrthogonalise, sharded_orthogonalise)."""
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
