"""What adds up gradients where each rank has the whole model. There are two ways, and `make_reducer` chooses:

    SharedReducer        trainer/machine/cpu_ranks.py   the copies of a command on a CPU, in memory that all of them see
    DistributedReducer   below                          ranks of a launcher, by messages

For each micro-batch of an update the engine calls `forward` and then loss.backward(); for the update as a whole, `finish`.
Where ranks have parts of the model (trainer/sharding.py), its layers add up their gradients by themselves.
"""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from trainer.machine.cpu_ranks import SharedReducer
from trainer.machine.ranks import Ranks

# of a micro-batch: (its share of the update's loss, what to add up for the log), see trainer/engine.py
LossAndSums = tuple[torch.Tensor, torch.Tensor]

# Gradients that go over the network in one piece: large enough that the network's latency does not count, small
# enough that most of the pieces travel while the backward pass computes the next ones.
BUCKET_BYTES = 25 << 20


def trained_parameters(model: nn.Module) -> list[nn.Parameter]:
    """In the order of the model, which is that of all ranks."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


class DistributedReducer:
    """Sums gradients over the ranks by torch's DistributedDataParallel, while the last backward pass of an update goes on.

    DistributedDataParallel has the parameters in buckets, in the reverse of their order in the model, which is about the order
    in which a backward pass comes to their gradients. As soon as a bucket has all of its gradients, the ranks begin to add it
    up. Three things are done here that it does not do by itself:

    - It divides gradients by the number of ranks. Losses are divided by the numbers of the whole update, so sums are wanted:
      the loss is multiplied by the number of ranks.
    - It waits for a gradient of each parameter. A micro-batch may leave some without one. `_reaching` has the backward pass come to all of them.
    - It makes its buckets anew after its first backward pass, in the order in which the gradients came in that. How sums of
      three and more ranks are rounded depends on the buckets, so a resumed run would not have the bits of one that was never
      stopped. `_settle_buckets` has that first pass over before the training.

    The plain version that the tests compare with is one all-reduce for each gradient after the backward pass.
    """

    # whether all ranks have to compute the last micro-batch of an update, also one that has no rows in it
    last_needs_every_rank = True
    # whether gradients lie in memory of its own; then zeros clear them: with None the next micro-batch would put them elsewhere
    keeps_gradients = True

    def __init__(self, model: nn.Module, bucket_bytes: int = BUCKET_BYTES) -> None:
        """A collective: all ranks must make it. They get the weights of rank 0."""
        # Layers are compiled one by one, so there is nothing that the compiler would have to cut at the buckets.
        torch._dynamo.config.optimize_ddp = False
        self.parameters = trained_parameters(model)
        # It takes over rank 0's weights, and adds up gradients in every backward pass that follows a call of it.
        self.parallel = DistributedDataParallel(
            _Computing(model),
            bucket_cap_mb=bucket_bytes / (1 << 20),
            # Gradients lie in the buckets, and not beside them once more. So nothing is copied, and a rank has them once.
            gradient_as_bucket_view=True,
        )
        # They do not change, so once is enough. (As an argument it would not send them at the start either.)
        self.parallel.broadcast_buffers = False
        self.world_size = dist.get_world_size()
        self._settle_buckets()
        # The gradients of the update are on their way.
        self._are_sent = False

    def _settle_buckets(self) -> None:
        """Have torch make the buckets that stay, by a backward pass that comes to all parameters, from the last to the first.

        That is about the order of training. One node for all parameters would leave the order to torch; in a chain of nodes,
        one for each, the node that was added last comes first in the backward pass.
        """

        def chain() -> LossAndSums:
            loss = self.parameters[0].new_zeros(())
            for parameter in self.parameters:
                loss = _reaching(loss, [parameter])
            return loss, loss.detach()

        loss, _ = self.parallel(chain)
        loss.backward()
        # torch makes the new buckets at the beginning of the forward pass that comes next: of this one, which nothing follows.
        with self.parallel.no_sync():
            self.parallel(chain)

    def forward(self, compute: Callable[[], LossAndSums], last: bool) -> LossAndSums:
        """compute(). Of the last micro-batch the gradients are sent, with what the ones before it have added to them."""
        if not last:
            # Past DistributedDataParallel: gradients add up on this rank alone.
            loss, sums = compute()
            return loss * self.world_size, sums
        self._are_sent = True
        loss, sums = self.parallel(compute)
        return _reaching(loss * self.world_size, self.parameters), sums

    def finish(self, message: torch.Tensor) -> torch.Tensor:
        """The sum of the messages (1-d). The backward pass has waited for the gradients."""
        assert self._are_sent, "one micro-batch of an update has to be its last"
        self._are_sent = False
        dist.all_reduce(message)
        return message


class _Computing(nn.Module):
    """What DistributedDataParallel asks for: a module that has the parameters, and computes in its forward pass.

    What it computes comes as an argument: a job's loss, which calls the model itself, perhaps not by its `forward`.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, compute: Callable[[], LossAndSums]) -> LossAndSums:
        return compute()


class _Reaching(torch.autograd.Function):
    """See `_reaching`. To torch, the loss depends on all parameters; their gradients of it are None, which adds nothing."""

    @staticmethod
    def forward(ctx: Any, loss: torch.Tensor, *parameters: torch.Tensor) -> torch.Tensor:
        ctx.n_parameters = len(parameters)
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return (gradients[0], *[None] * ctx.n_parameters)


def _reaching(loss: torch.Tensor, parameters: Sequence[torch.Tensor]) -> torch.Tensor:
    """The loss. Its backward pass comes to the parameters too, and adds nothing to their gradients."""
    reaching: torch.Tensor = _Reaching.apply(loss, *parameters)
    return reaching


SumsGradients = SharedReducer | DistributedReducer


def make_reducer(model: nn.Module, ranks: Ranks) -> SumsGradients:
    """What adds up gradients over the ranks. A collective: all ranks must call it. They get the weights of rank 0."""
    parameters = trained_parameters(model)
    if ranks.sharing > 1:
        # The system may give no memory that processes can share.
        with contextlib.suppress(OSError):
            reducer = SharedReducer(parameters, ranks)
            # One seed gives the same weights on machines of one kind only.
            for parameter in parameters:
                dist.broadcast(parameter.data, src=0)
            return reducer
    return DistributedReducer(model)
