"""Hugging Face encoders, fast on a CPU.

On a CPU torch draws the random numbers of dropout serially, which takes up to a third of a training step. Here each
element's number is a hash of its index and of one random seed per call, which a compiler fuses into the loop over the
elements. Attention is written out as products and a softmax, because the backward pass of PyTorch's SDPA kernel for
CPUs takes half of a step. Without a compiler that pays only for short rows in bfloat16, where that kernel is slowest,
and dropout is torch's own. On other devices attention and dropout are torch's.
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

# name of `attention` in transformers' registries
QUICK_ON_CPU = "quick_on_cpu"
# Up to this many positions `written_out` took 0.05 to 0.6 of the time of SDPA in bfloat16, forward and backward (4 to 12 heads of
# width 32 and 64); from 192 on as long or longer, and in float32 always as long.
SHORT_ROWS = 128


def dropout_mask(shape: Sequence[int], p: float, device: torch.device | str) -> torch.Tensor:
    """Returns int32 [shape]: -1, all bits set, with probability p (to 1/65536), else 0; seeded by torch's global generator.

    A hash of seed xor index · 2^32/golden ratio, of the form of Wellons' lowbias32 with another second factor
    (https://nullprogram.com/blog/2018/07/31/), in wrapping int32 arithmetic; a mask makes shifts logical. Not a bool, because
    the compiler vectorises arithmetic, but hardly a choice by a bool.
    """
    seed = torch.randint(-(2**31), 2**31 - 1, (1,), dtype=torch.int32, device=device)
    x = (torch.arange(math.prod(shape), dtype=torch.int32, device=device) * -1640531535) ^ seed
    x = (x ^ ((x >> 16) & 0xFFFF)) * 0x7FEB352D
    x = (x ^ ((x >> 15) & 0x1FFFF)) * -2073319461
    x = (x >> 16) & 0xFFFF
    # the sign of the difference, in all bits
    return ((x - round(p * 65536)) >> 31).view(shape)


def dropout(x: torch.Tensor, p: float, training: bool = True) -> torch.Tensor:
    """x with a share p of its elements zeroed and the others scaled by 1 / (1 - p), as torch.nn.functional.dropout."""
    if training and p and torch.compiler.is_compiling() and x.device.type == "cpu":
        return x * (1 + dropout_mask(x.shape, p, x.device)).to(x.dtype) * (1 / (1 - p))
    return F.dropout(x, p, training)


class Dropout(torch.nn.Dropout):
    """torch.nn.Dropout with `dropout` above."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return dropout(x, self.p, self.training)


def written_out(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor, scaling: float, p: float
) -> torch.Tensor:
    """Softmax attention with dropout p by autograd; [R, H, T, D].

    query, key, value: [R, H, T, D]; mask: a bool is True where a key is seen, a float is added to the scores; it broadcasts
    to [R, H, T, T]. The scores are rounded to the inputs' precision before the softmax, and kept for the backward pass, so
    long rows would need much memory.
    """
    scores = (query @ key.transpose(-2, -1)).float() * scaling
    scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min) if mask.dtype is torch.bool else scores + mask
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
    """transformers' SDPA attention, written out on a CPU where SDPA's backward pass is slow.

    query, key, value: [R, H, T, D]; attention_mask: see `ready_mask` -> ([R, T, H, D], None).
    """
    is_slow = torch.compiler.is_compiling() or (query.dtype is torch.bfloat16 and query.shape[-2] <= SHORT_ROWS)
    # transformers passes no mask if no row of a batch is padded.
    if query.device.type == "cpu" and is_slow and attention_mask is not None and scaling is not None:
        output = written_out(query, key, value, attention_mask, scaling, options.get("dropout", 0.0))
        return output.transpose(1, 2), None
    return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **options)


def ready_mask(is_text: torch.Tensor, in_graphs: bool = False) -> torch.Tensor:
    """Returns an encoder's mask [R, 1, T, T]: all queries of a row see its text. is_text: bool [R, T], False at padding.

    transformers uses a four-dimensional mask as it is, without inspecting it. in_graphs: for compiled layers, which on a
    CPU get an additive float mask: with a bool they would convert it for each score, in every layer.
    """
    R, T = is_text.shape
    seen = is_text[:, None, None, :]
    if in_graphs and is_text.device.type == "cpu":
        seen = torch.zeros(seen.shape).masked_fill(~seen, -torch.inf)
    return seen.expand(R, 1, T, T)


AttentionInterface.register(QUICK_ON_CPU, attention)
# For callers with a mask [R, T]: transformers drops it for an implementation that has no mask function.
AttentionMaskInterface.register(QUICK_ON_CPU, sdpa_mask)


def use_fast_attention(network: Any) -> None:
    """Make a transformers encoder use `attention`, whatever its config says: our trainers' masks suit no other.

    Errors: ValueError for relative positions, which transformers 5 silently leaves out.
    """
    positions = getattr(network.config, "position_embedding_type", "absolute")
    if positions != "absolute":
        raise ValueError(f"the model's position_embedding_type is {positions}; transformers 5 has only absolute")
    # `attention` returns no attention weights, and transformers refuses to save a config that asks for them.
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
