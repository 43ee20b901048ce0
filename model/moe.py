"""Mixture of experts of both MiniMind generations, instead of the dense MLP.

Shape letters: B rows, T positions, N = B*T tokens, H hidden, E routed experts, K experts per token.
"""

from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import nn

from model.config import ModelConfig
from model.fast.experts import choose_mix
from model.products import FeedForward, is_plain


class MoEFeedForward(nn.Module):
    """Routed experts (K of E per token) plus shared experts that see every token.

    Shapes never depend on the routing and nothing is read back to the host, so no expert costs a synchronisation.
    An expert without tokens gets a zero gradient, not None: data parallel ranks always reduce the same tensors.
    """

    slots: torch.Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.gate = nn.Linear(config.hidden_size, config.num_experts, bias=False)
        sizes = (config.hidden_size, config.moe_intermediate_size, config.dropout)
        self.experts = nn.ModuleList(FeedForward(*sizes) for _ in range(config.num_experts))
        self.shared_experts = nn.ModuleList(FeedForward(*sizes) for _ in range(config.n_shared_experts))
        # times that the router chose each expert, see `MiniMindLM.expert_slots`.
        self.register_buffer("slots", torch.zeros(config.num_experts), persistent=False)

    def forward(
        self, x: torch.Tensor, segments: torch.Tensor | None = None, num_segments: int = 0
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """x [B, T, H] -> (output [B, T, H], auxiliary loss, 0-d fp32).

        segments [N]: see `balance_loss`; None leaves the auxiliary loss out (a zero is returned).
        """
        tokens = x.reshape(-1, x.shape[-1])  # [N, H]
        scores, weights, chosen = self.route(tokens)
        experts = cast(Sequence[FeedForward], self.experts)
        out = choose_mix(experts, tokens)(experts, tokens, weights, chosen)
        for expert in self.shared_experts:
            out = out + expert(tokens)
        if self.training and segments is not None:
            # [N, K, E]; padding does not count
            is_chosen = chosen.unsqueeze(-1) == torch.arange(self.config.num_experts, device=chosen.device)
            self.slots += (is_chosen & (segments >= 0).view(-1, 1, 1)).sum(dim=(0, 1))
        aux_loss = scores.new_zeros(())
        if segments is not None and self.config.router_aux_loss_coef:
            aux_loss = balance_loss(scores, chosen, segments, num_segments) * self.config.router_aux_loss_coef
            # In minimind2 the experts' loads sum to 1, in minimind3 to K.
            if self.config.generation == "minimind2":
                aux_loss = aux_loss / self.config.num_experts_per_tok
        return out.view(x.shape), aux_loss

    def route(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """tokens [N, H] -> softmax scores [N, E] (fp32), weights [N, K] of the chosen experts, chosen [N, K]."""
        if is_plain(self.gate):
            logits = _FullPrecisionLinear.apply(tokens.float(), self.gate.weight.float())
        else:
            # A router with an adapter, in the precision of its weights
            with torch.autocast(tokens.device.type, enabled=False):
                logits = self.gate(tokens.to(next(self.gate.parameters(), tokens).dtype)).float()
        scores = logits.softmax(dim=-1)
        weights, chosen = scores.topk(self.config.num_experts_per_tok, dim=-1, sorted=False)
        if self.config.norm_topk_prob:
            if self.config.num_experts_per_tok > 1:
                weights = weights / weights.sum(dim=-1, keepdim=True)
            elif self.config.generation == "minimind3":
                # minimind3 normalises a single score too, to the constant 1, which gives its router no gradient from
                # the LM loss. The value stays 1 (its checkpoints need that); the gradient is that of log(score).
                weights = weights / weights.detach()
        return scores, weights, chosen


class _FullPrecisionLinear(torch.autograd.Function):
    """F.linear in fp32, forward and backward, even under autocast: close scores decide the routing.

    On a GPU `set_up` (trainer/machine/compiling.py) allows TF32 for all products with --dtype float32, else for none.

    A context around the forward pass is not enough: a compiled backward pass runs under the autocast of the whole
    compiled region, so its products would be in half precision.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """x fp32 [N, H], weight fp32 [E, H] -> fp32 [N, E]."""
        ctx.save_for_backward(x, weight)
        with torch.autocast(x.device.type, enabled=False):
            return F.linear(x, weight)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight = ctx.saved_tensors
        with torch.autocast(x.device.type, enabled=False):
            return grad @ weight, grad.T @ x


def balance_loss(scores: torch.Tensor, chosen: torch.Tensor, segments: torch.Tensor, num_segments: int) -> torch.Tensor:
    """Mean over segments of E * sum over experts of (chosen slots / tokens) * (mean score); 0-d fp32.

    scores [N, E], chosen [N, K]; segments [N]: each token's document in 0..num_segments-1 (or all 0: one batch), -1:
    padding, which does not count. The load-balancing loss of https://arxiv.org/abs/2101.03961, equation 4.
    """
    N, E = scores.shape
    # Padding goes to a last segment, which is dropped below: an index_add takes all tokens or none.
    index = torch.where(segments < 0, num_segments, segments)
    used = (chosen.unsqueeze(-1) == torch.arange(E, device=chosen.device)).sum(dim=1).to(scores.dtype)  # [N, E]
    # A GPU adds in random order. These two sum whole numbers, so they are exact in any order.
    length = scores.new_zeros(num_segments + 1).index_add(0, index, scores.new_ones(N))[:-1]
    load = scores.new_zeros(num_segments + 1, E).index_add(0, index, used)[:-1]
    sum_over_segments = _by_segments if scores.device.type == "cpu" else _by_tokens
    return sum_over_segments(scores, index, load, length) / (length > 0).sum().clamp(min=1)


def _by_segments(scores: torch.Tensor, index: torch.Tensor, load: torch.Tensor, length: torch.Tensor) -> torch.Tensor:
    """The sum over segments of `balance_loss`: index [N], load [segments, E], length [segments]."""
    E = scores.shape[1]
    importance = scores.new_zeros(len(length) + 1, E).index_add(0, index, scores)[:-1]
    per_segment = E * (load * importance).sum(dim=-1) / length.clamp(min=1) ** 2
    return per_segment.sum()


def _by_tokens(scores: torch.Tensor, index: torch.Tensor, load: torch.Tensor, length: torch.Tensor) -> torch.Tensor:
    """`_by_segments` with each score multiplied before the sum: deterministic on a GPU too."""
    E = scores.shape[1]
    factor = E * load / length.clamp(min=1).unsqueeze(1) ** 2
    # A row of zeros for padding.
    return (scores * F.pad(factor, (0, 0, 0, 1))[index]).sum()
