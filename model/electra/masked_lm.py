"""Masked language modelling, as BERT is pretrained (Devlin et al., arXiv 1810.04805), without its second task: the baseline
that ELECTRA is compared with.

The encoder is that of the discriminator, and its head, which is the word embedding itself, that of a generator. So both
objectives leave the same encoder to fine-tune, and read the same examples with the same masked positions.
"""

from pathlib import Path
from typing import ClassVar

import torch
from transformers import ElectraConfig, ElectraForMaskedLM

from model.electra.compiled_encoder import graphs_for, quicken_attention
from model.electra.model_electra import init_original, init_position_embeddings
from model.electra.pretrainer import (
    FLOPS_OF_MULTIPLY_ADD,
    FilledIn,
    Pretrainer,
    encoder_multiply_adds,
    fill_in,
    is_real,
    masked_head_multiply_adds,
)
from model.electra.saved_network import load_network
from model.electra.sizes import WEIGHT_INITS


class MaskedLanguageModel(Pretrainer):
    """One encoder that fills in masked tokens."""

    NETWORKS: ClassVar[tuple[str, ...]] = ("encoder",)
    ENCODER: ClassVar[str] = "encoder"

    def __init__(self, encoder: ElectraForMaskedLM, smoothing: float = 0.0) -> None:
        """smoothing: of the labels, over the vocabulary."""
        super().__init__()
        self.encoder = encoder
        self.smoothing = smoothing
        encoder.tie_weights()
        quicken_attention(encoder)
        assert encoder.generator_lm_head.weight is encoder.electra.embeddings.word_embeddings.weight

    @classmethod
    def from_config(
        cls, config: ElectraConfig, weight_init: str = "normal", smoothing: float = 0.0
    ) -> "MaskedLanguageModel":
        """A fresh network. weight_init: normal is Hugging Face's, original see `init_original`."""
        assert weight_init in WEIGHT_INITS
        encoder = ElectraForMaskedLM(config)
        if weight_init == "original":
            init_original(encoder)
        init_position_embeddings(encoder)
        return cls(encoder, smoothing)

    @classmethod
    def from_pretrained(cls, folder: str | Path, smoothing: float = 0.0) -> "MaskedLanguageModel":
        """The network in `{folder}/encoder`.

        Errors: UserError where the folder does not hold all of it.
        """
        place = Path(folder, "encoder")
        return cls(load_network(str(place), place, ElectraForMaskedLM), smoothing)

    def forward(
        self,
        ids: torch.Tensor,
        masked_ids: torch.Tensor,
        positions: torch.Tensor,
        labels: torch.Tensor,
        token_type_ids: torch.Tensor,
        lengths: torch.Tensor,
    ) -> FilledIn:
        """What the encoder makes of a batch, whose parts are those of ElectraPretrainer.forward."""
        with graphs_for(self, ids.shape):
            inputs = self.encoder_inputs(is_real(ids, lengths), token_type_ids)
            return fill_in(self.encoder, masked_ids, positions, labels, inputs, self.judge_guesses, self.smoothing)


def flops_per_token(config: ElectraConfig, length: float, masked_share: float) -> float:
    """Floating-point operations of a training step per position, counted as those of ELECTRA in model_electra.py."""
    multiply_adds = encoder_multiply_adds(config, length) + masked_share * masked_head_multiply_adds(config)
    return FLOPS_OF_MULTIPLY_ADD * multiply_adds
