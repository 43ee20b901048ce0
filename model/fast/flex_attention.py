"""Attention of packed training rows on a GPU: FlexAttention skips blocks of keys that no query of a block may see.

PyTorch's module is imported only where it is used: it loads the compiler, which takes a second that a CPU need not spend.

Shape letters: B rows, T positions, D head dimension, N query heads, G key/value heads.
"""

from typing import TYPE_CHECKING, cast

import torch
import torch.nn.functional as F

from common.wording import reason_of
from model.config import MiniMindConfig

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask, FlexKernelOptions


# Positions of a block: FlexAttention's own default.
BLOCK = 128

# Positions of the tiles that its kernels work on, in the order in which they are tried; None: torch's own choice for the
# card. That choice can want more shared memory than there is: with heads of 96, which are padded to 128, three stages of
# tiles of 64 positions are 112 KB, and an RTX 3090 or 4090 has 99. Newer versions of torch then take one stage by
# themselves.
TILES = (None, 64, 32)


def flex_mask(document_ids: torch.Tensor) -> "BlockMask":
    """document_ids [B, T] -> the BlockMask that says what `document_mask` in model/backend.py does.

    The positions of a document must follow each other. torch's create_block_mask makes the same from all B x T x T pairs,
    which takes the host longer than the rest of a small micro-batch.
    """
    from torch.nn.attention.flex_attention import BlockMask

    starts = document_starts(document_ids)

    def visible(b: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return (key <= query) & (key >= starts[b, query])

    T = document_ids.shape[1]
    partial, full = visible_blocks(starts)
    # FlexAttention wants to know the keys of each query for the forward pass, and the queries of each key for the backward.
    of_queries_and_keys = torch.stack((partial, full, partial.mT, full.mT)).unsqueeze(2)  # [4, B, 1, blocks, blocks]
    counts = of_queries_and_keys.sum(dim=-1, dtype=torch.int32)
    # The numbers of the visible blocks first, rising, as create_block_mask has them.
    order = of_queries_and_keys.int().argsort(dim=-1, descending=True, stable=True).int()
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


def document_starts(document_ids: torch.Tensor) -> torch.Tensor:
    """document_ids [B, T] -> [B, T] int64: the position at which the document of each position begins."""
    T = document_ids.shape[1]
    begins = F.pad(document_ids[:, 1:] != document_ids[:, :-1], (1, 0), value=True)
    positions = torch.arange(T, device=document_ids.device)
    return torch.where(begins, positions, 0).cummax(dim=1).values


def visible_blocks(starts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """starts [B, T] of `document_starts` -> two bool [B, queries' blocks, keys' blocks].

    The first: blocks in which a query sees some key, but not each query every key. The second: those in which it does.
    """
    T = starts.shape[1]
    first_position = torch.arange(0, T, BLOCK, device=starts.device)  # [blocks], of each block
    first_key = first_position
    last_key = first_position + BLOCK - 1
    before = first_key < first_position.unsqueeze(1)  # [blocks, blocks]: a block of keys before that of the queries
    on_diagonal = first_key == first_position.unsqueeze(1)
    # Starts never fall along a row, so the first query of a block sees furthest back, and the last one least far.
    start_of_first = starts[:, ::BLOCK].unsqueeze(2)  # [B, blocks, 1]
    sees_some = before & (start_of_first <= last_key)
    # A row may end within its last block. To create_block_mask the positions beyond see nothing.
    whole = T // BLOCK
    start_of_last = starts[:, BLOCK - 1 :: BLOCK].unsqueeze(2)  # [B, whole blocks, 1]
    sees_all = before[:whole] & (start_of_last <= first_key)
    full = F.pad(sees_all, (0, 0, 0, len(first_position) - whole))
    return (sees_some & ~full) | on_diagonal, full


def flex_attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: "BlockMask", tile: int | None = None
) -> torch.Tensor:
    """q [B, N, T, D], k and v [B, G, T, D] -> [B, N, T, D]. To be called from compiled code: by itself it is slow.

    tile: one of TILES.
    """
    from torch.nn.attention.flex_attention import flex_attention

    if tile is None:
        return flex_attention(q, k, v, block_mask=mask, enable_gqa=True)
    # Queries (M) and keys (N) of a tile: of the forward pass, and of the two halves of the backward pass.
    options = {"fwd_BLOCK_M": tile, "fwd_BLOCK_N": tile, "num_stages": 1}
    for half in ("1", "2"):
        options[f"bwd_BLOCK_M{half}"] = tile
        options[f"bwd_BLOCK_N{half}"] = tile
    # torch's own type leaves out the names with a prefix, which its description allows.
    kernel_options = cast("FlexKernelOptions", options)
    return flex_attention(q, k, v, block_mask=mask, enable_gqa=True, kernel_options=kernel_options)


def working_tile(config: MiniMindConfig, device: torch.device, dtype: torch.dtype, T: int) -> tuple[int | None, str]:
    """(the first of TILES with which FlexAttention works here, why torch's own choice of tiles does not: "" where it does).

    Tried on one row of T positions with the model's heads, in the precision of the run. Errors: RuntimeError, one line, where
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
            # Whatever the compiler raises for a GPU or a head size that it does not know.
            reason = reason or reason_of(error)
    raise RuntimeError(reason)
