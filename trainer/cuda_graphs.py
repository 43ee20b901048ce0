"""An update as two CUDA graphs: its kernels are recorded once, and from then on the host launches them all together.

A small update is a thousand kernels of a few microseconds each, and the host takes longer to launch one than the GPU to run it. One
graph is the forward and backward pass of a micro-batch, the other the end of an update: norm, clipping, optimiser, clearing.

A graph holds kernels and addresses, no Python. So whatever changes between replays is a tensor at a fixed address: the batch,
its counts and those of the update, the learning rates, the requests of this process. Gradients are accumulated in place. With
--cuda_graphs 0 an update takes its numbers from such tensors too, so the bits are the same with and without.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from common.wording import announce, compiler_error_line
from trainer.machine.ranks import Ranks

# a job's NamedTuple of tensors and numbers
Parts = Any
Replay = Callable[[], None]


def record(work: Callable[[], None]) -> Replay:
    """Record the kernels of work() without running them. Returns a function that launches them.

    Errors: RuntimeError if work() waits for the device; torch.OutOfMemoryError.
    """
    graph = torch.cuda.CUDAGraph()
    # torch.cuda.graph leaves its stream in use if it fails. thread_local: the writer of checkpoints may free pinned memory meanwhile.
    with torch.cuda.stream(torch.cuda.current_stream()), torch.cuda.graph(graph, capture_error_mode="thread_local"):
        work()
    return graph.replay


def may_record(
    wanted: bool, device: torch.device, ranks: Ranks, dtype: torch.dtype, recomputes: bool, dropout: float
) -> bool | None:
    """wanted, or None if the updates of a run do not all launch the same kernels. recomputes: --gradient_checkpointing, which keeps
    random states."""
    # float16's scaler has a state of its own, which is not restored, and dropout draws new numbers in each update.
    is_fixed = dtype is not torch.float16 and not recomputes and dropout == 0
    return wanted if device.type == "cuda" and ranks.world_size == 1 and is_fixed else None


class UpdateGraphs:
    """Computes micro-batches and ends updates for an Engine, by graphs from the second update on.

    accumulate(batch, totals): forward and backward pass. end_update(rates, requests): called after the last micro-batch, with
    a 0-d rate for each of groups. groups: of the optimisers; they become capturable. n_requests: length of requests.
    may_record: False: never record. state: returns all tensors that the two functions change.
    """

    def __init__(
        self,
        accumulate: Callable[[Parts, Parts], None],
        end_update: Callable[[Sequence[torch.Tensor], torch.Tensor], None],
        groups: Sequence[dict[str, Any]],
        n_requests: int,
        device: torch.device,
        state: Callable[[], list[torch.Tensor]],
        may_record: bool,
    ) -> None:
        self.accumulate = accumulate
        self.device = device
        self.state = state
        self.may_record = may_record
        for group in groups:
            if "capturable" in group:
                group["capturable"] = True
        # rates of the groups, then requests
        self.numbers = torch.zeros(len(groups) + n_requests, device=device)
        rates = self.numbers[: len(groups)].unbind()
        requests = self.numbers[len(groups) :]
        self.end_update = lambda: end_update(rates, requests)
        # Updates done. The first one runs without graphs: it compiles, and creates the optimiser's moments.
        self.updates = 0
        # inputs of the micro-batch graph
        self.batch: Parts = None
        self.totals: Parts = None
        self.replay_micro_batch: Replay | None = None

    def compute(self, batch: Parts, totals: Parts) -> None:
        """Forward and backward pass of a micro-batch that is on the device."""
        # The numbers among batch and totals become 0-d float32 tensors on the device, by one copy.
        parts = [*batch, *totals]
        numbers = [part for part in parts if not isinstance(part, torch.Tensor)]
        on_device = iter(pinned_numbers(numbers, self.device).to(self.device, non_blocking=True).unbind())
        parts = [part if isinstance(part, torch.Tensor) else next(on_device) for part in parts]
        batch, totals = type(batch)(*parts[: len(batch)]), type(totals)(*parts[len(batch) :])
        # At the start of the second update
        if self.may_record and self.updates and self.replay_micro_batch is None:
            self._record(batch, totals)
        shapes = [part.shape for part in batch]
        if self.replay_micro_batch is None or shapes != [part.shape for part in self.batch]:
            self.accumulate(batch, totals)
            return
        torch._foreach_copy_([*self.batch, *self.totals], [*batch, *totals])
        self.replay_micro_batch()

    def update(self, rates: Sequence[float], requests: Sequence[float]) -> None:
        """End an update. rates: of the optimisers' groups."""
        self.numbers.copy_(pinned_numbers([*rates, *requests], self.device), non_blocking=True)
        self.end_update()
        self.updates += 1

    def _record(self, batch: Parts, totals: Parts) -> None:
        """Record both graphs, and compare an update by them with one without, from the same state; it is restored."""
        state = self.state()
        why = ""
        before: list[torch.Tensor] = []
        try:
            before = [tensor.clone() for tensor in state]
            self.accumulate(batch, totals)
            self.end_update()
            plain = [tensor.clone() for tensor in state]
            torch._foreach_copy_(state, before)
            replay_micro_batch = record(lambda: self.accumulate(batch, totals))
            replay_end = record(self.end_update)
            replay_micro_batch()
            replay_end()
            # equal_nan: the norm of a skipped update may be NaN.
            if not all(torch.allclose(a, b, rtol=0, atol=0, equal_nan=True) for a, b in zip(state, plain, strict=True)):
                why = "an update with them gave other bits than one without"
        except RuntimeError as error:
            # includes torch.OutOfMemoryError. After a failure the end of the capture fails too, with a text of its own.
            why = compiler_error_line(error.__context__ or error)
        if before:
            torch._foreach_copy_(state, before)
        if why:
            self.may_record = False
            announce(f"training without CUDA graphs: {why}")
            return
        self.batch, self.totals = batch, totals
        self.replay_micro_batch = replay_micro_batch
        self.end_update = replay_end


def pinned_numbers(numbers: Sequence[float], device: torch.device) -> torch.Tensor:
    """The numbers in pinned memory: a copy to the device from other memory may wait for all work queued there."""
    return torch.tensor(numbers, dtype=torch.float32, pin_memory=device.type == "cuda")
