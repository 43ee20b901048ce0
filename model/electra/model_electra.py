"""ELECTRA pretraining: a small generator fills in masked tokens, a discriminator tells which tokens were replaced.

Clark et al., "ELECTRA: Pre-training Text Encoders as Discriminators Rather Than Generators" (ICLR 2020). Both networks
are Hugging Face's; they share all embeddings, and the generator's head is the word embedding itself.

Shapes. R: rows (examples) of a batch, T: positions of a row, K: masked positions of a row at most, M = R·K,
V: vocabulary.
"""

from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from transformers import ElectraConfig, ElectraForMaskedLM, ElectraForPreTraining

from model.electra.compiled_encoder import graphs_for, quicken_attention
from model.electra.masking import IGNORE
from model.electra.pretrainer import (
    FLOPS_OF_MULTIPLY_ADD,
    Pretrainer,
    encoder_multiply_adds,
    fill_in,
    is_real,
    masked_head_multiply_adds,
)
from model.electra.sampling import AddsUpChunks, add_up_chunks, sample, to_draw_from
from model.electra.saved_network import load_network
from model.electra.sizes import POSITION_INITS, WEIGHT_INITS, Size

# Equal bins of the discriminator's logit from -LARGEST_LOGIT to LARGEST_LOGIT; the first and the last one also hold what is
# beyond. Not of its probability: few tokens are replaced, so most probabilities are near 0, where bins of a logit are small.
AUC_BINS = 200
LARGEST_LOGIT = 10.0
# A field of our own in a generator's config: it has embeddings of its own. Tied ones have no such field.
UNTIED = "untied_embeddings"


