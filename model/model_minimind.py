"""MiniMind: one decoder for both public generations, checkpoint-compatible.

    model = MiniMindLM(ModelConfig())                                              # minimind2, 25.8 M parameters
    model = MiniMindLM(ModelConfig(generation="minimind3", use_moe=True))
    model = MiniMindForCausalLM.from_pth("out/pretrain_512.pth")                   # with Hugging Face's interface

Read it from top to bottom: norm, rotary positions, attention, block, the stack of blocks, the language model. The two
kinds of MLP are in model/products.py and model/moe.py, the masks in model/masks.py. The plain model is here; model/fast
computes the same faster in training. A forward pass uses one of them as its backend, see model/backend.py.

Shape letters: B rows, T positions, S keys (cached ones included), H hidden, V vocabulary, D head dimension,
N query heads, G key/value heads.
"""

import math
import os
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any, Self, cast

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from model.backend import PLAIN_BACKEND, Backend, CompiledBackend, Layout, compiled_backend
from model.config import ModelConfig
from model.loss import HeadSample
from model.masks import Mask, first_keys
from model.moe import MoEFeedForward
from model.products import FeedForward, apply_linears
from model.pth_format import load_pth
from model.static_cache import StaticCache

if TYPE_CHECKING:
    from transformers import Cache

__all__ = ["MiniMindConfig", "MiniMindForCausalLM", "MiniMindLM", "MiniMindModel", "MiniMindOutput"]  # noqa: F822


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dimension, in fp32; https://arxiv.org/abs/1910.07467."""

    def __init__(self, size: int, config: ModelConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = config.rms_norm_eps
        self.scales_in_fp32 = config.generation == "minimind3"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., size] -> [..., size]"""
        x32 = x.float()
        normed = x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + self.eps)
        # The public models differ in the order of the last two steps, and so in the last bit of half precision.
        if self.scales_in_fp32:
            return (self.weight * normed).type_as(x)
        return self.weight * normed.type_as(x)


def rope_tables(config: ModelConfig, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """position_ids [B or 1, T] -> cos, sin [B or 1, 1, T, D] in fp32; https://arxiv.org/abs/2104.09864.

    Computed in each forward pass: a few thousand cosines cost nothing beside the model, there is no table to outgrow,
    and no buffer that `.to(bfloat16)` or loading on the meta device could corrupt.
    """
    frequencies = plain_frequencies(config, position_ids.device)
    if config.inference_rope_scaling:
        frequencies = yarn(config, frequencies)
    angles = position_ids[..., None].float() * frequencies  # [B or 1, T, D/2]
    # `rotate` pairs dimension i with dimension i + D/2: both turn by the same angle.
    angles = torch.cat((angles, angles), dim=-1).unsqueeze(1)
    return angles.cos(), angles.sin()


def plain_frequencies(config: ModelConfig, device: torch.device) -> torch.Tensor:
    """RoPE frequencies [D/2] in fp32, before YaRN: radians per position for each pair of dimensions."""
    even = torch.arange(0, config.head_dim, 2, device=device, dtype=torch.float32)
    return 1.0 / config.rope_theta ** (even / config.head_dim)


def yarn(config: ModelConfig, frequencies: torch.Tensor) -> torch.Tensor:
    """YaRN's "NTK by parts" (https://arxiv.org/abs/2309.00071, section 3.2) for frequencies [D/2].

    A dimension that turns more than beta_fast times within the original length keeps its frequency, one that turns
    less than beta_slow times is interpolated, and a linear ramp joins them. The logits are not rescaled.
    """

    def dimension(turns: float) -> float:
        """The dimension, counted in pairs, that turns this often within the original length."""
        wavelength = config.yarn_original_positions / turns
        return config.head_dim / 2 * math.log(wavelength / (2 * math.pi)) / math.log(config.rope_theta)

    low = max(math.floor(dimension(config.yarn_beta_fast)), 0)
    high = min(math.ceil(dimension(config.yarn_beta_slow)), config.head_dim // 2 - 1)
    index = torch.arange(len(frequencies), device=frequencies.device, dtype=torch.float32)
    # If both ends are the same dimension, the ramp is a step.
    ramp = ((index - low) / max(high - low, 0.001)).clamp(0, 1)
    return frequencies * (1 - ramp + ramp / config.yarn_factor)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotates x [B, heads, T, D]: dimension i with dimension i + D/2."""
    first, second = x.chunk(2, dim=-1)
    return (x * cos + torch.cat((-second, first), dim=-1) * sin).type_as(x)


