"""Matrix products: their precision, and how compiled training makes them quicker.

Shape letters: N rows of the input, I its width, O the width of the output.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

# Parts of the rows in the product that makes a weight's gradient.
PARTS = 4


def compute_dtype(x: torch.Tensor) -> torch.dtype:
    """The dtype in which a matrix product of x runs: autocast's where it is on."""
    device = x.device.type
    # torch knows no autocast of the meta device, and raises when asked for it.
    if device != "meta" and torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return x.dtype


def projections(x: torch.Tensor, *linears: nn.Linear) -> Sequence[torch.Tensor]:
    """What each of several bias-free nn.Linear gives for x [..., I]: one tensor [..., O] for each.

    In compiled code they are one product with all their weights, which is faster than several small ones.
    """
    if not torch.compiler.is_compiling():
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
    """F.linear whose weight gradient is one batched product over PARTS of the rows, added up in fp32.

    Each part then fits the cache while the product transposes it, which makes it a tenth faster.
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


def without_kept_copies(model: nn.Module) -> None:
    """Let each nn.Linear of a model round its weight once more in the backward pass, instead of keeping the rounded one for it.

    Under autocast a layer's rounded weights are kept from its forward to its backward pass. Those of all layers are half of the
    model's size, on each rank, also where each has only a part of the weights. Results are the same to the last bit.
    """
    for module in model.modules():
        if type(module) is nn.Linear:
            module.forward = partial(_linear, module)  # type: ignore[method-assign]


def _linear(module: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    """[..., I] -> [..., O]"""
    dtype = compute_dtype(x)
    if torch.compiler.is_compiling() or dtype == module.weight.dtype:
        return F.linear(x, module.weight, module.bias)
    y: torch.Tensor = _RoundedLinear.apply(x.to(dtype).flatten(0, -2), module.weight, module.bias, dtype)
    return y.unflatten(0, x.shape[:-1])


class _RoundedLinear(torch.autograd.Function):
    """F.linear that keeps the weight as it is for the backward pass, of which there is one anyway."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype
    ) -> torch.Tensor:
        """x [N, I] in dtype, weight [O, I] and bias [O] in fp32 -> [N, O] in dtype."""
        ctx.save_for_backward(x, weight)
        ctx.dtype = dtype
        return F.linear(x, weight.to(dtype), None if bias is None else bias.to(dtype))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, None]:
        """grad [N, O] -> the gradients of x [N, I], weight [O, I] and bias [O]."""
        x, weight = ctx.saved_tensors
        d_bias = grad.sum(dim=0).to(weight.dtype) if ctx.needs_input_grad[2] else None
        return grad @ weight.to(ctx.dtype), (x.T @ grad).T.to(weight.dtype), d_bias, None
