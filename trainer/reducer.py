"""Sums of gradients over ranks that each have the whole model. `make_reducer` chooses one of two ways:

    SharedReducer        the processes of one command on a CPU (trainer/machine/cpu_ranks.py), in shared memory
    DistributedReducer   ranks of a launcher, by messages

The engine calls `begin_micro_batch` before each micro-batch of an update, and `finish` once at its end. A sharded model
(trainer/sharding.py) sums its gradients itself.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from trainer.machine.ranks import CACHE_LINE, Ranks

# maximum length of the message that goes with the gradients
MAX_MESSAGE_LENGTH = 64
# called with gradients of this rank, before they are added to those of others; None: nobody looks
Watch = Callable[[torch.Tensor], None] | None


class SharedReducer:
    """Sums fp32 gradients over the ranks in shared memory, after the backward pass of an update.

    The memory has a region per rank and one for the sum. Each holds all gradients end to end, and a message:

        region 0    gradients and message of rank 0
        region 1    gradients and message of rank 1
        sum         slice 0 | slice 1      slice r is added up by rank r

    1. Each rank copies its gradients into its own region, and waits until all have.
    2. Each adds up its own slice of all regions, in the order of the ranks. It waits until all have.
    3. Each copies the sum into its gradients. No wait is needed after that: a rank writes into its region again when step 2 is
       done on all, and into the sum after the next update's first wait, which the others reach when they are done with step 3.
    """

    keeps_gradients = False
    watch: Watch = None

    def __init__(self, parameters: Sequence[nn.Parameter], ranks: Ranks) -> None:
        """A collective. Errors: UserError if the system gives no memory."""
        assert ranks.memory is not None
        self.parameters = list(parameters)
        self.ranks = ranks
        self.memory = ranks.memory
        n = ranks.world_size
        sizes = [*(parameter.numel() for parameter in self.parameters), MAX_MESSAGE_LENGTH]
        # length of a slice: whole cache lines
        length = math.ceil(sum(sizes) / n / CACHE_LINE) * CACHE_LINE
        taken = self.memory.take(torch.float32.itemsize * (n + 1) * n * length)
        regions = taken.view(torch.float32).view(n + 1, n * length)
        shapes = [*(parameter.shape for parameter in self.parameters), (MAX_MESSAGE_LENGTH,)]

        def views_of(region: torch.Tensor) -> list[torch.Tensor]:
            parts = region[: sum(sizes)].split(sizes)
            return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]

        *self.own_gradients, self.own_message = views_of(regions[ranks.rank])
        *self.sums, self.message_sum = views_of(regions[n])
        *self.slices, self.slice_of_sum = regions[:, ranks.rank * length : (ranks.rank + 1) * length]

    def begin_micro_batch(self, last: bool) -> None:
        """No-op: copying during the backward pass would take CPU time from it."""

    def finish(self, message: torch.Tensor) -> torch.Tensor:
        """Replace every gradient by its sum over the ranks. Returns the sum of the messages (1-d)."""
        gradients = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        if self.watch is not None:
            for gradient in gradients:
                self.watch(gradient)
        torch._foreach_copy_(self.own_gradients, gradients)
        self.own_message[: len(message)] = message
        self.memory.wait(self.ranks.rank)
        torch.add(self.slices[0], self.slices[1], out=self.slice_of_sum)
        for part in self.slices[2:]:
            self.slice_of_sum += part
        self.memory.wait(self.ranks.rank)
        torch._foreach_copy_(gradients, self.sums)
        return self.message_sum[: len(message)].clone()


# Gradients sent over the network in one piece: large enough to make latency negligible, small enough that most pieces
# are sent while the backward pass computes the next ones.
BUCKET_BYTES = 25 << 20


class DistributedReducer:
    """Sums fp32 gradients over the ranks, during the last backward pass of an update.

    Gradients are stored end to end in buckets, in reverse order of the parameters, roughly that of a backward pass. A bucket is
    sent as soon as its gradients and the buckets before it are complete, so all ranks send in the same order.

    Not torch's DistributedDataParallel: it averages, while losses here are divided by the totals of the whole update; it waits for
    every parameter, even of an expert without tokens; and it rebuilds its buckets after the first backward pass. The rounding of
    sums over three and more ranks depends on the buckets, so a resume would end with different bits.
    """

    # Gradients are views of the buckets. They are zeroed: with None the next micro-batch would allocate new ones.
    keeps_gradients = True
    watch: Watch = None

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
        # gradients of each bucket that the last backward pass has not reached yet; empty before that
        self._missing: list[int] = []
        self._sent: list[dist.Work] = []

    def begin_micro_batch(self, last: bool) -> None:
        """last: the last one of its update, so the gradients accumulated so far are sent during its backward pass."""
        self._missing = list(self._sizes) if last else []

    def _arrived(self, number: int, parameter: torch.Tensor) -> None:
        """The backward pass has added to a gradient of this bucket."""
        if self._missing:
            self._missing[number] -= 1
            while len(self._sent) < len(self.sums) and self._missing[len(self._sent)] == 0:
                self._send()

    def _send(self) -> None:
        bucket = self.sums[len(self._sent)]
        if self.watch is not None:
            self.watch(bucket)
        work = dist.all_reduce(bucket, async_op=True)
        assert work is not None
        self._sent.append(work)

    def finish(self, message: torch.Tensor) -> torch.Tensor:
        """Replace every gradient by its sum over the ranks. Returns the sum of the messages (1-d)."""
        # buckets with parameters that this rank's last micro-batch did not reach
        while len(self._sent) < len(self.sums):
            self._send()
        for work in self._sent:
            work.wait()
        self._sent.clear()
        self._missing = []
        dist.all_reduce(message)
        return message


Reducer = SharedReducer | DistributedReducer


def make_reducer(model: nn.Module, ranks: Ranks) -> Reducer:
    """Returns the reducer for these ranks. A collective that also gives all ranks the weights of rank 0."""
    # A seed gives the same weights only on machines of the same kind.
    for tensor in (*model.parameters(), *model.buffers()):
        dist.broadcast(tensor.data, src=0)
    # in the order of the model, the same on all ranks
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return SharedReducer(parameters, ranks) if ranks.memory is not None else DistributedReducer(parameters)
