"""Cross-entropy of a large vocabulary without the logits of a whole batch in memory."""

import torch

from model.products import compute_dtype

CHUNK_ROWS = 2048


def logit_gradients(logits, targets):
    """logits [n, V], targets [n] -> (cross-entropy summed over the targets, its gradient for the logits, in their dtype)."""
    scores = logits.float()
    top = scores.amax(dim=-1, keepdim=True)
    powers = (scores - top).exp_()
    total = powers.sum(dim=-1, keepdim=True)
    kept, at = (targets != -100).unsqueeze(1), targets.clamp(min=0).unsqueeze(1)
    loss = ((total.log() + top - scores.gather(1, at)) * kept).sum()
    ids = torch.arange(logits.shape[1], device=logits.device, dtype=torch.int32)
    one_hot = ids == at.int()  # not a scatter, which the compiler cannot fuse with the loop
    return loss, powers.mul_(kept / total).sub_(one_hot * kept.float()).to(logits.dtype)


def chunked_cross_entropy(hidden, weight, targets, logit_gradients=logit_gradients):
    """hidden [N, H], weight [V, H], targets [N] (-100: none) -> cross-entropy summed over the targets, 0-d fp32.

    The product runs in autocast's dtype, the loss in fp32; at most CHUNK_ROWS rows of logits exist at a time.
    logit_gradients: the function above, compiled or not.
    """
    return _ChunkedCrossEntropy.apply(hidden, weight, targets, compute_dtype(hidden), logit_gradients)


class _ChunkedCrossEntropy(torch.autograd.Function):
    """Takes each chunk's gradients while its logits are there, so the backward pass does not compute them again."""

    @staticmethod
    def forward(ctx, hidden, weight, targets, dtype, logit_gradients):
        half_weight, total = weight.to(dtype), hidden.new_zeros((), dtype=torch.float32)
        wanted = ctx.needs_input_grad[0] or ctx.needs_input_grad[1]
        grad_hidden = torch.empty_like(hidden) if wanted else None
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if wanted else None
        with torch.autocast(hidden.device.type, enabled=False):
            for start in range(0, len(hidden), CHUNK_ROWS):
                rows = slice(start, start + CHUNK_ROWS)
                h = hidden[rows].to(dtype)
                loss, d_logits = logit_gradients(h @ half_weight.T, targets[rows])
                total += loss
                if wanted:
                    grad_hidden[rows] = d_logits @ half_weight
                    grad_weight += d_logits.T @ h
        ctx.save_for_backward(grad_hidden, grad_weight)
        return total

    @staticmethod
    def backward(ctx, grad):
        grad_hidden, grad_weight = ctx.saved_tensors
        return grad_hidden * grad, grad_weight * grad, None, None, None
