"""Sums of gradients over ranks that each have the whole model.

The engine calls `begin_micro_batch` before each micro-batch of an update, and `finish` once at its end. A sharded model
(trainer/sharding.py) sums its gradients itself.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

# called with gradients of this rank, before they are added to those of others; None: nobody looks
Watch = Callable[[torch.Tensor], None] | None


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

    watch: Watch = None

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        tables: Sequence[torch.Tensor] = (),
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        """parameters: in the same order on all ranks. tables: those with sparse gradients, of which only rows are sent."""
        self.tables = tables
        buckets: list[list[nn.Parameter]] = [[]]
        for parameter in reversed([p for p in parameters if all(p is not table for table in tables)]):
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
        for table in self.tables:
            assert table.grad is not None
            # of a rank without rows in this update
            gradient = table.grad if table.grad.is_sparse else table.grad.to_sparse(1)
            if self.watch is not None:
                self.watch(gradient.values())
            dist.all_reduce(gradient)
            table.grad = gradient
        dist.all_reduce(message)
        return message
