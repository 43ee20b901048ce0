"""How much memory pretraining takes at its peak, worked out from the shapes before anything is made.

The peak is at the end of a forward pass, when all that the backward pass will need is there. Each term below is a sum over tensors that model/, model/fast/ and trainer/optim/ make; which of them
autograd keeps was listed with torch.autograd.graph.saved_tensors_hooks. What a process takes beside its tensors (kernels,
compiler, holes in the heap) cannot be derived: those constants are fitted to the peaks that tests/trainer/pretrain/test_memory.py
measures.

Letters: H hidden, A query heads times head dimension, K key/value heads times head dimension, I intermediate, T positions.
Sizes are in bytes; a number takes 4 in fp32 and `half` in the dtype of the products (2 in half precision).
"""

from dataclasses import dataclass
from typing import NamedTuple

from model.chunks import chunk_rows
from model.config import MiniMindConfig, parameter_count
from model.fast.experts import block_counts

FP32 = 4
# AdamW keeps two moments of each parameter, Muon one.
ADAMW_STATES = 2
MUON_STATES = 1
# As in model/fast/block_attention.py: of the scores of T x T, four blocks of queries compute (1 + 2 + 3 + 4) / 16.
SHARE_OF_SCORES = 0.625


class Overhead(NamedTuple):
    """What a process on the CPU takes beside the tensors that are in use, fitted to measured peaks.

    program: bytes of kernels that oneDNN makes, of autograd's threads and, with torch.compile, of the compiler. Freed
    blocks stay in the heap (see compiling.keep_freed_memory), and a later block does not always fit into the holes. So
    the heap grows beyond what is used, by these shares of the activations and of the loss. Layers that plain code computes
    again are allocated and freed twice as often.
    """

    program: int
    of_activations: float
    of_loss: float


