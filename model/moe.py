"""Feed-forward layers: the dense SwiGLU and the mixture of such experts of both MiniMind generations.

Shape letters: B rows, T positions, N = B*T tokens, H hidden, I intermediate, E routed experts, K experts per token.
"""

import torch
import torch.nn.functional as F
from torch import nn


class FeedForward(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x)), [..., H] -> [..., H]; https://arxiv.org/abs/2002.05202."""

    def __init__(self, hidden_size, intermediate_size, dropout=0.0):
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        return self.dropout(self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x)))


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
        aux_loss = scores.new_zeros(())
        if segments is not None and self.config.router_aux_loss_coef:
            aux_loss = balance_loss(scores, chosen, segments, num_segments) * self.config.router_aux_loss_coef
            if self.config.generation == "minimind2":  # shares of the routed slots sum to 1; minimind3's load sums to K
                aux_loss = aux_loss / self.config.num_experts_per_tok
        return out.view(x.shape), aux_loss

    def route(self, tokens):
        """tokens [N, H] -> softmax scores [N, E] (fp32), weights [N, K] of the chosen experts, chosen [N, K]."""
        with torch.autocast(tokens.device.type, enabled=False):  # close scores decide the routing: fp32
            scores = F.linear(tokens.float(), self.gate.weight.float()).softmax(dim=-1)
        weights, chosen = scores.topk(self.config.num_experts_per_tok, dim=-1, sorted=False)
        if self.config.norm_topk_prob:
            if self.config.num_experts_per_tok > 1:
                weights = weights / weights.sum(dim=-1, keepdim=True)
            elif self.config.generation == "minimind3":
                # minimind3 normalises a single score too, to the constant 1, which gives its router no gradient from
                # the LM loss. The value stays 1 (its checkpoints need that); the gradient is that of log(score).
                weights = weights / weights.detach()
        return scores, weights, chosen


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
    """The same with the tokens sorted by expert: three grouped matrix products over exactly the N*K chosen slots."""
    N, K = chosen.shape
    dtype = compute_dtype(tokens)  # grouped_mm does not follow autocast
    gate, up, down = (
        torch.stack([getattr(expert, name).weight for expert in experts]).to(dtype).transpose(1, 2)  # [E, in, out]
        for name in ("gate_proj", "up_proj", "down_proj")
    )
    slots = chosen.reshape(-1)  # [N*K], slot s belongs to token s // K
    order = slots.argsort(stable=True)
    numbers = torch.arange(len(experts), device=slots.device)
    ends = (slots <= numbers.unsqueeze(1)).sum(dim=1, dtype=torch.int32)  # [E]: where each expert's sorted slots end
    rows = tokens.to(dtype)[order // K]  # [N*K, H]
    hidden = F.silu(F.grouped_mm(rows, gate, offs=ends)) * F.grouped_mm(rows, up, offs=ends)
    routed = experts[0].dropout(F.grouped_mm(hidden, down, offs=ends))
    unsorted = torch.empty_like(order).scatter_(0, order, torch.arange(N * K, device=order.device))
    routed = routed[unsorted].view(N, K, -1)
    return (routed * weights.to(dtype).unsqueeze(-1)).sum(dim=1).type_as(tokens)


def can_group(experts, tokens):
    """Whether grouped_mm serves: bf16 on CPU and CUDA with rows of whole 16 bytes, fp32 on the CPU unless compiled."""
    dtype, device = compute_dtype(tokens), tokens.device.type
    if not hasattr(F, "grouped_mm"):
        return False
    if dtype == torch.float32:  # the compiler's shape check of grouped_mm knows bf16 alone
        return device == "cpu" and not torch.compiler.is_compiling()
    aligned = all(size % 8 == 0 for size in experts[0].gate_proj.weight.shape)
    return dtype == torch.bfloat16 and device in ("cpu", "cuda", "meta") and aligned


def compute_dtype(x):
    """The dtype in which a matrix product of x runs: autocast's where it is on."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if device != "meta" and torch.is_autocast_enabled(device) else x.dtype
