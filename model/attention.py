"""Attention masks, and attention of packed training rows: each position sees the earlier ones of its document.

`Attention.forward` in model_minimind.py calls PyTorch's SDPA, which is the reference. On the CPU SDPA computes what the
mask forbids, at a twentieth of the matrix-product rate: there, `block_attention` lets each block of queries meet only
the keys up to its end, as batched products, and the compiler fuses the softmax between them. On CUDA, FlexAttention
skips what the documents' mask forbids.

Shape letters: B rows, T positions, D head dimension, N query heads, G key/value heads, R = N/G query heads that share
one, W positions of a block, S keys that a block may see.
"""

import torch
import torch.nn.functional as F

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
    G, width = k.shape[1], -(-T // BLOCKS)
    q = q.view(B, G, N // G, T, D).transpose(2, 3)  # [B, G, T, R, D]
    qs = [block.reshape(B * G, -1, D) for block in q.split(width, dim=2)]
    masks = [block[..., : min(i * width, T)] for i, block in enumerate(mask.split(width, dim=2), 1)]  # [B, 1, W, S]
    outs = _BlockAttention.apply(k.reshape(B * G, T, D), v.reshape(B * G, T, D), masks, *qs)
    outs = [block.view(B, G, -1, N // G, D) for block in outs]
    return torch.cat(outs, dim=2).transpose(2, 3).reshape(B, N, T, D)


class _BlockAttention(torch.autograd.Function):
    """exp(scores - max) is kept without its division by the row's sum: dividing the [W*R, D] outputs is less work."""

    @staticmethod
    def forward(ctx, k, v, masks, *qs):
        """k, v [B*G, T, D]; for each block a mask [B, 1, W, S] and q [B*G, W*R, D] -> out [B*G, W*R, D]."""
        ctx.n, scale = len(qs), k.shape[2] ** -0.5
        outs, sums, powers = [], [], []
        for q, mask in zip(qs, masks, strict=True):
            B, _, W, S = mask.shape
            scores = q @ k[:, :S].transpose(1, 2)  # [B*G, W*R, S]
            scores = scores.view(B, -1, W, q.shape[1] // W, S).float() * scale + mask.unsqueeze(3).float()
            power = (scores - scores.amax(dim=-1, keepdim=True)).exp().to(q.dtype).view(len(q), -1, S)
            sums.append(power.float().sum(dim=-1, keepdim=True))  # of the rounded ones, which meet v below
            outs.append(((power @ v[:, :S]).float() / sums[-1]).to(q.dtype))
            powers.append(power)
        ctx.save_for_backward(k, v, *qs, *outs, *sums, *powers)
        return tuple(outs)

    @staticmethod
    def backward(ctx, *grads):
        """d scores = p * (d p - sum(d p * p)), where p = power / sum and sum(d p * p) = sum over D of (d out * out)."""
        k, v, *saved = ctx.saved_tensors
        qs, outs, sums, powers = (saved[i * ctx.n : (i + 1) * ctx.n] for i in range(4))
        scale, d_qs = k.shape[2] ** -0.5, []
        d_k, d_v = torch.zeros_like(k, dtype=torch.float32), torch.zeros_like(v, dtype=torch.float32)
        for q, out, total, power, grad in zip(qs, outs, sums, powers, grads, strict=True):
            S = power.shape[2]
            grad = grad.float() / total
            mean = (grad * out.float()).sum(dim=-1, keepdim=True)  # [B*G, W*R, 1]
            grad = grad.to(q.dtype)
            d_power = (grad @ v[:, :S].transpose(1, 2)).float()
            d_scores = (power.float() * (d_power - mean) * scale).to(q.dtype)
            d_qs.append(d_scores @ k[:, :S])
            d_k[:, :S] += d_scores.transpose(1, 2) @ q
            d_v[:, :S] += power.transpose(1, 2) @ grad
        return d_k.to(k.dtype), d_v.to(v.dtype), None, *d_qs


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


def causal(T, S, past, device):
    """[T, S] bool: query i is at position past + i and sees the keys up to there."""
    return torch.arange(S, device=device) <= (torch.arange(T, device=device) + past).unsqueeze(1)


def visible_keys(padding, T, S, past, device):
    """padding [B, <=S] (0: padding) or None -> mask [B or 1, 1, T, S], or None where it is the plain causal one."""
    if padding is None and isinstance(past, int) and past == 0 and S == T:
        return None
    mask = causal(T, S, past, device).unsqueeze(0)
    if padding is not None:
        padding = F.pad(padding[:, :S].bool(), (0, S - min(S, padding.shape[1])))
        itself = torch.arange(S, device=device) == (torch.arange(T, device=device) + past).unsqueeze(1)
        mask = (mask & padding.unsqueeze(1)) | itself  # a padded query sees itself: a row without keys could give NaN
    return mask.unsqueeze(1)
