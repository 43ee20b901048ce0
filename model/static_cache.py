"""Keys and values of the positions so far, in memory of a fixed size."""

import torch

from model.config import ModelConfig


class StaticCache:
    """Keys and values of each layer [B, 2G, S, D], G heads of keys before G of values, of which `length` positions are filled.

    `update` writes behind them. The caller raises `length` when all layers have done so. The methods have the signatures of
    transformers' caches. B rows, G key/value heads, S positions at most, D head dimension.
    """

    def __init__(self, config: ModelConfig, rows: int, positions: int) -> None:
        self.n_key_heads = config.num_key_value_heads
        self.shape = (rows, 2 * self.n_key_heads, positions, config.head_dim)
        self.layers: list[torch.Tensor] = []
        self.length = 0

    def update(self, k: torch.Tensor, v: torch.Tensor, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Add k and v of the next positions, [B, G, their number, D]; returns those of all so far."""
        if layer == len(self.layers):
            # here, where the dtype is known
            self.layers.append(k.new_zeros(self.shape))
        end = self.length + k.shape[2]
        self.layers[layer][:, : self.n_key_heads, self.length : end] = k
        self.layers[layer][:, self.n_key_heads :, self.length : end] = v
        k, v = self.layers[layer][:, :, :end].split(self.n_key_heads, dim=1)
        return k, v

    def get_mask_sizes(self, new: int, layer: int) -> tuple[int, int]:
        """(number of positions with `new` more, first of them)"""
        return self.length + new, 0
