"""The host's share of a micro-batch on a GPU: how many operations it launches, and how long that takes.

    python benchmarks/host_work.py                    # 26 M, rows of 512: about half a minute, no GPU is needed
    python benchmarks/host_work.py --size 104m --merged 128

Nothing is computed: the tensors are fake ones, which have a shape and a type and no data. So what remains is what the host
does: it goes through the model, through autocast and through the backward pass, and dispatches one operation after the
other. A GPU gets each of them as a launch, of one kernel or a few.

What is measured: the dispatched operations without views and allocations, exactly; and the time to dispatch them, which is
longer than on a GPU, since a fake operation is worked out in Python. So only ratios of the times mean something. The last
line is of another, larger micro-batch, which --batch_size auto takes on a GPU: only for each row it has less work.

The mask alone is timed with real tensors too, of one block of positions: so few that dispatching is all that takes time.
What is not: kernels. The blocks are the plain ones, operation by operation; torch.compile, which a run of minutes uses,
joins many of them into one, so that the blocks are a smaller part there. Attention counts as one operation, as with
FlexAttention. `make gpu` measures the real thing (benchmarks/gpu.py, section throughput).
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
if __package__ in (None, ""):
    sys.path[0] = str(ROOT)
# --help and wrong flags are answered before torch is imported, which takes seconds.
if __name__ == "__main__":
    from benchmarks.arguments import host_work_parser

    host_work_parser().parse_args()

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.arguments import STEP_SIZES, host_work_parser
from dataset.loader import Batch
from dataset.packing import Totals
from model import loss as loss_module
from model.backend import Layout, Mask
from model.chunks import CHUNK_ROWS, chunk_rows
from model.fast.compiled_backend import CompiledBackend
from model.fast.flex_attention import BLOCK, flex_mask
from model.loss import chunked_cross_entropy
from model.model_minimind import Block, MiniMindConfig, MiniMindForCausalLM
from trainer.machine.command_line import run_cli
from trainer.pretrain.loss import pretrain_loss

# Rows that micro-batches of other sizes are compared by
UNIT = 32
# They only make room for a tensor, or ask where one is.
NO_LAUNCH = ("aten.empty", "aten.new_empty", "aten._unsafe_view", "prim.device")

# Masks to time; the best counts.
MASK_TIMES = 50

MakeMask = Callable[[torch.Tensor], Mask]


@dataclass(frozen=True)
class Case:
    """A way to compute micro-batches. chunk_rows: see model/chunks.py."""

    name: str
    rows: int
    make_mask: MakeMask
    chunk_rows: Callable[[str, int], int]


class Launches(TorchDispatchMode):
    """Counts the operations that a GPU would be given."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view and not str(func).startswith(NO_LAUNCH):
            self.count += 1
        return func(*args, **(kwargs or {}))


class OneOperation(torch.autograd.Function):
    """In the place of attention: one operation forward, one for all gradients backward."""

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(k, v)
        return q.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, ...]:
        k, v = ctx.saved_tensors
        return grad.clone(), torch.empty_like(k), torch.empty_like(v)


