"""First weights that can copy: two attention heads, set by hand, that find what followed the present token before.

Text repeats itself, and a model that has learned to say "what came after this word the last time comes again" is far better
than one that has not. Two heads in successive layers do it (Olsson et al. 2022, arXiv 2209.11895): the first looks at the
token before, and the second at places whose token before is the present one. A small model finds them after 10 to 20 million
tokens, one seed much later than another; with these weights it has them from its first updates on, and improves them.
Only numbers are set: the model is one like any other, for whoever loads it.

The residual stream [H] is used like this, with n coordinates for each of two copies of a token:

    0 .. n-1     the token itself, as its embedding says
    n .. 2n-1    the token before it, which layer 0 adds to the embedding's own numbers there
    H-1          a constant that all embeddings share; the last norm hides it from the head, to which it could say nothing
"""

import torch

from model.config import MiniMindConfig
from model.model_minimind import MiniMindForCausalLM, plain_frequencies

# The constant in the embeddings, whose other coordinates grow to a norm of about 7
CONSTANT = 4.0
# Attention logit of the token before, while the constant is nearly all of an embedding; it shrinks to a quarter as these grow.
PREVIOUS_LOGIT = 80.0
# A pair that turns by less than so many radians in so many positions compares tokens wherever they stand. Those of 2,048 positions are
# fewer than those of 512, and end 0.1 % lower in rows of 512 (2 M tokens), 0.2 % in rows of 2,048 (26 M).
SLOW_ANGLE = 1.5
SLOW_POSITIONS = 2048
# Weights of the queries and keys that compare two tokens
MATCH = 5.0
# Part of the token before that layer 0 writes, and of the token found that layer 1 writes
CARRY = 0.3
COPY = 0.5


@torch.no_grad()
def init_induction(model: MiniMindForCausalLM) -> None:
    """Sets query head 0 of the first two layers, the key and value head that it shares with others, and a coordinate of the
    embeddings, in fresh weights with o_proj = 0.

    Errors: ValueError for a model of one layer, and for minimind3, which norms queries and keys.
    """
    config = model.config
    if not can_copy(config):
        raise ValueError("init_scheme induction is for models of generation minimind2 with two layers or more")
    H, D = config.hidden_size, config.head_dim
    n = min(D, (H - 1) // 2)
    model.lm_head.weight[:, -1] = CONSTANT
    model.model.norm.weight[-1] = 0.0
    first, second = model.model.layers[0].self_attn, model.model.layers[1].self_attn

    # The token before: all queries are one vector, all keys the same turned by one position. As RoPE turns each by its own position,
    # their product is the sum of share * cos(frequency * (distance - 1)), which is largest at distance 1. Pairs of dimensions that
    # turn fast tell one position from the next, slow ones a near one from a far one.
    frequencies = plain_frequencies(config, torch.device("cpu"))
    shares = frequencies.sqrt() / frequencies.sqrt().sum()
    # The normed constant is sqrt(H) in a query and in a key, and attention divides their product by sqrt(D).
    sizes = (PREVIOUS_LOGIT * D**0.5 / H * shares).sqrt()
    # `rotate` pairs dimension i with dimension i + D/2.
    query = torch.cat((sizes, torch.zeros(D // 2)))
    key = torch.cat((sizes * frequencies.cos(), sizes * frequencies.sin()))
    for weight, direction in ((first.q_proj.weight, query), (first.k_proj.weight, key)):
        weight[:D] = 0.0
        weight[:D, -1] = direction
    token = torch.eye(H)[:n]
    token_before = torch.eye(H)[n : 2 * n]
    first.v_proj.weight[:n] = token
    first.o_proj.weight[:, :n] = CARRY * token_before.T

    # Where the token before was the present one: compared in the dimensions that RoPE hardly turns
    pairs = (frequencies * SLOW_POSITIONS < SLOW_ANGLE).nonzero().flatten()
    dimensions = torch.cat((pairs, pairs + D // 2))[:n]
    for weight, coordinates in ((second.q_proj.weight, token), (second.k_proj.weight, token_before)):
        weight[:D] = 0.0
        weight[dimensions] = MATCH * coordinates[: len(dimensions)]
    second.v_proj.weight[:n] = token
    second.o_proj.weight[:, :n] = COPY * token.T


def can_copy(config: MiniMindConfig) -> bool:
    """Whether `init_induction` has weights for such a model."""
    return config.generation == "minimind2" and config.num_hidden_layers > 1