def configs(
    size: Size,
    vocab_size: int,
    pad_id: int | None = 0,
    max_seq_len: int | None = None,
    init_std: float = 0.02,
    position_init: str = "normal",
    generator_layers: int | None = None,
    untied_embeddings: bool = False,
    **changes: int | None,
) -> tuple[ElectraConfig, ElectraConfig]:
    """(generator's, discriminator's) ElectraConfig of a Size; `changes` (layers, width, heads ...) override its fields.

    init_std: of the random weights; the published 0.02 fits a width of 768. position_init: see
    init_position_embeddings. generator_layers: default, as many as the discriminator has. untied_embeddings: the generator
    has embeddings of its own, as wide as its layers (https://github.com/google-research/electra has them so).
    Errors: ValueError where the heads do not divide the width, or the divisor not width, heads and FFN.
    """
    assert position_init in POSITION_INITS
    values = {**vars(size), **{name: value for name, value in changes.items() if value is not None}}
    for name, flag in (("width", "hidden_size"), ("heads", "num_attention_heads"), ("ffn", "intermediate_size")):
        if values[name] % values["divisor"]:
            raise ValueError(
                f"--{flag} {values[name]} is no multiple of --generator_divisor {values['divisor']}, which the generator's is "
                "divided by"
            )

    def config(divisor: int, layers: int, embedding: int, **own: Any) -> ElectraConfig:
        """own: fields of our own."""
        width = values["width"] // divisor
        heads = values["heads"] // divisor
        if width % heads:
            raise ValueError(f"--hidden_size {width} is no multiple of --num_attention_heads {heads}")
        # The usual value is left out, so that such a config is as other people's code writes it.
        if position_init != "normal":
            own["position_init"] = position_init
        return ElectraConfig(
            vocab_size=vocab_size,
            embedding_size=embedding,
            hidden_size=width,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            intermediate_size=values["ffn"] // divisor,
            max_position_embeddings=max(512, max_seq_len or 0),
            pad_token_id=pad_id,
            initializer_range=init_std,
            **own,
        )

    divisor = values["divisor"]
    layers = values["layers"]
    embedding = values["embedding"]
    discriminator = config(1, layers, embedding)
    if untied_embeddings:
        own = {UNTIED: True}
        generator = config(divisor, generator_layers or layers, values["width"] // divisor, **own)
    else:
        generator = config(divisor, generator_layers or layers, embedding)
    return generator, discriminator


def is_untied(generator: ElectraConfig) -> bool:
    """Whether a generator has embeddings of its own."""
    return bool(getattr(generator, UNTIED, False))


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


def init_original(network: Any) -> None:
    """Draw the weights of a new Hugging Face ELECTRA as TensorFlow does for https://github.com/google-research/electra:
    a normal distribution that is cut off at two deviations, but Glorot and Bengio's uniform one (2010) for the layers
    that name no distribution there: the projection of the embeddings and the discriminator's last layer.
    """
    deviation = network.config.initializer_range
    for name, parameter in network.named_parameters():
        # Biases stay 0, and the weights of norms 1.
        if parameter.dim() < 2:
            continue
        if name.endswith(("embeddings_project.weight", "dense_prediction.weight")):
            torch.nn.init.xavier_uniform_(parameter)
        else:
            torch.nn.init.trunc_normal_(parameter, std=deviation, a=-2 * deviation, b=2 * deviation)


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


def check_embeddings(generator: ElectraConfig, discriminator: ElectraConfig) -> None:
    """Errors: ValueError where two networks cannot share their embeddings."""
    for name in ("vocab_size", "embedding_size", "max_position_embeddings", "type_vocab_size"):
        own = getattr(generator, name)
        other = getattr(discriminator, name)
        if own != other:
            raise ValueError(
                f"{name} is {own} in the generator and {other} in the discriminator, so they cannot share embeddings: "
                "make them equal, or give --untied_embeddings 1"
            )


class ElectraPretrainer(Pretrainer):
    """Generator and discriminator, with one set of embeddings unless the generator's config says that it has its own."""

    NETWORKS: ClassVar[tuple[str, ...]] = ("generator", "discriminator")
    ENCODER: ClassVar[str] = "discriminator"

    def __init__(
        self,
        generator: ElectraForMaskedLM,
        discriminator: ElectraForPreTraining,
        sampling: str = "multinomial",
        gen_smooth: float = 0.0,
        disc_smooth: float = 0.0,
        temperature: float = 1.0,
        disallow_correct: bool = False,
    ) -> None:
        """Both networks will use the discriminator's embeddings, unless the generator's are its own. sampling: see `sample`.
        gen_smooth, disc_smooth: label smoothing of the two losses. temperature: what the generator's logits are divided by
        before a token is drawn. disallow_correct: the original token is never drawn.

        Errors: ValueError where the embeddings do not fit each other.
        """
        super().__init__()
        self.generator = generator
        self.discriminator = discriminator
        self.sampling = sampling
        self.gen_smooth = gen_smooth
        self.disc_smooth = disc_smooth
        self.temperature = temperature
        self.disallow_correct = disallow_correct
        self.add_up_chunks: AddsUpChunks = add_up_chunks
        if not is_untied(generator.config):
            check_embeddings(generator.config, discriminator.config)
            # The modules, not their weights: a weight assigned anew would leave the generator's head with the old one.
            generator.electra.embeddings = discriminator.electra.embeddings
        generator.tie_weights()
        for network in self.networks():
            quicken_attention(network)
        assert generator.generator_lm_head.weight is generator.electra.embeddings.word_embeddings.weight

    @classmethod
    def from_configs(
        cls, generator: ElectraConfig, discriminator: ElectraConfig, weight_init: str = "normal", **options: Any
    ) -> "ElectraPretrainer":
        """Fresh networks. weight_init: normal is Hugging Face's, original see `init_original`."""
        assert weight_init in WEIGHT_INITS
        networks = (ElectraForMaskedLM(generator), ElectraForPreTraining(discriminator))
        if weight_init == "original":
            for network in networks:
                init_original(network)
        model = cls(*networks, **options)
        init_position_embeddings(model.discriminator)
        if is_untied(generator):
            init_position_embeddings(model.generator)
        return model

    @classmethod
    def from_pretrained(
        cls, folder: str | Path, untied_embeddings: bool = False, **options: Any
    ) -> "ElectraPretrainer":
        """The networks in `{folder}/generator` and `{folder}/discriminator`, tied again, unless they were untied or shall be.

        Errors: UserError where a folder does not hold all of a network; ValueError where the two do not fit each other.
        """
        changes = {UNTIED: True} if untied_embeddings else {}
        place = Path(folder, "generator")
        generator = load_network(str(place), place, ElectraForMaskedLM, **changes)
        place = Path(folder, "discriminator")
        discriminator = load_network(str(place), place, ElectraForPreTraining)
        return cls(generator, discriminator, **options)

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
            inputs = self.encoder_inputs(real, token_type_ids)
            filled_in = fill_in(
                self.generator, masked_ids, positions, labels, inputs, self.judge_guesses, self.gen_smooth
            )
            with torch.no_grad():
                if sampled is None:
                    sampled = self.draw(filled_in.logits, labels)
                corrupted = corrupted_rows(ids, positions, labels, sampled)
                replaced = corrupted != ids
            disc, disc_logits = self.find_out(corrupted, replaced, real, inputs)
            return Losses(filled_in.loss, disc, sampled, corrupted, replaced, disc_logits, filled_in.correct)

    def compile_training(self, shape: tuple[int, int] | None, dtype: torch.dtype = torch.bfloat16) -> str:
        """As Pretrainer's, and what the generator's draws add up."""
        self.add_up_chunks = torch.compile(add_up_chunks, dynamic=False)
        return super().compile_training(shape, dtype)

    def draw(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """The generator's tokens, int64 [R, K]. logits: [M, V]; labels: [R, K]."""
        logits = to_draw_from(logits, labels.flatten(), self.temperature, self.disallow_correct)
        drawn = sample(logits, self.sampling, self.add_up_chunks)
        return drawn.view_as(labels)

    def find_out(
        self, corrupted: torch.Tensor, replaced: torch.Tensor, real: torch.Tensor, inputs: dict[str, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(the discriminator's loss, summed over the positions without padding, 0-d; its logits, float32 [R, T], for figures alone:
        they carry no gradient).

        corrupted, replaced, real: [R, T]; inputs: of encoder_inputs.
        """
        logits = self.discriminator(corrupted, **inputs).logits.float()
        # As https://github.com/richarddwang/electra_pytorch smooths: "replaced" stays 1, "original" becomes disc_smooth.
        target = torch.where(replaced, 1.0, self.disc_smooth)
        losses = F.binary_cross_entropy_with_logits(logits, target, reduction="none")
        # In float32 they are a view of what the head gives. As an output with a gradient FSDP2 would warn of it.
        return torch.where(real, losses, 0.0).sum(), logits.detach()


def corrupted_rows(
    ids: torch.Tensor, positions: torch.Tensor, labels: torch.Tensor, sampled: torch.Tensor
) -> torch.Tensor:
    """The text with the generator's tokens at the masked positions, int64 [R, T]. positions, labels, sampled: [R, K]."""
    used = labels != IGNORE
    # A place that is not used points at position 0: what it adds there is 0.
    nothing = torch.zeros_like(ids)
    draws = nothing.scatter_add(1, positions, used.long())
    total = nothing.scatter_add(1, positions, torch.where(used, sampled, 0))
    # As in the original code, a position that was drawn twice gets the mean of both tokens' ids.
    return torch.where(draws > 0, total // draws.clamp(min=1), ids)


def flops_per_token(
    generator: ElectraConfig, discriminator: ElectraConfig, length: float, masked_share: float
) -> float:
    """Floating-point operations of a training step per position, counted as for the main trainer: matrix products
    alone, 2 per multiply-add forward and twice that backward, full attention over `length` positions."""
    multiply_adds = encoder_multiply_adds(generator, length) + encoder_multiply_adds(discriminator, length)
    # The generator's head works at the masked positions alone.
    multiply_adds += masked_share * masked_head_multiply_adds(generator)
    multiply_adds += discriminator.hidden_size**2
    return FLOPS_OF_MULTIPLY_ADD * multiply_adds
