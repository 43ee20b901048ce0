"""Initial weights with induction heads: two attention heads, set by hand, find what followed the current token earlier.

Text repeats itself, and a model that predicts "what came after this word the last time comes again" is far better than one
that does not. Two heads in successive layers do it (Olsson et al. 2022, arXiv 2209.11895): the first attends to the previous
token, the second to positions whose previous token is the current one. A small model learns them after 10 to 20 million
tokens, with some seeds much later than with others; with these weights it has them from the first updates, and improves them.
Only initial values are set: code and file format of the model are the same.

Layout of the residual stream [H], with n coordinates for each of two tokens:

    0 .. n-1     the current token, from its embedding
    n .. 2n-1    the previous token, which layer 0 adds to the embedding's values there
    H-1          a constant in all embeddings; the last norm hides it from the head, for which it has no information
"""

import torch

from model.config import ModelConfig
from model.model_minimind import MiniMindLM, plain_frequencies

# The constant in the embeddings; their other coordinates grow to a norm of about 7
CONSTANT = 4.0
# With more entries than this the other coordinates start larger, by the root of the ratio. Most tokens are rare then, and until they are
# trained the constant hides which one it is: with 51,200 the heads were unlearned within 300 updates (128 x 2, two seeds: 4.5 and 3.6 %
# more bits per byte), or weaker (160 x 2: 0.3 %). With as few as 6,144 larger embeddings cost 0.8 %.
FREQUENT_ENTRIES = 12_800
# Narrow heads compare fewer dimensions: those of 32 (64 x 2) were unlearned with 12,800 entries in two runs of three, with embeddings
# twice as large in none of three (3e12 FLOP, 5 % fewer bits per byte). Heads of 48 gained nothing.
NARROW_HEAD = 48
FREQUENT_ENTRIES_OF_NARROW = 3_200
# Attention logit of the previous token while the constant dominates the embeddings; it falls to a quarter as they grow.
PREVIOUS_LOGIT = 80.0
# Pairs that turn less than this many radians in this many positions compare tokens at any distance. There are fewer with 2,048
# positions than with 512, and losses end 0.1 % lower in rows of 512 (2 M tokens), 0.2 % in rows of 2,048 (26 M).
SLOW_ANGLE = 1.5
SLOW_POSITIONS = 2048
# weight in queries and keys that compare two tokens
MATCH = 5.0
# scales of the previous token that layer 0 writes, and of the token that layer 1 copies
CARRY = 0.3
COPY = 0.5


@torch.no_grad()
def init_induction(model: MiniMindLM) -> None:
    """Set query head 0 of the first two layers, the key/value head that it shares with others, and one coordinate of the
    embeddings, in new weights with o_proj = 0.
    """
    config = model.config
    assert supports_induction(config), "settings and planner check it"
    H, D = config.hidden_size, config.head_dim
    n = min(D, (H - 1) // 2)
    frequent = FREQUENT_ENTRIES if D >= NARROW_HEAD else FREQUENT_ENTRIES_OF_NARROW
    model.lm_head.weight *= max(1.0, config.vocab_size / frequent) ** 0.5
    model.lm_head.weight[:, -1] = CONSTANT
    model.model.norm.weight[-1] = 0.0
    first, second = model.model.layers[0].self_attn, model.model.layers[1].self_attn

    # The previous token: all queries are one vector, all keys the same vector turned by one position. RoPE turns each by its position,
    # so their product is the sum of share * cos(frequency * (distance - 1)), largest at distance 1. Fast pairs of dimensions separate
    # one position from the next, slow ones near from far.
    frequencies = plain_frequencies(config, torch.device("cpu"))
    shares = frequencies.sqrt() / frequencies.sqrt().sum()
    # After the norm the constant is sqrt(H) for queries and keys; attention divides their product by sqrt(D).
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

    # Keys whose previous token is the query's: compared in the dimensions that RoPE hardly turns
    pairs = (frequencies * SLOW_POSITIONS < SLOW_ANGLE).nonzero().flatten()
    dimensions = torch.cat((pairs, pairs + D // 2))[:n]
    for weight, coordinates in ((second.q_proj.weight, token), (second.k_proj.weight, token_before)):
        weight[:D] = 0.0
        weight[dimensions] = MATCH * coordinates[: len(dimensions)]
    second.v_proj.weight[:n] = token
    second.o_proj.weight[:, :n] = COPY * token.T


def supports_induction(config: ModelConfig) -> bool:
    """Returns whether `init_induction` supports this config: a model of two layers or more, and without q_norm and k_norm."""
    return config.generation == "minimind2" and config.num_hidden_layers > 1
