"""Which keys a query sees: one rule, and the forms in which attention takes it.

The rule is `first_keys`: a query sees its document up to itself. So its keys are a range that ends with itself, and the first
of them says all. Every mask is made from it:

    dense_mask       bool, for PyTorch's attention
    additive_mask    0 and -inf, for attention in blocks of queries (model/fast/block_attention.py)
    block_mask       FlexAttention's, which skips whole blocks of keys (model/fast/flex_attention.py)
    cached_mask      bool, for a forward pass with cached keys or padding

Positions count along a row, cached keys included. They are not RoPE's `position_ids`, which restart in each document.

Shape letters: B rows, T queries, S keys (cached ones included).
"""

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from model.config import ModelConfig
from model.static_cache import StaticCache

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask
    from transformers import Cache

# A tensor, None for plain causal attention, or FlexAttention's BlockMask
Mask = Any
# positions per block of a BlockMask, FlexAttention's default
BLOCK = 128


def first_keys(config: ModelConfig, queries: torch.Tensor, document_ids: torch.Tensor | None = None) -> torch.Tensor:
    """The first key that each query sees [B or 1, T]: where its document starts. The last one is the query itself.

    queries: their positions [T]. document_ids [B, T]: equal within a document, whose positions follow each other; None: one
    document from position 0 on. Padding is a document too, so that no query is without keys.
    config: a field that changes what is seen is read here; neither generation has one.
    Never decreases along a row: `block_mask` relies on it.
    """
    if document_ids is None:
        starts = torch.zeros_like(queries).unsqueeze(0)
    else:
        begins = F.pad(document_ids[:, 1:] != document_ids[:, :-1], (1, 0), value=True)
        starts = torch.where(begins, queries, 0).cummax(dim=1).values
    return starts


def dense_mask(first: torch.Tensor) -> torch.Tensor:
    """first [B or 1, T] -> bool [B or 1, 1, T, T], True for visible keys."""
    positions = torch.arange(first.shape[1], device=first.device)
    return _in_range(first, positions, positions)


def _in_range(first: torch.Tensor, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """first [B or 1, T], positions of the queries [T] and keys [S] -> bool [B or 1, 1, T, S]."""
    mask = (keys >= first.unsqueeze(2)) & (keys <= queries.unsqueeze(1))
    return mask.unsqueeze(1)


def additive_mask(first: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """first [B or 1, T] -> [B or 1, 1, T, T]: 0 for visible keys, -inf for others.

    The compiler vectorises a sum, but not a choice between two values by a bool. The mask is made of whole rows: row f of
    `earlier` hides the keys before key f. In bfloat16 that takes half as long as a choice for each pair.
    """
    T = first.shape[1]
    hidden = torch.full((T, T), float("-inf"), dtype=dtype, device=first.device)
    earlier = hidden.tril(-1)
    return earlier.index_select(0, first.flatten()).view(len(first), T, T).add_(hidden.triu(1)).unsqueeze(1)


def cached_mask(
    config: ModelConfig, queries: torch.Tensor, cache: "Cache | StaticCache | None", padding: torch.Tensor | None
) -> torch.Tensor | None:
    """-> bool [B or 1, 1, T, S], or None for plain causal attention.

    queries: positions [T]. cache: without their keys as yet. padding [B, length of the text so far] (0: padding) or None.
    """
    T = len(queries)
    S, start = (T, 0) if cache is None else cache.get_mask_sizes(T, 0)
    if padding is None and S == T:
        return None
    keys = torch.arange(start, start + S, device=queries.device)
    mask = _in_range(first_keys(config, queries), queries, keys)
    if padding is not None:
        padding = padding[:, start : start + S]
        # A static cache is longer than the text so far.
        is_text = F.pad(padding.bool(), (0, S - padding.shape[1]))[:, None, None]
        # A padded query sees itself: softmax over a row without any key could give NaN.
        mask = (mask & is_text) | (keys == queries.unsqueeze(1))
    return mask


def block_mask(first: torch.Tensor) -> "BlockMask":
    """first [B, T] -> the BlockMask that is equivalent to `dense_mask`.

    torch's create_block_mask computes the same from all B x T x T pairs, which takes the host longer than the rest of a small
    micro-batch. Its module is imported here: it loads the compiler, which takes a second that a CPU run need not spend.
    """
    from torch.nn.attention.flex_attention import BlockMask

    T = first.shape[1]

    def is_visible(b: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return (key <= query) & (key >= first[b, query])

    partial, full = _visible_blocks(first)
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
        mask_mod=is_visible,
    )


def _visible_blocks(first: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """first [B, T] -> (partial, full), both bool [B, query blocks, key blocks].

    partial: some query sees some key, but not every query every key. full: every query sees every key.
    """
    T = first.shape[1]
    first_position = torch.arange(0, T, BLOCK, device=first.device)  # [blocks], of each block
    first_key = first_position
    last_key = first_position + BLOCK - 1
    before = first_key < first_position.unsqueeze(1)  # [blocks, blocks]: key block before query block
    on_diagonal = first_key == first_position.unsqueeze(1)
    # first never decreases along a row: the first query of a block sees furthest back, and the last one least far.
    first_of_first = first[:, ::BLOCK].unsqueeze(2)  # [B, blocks, 1]
    sees_some = before & (first_of_first <= last_key)
    # A row may end within its last block. For create_block_mask positions beyond see nothing.
    whole = T // BLOCK
    first_of_last = first[:, BLOCK - 1 :: BLOCK].unsqueeze(2)  # [B, whole blocks, 1]
    sees_all = before[:whole] & (first_of_last <= first_key)
    full = F.pad(sees_all, (0, 0, 0, len(first_position) - whole))
    return (sees_some & ~full) | on_diagonal, full
