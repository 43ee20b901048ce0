"""MiniMind on one page, of either generation, without experts: trainer/tour.py trains it.

model/model_minimind.py has the same weights under the same names and, on its plain path, the same initial values, losses and
gradients, bit for bit (tests/model/test_plain.py). It adds experts, half precision, compiled code, a cache and Hugging Face.

Shapes: B rows, T positions, H hidden size, D head dimension, N query heads, G key/value heads.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn


@dataclass
class Config:
    """The defaults are minimind2's; minimind3's are hidden_size 768, num_key_value_heads 4, rms_norm_eps 1e-6."""

    vocab_size: int = 6400
    hidden_size: int = 512
    num_hidden_layers: int = 8
    generation: str = "minimind2"
    num_attention_heads: int = 8
    num_key_value_heads: int = 2
    rms_norm_eps: float = 1e-5
    rope_theta: float = 1e6


def rope(x: torch.Tensor, position_ids: torch.Tensor, theta: float) -> torch.Tensor:
    """Turns dimensions i and i + D/2 of x [B, heads, T, D] together, by an angle that grows with the position [B, T].

    So the product of a query and a key depends on their distance alone; https://arxiv.org/abs/2104.09864.
    """
    D = x.shape[-1]
    even = torch.arange(0, D, 2, device=x.device, dtype=torch.float32)
    angles = position_ids[..., None].float() * (1.0 / theta ** (even / D))  # [B, T, D/2]
    angles = torch.cat((angles, angles), dim=-1).unsqueeze(1)
    first, second = x.chunk(2, dim=-1)
    return x * angles.cos() + torch.cat((-second, first), dim=-1) * angles.sin()


class Attention(nn.Module):
    """Self-attention, [B, T, H] -> [B, T, H], in which N/G query heads share one key/value head."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        H = config.hidden_size
        D = config.hidden_size // config.num_attention_heads
        self.q_proj = nn.Linear(H, config.num_attention_heads * D, bias=False)
        self.k_proj = nn.Linear(H, config.num_key_value_heads * D, bias=False)
        self.v_proj = nn.Linear(H, config.num_key_value_heads * D, bias=False)
        self.o_proj = nn.Linear(config.num_attention_heads * D, H, bias=False)
        self.head_dim = D
        self.group_size = config.num_attention_heads // config.num_key_value_heads
        self.rope_theta = config.rope_theta
        has_norms = config.generation == "minimind3"
        self.q_norm = nn.RMSNorm(D, config.rms_norm_eps) if has_norms else nn.Identity()
        self.k_norm = nn.RMSNorm(D, config.rms_norm_eps) if has_norms else nn.Identity()

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        q, k, v = (linear(x).unflatten(-1, (-1, self.head_dim)) for linear in (self.q_proj, self.k_proj, self.v_proj))
        q = rope(self.q_norm(q).transpose(1, 2), position_ids, self.rope_theta)  # [B, N, T, D]
        k = rope(self.k_norm(k).transpose(1, 2), position_ids, self.rope_theta)  # [B, G, T, D]
        v = v.transpose(1, 2)
        k = k.repeat_interleave(self.group_size, dim=1)  # [B, N, T, D]
        v = v.repeat_interleave(self.group_size, dim=1)
        # softmax(q @ k.T / sqrt(D)) @ v over the keys that the mask shows
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.o_proj(y.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x)); https://arxiv.org/abs/2002.05202."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        H = config.hidden_size
        width = int(H * 8 / 3) if config.generation == "minimind2" else H * math.pi
        width = math.ceil(width / 64) * 64
        self.gate_proj = nn.Linear(H, width, bias=False)
        self.up_proj = nn.Linear(H, width, bias=False)
        self.down_proj = nn.Linear(width, H, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.self_attn = Attention(config)
        self.mlp = FeedForward(config)
        self.input_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        x = x + self.self_attn(self.input_layernorm(x), position_ids, mask)
        return x + self.mlp(self.post_attention_layernorm(x))


class MiniMind(nn.Module):
    """Embedding, blocks, norm, and a head that shares the embedding's weight."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        blocks = nn.ModuleList(Block(config) for _ in range(config.num_hidden_layers))
        norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.model = nn.ModuleDict({"embed_tokens": embedding, "layers": blocks, "norm": norm})
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        for matrix in (p for p in self.parameters() if p.dim() == 2):
            bound = matrix.shape[1] ** -0.5
            if config.generation == "minimind2":
                nn.init.uniform_(matrix, -bound, bound)
            else:
                nn.init.normal_(matrix, 0.0, 0.02)
        self.lm_head.weight = embedding.weight

    def forward(self, input_ids: torch.Tensor, document_ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        """Each int64 [B, T] -> hidden states [B, T, H], of which `lm_head` makes logits [B, T, vocab_size]."""
        # [B, 1, T, T]: a position (row) sees itself and the earlier ones of its document (columns).
        mask = (document_ids.unsqueeze(2) == document_ids.unsqueeze(1)).tril().unsqueeze(1)
        x = self.model["embed_tokens"](input_ids)
        for block in self.model["layers"].children():
            x = block(x, position_ids, mask)
        return self.model["norm"](x)
