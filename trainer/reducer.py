"""What adds up gradients where each rank has the whole model. There are two ways, and `make_reducer` chooses:

    SharedReducer        the copies of a command on a CPU (trainer/machine/cpu_ranks.py), in memory that all of them see
    DistributedReducer   ranks of a launcher, by messages

For each micro-batch of an update the engine calls `begin_micro_batch` and then computes it; for the update as a whole, `finish`.
Where ranks have parts of the model (trainer/sharding.py), its layers add up their gradients by themselves.
"""

import math
from collections.abc import Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from trainer.machine.ranks import CACHE_LINE, Ranks

# numbers that a rank can tell the others with its gradients, at most
MOST_NUMBERS = 64


class SharedReducer:
    """Sums fp32 gradients over the ranks in shared memory, after the backward pass of an update.

    The memory has a region for each rank and one for the sum, each of all gradients end to end, and of what the ranks tell
    each other:

        region 0    gradients and numbers of rank 0
        region 1    gradients and numbers of rank 1
        sum         slice 0 | slice 1      slice r is added up by rank r

    1. Each rank copies its gradients into its own region, and waits until all have.
    2. Each adds up its own slice of all regions, in the order of the ranks. It waits until all have.
    3. Each copies the sum into its gradients. Nobody waits after that: a rank writes into its region again with step 2 over for
       all, and into the sum after the next update's first wait, which the others reach with step 3 done.
    """

    keeps_gradients = False

    def __init__(self, parameters: Sequence[nn.Parameter], ranks: Ranks) -> None:
        """A collective. Errors: UserError where the system gives no memory."""
        assert ranks.memory is not None
        self.parameters = list(parameters)
        self.ranks = ranks
        self.memory = ranks.memory
        n = ranks.world_size
        sizes = [*(parameter.numel() for parameter in self.parameters), MOST_NUMBERS]
        # numbers of a slice: whole lines of the cache
        length = math.ceil(sum(sizes) / n / CACHE_LINE) * CACHE_LINE
        taken = self.memory.take(torch.float32.itemsize * (n + 1) * n * length)
        regions = taken.view(torch.float32).view(n + 1, n * length)
        shapes = [*(parameter.shape for parameter in self.parameters), (MOST_NUMBERS,)]

        def views_of(region: torch.Tensor) -> list[torch.Tensor]:
            parts = region[: sum(sizes)].split(sizes)
            return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]

        *self.own_gradients, self.own_numbers = views_of(regions[ranks.rank])
        *self.sums, self.sum_of_numbers = views_of(regions[n])
        *self.slices, self.slice_of_sum = regions[:, ranks.rank * length : (ranks.rank + 1) * length]

    def begin_micro_batch(self, last: bool) -> None:
        """Nothing is to be done while the backward pass runs: it needs all of the processor that copying would use."""

    def finish(self, message: torch.Tensor) -> torch.Tensor:
        """Make every gradient the sum over the ranks; returns the sum of the messages (1-d)."""
        gradients = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        torch._foreach_copy_(self.own_gradients, gradients)
        self.own_numbers[: len(message)] = message
        self.memory.wait(self.ranks.rank)
        torch.add(self.slices[0], self.slices[1], out=self.slice_of_sum)
        for of_rank in self.slices[2:]:
            self.slice_of_sum += of_rank
        self.memory.wait(self.ranks.rank)
        torch._foreach_copy_(gradients, self.sums)
        return self.sum_of_numbers[: len(message)].clone()


# Gradients that go over the network in one piece: large enough that the network's latency does not count, small
# enough that most of the pieces travel while the backward pass computes the next ones.
BUCKET_BYTES = 25 << 20


class DistributedReducer:
    """Sums fp32 gradients over the ranks, while the last backward pass of an update goes on.

    The gradients lie end to end in buckets, in the reverse of the parameters' order, which is about the order in which a backward
    pass comes to them. A bucket is sent as soon as its gradients and the buckets before it are there: all ranks send in one order.

    torch's DistributedDataParallel does the same and more: it averages, where losses are divided by the numbers of the whole update
    here; it waits for every parameter, also for an expert that has got no token; and it makes its buckets anew after the first
    backward pass. How sums of three and more ranks are rounded depends on the buckets, so a resume would end with other bits.
    """

    # Gradients lie in memory of its own. Zeros clear them: with None the next micro-batch would put them elsewhere.
    keeps_gradients = True

    def __init__(self, parameters: Sequence[nn.Parameter], bucket_bytes: int = BUCKET_BYTES) -> None:
        buckets: list[list[nn.Parameter]] = [[]]
        for parameter in reversed(parameters):
            if sum(other.numel() for other in buckets[-1]) * torch.float32.itemsize >= bucket_bytes:
                buckets.append([])
            buckets[-1].append(parameter)
        # the gradients of each bucket, 1-d
        self.sums: list[torch.Tensor] = []
        for number, bucket in enumerate(buckets):
            sizes = [parameter.numel() for parameter in bucket]
            self.sums.append(torch.zeros(sum(sizes), device=bucket[0].device))
            for parameter, gradient in zip(bucket, self.sums[-1].split(sizes), strict=True):
                parameter.grad = gradient.view(parameter.shape)
                parameter.register_post_accumulate_grad_hook(partial(self._arrived, number))
        self._sizes = [len(bucket) for bucket in buckets]
        # gradients of each bucket that the last backward pass has not come to; empty before that
        self._missing: list[int] = []
        self._sent: list[dist.Work] = []

    def begin_micro_batch(self, last: bool) -> None:
        """last: no other of this update follows, so its gradients are sent, with what the ones before it have added to them."""
        self._missing = list(self._sizes) if last else []

    def _arrived(self, number: int, parameter: torch.Tensor) -> None:
        """The backward pass has added to a gradient of this bucket."""
        if self._missing:
            self._missing[number] -= 1
            while len(self._sent) < len(self.sums) and self._missing[len(self._sent)] == 0:
                self._send()

    def _send(self) -> None:
        work = dist.all_reduce(self.sums[len(self._sent)], async_op=True)
        assert work is not None
        self._sent.append(work)

    def finish(self, message: torch.Tensor) -> torch.Tensor:
        """Make every gradient the sum over the ranks; returns the sum of the messages (1-d)."""
        # Those with parameters that this rank's last micro-batch has not reached.
        while len(self._sent) < len(self.sums):
            self._send()
        for work in self._sent:
            work.wait()
        self._sent.clear()
        self._missing = []
        dist.all_reduce(message)
        return message


SumsGradients = SharedReducer | DistributedReducer


def make_reducer(model: nn.Module, ranks: Ranks) -> SumsGradients:
    """What adds up gradients over the ranks. A collective: all ranks must call it. They get the weights of rank 0."""
    # One seed gives the same weights on machines of one kind only.
    for tensor in (*model.parameters(), *model.buffers()):
        dist.broadcast(tensor.data, src=0)
    # in the order of the model, which is that of all ranks
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return SharedReducer(parameters, ranks) if ranks.memory is not None else DistributedReducer(parameters)
