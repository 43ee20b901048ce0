"""Generates text with a MiniMind model: a token of each row in each pass.

    rows = decode(model, [[1, 320, 1087]], Sampling(max_new_tokens=100, temperature=0.8, top_p=0.9), end_ids=[2])

Prompts run through the model's own forward pass, which fills a cache of a fixed size. So do the tokens after them, unless
`fuse(model)` was called: then `FusedLayer` computes the same, up to rounding, with half as many operations. A token of a small
model takes as long as their launches, not as the arithmetic.

Shape letters: B rows, T positions of the longest prompt, S of it and its continuation, H hidden, V vocabulary, D head dimension.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from model.config import ModelConfig
from model.masks import cached_mask, first_keys
from model.model_minimind import Block, MiniMindLM, rope_tables
from model.products import FeedForward, is_plain
from model.static_cache import StaticCache

# times that `draw` tries without sorting
TRIES = 4

# called with the tokens of a position [B] and the logits from which they were drawn [B, V]
OnTokens = Callable[[torch.Tensor, torch.Tensor], object]


@dataclass(frozen=True)
class Sampling:
    """temperature 0: the likeliest token. top_k 0, top_p 1: of all tokens. repetition_penalty: see `penalised`."""

    max_new_tokens: int
    temperature: float
    top_p: float
    top_k: int = 0
    repetition_penalty: float = 1.0


@torch.no_grad()
def decode(
    model: MiniMindLM,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    end_ids: Collection[int] = (),
    on_tokens: OnTokens | None = None,
) -> list[list[int]]:
    """Continue prompts of one or more ids, each until one of end_ids, which it then ends in, or by max_new_tokens.

    Draws from torch's global random generator. A row that has ended is computed on, for on_tokens too, while others have not.
    The model is in eval mode. Errors: ValueError for logits that are NaN.
    """
    device = model.lm_head.weight.device
    T = max(map(len, prompts))
    S = T + sampling.max_new_tokens
    # Prompts end in the same column: shorter ones are padded on the left.
    n_padding = [T - len(prompt) for prompt in prompts]
    ids = torch.tensor([[0] * n + list(prompt) for n, prompt in zip(n_padding, prompts, strict=True)], device=device)
    columns = torch.arange(S, device=device)
    padding = torch.tensor(n_padding, device=device).unsqueeze(1)
    position_ids = (columns - padding).clamp(min=0)  # [B, S]
    is_text = columns >= padding if any(n_padding) else None
    # A single query that sees every key before it needs no mask. A field of the config may hide keys, see `first_keys`.
    sees_all = not any(n_padding) and not first_keys(model.config, columns).any()
    seen = torch.zeros(len(prompts), model.config.vocab_size, dtype=torch.bool, device=device)
    for of_row, prompt in zip(seen, prompts, strict=True):
        of_row[list(prompt)] = True
    cache = StaticCache(model.config, len(prompts), S)
    cos, sin = (table.squeeze(1) for table in rope_tables(model.config, position_ids))  # each [B, S, D]
    half = model.config.head_dim // 2
    # x * cos + roll(x) * sin is then `model_minimind.rotate`.
    sin = torch.cat((-sin[..., :half], sin[..., half:]), dim=-1)

    rows: list[list[int]] = [[] for _ in prompts]
    ended: set[int] = set()
    # A pass takes the columns from start to end, the prompts first, and draws the tokens of column `end`.
    for end in range(T, S):
        start = cache.length
        fused = model.fused_layers if start else None
        known = None if is_text is None else is_text[:, :end]
        mask = None if fused and sees_all else cached_mask(model.config, columns[start:end], cache, known)
        if fused:
            logits = fused(ids, cache, cos[:, start:end], sin[:, start:end], mask)
        else:
            logits = model.next_logits(ids, position_ids[:, start:end], mask, cache)
        cache.length = end
        if sampling.repetition_penalty != 1:
            if start:
                seen.scatter_(1, ids, True)
            logits = penalised(logits, seen, sampling.repetition_penalty)
        tokens = draw(logits, sampling)
        if on_tokens:
            on_tokens(tokens, logits)
        ids = tokens.unsqueeze(1)
        for row, token in enumerate(tokens.tolist()):
            if row not in ended:
                rows[row].append(token)
                if token in end_ids:
                    ended.add(row)
        if len(ended) == len(rows):
            break
    return rows


def penalised(logits: torch.Tensor, seen: torch.Tensor, penalty: float) -> torch.Tensor:
    """Logits [B, V], those of seen tokens (bool [B, V]) divided by `penalty`; https://arxiv.org/abs/1909.05858, section 4.1.

    A negative one, which that would make likelier, is multiplied, as in transformers.
    """
    return torch.where(seen, torch.where(logits < 0, logits * penalty, logits / penalty), logits)


def draw(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """logits [B, V] -> a token of each row [B], from transformers' distributions: temperature first, then top_k, then top_p.

    Of equally likely tokens at the edge of top_p all may be drawn, where transformers leaves some out. Errors: ValueError for NaN.
    """
    if sampling.temperature == 0:
        return logits.argmax(dim=-1)
    logits = logits.float() / sampling.temperature
    if sampling.top_k:
        least = logits.topk(min(sampling.top_k, logits.shape[-1])).values[:, -1:]
        logits = logits.masked_fill(logits < least, float("-inf"))
    probabilities = logits.softmax(dim=-1)
    # top_p keeps the likeliest tokens that reach it together. One drawn from all is among them with a probability of at least
    # top_p: to draw again is mostly enough, and faster than to sort the vocabulary.
    is_kept = torch.zeros_like(probabilities[:, :1], dtype=torch.bool)
    tokens = torch.zeros_like(is_kept, dtype=torch.long)
    for _ in range(TRIES):
        tokens = torch.where(is_kept, tokens, draw_any(probabilities))
        likelier = probabilities > probabilities.gather(1, tokens)
        is_kept = (probabilities * likelier).sum(dim=-1, keepdim=True) < sampling.top_p
        if is_kept.all():
            return tokens.squeeze(1)
    likely, ids = probabilities.sort(descending=True)
    before = likely.cumsum(dim=-1) - likely
    tokens_kept = ids.gather(1, draw_any(likely * (before < sampling.top_p)))
    return torch.where(is_kept, tokens, tokens_kept).squeeze(1)


def draw_any(weights: torch.Tensor) -> torch.Tensor:
    """A column of each row [B, 1], in proportion to weights [B, columns]; torch.multinomial draws a number for each weight.

    Errors: ValueError for NaN.
    """
    sums = weights.cumsum(dim=-1)
    if sums[:, -1].isnan().any():
        raise ValueError("the model's logits are NaN: its weights are damaged, or too large for this precision")
    # Above 0, so that no column of weight 0 is found.
    share = 1 - torch.rand(len(sums), 1, device=sums.device)
    return torch.searchsorted(sums, share * sums[:, -1:])


# ------------------------------------------------------------------------------------------------ fused layers


def fuse(model: MiniMindLM) -> None:
    """From now on `decode` runs fused layers; without effect if a product is not plain, such as with adapters or hooks.

    Call it again after `model.to(...)`: the layers hold the weights that they found, of which the model's become views, so that
    they take no more memory.
    """
    products = [module for name, module in model.named_modules() if name.endswith(("_proj", "lm_head"))]
    if all(map(is_plain, products)):
        model.fused_layers = FusedLayers(model)


def joined(*linears: nn.Linear) -> torch.Tensor:
    """The weights of several nn.Linear below each other; theirs become views of it."""
    weight = torch.cat([linear.weight.data for linear in linears])
    parts = weight.split([linear.out_features for linear in linears])
    for linear, part in zip(linears, parts, strict=True):
        linear.weight.data = part
    return weight


def product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """F.linear of x [B, inputs] and weight [outputs, inputs]."""
    if len(x) == 1 and weight.dtype == torch.bfloat16 and weight.device.type == "cpu":
        # F.linear would rearrange the weight, which takes longer than to read it.
        return torch.mv(weight, x[0]).unsqueeze(0)
    return F.linear(x, weight)


class Norm:
    """RMSNorm in fp32, in fewer operations than the model's, of which each takes as long as the arithmetic of a position."""

    def __init__(self, weight: torch.Tensor, config: ModelConfig) -> None:
        """weight [..., size]"""
        # x / sqrt(mean(x²) + eps) = x / sqrt(|x|² + size * eps) * sqrt(size)
        size = weight.shape[-1]
        self.scale = weight.float() * size**0.5
        self.eps = self.scale.new_tensor(size * config.rms_norm_eps)
        self.dtype = weight.dtype

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., size] fp32 -> [..., size] in the dtype of the weight"""
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        return (x * torch.addcmul(self.eps, length, length).rsqrt() * self.scale).to(self.dtype)


class FusedLayers:
    """`MiniMindLM.next_logits` of one position."""

    def __init__(self, model: MiniMindLM) -> None:
        self.embed = model.model.embed_tokens
        self.layers = [FusedLayer(block, model.config) for block in model.model.layers]
        self.norm = Norm(model.model.norm.weight, model.config)
        self.head = model.lm_head.weight

    def __call__(
        self, ids: torch.Tensor, cache: StaticCache, cos: torch.Tensor, sin: torch.Tensor, mask: torch.Tensor | None
    ) -> torch.Tensor:
        """ids [B, 1] -> logits [B, V]. cos, sin [B, 1, D], the first half of sin negative. mask: bool [B, 1, 1, keys], None: every
        key is visible."""
        x = self.embed(ids[:, 0]).float()
        for number, layer in enumerate(self.layers):
            x = layer(x, cache, number, cos, sin, mask)
        return product(self.norm(x), self.head)


class FusedLayer:
    """`Block.compute` of one position, with one product for q, k and v, and one for gate and up. The residual stream is fp32."""

    def __init__(self, block: Block, config: ModelConfig) -> None:
        attention = block.self_attn
        self.n_heads = config.num_attention_heads
        self.n_key_heads = config.num_key_value_heads
        self.head_dim = config.head_dim
        self.qkv = joined(attention.q_proj, attention.k_proj, attention.v_proj)
        self.o = attention.o_proj.weight
        self.input_norm = Norm(block.input_layernorm.weight, config)
        self.mlp_norm = Norm(block.post_attention_layernorm.weight, config)
        self.qk_norm = None
        if attention.has_qk_norm:
            q_weight = attention.q_norm.weight.expand(self.n_heads, -1)
            k_weight = attention.k_norm.weight.expand(self.n_key_heads, -1)
            self.qk_norm = Norm(torch.cat((q_weight, k_weight)), config)
        self.mlp = block.mlp
        if isinstance(self.mlp, FeedForward):
            self.gate_up = joined(self.mlp.gate_proj, self.mlp.up_proj)
            self.down = self.mlp.down_proj.weight

    def __call__(
        self,
        x: torch.Tensor,
        cache: StaticCache,
        number: int,
        cos: torch.Tensor,
        sin: torch.Tensor,
        mask: torch.Tensor | None,
    ) -> torch.Tensor:
        """x [B, H] fp32 -> [B, H] fp32. number: of the layer. The rest: see FusedLayers."""
        B = len(x)
        n_qk = self.n_heads + self.n_key_heads
        qkv = product(self.input_norm(x), self.qkv).view(B, n_qk + self.n_key_heads, self.head_dim)
        qk, v = qkv.split((n_qk, self.n_key_heads), dim=1)
        if self.qk_norm:
            qk = self.qk_norm(qk.float())
        qk = torch.addcmul(qk * cos, qk.roll(self.head_dim // 2, dims=-1), sin).type_as(v)
        q, k = qk.split((self.n_heads, self.n_key_heads), dim=1)
        keys, values = cache.update(k.unsqueeze(2), v.unsqueeze(2), number)
        # The query heads of a group are to attention like queries at several positions.
        grouped = q.reshape(B, self.n_key_heads, -1, self.head_dim)
        y = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=mask)
        x = x + product(y.reshape(B, -1), self.o)
        normed = self.mlp_norm(x)
        if not isinstance(self.mlp, FeedForward):
            y, _ = self.mlp(normed.unsqueeze(1))
            return x + y.squeeze(1)
        gate, up = product(normed, self.gate_up).chunk(2, dim=-1)
        return x + product(F.silu(gate).mul_(up), self.down)