class Attention(nn.Module):
    """Causal self-attention with grouped key/value heads."""

    def __init__(self, config: ModelConfig, layer_index: int) -> None:
        super().__init__()
        H = config.hidden_size
        D = config.head_dim
        self.head_dim = D
        self.dropout = config.dropout
        self.layer_index = layer_index
        self.q_proj = nn.Linear(H, config.num_attention_heads * D, bias=False)
        self.k_proj = nn.Linear(H, config.num_key_value_heads * D, bias=False)
        self.v_proj = nn.Linear(H, config.num_key_value_heads * D, bias=False)
        self.o_proj = nn.Linear(config.num_attention_heads * D, H, bias=False)
        self.has_qk_norm = config.generation == "minimind3"
        if self.has_qk_norm:
            self.q_norm = RMSNorm(D, config)
            self.k_norm = RMSNorm(D, config)

    def forward(
        self, x: torch.Tensor, layout: Layout, past_key_values: "Cache | StaticCache | None" = None
    ) -> torch.Tensor:
        """x [B, T, H] -> [B, T, H]"""
        B, T, _ = x.shape
        # = q_proj(x), k_proj(x), v_proj(x); one product when compiled
        q, k, v = apply_linears(x, self.q_proj, self.k_proj, self.v_proj)
        q = q.view(B, T, -1, self.head_dim)
        k = k.view(B, T, -1, self.head_dim)
        v = v.view(B, T, -1, self.head_dim).transpose(1, 2)  # [B, G, T, D]
        if self.has_qk_norm:
            q = self.q_norm(q)
            k = self.k_norm(k)
        q = rotate(q.transpose(1, 2), layout.cos, layout.sin)  # [B, N, T, D]
        k = rotate(k.transpose(1, 2), layout.cos, layout.sin)  # [B, G, T, D]
        if past_key_values is not None:
            k, v = past_key_values.update(k, v, self.layer_index)  # [B, G, S, D]
        dropout = self.dropout if self.training else 0.0
        y = layout.backend.attend(q, k, v, layout.mask, dropout)
        # = o_proj(y), whose weight gradient is faster when compiled
        (y,) = apply_linears(y.transpose(1, 2).reshape(B, T, -1), self.o_proj)
        return y


