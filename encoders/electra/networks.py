"""ELECTRA pretraining: a small generator fills in masked tokens, a discriminator detects which were replaced.

Clark et al., "ELECTRA: Pre-training Text Encoders as Discriminators Rather Than Generators" (ICLR 2020). Both networks
are Hugging Face's; they share all embeddings, and the generator's head is the word embedding itself.

Shapes. R: rows (examples) of a batch, T: positions of a row, K: maximum masked positions of a row, M = R·K,
V: vocabulary.
"""

import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from transformers import ElectraConfig, ElectraForMaskedLM, ElectraForPreTraining

from encoders.fast_layers import compile_layers, ready_mask, use_fast_attention
from model.config import IGNORE

# The two networks; each is saved in a folder of this name.
NETWORKS = ("generator", "discriminator")
# tokens per chunk of the vocabulary: `sample` draws a chunk first, then its token
CHUNK = 256


def init_position_embeddings(network: Any) -> None:
    """Set the position embeddings of a new Hugging Face model to sinusoids if its config's `position_init` says so:
    Vaswani et al., "Attention Is All You Need" (2017), 3.5, scaled to the root mean square `initializer_range`.

    They are trained like any others. At the start the dot product of two positions depends only on their distance, so
    what is learned about neighbours at one position holds everywhere, also beyond the trained length.
    """
    if getattr(network.config, "position_init", None) != "sinusoidal":
        return
    weight = network.base_model.embeddings.position_embeddings.weight
    n, width = weight.shape
    angles = torch.arange(n)[:, None] * 10_000.0 ** (-torch.arange(0, width, 2) / width)
    pairs = torch.stack((angles.sin(), angles.cos()), -1).flatten(1)[:, :width]
    with torch.no_grad():
        weight.copy_(pairs * network.config.initializer_range * 2**0.5)


class Output(NamedTuple):
    """Results of a batch. mlm and disc: 0-d sums of the losses over masked and over all non-padding positions."""

    mlm: torch.Tensor
    disc: torch.Tensor
    corrupted: torch.Tensor  # [R, T] the ids with the generator's tokens
    replaced: torch.Tensor  # bool [R, T]: the discriminator's labels
    disc_logits: torch.Tensor  # [R, T]
    correct: torch.Tensor  # 0-d: masked positions whose likeliest token is right


