"""The dense MLP of a block, and of each expert."""

import torch
import torch.nn.functional as F
from torch import nn

from model.products import projections


class FeedForward(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x)), [..., H] -> [..., H]; https://arxiv.org/abs/2002.05202."""

    def __init__(self, hidden_size: int, intermediate_size: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = projections(x, self.gate_proj, self.up_proj)
        (y,) = projections(F.silu(gate) * up, self.down_proj)
        return self.dropout(y)
