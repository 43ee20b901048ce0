"""Adding up gradients over the ranks while the backward pass still runs."""

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist

# Of gradients that go over the network in one piece: large enough that the network's latency does not count, small
# enough that most of the pieces travel while the backward pass computes the next ones.
BUCKET_BYTES = 25 << 20


class SumsGradients(Protocol):
    """What the engine asks for the sums of gradients over the ranks."""

    # Whether the micro-batch that is computed is the last one of its update: only then the gradients are complete.
    active: bool

    def finish(self, extra: torch.Tensor) -> torch.Tensor:
        """Wait until every gradient holds its sum, a missing one counting as zero; returns the sum of `extra` (1-d)."""


class Reducer:
    """Sums gradients over the ranks in buckets, each as soon as the backward pass has finished its parameters.

    The parameters are divided into buckets in the reverse of their order in the forward pass, because that is about the
    order in which the backward pass finishes their gradients. A hook on each parameter counts down its bucket; at zero
    the bucket's gradients are copied into one flat tensor, and its all-reduce starts in the background.

    All ranks must make the same calls in the same order, or they wait for each other for ever. But a rank may finish
    its parameters in another order, and a rank without rows in the last update finishes none. So the buckets start
    strictly one after the other, and `finish` starts those that are left. A gradient that is missing counts as zero.

    The plain version that the tests compare with is one all-reduce for each gradient after the backward pass.
    """

    def __init__(self, parameters: Sequence[torch.nn.Parameter], bucket_bytes: int = BUCKET_BYTES) -> None:
        """parameters: in about the order of the forward pass."""
        self.buckets = _buckets(parameters, bucket_bytes)
        self.active = False
        # (flat gradients, the all-reduce under way) of the buckets that have started.
        self._started: list[tuple[torch.Tensor, dist.Work]] = []
        # How many gradients each bucket still waits for.
        self._missing = [len(bucket) for bucket in self.buckets]
        for number, bucket in enumerate(self.buckets):
            for parameter in bucket:
                self._watch(parameter, number)

    def _watch(self, parameter: torch.nn.Parameter, number: int) -> None:
        """Have the backward pass report when it has added to the gradient of a parameter of this bucket."""

        def report(_: torch.Tensor) -> None:
            self._finished_one(number)

        parameter.register_post_accumulate_grad_hook(report)

    def _finished_one(self, number: int) -> None:
        """Count a gradient of this bucket, and start what is complete."""
        if not self.active:
            return
        self._missing[number] -= 1
        # The last bucket waits for `finish`, which has more to send with it.
        while len(self._started) < len(self.buckets) - 1 and not self._missing[len(self._started)]:
            self._start_next([])

    def _start_next(self, extra: list[torch.Tensor]) -> None:
        """Begin to add up the next bucket, and behind its gradients `extra`."""
        bucket = self.buckets[len(self._started)]
        flat = torch.cat([*(_gradient(parameter).reshape(-1) for parameter in bucket), *extra])
        self._started.append((flat, dist.all_reduce(flat, async_op=True)))

    def finish(self, extra: torch.Tensor) -> torch.Tensor:
        """Wait until every gradient holds its sum; returns the sum of `extra` (1-d), which the last bucket carries."""
        for bucket in self.buckets:
            for parameter in bucket:
                # A rank without rows in the ragged last update.
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
        while len(self._started) < len(self.buckets) - 1:
            self._start_next([])
        self._start_next([extra])
        rest = extra
        for bucket, (flat, work) in zip(self.buckets, self._started, strict=True):
            work.wait()
            rest = _copy_back(flat, [_gradient(parameter) for parameter in bucket])
        self.active = False
        self._started = []
        self._missing = [len(bucket) for bucket in self.buckets]
        return rest


def _buckets(parameters: Sequence[torch.nn.Parameter], bucket_bytes: int) -> list[list[torch.nn.Parameter]]:
    """The parameters from the last to the first, in groups of at most bucket_bytes or of one."""
    buckets: list[list[torch.nn.Parameter]] = [[]]
    size = 0
    for parameter in reversed(parameters):
        if size and size + parameter.nbytes > bucket_bytes:
            buckets.append([])
            size = 0
        buckets[-1].append(parameter)
        size += parameter.nbytes
    return buckets


def _gradient(parameter: torch.nn.Parameter) -> torch.Tensor:
    assert parameter.grad is not None
    return parameter.grad


def _copy_back(flat: torch.Tensor, gradients: list[torch.Tensor]) -> torch.Tensor:
    """Spread the flat tensor over the gradients; returns what is left of it."""
    sizes = [gradient.numel() for gradient in gradients]
    *parts, rest = flat.split([*sizes, len(flat) - sum(sizes)])
    shaped = [part.view_as(gradient) for part, gradient in zip(parts, gradients, strict=True)]
    torch._foreach_copy_(gradients, shaped)
    return rest


def broadcast_weights(parameters: Sequence[torch.nn.Parameter]) -> None:
    """Give all ranks the weights of rank 0. One seed gives the same ones on machines of one kind only."""
    for parameter in parameters:
        dist.broadcast(parameter.data, src=0)
