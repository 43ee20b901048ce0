"""Attention of packed training rows on a GPU: FlexAttention skips blocks of keys that no query of a block may see.

PyTorch's module is imported lazily: it loads the compiler, which takes a second that a CPU run need not spend.

Shape letters: B rows, T positions, D head dimension, N query heads, G key/value heads.
"""

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from common.wording import compiler_error_line
from model.config import MiniMindConfig

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask


# positions per block, FlexAttention's default
BLOCK = 128


def flex_mask(document_ids: torch.Tensor) -> "BlockMask":
    """document_ids [B, T] -> the BlockMask that is equivalent to `document_mask` in model/backend.py.

    Documents must be contiguous. torch's create_block_mask computes the same from all B x T x T pairs, which takes the
    host longer than the rest of a small micro-batch.
    """
    from torch.nn.attention.flex_attention import BlockMask

    T = document_ids.shape[1]
    # [B, T]: the position at which the document of each position starts
    begins = F.pad(document_ids[:, 1:] != document_ids[:, :-1], (1, 0), value=True)
    starts = torch.where(begins, torch.arange(T, device=document_ids.device), 0).cummax(dim=1).values

    def visible(b: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return (key <= query) & (key >= starts[b, query])

    partial, full = visible_blocks(starts)
    # FlexAttention needs the keys of each query for the forward pass, and the queries of each key for the backward pass.
    block_masks = torch.stack((partial, full, partial.mT, full.mT)).unsqueeze(2)  # [4, B, 1, blocks, blocks]
    counts = block_masks.sum(dim=-1, dtype=torch.int32)
    # Indices of the visible blocks first, ascending, as in create_block_mask.
    order = block_masks.int().argsort(dim=-1, descending=True, stable=True).int()
    return BlockMask(
        seq_lengths=(T, T),
        kv_num_blocks=counts[0],
        kv_indices=order[0],
        full_kv_num_blocks=counts[1],
        full_kv_indices=order[1],
        q_num_blocks=counts[2],
        q_indices=order[2],
        full_q_num_blocks=counts[3],
        full_q_indices=order[3],
        BLOCK_SIZE=(BLOCK, BLOCK),
        mask_mod=visible,
    )


def visible_blocks(starts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """starts [B, T], of the document of each position -> (partial, full), both bool [B, query blocks, key blocks].

    partial: some query sees some key, but not every query every key. full: every query sees every key.
    """
    T = starts.shape[1]
    first_position = torch.arange(0, T, BLOCK, device=starts.device)  # [blocks], of each block
    first_key = first_position
    last_key = first_position + BLOCK - 1
    before = first_key < first_position.unsqueeze(1)  # [blocks, blocks]: key block before query block
    on_diagonal = first_key == first_position.unsqueeze(1)
    # Starts never decrease along a row: the first query of a block sees furthest back, and the last one least far.
    start_of_first = starts[:, ::BLOCK].unsqueeze(2)  # [B, blocks, 1]
    sees_some = before & (start_of_first <= last_key)
    # A row may end within its last block. For create_block_mask positions beyond see nothing.
    whole = T // BLOCK
    start_of_last = starts[:, BLOCK - 1 :: BLOCK].unsqueeze(2)  # [B, whole blocks, 1]
    sees_all = before[:whole] & (start_of_last <= first_key)
    full = F.pad(sees_all, (0, 0, 0, len(first_position) - whole))
    return (sees_some & ~full) | on_diagonal, full


def flex_attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: "BlockMask") -> torch.Tensor:
    """q [B, N, T, D], k and v [B, G, T, D] -> [B, N, T, D]. Call it from compiled code: it is slow in eager mode."""
    from torch.nn.attention.flex_attention import flex_attention

    return flex_attention(q, k, v, block_mask=mask, enable_gqa=True)


def flex_fault(config: MiniMindConfig, device: torch.device, dtype: torch.dtype, T: int) -> str:
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
        mask = flex_mask(torch.zeros(1, T, dtype=torch.long, device=device))
        torch.compile(flex_attend, dynamic=False)(q, k, v, mask).sum().backward()
        is_finite = all(tensor.grad is not None and tensor.grad.isfinite().all() for tensor in (q, k, v))
    except Exception as error:
        # The compiler raises all kinds of errors for unknown GPUs and head sizes.
        return compiler_error_line(error)
    return "" if is_finite else "its gradients are not finite"
