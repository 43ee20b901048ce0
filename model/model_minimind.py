"""MiniMind: one decoder for both public generations, checkpoint-compatible with them.

    model = MiniMindForCausalLM(MiniMindConfig())                                  # minimind2, 25.8 M parameters
    model = MiniMindForCausalLM(MiniMindConfig(generation="minimind3", use_moe=True))
    model = MiniMindForCausalLM.from_pth("out/pretrain_512.pth")

Shape letters: B rows, T positions, S keys (cached ones included), H hidden, V vocabulary, D head dimension,
N query heads, G key/value heads.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, GenerationMixin, PreTrainedModel
from transformers import initialization as init
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils import can_return_tuple

from model.attention import document_mask, visible_keys
from model.config import MiniMindConfig
from model.fast.fast_path import FastPath
from model.loss import chunked_cross_entropy
from model.moe import FeedForward, MoEFeedForward
from model.products import projections
from model.pth_format import load_pth

__all__ = ["MiniMindConfig", "MiniMindForCausalLM", "MiniMindModel", "MiniMindOutput"]


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dimension, in fp32; https://arxiv.org/abs/1910.07467."""

    def __init__(self, size, config):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = config.rms_norm_eps
        self.scale_in_fp32 = config.generation == "minimind3"  # minimind2 rounds to x's dtype before the weight

    def forward(self, x):
        x32 = x.float()
        normed = x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + self.eps)
        return (self.weight * normed).type_as(x) if self.scale_in_fp32 else self.weight * normed.type_as(x)


def rope_tables(config, position_ids):
    """position_ids [B or 1, T] -> cos, sin [B or 1, 1, T, D] in fp32; https://arxiv.org/abs/2104.09864.

    Computed anew in each forward: a few thousand cosines cost nothing beside the model, there is no table to outgrow,
    and no buffer that a `.to(bfloat16)` or a load on the meta device could spoil.
    """
    half = torch.arange(0, config.head_dim, 2, device=position_ids.device, dtype=torch.float32)  # [D/2]
    frequencies = 1.0 / config.rope_theta ** (half / config.head_dim)
    if config.inference_rope_scaling:
        frequencies = yarn(config, frequencies)
    angles = position_ids[..., None].float() * frequencies  # [B or 1, T, D/2]
    angles = torch.cat((angles, angles), dim=-1).unsqueeze(1)
    return angles.cos(), angles.sin()


