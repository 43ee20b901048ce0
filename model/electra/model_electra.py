"""ELECTRA pretraining: a small generator fills in masked tokens, a discriminator tells which tokens were replaced.

Clark et al., "ELECTRA: Pre-training Text Encoders as Discriminators Rather Than Generators" (ICLR 2020). Both networks
are Hugging Face's; they share all embeddings, and the generator's head is the word embedding itself.

Shapes. R: rows (examples) of a batch, T: positions of a row, K: masked positions of a row at most, M = R·K,
V: vocabulary.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from transformers import (
    AutoModelForMaskedLM,
    AutoModelForPreTraining,
    ElectraConfig,
    ElectraForMaskedLM,
    ElectraForPreTraining,
)

from common.errors import UserError
from model.electra.compiled_encoder import compile_layers, graphs_for, quicken_attention, ready_mask, uses_graphs
from model.electra.masking import IGNORE
from model.electra.sampling import AddsUpChunks, add_up_chunks, sample
from model.electra.saved_network import load_config, load_network
from model.electra.sizes import POSITION_INITS

# The two networks; each is saved in a folder of this name.
NETWORKS = ("generator", "discriminator")


def configs(
    sizes: Mapping[str, int],
    vocab_size: int,
    pad_id: int | None = 0,
    max_seq_len: int = 512,
    init_std: float = 0.02,
    position_init: str = "normal",
    dropout: float = 0.1,
) -> tuple[ElectraConfig, ElectraConfig]:
    """(generator's, discriminator's) ElectraConfig. sizes: those of NETWORK_SIZES.

    init_std: of the random weights; the published 0.02 fits a width of 768. position_init: see init_position_embeddings.
    Errors: ValueError where the heads do not divide the width, or the divisor not width, heads and FFN.
    """
    assert position_init in POSITION_INITS
    divided = ("hidden_size", "num_attention_heads", "intermediate_size")
    for name in divided:
        if sizes[name] % sizes["generator_divisor"]:
            raise ValueError(
                f"--{name} {sizes[name]} is no multiple of --generator_divisor {sizes['generator_divisor']}, which the "
                "generator's is divided by"
            )

    def config(divisor: int) -> ElectraConfig:
        width, heads, ffn = (sizes[name] // divisor for name in divided)
        if width % heads:
            raise ValueError(f"--hidden_size {width} is no multiple of --num_attention_heads {heads}")
        # The usual value is left out, so that such a config is as other people's code writes it.
        own: dict[str, Any] = {} if position_init == "normal" else {"position_init": position_init}
        return ElectraConfig(
            vocab_size=vocab_size,
            embedding_size=sizes["embedding_size"],
            hidden_size=width,
            num_hidden_layers=sizes["num_hidden_layers"],
            num_attention_heads=heads,
            intermediate_size=ffn,
            hidden_dropout_prob=dropout,
            attention_probs_dropout_prob=dropout,
            max_position_embeddings=max(512, max_seq_len),
            pad_token_id=pad_id,
            initializer_range=init_std,
            **own,
        )

    discriminator = config(1)
    return config(sizes["generator_divisor"]), discriminator


def init_position_embeddings(network: Any) -> None:
    """Make the position embeddings of a new Hugging Face model sinusoids if its config's `position_init` says so:
    Vaswani et al., "Attention Is All You Need" (2017), 3.5, scaled to the root mean square `initializer_range`.

    They are trained like any others. At the start the dot product of two positions depends only on their distance. What is
    learned about neighbours at one place therefore holds everywhere, also beyond the trained length.
    """
    if getattr(network.config, "position_init", None) != "sinusoidal":
        return
    weight = network.base_model.embeddings.position_embeddings.weight
    n, width = weight.shape
    angles = torch.arange(n)[:, None] * 10_000.0 ** (-torch.arange(0, width, 2) / width)
    pairs = torch.stack((angles.sin(), angles.cos()), -1).flatten(1)[:, :width]
    with torch.no_grad():
        weight.copy_(pairs * network.config.initializer_range * 2**0.5)


# ------------------------------------------------------------------------------------------------ the model


class Losses(NamedTuple):
    """What a batch gives. mlm and disc: 0-d sums of the losses over masked and over all non-padding positions."""

    mlm: torch.Tensor
    disc: torch.Tensor
    sampled: torch.Tensor  # [R, K] what the generator put there
    corrupted: torch.Tensor  # [R, T] the text with it
    # bool [R, T]: the discriminator's labels.
    replaced: torch.Tensor
    disc_logits: torch.Tensor  # [R, T]
    # 0-d: masked positions whose likeliest token is the right one.
    correct: torch.Tensor


class ElectraPretrainer(torch.nn.Module):
    """Generator and discriminator, with one set of embeddings."""

    def __init__(
        self,
        generator: ElectraForMaskedLM,
        discriminator: ElectraForPreTraining,
        sampling: str = "multinomial",
        gen_smooth: float = 0.0,
        disc_smooth: float = 0.0,
    ) -> None:
        """Both networks will use the discriminator's embeddings. sampling: see `sample`. gen_smooth, disc_smooth: label smoothing
        of the two losses. Errors: ValueError where the networks cannot share their embeddings."""
        super().__init__()
        for name in ("vocab_size", "embedding_size", "max_position_embeddings", "type_vocab_size"):
            own, other = getattr(generator.config, name), getattr(discriminator.config, name)
            if own != other:
                raise ValueError(
                    f"{name} is {own} in the generator and {other} in the discriminator, so they cannot share embeddings"
                )
        self.generator = generator
        self.discriminator = discriminator
        self.sampling = sampling
        self.gen_smooth = gen_smooth
        self.disc_smooth = disc_smooth
        # The (rows, positions) of the batches that the layers are compiled for; None: they are not.
        self.compiled_shape: tuple[int, int] | None = None
        # Compiled forms take their places.
        self.add_up_chunks: AddsUpChunks = add_up_chunks
        self.judge_guesses: JudgesGuesses = judge_guesses
        # The modules, not their weights: a weight assigned anew would leave the generator's head with the old one.
        generator.electra.embeddings = discriminator.electra.embeddings
        generator.tie_weights()
        for network in self.networks():
            quicken_attention(network)
        assert generator.generator_lm_head.weight is generator.electra.embeddings.word_embeddings.weight

    @classmethod
    def from_configs(
        cls, generator: ElectraConfig, discriminator: ElectraConfig, **options: Any
    ) -> "ElectraPretrainer":
        """Fresh networks."""
        model = cls(ElectraForMaskedLM(generator), ElectraForPreTraining(discriminator), **options)
        init_position_embeddings(model.discriminator)
        return model

    @classmethod
    def from_pretrained(cls, what: str, folder: Path, **options: Any) -> "ElectraPretrainer":
        """The networks in `{folder}/generator` and `{folder}/discriminator`, tied again.

        Errors: UserError, which `what` begins, where a folder does not hold all of a network, or they do not fit each other.
        """
        networks = []
        for name, kind in zip(NETWORKS, (AutoModelForMaskedLM, AutoModelForPreTraining), strict=True):
            place = f"{what}: {folder / name}"
            config = load_config(place, folder / name)
            if config.model_type != "electra":
                raise UserError(
                    f"{place}: a model of the kind {str(config.model_type)[:40]}; a network of an ELECTRA is wanted"
                )
            network, missing = load_network(place, folder / name, kind, config)
            if missing:
                raise UserError(
                    f"{place}: {len(missing)} weights of an {type(network).__name__} are not in there, {min(missing)}; name "
                    "a folder as train_electra.py leaves it: a fine-tuned encoder has lost the head of its pretraining"
                )
            networks.append(network)
        return cls(*networks, **options)

    def networks(self) -> tuple[ElectraForMaskedLM, ElectraForPreTraining]:
        return self.generator, self.discriminator

    def forward(
        self,
        ids: torch.Tensor,
        masked_ids: torch.Tensor,
        positions: torch.Tensor,
        labels: torch.Tensor,
        token_type_ids: torch.Tensor,
        lengths: torch.Tensor,
        sampled: torch.Tensor | None = None,
    ) -> Losses:
        """The Losses of a batch. ids, masked_ids, token_type_ids: int64 [R, T]; positions, labels: [R, K]; lengths: [R].

        sampled: int64 [R, K] in place of the generator's draw (tests).
        """
        with graphs_for(self, ids.shape):
            real = is_real(ids, lengths)
            mask = ready_mask(real, uses_graphs(self, real.shape))
            inputs = {"token_type_ids": token_type_ids, "attention_mask": mask}
            # The generator's head is computed at the masked positions alone: of all of them it would take more than the layers.
            hidden = self.generator.electra(masked_ids, **inputs).last_hidden_state
            rows = torch.arange(len(masked_ids), device=masked_ids.device)[:, None]
            at_masked = self.generator.generator_predictions(hidden[rows, positions].flatten(0, 1))
            logits = self.generator.generator_lm_head(at_masked)  # [M, V]
            mlm, correct = self.judge_guesses(logits, labels.flatten(), self.gen_smooth)
            with torch.no_grad():
                if sampled is None:
                    sampled = sample(logits, self.sampling, self.add_up_chunks).view_as(labels)
                used = labels != IGNORE
                # A place that is not used points at position 0: what it adds there is 0.
                nothing = torch.zeros_like(ids)
                is_drawn = nothing.scatter_add(1, positions, used.long()) > 0
                drawn = nothing.scatter_add(1, positions, torch.where(used, sampled, 0))
                corrupted = torch.where(is_drawn, drawn, ids)
                replaced = corrupted != ids
            disc_logits = self.discriminator(corrupted, **inputs).logits.float()
            # As https://github.com/richarddwang/electra_pytorch smooths: "replaced" stays 1, "original" becomes disc_smooth.
            target = torch.where(replaced, 1.0, self.disc_smooth)
            losses = F.binary_cross_entropy_with_logits(disc_logits, target, reduction="none")
            disc = torch.where(real, losses, 0.0).sum()
            # In float32 the logits are a view of what the head gives. As an output with a gradient FSDP2 would warn of it.
            return Losses(mlm, disc, sampled, corrupted, replaced, disc_logits.detach(), correct)

    def gradient_checkpointing_enable(self) -> None:
        """Keep only what enters each layer, and compute the rest again in the backward pass."""
        for network in self.networks():
            network.activation_checkpointing_enable({"use_reentrant": False})

    def compile_training(self, shape: tuple[int, int] | None, dtype: torch.dtype = torch.bfloat16) -> str:
        """Compile the layers, one graph for all of a network, and what becomes of the generator's logits. shape: (rows,
        positions) of the batches that use it; others, as an epoch's last, are computed without."""
        assert shape is not None, "the lengths of these batches are known"
        self.compiled_shape = shape
        for network in self.networks():
            compile_layers(network)
        self.judge_guesses = torch.compile(judge_guesses, dynamic=False)
        self.add_up_chunks = torch.compile(add_up_chunks, dynamic=False)
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


def flops_per_token(
    generator: ElectraConfig, discriminator: ElectraConfig, length: float, masked_share: float
) -> float:
    """Floating-point operations of a training step per position, counted as for the main trainer: matrix products
    alone, 2 per multiply-add forward and twice that backward, full attention over `length` positions."""
    multiply_adds = float(discriminator.hidden_size**2)
    for config in (generator, discriminator):
        h, e = config.hidden_size, config.embedding_size
        multiply_adds += config.num_hidden_layers * (4 * h * h + 2 * h * config.intermediate_size + 2 * length * h)
        # Embeddings of another width are brought to that of the layers.
        multiply_adds += e * h if e != h else 0
    e = generator.embedding_size
    # The generator's head works at the masked positions alone.
    multiply_adds += masked_share * (generator.hidden_size * e + e * generator.vocab_size)
    return 6 * multiply_adds
