"""How the forward pass is computed: the plain way, which is the reference. model/fast has faster ways to the same result.

A forward pass takes one backend, for all layers. The layers find it in their `Layout`, beside what else they share.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from transformers import Cache

from model.attention import document_mask, scaled_dot_product_attention
from model.loss import chunked_cross_entropy

ResultT = TypeVar("ResultT")
# What a mask is depends on the backend that made it: a tensor, None for plain causal, or FlexAttention's BlockMask.
Mask = Any


class HasCompute(Protocol):
    """A transformer block."""

    def compute(
        self, x: torch.Tensor, layout: "Layout", past_key_values: Cache | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """x [B, T, H] -> (x [B, T, H], auxiliary loss 0-d or None)"""


class Backend:
    """Plain PyTorch. Subclasses replace methods and must give the same results up to rounding.

    Shape letters: B rows, T positions, S keys, H hidden, D head dimension, N query heads, G key/value heads.
    """

    def mask(self, x: torch.Tensor, document_ids: torch.Tensor | None) -> Mask:
        """What `attend` takes as its mask, for embeddings x [B, T, H] and document_ids [B, T]; None: a document a row."""
        return None if document_ids is None else document_mask(document_ids)

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Mask, dropout: float) -> torch.Tensor:
        """q [B, N, T, D], k and v [B, G, S, D] -> [B, N, T, D]."""
        return scaled_dot_product_attention(q, k, v, mask, dropout)

    def block(
        self, block: HasCompute, x: torch.Tensor, layout: "Layout", past_key_values: Cache | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """What the block makes of x [B, T, H]. A hook: a compiled backend puts a compiled `Block.compute` here."""
        return block.compute(x, layout, past_key_values)

    def small(self, function: Callable[..., ResultT], *arguments: object) -> ResultT:
        """function(*arguments): some cheap operations in a row, before or behind the blocks. A hook, as `block` is.

        MiniMindModel.forward uses it twice: for the position tables (rope_tables), and for the last norm.
        """
        return function(*arguments)

    def cross_entropy(self, hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """hidden [B*T, H], weight of the head [V, H], targets [B*T] (-100: none) -> sum over the targets, 0-d fp32."""
        return chunked_cross_entropy(hidden, weight, targets)


PLAIN_BACKEND = Backend()


class Layout(NamedTuple):
    """What all layers have to know of the rows that they compute, and the way to compute them."""

    # Both [B or 1, 1, T, D]: see `rope_tables`.
    cos: torch.Tensor
    sin: torch.Tensor
    # Which keys each query sees, as `backend` takes it.
    mask: Mask
    # [B*T]: the group within which the experts of a token are to be balanced, see `moe.balance_loss`.
    segments: torch.Tensor | None
    num_segments: int
    backend: Backend