def yarn(config, frequencies):
    """YaRN's "NTK by parts" (https://arxiv.org/abs/2309.00071, section 3.2) for frequencies [D/2].

    A dimension that turns more than beta_fast times within the original length keeps its frequency, one that turns
    less than beta_slow times is interpolated, and a linear ramp joins them. The logits are not rescaled.
    """

    def dimension(turns):
        wavelength = config.yarn_original_positions / turns
        return config.head_dim / 2 * math.log(wavelength / (2 * math.pi)) / math.log(config.rope_theta)

    low = max(math.floor(dimension(config.yarn_beta_fast)), 0)
    high = min(math.ceil(dimension(config.yarn_beta_slow)), config.head_dim // 2 - 1)
    index = torch.arange(len(frequencies), device=frequencies.device, dtype=torch.float32)
    ramp = ((index - low) / max(high - low, 0.001)).clamp(0, 1)
    return frequencies * (1 - ramp + ramp / config.yarn_factor)


def rotate(x, cos, sin):
    """Rotates x [B, heads, T, D]: dimension i with dimension i + D/2."""
    first, second = x.chunk(2, dim=-1)
    return (x * cos + torch.cat((-second, first), dim=-1) * sin).type_as(x)


class Attention(nn.Module):
    """Causal self-attention with grouped key/value heads."""

    def __init__(self, config, layer_index):
        super().__init__()
        H, D = config.hidden_size, config.head_dim
        self.head_dim, self.dropout, self.layer_index = D, config.dropout, layer_index
        self.groups = config.num_attention_heads // config.num_key_value_heads
        self.q_proj = nn.Linear(H, config.num_attention_heads * D, bias=False)
        self.k_proj = nn.Linear(H, config.num_key_value_heads * D, bias=False)
        self.v_proj = nn.Linear(H, config.num_key_value_heads * D, bias=False)
        self.o_proj = nn.Linear(config.num_attention_heads * D, H, bias=False)
        self.qk_norm = config.generation == "minimind3"
        if self.qk_norm:
            self.q_norm, self.k_norm = RMSNorm(D, config), RMSNorm(D, config)

    def forward(self, x, cos, sin, mask=None, cache=None, attend=None):
        """x [B, T, H] -> [B, T, H]; mask: bool (True: visible) or additive, [B, 1, T, S]; None: plain causal.

        attend: a function of q, k, v and mask from model/attention.py in place of PyTorch's, to the same result.
        """
        B, T, _ = x.shape
        q, k, v = (y.view(B, T, -1, self.head_dim) for y in projections(x, self.q_proj, self.k_proj, self.v_proj))
        v = v.transpose(1, 2)
        if self.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = rotate(q.transpose(1, 2), cos, sin), rotate(k.transpose(1, 2), cos, sin)  # [B, N, T, D], [B, G, T, D]
        if cache is not None:
            k, v = cache.update(k, v, self.layer_index)  # [B, G, S, D]
        if attend is not None:
            y = attend(q, k, v, mask)
        else:
            k, v = (t.repeat_interleave(self.groups, dim=1) for t in (k, v))  # [B, N, S, D]
            dropout = self.dropout if self.training else 0.0
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=mask is None)
        (y,) = projections(y.transpose(1, 2).reshape(B, T, -1), self.o_proj)
        return y


class Block(GradientCheckpointingLayer):
    """Pre-norm transformer block. Under autocast the products are half precision; the residual stream stays fp32."""

    def __init__(self, config, layer_index):
        super().__init__()
        self.self_attn = Attention(config, layer_index)
        self.mlp = (
            MoEFeedForward(config)
            if config.use_moe
            else FeedForward(config.hidden_size, config.intermediate_size, config.dropout)
        )
        self.input_layernorm = RMSNorm(config.hidden_size, config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config)
        self.dropout = nn.Dropout(config.dropout)
        self.use_moe = config.use_moe

    def forward(self, *args, compute=None, **kwargs):
        """See `compute`; the argument of that name replaces it, by its compiled form."""
        return (compute or Block.compute)(self, *args, **kwargs)

    def compute(self, x, cos, sin, mask=None, segments=None, num_segments=0, past_key_values=None, attend=None):
        """x [B, T, H] -> (x [B, T, H], auxiliary loss 0-d or None for a dense block)."""
        # x + y, never x += y: in place, the first addition would make the stream half precision under autocast
        attended = self.self_attn(self.input_layernorm(x), cos, sin, mask, past_key_values, attend)
        x = x + self.dropout(attended)
        if not self.use_moe:
            return x + self.mlp(self.post_attention_layernorm(x)), None
        y, aux_loss = self.mlp(self.post_attention_layernorm(x), segments, num_segments)
        return x + y, aux_loss


