"""Scaling laws of small models: formulas with measured constants.

A run trains N parameters on D tokens, U of them unique. From these, the number of layers and the width follow the loss of a
well-tuned run, and its batch size and learning rates. docs/experiments.md ("Learning per token") has the runs behind the constants,
docs/budget.md the range in which they hold.

Sources of the forms. Loss: Hoffmann et al. 2022 (arXiv 2203.15556). Repeated text: Muennighoff et al. 2023 (arXiv
2305.16264). Batch: Step Law (arXiv 2503.04715).
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

from dataset.corpus import Corpus
from model.config import ModelConfig, parameter_count
from trainer.pretrain.settings import PretrainSettings


def wiki_loss(parameters: float, tokens: float) -> float:
    """Final loss of well-tuned two-layer models on encyclopaedias, half English and half Chinese, in this repository's tokenizer.

    In nats per token. Fitted jointly with the gain of depth to 36 runs of 0.5 to 8.8 M parameters and 0.8 to 71 M tokens; error
    1.3 % (root mean square), at most 3.5 %. Floors from 0 to 2.3 fit as well; with this one a compute-optimal run has 15 tokens
    per parameter.
    """
    return 1.7 + 22.11 / parameters**0.2 + 38.0 / tokens**0.2


# Maximum relative gain of depth in loss. Between 10 and 20 M tokens, models of four and more layers learn something that two-layer
# models do not. Three layers gain 0.63 of it, four 0.86, five 0.95.
GAIN_OF_DEPTH = 0.10
# tokens at half of this gain; the power is the steepness of its onset
TOKENS_OF_DEPTH = 14.4e6
POWER_OF_DEPTH = 5
# TOKENS_OF_DEPTH of models with three layers, from two runs
TOKENS_OF_THREE_LAYERS = 22e6
# Maximum relative gain of `--init_scheme induction` with several heads per layer, and the tokens at half of it. It replaces
# GAIN_OF_DEPTH, and is a little larger. The smaller of the shares by tokens and by size counts.
# Runs of 0.8 to 15 M parameters and 2 to 75 M tokens; docs/experiments.md, "Induction heads".
GAIN_OF_INDUCTION = 0.135
TOKENS_OF_INDUCTION = 8.6e5
# Small models gain less, at most 1 - e^-(layers x width / this) of the maximum: runs from 128 x 2 to 224 x 4, of 5 to 30 M tokens
SIZE_OF_INDUCTION = 200
# Power of the entries beyond USUAL_ENTRIES by which models count as larger there: with 51,200, 96 x 2 and 160 x 2 end 3 % apart after equal
# FLOP (2e13), with 6,400 they end alike.
POWER_OF_INDUCTION_ENTRIES = 0.3


def factor_of_depth(layers: int, tokens: float) -> float:
    """Ratio of the loss with this many layers to `wiki_loss`, for two layers. tokens: see effective_tokens."""
    half = TOKENS_OF_THREE_LAYERS if layers == 3 else TOKENS_OF_DEPTH
    onset = 1 / (1 + (half / tokens) ** POWER_OF_DEPTH)
    depth = 1 - math.exp(-max(layers - 2, 0))
    return 1 - GAIN_OF_DEPTH * onset * depth


# Row lengths that plans choose from. 2,048 is no better than 1,024 when evaluated with sliding windows.
USUAL_ROW = 512
LONG_ROW = 1024
# Context without gain or loss: `mean_context` (trainer/pretrain/memory.py) of the corpora behind the law, in rows of 512
CONTEXT_OF_LAW = 453.0
# A longer context gains more the more tokens have taught its use. Runs of 2 to 75 M tokens in rows of 512 to 2,048.
GAIN_OF_CONTEXT = 0.0135
TOKENS_OF_CONTEXT = 3.2e5
POWER_OF_CONTEXT = 0.75
# Shorter documents were not measured.
MIN_CONTEXT = 100.0


def factor_of_context(context: float, tokens: float) -> float:
    """Ratio of the loss with this `mean_context` to `wiki_loss`, after this many unique tokens."""
    context = max(context, MIN_CONTEXT)
    gain = GAIN_OF_CONTEXT * max(math.log(tokens / TOKENS_OF_CONTEXT), 0.0)
    return 1 - gain * (1 - (CONTEXT_OF_LAW / context) ** POWER_OF_CONTEXT)


# Entries of this repository's tokenizer: `wiki_loss` counts the parameters of as many, since those of rarer ones hardly take part.
USUAL_ENTRIES = 6400
# Power of the bytes of a token, relative to those of this repository's, by which its loss grows: longer tokens are harder, but not as much
# as they are longer. 160 x 2 after 3.9 M tokens, 6,144 to 51,200 entries, English, Chinese and both: 0.74 to 0.82.
POWER_OF_PACKING = 0.76
# Entries are learned from their occurrences: relative excess of the loss for an entry per unique token that is trained, times a power of
# the passes over these. 102,400 entries after 0.56 M tokens: 6 %; 1,024 and 2,048 of a megabyte in eight passes: 3 and 8 %, so 1,024 win.
COST_OF_ENTRIES = 0.35
POWER_OF_ENTRY_PASSES = 1.75


def factor_of_entries(entries: int, tokens: float, unique: float) -> float:
    """Ratio of the loss to that of USUAL_ENTRIES. unique: tokens that are read at least once."""
    if entries == USUAL_ENTRIES:
        # What these cost is in the fit.
        return 1.0
    return 1 + COST_OF_ENTRIES * entries / unique * (tokens / unique) ** POWER_OF_ENTRY_PASSES


# Relative error of an expected loss: nearly equally good fits differ by this much.
LOSS_ERROR = 0.10
# Below SMALL parameters or tokens: in one run a loss of 5.187 was expected and 4.192 measured.
SMALL = 1e6
LOSS_ERROR_OF_SMALL = 0.20
# With fewer tokens no loss is expected: 5.46 was measured after 59,000, where the law says 4.24.
MIN_TOKENS = 1e5
# Tokens that AdamW needs per token of Muon for the same loss: above 1.7 at 7.3 M parameters and 4 M tokens, with higher rates of
# Muon than those below
TOKENS_OF_ADAMW = 2.0
# optimisers with a law and with learning rates for plans
MEASURED_OPTIMIZERS = ("adamw", "muon")
# of `difficulty_of` (difficulty.py); no loss is expected of easier text
MIN_DIFFICULTY = 0.35

# R* of Muennighoff et al.: repeats after which another pass is worth 1/e of the first
WORTH_OF_REPEATS = 15.4
# Maximum passes of a plan, and the most for which the expected loss was compared with runs. Further passes over little text gain
# less and less, until the model overfits and its validation loss rises. So a plan with little text ends before its budget is used up.
MAX_PASSES = 8
# Maximum passes of a run from existing weights: enough to memorise a few answers word for word
MAX_PASSES_FROM_WEIGHTS = 40
# Maximum parameters per unique token: the largest ratio measured, with MAX_PASSES
MAX_PARAMETERS_PER_TOKEN = 24


class Part(NamedTuple):
    """A source of the text: its share of the trained tokens, and its unique tokens. name: for messages."""

    share: float
    unique: float
    name: str = ""


def effective_tokens(tokens: float, parts: Sequence[Part]) -> float:
    """Unique tokens that would teach as much as `tokens` tokens of these sources.

    D' = U + U R* (1 - exp(-R / R*)) with R = D / U - 1 repeats, for each source: one may be repeated while another still has
    new text.
    """
    effective = 0.0
    for share, unique, _ in parts:
        own = tokens * share
        repeats = max(own / unique - 1, 0.0)
        effective += min(own, unique) + unique * WORTH_OF_REPEATS * (1 - math.exp(-repeats / WORTH_OF_REPEATS))
    return effective


def unique_tokens(parts: Sequence[Part]) -> float:
    """Unique tokens in all sources together."""
    return sum(part.unique for part in parts)


def max_passes(from_weight: str) -> float:
    """Maximum passes over the text. from_weight: the initial weights; fine-tuning of existing ones may need to memorise a few
    documents, such as answers."""
    return MAX_PASSES if from_weight == "none" else MAX_PASSES_FROM_WEIGHTS


def has_law(settings: PretrainSettings, trains_answers: bool) -> bool:
    """Returns whether the law covers such a run: fresh dense models on documents, with AdamW or Muon."""
    is_fresh = settings.from_weight == "none" and not settings.use_moe
    return is_fresh and settings.optimizer in MEASURED_OPTIMIZERS and not trains_answers


def loss_error(parameters: float, tokens: float, unique: float, difficulty: float) -> float | None:
    """Relative error of the expected loss of a run; None: the law does not cover it. unique: tokens of the text."""
    fewest = min(tokens, unique)
    if difficulty < MIN_DIFFICULTY or fewest < MIN_TOKENS or is_repeated_too_often(tokens / unique):
        return None
    return LOSS_ERROR_OF_SMALL if min(parameters, fewest) < SMALL else LOSS_ERROR


def is_repeated_too_often(passes: float) -> bool:
    """Returns whether the law does not cover this many passes over the text."""
    return round(passes) > MAX_PASSES


def expected_loss(
    config: ModelConfig,
    tokens: float,
    parts: Sequence[Part],
    difficulty: float = 1.0,
    optimizer: str = "muon",
    init_scheme: str = "default",
    context: float = CONTEXT_OF_LAW,
) -> float:
    """Nats per token, on text whose loss is `difficulty` times that of `wiki_loss`. context: see factor_of_context."""
    layers = config.num_hidden_layers
    effective = effective_tokens(tokens, parts)
    if optimizer != "muon":
        effective /= TOKENS_OF_ADAMW
    # Repeated text teaches little about copying: a megabyte of novels that is read eight times ends at the loss expected here.
    unique = min(tokens, unique_tokens(parts))
    parameters = parameter_count(config) - max(config.vocab_size - USUAL_ENTRIES, 0) * config.hidden_size
    loss = difficulty * wiki_loss(parameters, effective) * factor_of_context(context, unique)
    loss *= factor_of_entries(config.vocab_size, tokens, unique)
    if init_scheme == "induction":
        # in place of the gain of depth, since both come from heads that copy
        share_by_tokens = unique / (unique + TOKENS_OF_INDUCTION)
        size = layers * config.hidden_size * max(config.vocab_size / USUAL_ENTRIES, 1) ** POWER_OF_INDUCTION_ENTRIES
        share_by_size = 1 - math.exp(-size / SIZE_OF_INDUCTION)
        return loss * (1 - GAIN_OF_INDUCTION * min(share_by_tokens, share_by_size))
    return loss * factor_of_depth(layers, effective)


def batch_tokens(tokens: float) -> float:
    """The best size of an update in tokens, for a run of `tokens`: 0.58 D ** 0.571."""
    return 0.58 * tokens**0.571


# Learning rates of Muon, and of AdamW for norms and embeddings beside it: the best of sweeps with 1.2 M parameters and 2 M tokens, and
# with 2.5 M and 33 M, both with `--init_scheme induction`. Other widths and batch sizes use the same.
MUON_RATE = 0.014
SIDE_RATE = 8e-3
EMBED_RATE = 16e-3
# For a single pass; more decay changes little there
WEIGHT_DECAY = 0.01
# Weight decay times updates for two to four passes, by a model with no more parameters than there are unique tokens. More passes and
# larger models need more decay, or they overfit. Fitted to runs of 580 to 1,292 updates with 2 to 8 passes and 0.6 to 10 parameters
# per unique token.
DECAY_OF_REPEATED_TEXT = 130
PASSES_WITH_THIS_DECAY = 4.5
POWER_OF_PASSES = 3
POWER_OF_SIZE = 0.5
MAX_WEIGHT_DECAY = 1.0
# Final share of the run in which the rate decays to zero: 40 % is as good, the whole run half a percent worse.
DECAY_SHARE = 0.65
# 5 are as good, 100 are worse in short runs.
WARMUP_UPDATES = 20


def muon_weight_decay(passes: float, updates: int, parameters_per_token: float) -> float:
    """Weight decay of Muon and of AdamW beside it, at the rates above, for this many passes and updates.

    parameters_per_token: the model's parameters per unique token.
    """
    repeated = min(max(passes - 1, 0.0), 1.0)
    passes_factor = max(passes / PASSES_WITH_THIS_DECAY, 1.0) ** POWER_OF_PASSES
    size_factor = max(parameters_per_token, 1.0) ** POWER_OF_SIZE
    decay = repeated * passes_factor * size_factor * DECAY_OF_REPEATED_TEXT / updates
    return min(max(decay, WEIGHT_DECAY), MAX_WEIGHT_DECAY)


# Step Law is too high for small models: 2.4e-3 at 7.3 M parameters and 4 M tokens, where 5e-4 was the best of four rates.
MAX_ADAMW_RATE = 1e-3


def adamw_rate(parameters: float, tokens: float) -> float:
    """Learning rate of AdamW alone: 1.79 N ** -0.713 D ** 0.307 (Step Law), at most MAX_ADAMW_RATE."""
    return min(1.79 * parameters**-0.713 * tokens**0.307, MAX_ADAMW_RATE)


# Minimum for a budget of tokens. The best model measured for ten minutes on a CPU has 2.02 M parameters for 10 M tokens. For the same
# FLOPs the law picks 2.60 M for 7.8 M; without a minimum a budget of tokens would take the largest model.
MIN_TOKENS_PER_PARAMETER = 5


# Beyond the first ones in steps of about a fifth: the loss is flat around the best width.
WIDTHS = (64, 96, 128, 160, 192, 224, 256, 320, 384, 448, 512, 640, 768, 896, 1024, 1280, 1536, 2048)
# Most entries of a model as narrow as the first: with 51,200 seeds differ by 3 to 5 % (64 x 2, 5e12 FLOP), as its heads of 32 unlearn to copy.
ENTRIES_OF_NARROWEST = 25_600
# Heads of 32 were no better.
HEAD_WIDTH = 64
# Width per layer. With few tokens, wide and shallow models learn more in the same time.
SHALLOW_ASPECT = 96
MIDDLE_ASPECT = 64
DEEP_ASPECT = 32
# Up to this many tokens shallow models are better: after 12.7 M tokens two layers had learned more than four in the same time.
TOKENS_OF_SHALLOW_MODELS = 14e6
# From this many on, deep models are better: the expected loss of the shallow 320 x 4 is 0.6 % too low after 73 M. In between
# the expected loss decides, but with at least three layers: after 30 M two were the worst of eight sizes.
TOKENS_OF_DEEP_MODELS = 40e6
MIN_MIDDLE_LAYERS = 3


def widths_for(entries: int) -> Sequence[int]:
    """Widths to choose from for a vocabulary of this size."""
    return WIDTHS if entries <= ENTRIES_OF_NARROWEST else WIDTHS[1:]


def layers_for(width: int, tokens: float) -> tuple[int, int]:
    """Returns (fewest, most) layers for a width, in a run of this many tokens."""
    shallow = max(2, round(width / SHALLOW_ASPECT))
    # Four layers of 96 with a single head in each gained nothing; with two narrow heads they were not measured.
    is_narrow = width < 2 * HEAD_WIDTH or heads_for(width) == 1
    if tokens <= TOKENS_OF_SHALLOW_MODELS or is_narrow:
        return shallow, shallow
    deep = round(width / DEEP_ASPECT)
    if tokens >= TOKENS_OF_DEEP_MODELS:
        return deep, deep
    return max(MIN_MIDDLE_LAYERS, round(width / MIDDLE_ASPECT)), deep


def heads_for(width: int) -> int:
    """Number of query heads for a width: each HEAD_WIDTH wide, or as little wider as possible, but at least two.

    A second head of 48 instead of one of 96 gains 2 % of the loss (96 x 2, 6.5 M tokens).
    """
    heads = max(2, width // HEAD_WIDTH)
    # RoPE rotates pairs of dimensions.
    while heads > 1 and (width % heads or (width // heads) % 2):
        heads -= 1
    return heads


def kv_heads_for(heads: int) -> int:
    """Number of key and value heads for this many query heads: up to four of these share one."""
    shared_by = max(n for n in (1, 2, 3, 4) if heads % n == 0)
    return heads // shared_by


def parts_of(corpus: Corpus, tokens: float) -> tuple[Part, ...]:
    """The sources of a mixture; without one, a single source of this many unique tokens."""
    mixture = corpus.mixture
    if mixture is None:
        return (Part(1.0, tokens),)
    names = [source.name for source in corpus.sources]
    return tuple(map(Part, mixture.shares, mixture.pass_targets, names))
