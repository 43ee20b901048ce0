"""What every objective of train_electra.py does with networks of transformers: read padded rows, fill in masked tokens.

Shapes. R: rows (examples) of a batch, T: positions of a row, K: masked positions of a row at most, M = R·K,
V: vocabulary.
"""

from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from transformers import ElectraConfig, ElectraForMaskedLM

from model.checkpointing import recompute_layers
from model.electra.compiled_encoder import compile_layers, ready_mask, uses_graphs
from model.electra.masking import IGNORE


class Pretrainer(torch.nn.Module):
    """One or several networks that are trained together."""

    # The attributes that hold them; each is saved in a folder of this name.
    NETWORKS: ClassVar[tuple[str, ...]]
    # The one that is fine-tuned afterwards.
    ENCODER: ClassVar[str]

    def __init__(self) -> None:
        super().__init__()
        # The (rows, positions) of the batches that the layers are compiled for; None: they are not.
        self.compiled_shape: tuple[int, int] | None = None
        self.judge_guesses: JudgesGuesses = judge_guesses

    def networks(self) -> list[Any]:
        """In the order of NETWORKS."""
        return [getattr(self, name) for name in self.NETWORKS]

    @property
    def encoder_config(self) -> ElectraConfig:
        """Of the network that is fine-tuned."""
        config: ElectraConfig = getattr(self, self.ENCODER).config
        return config

    def encoder_inputs(self, real: torch.Tensor, token_type_ids: torch.Tensor) -> dict[str, torch.Tensor]:
        """What an encoder of transformers is given beside the ids. real: bool [R, T], see is_real; token_type_ids: [R, T]."""
        return {"token_type_ids": token_type_ids, "attention_mask": ready_mask(real, uses_graphs(self, real.shape))}

    def gradient_checkpointing_enable(self) -> None:
        """Keep only what enters each layer, and compute the rest again in the backward pass."""
        for network in self.networks():
            recompute_layers(network)

    def compile_training(self, shape: tuple[int, int] | None, dtype: torch.dtype = torch.bfloat16) -> str:
        """Compile the layers, one graph for all of a network, and what becomes of a head's logits. shape: (rows, positions) of
        the batches that use it; others, as an epoch's last, are computed without.

        Nothing depends on dtype here, and nothing is to be said.
        """
        assert shape is not None, "the lengths of these batches are known"
        self.compiled_shape = shape
        for network in self.networks():
            compile_layers(network)
        self.judge_guesses = torch.compile(judge_guesses, dynamic=False)
        return ""


def is_real(ids: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """bool [R, T]: the positions that are no padding. ids: [R, T]; lengths: [R]."""
    return torch.arange(ids.shape[1], device=ids.device) < lengths[:, None]


# (logits, labels, smoothing) -> (loss, correct), see judge_guesses
JudgesGuesses = Callable[[torch.Tensor, torch.Tensor, float], tuple[torch.Tensor, torch.Tensor]]


def judge_guesses(
    logits: torch.Tensor, labels: torch.Tensor, smoothing: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """(sum of the cross-entropies, how many of the likeliest tokens are right), 0-d. logits: [M, V]; labels: [M], or IGNORE.

    Where several tokens are the likeliest, as in half precision it happens, the right one counts as a share of 1.
    """
    logits = logits.float()
    loss = F.cross_entropy(logits, labels, ignore_index=IGNORE, reduction="sum", label_smoothing=smoothing)
    with torch.no_grad():
        # Not by argmax, which takes several times as long on a CPU.
        highest = logits.amax(-1, keepdim=True)
        likeliest = (logits >= highest).float().sum(-1)
        is_right = logits.gather(1, labels.clamp(min=0)[:, None]) >= highest
        correct = torch.where(is_right.squeeze(1) & (labels != IGNORE), 1 / likeliest, 0.0).sum()
    return loss, correct


class FilledIn(NamedTuple):
    """What a network makes of masked tokens. loss, correct: 0-d, see judge_guesses; logits: [M, V], in half precision where
    products are."""

    loss: torch.Tensor
    correct: torch.Tensor
    logits: torch.Tensor


def fill_in(
    network: ElectraForMaskedLM,
    masked_ids: torch.Tensor,
    positions: torch.Tensor,
    labels: torch.Tensor,
    inputs: dict[str, torch.Tensor],
    judge: JudgesGuesses,
    smoothing: float = 0.0,
) -> FilledIn:
    """Let a network guess the tokens at masked positions. masked_ids: [R, T]; positions, labels: [R, K], a label of IGNORE
    where none is masked; inputs: of encoder_inputs; judge: judge_guesses, or its compiled form; smoothing: of the labels,
    over the vocabulary.

    The head is computed at these positions alone: of all of them it would take more than the layers.
    """
    hidden = network.electra(masked_ids, **inputs).last_hidden_state
    rows = torch.arange(len(masked_ids), device=masked_ids.device)[:, None]
    at_masked = network.generator_predictions(hidden[rows, positions].flatten(0, 1))
    logits = network.generator_lm_head(at_masked)
    loss, correct = judge(logits, labels.flatten(), smoothing)
    return FilledIn(loss, correct, logits)


# --------------------------------------------------------------------------------- floating-point operations

# A multiply-add is two operations forward; the backward pass takes twice as many.
FLOPS_OF_MULTIPLY_ADD = 6


def encoder_multiply_adds(config: ElectraConfig, length: float) -> float:
    """Multiply-adds of an encoder per position: matrix products alone, full attention over `length` positions."""
    h = config.hidden_size
    e = config.embedding_size
    products = config.num_hidden_layers * (4 * h * h + 2 * h * config.intermediate_size)
    # Embeddings of another width are brought to that of the layers.
    if e != h:
        products += e * h
    return products + 2 * config.num_hidden_layers * length * h


def masked_head_multiply_adds(config: ElectraConfig) -> float:
    """Multiply-adds of the head that fills in a masked token, per masked position."""
    e = config.embedding_size
    return float(config.hidden_size * e + e * config.vocab_size)
