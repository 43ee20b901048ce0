"""Feed-forward layers: the dense SwiGLU and the mixture of such experts of both MiniMind generations.

Shape letters: B rows, T positions, N = B*T tokens, H hidden, I intermediate, E routed experts, K experts per token.
"""

import torch
import torch.nn.functional as F
from torch import nn

from model.products import compute_dtype, projections

FEW_TOKENS = 16  # up to here a step of decoding loops over the experts


class FeedForward(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x)), [..., H] -> [..., H]; https://arxiv.org/abs/2002.05202."""

    def __init__(self, hidden_size, intermediate_size, dropout=0.0):
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        gate, up = projections(x, self.gate_proj, self.up_proj)
        (y,) = projections(F.silu(gate) * up, self.down_proj)
        return self.dropout(y)


class MoEFeedForward(nn.Module):
    """Routed experts (K of E per token) plus shared experts that see every token.

    Shapes never depend on the routing and nothing is read back to the host, so no expert costs a synchronisation.
    An expert without tokens gets a zero gradient, not None: data parallel ranks always reduce the same tensors.
    """

    def __init__(self, config):
        super().__init__()
        self.config = config
        sizes = config.hidden_size, config.moe_intermediate_size, config.dropout
        self.gate = nn.Linear(config.hidden_size, config.num_experts, bias=False)
        self.experts = nn.ModuleList(FeedForward(*sizes) for _ in range(config.num_experts))
        self.shared_experts = nn.ModuleList(FeedForward(*sizes) for _ in range(config.n_shared_experts))
        self.register_buffer("slots", torch.zeros(config.num_experts), persistent=False)  # see `expert_slots`

    def forward(self, x, segments=None, num_segments=0):
        """x [B, T, H] -> (output [B, T, H], auxiliary loss, 0-d fp32).

        segments [N]: see `balance_loss`; None leaves the auxiliary loss out (a zero is returned).
        """
        tokens = x.reshape(-1, x.shape[-1])  # [N, H]
        scores, weights, chosen = self.route(tokens)
        mix = grouped_experts if can_group(self.experts, tokens) else looped_experts
        out = mix(self.experts, tokens, weights, chosen)
        for expert in self.shared_experts:
            out = out + expert(tokens)
        if self.training and segments is not None:
            self.count(chosen, segments)
        aux_loss = scores.new_zeros(())
        if segments is not None and self.config.router_aux_loss_coef:
            aux_loss = balance_loss(scores, chosen, segments, num_segments) * self.config.router_aux_loss_coef
            if self.config.generation == "minimind2":  # shares of the routed slots sum to 1; minimind3's load sums to K
                aux_loss = aux_loss / self.config.num_experts_per_tok
        return out.view(x.shape), aux_loss

    @torch.no_grad()
    def count(self, chosen, segments):
        """Add the slots that each expert got to `slots`; padding does not count."""
        is_chosen = chosen.unsqueeze(-1) == torch.arange(self.config.num_experts, device=chosen.device)  # [N, K, E]
        self.slots += (is_chosen & (segments >= 0).view(-1, 1, 1)).sum(dim=(0, 1))

    def route(self, tokens):
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


