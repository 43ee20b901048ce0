"""What every objective of train_electra.py does with networks of transformers: read padded rows, fill in masked tokens.

Shapes. R: rows (examples) of a batch, T: positions of a row, K: masked positions of a row at most, M = R·K,
V: vocabulary.
"""

import contextlib
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from transformers import ElectraConfig, ElectraForMaskedLM

from model.checkpointing import recompute_layers
from model.electra.compiled_encoder import compile_layers, eager_if
from model.electra.masking import IGNORE


class Pretrainer(torch.nn.Module):
    """One or several networks that are trained together."""

    # The attributes that hold them; each is saved in a folder of this name.
    NETWORKS: ClassVar[tuple[str, ...]]
    # The one that is fine-tuned afterwards.
    ENCODER: ClassVar[str]

    def __init__(self) -> None:
        super().__init__()
        self.compiled_shape: tuple[int, int] | None = None

    def networks(self) -> list[Any]:
        """In the order of NETWORKS."""
        return [getattr(self, name) for name in self.NETWORKS]

    @property
    def encoder_config(self) -> ElectraConfig:
        """Of the network that is fine-tuned."""
        config: ElectraConfig = getattr(self, self.ENCODER).config
        return config

    def graphs_for(self, ids: torch.Tensor) -> contextlib.AbstractContextManager[Any]:
        """A context in which compiled layers use their graphs if these are for batches like ids, [R, T]."""
        # An evaluation, without dropout, would compile a graph of its own.
        is_for_it = self.training and self.compiled_shape == tuple(ids.shape)
        return eager_if(self.compiled_shape is not None and not is_for_it)

    def gradient_checkpointing_enable(self) -> None:
        """Keep only what enters each layer, and compute the rest again in the backward pass."""
        for network in self.networks():
            recompute_layers(network)

    def compile_training(self, shape: tuple[int, int] | None = None, dtype: torch.dtype = torch.bfloat16) -> str:
        """Compile the layers, one graph for all of a network. shape: (rows, positions) of the batches that use it; others,
        as an epoch's last, are computed without. None: all use it, each shape with a graph of its own.

        Nothing depends on dtype here, and nothing is to be said.
        """
        self.compiled_shape = shape
        for network in self.networks():
            compile_layers(network)
        return ""


def is_real(ids: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """bool [R, T]: the positions that are no padding. ids: [R, T]; lengths: [R]."""
    return torch.arange(ids.shape[1], device=ids.device) < lengths[:, None]


def encoder_inputs(real: torch.Tensor, token_type_ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """What an encoder of transformers is given beside the ids. real: bool [R, T], see is_real; token_type_ids: [R, T]."""
    R, T = real.shape
    # With four dimensions: transformers takes such a mask as it is, without a look inside.
    visible = real[:, None, None, :].expand(R, 1, T, T)
    return {"token_type_ids": token_type_ids, "attention_mask": visible}


class FilledIn(NamedTuple):
    """What a network makes of masked tokens. loss, correct: 0-d, the sum of the cross-entropies, and how many of the
    likeliest tokens are right; logits: float32 [M, V]."""

    loss: torch.Tensor
    correct: torch.Tensor
    logits: torch.Tensor


def fill_in(
    network: ElectraForMaskedLM,
    masked_ids: torch.Tensor,
    positions: torch.Tensor,
    labels: torch.Tensor,
    inputs: dict[str, torch.Tensor],
    smoothing: float = 0.0,
) -> FilledIn:
    """Let a network guess the tokens at masked positions. masked_ids: [R, T]; positions, labels: [R, K], a label of IGNORE
    where none is masked; inputs: of encoder_inputs; smoothing: of the labels, over the vocabulary.

    The head is computed at these positions alone: of all of them it would take more than the layers.
    """
    hidden = network.electra(masked_ids, **inputs).last_hidden_state
    rows = torch.arange(len(masked_ids), device=masked_ids.device)[:, None]
    at_masked = network.generator_predictions(hidden[rows, positions].flatten(0, 1))
    logits = network.generator_lm_head(at_masked).float()
    flat = labels.flatten()
    loss = F.cross_entropy(logits, flat, ignore_index=IGNORE, reduction="sum", label_smoothing=smoothing)
    with torch.no_grad():
        correct = (logits.argmax(-1) == flat).sum()
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
