"""Cross-entropy of a large vocabulary without the logits of a whole batch in memory."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from model.products import compute_dtype

# Rows of logits that exist at a time. With a vocabulary of 6,400 these take 52 MB in fp32; fewer make small products.
CHUNK_ROWS = 2048


class _Softmax(NamedTuple):
    """What the loss and its gradient share. kept and at [n, 1]: whether a row has a target, and which; -100 is 0 in `at`."""

    # 0-d: cross-entropy summed over the targets.
    loss: torch.Tensor
    # fp32 [n, V]: exp(score - highest score).
    powers: torch.Tensor
    # fp32 [n, 1]: their sum.
    total: torch.Tensor
    kept: torch.Tensor
    at: torch.Tensor


def _softmax(logits: torch.Tensor, targets: torch.Tensor) -> _Softmax:
    """logits [n, V], targets [n] -> the parts of -log(softmax(logits)[target]) = log(total) + top - score[target]."""
    scores = logits.float()
    top = scores.amax(dim=-1, keepdim=True)
    powers = (scores - top).exp_()
    total = powers.sum(dim=-1, keepdim=True)
    kept = (targets != -100).unsqueeze(1)
    at = targets.clamp(min=0).unsqueeze(1)
    loss = ((total.log() + top - scores.gather(1, at)) * kept).sum()
    return _Softmax(loss, powers, total, kept, at)


def logit_gradients(logits: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """logits [n, V], targets [n] -> (cross-entropy summed over the targets, its gradient for the logits, in their dtype)."""
    loss, powers, total, kept, at = _softmax(logits, targets)
    ids = torch.arange(logits.shape[1], device=logits.device, dtype=torch.int32)
    # Compared, not scattered: the compiler cannot fuse a scatter with the loop.
    one_hot = ids == at.int()
    # softmax - one_hot, and 0 in rows without a target.
    return loss, powers.mul_(kept / total).sub_(one_hot * kept.float()).to(logits.dtype)


LogitGradients = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


def chunked_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    logit_gradients: LogitGradients = logit_gradients,
) -> torch.Tensor:
    """hidden [N, H], weight [V, H], targets [N] (-100: none) -> cross-entropy summed over the targets, 0-d fp32.

    The product runs in autocast's dtype, the loss in fp32; at most CHUNK_ROWS rows of logits exist at a time.
    logit_gradients: the function above, compiled or not. Where no gradient is recorded none is computed: one product
    with the weight instead of three.
    """
    # Asked here: within the Function's forward the gradient mode is always off, and `needs_input_grad` says True of
    # weights under no_grad too.
    wanted = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    dtype = compute_dtype(hidden)
    if wanted:
        return _ChunkedCrossEntropy.apply(hidden, weight, targets, dtype, logit_gradients)
    total = hidden.new_zeros((), dtype=torch.float32)
    with torch.autocast(hidden.device.type, enabled=False):
        for rows, _, logits in _chunks(hidden, weight.to(dtype)):
            total += _softmax(logits, targets[rows]).loss
    return total


def _chunks(hidden: torch.Tensor, half_weight: torch.Tensor) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor]]:
    """(rows, their hidden states, their logits) of each chunk, in the dtype of the weight."""
    for start in range(0, len(hidden), CHUNK_ROWS):
        rows = slice(start, start + CHUNK_ROWS)
        h = hidden[rows].to(half_weight.dtype)
        yield rows, h, h @ half_weight.T


class _ChunkedCrossEntropy(torch.autograd.Function):
    """Takes each chunk's gradients while its logits are there, so the backward pass does not compute them again.

    The logits of a whole batch would be the largest tensor of the step. Cut into chunks of rows, only one chunk's are
    there. Autograd would keep them, or compute them twice; here each chunk goes forward and backward at once. The
    gradients are those of a sum, so the backward pass has only to multiply them with the gradient of that sum.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        targets: torch.Tensor,
        dtype: torch.dtype,
        logit_gradients: LogitGradients,
    ) -> torch.Tensor:
        """See `chunked_cross_entropy`; dtype: of the products."""
        half_weight = weight.to(dtype)
        total = hidden.new_zeros((), dtype=torch.float32)
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight, dtype=torch.float32)
        with torch.autocast(hidden.device.type, enabled=False):
            for rows, h, logits in _chunks(hidden, half_weight):
                loss, d_logits = logit_gradients(logits, targets[rows])
                total += loss
                grad_hidden[rows] = d_logits @ half_weight
                grad_weight += d_logits.T @ h
        ctx.save_for_backward(grad_hidden, grad_weight)
        return total

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        grad_hidden, grad_weight = ctx.saved_tensors
        return grad_hidden * grad, grad_weight * grad, None, None, None