class Block(nn.Module):
    """Pre-norm transformer block. Under autocast the products are half precision; the residual stream stays fp32."""

    # Names by which transformers switches it, see `checkpoint_activations`
    gradient_checkpointing = False
    _gradient_checkpointing_func: Callable[..., Any]

    def __init__(self, config: ModelConfig, layer_index: int) -> None:
        super().__init__()
        self.self_attn = Attention(config, layer_index)
        self.mlp: FeedForward | MoEFeedForward
        if config.use_moe:
            self.mlp = MoEFeedForward(config)
        else:
            self.mlp = FeedForward(config.hidden_size, config.intermediate_size, config.dropout)
        self.input_layernorm = RMSNorm(config.hidden_size, config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(
        self, x: torch.Tensor, layout: Layout, past_key_values: "Cache | StaticCache | None" = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """`compute`, or its compiled form if the backend has one."""
        if self.gradient_checkpointing and self.training:
            # Without the cache: the second pass would add its keys once more.
            return self._gradient_checkpointing_func(layout.backend.run, Block.compute, self, x, layout)
        return layout.backend.run(Block.compute, self, x, layout, past_key_values)

    def compute(
        self, x: torch.Tensor, layout: Layout, past_key_values: "Cache | StaticCache | None" = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """x [B, T, H] -> (x [B, T, H], auxiliary loss 0-d or None for a dense block)"""
        # x + y, never x += y: in place, the first addition would make the stream half precision under autocast.
        attended = self.self_attn(self.input_layernorm(x), layout, past_key_values)
        x = x + self.dropout(attended)
        normed = self.post_attention_layernorm(x)
        if isinstance(self.mlp, FeedForward):
            return x + self.mlp(normed), None
        y, aux_loss = self.mlp(normed, layout.segments, layout.num_segments)
        return x + y, aux_loss


class MiniMindModel(nn.Module):
    """Embedding, blocks and final norm."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.dropout = nn.Dropout(config.dropout)
        layers = nn.ModuleList(Block(config, i) for i in range(config.num_hidden_layers))
        self.layers = cast(Sequence[Block], layers)
        self.norm = RMSNorm(config.hidden_size, config)

    def forward(
        self,
        x: torch.Tensor,
        position_ids: torch.Tensor,
        mask: Mask = None,
        segments: tuple[torch.Tensor | None, int] = (None, 0),
        past_key_values: "Cache | StaticCache | None" = None,
        backend: Backend = PLAIN_BACKEND,
        output_hidden_states: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
        """x: embeddings [B, T, H] -> (normed hidden states [B, T, H], sum of the layers' auxiliary losses, 0-d fp32; with
        output_hidden_states the input of each block).

        position_ids [B or 1, T]. mask: of the backend; for the plain one bool (True: visible) or additive, [B, 1, T, S],
        None: plain causal. segments: (segment of each token [B*T], their number), see `moe.balance_loss`.
        """
        x = self.dropout(x)
        # is_cheap: compiled on a GPU alone, where these few operations take less time than their launches
        cos, sin = backend.run(rope_tables, self.config, position_ids, is_cheap=True)
        layout = Layout(cos, sin, mask, *segments, backend)
        aux_loss = torch.zeros((), device=x.device)
        inputs = []
        for layer in self.layers:
            if output_hidden_states:
                inputs.append(x)
            x, layer_aux_loss = layer(x, layout, past_key_values=past_key_values)
            if layer_aux_loss is not None:
                aux_loss = aux_loss + layer_aux_loss
        return backend.run(self.norm, x, is_cheap=True), aux_loss, inputs


class MiniMindLM(nn.Module):
    """The language model: head tied to the embedding, and its losses in training. model/hf.py gives it Hugging Face's interface."""

    # set by `compile_training`
    compiled_backend: CompiledBackend | None = None
    # `FusedLayers`, set by `decoding.fuse`
    fused_layers: Callable[..., torch.Tensor] | None = None

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.model = MiniMindModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.apply(self._init_weights)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """minimind2: uniform(±1/sqrt(fan_in)), nn.Linear's own, for every matrix; minimind3: normal(0, 0.02)."""
        if isinstance(module, (nn.Linear, nn.Embedding)):
            if self.config.generation == "minimind2":
                bound = module.weight.shape[1] ** -0.5
                nn.init.uniform_(module.weight, -bound, bound)
            else:
                nn.init.normal_(module.weight, 0.0, self.config.initializer_range)
        elif isinstance(module, RMSNorm):
            nn.init.ones_(module.weight)
        elif isinstance(module, MoEFeedForward):
            nn.init.zeros_(module.slots)

    @classmethod
    def from_pth(cls, path: str | os.PathLike[str], **overrides: Any) -> Self:
        """Loads a flat state dict of either generation, strictly; the model is fp32 and in eval mode.

        The config comes from the `.json` beside the file, or else from its keys and shapes; `overrides` are config
        fields that take precedence. Errors: ValueError, one line, for another kind of file,
        for weights that do not fit, and for fields that remain unknown.
        """
        return load_pth(cls, path, overrides)

    def training_losses(
        self,
        input_ids: torch.Tensor,
        targets: torch.Tensor,
        document_ids: torch.Tensor,
        position_ids: torch.Tensor,
        sample: HeadSample | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """-> (cross-entropy summed over the targets, auxiliary loss averaged over the documents), both 0-d fp32.

        All arguments [B, T] int64. position_ids: from 0 in each document.
        targets: the token to predict at each position, -100 where there is none (nothing is shifted here).
        document_ids: 0, 1, ... (below T) within a row, -1 for padding; attention and the statistics of seq_aux stay within
        a document. Batch-wise auxiliary losses (seq_aux false, minimind3) are over all tokens but padding.
        sample: of the head's ids, in place of targets; None: all of them.
        """
        B, T = input_ids.shape
        self._check_length(T)
        x = self.model.embed_tokens(input_ids)
        segments = self.segments(document_ids)
        # Before the pass, not after it: with gradient checkpointing the backward pass counts every token once more.
        for mlp in self._expert_layers():
            mlp.slots.zero_()
        backend = self._backend(x)
        mask = backend.mask(x, first_keys(self.config, torch.arange(T, device=x.device), document_ids))
        hidden, aux_loss, _ = self.model(x, position_ids, mask, segments, backend=backend)
        weight = self.lm_head.weight
        if sample is None:
            return backend.cross_entropy(hidden.view(B * T, -1), weight, targets.reshape(-1)), aux_loss
        table = self.model.embed_tokens
        weights = F.embedding(sample.ids, weight, sparse=table.sparse and weight is table.weight).split(sample.sizes)
        rows = zip(hidden, weights, sample.targets, sample.log_counts.split(sample.sizes), strict=True)
        return torch.stack([backend.cross_entropy(*row) for row in rows]).sum(), aux_loss

    def next_logits(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        mask: torch.Tensor | None,
        cache: StaticCache,
    ) -> torch.Tensor:
        """input_ids [B, T], whose keys and values are added to the cache -> logits after the last position [B, V].

        position_ids [B, T]. mask: bool [B or 1, 1, T, S] with the cached keys, None: plain causal.
        """
        x = self.model.embed_tokens(input_ids)
        hidden, _, _ = self.model(x, position_ids, mask, past_key_values=cache)
        return self.lm_head(hidden[:, -1])

    def compile_training(self, shape: tuple[int, int], dtype: torch.dtype = torch.bfloat16) -> str:
        """Compile training_losses in train mode, lazily at its first use; state-dict keys stay the same.

        shape: (rows, positions) of a full micro-batch. Other shapes stay eager. dtype: of the matrix products. Returns a
        message about the choice of attention, or "".
        """
        self.compiled_backend = compiled_backend(self.config, self.lm_head.weight.device, shape, dtype)
        return self.compiled_backend.notice

    def _backend(self, x: torch.Tensor) -> Backend:
        """The backend for a micro-batch with embeddings x [B, T, H]: the compiled one only to train on its own shape."""
        compiled = self.compiled_backend
        is_training = self.training and torch.is_grad_enabled()
        return compiled if compiled is not None and is_training and compiled.shape == x.shape[:2] else PLAIN_BACKEND

    def checkpoint_activations(self) -> None:
        """Compute each block a second time in the backward pass, instead of keeping what it computed."""
        for layer in self.model.layers:
            layer.gradient_checkpointing = True
            layer._gradient_checkpointing_func = partial(checkpoint, use_reentrant=False)

    def expert_slots(self) -> torch.Tensor:
        """Returns [layers, experts]: tokens routed to each expert in the last `training_losses`.

        Counted in train mode only, without padding. No synchronisation with the device.
        """
        return torch.stack([mlp.slots for mlp in self._expert_layers()])

    def _expert_layers(self) -> list[MoEFeedForward]:
        """The MLP of each block; [] for a dense model."""
        return [layer.mlp for layer in self.model.layers if isinstance(layer.mlp, MoEFeedForward)]

    def segments(self, document_ids: torch.Tensor) -> tuple[torch.Tensor | None, int]:
        """(segment of each token [B*T], number of segments) for `moe.balance_loss`; (None, 0) for a dense model.

        A segment is what the experts are balanced over: a document, or without seq_aux the whole micro-batch.
        """
        if not self.config.use_moe:
            return None, 0
        if not self.config.seq_aux:
            # All tokens but padding are one segment: ids above 0 become 0, -1 stays.
            return document_ids.clamp(max=0).reshape(-1), 1
        # Each document is a segment. A row has at most T documents, so those of row b start at b * T.
        B, T = document_ids.shape
        row_starts = torch.arange(0, B * T, T, device=document_ids.device).unsqueeze(1)
        segments = torch.where(document_ids < 0, -1, row_starts + document_ids)
        return segments.reshape(-1), B * T

    def _check_length(self, length: int) -> None:
        """Raises ValueError for more positions than the config allows."""
        if length > self.config.max_position_embeddings:
            raise ValueError(
                f"{length} positions, but max_position_embeddings is {self.config.max_position_embeddings}: "
                "shorten the input or raise that config field"
            )


def __getattr__(name: str) -> Any:
    """The classes with Hugging Face's interface, at the first use: importing what they are built on takes longer than torch."""
    if name in ("MiniMindConfig", "MiniMindForCausalLM", "MiniMindOutput"):
        return getattr(import_module("model.hf"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
