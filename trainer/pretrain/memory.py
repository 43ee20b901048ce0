"""FLOPs and memory of training a MiniMind; and how `--batch_size auto` splits an update to fit.

One memory formula serves plans and a line before the run. On a GPU `--batch_size auto` does not trust it: it tries the
largest micro-batch, and halves it until it fits. On a CPU a try would end the process, so the formula decides.

An update keeps the rows that it has without the flag, those of --accumulation_steps micro-batches of the default of --batch_size. How
it is cut changes only the last bits of its loss (docs/design.md); so a resume keeps the rows of its run. Flags that count
micro-batches, such as --log_interval, count those of the default.
"""

import dataclasses
import math
from functools import partial
from pathlib import Path
from typing import Any

import torch

from common.errors import UserError
from common.flags import MAX_INT
from common.wording import counted
from dataset.batches import Batch
from dataset.corpus import Corpus
from dataset.loader import to_device
from dataset.packing import RowPlan, Totals
from model.config import ModelConfig, parameter_count, weights_of_layer
from model.loss import FP32_BYTES, chunk_rows
from model.model_minimind import MiniMindLM
from trainer.advice import OUT_OF_MEMORY_ADVICE
from trainer.batching import Batching
from trainer.machine.devices import autocast
from trainer.machine.measure import available_memory, is_out_of_memory, total_memory
from trainer.machine.ranks import ONE_RANK, Ranks, min_over_ranks, on_main
from trainer.pretrain.loss import pretrain_loss
from trainer.pretrain.settings import AUTO_ROWS, PretrainSettings
from trainer.saving.checkpoint import file_of_resumed_run
from trainer.settings import NONE
from trainer.sharding import ranks_per_model


def flops_per_token(config: ModelConfig, length: float, head_ids: int = 0) -> float:
    """Floating-point operations of one training step (forward and backward) per token.

    Counts matrix products alone: 2 per multiply-add forward and twice that backward; exact causal attention over rows
    of mean squared length / mean length = `length`; the tied head once, the embedding look-up free. head_ids: of
    `--sampled_softmax`; 0: the whole vocabulary.
    """
    # Those that a token is multiplied with
    weights = config.num_hidden_layers * weights_of_layer(config, config.num_experts_per_tok)
    weights += (head_ids or config.vocab_size) * config.hidden_size
    # Scores and their products with v: two products over half of the keys.
    queries = config.num_attention_heads * config.head_dim
    scores = config.num_hidden_layers * length * queries
    return 6 * weights + 6 * scores


def mean_context(plan: RowPlan) -> float:
    """Mean squared / mean length of the pieces in the first 1,000 rows of a plan: `length` of `flops_per_token`."""
    *_, pairs = plan.pieces(range(min(plan.n_rows, 1000)))
    return float((pairs**2).sum() / max(pairs.sum(), 1))


# Maximum rows that one rank computes at once. More make the products of a CPU no faster, and take memory. On a GPU this many
# keep it busy while the host launches the next kernels; fewer are used if they do not fit.
MAX_MICRO_ROWS = {"cpu": 16, "mps": 16, "cuda": 256}
# Weight, gradient and AdamW's two moments of a parameter; Muon keeps a little less.
STATE_BYTES = 4 * FP32_BYTES
# With --verify_every weight and moments once more and, while an update is computed twice, its first result
VERIFY_BYTES = 6 * FP32_BYTES
# Libraries, compiler and threads of a process on the CPU; and its heap fragmentation, as a share of the activations
PROGRAM_BYTES = 250e6
HEAP_SHARE = 0.15


