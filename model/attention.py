"""Attention of packed training rows: each position sees the earlier ones of its document.

`Attention.forward` in model_minimind.py calls PyTorch's SDPA, which is the reference. On the CPU SDPA computes what the
mask forbids, at a twentieth of the matrix-product rate: there, `block_attention` lets each block of queries meet only
the keys up to its end, as batched products, and the compiler fuses the softmax between them. On CUDA, FlexAttention
skips what the documents' mask forbids.

Shape letters: B rows, T positions, D head dimension, N query heads, G key/value heads, R = N/G query heads that share
one, W positions of a block, S keys that a block may see.
"""

import torch

BLOCKS = 4  # of queries in a row: with many the products are small, with few half of them is masked; 8 gain nothing


def document_mask(document_ids):
    """document_ids [B, T] -> bool [B, 1, T, T], True where a position sees another. Padding sees padding: no row is empty."""
    T = document_ids.shape[1]
    same = document_ids.unsqueeze(2) == document_ids.unsqueeze(1)
    return (same & torch.ones(T, T, dtype=torch.bool, device=document_ids.device).tril()).unsqueeze(1)


def additive_mask(visible, dtype):
    """visible [..., T, T] bool -> 0 where True, -inf elsewhere. The compiler vectorises a sum, but not a choice by bool."""
    return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill(~visible, float("-inf"))


def block_attention(q, k, v, mask):
    """q [B, N, T, D], k, v [B, G, T, D], mask [B or 1, 1, T, T] of `additive_mask` -> [B, N, T, D].

    The mask forbids all later keys. Query heads that share a key head become rows of one product, ordered by position.
    """
    B, N, T, D = q.shape
    G = k.shape[1]
    q = q.view(B, G, N // G, T, D).transpose(2, 3).reshape(B * G, T * (N // G), D)
    out = _BlockAttention.apply(q, k.reshape(B * G, T, D), v.reshape(B * G, T, D), mask.expand(B, -1, -1, -1))
    return out.view(B, G, T, N // G, D).transpose(2, 3).reshape(B, N, T, D)


def blocks(T, R):
    """(positions of a block, its rows in q, the number of keys it sees) for each block."""
    width = -(-T // BLOCKS)
    for start in range(0, T, width):
        end = min(start + width, T)
        yield slice(start, end), slice(start * R, end * R), end


class _BlockAttention(torch.autograd.Function):
    """exp(scores - max) is kept without its division by the row's sum: dividing the [W*R, D] outputs is less work."""

    @staticmethod
    def forward(ctx, q, k, v, mask):
        """q [B*G, T*R, D], k, v [B*G, T, D], mask [B, 1, T, T] -> [B*G, T*R, D]."""
        B, T, R = len(mask), k.shape[1], q.shape[1] // k.shape[1]
        scale, powers, sums, outs = q.shape[2] ** -0.5, [], [], []
        for positions, rows, S in blocks(T, R):
            scores = q[:, rows] @ k[:, :S].transpose(1, 2)  # [B*G, W*R, S]
            scores = scores.view(B, -1, positions.stop - positions.start, R, S).float() * scale
            scores = scores + mask[:, :, positions, None, :S].float()
            power = (scores - scores.amax(dim=-1, keepdim=True)).exp().to(q.dtype).view(len(q), -1, S)
            sums.append(power.float().sum(dim=-1, keepdim=True))  # of the rounded ones, which meet v below
            outs.append(((power @ v[:, :S]).float() / sums[-1]).to(q.dtype))
            powers.append(power)
        out, sums = torch.cat(outs, dim=1), torch.cat(sums, dim=1)
        ctx.save_for_backward(q, k, v, out, sums, *powers)
        return out

    @staticmethod
    def backward(ctx, grad):
        """d scores = p * (d p - sum(d p * p)), where p = power / sum and sum(d p * p) = sum over D of (d out * out)."""
        q, k, v, out, sums, *powers = ctx.saved_tensors
        T, R, scale = k.shape[1], q.shape[1] // k.shape[1], q.shape[2] ** -0.5
        grad = grad.float() / sums
        mean = (grad * out.float()).sum(dim=-1, keepdim=True)  # [B*G, T*R, 1]
        grad = grad.to(q.dtype)
        d_q, d_k, d_v = [], torch.zeros_like(k, dtype=torch.float32), torch.zeros_like(v, dtype=torch.float32)
        for (_, rows, S), power in zip(blocks(T, R), powers, strict=True):
            d_power = (grad[:, rows] @ v[:, :S].transpose(1, 2)).float()
            d_scores = (power.float() * (d_power - mean[:, rows]) * scale).to(q.dtype)
            d_q.append(d_scores @ k[:, :S])
            d_k[:, :S] += d_scores.transpose(1, 2) @ q[:, rows]
            d_v[:, :S] += power.transpose(1, 2) @ grad[:, rows]
        return torch.cat(d_q, dim=1), d_k.to(k.dtype), d_v.to(v.dtype), None


def flex_mask(document_ids):
    """The FlexAttention BlockMask that says what `document_mask` does."""
    from torch.nn.attention.flex_attention import create_block_mask

    def visible(b, head, query, key):
        return (query >= key) & (document_ids[b, query] == document_ids[b, key])

    B, T = document_ids.shape
    return create_block_mask(visible, B, None, T, T, device=document_ids.device)


def flex_attend(q, k, v, mask):
    """As `block_attention`, with the mask of `flex_mask`; to be called from compiled code."""
    from torch.nn.attention.flex_attention import flex_attention

    return flex_attention(q, k, v, block_mask=mask, enable_gqa=True)


def flex_works(config, device):
    """Whether FlexAttention compiles and differentiates here, tried on one small row of the model's heads."""
    shape = (config.num_attention_heads, config.num_key_value_heads, config.num_key_value_heads)
    try:
        q, k, v = (
            torch.randn(1, heads, 256, config.head_dim, device=device, dtype=torch.bfloat16, requires_grad=True)
            for heads in shape
        )
        mask = flex_mask(torch.zeros(1, 256, dtype=torch.long, device=device))
        torch.compile(flex_attend, dynamic=False)(q, k, v, mask).sum().backward()
        return bool(q.grad.isfinite().all())
    except Exception:  # whatever the compiler raises for a GPU or a head size that it does not know
        return False
