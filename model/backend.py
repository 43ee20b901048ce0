"""Backends of the forward pass: the plain one, which is the reference, and the compiled ones of `training_losses`.

A forward pass has one backend for all layers, which find it in their `Layout`. A compiled backend serves micro-batches of one
shape. Everything else runs the plain code: evaluation, generation, and micro-batches of another shape, since compiling for
them takes longer than running them. On a CPU that is the last one of an epoch; on a GPU the trainer pads it with empty rows.
The results agree up to rounding.

Shape letters: B rows, T positions, S keys (cached ones included), H hidden, D head dimension, N query heads, G key/value heads.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch
import torch.nn.functional as F

from model.config import ModelConfig
from model.fast.block_attention import block_attention
from model.fast.experts import has_grouped_kernel
from model.fast.flex_attention import flex_attend, flex_fault
from model.loss import chunked_cross_entropy, loss_and_gradient
from model.masks import Mask, additive_mask, block_mask, dense_mask
from model.products import compute_dtype

ResultT = TypeVar("ResultT")


class Backend:
    """Plain PyTorch. Subclasses replace methods and must give the same results up to rounding."""

    def mask(self, x: torch.Tensor, first: torch.Tensor) -> Mask:
        """Mask for `attend`, from embeddings x [B, T, H] and `first_keys` [B, T]."""
        return dense_mask(first)

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Mask, dropout: float) -> torch.Tensor:
        """q [B, N, T, D], k and v [B, G, S, D] -> [B, N, T, D]; N/G query heads share one key/value head.

        mask: here bool (True: visible) or additive, [B, 1, T, S]; None: plain causal.
        """
        groups = q.shape[1] // k.shape[1]
        k = k.repeat_interleave(groups, dim=1)  # [B, N, S, D]
        v = v.repeat_interleave(groups, dim=1)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=mask is None)

    def run(self, function: Callable[..., ResultT], *arguments: object, is_cheap: bool = False) -> ResultT:
        """Call function(*arguments): a block, or if is_cheap a few operations that take less time than their launches."""
        return function(*arguments)

    def cross_entropy(
        self, hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """hidden [B*T, H], weight of the head [V, H], targets [B*T] (-100: none), bias [V] -> sum over the targets, 0-d fp32."""
        return chunked_cross_entropy(hidden, weight, targets, bias=bias)


PLAIN_BACKEND = Backend()


class Layout(NamedTuple):
    """Inputs that all layers share, and their backend."""

    # Both [B or 1, 1, T, D]: see `rope_tables`.
    cos: torch.Tensor
    sin: torch.Tensor
    # keys visible to each query, in the form of `backend`
    mask: Mask
    # [B*T]: the group within which a token's experts are balanced, see `moe.balance_loss`
    segments: torch.Tensor | None
    num_segments: int
    backend: Backend


class CompiledBackend(Backend):
    """Compiled blocks and a compiled loss; attention is PyTorch's, as in the plain backend.

    shape: (rows, positions) of the micro-batches to serve. on_gpu: compile cheap functions too, for one kernel launch instead
    of ten; on a CPU this gains nothing.
    notice: message to the user about the choice of this backend, or "".
    """

    def __init__(self, shape: tuple[int, int], on_gpu: bool = False, notice: str = "") -> None:
        self.shape = shape
        self.on_gpu = on_gpu
        self.notice = notice
        # The compiler cannot trace a query of the driver. It calls once, and assumes the result is constant.
        torch.compiler.assume_constant_result(has_grouped_kernel)
        self._compiled_gradients = torch.compile(loss_and_gradient, dynamic=False)
        # {function of `run`: its compiled form}. All blocks share one: they differ in their weights only. The embedding is not
        # compiled: its backward pass would add with atomic operations, in random order, and a resume would not be bitwise.
        self._compiled: dict[Callable[..., Any], Callable[..., Any]] = {}

    def run(self, function: Callable[..., ResultT], *arguments: object, is_cheap: bool = False) -> ResultT:
        if is_cheap and not self.on_gpu:
            return function(*arguments)
        if function not in self._compiled:
            self._compiled[function] = torch.compile(function, dynamic=False)
        result: ResultT = self._compiled[function](*arguments)
        return result

    def cross_entropy(
        self, hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        return chunked_cross_entropy(hidden, weight, targets, self._compiled_gradients, bias)


class CompiledCPUBackend(CompiledBackend):
    """Attention in blocks of queries, without dropout."""

    def mask(self, x: torch.Tensor, first: torch.Tensor) -> Mask:
        return additive_mask(first, compute_dtype(x))

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Mask, dropout: float) -> torch.Tensor:
        return block_attention(q, k, v, mask)


class CompiledFlexBackend(CompiledBackend):
    """FlexAttention, without dropout."""

    def mask(self, x: torch.Tensor, first: torch.Tensor) -> Mask:
        return block_mask(first)

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Mask, dropout: float) -> torch.Tensor:
        return flex_attend(q, k, v, mask)


def compiled_backend(
    config: ModelConfig, device: torch.device, shape: tuple[int, int], dtype: torch.dtype
) -> CompiledBackend:
    """Returns the fastest compiled backend for this model on this device; its notice names the attention.

    dtype: of the matrix products.
    """
    if device.type == "cpu" and not config.dropout:
        return CompiledCPUBackend(shape)
    on_gpu = device.type == "cuda"
    if not on_gpu and not config.dropout:
        return CompiledBackend(shape)
    if config.dropout:
        reason = ": the faster ones have no dropout"
    elif torch.cuda.get_device_capability(device) < (8, 0):
        reason = ": FlexAttention needs an RTX 30, an A100 or newer"
    elif fault := flex_fault(config, device, dtype, T=shape[1]):
        reason = f"; FlexAttention does not work here ({fault})"
    else:
        return CompiledFlexBackend(shape, on_gpu, "attention: FlexAttention, which skips the blocks of other documents")
    return CompiledBackend(shape, on_gpu, f"attention: PyTorch's own with a mask, which is slower{reason}")
