"""Adding up gradients of ranks on the CPUs of one machine, in memory that they share."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from common.arithmetic import ceil_div
from trainer.machine.meeting import Meeting
from trainer.machine.ranks import Ranks

if TYPE_CHECKING:
    from trainer.reducer import LossAndSums

# Slices and gradients begin at multiples of this many numbers: two ranks never write into the same line of a cache.
ALIGNMENT = 64
BYTES_PER_NUMBER = 4
# How many numbers a rank can tell the others with its gradients, at most.
MOST_NUMBERS = 64


class SharedReducer:
    """Sums fp32 gradients over the ranks in shared memory, after the backward pass of an update.

    The memory has a region for each rank and one for the sum, each of the length of all gradients end to end, and a row
    for each rank with the numbers that the ranks tell each other:

        region 0    gradients of rank 0
        region 1    gradients of rank 1
        sum         slice 0 | slice 1      slice r is added up by rank r
        row 0       numbers of rank 0
        row 1       numbers of rank 1

    1. Each rank copies its gradients into its own region, its numbers into its own row, and waits until all have.
    2. Each adds up its own slice of all regions, in the order of the ranks, so that the sum does not depend on who is
       first. It waits until all have.
    3. Each copies the sum into its gradients.

    Nobody waits after that. A rank writes into its region again with the next update, which is safe, since step 2 is over
    for all. It writes into the sum only after the next update's first wait, which the others reach with step 3 done.

    The plain version that the tests compare with is one all-reduce by Gloo for each gradient.
    """

    last_needs_every_rank = False
    keeps_gradients = False

    def __init__(
        self, parameters: Sequence[torch.nn.Parameter], memory: torch.Tensor, ranks: Ranks, meeting: Meeting
    ) -> None:
        """memory: uint8 [at least shared_gradient_bytes(parameters, world size)], shared by all ranks, which wait in `meeting`."""
        self.meeting = meeting
        self.parameters = list(parameters)
        length = region_length(parameters, ranks.world_size)
        numbers = memory.view(torch.float32)
        end_of_regions = length * (ranks.world_size + 1)
        regions = numbers[:end_of_regions].view(ranks.world_size + 1, length)
        # [world size, MOST_NUMBERS]
        self.told = numbers[end_of_regions : end_of_regions + ranks.world_size * MOST_NUMBERS].view(-1, MOST_NUMBERS)
        self.own_row = self.told[ranks.rank]
        own_region = regions[ranks.rank]
        sums = regions[ranks.world_size]
        # A view of the shape of each gradient.
        self.own_views = views_of(own_region, self.parameters)
        self.sum_views = views_of(sums, self.parameters)
        slice_length = length // ranks.world_size
        first = ranks.rank * slice_length
        # This rank's slice of all gradients, in the order of the ranks, and of the sum.
        self.slices = [region[first : first + slice_length] for region in regions[: ranks.world_size]]
        self.slice_of_sum = sums[first : first + slice_length]

    def forward(self, compute: "Callable[[], LossAndSums]", last: bool) -> "LossAndSums":
        """compute(). While the backward pass runs there is nothing to do: it needs all of the processor that copying would use."""
        return compute()

    def finish(self, message: torch.Tensor) -> torch.Tensor:
        """Make every gradient the sum over the ranks; returns the sum of the messages (1-d)."""
        gradients = []
        for parameter in self.parameters:
            # A rank without rows in the ragged last update.
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            gradients.append(parameter.grad)
        # Step 1: what this rank has.
        torch._foreach_copy_(self.own_views, gradients)
        n = len(message)
        assert n <= MOST_NUMBERS
        self.own_row[:n] = message
        self.meeting.wait()
        # Step 2: the sums, in the order of the ranks, so that all come to the same ones. Messages are short: each rank adds up all.
        total = self.told[:, :n].sum(dim=0)
        torch.add(self.slices[0], self.slices[1], out=self.slice_of_sum)
        for of_rank in self.slices[2:]:
            self.slice_of_sum += of_rank
        self.meeting.wait()
        # Step 3: what all ranks have.
        torch._foreach_copy_(gradients, self.sum_views)
        return total


def shared_gradient_bytes(parameters: Sequence[torch.nn.Parameter], world_size: int) -> int:
    """Of shared memory: the gradients of each rank, their sum, and what the ranks tell each other."""
    of_gradients = region_length(parameters, world_size) * (world_size + 1)
    return BYTES_PER_NUMBER * (of_gradients + MOST_NUMBERS * world_size)


def region_length(parameters: Sequence[torch.nn.Parameter], world_size: int) -> int:
    """Numbers of a region: all gradients, each aligned, and as many as divide into aligned slices."""
    length = sum(aligned(parameter.numel()) for parameter in parameters)
    slice_length = aligned(ceil_div(length, world_size))
    return slice_length * world_size


def aligned(length: int) -> int:
    """The next multiple of ALIGNMENT."""
    return ceil_div(length, ALIGNMENT) * ALIGNMENT


def views_of(region: torch.Tensor, parameters: Sequence[torch.nn.Parameter]) -> list[torch.Tensor]:
    """Of a region the place of each parameter's gradient, in its shape."""
    views = []
    first = 0
    for parameter in parameters:
        views.append(region[first : first + parameter.numel()].view(parameter.shape))
        first += aligned(parameter.numel())
    return views
