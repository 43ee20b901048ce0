"""Keys and values of the positions so far, in memory of a fixed size."""

import torch

from model.config import ModelConfig


class StaticCache:
    """Keys and values of each layer, keys first [B, 2G, S, D], of which the first `length` positions are filled.

    `update` and `get_mask_sizes` are those of transformers' caches.
    """

    def __init__(self, config: ModelConfig, rows: int, positions: int) -> None:
        self.n_key_heads = config.num_key_value_heads
        self.shape = (rows, 2 * self.n_key_heads, positions, config.head_dim)
        self.layers: list[torch.Tensor] = []
        self.length = 0

    def update(self, k: torch.Tensor, v: torch.Tensor, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Add k and v of the next positions, [B, G, their number, D]; returns those of all positions so far."""
        if layer == len(self.layers):
            # now that their precision is known
            self.layers.append(k.new_zeros(self.shape))
        end = self.length + k.shape[2]
        self.layers[layer][:, : self.n_key_heads, self.length : end] = k
        self.layers[layer][:, self.n_key_heads :, self.length : end] = v
        return self.filled(layer, end)

    def filled(self, layer: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The keys and values of the positions before `end`, both [B, G, end, D]."""
        k, v = self.layers[layer][:, :, :end].split(self.n_key_heads, dim=1)
        return k, v

    def get_mask_sizes(self, new: int, layer: int) -> tuple[int, int]:
        """(number of positions with `new` more, first of them)"""
        return self.length + new, 0