class _FullPrecisionLinear(torch.autograd.Function):
    """F.linear in fp32, forward and backward, whatever autocast says: close scores decide the routing.

    A context around the forward pass is not enough. A compiled backward pass runs under the autocast of the whole
    compiled region, so its products would be in half precision.
    """

    @staticmethod
    def forward(ctx, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """x fp32 [N, H], weight fp32 [E, H] -> fp32 [N, E]."""
        ctx.save_for_backward(x, weight)
        with torch.autocast(x.device.type, enabled=False):
            return F.linear(x, weight)

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight = ctx.saved_tensors
        with torch.autocast(x.device.type, enabled=False):
            return grad @ weight, grad.T @ x


def balance_loss(scores, chosen, segments, num_segments):
    """Mean over segments of E * sum over experts of (chosen slots / tokens) * (mean score); 0-d fp32.

    scores [N, E], chosen [N, K]; segments [N] in 0..num_segments-1 says which document (or which batch, all 0) a token
    counts for, -1: padding, counts nowhere. The load-balancing loss of https://arxiv.org/abs/2101.03961, equation 4.
    """
    N, E = scores.shape
    index = torch.where(segments < 0, num_segments, segments)  # padding goes to a last segment, dropped below
    used = (chosen.unsqueeze(-1) == torch.arange(E, device=chosen.device)).sum(dim=1).to(scores.dtype)  # [N, E]
    length = scores.new_zeros(num_segments + 1).index_add(0, index, scores.new_ones(N))[:-1]
    load = scores.new_zeros(num_segments + 1, E).index_add(0, index, used)[:-1]
    importance = scores.new_zeros(num_segments + 1, E).index_add(0, index, scores)[:-1]
    per_segment = E * (load * importance).sum(dim=-1) / length.clamp(min=1) ** 2
    return per_segment.sum() / (length > 0).sum().clamp(min=1)


def looped_experts(experts, tokens, weights, chosen):
    """The reference: each expert computes every token, weighted 0 where it was not chosen. E/K times the work."""
    out = torch.zeros_like(tokens)
    for e, expert in enumerate(experts):
        share = (weights * (chosen == e)).sum(dim=-1, keepdim=True)  # [N, 1]
        out = out + share.type_as(tokens) * expert(tokens)
    return out


def grouped_experts(experts, tokens, weights, chosen):
    """The same with the tokens sorted by expert: two grouped matrix products over the chosen slots."""
    dtype = compute_dtype(tokens)  # grouped_mm does not follow autocast
    place, slot, ends = dispatch_plan(chosen, len(experts), ALIGNMENT if tokens.device.type == "cpu" else 1)
    gate_up = torch.stack([torch.cat((e.gate_proj.weight, e.up_proj.weight)) for e in experts]).to(dtype)  # [E, 2I, H]
    down = torch.stack([e.down_proj.weight for e in experts]).to(dtype)  # [E, H, I]
    rows = _Dispatch.apply(tokens.to(dtype), place, slot)  # [M, H]
    gate, up = F.grouped_mm(rows, gate_up.transpose(1, 2), offs=ends).chunk(2, dim=-1)
    routed = F.grouped_mm(F.silu(gate) * up, down.transpose(1, 2), offs=ends)
    return _Combine.apply(experts[0].dropout(routed), weights, place, slot).type_as(tokens)


ALIGNMENT = 64  # rows: on the CPU each new number of rows has a kernel made for it, which takes longer than its product


def dispatch_plan(chosen, num_experts, alignment):
    """chosen [N, K] -> where each slot's row lies among M rows sorted by expert, and back.

    Each expert has a multiple of `alignment` rows, and M does not depend on the routing. Returns place [N, K] (the row
    of each slot), slot [M] (the slot n * K + k of each row, N * K for a row that fills up) and ends [E] int32.
    """
    slots = chosen.reshape(-1)
    n = len(slots)
    mine = slots == torch.arange(num_experts, device=slots.device).unsqueeze(1)  # [E, N*K]
    rank = mine.cumsum(dim=1)  # from 1 within each expert
    sizes = -(-rank[:, -1] // alignment) * alignment
    ends = sizes.cumsum(dim=0)
    place = (mine * (rank - 1 + (ends - sizes).unsqueeze(1))).sum(dim=0)
    M = -(-(n + num_experts * (alignment - 1)) // alignment) * alignment
    slot = torch.full((M,), n, device=slots.device).scatter(0, place, torch.arange(n, device=slots.device))
    ends = torch.cat((ends[:-1], torch.full_like(ends[-1:], M)))  # the last expert takes what is left
    return place.view(chosen.shape), slot, ends.to(torch.int32)


class _Dispatch(torch.autograd.Function):
    """tokens [N, H] -> rows [M, H]. Both directions are look-ups: a scatter-add would be slower and its order random."""

    @staticmethod
    def forward(ctx, tokens, place, slot):
        ctx.save_for_backward(place)
        return tokens[(slot // place.shape[1]).clamp(max=len(tokens) - 1)]

    @staticmethod
    def backward(ctx, grad):
        (place,) = ctx.saved_tensors
        return grad[place].float().sum(dim=1).to(grad.dtype), None, None


class _Combine(torch.autograd.Function):
    """routed [M, H], weights [N, K] -> the weighted sum of each token's rows, [N, H] fp32."""

    @staticmethod
    def forward(ctx, routed, weights, place, slot):
        ctx.save_for_backward(routed, weights, place, slot)
        return (routed[place].float() * weights.unsqueeze(-1)).sum(dim=1)

    @staticmethod
    def backward(ctx, grad):
        routed, weights, place, slot = ctx.saved_tensors
        N, K = place.shape
        row_weights = torch.cat((weights.reshape(-1), weights.new_zeros(1)))[slot]  # 0 for rows that fill up
        d_routed = grad[(slot // K).clamp(max=N - 1)] * row_weights.unsqueeze(1)
        d_weights = (routed[place].float() * grad.unsqueeze(1)).sum(dim=-1)
        return d_routed.to(routed.dtype), d_weights, None, None


def can_group(experts, tokens):
    """Whether grouped_mm serves: bf16 on CPU and CUDA with rows of whole 16 bytes, fp32 on the CPU unless compiled."""
    dtype, device = compute_dtype(tokens), tokens.device.type
    if not hasattr(F, "grouped_mm"):
        return False
    if len(tokens) <= FEW_TOKENS and not torch.is_grad_enabled():
        return False  # decoding: gathering all experts' weights costs more than E products with a few rows
    if dtype == torch.float32:  # the compiler's shape check of grouped_mm knows bf16 alone
        return device == "cpu" and not torch.compiler.is_compiling()
    aligned = all(size % 8 == 0 for size in experts[0].gate_proj.weight.shape)
    return dtype == torch.bfloat16 and device in ("cpu", "cuda", "meta") and aligned
