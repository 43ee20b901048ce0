"""Cross-entropy of a large vocabulary without the logits of a whole batch in memory."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from model.config import IGNORE
from model.products import compute_dtype

# Rows of logits that exist at a time: 52 MB in fp32 with a vocabulary of 6,400. Fewer make small products.
CHUNK_ROWS = 2048
# Upper bound of a CPU's logits where no gradient is wanted: a larger block takes as long for its memory as for its products.
EVALUATED_LOGITS = CHUNK_ROWS * 6400
# Each chunk is about ten launches, and a GPU computes 2,048 rows faster than the host launches the next ones.
GPU_CHUNK_ROWS = 16_384
# Upper bound of a chunk's fp32 logits, so that a large vocabulary does not fill a small card
GPU_CHUNK_BYTES = 512_000_000
FP32_BYTES = 4
# GPUs multiply whole tiles.
TILE = 128


def chunk_rows(device_type: str, vocab_size: int, trains: bool = True) -> int:
    """Maximum rows of logits at a time on a device of this type. trains: with their gradients."""
    if device_type != "cuda":
        return CHUNK_ROWS if trains else min(CHUNK_ROWS, max(TILE, EVALUATED_LOGITS // vocab_size))
    rows = GPU_CHUNK_BYTES // (FP32_BYTES * vocab_size) // TILE * TILE
    # Smaller chunks than those of a CPU would be slow, whatever the vocabulary is.
    return max(CHUNK_ROWS, min(GPU_CHUNK_ROWS, rows))


def loss_and_gradient(logits: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """logits [n, V], targets [n] -> (cross-entropy summed over the targets, its gradient for the logits, in their dtype).

    Computed in fp32: -log softmax(logits)[target] = log(denominator) + row_max - logit[target].
    """
    logits32 = logits.float()
    # Without it exp would overflow.
    row_max = logits32.amax(dim=-1, keepdim=True)
    exp_logits = (logits32 - row_max).exp_()
    denominator = exp_logits.sum(dim=-1, keepdim=True)
    has_target = (targets != IGNORE).unsqueeze(1)
    target_ids = targets.clamp(min=0).unsqueeze(1)
    loss = ((denominator.log() + row_max - logits32.gather(1, target_ids)) * has_target).sum()
    # softmax - one_hot, and 0 in rows without a target.
    factor = has_target / denominator
    if logits.device.type == "cpu":
        # One number a row, written after the loop: comparing every id would take a fifth of the loop, and uncompiled more.
        of_target = exp_logits.gather(1, target_ids) * factor - has_target.float()
        gradient = exp_logits.mul_(factor).to(logits.dtype)
        return loss, gradient.scatter_(1, target_ids, of_target.to(logits.dtype))
    ids = torch.arange(logits.shape[1], device=logits.device, dtype=torch.int32)
    # Compared, not scattered: the compiler cannot fuse a scatter with the loop, and a launch costs more.
    one_hot = ids == target_ids.int()
    gradient = exp_logits.mul_(factor).sub_(one_hot * has_target.float())
    return loss, gradient.to(logits.dtype)


LossAndGradient = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


class HeadSample(NamedTuple):
    """Ids that stand for the whole vocabulary in the loss of each row: all of its targets, and some drawn from the others.

    A drawn id counts as often as there are undrawn ones for each, so that the expected denominator of the softmax is the exact one.
    """

    ids: torch.Tensor  # int64 [sum of sizes], row after row
    log_counts: torch.Tensor  # fp32 [sum of sizes], added to the logits: 0 for a target's id
    targets: torch.Tensor  # int64 [B, T]: positions in the row's ids, or -100
    sizes: list[int]  # [B]: number of each row's ids


def chunked_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    loss_and_gradient: LossAndGradient = loss_and_gradient,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """hidden [N, H], weight [V, H], targets [N] (-100: none) -> cross-entropy summed over the targets, 0-d fp32.

    The product runs in autocast's dtype, the loss in fp32; at most `chunk_rows` rows of logits exist at a time.
    loss_and_gradient: the function above, compiled or not. bias [V]: added to the logits, without a gradient. Where no gradient is
    recorded none is computed: one product with the weight instead of three.
    """
    # Checked here: inside the Function's forward the gradient mode is always off, and `needs_input_grad` is True for
    # weights even under no_grad.
    needs_gradient = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    dtype = compute_dtype(hidden)
    if needs_gradient:
        return _ChunkedCrossEntropy.apply(hidden, weight, targets, dtype, loss_and_gradient, bias)
    total = hidden.new_zeros((), dtype=torch.float32)
    with torch.autocast(hidden.device.type, enabled=False):
        for rows, _, logits in _chunks(hidden, weight.to(dtype), bias, trains=False):
            total += F.cross_entropy(logits.float(), targets[rows], ignore_index=IGNORE, reduction="sum")
    return total


def _chunks(
    hidden: torch.Tensor, cast_weight: torch.Tensor, bias: torch.Tensor | None, trains: bool = True
) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor]]:
    """Yields (rows, hidden states, logits) of each chunk, in the dtype of the weight."""
    step = chunk_rows(hidden.device.type, len(cast_weight), trains)
    for start in range(0, len(hidden), step):
        rows = slice(start, start + step)
        h = hidden[rows].to(cast_weight.dtype)
        logits = h @ cast_weight.T
        yield rows, h, logits if bias is None else logits.add_(bias)


def _add_product(total: torch.Tensor, d_logits: torch.Tensor, h: torch.Tensor) -> None:
    """total [V, H] in fp32 += d_logits.T @ h, of d_logits [n, V] and h [n, H].

    float16 ends at 65,504. A sum over all rows of a GPU's chunk may be larger, and loss scaling does not help, since it is
    applied after this. So in float16 a product has fewer rows.
    """
    rows = CHUNK_ROWS if h.dtype is torch.float16 else len(h)
    for d_part, h_part in zip(d_logits.split(rows), h.split(rows), strict=True):
        total += d_part.T @ h_part


class _ChunkedCrossEntropy(torch.autograd.Function):
    """Computes each chunk's gradients while its logits exist, so the backward pass does not compute them again.

    The logits of a whole batch would be the largest tensor of the step; here only those of one chunk of rows exist.
    Autograd would keep them all, or compute them twice; here each chunk goes forward and backward at once. The loss is
    a sum, so the backward pass only multiplies these gradients by the gradient of that sum.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        targets: torch.Tensor,
        dtype: torch.dtype,
        loss_and_gradient: LossAndGradient,
        bias: torch.Tensor | None,
    ) -> torch.Tensor:
        """See `chunked_cross_entropy`; dtype: of the products."""
        cast_weight = weight.to(dtype)
        total = hidden.new_zeros((), dtype=torch.float32)
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight, dtype=torch.float32)
        with torch.autocast(hidden.device.type, enabled=False):
            for rows, h, logits in _chunks(hidden, cast_weight, bias):
                loss, d_logits = loss_and_gradient(logits, targets[rows])
                total += loss
                grad_hidden[rows] = d_logits @ cast_weight
                _add_product(grad_weight, d_logits, h)
        ctx.save_for_backward(grad_hidden, grad_weight)
        return total

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        grad_hidden, grad_weight = ctx.saved_tensors
        return grad_hidden * grad, grad_weight * grad, None, None, None, None