class UncompiledBackend(CompiledBackend):
    """The order of work of the compiled backend for GPUs, with plain blocks and a plain loss."""

    def __init__(self, make_mask: MakeMask) -> None:
        super().__init__(Block)
        self.make_mask = make_mask

    def mask_of_documents(self, x: torch.Tensor, document_ids: torch.Tensor) -> Mask:
        return self.make_mask(document_ids)

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Mask, dropout: float) -> torch.Tensor:
        attended: torch.Tensor = OneOperation.apply(q, k, v)
        return attended

    def block(
        self, block: Block, x: torch.Tensor, layout: Layout, past_key_values: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        return block.compute(x, layout, past_key_values)

    def cross_entropy(self, hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return chunked_cross_entropy(hidden, weight, targets)


def mask_of_pairs(document_ids: torch.Tensor) -> Mask:
    """The mask as it was made before: from all pairs of positions."""
    from torch.nn.attention.flex_attention import create_block_mask

    def visible(b: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return (key <= query) & (document_ids[b, query] == document_ids[b, key])

    B, T = document_ids.shape
    return create_block_mask(visible, B, None, T, T, device=document_ids.device.type)


def small_chunks(device_type: str, vocab_size: int) -> int:
    return CHUNK_ROWS


def chunks_of_gpu(device_type: str, vocab_size: int) -> int:
    return chunk_rows("cuda", vocab_size)


def micro_batch(fields: dict[str, Any], case: Case, T: int) -> Callable[[], None]:
    """A function that computes one micro-batch, forward and backward. To be called and used under FakeTensorMode."""
    model = MiniMindForCausalLM(MiniMindConfig(**fields)).train()
    model.compiled_backend = UncompiledBackend(case.make_mask)
    numbers = torch.zeros(case.rows, T, dtype=torch.long)
    batch = Batch(numbers, numbers, numbers, numbers, case.rows * T, case.rows)
    totals = Totals(batch.n_targets, batch.n_documents)

    def compute() -> None:
        with mock.patch.object(loss_module, "chunk_rows", case.chunk_rows):
            with torch.autocast("cpu", torch.bfloat16):
                loss, _ = pretrain_loss(model, batch, totals)
            loss.backward()

    return compute


def host_seconds(work: Callable[[], object]) -> float:
    """Of this thread, which does all of it: what other programs take of the machine does not count."""
    start = time.thread_time()
    work()
    return time.thread_time() - start


def measure(fields: dict[str, Any], case: Case, T: int, times: int) -> tuple[int, float]:
    """(operations, seconds) of the host for a micro-batch."""
    with FakeTensorMode():
        compute = micro_batch(fields, case, T)
        # What is looked up once is not counted, as gradients that are made by the first micro-batch of an update.
        compute()
        with Launches() as launches:
            compute()
        best = min(host_seconds(compute) for _ in range(times))
    return launches.count, best


def mask_seconds(make_mask: MakeMask) -> float:
    """Of the host, for a mask of real tensors: of one block, so that computing takes nothing."""
    document_ids = torch.zeros(1, BLOCK, dtype=torch.long)
    return min(host_seconds(partial(make_mask, document_ids)) for _ in range(MASK_TIMES))


def table_of(found: Sequence[tuple[Case, int, float]]) -> list[str]:
    """Lines on (case, operations, seconds of the host) of micro-batches; the ratios are to the first, row for row."""
    lines = [
        f"{'':56} {'a micro-batch':>18}   for each {UNIT} rows",
        f"{'':56} {'launches':>9} {'host ms':>8} {'launches':>9} {'ratio':>6} {'host ms':>8} {'ratio':>6}",
    ]
    first, *_ = [(count * UNIT / case.rows, host * UNIT / case.rows) for case, count, host in found]
    for case, count, host in found:
        count_of_unit = count * UNIT / case.rows
        host_of_unit = host * UNIT / case.rows
        of_unit = f"{count_of_unit:9,.0f} {count_of_unit / first[0]:6.2f}"
        of_unit += f" {1000 * host_of_unit:8,.0f} {host_of_unit / first[1]:6.2f}"
        lines.append(f"{case.name:56} {count:9,} {1000 * host:8,.0f} {of_unit}")
    return lines


def summary(found: Sequence[tuple[Case, int, float]]) -> str:
    """What is less for one micro-batch of the same rows, and what only for each row."""
    (first, first_count, first_host), *_, (same, count, host), (merged, _, _) = found
    return (
        f"One micro-batch of {same.rows} rows has {count / first_count:.2f} of the launches and takes the host "
        f"{host / first_host:.2f} of the time. The last line is another micro-batch, of {merged.rows} rows: no less work for "
        f"the host, but once in the place of {merged.rows / first.rows:g} times"
    )


def main() -> None:
    args = host_work_parser().parse_args()
    torch.set_num_threads(1)
    cases = [
        Case(f"{args.rows} rows, mask from all pairs, loss in chunks of 2,048", args.rows, mask_of_pairs, small_chunks),
        Case("mask from the documents' starts", args.rows, flex_mask, small_chunks),
        Case("and the loss in the chunks of a GPU", args.rows, flex_mask, chunks_of_gpu),
        Case(f"and {args.merged} rows at once", args.merged, flex_mask, chunks_of_gpu),
    ]
    print(f"{args.size}, rows of {args.max_seq_len}; forward and backward, nothing computed\n")
    found = [(case, *measure(STEP_SIZES[args.size], case, args.max_seq_len, args.times)) for case in cases]
    print("\n".join([*table_of(found), "", summary(found), ""]))
    for name, make_mask in (("all pairs", mask_of_pairs), ("the documents' starts", flex_mask)):
        print(f"the mask alone, from {name}: {1000 * mask_seconds(make_mask):.2f} ms of the host")


if __name__ == "__main__":
    run_cli(main)
