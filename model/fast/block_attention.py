"""Attention of packed training rows on a CPU, in blocks of queries.

PyTorch's attention on a CPU computes every score, at a twentieth of the rate of a plain matrix product, and then drops
the masked ones. Here each row is cut into a few blocks of queries. A block needs only the keys up to its end, so about
3/8 of the scores are never computed. The rest are batched products, and the compiler fuses the softmax between them
into one loop.

The reference in the tests is PyTorch's own with a mask, as in `Backend.attend` (model/backend.py).

Shape letters: B rows, T positions, D head dimension, N query heads, G key/value heads, R = N/G query heads that share
one, W positions of a block, S keys that a block may see.
"""

from typing import Any

import torch

# Blocks of queries per row: more make the products small, fewer compute more masked scores. 8 were no faster.
BLOCKS = 4


def block_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """q [B, N, T, D], k and v [B, G, T, D], additive mask [B or 1, 1, T, T] -> [B, N, T, D].

    The mask must hide all later keys: they are skipped unread.
    """
    B, N, T, D = q.shape
    G = k.shape[1]
    R = N // G
    width = -(-T // BLOCKS)

    # The query heads that share a key head become rows of one product, ordered by position: row w * R + r.
    by_position = q.view(B, G, R, T, D).transpose(2, 3)  # [B, G, T, R, D]
    query_blocks = [block.reshape(B * G, -1, D) for block in by_position.split(width, dim=2)]  # [B*G, W*R, D]
    # [B, 1, W, S]: a block needs the keys up to its end.
    mask_blocks = [block[..., : (i + 1) * width] for i, block in enumerate(mask.split(width, dim=2))]

    outputs = _BlockAttention.apply(k.reshape(B * G, T, D), v.reshape(B * G, T, D), mask_blocks, *query_blocks)
    outputs = [block.view(B, G, -1, R, D) for block in outputs]
    return torch.cat(outputs, dim=2).transpose(2, 3).reshape(B, N, T, D)


class _BlockAttention(torch.autograd.Function):
    """Softmax attention of each block, with a backward pass that keeps the probabilities.

    For a query, exp_score = exp(score - largest score), and denominator = the sum of its exp_scores over the keys.
    Attention is sum(exp_score * v) / denominator. The output is divided and not the exp_scores: it has D numbers per
    query, they have S.
    """

    @staticmethod
    def forward(
        ctx: Any, k: torch.Tensor, v: torch.Tensor, masks: list[torch.Tensor], *queries: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """k, v [B*G, T, D]; for each block a mask [B, 1, W, S] and queries [B*G, W*R, D] -> [B*G, W*R, D] each."""
        scale = k.shape[2] ** -0.5
        outputs = []
        denominators = []
        all_exp_scores = []
        for q, mask in zip(queries, masks, strict=True):
            B, _, W, S = mask.shape
            R = q.shape[1] // W
            scores = q @ k[:, :S].transpose(1, 2)  # [B*G, W*R, S]
            scores = scores.view(B, -1, W, R, S).float() * scale + mask.unsqueeze(3).float()
            exp_scores = (scores - scores.amax(dim=-1, keepdim=True)).exp().to(q.dtype).view(len(q), -1, S)
            # Summed after rounding, because v is multiplied by the rounded ones.
            denominator = exp_scores.float().sum(dim=-1, keepdim=True)
            outputs.append(((exp_scores @ v[:, :S]).float() / denominator).to(q.dtype))
            denominators.append(denominator)
            all_exp_scores.append(exp_scores)
        ctx.n_blocks = len(queries)
        ctx.save_for_backward(k, v, *queries, *outputs, *denominators, *all_exp_scores)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """With p = exp_score / denominator: d score = p * (d p - sum over keys of d p * p).

        That sum over S keys equals the sum over D of (d output * output), which is shorter. The code divides d output by
        the denominator first, so that d score = exp_score * (scaled d output @ v^T - sum over D of scaled d output * output).
        """
        k, v, *saved = ctx.saved_tensors
        n = ctx.n_blocks
        queries = saved[:n]
        outputs = saved[n : 2 * n]
        denominators = saved[2 * n : 3 * n]
        all_exp_scores = saved[3 * n :]
        scale = k.shape[2] ** -0.5
        d_queries = []
        # Every block adds to the gradients of the keys that it sees, in fp32.
        d_k = torch.zeros_like(k, dtype=torch.float32)
        d_v = torch.zeros_like(v, dtype=torch.float32)
        for q, output, denominator, exp_scores, grad in zip(
            queries, outputs, denominators, all_exp_scores, grads, strict=True
        ):
            S = exp_scores.shape[2]
            scaled = grad.float() / denominator
            row_sum = (scaled * output.float()).sum(dim=-1, keepdim=True)  # [B*G, W*R, 1]
            d_output = scaled.to(q.dtype)
            d_exp_scores = (d_output @ v[:, :S].transpose(1, 2)).float()
            d_scores = (exp_scores.float() * (d_exp_scores - row_sum) * scale).to(q.dtype)
            d_queries.append(d_scores @ k[:, :S])
            d_k[:, :S] += d_scores.transpose(1, 2) @ q
            d_v[:, :S] += exp_scores.transpose(1, 2) @ d_output
        return d_k.to(k.dtype), d_v.to(v.dtype), None, *d_queries
