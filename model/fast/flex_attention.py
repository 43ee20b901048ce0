"""Attention of packed training rows on a GPU: FlexAttention skips blocks of keys that no query of a block may see.

PyTorch's module is imported lazily: it loads the compiler, which takes a second that a CPU run need not spend.

Shape letters: B rows, T positions, D head dimension, N query heads, G key/value heads.
"""

from typing import TYPE_CHECKING, cast

import torch
import torch.nn.functional as F

from common.wording import compiler_error_line
from model.config import MiniMindConfig

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask, FlexKernelOptions


# positions per block, FlexAttention's default
BLOCK = 128

# Tile sizes of its kernels, in positions, in the order in which they are tried; None: torch's own choice for the card.
# The latter can need more shared memory than there is: with heads of 96, which are padded to 128, three stages of tiles
# of 64 positions are 112 KB, and an RTX 3090 or 4090 has 99. Newer versions of torch then fall back to one stage.
TILES = (None, 64, 32)


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


def flex_attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: "BlockMask", tile: int | None = None
) -> torch.Tensor:
    """q [B, N, T, D], k and v [B, G, T, D] -> [B, N, T, D]. Call it from compiled code: it is slow in eager mode.

    tile: one of TILES.
    """
    from torch.nn.attention.flex_attention import flex_attention

    if tile is None:
        return flex_attention(q, k, v, block_mask=mask, enable_gqa=True)
    # queries (M) and keys (N) of a tile, in the forward pass and in the two halves of the backward pass
    options = {"fwd_BLOCK_M": tile, "fwd_BLOCK_N": tile, "num_stages": 1}
    for half in ("1", "2"):
        options[f"bwd_BLOCK_M{half}"] = tile
        options[f"bwd_BLOCK_N{half}"] = tile
    # torch's type lacks the names with a prefix, which its documentation allows.
    kernel_options = cast("FlexKernelOptions", options)
    return flex_attention(q, k, v, block_mask=mask, enable_gqa=True, kernel_options=kernel_options)


def working_tile(config: MiniMindConfig, device: torch.device, dtype: torch.dtype, T: int) -> tuple[int | None, str]:
    """Returns (the first of TILES that works here, why torch's own choice does not or "").

    Tried on one row of T positions with the model's heads, in the precision of the run. Errors: RuntimeError, one line, if
    none works.
    """
    kv_heads = config.num_key_value_heads
    reason = ""
    for tile in TILES:
        try:
            q, k, v = (
                torch.randn(1, heads, T, config.head_dim, device=device, dtype=dtype, requires_grad=True)
                for heads in (config.num_attention_heads, kv_heads, kv_heads)
            )
            mask = flex_mask(torch.zeros(1, T, dtype=torch.long, device=device))
            torch.compile(flex_attend, dynamic=False)(q, k, v, mask, tile).sum().backward()
            if all(tensor.grad is not None and tensor.grad.isfinite().all() for tensor in (q, k, v)):
                return tile, reason
            reason = reason or "its gradients are not finite"
        except Exception as error:
            # The compiler raises all kinds of errors for unknown GPUs and head sizes.
            reason = reason or compiler_error_line(error)
    raise RuntimeError(reason)
