"""Cross-entropy of a large vocabulary without the logits of a whole batch in memory."""

import torch
import torch.nn.functional as F

from model.moe import compute_dtype

CHUNK_ROWS = 2048


def chunked_cross_entropy(hidden, weight, targets):
    """hidden [N, H], weight [V, H], targets [N] (-100: none) -> cross-entropy summed over the targets, 0-d fp32.

    The product runs in autocast's dtype, the loss in fp32; at most CHUNK_ROWS rows of logits exist at a time.
    """
    return _ChunkedCrossEntropy.apply(hidden, weight, targets, compute_dtype(hidden))


class _ChunkedCrossEntropy(torch.autograd.Function):
    """Takes each chunk's gradients while its logits are there, so the backward pass does not compute them again."""

    @staticmethod
    def forward(ctx, hidden, weight, targets, dtype):
        half_weight, total = weight.to(dtype), hidden.new_zeros((), dtype=torch.float32)
        wanted = ctx.needs_input_grad[0] or ctx.needs_input_grad[1]
        grad_hidden = torch.empty_like(hidden) if wanted else None
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if wanted else None
        with torch.autocast(hidden.device.type, enabled=False):
            for start in range(0, len(hidden), CHUNK_ROWS):
                rows, chunk = slice(start, start + CHUNK_ROWS), targets[start : start + CHUNK_ROWS]
                h = hidden[rows].to(dtype)
                log_probs = (h @ half_weight.T).float().log_softmax(dim=-1)
                total += F.nll_loss(log_probs, chunk, ignore_index=-100, reduction="sum")
                if wanted:  # d loss / d logits = softmax - one-hot target, 0 in rows without a target
                    kept = (chunk != -100).unsqueeze(1)
                    d_logits = log_probs.exp_().scatter_add_(
                        1, chunk.clamp(min=0).unsqueeze(1), -torch.ones_like(kept, dtype=torch.float32)
                    )
                    d_logits = (d_logits * kept).to(dtype)
                    grad_hidden[rows] = d_logits @ half_weight
                    grad_weight += d_logits.T @ h
        ctx.save_for_backward(grad_hidden, grad_weight)
        return total

    @staticmethod
    def backward(ctx, grad):
        grad_hidden, grad_weight = ctx.saved_tensors
        return grad_hidden * grad, grad_weight * grad, None, None
