"""What is known about good runs of small models, as formulas with measured constants.

A run is described by N parameters in a number of layers, D tokens that it trains, and U tokens of different text. From them
follow the loss that a well-chosen run reaches, and the batch and the rates that are well chosen. docs/experiments.md ("Learning
per token") has the runs that the constants were measured by, and docs/budget.md tells how far they hold.

Sources of the forms. Loss: Hoffmann et al. 2022 (arXiv 2203.15556). Repeated text: Muennighoff et al. 2023 (arXiv
2305.16264). Batch: Step Law (arXiv 2503.04715).
"""

import bz2
import math
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from dataset.corpus import Corpus
from dataset.store.format import Documents


class LossLaw(NamedTuple):
    """loss = floor + size_factor / N ** size_power + data_factor / D ** data_power, in nats per token."""

    floor: float
    size_factor: float
    size_power: float
    data_factor: float
    data_power: float

    def loss(self, parameters: float, tokens: float) -> float:
        """The loss of a run of this size that ends well, on text like that which the constants were measured on."""
        of_size = self.size_factor / parameters**self.size_power
        of_data = self.data_factor / tokens**self.data_power
        return self.floor + of_size + of_data


# Encyclopaedia, half English and half Chinese, in this repository's tokenizer, by models of two layers: fitted together with the
# gain of depth to 36 runs of 0.5 to 8.8 M parameters and 0.8 to 71 M tokens, which it misses by 1.3 % (root mean square), 3.5 % at
# most. Floors from 0 to 2.3 fit as well; with this one the best run has 15 tokens for each parameter.
WIKI = LossLaw(floor=1.7, size_factor=22.11, size_power=0.2, data_factor=38.0, data_power=0.2)
# Between 10 and 20 M tokens models of four and more layers learn something that models of two layers do not: from there on their
# loss is lower by this part. Three layers gain 0.63 of it, four 0.86, five 0.95.
GAIN_OF_DEPTH = 0.10
# tokens after which half of it is there; the power tells how fast it comes
TOKENS_OF_DEPTH = 14.4e6
POWER_OF_DEPTH = 5
# Three layers need more tokens for it, by two runs.
TOKENS_OF_THREE_LAYERS = 22e6
# With `--init_scheme induction` models have from the start what GAIN_OF_DEPTH stands for, and a little more: half of these parts after
# so many tokens. Runs of 0.8 to 15 M parameters and 2 to 75 M tokens; docs/experiments.md, "First weights that copy".
GAIN_OF_INDUCTION = 0.135
GAIN_OF_INDUCTION_WITH_ONE_HEAD = 0.09
TOKENS_OF_INDUCTION = 8.6e5


def factor_of_depth(layers: int, tokens: float) -> float:
    """What the loss of a model with so many layers is of that of WIKI, whose models have two, after so many different tokens."""
    half = TOKENS_OF_THREE_LAYERS if layers == 3 else TOKENS_OF_DEPTH
    of_tokens = 1 / (1 + (half / tokens) ** POWER_OF_DEPTH)
    of_layers = 1 - math.exp(-max(layers - 2, 0))
    return 1 - GAIN_OF_DEPTH * of_tokens * of_layers


def factor_of_induction(heads: int, tokens: float) -> float:
    """What the loss of a model with so many heads in a layer is of that of WIKI, where its first weights were those of
    `model.induction`, after so many different tokens. It stands in the place of `factor_of_depth`: both are the discovery of
    heads that copy."""
    gain = GAIN_OF_INDUCTION if heads > 1 else GAIN_OF_INDUCTION_WITH_ONE_HEAD
    return 1 - gain * tokens / (tokens + TOKENS_OF_INDUCTION)


# Positions of a row that plans choose from. 2,048 gain nothing more where the windows of an evaluation slide.
USUAL_ROW = 512
LONG_ROW = 1024
# `mean_context` (trainer/pretrain/memory.py) of the five corpora in rows of 512, which the law was measured with
CONTEXT_OF_LAW = 453.0
# What a longer context is worth grows with the tokens that teach how to use it: runs of 2 to 75 M tokens in rows of 512 to 2,048.
GAIN_OF_CONTEXT = 0.0135
TOKENS_OF_CONTEXT = 3.2e5
POWER_OF_CONTEXT = 0.75
# Nothing is known of shorter documents.
SHORTEST_CONTEXT = 100.0


