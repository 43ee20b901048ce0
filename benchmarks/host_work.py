"""The host's share of a micro-batch on a GPU: how many operations it launches for each 32 rows, and how long that takes.

    python benchmarks/host_work.py                    # 26 M, rows of 512: about half a minute, no GPU is needed
    python benchmarks/host_work.py --size 104m --merged 128

Nothing is computed: the tensors are fake ones, which have a shape and a type and no data. So what remains is what the host
does: it goes through the model, through autocast and through the backward pass, and dispatches one operation after the
other. A GPU gets each of them as a launch, of one kernel or a few.

What is measured: the dispatched operations without views and allocations, exactly; and the time to dispatch them, which is
longer than on a GPU, since a fake operation is worked out in Python. So only ratios of the times mean something.
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
from collections.abc import Callable
from dataclasses import dataclass
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
from model.fast.flex_attention import flex_mask
from model.loss import chunked_cross_entropy
from model.model_minimind import Block, MiniMindConfig, MiniMindForCausalLM
from trainer.pretrain.loss import pretrain_loss

# Rows that the figures are given for
UNIT = 32
# They only make room for a tensor, or ask where one is.
NO_LAUNCH = ("aten.empty", "aten.new_empty", "aten._unsafe_view", "prim.device")

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

    def document_mask(self, x: torch.Tensor, document_ids: torch.Tensor) -> Mask:
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


def measure(fields: dict[str, Any], case: Case, T: int, times: int) -> tuple[float, float]:
    """(operations, seconds) of the host for each UNIT rows."""
    with FakeTensorMode():
        compute = micro_batch(fields, case, T)
        # What is looked up once is not counted, as gradients that are made by the first micro-batch of an update.
        compute()
        with Launches() as launches:
            compute()
        seconds = []
        for _ in range(times):
            begin = time.perf_counter()
            compute()
            seconds.append(time.perf_counter() - begin)
    share = UNIT / case.rows
    return launches.count * share, min(seconds) * share


def main() -> None:
    args = host_work_parser().parse_args()
    torch.set_num_threads(1)
    cases = [
        Case(f"{args.rows} rows, mask from all pairs, loss in chunks of 2,048", args.rows, mask_of_pairs, small_chunks),
        Case("mask from the documents' starts", args.rows, flex_mask, small_chunks),
        Case("and the loss in the chunks of a GPU", args.rows, flex_mask, chunks_of_gpu),
        Case(f"and {args.merged} rows at once", args.merged, flex_mask, chunks_of_gpu),
    ]
    print(f"{args.size}, rows of {args.max_seq_len}; for each {UNIT} rows, forward and backward, nothing computed\n")
    print(f"{'':56} {'launches':>9} {'ratio':>6} {'host ms':>8} {'ratio':>6}")
    first: tuple[float, float] | None = None
    for case in cases:
        count, seconds = measure(STEP_SIZES[args.size], case, args.max_seq_len, args.times)
        first = first or (count, seconds)
        ratios = count / first[0], seconds / first[1]
        print(f"{case.name:56} {count:9,.0f} {ratios[0]:6.2f} {1000 * seconds:8,.0f} {ratios[1]:6.2f}", flush=True)


if __name__ == "__main__":
    main()