def training_bytes(
    config: ModelConfig,
    rows: int,
    T: int,
    settings: PretrainSettings,
    dtype: torch.dtype,
    device: torch.device,
    compiled: bool,
) -> float:
    """Peak memory of a rank in bytes, with micro-batches of `rows` rows of T positions: a tenth below to a quarter above the
    measured one (docs/performance.md, docs/gpu.md).

    dtype: of matrix products.
    """
    half = dtype.itemsize
    parameters = parameter_count(config)
    H, V, layers = config.hidden_size, config.vocab_size, config.num_hidden_layers
    mlp = config.intermediate_size
    if config.use_moe:
        mlp = config.moe_intermediate_size * (config.num_experts_per_tok + config.n_shared_experts)
    # Activations of a block, in bytes per token. Eager code keeps twice as much.
    block: float = half * (10 * H + 3 * mlp) * (1 if compiled else 2)
    if device.type == "cpu":
        # With dropout, weights of all pairs of positions before and after it, and its mask; else exp(scores) of half of the pairs.
        of_pair = 3 * FP32_BYTES if config.dropout else 0.6 * half * compiled
        block += config.num_attention_heads * T * of_pair
    # With recomputation: one block with its gradients, and the inputs of the others.
    kept = layers * FP32_BYTES * H + 2 * block if settings.gradient_checkpointing else layers * block
    activations = rows * T * kept
    # One chunk of logits with its gradients. With a sample in training only an evaluation computes all of them.
    chunk = min(rows * T, chunk_rows(device.type, V, trains=not settings.sampled_softmax))
    logits = chunk * V * (2 * half + 2 * FP32_BYTES)
    copies = half if half < FP32_BYTES else 0
    if settings.verify_every:
        copies += VERIFY_BYTES
    needed = parameters * (STATE_BYTES + copies) + logits + activations
    if device.type == "cpu":
        needed += HEAP_SHARE * activations + PROGRAM_BYTES
    return needed


def free_memory(device: torch.device, ranks: Ranks) -> float | None:
    """Bytes available to a rank, the minimum of all ranks; None: unknown. A collective."""
    own = available_memory(device)
    if own is not None and device.type == "cpu":
        own //= ranks.local_world_size
    least = min_over_ranks(ranks, math.inf if own is None else float(own))
    return None if math.isinf(least) else least


def refuse_too_large(config: ModelConfig, device: torch.device, ranks: Ranks, shard: str = NONE) -> None:
    """Errors: UserError if not even weights, gradients and moments fit: the system would kill the process without a message.

    shard: --shard.
    """
    total = total_memory(device)
    if total is None:
        return
    if device.type == "cpu":
        total //= ranks.local_world_size
    parameters = parameter_count(config)
    needed = math.ceil(STATE_BYTES * parameters / ranks_per_model(shard, ranks))
    if needed > total:
        who = "this machine" if ranks.world_size == 1 else "each rank"
        raise UserError(
            f"hidden_size {config.hidden_size}, num_hidden_layers {config.num_hidden_layers}: {parameters / 1e9:,.1f} billion "
            f"parameters need {needed / 1e9:,.0f} GB to train, and {who} has {total / 1e9:,.0f} GB on {device}: "
            "choose a smaller model"
        )


# ------------------------------------------------------------------------------------------------ --batch_size auto

# share of the free memory that --batch_size auto takes on a CPU
SAFE_SHARE = 0.85


def why_not_divisible(config: ModelConfig) -> str:
    """Why the loss of a micro-batch is not the sum of its parts' losses; "" if it is."""
    if config.use_moe and not config.seq_aux:
        return "the auxiliary loss of this mixture of experts is defined over a whole micro-batch"
    return ""


