"""Matrix products: their precision, faster ones for compiled training, and the dense MLP.

Shape letters: N rows of the input, I its width, O the width of the output.
"""

from collections.abc import Sequence
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

# row chunks in the product for a weight's gradient
PARTS = 4


def compute_dtype(x: torch.Tensor) -> torch.dtype:
    """The dtype in which a matrix product of x runs: autocast's if it is on."""
    device = x.device.type
    # torch has no autocast for the meta device, and raises when asked for it.
    if device != "meta" and torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return x.dtype


def is_plain(linear: nn.Module) -> bool:
    """True if its output is x @ weight.T. With a LoRA, a bias, hooks, a quantised weight or another `forward` it has to be called."""
    return (
        type(linear) is nn.Linear
        # In this form compiled code notices a `forward` that is replaced later.
        and isinstance(linear.forward, MethodType)
        and linear.forward.__func__ is nn.Linear.forward
        and linear.bias is None
        and type(linear.weight) in (nn.Parameter, torch.Tensor)
        and not (linear._forward_hooks or linear._forward_pre_hooks or linear._backward_hooks)
    )


def apply_linears(x: torch.Tensor, *linears: nn.Linear) -> Sequence[torch.Tensor]:
    """Apply several bias-free nn.Linear to x [..., I]: one tensor [..., O] for each.

    In compiled code this is one product with the concatenated weights, faster than several small ones.
    """
    if not torch.compiler.is_compiling() or not all(map(is_plain, linears)):
        return [linear(x) for linear in linears]
    weight = linears[0].weight
    if len(linears) > 1:
        weight = torch.cat([linear.weight for linear in linears])
    if x.device.type == "cpu":
        dtype = compute_dtype(x)
        y = _CPULinear.apply(x.to(dtype).flatten(0, -2), weight, dtype).unflatten(0, x.shape[:-1])
    else:
        y = F.linear(x, weight)
    return y.split([linear.out_features for linear in linears], dim=-1)


class _CPULinear(torch.autograd.Function):
    """F.linear whose weight gradient is a batched product over PARTS chunks of the rows, summed in fp32.

    Each chunk fits the cache while the product transposes it, which is a tenth faster.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """x [N, I] in dtype, weight [O, I] fp32 -> [N, O] in dtype."""
        weight = weight.to(dtype)
        ctx.save_for_backward(x, weight)
        return x @ weight.T

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        """grad [N, O] -> the gradients of x [N, I] and of the weight [O, I]."""
        x, weight = ctx.saved_tensors
        parts = PARTS if len(x) % PARTS == 0 else 1
        d_weight = grad.view(parts, -1, grad.shape[1]).transpose(1, 2) @ x.view(parts, -1, x.shape[1])
        return grad @ weight, d_weight.float().sum(dim=0), None


class FeedForward(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x)), [..., H] -> [..., H]; https://arxiv.org/abs/2002.05202."""

    def __init__(self, hidden_size: int, intermediate_size: int, dropout: float) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = apply_linears(x, self.gate_proj, self.up_proj)
        (y,) = apply_linears(F.silu(gate) * up, self.down_proj)
        return self.dropout(y)
