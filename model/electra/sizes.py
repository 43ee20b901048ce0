"""The published sizes of ELECTRA and the choices of its flags. Nothing here needs torch, so `--help` answers at once."""

from dataclasses import dataclass

SAMPLING = ("multinomial", "fp32_gumbel", "fp16_gumbel")
MASK_STYLES = ("electra", "bert")
POSITION_INITS = ("normal", "sinusoidal")
# Positions of an example: two segments and their special tokens.
SHORTEST = 5


@dataclass(frozen=True)
class Size:
    """A published configuration, its fields named as the flags: the networks (the generator's width, heads and FFN are
    divided by `generator_divisor`), and how they are trained."""

    num_hidden_layers: int
    hidden_size: int
    num_attention_heads: int
    intermediate_size: int
    embedding_size: int
    generator_divisor: int
    max_steps: int
    batch_size: int
    max_seq_len: int
    learning_rate: float
    mask_share: float


SIZES = {
    "small": Size(12, 256, 4, 1024, 128, 4, 1_000_000, 128, 128, 5e-4, 0.15),
    "base": Size(12, 768, 12, 3072, 768, 3, 766_000, 256, 512, 2e-4, 0.15),
    "large": Size(24, 1024, 16, 4096, 1024, 4, 400_000, 2048, 512, 2e-4, 0.25),
}
# Those of its fields that make the networks.
NETWORK_SIZES = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "intermediate_size",
    "embedding_size",
    "generator_divisor",
)