class ElectraPretrainer(torch.nn.Module):
    """Generator and discriminator, with one set of embeddings."""

    def __init__(
        self,
        generator_config: ElectraConfig,
        discriminator_config: ElectraConfig,
        sampling: str = "multinomial",
        gen_smooth: float = 0.0,
        disc_smooth: float = 0.0,
    ) -> None:
        """New networks that share the discriminator's embeddings. sampling: see `sample`. gen_smooth, disc_smooth: label smoothing
        of the two losses. Errors: ValueError where heads do not divide a width, or the networks cannot share their embeddings."""
        super().__init__()
        for name in ("vocab_size", "embedding_size", "max_position_embeddings", "type_vocab_size"):
            value, other = getattr(generator_config, name), getattr(discriminator_config, name)
            if value != other:
                raise ValueError(
                    f"{name} is {value} in the generator and {other} in the discriminator, so they cannot share embeddings"
                )
        for name, config in zip(NETWORKS, (generator_config, discriminator_config), strict=True):
            width, heads = config.hidden_size, config.num_attention_heads
            if width % heads:
                raise ValueError(
                    f"{name}: hidden_size {width} is no multiple of {heads} heads (--num_attention_heads, --{name}_config)"
                )
        self.generator = generator = ElectraForMaskedLM(generator_config)
        self.discriminator = discriminator = ElectraForPreTraining(discriminator_config)
        self.sampling = sampling
        self.gen_smooth = gen_smooth
        self.disc_smooth = disc_smooth
        # (rows, positions) of the batches that the layers are compiled for; None: not compiled
        self.compiled_shape: tuple[int, int] | None = None
        # replaced in compile_training
        self.add_up_chunks = add_up_chunks
        self.masked_lm_loss = masked_lm_loss
        # The modules, not their weights: after a reassignment the generator's head would still have the old weight.
        generator.electra.embeddings = discriminator.electra.embeddings
        generator.tie_weights()
        for network in self.networks():
            use_fast_attention(network)
        assert generator.generator_lm_head.weight is generator.electra.embeddings.word_embeddings.weight
        init_position_embeddings(discriminator)

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
    ) -> Output:
        """The Output of a batch. ids, masked_ids, token_type_ids: int64 [R, T]; positions, labels: [R, K]; lengths: [R]."""
        # Evaluation, without dropout, would compile another graph, and so would another shape.
        in_graphs = self.training and self.compiled_shape == tuple(ids.shape)
        is_eager = self.compiled_shape is not None and not in_graphs
        with torch.compiler.set_stance("force_eager") if is_eager else contextlib.nullcontext():
            is_text = non_padding(ids, lengths)
            mask = ready_mask(is_text, in_graphs)
            inputs = {"token_type_ids": token_type_ids, "attention_mask": mask}
            # The generator's head runs at the masked positions only: at all of them it would take longer than the layers.
            hidden = self.generator.electra(masked_ids, **inputs).last_hidden_state
            rows = torch.arange(len(masked_ids), device=masked_ids.device)[:, None]
            at_masked = self.generator.generator_predictions(hidden[rows, positions].flatten(0, 1))
            logits = self.generator.generator_lm_head(at_masked)  # [M, V]
            mlm, correct = self.masked_lm_loss(logits, labels.flatten(), self.gen_smooth)
            with torch.no_grad():
                sampled = sample(logits, self.sampling, self.add_up_chunks).view_as(labels)
                used = labels != IGNORE
                # Unused slots point at position 0, where they add 0.
                nothing = torch.zeros_like(ids)
                is_drawn = nothing.scatter_add(1, positions, used.long()) > 0
                drawn = nothing.scatter_add(1, positions, torch.where(used, sampled, 0))
                corrupted = torch.where(is_drawn, drawn, ids)
                replaced = corrupted != ids
            disc_logits = self.discriminator(corrupted, **inputs).logits.float()
            # Smoothing as in https://github.com/richarddwang/electra_pytorch: "replaced" stays 1, "original" becomes disc_smooth.
            target = torch.where(replaced, 1.0, self.disc_smooth)
            losses = F.binary_cross_entropy_with_logits(disc_logits, target, reduction="none")
            disc = torch.where(is_text, losses, 0.0).sum()
            # In float32 the logits are a view of the head's output; FSDP2 would warn of a view with a gradient.
            return Output(mlm, disc, corrupted, replaced, disc_logits.detach(), correct)

    def compile_training(self, shape: tuple[int, int], dtype: torch.dtype = torch.bfloat16) -> str:
        """Compile the layers, one graph for all of a network, and the functions of the generator's logits. shape: (rows,
        positions) of the batches that use it; others, such as an epoch's last, run eagerly."""
        self.compiled_shape = shape
        for network in self.networks():
            compile_layers(network)
        self.masked_lm_loss = torch.compile(masked_lm_loss, dynamic=False)
        self.add_up_chunks = torch.compile(add_up_chunks, dynamic=False)
        return ""


