"""Encoders of Hugging Face, fast on a CPU.

torch draws the random numbers of a dropout on a CPU one after the other, which takes up to a third of a training step.
Here each element's number is a hash of its place and of one random seed per call; a compiler makes that part of the
loop over the elements. Attention is written out as products and a softmax, because the backward pass of PyTorch's SDPA
kernel for CPUs takes half of a step. Without a compiler that pays only for short rows in bfloat16, where that kernel
is slowest, and dropout is torch's own. On other devices attention and dropout are torch's.
"""

import math
import re
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

# The name under which transformers knows `attention`.
QUICK_ON_CPU = "quick_on_cpu"
# Up to so many positions `written_out` took 0.05 to 0.6 of the time of SDPA in bfloat16, forward and backward together (4 to 12
# heads, widths of 32 and 64); from 192 on as long or longer, and in float32 as long everywhere.
SHORT_ROWS = 128


def dropped(shape: Sequence[int], p: float, device: torch.device | str) -> torch.Tensor:
    """int32 [shape]: -1, all bits set, with probability p (to 1/65536), else 0; from torch's global random numbers.

    The hash is Ellis' lowbias32 (https://nullprogram.com/blog/2018/07/31/) of seed xor place · 2^32/golden ratio, in
    int32 arithmetic that wraps around; shifts are made logical by a mask. A number comes out and no bool, because the
    compiler turns arithmetic into vector instructions, and a choice by a bool hardly.
    """
    seed = torch.randint(-(2**31), 2**31 - 1, (1,), dtype=torch.int32, device=device)
    x = (torch.arange(math.prod(shape), dtype=torch.int32, device=device) * -1640531535) ^ seed
    x = (x ^ ((x >> 16) & 0xFFFF)) * 0x7FEB352D
    x = (x ^ ((x >> 15) & 0x1FFFF)) * -2073319461
    x = (x >> 16) & 0xFFFF
    # The sign of the difference, in all bits.
    return ((x - round(p * 65536)) >> 31).view(shape)


def dropout(x: torch.Tensor, p: float, training: bool = True) -> torch.Tensor:
    """x with a share p of its elements zeroed and the others scaled by 1 / (1 - p), as torch.nn.functional.dropout."""
    if training and p and torch.compiler.is_compiling() and x.device.type == "cpu":
        return x * (1 + dropped(x.shape, p, x.device)).to(x.dtype) * (1 / (1 - p))
    return F.dropout(x, p, training)


class Dropout(torch.nn.Dropout):
    """torch.nn.Dropout with `dropout` above."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return dropout(x, self.p, self.training)


def written_out(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    scaling: float,
    p: float,
) -> torch.Tensor:
    """Softmax attention with dropout p by autograd; [R, H, T, D].

    query, key, value: [R, H, T, D]; mask: a bool is True where a key is seen, a float is added to the scores; it broadcasts
    to [R, H, T, T]. The scores are rounded to the inputs' precision before the softmax. They are kept for the backward
    pass, which is why long rows would need much memory.
    """
    scores = (query @ key.transpose(-2, -1)).float() * scaling
    scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype is torch.bool else scores + mask
    return dropout(scores.softmax(-1).to(value.dtype), p) @ value


def attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: Any = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' SDPA attention, written out on a CPU where SDPA's kernel is slow backward.

    query, key, value: [R, H, T, D]; attention_mask: see `ready_mask`; gives ([R, T, H, D], None).
    """
    is_slow = torch.compiler.is_compiling() or (query.dtype is torch.bfloat16 and query.shape[-2] <= SHORT_ROWS)
    # transformers gives no mask where no row of a batch is padded.
    if query.device.type == "cpu" and is_slow and attention_mask is not None and scaling is not None:
        output = written_out(query, key, value, attention_mask, scaling, options.get("dropout", 0.0))
        return output.transpose(1, 2), None
    return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **options)


def ready_mask(real: torch.Tensor, in_graphs: bool = False) -> torch.Tensor:
    """What an encoder gets as its mask, [R, 1, T, T]: all queries of a row see its real positions. real: bool [R, T].

    A mask of four dimensions transformers takes as it is, without a look inside. in_graphs: compiled layers get it, for
    which it is a float to add where they are on a CPU: once for all layers, since they would work it out for each score.
    """
    R, T = real.shape
    seen = real[:, None, None, :]
    if in_graphs and real.device.type == "cpu":
        seen = torch.zeros(seen.shape).masked_fill(~seen, -torch.inf)
    return seen.expand(R, 1, T, T)


AttentionInterface.register(QUICK_ON_CPU, attention)
# For callers who hand in a mask of [R, T]: of an implementation without a mask of its own transformers drops it.
AttentionMaskInterface.register(QUICK_ON_CPU, sdpa_mask)


def quicken_attention(network: Any) -> None:
    """Let a transformers encoder use `attention`, whatever its config asks for: the masks of our trainers suit no other."""
    # This one returns no weights of attention, and transformers saves no config that asks for them beside it.
    network.config.output_attentions = False
    network.config._attn_implementation = QUICK_ON_CPU


def compile_layers(network: Any) -> None:
    """Compile the layers of a transformers encoder, one graph for all; parameters and their names stay."""
    for module in network.modules():
        for name, child in module.named_children():
            if type(child) is torch.nn.Dropout:
                setattr(module, name, Dropout(child.p).train(child.training))
    for name, module in network.named_modules():
        if re.search(r"\.layers?\.\d+$", name):
            module.compile()