def factor_of_context(context: float, tokens: float) -> float:
    """What the loss is of that of WIKI where the pieces of documents in a row have this `mean_context`, after so many different tokens."""
    context = max(context, SHORTEST_CONTEXT)
    gain = GAIN_OF_CONTEXT * max(math.log(tokens / TOKENS_OF_CONTEXT), 0.0)
    return 1 - gain * (1 - (CONTEXT_OF_LAW / context) ** POWER_OF_CONTEXT)


# Relative range that is told with an expected loss, where such runs and such text were measured
LOSS_ERROR = 0.05
# The same for any other text, size or length: fits that are nearly as good differ by as much.
LOSS_ERROR_ELSEWHERE = 0.10
# The same for a model or a run below a million on such a text: 5.187 was expected and 4.192 measured.
SMALL = 1e6
LOSS_ERROR_OF_SMALL = 0.20
# How many tokens AdamW needs to learn what Muon learns from one: more than 1.7 at 7.3 M parameters and 4 M tokens, with higher rates
# of Muon than those below.
TOKENS_OF_ADAMW = 2.0
# Where the law was measured; beyond it is a guess.
MEASURED_VOCABULARY = 6400
MEASURED_PARAMETERS = (5e5, 1.5e7)
MEASURED_TOKENS = (2e6, 7.5e7)
MEASURED_CONTEXTS = (140, 1400)

# Passes over the text after which another one is worth 1/e of a first one: R* of the source.
WORTH_OF_REPEATS = 15.4
# Passes up to which the expected loss was compared with runs. Further ones over little text were worth less and less, and a model
# that reads it too often learns it by heart: its validation loss rises. So plans read no text more often, and where that is all,
# they end before their budget does.
MOST_PASSES = 8
# Passes of a run that goes on from weights: so often few answers are read until they are known to the word
MOST_PASSES_BY_HEART = 40
# the largest model for a token of different text that was measured, with so many passes
PARAMETERS_OF_A_TOKEN = 24


class Part(NamedTuple):
    """A source of the text: its share of what is trained, and its tokens of different text. name: for messages."""

    share: float
    different: float
    name: str = ""

    def passes(self, tokens: float) -> float:
        """How often the source is read in a run that trains so many tokens of all of them."""
        return tokens * self.share / max(self.different, 1.0)


def effective_tokens(tokens: float, parts: Sequence[Part]) -> float:
    """The tokens of different text that would teach as much as `tokens` of these sources.

    D' = U + U R* (1 - exp(-R / R*)) with R = D / U - 1 repeats, for each source: one may be read again while another still gives
    new text.
    """
    effective = 0.0
    for share, different, _ in parts:
        own = tokens * share
        repeats = max(own / different - 1, 0.0)
        effective += min(own, different) + different * WORTH_OF_REPEATS * (1 - math.exp(-repeats / WORTH_OF_REPEATS))
    return effective


def different_tokens(parts: Sequence[Part]) -> float:
    """Tokens of different text in all sources together."""
    return sum(part.different for part in parts)


def most_passes(from_weight: str) -> float:
    """How often a run may read its text. from_weight: what it goes on from. Who goes on from weights may want few texts to be
    learned by heart, as answers are."""
    return MOST_PASSES if from_weight == "none" else MOST_PASSES_BY_HEART


def is_repeated_too_often(passes: float) -> bool:
    """Whether nothing is known of the loss after so many passes over the text."""
    return round(passes) > MOST_PASSES


