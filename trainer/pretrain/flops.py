"""The floating-point operations of training a MiniMind."""

from dataset.packing import EpochPlan
from model.config import MiniMindConfig


def flops_per_token(config: MiniMindConfig, length: float) -> float:
    """Floating-point operations of one training step (forward and backward) per token.

    Counts matrix products alone: 2 per multiply-add forward and twice that backward; exact causal attention over rows
    of mean squared length / mean length = `length`; the tied head once, the embedding look-up free.
    """
    h, L, D = config.hidden_size, config.num_hidden_layers, config.head_dim
    H, KV = config.num_attention_heads, config.num_key_value_heads
    if config.use_moe:
        width = config.moe_intermediate_size
        mlp = 3 * h * width * (config.num_experts_per_tok + config.n_shared_experts) + h * config.num_experts
    else:
        mlp = 3 * h * config.intermediate_size
    weights = L * (2 * h * H * D + 2 * h * KV * D + mlp) + config.vocab_size * h
    return 6 * weights + 6 * L * length * H * D


def mean_context(plan: EpochPlan) -> float:
    """Mean squared / mean length of the pieces in the first 1,000 rows of a plan: `length` of `flops_per_token`."""
    *_, pairs = plan.pieces(range(min(plan.n_rows, 1000)))
    return float((pairs**2).sum() / max(pairs.sum(), 1))
