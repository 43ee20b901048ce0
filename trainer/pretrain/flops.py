"""The floating-point operations of training a MiniMind."""

from dataset.packing import RowPlan
from model.config import MiniMindConfig


def flops_per_token(config: MiniMindConfig, length: float) -> float:
    """Floating-point operations of one training step (forward and backward) per token.

    Counts matrix products alone: 2 per multiply-add forward and twice that backward; exact causal attention over rows
    of mean squared length / mean length = `length`; the tied head once, the embedding look-up free.
    """
    H = config.hidden_size
    queries = config.num_attention_heads * config.head_dim
    keys = config.num_key_value_heads * config.head_dim
    # Of the weights that a token is multiplied with, in one layer: three matrices of an MLP, and the router of experts.
    if config.use_moe:
        experts = config.num_experts_per_tok + config.n_shared_experts
        mlp = 3 * H * config.moe_intermediate_size * experts + H * config.num_experts
    else:
        mlp = 3 * H * config.intermediate_size
    # q_proj and o_proj, k_proj and v_proj.
    attention = 2 * H * queries + 2 * H * keys
    weights = config.num_hidden_layers * (attention + mlp) + config.vocab_size * H
    # Scores and their products with v: two products over half of the keys.
    scores = config.num_hidden_layers * length * queries
    return 6 * weights + 6 * scores


def mean_context(plan: RowPlan) -> float:
    """Mean squared / mean length of the pieces in the first 1,000 rows of a plan: `length` of `flops_per_token`."""
    *_, pairs = plan.pieces(range(min(plan.n_rows, 1000)))
    return float((pairs**2).sum() / max(pairs.sum(), 1))