def expected_loss(
    parameters: float,
    layers: int,
    tokens: float,
    parts: Sequence[Part],
    scale: float = 1.0,
    muon: bool = True,
    induction_heads: int = 0,
    context: float = CONTEXT_OF_LAW,
) -> float:
    """In nats per token, on text that is `scale` times as hard as that of WIKI. muon: else AdamW trains. context: see factor_of_context.

    induction_heads: query heads of a layer, where the first weights were those of `model.induction`; 0: where they were others.
    """
    effective = effective_tokens(tokens, parts)
    if not muon:
        effective /= TOKENS_OF_ADAMW
    # Text that is read again teaches little of copying: a megabyte that is read eight times ends where this expects it.
    different = min(tokens, different_tokens(parts))
    loss = scale * WIKI.loss(parameters, effective) * factor_of_context(context, different)
    if induction_heads:
        return loss * factor_of_induction(induction_heads, different)
    return loss * factor_of_depth(layers, effective)


def batch_tokens(tokens: float) -> float:
    """The best size of an update in tokens, for a run of `tokens`: 0.58 D ** 0.571."""
    return 0.58 * tokens**0.571


# Rates of Muon, and of AdamW for the norms and the embeddings beside it: the best of sweeps with 1.2 M parameters and 2 M tokens, and
# with 2.5 M and 33 M, both with `--init_scheme induction`. Other widths and batches take the same ones.
MUON_RATE = 0.014
SIDE_RATE = 8e-3
EMBED_RATE = 16e-3
# for text that is read once; more decay changes little there
WEIGHT_DECAY = 0.01
# Decay times updates for text that is read two to four times, by a model with no more parameters than there are different tokens.
# More passes and larger models want more of it: without, the model learns the text by heart. Fitted to runs of 580 to 1,292 updates
# with 2 to 8 passes and 0.6 to 10 parameters a token.
DECAY_OF_REPEATED_TEXT = 130
PASSES_WITH_THIS_DECAY = 4.5
POWER_OF_PASSES = 3
POWER_OF_SIZE = 0.5
MOST_WEIGHT_DECAY = 1.0
# Share of the run over which the rate falls to zero at its end: 40 % is as good, the whole run half a percent worse.
DECAY_SHARE = 0.65
# 5 are as good, 100 are worse in short runs.
WARMUP_UPDATES = 20


def muon_weight_decay(passes: float, updates: int, parameters_of_a_token: float) -> float:
    """The decay of Muon and of AdamW beside it, with the rates above, in a run that reads its text so often in so many updates.

    parameters_of_a_token: how many the model has for each token of different text.
    """
    repeated = min(max(passes - 1, 0.0), 1.0)
    of_many_passes = max(passes / PASSES_WITH_THIS_DECAY, 1.0) ** POWER_OF_PASSES
    of_large_models = max(parameters_of_a_token, 1.0) ** POWER_OF_SIZE
    decay = repeated * of_many_passes * of_large_models * DECAY_OF_REPEATED_TEXT / updates
    return min(max(decay, WEIGHT_DECAY), MOST_WEIGHT_DECAY)


# Step Law gives more to small models: at 7.3 M parameters and 4 M tokens 2.4e-3, where 5e-4 was the best of four rates.
HIGHEST_ADAMW_RATE = 1e-3


def adamw_rate(parameters: float, tokens: float) -> float:
    """The rate of AdamW alone: 1.79 N ** -0.713 D ** 0.307 (Step Law, arXiv 2503.04715), up to HIGHEST_ADAMW_RATE."""
    return min(1.79 * parameters**-0.713 * tokens**0.307, HIGHEST_ADAMW_RATE)


# The best size that was measured for ten minutes on a CPU has 2.02 M parameters for 10 M tokens. The law by itself takes smaller
# models for as many FLOPs, but they reach less of a CPU's rate.
TOKENS_OF_A_PARAMETER = 5


# ------------------------------------------------------------------------------------------ the shape of a model