def non_padding(ids: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """bool [R, T]: True except at padding. ids: [R, T]; lengths: [R]."""
    return torch.arange(ids.shape[1], device=ids.device) < lengths[:, None]


def masked_lm_loss(logits: torch.Tensor, labels: torch.Tensor, smoothing: float) -> tuple[torch.Tensor, torch.Tensor]:
    """(sum of the cross-entropies, number of right top predictions), 0-d. logits: [M, V]; labels: [M], or IGNORE."""
    logits = logits.float()
    loss = F.cross_entropy(logits, labels, ignore_index=IGNORE, reduction="sum", label_smoothing=smoothing)
    return loss, (logits.argmax(-1) == labels).sum()


def add_up_chunks(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(float32 sums of exp(logits - highest) over CHUNK tokens each, over the rest in the last; highest [M, 1]). logits: [M, V]."""
    logits = logits.float()
    highest = logits.amax(-1, keepdim=True)
    exps = (logits - highest).exp()
    M, V = logits.shape
    whole = V // CHUNK * CHUNK
    sums = exps[:, :whole].reshape(M, -1, CHUNK).sum(-1)
    return torch.cat((sums, exps[:, whole:].sum(-1, keepdim=True)), dim=1), highest


def sample(
    logits: torch.Tensor, how: str = "multinomial", add_up: Callable[[torch.Tensor], Any] = add_up_chunks
) -> torch.Tensor:
    """Sample a token id from softmax(logits) of each row: [M, V] -> int64 [M], with torch's global generator.

    multinomial: draw a point in the sum of all probabilities, then find its chunk, then its token. fp32_gumbel: the same
    distribution by argmax of logits + Gumbel noise in float32, with a random number for each token. fp16_gumbel: noise in half
    precision as in public trainers, for comparison; it favours likely tokens (p = 0.98 is drawn as 0.9993).
    add_up: add_up_chunks, compiled or not.
    """
    if how != "multinomial":
        dtype = torch.float16 if how == "fp16_gumbel" else torch.float32
        uniform = torch.rand(logits.shape, device=logits.device).to(dtype)
        finest = torch.finfo(dtype)
        # Neither 0 nor 1: the noise would be infinite.
        noise = -torch.log(-torch.log(uniform.clamp(finest.tiny, 1 - finest.eps / 2)))
        return (logits.to(dtype) + noise).argmax(-1)
    # Cumulative sums are in float64, since tokens may be a million times less likely than others, and therefore over few
    # numbers: the chunks, then the tokens of one chunk. Probabilities within a chunk are exact; those of the chunks are right
    # to about 1e-7, since their sums are float32.
    # MPS has no float64.
    exact = torch.float32 if logits.device.type == "mps" else torch.float64
    sums, highest = add_up(logits)
    ends = running_sums(sums.to(exact))
    point = torch.rand(len(logits), 1, device=logits.device, dtype=exact) * ends[:, -1:]
    chunk = first_beyond(ends, point)
    in_chunk = sums.to(exact).gather(1, chunk)
    # in [0, 1]
    point_in_chunk = 1 - (ends.gather(1, chunk) - point) / in_chunk

    ids = chunk * CHUNK + torch.arange(CHUNK, device=logits.device)
    is_token = ids < logits.shape[1]
    exps = (logits.gather(1, ids.where(is_token, 0)).float() - highest).exp()
    inner = running_sums(torch.where(is_token, exps, 0.0).to(exact))
    return (chunk * CHUNK + first_beyond(inner, point_in_chunk * inner[:, -1:])).squeeze(1)


def running_sums(numbers: torch.Tensor) -> torch.Tensor:
    """Cumulative sums of each row: [M, n] -> [M, n]. They never decrease if no number is negative."""
    if not torch.are_deterministic_algorithms_enabled():
        return numbers.cumsum(-1)
    # On a GPU torch's cumsum may add in any order: earlier versions refuse it here, and 2.13 still lists it as refused. A product
    # with a triangle of ones adds up all columns in the same order, with a 0 where another column has a number.
    n = numbers.shape[-1]
    return numbers @ torch.ones(n, n, dtype=numbers.dtype, device=numbers.device).triu()


def first_beyond(cumulative: torch.Tensor, point: torch.Tensor) -> torch.Tensor:
    """Index of the first cumulative sum above `point`. If rounding leaves none: the last index at which the sum grew, so a token of
    probability 0 is never drawn. cumulative: [M, n]; point: [M, 1] -> int64 [M, 1]."""
    last = (cumulative < cumulative[:, -1:]).sum(-1, keepdim=True)
    return torch.minimum(torch.searchsorted(cumulative, point, right=True), last)
