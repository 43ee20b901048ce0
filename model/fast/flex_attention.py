"""Attention of packed training rows on a GPU: FlexAttention skips blocks of keys that no query of a block may see.

PyTorch's module is imported only where it is used: it loads the compiler, which takes a second that a CPU need not spend.

Shape letters: B rows, T positions, D head dimension, N query heads, G key/value heads.
"""

from typing import TYPE_CHECKING

import torch

from model.config import MiniMindConfig

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask


def flex_mask(document_ids: torch.Tensor) -> "BlockMask":
    """document_ids [B, T] -> the BlockMask that says what `document_mask` in model/attention.py does."""
    from torch.nn.attention.flex_attention import create_block_mask

    def visible(b: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return (query >= key) & (document_ids[b, query] == document_ids[b, key])

    B, T = document_ids.shape
    return create_block_mask(visible, B, None, T, T, device=document_ids.device)


def flex_attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: "BlockMask") -> torch.Tensor:
    """q [B, N, T, D], k and v [B, G, T, D] -> [B, N, T, D]. To be called from compiled code: by itself it is slow."""
    from torch.nn.attention.flex_attention import flex_attention

    return flex_attention(q, k, v, block_mask=mask, enable_gqa=True)


def flex_works(config: MiniMindConfig, device: torch.device) -> bool:
    """Whether FlexAttention compiles and differentiates here, tried on one small row with the model's heads."""
    kv_heads = config.num_key_value_heads
    try:
        q, k, v = (
            torch.randn(1, heads, 256, config.head_dim, device=device, dtype=torch.bfloat16, requires_grad=True)
            for heads in (config.num_attention_heads, kv_heads, kv_heads)
        )
        mask = flex_mask(torch.zeros(1, 256, dtype=torch.long, device=device))
        torch.compile(flex_attend, dynamic=False)(q, k, v, mask).sum().backward()
        return q.grad is not None and bool(q.grad.isfinite().all())
    except Exception:
        # Whatever the compiler raises for a GPU or a head size that it does not know: training goes on without.
        return False
