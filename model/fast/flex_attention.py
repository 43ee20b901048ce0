"""Attention of packed training rows on a GPU: FlexAttention skips blocks of keys that no query of a block may see.

PyTorch's module is imported lazily: it loads the compiler, which takes a second that a CPU run need not spend.

Shape letters: B rows, T positions, D head dimension, N query heads, G key/value heads.
"""

from typing import TYPE_CHECKING

import torch

from common.wording import compiler_error_line
from model.config import ModelConfig
from model.masks import block_mask

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask


def flex_attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: "BlockMask") -> torch.Tensor:
    """q [B, N, T, D], k and v [B, G, T, D] -> [B, N, T, D]. Call it from compiled code: it is slow in eager mode."""
    from torch.nn.attention.flex_attention import flex_attention

    return flex_attention(q, k, v, block_mask=mask, enable_gqa=True)


def flex_fault(config: ModelConfig, device: torch.device, dtype: torch.dtype, T: int) -> str:
    """Returns in a line why `flex_attend` does not work here; "": it does.

    Tried on one row of T positions with the model's heads, in the precision of the run. With little shared memory (99 KB on an
    RTX 3090) torch itself takes kernels that need less.
    """
    kv_heads = config.num_key_value_heads
    try:
        q, k, v = (
            torch.randn(1, heads, T, config.head_dim, device=device, dtype=dtype, requires_grad=True)
            for heads in (config.num_attention_heads, kv_heads, kv_heads)
        )
        mask = block_mask(torch.zeros(1, T, dtype=torch.long, device=device))
        torch.compile(flex_attend, dynamic=False)(q, k, v, mask).sum().backward()
        is_finite = all(tensor.grad is not None and tensor.grad.isfinite().all() for tensor in (q, k, v))
    except Exception as error:
        # The compiler raises all kinds of errors for unknown GPUs and head sizes.
        return compiler_error_line(error)
    return "" if is_finite else "its gradients are not finite"
