"""What adds up gradients where each rank has the whole model. There are two ways, and `make_reducer` chooses:

    SharedReducer        trainer/shared_reducer.py        CPU ranks of one machine, in memory that all of them see
    DistributedReducer   trainer/distributed_reducer.py   all others, by messages

Where ranks have parts of the model (trainer/sharding.py), its layers add up their gradients by themselves.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
import torch.distributed as dist

from trainer.distributed_reducer import DistributedReducer, trained_parameters
from trainer.machine.meeting import make_meeting
from trainer.machine.ranks import Ranks
from trainer.machine.shared_memory import shared_bytes
from trainer.shared_reducer import SharedReducer, shared_gradient_bytes

# Of a micro-batch: (its share of the update's loss, what to add up for the log), see trainer/engine.py.
LossAndSums = tuple[torch.Tensor, torch.Tensor]


class SumsGradients(Protocol):
    """What the engine asks for the sums of gradients over the ranks.

    For each micro-batch of an update it calls `forward` and then loss.backward(); for the update as a whole, `finish`.
    """

    # Whether all ranks have to compute the last micro-batch of an update, also one that has no rows in it.
    last_needs_every_rank: bool
    # Whether gradients lie in memory of its own. Then zeros clear them: with None the next micro-batch would put them elsewhere.
    keeps_gradients: bool

    def forward(self, compute: Callable[[], LossAndSums], last: bool) -> LossAndSums:
        """What `compute()` gives, which is the forward pass of a micro-batch. The loss may be scaled.

        last: no other micro-batch of this update follows, so gradients may be sent while its backward pass goes on.
        """

    def finish(self, message: torch.Tensor) -> torch.Tensor:
        """Wait until every gradient holds its sum, a missing one counting as zero; returns the sum of the messages (1-d)."""


def make_reducer(model: torch.nn.Module, ranks: Ranks) -> SumsGradients:
    """What adds up gradients over the ranks: shared memory where all of them have it, messages elsewhere.

    A collective: all ranks must call it. They get the weights of rank 0.
    """
    parameters = trained_parameters(model)
    on_cpu = all(p.device.type == "cpu" and p.dtype is torch.float32 for p in parameters)
    if on_cpu and ranks.on_one_machine:
        memory = shared_bytes(shared_gradient_bytes(parameters, ranks.world_size), ranks)
        if memory is not None:
            broadcast_weights(parameters)
            return SharedReducer(parameters, memory, ranks, make_meeting(ranks))
    return DistributedReducer(model)


def broadcast_weights(parameters: Sequence[torch.nn.Parameter]) -> None:
    """Give all ranks the weights of rank 0. One seed gives the same ones on machines of one kind only."""
    for parameter in parameters:
        dist.broadcast(parameter.data, src=0)
