"""Feed-forward layers: the dense SwiGLU and the mixture of such experts of both MiniMind generations.

A mixture is computed in one of two ways. `looped_experts` is the reference: every expert sees every token, which is E/K
times the work. `grouped_experts` sorts the chosen slots by expert and computes each expert's rows once, in two matrix
products that know where one expert's rows end and the next one's begin. The tests compare the two.

Shape letters: B rows, T positions, N = B*T tokens, H hidden, I intermediate, E routed experts, K experts per token,
M rows of the grouped products.
"""

from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import nn

from model.config import MiniMindConfig
from model.products import compute_dtype, projections

# Up to here a step of decoding loops over the experts.
FEW_TOKENS = 16

# Rows. On the CPU each new number of rows has a kernel made for it, which takes longer than its product. So every expert
# gets a multiple of these.
ALIGNMENT = 64


class FeedForward(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x)), [..., H] -> [..., H]; https://arxiv.org/abs/2002.05202."""

    def __init__(self, hidden_size: int, intermediate_size: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = projections(x, self.gate_proj, self.up_proj)
        (y,) = projections(F.silu(gate) * up, self.down_proj)
        return self.dropout(y)


class MoEFeedForward(nn.Module):
    """Routed experts (K of E per token) plus shared experts that see every token.

    Shapes never depend on the routing and nothing is read back to the host, so no expert costs a synchronisation.
    An expert without tokens gets a zero gradient, not None: data parallel ranks always reduce the same tensors.
    """

    slots: torch.Tensor

    def __init__(self, config: MiniMindConfig) -> None:
        super().__init__()
        self.config = config
        self.gate = nn.Linear(config.hidden_size, config.num_experts, bias=False)
        self.experts = nn.ModuleList(_expert(config) for _ in range(config.num_experts))
        self.shared_experts = nn.ModuleList(_expert(config) for _ in range(config.n_shared_experts))
        # How often the router chose each expert: see `MiniMindForCausalLM.expert_slots`.
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
        mix = grouped_experts if can_group(experts, tokens) else looped_experts
        out = mix(experts, tokens, weights, chosen)
        for expert in self.shared_experts:
            out = out + expert(tokens)
        if self.training and segments is not None:
            self.count(chosen, segments)
        aux_loss = scores.new_zeros(())
        if segments is not None and self.config.router_aux_loss_coef:
            aux_loss = balance_loss(scores, chosen, segments, num_segments) * self.config.router_aux_loss_coef
            # In minimind2 the experts' loads sum to 1, in minimind3 to K.
            if self.config.generation == "minimind2":
                aux_loss = aux_loss / self.config.num_experts_per_tok
        return out.view(x.shape), aux_loss

    @torch.no_grad()
    def count(self, chosen: torch.Tensor, segments: torch.Tensor) -> None:
        """Add the slots that each expert got to `slots`; padding does not count. chosen [N, K], segments [N]."""
        is_chosen = chosen.unsqueeze(-1) == torch.arange(self.config.num_experts, device=chosen.device)  # [N, K, E]
        self.slots += (is_chosen & (segments >= 0).view(-1, 1, 1)).sum(dim=(0, 1))

    def route(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """tokens [N, H] -> softmax scores [N, E] (fp32), weights [N, K] of the chosen experts, chosen [N, K]."""
        scores = _FullPrecisionLinear.apply(tokens.float(), self.gate.weight.float()).softmax(dim=-1)
        weights, chosen = scores.topk(self.config.num_experts_per_tok, dim=-1, sorted=False)
        if self.config.norm_topk_prob:
            if self.config.num_experts_per_tok > 1:
                weights = weights / weights.sum(dim=-1, keepdim=True)
            elif self.config.generation == "minimind3":
                # minimind3 normalises a single score too, to the constant 1, which gives its router no gradient from
                # the LM loss. The value stays 1 (its checkpoints need that); the gradient is that of log(score).
                weights = weights / weights.detach()
        return scores, weights, chosen


def _expert(config: MiniMindConfig) -> FeedForward:
    return FeedForward(config.hidden_size, config.moe_intermediate_size, config.dropout)


class _FullPrecisionLinear(torch.autograd.Function):
    """F.linear in fp32 (TF32 on a GPU), forward and backward, whatever autocast says: close scores decide the routing.

    A context around the forward pass is not enough. A compiled backward pass runs under the autocast of the whole
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

    scores [N, E], chosen [N, K]; segments [N] in 0..num_segments-1 says which document (or which batch, all 0) a token
    counts for, -1: padding, counts nowhere. The load-balancing loss of https://arxiv.org/abs/2101.03961, equation 4.
    """
    N, E = scores.shape
    # Padding goes to a last segment, which is dropped below: an index_add takes all tokens or none.
    index = torch.where(segments < 0, num_segments, segments)
    used = (chosen.unsqueeze(-1) == torch.arange(E, device=chosen.device)).sum(dim=1).to(scores.dtype)  # [N, E]
    length = scores.new_zeros(num_segments + 1).index_add(0, index, scores.new_ones(N))[:-1]
    load = scores.new_zeros(num_segments + 1, E).index_add(0, index, used)[:-1]
    importance = scores.new_zeros(num_segments + 1, E).index_add(0, index, scores)[:-1]
    per_segment = E * (load * importance).sum(dim=-1) / length.clamp(min=1) ** 2
    return per_segment.sum() / (length > 0).sum().clamp(min=1)


def looped_experts(
    experts: Sequence[FeedForward], tokens: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor
) -> torch.Tensor:
    """The reference: each expert computes every token, weighted 0 where it was not chosen. E/K times the work.

    tokens [N, H], weights and chosen [N, K] -> [N, H].
    """
    out = torch.zeros_like(tokens)
    for e, expert in enumerate(experts):
        share = (weights * (chosen == e)).sum(dim=-1, keepdim=True)  # [N, 1]
        out = out + share.type_as(tokens) * expert(tokens)
    return out


def grouped_experts(
    experts: Sequence[FeedForward], tokens: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor
) -> torch.Tensor:
    """`looped_experts` with the tokens sorted by expert: two grouped matrix products over the chosen slots."""
    # grouped_mm does not follow autocast.
    dtype = compute_dtype(tokens)
    alignment = ALIGNMENT if tokens.device.type == "cpu" else 1
    place, slot, ends = dispatch_plan(chosen, len(experts), alignment)
    gate_up = torch.stack([torch.cat((e.gate_proj.weight, e.up_proj.weight)) for e in experts]).to(dtype)  # [E, 2I, H]
    down = torch.stack([e.down_proj.weight for e in experts]).to(dtype)  # [E, H, I]
    rows = _Dispatch.apply(tokens.to(dtype), place, slot)  # [M, H]
    gate, up = F.grouped_mm(rows, gate_up.transpose(1, 2), offs=ends).chunk(2, dim=-1)
    routed = F.grouped_mm(F.silu(gate) * up, down.transpose(1, 2), offs=ends)
    return _Combine.apply(experts[0].dropout(routed), weights, place, slot).type_as(tokens)


def dispatch_plan(
    chosen: torch.Tensor, num_experts: int, alignment: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """chosen [N, K] -> where each slot's row lies among M rows sorted by expert, and back.

    Each expert has a multiple of `alignment` rows, and M does not depend on the routing. Returns place [N, K] (the row
    of each slot), slot [M] (the slot n * K + k of each row, N * K for a row that fills up) and ends [E] int32.
    """
    expert_of_slot = chosen.reshape(-1)
    device = chosen.device
    n = len(expert_of_slot)

    # Which slots are whose, and the how-many-th of its expert each one is. A sort would do the same; a running sum over a
    # table of E lines is faster, and the compiler can fuse it.
    is_mine = expert_of_slot == torch.arange(num_experts, device=device).unsqueeze(1)  # [E, N*K]
    # From 1.
    rank = is_mine.cumsum(dim=1)

    # Each expert's rows begin where the rows of the one before it end, filled up to the alignment.
    sizes = _rounded_up(rank[:, -1], alignment)
    ends = sizes.cumsum(dim=0)
    starts = ends - sizes
    place = (is_mine * (rank - 1 + starts.unsqueeze(1))).sum(dim=0)

    # The worst case: every expert is filled up by alignment - 1 rows. So M is known without looking at the routing.
    M = _rounded_up(n + num_experts * (alignment - 1), alignment)
    slot = torch.full((M,), n, device=device).scatter(0, place, torch.arange(n, device=device))
    # The last expert takes the rows that are left; they are no slot's, and nobody reads what becomes of them.
    ends = torch.cat((ends[:-1], torch.full_like(ends[-1:], M)))
    return place.view(chosen.shape), slot, ends.to(torch.int32)


def _rounded_up(n: Any, alignment: int) -> Any:
    """The next multiple of the alignment; n: an int or a tensor of them."""
    return -(-n // alignment) * alignment


class _Dispatch(torch.autograd.Function):
    """tokens [N, H] -> rows [M, H]. Both directions are look-ups: a scatter-add would be slower and its order random."""

    @staticmethod
    def forward(ctx: Any, tokens: torch.Tensor, place: torch.Tensor, slot: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(place)
        K = place.shape[1]
        # A row that only fills up copies the last token.
        return tokens[(slot // K).clamp(max=len(tokens) - 1)]

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (place,) = ctx.saved_tensors
        return grad[place].float().sum(dim=1).to(grad.dtype), None, None


class _Combine(torch.autograd.Function):
    """routed [M, H], weights [N, K] -> the weighted sum of each token's rows, [N, H] fp32."""

    @staticmethod
    def forward(
        ctx: Any, routed: torch.Tensor, weights: torch.Tensor, place: torch.Tensor, slot: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(routed, weights, place, slot)
        return (routed[place].float() * weights.unsqueeze(-1)).sum(dim=1)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None, None]:
        routed, weights, place, slot = ctx.saved_tensors
        N, K = place.shape
        # Rows that fill up have the slot N * K: their weight is the 0 at the end.
        row_weights = torch.cat((weights.reshape(-1), weights.new_zeros(1)))[slot]
        d_routed = grad[(slot // K).clamp(max=N - 1)] * row_weights.unsqueeze(1)
        d_weights = (routed[place].float() * grad.unsqueeze(1)).sum(dim=-1)
        return d_routed.to(routed.dtype), d_weights, None, None


def can_group(experts: Sequence[FeedForward], tokens: torch.Tensor) -> bool:
    """Whether grouped_mm serves: bf16 on CPU and CUDA with rows of whole 16 bytes, fp32 on the CPU unless compiled."""
    dtype = compute_dtype(tokens)
    device = tokens.device.type
    if not hasattr(F, "grouped_mm"):
        return False
    if len(tokens) <= FEW_TOKENS and not torch.is_grad_enabled():
        # Decoding: gathering all experts' weights costs more than E products with a few rows.
        return False
    if dtype == torch.float32:
        # The compiler's shape check of grouped_mm knows bf16 alone.
        return device == "cpu" and not torch.compiler.is_compiling()
    # 8 numbers of bf16 are 16 bytes.
    aligned = all(size % 8 == 0 for size in experts[0].gate_proj.weight.shape)
    return dtype == torch.bfloat16 and device in ("cpu", "cuda", "meta") and aligned