def resolve_batch_size(
    settings: PretrainSettings,
    stem: Path,
    model: MiniMindLM,
    corpus: Corpus,
    dtype: torch.dtype,
    device: torch.device,
    ranks: Ranks,
    free: float | None,
) -> tuple[PretrainSettings, list[str]]:
    """Replace AUTO_ROWS by a number of rows, with the same updates. Returns (settings, lines for the user).

    A line reports the rows, another that micro-batches may need more memory than is free. stem: path of the run's files without
    suffix. free: bytes, before the model was made. A collective.
    """
    lines = []
    plan = corpus.plan(0)
    # ranks that share a micro-batch
    parts = ranks.world_size // ranks.batches_at_once
    # With auto a GPU may run eagerly: in a short run, or without Triton. So may a CPU, whose figure is then too low.
    compiled = settings.use_compile == "1" or (settings.use_compile == "auto" and device.type != "cuda")

    def needed(rows: int) -> float:
        rows = math.ceil(min(rows, plan.n_rows) / parts)
        return training_bytes(model.config, rows, plan.T, settings, dtype, device, compiled)

    def fits(rows: int) -> bool:
        """Tried on a GPU, by the formula elsewhere. A collective."""
        if device.type != "cuda":
            return free is None or needed(rows) <= SAFE_SHARE * free
        first_rows = range(min(rows, plan.n_rows))
        batch = corpus.assembler(rows)[plan.recipe(first_rows)]
        own = fits_gpu(model, batch, plan.totals(0, len(first_rows)), device, dtype)
        return min_over_ranks(ranks, float(own)) > 0

    if settings.batch_size == AUTO_ROWS:
        # Those of one rank, or of the ranks that share micro-batches
        update_rows = Batching.of(settings, ONE_RANK).rows
        usual = update_rows // settings.accumulation_steps
        recorded = on_main(ranks, partial(recorded_rows, settings, stem))
        if recorded is not None and recorded % parts == 0:
            rows, why = recorded, ", as before the resume"
        else:
            # A micro-batch of more rows than there are would never be full, and compiled code is for full ones.
            most = min(MAX_MICRO_ROWS[device.type], math.ceil(plan.n_rows / ranks.batches_at_once))
            # Candidates, largest first. They divide the rows of an update, and those of the warm-up, so that rates stay the same.
            to_divide = math.gcd(update_rows, usual * settings.warmup_iters)
            # Ranks that share a micro-batch get equal parts of it.
            choices = [n for n in range(min(most, update_rows), 0, -1) if to_divide % n == 0 and n % parts == 0]
            if why_not_divisible(model.config) or not choices:
                choices = [usual]
            rows = choices[0]
            # If not even the fewest rows fit, the run itself reports what helps.
            while not fits(rows) and (smaller := [choice for choice in choices if 2 * choice <= rows]):
                rows = smaller[0]
            why = "" if rows == choices[0] else f", since {counted(choices[0], 'row')} do not fit"
        steps = update_rows // rows
        # Counts of micro-batches of the usual rows become those of `rows`. 0 means never, and stays.
        intervals: dict[str, Any] = {}
        for name in ("warmup_iters", "log_interval", "save_interval", "eval_interval"):
            count = getattr(settings, name)
            intervals[name] = min(max(1, round(count * usual / rows)), MAX_INT) if count else 0
        settings = dataclasses.replace(settings, batch_size=rows, accumulation_steps=steps, **intervals)
        cut = f"{counted(steps, 'micro-batch', 'micro-batches')} of {counted(rows, 'row')}"
        lines.append(f"--batch_size auto: an update is {cut}{why}")

    # The formula is for a whole model.
    if settings.shard == NONE and free is not None and needed(settings.batch_size) > free:
        lines.append(
            f"warning: these micro-batches need about {needed(settings.batch_size) / 1e9:,.4g} GB, and {free / 1e9:,.4g} GB are free on "
            f"{device.type}: if memory runs out, {OUT_OF_MEMORY_ADVICE}"
        )
    return settings, lines


def fits_gpu(model: MiniMindLM, batch: Batch, totals: Totals, device: torch.device, dtype: torch.dtype) -> bool:
    """Returns whether a GPU has the memory for a micro-batch within an update, and frees all that it took.

    It runs eagerly, which takes no less than compiled code.
    """
    fitted = True
    free, _ = torch.cuda.mem_get_info(device)
    room = free + torch.cuda.memory_reserved(device)
    torch.cuda.reset_peak_memory_stats(device)
    with torch.random.fork_rng(devices=[device]):
        try:
            # As in a later micro-batch of a later update: the optimiser's moments, and all gradients.
            bytes_of_moments = STATE_BYTES // 2 * parameter_count(model.config)
            moments = torch.empty(bytes_of_moments, dtype=torch.uint8, device=device)
            for parameter in model.parameters():
                parameter.grad = torch.zeros_like(parameter)
            with autocast(device, dtype):
                loss, _ = pretrain_loss(model, to_device(batch, device), totals)
            loss.backward()
            del moments, loss
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            fitted = False
    # Windows falls back to main memory once the card's own is full: no error, but each update takes many times as long.
    fitted = fitted and torch.cuda.max_memory_reserved(device) <= room
    # After the block: within it the error holds the tensors that filled the memory.
    model.zero_grad(set_to_none=True)
    torch.cuda.empty_cache()
    # The peak in the log is that of the run.
    torch.cuda.reset_peak_memory_stats(device)
    return fitted


def recorded_rows(settings: PretrainSettings, stem: Path) -> int | None:
    """Rows of a micro-batch of the run to resume; None: there is none, or its updates have other sizes."""
    path = file_of_resumed_run(stem, f"{stem.name}.settings.yaml") if settings.from_resume else None
    if path is None:
        return None
    before = type(settings).parse(["--config", str(path)])
    rows = Batching.of(settings, ONE_RANK).rows
    is_same = Batching.of(before, ONE_RANK).rows == rows and rows % before.batch_size == 0
    return before.batch_size if is_same else None
