"""Two implementations of the routed experts, which the tests compare.

- `looped_experts` is the reference: every expert sees every token, which is E/K times the work.
- `grouped_experts` sorts the chosen slots by expert and computes each expert's rows once, in two grouped matrix
  products.

Shape letters: N tokens, H hidden, I intermediate, E routed experts, K experts per token, M rows of the sorted slots,
padding included.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from model.products import FeedForward, compute_dtype, is_plain

# maximum tokens of a decoding step that loops over the experts
FEW_TOKENS = 16

# Rows per expert are padded to a multiple of this: on the CPU each new number of rows has a kernel generated, which takes
# longer than its product.
ALIGNMENT = 64

# (experts, tokens [N, H], weights and chosen [N, K]) -> [N, H].
Mix = Callable[[Sequence[FeedForward], torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def choose_mix(experts: Sequence[FeedForward], tokens: torch.Tensor) -> Mix:
    """Returns the fastest implementation for tokens [N, H] in this precision and on this device."""
    if len(tokens) <= FEW_TOKENS and not torch.is_grad_enabled():
        # Decoding: gathering all experts' weights costs more than E products with a few rows.
        return looped_experts
    linears = [linear for expert in experts for linear in (expert.gate_proj, expert.up_proj, expert.down_proj)]
    if not all(map(is_plain, linears)):
        return looped_experts
    return grouped_experts if can_group(experts, tokens) else looped_experts


def can_group(experts: Sequence[FeedForward], tokens: torch.Tensor) -> bool:
    """Returns whether grouped_mm works, without blocking the host.

    It needs rows of whole 16 bytes. It works in bf16 on the CPU and some GPUs, and in fp32 on the CPU unless compiled.
    """
    dtype = compute_dtype(tokens)
    device = tokens.device
    is_aligned = all(size * dtype.itemsize % 16 == 0 for size in experts[0].gate_proj.weight.shape)
    if not is_aligned:
        return False
    if dtype == torch.float32:
        # The compiler's shape check of grouped_mm accepts bf16 only.
        return device.type == "cpu" and not torch.compiler.is_compiling()
    if dtype != torch.bfloat16:
        return False
    return device.type in ("cpu", "meta") or (device.type == "cuda" and has_grouped_kernel(device.index or 0))


def has_grouped_kernel(device_index: int) -> bool:
    """Returns whether a GPU computes grouped_mm in one kernel: H100, H200, B200 and the like.

    On others, and on AMD's, torch reads the row counts back to the host and computes one product per expert.
    """
    if torch.version.hip:
        return False
    major, minor = torch.cuda.get_device_capability(device_index)
    return (major, minor) == (9, 0) or major == 10


def looped_experts(
    experts: Sequence[FeedForward], tokens: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor
) -> torch.Tensor:
    """The reference: each expert computes every token, weighted 0 where it was not chosen. E/K times the work.

    tokens [N, H], weights and chosen [N, K] -> [N, H].
    """
    out = torch.zeros_like(tokens)
    for e, expert in enumerate(experts):
        share = (weights * (chosen == e)).sum(dim=-1, keepdim=True)  # [N, 1]
        out = out + share.type_as(tokens) * expert(tokens)
    return out


def grouped_experts(
    experts: Sequence[FeedForward], tokens: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor
) -> torch.Tensor:
    """`looped_experts` with the tokens sorted by expert: two grouped matrix products over the chosen slots."""
    # grouped_mm does not follow autocast.
    dtype = compute_dtype(tokens)
    alignment = ALIGNMENT if tokens.device.type == "cpu" else 1
    row_of_slot, slot_of_row, ends = dispatch(chosen, len(experts), alignment)
    gate_up, down = stacked_weights(experts, dtype)
    rows = _Dispatch.apply(tokens.to(dtype), row_of_slot, slot_of_row)  # [M, H]
    gate, up = F.grouped_mm(rows, gate_up.transpose(1, 2), offs=ends).chunk(2, dim=-1)
    routed = F.grouped_mm(F.silu(gate) * up, down.transpose(1, 2), offs=ends)
    return _Combine.apply(experts[0].dropout(routed), weights, row_of_slot, slot_of_row).type_as(tokens)


def stacked_weights(experts: Sequence[FeedForward], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """The weights of all experts: those of gate and up joined [E, 2I, H], and those of down [E, H, I]."""
    gate_up = torch.stack([torch.cat((e.gate_proj.weight, e.up_proj.weight)) for e in experts]).to(dtype)
    down = torch.stack([e.down_proj.weight for e in experts]).to(dtype)
    return gate_up, down


def dispatch(chosen: torch.Tensor, num_experts: int, alignment: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """chosen [N, K] -> the row of each slot among M rows sorted by expert, and the inverse.

    Each expert has a multiple of `alignment` rows, and M does not depend on the routing. Returns row_of_slot [N, K] and
    slot_of_row [M] (n * K + k of each row, N * K for a padding row) and ends [E] int32.
    """
    expert_of_slot = chosen.reshape(-1)
    device = chosen.device
    n = len(expert_of_slot)

    # The expert of each slot, and the slot's rank within its expert, from 1. A sort would do the same; a cumulative sum
    # over a table of E rows is faster, and the compiler can fuse it.
    is_of_expert = expert_of_slot == torch.arange(num_experts, device=device).unsqueeze(1)  # [E, N*K]
    rank = is_of_expert.cumsum(dim=1)

    # Each expert's rows start where those of the previous one end, padded to the alignment.
    sizes = _rounded_up(rank[:, -1], alignment)
    ends = sizes.cumsum(dim=0)
    starts = ends - sizes
    row_of_slot = (is_of_expert * (rank - 1 + starts.unsqueeze(1))).sum(dim=0)

    # The worst case: alignment - 1 padding rows for every expert. So M does not depend on the routing.
    M = _rounded_up(n + num_experts * (alignment - 1), alignment)
    slot_of_row = torch.full((M,), n, device=device).scatter(0, row_of_slot, torch.arange(n, device=device))
    # The last expert takes the remaining rows; they belong to no slot, and their results are not read.
    ends = torch.cat((ends[:-1], torch.full_like(ends[-1:], M)))
    return row_of_slot.view(chosen.shape), slot_of_row, ends.to(torch.int32)


def _rounded_up(n: Any, alignment: int) -> Any:
    """The next multiple of the alignment; n: an int or a tensor of them."""
    return -(-n // alignment) * alignment


class _Dispatch(torch.autograd.Function):
    """tokens [N, H] -> rows [M, H]. Both directions are gathers: a scatter-add would be slower and its order random."""

    @staticmethod
    def forward(ctx: Any, tokens: torch.Tensor, row_of_slot: torch.Tensor, slot_of_row: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(row_of_slot)
        K = row_of_slot.shape[1]
        # A padding row copies the last token.
        return tokens[(slot_of_row // K).clamp(max=len(tokens) - 1)]

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (row_of_slot,) = ctx.saved_tensors
        return _token_gradients(grad, row_of_slot), None, None


# A custom operator, for correct gradients on a GPU. The compiler would fuse this gather into the kernel of the norm's
# backward pass, and because of the gather that kernel would loop over a row twice: it stores its sums in the first loop
# and reads them in the second, without a barrier (https://github.com/pytorch/pytorch/pull/190519). Some threads then
# read stale values, and the gradients are wrong, differently each time.
@torch.library.custom_op("minimind::token_gradients", mutates_args=())
def _token_gradients(grad: torch.Tensor, row_of_slot: torch.Tensor) -> torch.Tensor:
    """grad [M, H] of the rows, row_of_slot [N, K] -> the sum over each token's rows, [N, H]."""
    return grad[row_of_slot].sum(dim=1, dtype=torch.float32).to(grad.dtype)


@_token_gradients.register_fake
def _(grad: torch.Tensor, row_of_slot: torch.Tensor) -> torch.Tensor:
    return grad.new_empty(len(row_of_slot), grad.shape[1])


class _Combine(torch.autograd.Function):
    """routed [M, H], weights [N, K] -> the weighted sum of each token's rows, [N, H] fp32."""

    @staticmethod
    def forward(
        ctx: Any, routed: torch.Tensor, weights: torch.Tensor, row_of_slot: torch.Tensor, slot_of_row: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(routed, weights, row_of_slot, slot_of_row)
        return (routed[row_of_slot].float() * weights.unsqueeze(-1)).sum(dim=1)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None, None]:
        routed, weights, row_of_slot, slot_of_row = ctx.saved_tensors
        N, K = row_of_slot.shape
        # Padding rows have the slot N * K: their weight is the 0 at the end.
        row_weights = torch.cat((weights.reshape(-1), weights.new_zeros(1)))[slot_of_row]
        d_routed = grad[(slot_of_row // K).clamp(max=N - 1)] * row_weights.unsqueeze(1)
        d_weights = (routed[row_of_slot].float() * grad.unsqueeze(1)).sum(dim=-1)
        return d_routed.to(routed.dtype), d_weights, None, None