class MiniMindModel(nn.Module):
    """Embedding, blocks and final norm."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.dropout = nn.Dropout(config.dropout)
        self.layers = nn.ModuleList(Block(config, i) for i in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config)

    def forward(self, x, position_ids, mask=None, segments=None, num_segments=0, **options):
        """x: embeddings [B, T, H] -> (normed hidden states [B, T, H], sum of the layers' auxiliary losses, 0-d fp32).

        options: further arguments of the blocks.
        """
        x = self.dropout(x)
        cos, sin = rope_tables(self.config, position_ids)
        aux_loss = torch.zeros((), device=x.device)
        for layer in self.layers:
            x, layer_aux = layer(x, cos, sin, mask, segments, num_segments, **options)
            aux_loss = aux_loss if layer_aux is None else aux_loss + layer_aux
        return self.norm(x), aux_loss


@dataclass
class MiniMindOutput(CausalLMOutputWithPast):
    """`loss` is the mean cross-entropy alone; to train, add `aux_loss` (0-d; zero for a dense model and in eval mode)."""

    aux_loss: torch.FloatTensor | None = None
    last_hidden_state: torch.FloatTensor | None = None


class MiniMindForCausalLM(PreTrainedModel, GenerationMixin):
    """The language model: head tied to the embedding, Hugging Face interface, `training_losses` for the trainers."""

    config_class = MiniMindConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    accepts_loss_kwargs = True  # transformers.Trainer passes num_items_in_batch, so that its accumulation is exact
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}
    _no_split_modules = ["Block"]
    _supports_sdpa = True

    def __init__(self, config):
        super().__init__(config)
        self.model = MiniMindModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.fast_path = None  # set by compile_training
        self.post_init()

    @torch.no_grad()
    def _init_weights(self, module):
        """minimind2: uniform(±1/sqrt(fan_in)), nn.Linear's own, for every matrix; minimind3: normal(0, 0.02)."""
        if isinstance(module, (nn.Linear, nn.Embedding)):
            if self.config.generation == "minimind2":
                bound = module.weight.shape[1] ** -0.5
                init.uniform_(module.weight, -bound, bound)
            else:
                init.normal_(module.weight, 0.0, self.config.initializer_range)
        elif isinstance(module, RMSNorm):
            init.ones_(module.weight)

    @classmethod
    def from_pth(cls, path, **overrides):
        """Loads a flat half-precision state dict of either generation, strictly; the model is fp32 and in eval mode.

        The config comes from the `.json` beside the file, or else from its keys and shapes; `overrides` are config
        fields that win over both. ValueError (one line) for a file that is not one, that does not fit, or that leaves
        a field open.
        """
        return load_pth(cls, path, overrides)

    def training_losses(self, input_ids, targets, document_ids=None, position_ids=None):
        """-> (cross-entropy summed over the targets, auxiliary loss averaged over the documents), both 0-d fp32.

        All arguments [B, T] int64. position_ids: from 0 in each document; None: from 0 in each row.
        targets: the token to predict at each position, -100 where there is none (nothing is shifted here).
        document_ids: 0, 1, ... (below T) within a row, -1 where there is padding; attention and the statistics of
        seq_aux stay within a document. None: each row is one document. The batch-wise auxiliary losses (seq_aux
        false, minimind3) take all tokens but padding together.
        """
        B, T = input_ids.shape
        self.check_length(T)
        x = self.model.embed_tokens(input_ids)
        if position_ids is None:
            position_ids = torch.arange(T, device=x.device).unsqueeze(0)
        segments = self.segments(B, T, document_ids, x.device)
        for layer in self.model.layers if self.config.use_moe else ():
            layer.mlp.slots.zero_()  # before the pass: checkpointing counts once more in the backward pass
        targets = targets.reshape(-1)
        fast = self.fast_path
        if fast is not None and fast.serves(self, x):
            documents = torch.zeros_like(input_ids) if document_ids is None else document_ids
            options = {"attend": fast.attend, "compute": fast.compute}
            hidden, aux_loss = self.model(x, position_ids, fast.mask(x, documents), *segments, **options)
            loss = chunked_cross_entropy(hidden.view(B * T, -1), self.lm_head.weight, targets, fast.logit_gradients)
        else:
            mask = None if document_ids is None else document_mask(document_ids)
            hidden, aux_loss = self.model(x, position_ids, mask, *segments)
            loss = chunked_cross_entropy(hidden.view(B * T, -1), self.lm_head.weight, targets)
        return loss, aux_loss

    def compile_training(self, shape=None):
        """Compile, at its first use, what training_losses computes in train mode; state-dict keys stay as they are.

        shape: (rows, positions) of a full micro-batch, None: of the first one that comes. Other shapes stay eager.
        """
        self.fast_path = FastPath(self, shape)

    def expert_slots(self):
        """[layers, experts]: the tokens that the router of each layer gave to each expert in the last `training_losses`.

        Counted in train mode alone, without padding. Nothing waits for the device here.
        """
        return torch.stack([layer.mlp.slots for layer in self.model.layers])

    @can_return_tuple
    def forward(
        self,
        input_ids=None,
        attention_mask=None,
        position_ids=None,
        past_key_values=None,
        inputs_embeds=None,
        labels=None,
        use_cache=False,
        logits_to_keep=0,
        num_items_in_batch=None,
    ):
        """input_ids [B, T] (or inputs_embeds [B, T, H]) -> MiniMindOutput with logits [B, T, V].

        attention_mask: [B, S] with 0 at padding, or a ready [B, 1, T, S]; past_key_values: a transformers Cache;
        logits_to_keep: an int (the last so many positions, 0: all) or an index tensor.
        labels [B, T]: shifted inside, -100 ignored; the loss is the mean, or the sum / num_items_in_batch.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("pass exactly one of input_ids and inputs_embeds")
        if labels is not None and not (isinstance(logits_to_keep, int) and logits_to_keep == 0):
            raise ValueError("labels need the logits of every position: leave logits_to_keep at 0")
        x = self.model.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        B, T, _ = x.shape
        if use_cache and past_key_values is None:
            past_key_values = DynamicCache(config=self.config)
        past = past_key_values.get_seq_length() if past_key_values is not None else 0  # a tensor in a StaticCache
        self.check_length(T + past if isinstance(past, int) else T)
        if position_ids is None:
            position_ids = (torch.arange(T, device=x.device) + past).unsqueeze(0)
        padding = attention_mask if attention_mask is not None and attention_mask.dim() == 2 else None
        mask = attention_mask
        if padding is not None or (attention_mask is None and past_key_values is not None):
            S = T if past_key_values is None else past_key_values.get_mask_sizes(T, 0)[0]
            mask = visible_keys(padding, T, S, past, x.device)
        document_ids = None if padding is None else padding[:, -T:].long() - 1  # padding: -1
        segments = self.segments(B, T, document_ids, x.device) if self.training else (None, 0)
        hidden, aux_loss = self.model(x, position_ids, mask, *segments, past_key_values=past_key_values)
        kept = slice(-logits_to_keep or None, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(hidden[:, kept])
        loss = None
        if labels is not None:
            targets = labels[:, 1:].reshape(-1)
            count = (targets != -100).sum().clamp(min=1) if num_items_in_batch is None else num_items_in_batch
            predictions = logits[:, :-1].flatten(0, 1).float()
            loss = F.cross_entropy(predictions, targets, ignore_index=-100, reduction="sum") / count
        return MiniMindOutput(
            loss=loss,
            logits=logits,
            past_key_values=past_key_values if use_cache else None,
            aux_loss=aux_loss,
            last_hidden_state=hidden,
        )

    def segments(self, B, T, document_ids, device):
        """(segment of each token [B*T], number of segments) for `moe.balance_loss`; (None, 0) for a dense model."""
        if not self.config.use_moe:
            return None, 0
        if document_ids is None:
            document_ids = torch.zeros(B, T, dtype=torch.long, device=device)
        if not self.config.seq_aux:  # all tokens but padding are one segment
            return document_ids.clamp(max=0).reshape(-1), 1
        row_starts = torch.arange(0, B * T, T, device=device).unsqueeze(1)  # T documents a row at most
        return torch.where(document_ids < 0, -1, row_starts + document_ids).reshape(-1), B * T

    def check_length(self, length):
        if length > self.config.max_position_embeddings:
            raise ValueError(
                f"{length} positions, but max_position_embeddings is {self.config.max_position_embeddings}: "
                "shorten the input or raise that config field"
            )


AutoConfig.register(MiniMindConfig.model_type, MiniMindConfig)
AutoModelForCausalLM.register(MiniMindConfig, MiniMindForCausalLM)