PLAIN = Overhead(program=15_000_000, of_activations=0.25, of_loss=1.1)
PLAIN_RECOMPUTED = Overhead(program=15_000_000, of_activations=1.6, of_loss=0.0)
COMPILED = Overhead(program=135_000_000, of_activations=0.08, of_loss=0.3)


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes at the peak of training, by what they are for.

    half_weights: copies of the weights in the dtype of the products. activations: what the blocks keep for the backward
    pass, and the gradients of one block. logits: of one chunk, with its loss and gradients. expert_copies: of the experts'
    weights for their blocks of rows, what does not find room where the logits were. optimizer_space: what an update needs
    for a moment and does not find where the activations were. program: what the process has beside tensors.
    """

    weights: int
    gradients: int
    optimizer_states: int
    half_weights: int
    activations: int
    logits: int
    expert_copies: int
    optimizer_space: int
    program: int

    @property
    def total(self) -> int:
        always = self.weights + self.gradients + self.optimizer_states + self.program
        in_passes = self.half_weights + self.activations + self.logits + self.expert_copies
        return always + in_passes + self.optimizer_space


def training_memory(
    config: MiniMindConfig,
    rows: int,
    T: int,
    optimizer: str,
    *,
    compiled: bool,
    gradient_checkpointing: bool,
    device: str = "cpu",
    half: int = 2,
) -> MemoryEstimate:
    """Of one process that trains micro-batches of `rows` rows of T positions.

    optimizer: one of --optimizer. device: a torch device's type. half: bytes of a number in the products, 4 for float32.
    Accumulation needs no memory of its own. Left out: dropout's masks, and the space of several ranks.
    """
    parameters = parameter_count(config)
    matrices = matrix_shapes(config)
    hidden = sum(count * height * width for (height, width), count in matrices.items())
    states = ADAMW_STATES * parameters
    optimizer_space = 0
    if optimizer == "muon":
        states = ADAMW_STATES * (parameters - hidden) + MUON_STATES * hidden
        optimizer_space = muon_space(matrices)

    tokens = rows * T
    kept = kept_by_block(config, T, compiled, device, half)
    # The gradients of one block on their way down: of the three tensors as wide as its MLP, and of the stream.
    passing = (3 * widest_mlp(config) * half + 2 * config.hidden_size * FP32) * tokens
    of_blocks = config.num_hidden_layers * kept
    if gradient_checkpointing:
        # What enters each block, and one block computed again.
        of_blocks = config.num_hidden_layers * config.hidden_size * FP32 + kept
    # What enters and leaves the last norm, the gradient that the loss keeps for it, and the mask.
    outside = 3 * config.hidden_size * FP32 + T * (half if compiled else 1)
    activations = (of_blocks + outside) * tokens + passing
    logits = loss_space(config, tokens, compiled, device, half)
    expert_copies = 0
    if config.use_moe and device == "cuda":
        # Cards with a kernel for all experts at once take a little less.
        layers_kept = 1 if gradient_checkpointing else config.num_hidden_layers
        activations += layers_kept * rows_that_fill_up(config, tokens) * kept_by_slot(config, compiled, half)
        expert_copies = max(0, round(space_of_blocks(config, tokens, compiled, half) - logits))
    # The copies of all blocks live from the forward to the backward pass; those of the head for the loss alone.
    half_weights = half * hidden if half < FP32 and not (gradient_checkpointing and compiled) else 0

    program = 0
    if device == "cpu":
        overhead = overhead_of(compiled, gradient_checkpointing)
        activations *= 1 + overhead.of_activations
        logits *= 1 + overhead.of_loss
        program = overhead.program
    else:
        # On a GPU an update finds room where the activations were; on the CPU its large blocks do not fit into the holes.
        optimizer_space = max(0, optimizer_space - round(half_weights + activations + logits))
    return MemoryEstimate(
        weights=FP32 * parameters,
        gradients=FP32 * parameters,
        optimizer_states=FP32 * states,
        half_weights=half_weights,
        activations=round(activations),
        logits=round(logits),
        expert_copies=expert_copies,
        optimizer_space=optimizer_space,
        program=program,
    )


def overhead_of(compiled: bool, gradient_checkpointing: bool) -> Overhead:
    """Which of the constants above hold."""
    if compiled:
        return COMPILED
    return PLAIN_RECOMPUTED if gradient_checkpointing else PLAIN


def matrix_shapes(config: MiniMindConfig) -> dict[tuple[int, int], int]:
    """{(rows, columns): how many} of the matrices in the blocks that Muon trains: all but a router's."""
    H = config.hidden_size
    A = config.num_attention_heads * config.head_dim
    K = config.num_key_value_heads * config.head_dim
    I = config.moe_intermediate_size if config.use_moe else config.intermediate_size  # noqa: E741 - see the letters above
    mlps = config.num_experts + config.n_shared_experts if config.use_moe else 1
    counts: dict[tuple[int, int], int] = {}
    of_a_block = [((A, H), 1), ((K, H), 2), ((H, A), 1), ((I, H), 2 * mlps), ((H, I), mlps)]
    for shape, count in of_a_block:
        # Query and output projection may have one shape, and are one batch then.
        counts[shape] = counts.get(shape, 0) + count * config.num_hidden_layers
    return counts


def muon_space(matrices: dict[tuple[int, int], int]) -> int:
    """Of Muon._step for the shape with the most numbers: gradients, averages and the update in fp32, its product with the
    rate, and the orthogonal matrices in bf16."""
    largest = 0
    for (height, width), count in matrices.items():
        largest = max(largest, count * height * width)
    return largest * (4 * FP32 + 2)


def widest_mlp(config: MiniMindConfig) -> int:
    """Intermediate numbers of a token in one block: of the experts that see it, the shared ones included."""
    if not config.use_moe:
        return config.intermediate_size
    return config.moe_intermediate_size * (config.num_experts_per_tok + config.n_shared_experts)


