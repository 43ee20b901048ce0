"""The tokenizer of a planned run: trained on its text, of the size that promises the fewest bits per byte."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from common.wording import announce
from dataset.corpus import Corpus
from dataset.shares import group_sources
from model.config import ModelConfig, parameter_count
from trainer.budget import laws
from trainer.budget.costs import (
    CPU_UTILISATION,
    GPU_UTILISATION,
    HELD_OUT_PER_SECOND,
    HELD_OUT_TOKENS,
    Machine,
    entry_seconds,
    sampled_ids,
)
from trainer.budget.own_tokenizer import FIGURES, Request, own_tokenizers
from trainer.machine.ranks import Ranks, first_rank_first
from trainer.pretrain.data import DOCUMENTS, TextKind, data_of
from trainer.pretrain.memory import flops_per_token
from trainer.pretrain.settings import PretrainSettings

# Text to train a tokenizer on, in bytes: at most MAX_BYTES, and so many for each second of a budget. They take 0.3 s/MB (English) to
# 1.4 s/MB (Chinese) of a core: 2 to 8 % of the budget. Twice the text gives 0.8 % more bytes per token. And MEMORY_TIMES as much memory.
MAX_BYTES = float(1 << 26)
BYTES_PER_SECOND = 60e3
MEMORY_TIMES = 60
# A size has to promise this much less than a smaller one, which takes less memory and time.
WORTH_ENTRIES = 0.995
# The least bytes per token for this repository's, where the law promises no gain
MIN_PACKING = 0.9
# Distinct targets of a row, and the share of a budget of time that updates get: about
DISTINCT_TARGETS = 330
TRAINING_SHARE = 0.8
# Text that is read again gets at most about an entry per so many unique tokens: more cost this much more. Tiny Shakespeare, plans of 5e12
# FLOP: 6,144 entries 2.22 bits per byte (224 x 2, 2 passes) and 2.16 (96 x 2, 3), 3,200 2.17 (192 x 2, 2.5), 1,600 and 1,024 2.06 and 2.07
# (128 x 2, 3). The law expects the contrary, perhaps since it does not know how large a model such text bears.
TOKENS_OF_ENTRY = 150
COST_OF_RARE_ENTRIES = 8.0

# vocabulary size -> the models to try
Sizes = Callable[[int], Sequence[ModelConfig]]


def tokenizers_of_text(settings: PretrainSettings, ranks: Ranks, kind: TextKind, memory: float | None) -> Path | None:
    """The folder of tokenizers of the text's own (own_tokenizer.py); None: the user has chosen one, or there is no text for any.

    memory: bytes that a rank may take; None: unknown. A collective: each machine has them. Errors: UserError, DataError.
    """
    if "tokenizer_path" in settings.user_set or settings.from_weight != "none" or kind is not DOCUMENTS:
        return None
    most = min(MAX_BYTES, BYTES_PER_SECOND * (settings.budget_seconds or math.inf), (memory or math.inf) / MEMORY_TIMES)
    # Of about as much time and free memory, a power of two: another number trains other tokenizers.
    max_bytes = 2.0 ** int(math.log2(most))
    is_free = not {"val_path", "val_fraction"} & settings.user_set
    held_out = None if is_free else settings.val_fraction
    request = Request(group_sources(data_of(settings, kind)), settings, held_out, max_bytes)
    return first_rank_first(ranks, partial(own_tokenizers, request, ranks.is_main))


def best_entries(folder: Path, settings: PretrainSettings, machine: Machine, sizes: Sizes) -> int:
    """The number of entries of the best tokenizer in the folder, told to the user; 0: there is none."""
    content = json.loads((folder / FIGURES).read_text())
    # 0: this repository's
    packing: Mapping[int, float] = {int(size): bytes_per_token for size, bytes_per_token in content["sizes"].items()}
    if not packing:
        return 0

    def bits_of(size: int) -> float:
        bytes_per_token = packing[size]
        difficulty = content["difficulty"] * (bytes_per_token / packing[0]) ** laws.POWER_OF_PACKING
        unique = content["text_bytes"] / bytes_per_token
        losses = [
            expected_loss(config, unique, difficulty, settings, machine) for config in sizes(size or laws.USUAL_ENTRIES)
        ]
        return min(losses) / math.log(2) / bytes_per_token

    usual = bits_of(0)
    best, fewest = 0, math.inf
    for size in sorted(packing.keys() - {0}):
        bits = bits_of(size)
        if bits < WORTH_ENTRIES * fewest:
            best, fewest = size, bits
    # Of little text the law does not see all that an own tokenizer gives, unless its tokens are shorter.
    if math.isinf(fewest) or (packing[best] < MIN_PACKING * packing[0] and fewest >= usual):
        return 0
    gain = 0.0 if math.isinf(usual) else 1 - fewest / usual
    told = f", about {gain:.0%} fewer bits per byte" if gain > 0.005 else ""
    announce(
        f"tokenizer: {best:,} entries, trained on {content['bytes'] / 1e6:.1f} MB of the text in {content['seconds']:.0f} s: "
        f"{packing[best]:.2f} bytes per token ({packing[0]:.2f} with this repository's, --tokenizer_path model){told}"
    )
    return best


def expected_loss(
    config: ModelConfig, unique: float, difficulty: float, settings: PretrainSettings, machine: Machine
) -> float:
    """Nats per token of a run of this model; infinite for one that does not suit its tokens. unique: tokens of the text."""
    head_ids = settings.sampled_softmax
    if machine.device == "cpu" and "sampled_softmax" not in settings.user_set:
        head_ids = sampled_ids(min(DISTINCT_TARGETS, config.vocab_size // 4), config.vocab_size)
    token_flops = flops_per_token(config, laws.CONTEXT_OF_LAW, head_ids)
    rate = machine.rate * (CPU_UTILISATION if machine.device == "cpu" else GPU_UTILISATION)
    tokens = settings.budget_tokens
    most_parameters = laws.MAX_PARAMETERS_PER_TOKEN * unique
    if tokens is not None:
        most_parameters = min(most_parameters, tokens / laws.MIN_TOKENS_PER_PARAMETER)
    else:
        token_seconds = token_flops / rate
        seconds = (settings.budget_flops or 0) / rate
        if settings.budget_seconds:
            seconds = TRAINING_SHARE * settings.budget_seconds
            # An evaluation computes the whole head. This, and what an update takes for more entries, counts only where time does.
            held_out = min(HELD_OUT_TOKENS, HELD_OUT_PER_SECOND * settings.budget_seconds)
            seconds -= 2 * config.vocab_size * config.hidden_size * held_out / rate
            update_tokens = laws.batch_tokens(max(seconds / token_seconds, 1))
            rows = update_tokens / laws.USUAL_ROW
            token_seconds += entry_seconds(config, rows, head_ids, machine.device) / update_tokens
        tokens = min(max(seconds, 1.0) / token_seconds, laws.MAX_PASSES * unique)
    fewest, most = laws.layers_for(config.hidden_size, tokens)
    is_suitable = fewest <= config.num_hidden_layers <= most and parameter_count(config) <= most_parameters
    if not is_suitable and not {"hidden_size", "num_hidden_layers"} & settings.user_set:
        return math.inf
    loss = laws.expected_loss(config, tokens, [laws.Part(1.0, unique)], difficulty, init_scheme="induction")
    if config.vocab_size == laws.USUAL_ENTRIES:
        return loss
    rare_entries = max(config.vocab_size / unique - 1 / TOKENS_OF_ENTRY, 0.0)
    repeats = min(max(tokens / unique - 1, 0.0), 1.0)
    return loss * (1 + COST_OF_RARE_ENTRIES * rare_entries * repeats)


def knows_held_out(corpus: Corpus, folder: Path) -> bool:
    """Returns whether the tokenizers in a folder are trained on text that the run holds out; a line tells of it."""
    if corpus.val_documents is None or corpus.val_store is not corpus.store:
        return False
    trained: Mapping[str, int] = json.loads((folder / FIGURES).read_text())["trained"]
    # trained bytes that a held-out document may share: those of the document whose end it is
    begins = dict.fromkeys(corpus.val_documents.tolist(), 0)
    if corpus.split_document is not None:
        begins[corpus.split_document + 1] = corpus.store.text_bytes[corpus.split_document]
    hashes = corpus.store.copy_hash
    is_known = any(trained.get(str(hashes[number]), 0) > begin for number, begin in begins.items())
    if is_known:
        announce(
            "note: a tokenizer of the text's own would know held-out text, so this repository's is used; --val_path helps"
        )
    return is_known
