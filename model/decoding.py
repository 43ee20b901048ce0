"""Text from a MiniMind model, a position of all rows at a time.

    rows = decode(model, [[1, 320, 1087]], Sampling(max_new_tokens=100, temperature=0.8, top_p=0.9), end_ids=[2])

Prompts run through the model's own forward pass, which fills a cache of a fixed size. So do the tokens after them, unless
`fuse(model)` was called: then `FusedLayer` computes the same with a third of the operations. A position of a small model takes
as long as its calls, not as its arithmetic.

Shape letters: B rows, T positions of the longest prompt, S of it and its continuation, H hidden, I intermediate, V vocabulary,
D head dimension, N query heads, G key/value heads.
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
    The model is in eval mode. Autocast applies, except to a fused model.
    """
    device = model.lm_head.weight.device
    T = max(map(len, prompts))
    S = T + sampling.max_new_tokens
    n_padding = [T - len(prompt) for prompt in prompts]
    prompt_ids = [[0] * n + list(prompt) for n, prompt in zip(n_padding, prompts, strict=True)]
    ids = torch.tensor(prompt_ids, device=device)
    columns = torch.arange(S, device=device)
    starts = torch.tensor(n_padding, device=device).unsqueeze(1)
    position_ids = (columns - starts).clamp(min=0)  # [B, S]
    is_text = columns >= starts if any(n_padding) else None
    sees_all = not any(n_padding) and not first_keys(model.config, columns).any()
    seen = torch.zeros(len(prompts), model.config.vocab_size, dtype=torch.bool, device=device)
    for row, prompt in zip(seen, prompts, strict=True):
        row[list(prompt)] = True
    cache = StaticCache(model.config, len(prompts), S)
    tables = [table.squeeze(1) for table in rope_tables(model.config, position_ids)]  # cos, sin: each [B, S, D]

    rows: list[list[int]] = [[] for _ in prompts]
    ended: set[int] = set()
    for end in range(T, S):
        start = cache.length
        fused = model.fused_layers if start else None
        padding = None if is_text is None else is_text[:, :end]
        mask = None if fused and sees_all else cached_mask(model.config, columns[start:end], cache, padding)
        if fused:
            logits = fused_logits(model, ids, cache, [table[:, start:end] for table in tables], mask)
        else:
            logits = model.next_logits(ids, position_ids[:, start:end], mask, cache)
        cache.length = end
        if sampling.repetition_penalty != 1:
            logits = penalised(logits, seen, sampling.repetition_penalty)
        tokens = draw(logits, sampling)
        if on_tokens:
            on_tokens(tokens, logits)
        ids = tokens.unsqueeze(1)
        seen.scatter_(1, ids, True)
        for number, token in enumerate(tokens.tolist()):
            if number not in ended:
                rows[number].append(token)
                if token in end_ids:
                    ended.add(number)
        if len(ended) == len(rows):
            break
    return rows


def penalised(logits: torch.Tensor, seen: torch.Tensor, penalty: float) -> torch.Tensor:
    """Logits [B, V] of which those of seen tokens (bool [B, V]) are less likely, https://arxiv.org/abs/1909.05858 section 4.1.

    As in transformers: negative logits, which that division would make more likely, are multiplied.
    """
    return torch.where(seen, torch.where(logits < 0, logits * penalty, logits / penalty), logits)


def draw(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """logits [B, V] -> a token of each row [B], from transformers' distributions: temperature first, then top_k, then top_p."""
    if sampling.temperature == 0:
        return logits.argmax(dim=-1)
    logits = logits.float() / sampling.temperature
    if sampling.top_k:
        least = logits.topk(min(sampling.top_k, logits.shape[-1])).values[:, -1:]
        logits = logits.masked_fill(logits < least, float("-inf"))
    probabilities = logits.softmax(dim=-1)
    # The likeliest tokens that reach top_p together: one drawn from all tokens is among them with this probability or more, and
    # to draw again takes less time than to sort the vocabulary.
    tokens = draw_any(probabilities)
    for _ in range(TRIES):
        likelier = probabilities > probabilities.gather(1, tokens)
        is_in = (probabilities * likelier).sum(dim=-1, keepdim=True) < sampling.top_p
        if is_in.all():
            return tokens.squeeze(1)
        tokens = torch.where(is_in, tokens, draw_any(probabilities))
    likely, ids = probabilities.sort(descending=True)
    before = likely.cumsum(dim=-1) - likely
    tokens_in = ids.gather(1, draw_any(likely * (before < sampling.top_p)))
    return torch.where(is_in, tokens, tokens_in).squeeze(1)


def draw_any(weights: torch.Tensor) -> torch.Tensor:
    """A column of each row [B, 1], in proportion to weights [B, columns]; torch.multinomial draws a number for each weight."""
    sums = weights.cumsum(dim=-1)
    # Above 0, so that no column of weight 0 is found.
    share = 1 - torch.rand(len(sums), 1, device=sums.device)
    return torch.searchsorted(sums, share * sums[:, -1:])


# ------------------------------------------------------------------------------------------------ fused layers


def fuse(model: MiniMindLM) -> None:
    """From now on `decode` runs `FusedLayer`s; without effect for a model whose products are not plain, such as with adapters.

    The model's weights become views of the joined ones: they take no more memory, and training them would be slower.
    """
    products = [module for module in model.model.modules() if isinstance(module, nn.Linear)]
    if all(map(is_plain, products)):
        model.fused_layers = [FusedLayer(block, model.config) for block in model.model.layers]


def joined(*linears: nn.Linear) -> torch.Tensor:
    """The weights of several nn.Linear below each other; theirs become views of it."""
    weight = torch.cat([linear.weight.data for linear in linears])
    parts = weight.split([linear.out_features for linear in linears])
    for linear, part in zip(linears, parts, strict=True):
        linear.weight.data = part
    return weight


def fused_logits(
    model: MiniMindLM, ids: torch.Tensor, cache: StaticCache, tables: Sequence[torch.Tensor], mask: torch.Tensor | None
) -> torch.Tensor:
    """`MiniMindLM.next_logits` of one position, ids [B, 1], by the fused layers. tables: cos and sin of it, each [B, 1, D]."""
    cos, sin = tables
    half = sin.shape[-1] // 2
    # x * cos + roll(x) * sin is then `model_minimind.rotate`.
    sin = torch.cat((-sin[..., :half], sin[..., half:]), dim=-1)
    x = model.model.embed_tokens(ids[:, 0]).float()
    assert model.fused_layers is not None
    for number, layer in enumerate(model.fused_layers):
        x = layer(x, cache, number, cos, sin, mask)
    norm = Norm(model.model.norm.weight, model.config)
    return product(norm(x), model.lm_head.weight)


def product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """F.linear of x [B, I] and weight [O, I]."""
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
        """x [B, H] fp32 -> [B, H] fp32. number: of the layer. cos, sin [B, 1, D]. mask: bool [B, 1, 1, keys] or None."""
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