# Widths beyond the first ones grow by about a fifth, since the loss is flat around the best one.
WIDTHS = (64, 96, 128, 160, 192, 224, 256, 320, 384, 448, 512, 640, 768, 896, 1024, 1280, 1536, 2048)
# Heads of 32 were no better.
HEAD_WIDTH = 64
# Width for each layer. Runs of few tokens learn more in the same time with wide and shallow models.
SHALLOW_ASPECT = 96
MIDDLE_ASPECT = 64
DEEP_ASPECT = 32
# Up to so many tokens shallow models are the better ones: after 12.7 M tokens two layers had learned more than four in the same time.
TOKENS_OF_SHALLOW_MODELS = 14e6
# From so many on deep ones are: the expected loss is 0.6 % too low for 320 x 4 after 73 M. In between it decides, but from three layers
# on: for two it is 2.4 % too low after 30 M.
TOKENS_OF_DEEP_MODELS = 40e6
FEWEST_MIDDLE_LAYERS = 3


def layers_for(width: int, tokens: float) -> tuple[int, int]:
    """The fewest and the most blocks that go with a width, in a run of so many tokens."""
    shallow = max(2, round(width / SHALLOW_ASPECT))
    # Four layers with a single head in each gained nothing.
    if tokens <= TOKENS_OF_SHALLOW_MODELS or heads_for(width) == 1:
        return shallow, shallow
    deep = round(width / DEEP_ASPECT)
    if tokens >= TOKENS_OF_DEEP_MODELS:
        return deep, deep
    return max(FEWEST_MIDDLE_LAYERS, round(width / MIDDLE_ASPECT)), deep


def layers_off(layers: int, width: int, tokens: float) -> float:
    """How many times fewer or more blocks a model has than go with its width. 1: it has as many."""
    fewest, most = layers_for(width, tokens)
    return max(fewest / layers, layers / most, 1.0)


def heads_for(width: int) -> int:
    """The number of query heads that goes with a width: each HEAD_WIDTH wide, or wider by as little as can be."""
    heads = max(1, width // HEAD_WIDTH)
    # RoPE turns pairs of dimensions.
    while heads > 1 and (width % heads or (width // heads) % 2):
        heads -= 1
    return heads


def kv_heads_for(heads: int) -> int:
    """The number of key and value heads that goes with so many query heads: up to four of these share one."""
    shared_by = max(n for n in (1, 2, 3, 4) if heads % n == 0)
    return heads // shared_by


# ------------------------------------------------------------------------------------------ the text of a run

# So many places of the text are looked at, and so many tokens at each: one block of bz2, where tokens have up to 4.5 bytes.
SAMPLES = 8
SAMPLE_TOKENS = 25_000
# What bz2 makes of a token of text with the scale 1 (of the text of WIKI 8.63). With this one constant the law meets 18 runs with 11
# texts, from Chinese encyclopaedia to Python code, within 2.5 % (root mean square), 4.1 % at most; xz calls novels 9 % too hard.
BITS_OF_WIKI = 8.8
# scales of these texts
MEASURED_SCALES = (0.5, 1.1)


def parts_of(corpus: Corpus, tokens: float) -> tuple[Part, ...]:
    """The sources of a mixture; without shares all text is one, of which a pass trains so many tokens."""
    mixture = corpus.mixture
    if mixture is None:
        return (Part(1.0, tokens),)
    return tuple(map(Part, mixture.shares, mixture.targets, corpus.sources))


def text_of(store: Documents, places: Iterable[tuple[int, int]], tokenizer: Any) -> bytes:
    """The text of the tokens from each place's begin to its end."""
    ids = (store.tokens[begin:end].tolist() for begin, end in places)
    return "\n".join(tokenizer.decode(some, skip_special_tokens=True) for some in ids).encode(errors="replace")


def text_scale(store: Documents, tokenizer: Any) -> float:
    """How many nats a token of this text takes, relative to the text of WIKI: as what bz2 makes of them."""
    n = len(store.tokens)
    bounds = [place * n // SAMPLES for place in range(SAMPLES + 1)]
    places = [(begin, min(begin + SAMPLE_TOKENS, end)) for begin, end in pairwise(bounds)]
    raw = text_of(store, places, tokenizer)
    if not raw.strip():
        return 1.0
    bits_per_token = 8 * len(bz2.compress(raw)) / sum(end - begin for begin, end in places)
    return bits_per_token / BITS_OF_WIKI
