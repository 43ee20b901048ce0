"""What training a MiniMind takes: floating-point operations, and about how much memory at its peak.

One formula of memory, for plans and for a line before the run. Whether a micro-batch really fits is found out by trying: see
auto_batch.py.
"""

import math

import torch

from common.errors import UserError
from dataset.packing import RowPlan
from model.config import MiniMindConfig, parameter_count
from model.loss import chunk_rows
from trainer.machine.collectives import least_of_ranks
from trainer.machine.cpu_ranks import bytes_in_shared_memory
from trainer.machine.measure import available_memory, total_memory
from trainer.machine.ranks import Ranks


def flops_per_token(config: MiniMindConfig, length: float) -> float:
    """Floating-point operations of one training step (forward and backward) per token.

    Counts matrix products alone: 2 per multiply-add forward and twice that backward; exact causal attention over rows
    of mean squared length / mean length = `length`; the tied head once, the embedding look-up free.
    """
    H = config.hidden_size
    queries = config.num_attention_heads * config.head_dim
    keys = config.num_key_value_heads * config.head_dim
    # weights of one layer that a token is multiplied with: three matrices of an MLP, and the router of experts.
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


FP32 = 4
# Weight, gradient and AdamW's two moments of a parameter; Muon keeps a little less.
STATE_BYTES = 4 * FP32
# Kernels, compiler and threads of a process on the CPU, and the holes in its heap, as a part of the activations
PROGRAM_BYTES = 100e6
HEAP_PART = 0.25


def training_bytes(
    config: MiniMindConfig,
    rows: int,
    T: int,
    *,
    half: int,
    compiled: bool,
    recomputes: bool,
    device_type: str,
    sharing: int = 1,
) -> float:
    """Bytes at the peak, of all processes that share a micro-batch of `rows` rows of T positions.

    half: bytes of a number in matrix products. recomputes: --gradient_checkpointing. sharing: processes.
    """
    parameters = parameter_count(config)
    H, V, layers = config.hidden_size, config.vocab_size, config.num_hidden_layers
    A = config.num_attention_heads * config.head_dim
    mlp = config.intermediate_size
    if config.use_moe:
        mlp = config.moe_intermediate_size * (config.num_experts_per_tok + config.n_shared_experts)
    # Kept by a block for the backward pass, bytes a token: the stream and its norms, queries, keys and values, the MLP.
    block: float
    if compiled:
        block = FP32 * H + half * (3 * H + 5 * A + 3 * mlp)
    else:
        block = 4 * FP32 * H + half * (5 * H + 4 * A + 4 * mlp + T)
    if config.dropout and device_type == "cpu":
        # PyTorch's attention keeps all pairs there: their weights before and after the dropout, and what it drew.
        block += 3 * FP32 * config.num_attention_heads * T
    elif compiled and device_type == "cpu":
        # block_attention keeps exp(scores) of about half of the pairs.
        block += half * 0.6 * config.num_attention_heads * T
    blocks: float = layers * FP32 * H + block if recomputes else layers * block
    # One chunk of logits with its gradients, and the head's copy and gradient
    logits = min(rows * T, chunk_rows(device_type, V)) * V * (2 * half + 2 * FP32) + V * H * (2 * FP32 + half)
    passes: float = rows * T * (blocks + 4 * FP32 * H) + sharing * logits
    program = 0.0
    if device_type == "cpu":
        passes *= 1 + HEAP_PART
        program = sharing * PROGRAM_BYTES + bytes_in_shared_memory(sharing, parameters)
    copies = half * parameters if half < FP32 else 0
    return sharing * parameters * STATE_BYTES + sharing * copies + passes + program


def free_memory(device: torch.device, ranks: Ranks, at_start: int | None = None) -> float | None:
    """Bytes that a rank can have, on the rank with the least; None: not known. at_start: what this rank could have when the
    process began, None: now. A collective."""
    own = available_memory(device) if at_start is None else at_start
    if own is not None and device.type == "cpu":
        own //= ranks.local_world_size
    least = least_of_ranks(ranks, math.inf if own is None else float(own), device)
    return None if math.isinf(least) else least


def refuse_too_large(config: MiniMindConfig, device: torch.device, ranks: Ranks, group_size: int = 1) -> None:
    """Errors: UserError where not even weights, gradients and moments fit: the system would end the process without a line.

    group_size: ranks that share one copy of them.
    """
    total = total_memory(device)
    if total is None:
        return
    if device.type == "cpu":
        total //= ranks.local_world_size
    parameters = parameter_count(config)
    needed = ranks.sharing * math.ceil(STATE_BYTES * parameters / group_size)
    if needed > total:
        raise UserError(
            f"hidden_size {config.hidden_size}, num_hidden_layers {config.num_hidden_layers}: {parameters / 1e9:,.1f} billion "
            f"parameters need {needed / 1e9:,.0f} GB to train, and this machine has {total / 1e9:,.0f} GB on {device}: "
            "choose a smaller model"
        )
