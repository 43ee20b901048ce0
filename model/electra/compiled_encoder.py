"""Dropout and attention in a form that a compiler makes fast on a CPU, for Hugging Face's encoders.

torch draws the random numbers of a dropout on a CPU one after the other, which takes up to a third of a training step.
Here each element's number is a hash of its place and of one random seed per call; a compiler makes that part of the
loop over the elements. Attention is written out as products and a softmax, because the backward pass of PyTorch's SDPA
kernel for CPUs takes half of a step. Without a compiler, and on other devices, both are torch's own.
"""

import contextlib
import math
import re
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask


def keep_mask(shape: Sequence[int], p: float, device: torch.device) -> torch.Tensor:
    """bool [shape]: False with probability p (to 1/65536), from torch's global random numbers.

    The hash is Ellis' lowbias32 (https://nullprogram.com/blog/2018/07/31/) of seed xor place · 2^32/golden ratio, in
    int32 arithmetic that wraps around; shifts are made logical by a mask.
    """
    seed = torch.randint(-(2**31), 2**31 - 1, (1,), dtype=torch.int32, device=device)
    x = (torch.arange(math.prod(shape), dtype=torch.int32, device=device) * -1640531535) ^ seed
    x = (x ^ ((x >> 16) & 0xFFFF)) * 0x7FEB352D
    x = (x ^ ((x >> 15) & 0x1FFFF)) * -2073319461
    x = (x >> 16) & 0xFFFF
    return (x >= round(p * 65536)).view(shape)


def dropout(x: torch.Tensor, p: float, training: bool = True) -> torch.Tensor:
    """x with a share p of its elements zeroed and the others scaled by 1 / (1 - p), as torch.nn.functional.dropout."""
    if training and p and torch.compiler.is_compiling() and x.device.type == "cpu":
        return torch.where(keep_mask(x.shape, p, x.device), x * (1 / (1 - p)), 0.0)
    return F.dropout(x, p, training)


class Dropout(torch.nn.Dropout):
    """torch.nn.Dropout with `dropout` above."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return dropout(x, self.p, self.training)


def attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: Any = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' SDPA attention, written out in a compiled graph on a CPU: SDPA's kernel there is slow backward.

    query, key, value: [R, H, T, D]; attention_mask: bool, True where a key is seen; gives ([R, T, H, D], None).
    """
    dropout_p = options.pop("dropout", 0.0)
    if not (torch.compiler.is_compiling() and query.device.type == "cpu"):
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout_p, scaling=scaling, **options
        )
    scores = (query * scaling) @ key.transpose(-2, -1)
    if attention_mask is not None:
        scores = scores.masked_fill(~attention_mask, -torch.inf)
    probabilities = dropout(scores.softmax(-1, dtype=torch.float32).to(value.dtype), dropout_p)
    return (probabilities @ value).transpose(1, 2), None


AttentionInterface.register("compiled_on_cpu", attention)
# For callers who hand in a mask of [R, T]: of an implementation without a mask of its own transformers drops it.
AttentionMaskInterface.register("compiled_on_cpu", sdpa_mask)


def eager_if(condition: bool) -> contextlib.AbstractContextManager[Any]:
    """A context in which compiled layers are computed without their graphs, for batches of another shape than theirs."""
    return torch.compiler.set_stance("force_eager") if condition else contextlib.nullcontext()


def compile_layers(network: Any) -> None:
    """Compile the layers of a transformers encoder, one graph for all; parameters and their names stay."""
    for module in network.modules():
        for name, child in module.named_children():
            if type(child) is torch.nn.Dropout:
                setattr(module, name, Dropout(child.p).train(child.training))
    network.config._attn_implementation = "compiled_on_cpu"
    for name, module in network.named_modules():
        if re.search(r"\.layers?\.\d+$", name):
            module.compile()