def kept_by_block(config: MiniMindConfig, T: int, compiled: bool, device: str, half: int) -> float:
    """Bytes for each token that a block keeps for the backward pass."""
    attention = kept_by_attention(config, T, compiled, device, half)
    H = config.hidden_size
    if compiled:
        # The stream in fp32, what attention adds to it, and both norms' results.
        stream = H * FP32 + 3 * H * half
    else:
        # Of both norms what enters and the same divided by its size, in fp32; and a cast for each product.
        stream = 4 * H * FP32 + 5 * H * half
    return stream + attention + kept_by_mlp(config, compiled, half)


def kept_by_attention(config: MiniMindConfig, T: int, compiled: bool, device: str, half: int) -> float:
    """Bytes for each token."""
    A = config.num_attention_heads * config.head_dim
    K = config.num_key_value_heads * config.head_dim
    normed = A + K if config.generation == "minimind3" else 0
    if compiled:
        # Queries, outputs in blocks and joined, keys and values; the norms of minimind3 keep what enters them.
        kept: float = 3 * A * half + 2 * K * half
        kept += normed * half
        if device == "cpu":
            # block_attention keeps exp(scores).
            kept += SHARE_OF_SCORES * config.num_attention_heads * T * half
        return kept
    # Keys and values are repeated for the heads that share them, and the mask is turned into numbers.
    return 4 * A * half + T * half + 2 * normed * FP32


def kept_by_mlp(config: MiniMindConfig, compiled: bool, half: int) -> float:
    """Bytes for each token: gate, up, silu(gate) and silu(gate) * up; compiled code computes the third one again."""
    if not config.use_moe:
        return numbers_of_mlp(compiled) * config.intermediate_size * half
    H = config.hidden_size
    experts = config.num_experts_per_tok + config.n_shared_experts
    # The router takes fp32; each token's rows are added up in fp32.
    return experts * kept_by_slot(config, compiled, half) + H * FP32 + config.num_experts_per_tok * H * FP32


def numbers_of_mlp(compiled: bool) -> int:
    """Numbers that an MLP keeps for each of its intermediate ones: see `kept_by_mlp`."""
    return 3 if compiled else 4


def kept_by_slot(config: MiniMindConfig, compiled: bool, half: int) -> int:
    """Bytes for each row of an expert: what was gathered for it, what its MLP keeps, and what comes out."""
    return (numbers_of_mlp(compiled) * config.moe_intermediate_size + 2 * config.hidden_size) * half


def rows_that_fill_up(config: MiniMindConfig, tokens: int) -> int:
    """Rows in the blocks of `blocked_experts` (model/fast/experts.py) that are no token's."""
    slots = tokens * config.num_experts_per_tok
    rows = sum(size * count for size, count in block_counts(slots, config.num_experts))
    return rows - slots


def space_of_blocks(config: MiniMindConfig, tokens: int, compiled: bool, half: int) -> int:
    """Of `blocked_experts` in one layer, for a moment.

    In the backward pass, for the size with the most blocks: the weights of gate and up copied for each block, the gradient of
    each copy, and their sums for the experts. In the forward pass plain code joins the weights in fp32, twice.
    """
    of_expert = 2 * config.moe_intermediate_size * config.hidden_size
    slots = tokens * config.num_experts_per_tok
    most_blocks = max(count for _, count in block_counts(slots, config.num_experts))
    backward = (2 * most_blocks + config.num_experts) * of_expert * half
    forward = 0 if compiled else 2 * config.num_experts * of_expert * FP32
    return max(forward, backward)


def loss_space(config: MiniMindConfig, tokens: int, compiled: bool, device: str, half: int) -> float:
    """Of model/loss.py: one chunk, and for the head a copy, its gradient and that one's product with the loss's gradient.

    Of a chunk's logits there are the logits, and the gradients of this chunk and the last one; in plain code exp, one-hot
    and their product in fp32 as well, but the gradient only after the one-hot.
    """
    each = 3 * half if compiled else 2 * half + 2 * FP32 + 1
    of_chunk = min(tokens, chunk_rows(device, config.vocab_size)) * config.vocab_size * each
    return of_chunk + config.vocab_size * config.hidden_size * (2 * FP32 + half)
