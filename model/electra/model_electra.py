"""ELECTRA pretraining: a small generator fills in masked tokens, a discriminator tells which tokens were replaced.

Clark et al., "ELECTRA: Pre-training Text Encoders as Discriminators Rather Than Generators" (ICLR 2020). Both networks
are Hugging Face's; they share all embeddings, and the generator's head is the word embedding itself.

Shapes. R: rows (examples) of a batch, T: positions of a row, K: masked positions of a row at most, M = R·K,
V: vocabulary.
"""

from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from transformers import ElectraConfig, ElectraForMaskedLM, ElectraForPreTraining

from model.checkpointing import recompute_layers
from model.electra.compiled_encoder import compile_layers, eager_if
from model.electra.sizes import POSITION_INITS

# The label of a place in [R, K] that holds no masked position.
IGNORE = -100
# Of the discriminator's probability: the metrics' AUC is exact to half a bin.
AUC_BINS = 200


def configs(size, vocab_size, pad_id=0, max_seq_len=None, init_std=0.02, position_init="normal", **changes):
    """(generator's, discriminator's) ElectraConfig of a Size; `changes` (layers, width, heads ...) override its fields.

    init_std: of the random weights; the published 0.02 fits a width of 768. position_init: see
    init_position_embeddings.
    Errors: ValueError where the heads do not divide the width, or the divisor not width, heads and FFN.
    """
    assert position_init in POSITION_INITS
    values = {**vars(size), **{name: value for name, value in changes.items() if value is not None}}
    for name in ("width", "heads", "ffn"):
        if values[name] % values["divisor"]:
            raise ValueError(
                f"{name} {values[name]}: the generator's is that divided by {values['divisor']}, which leaves a rest"
            )

    def config(divisor):
        width, heads = values["width"] // divisor, values["heads"] // divisor
        if width % heads:
            raise ValueError(f"width {width} is no multiple of {heads} heads")
        return ElectraConfig(
            vocab_size=vocab_size,
            embedding_size=values["embedding"],
            hidden_size=width,
            num_hidden_layers=values["layers"],
            num_attention_heads=heads,
            intermediate_size=values["ffn"] // divisor,
            max_position_embeddings=max(512, max_seq_len or 0),
            pad_token_id=pad_id,
            initializer_range=init_std,
            **({} if position_init == "normal" else {"position_init": position_init}),
        )

    return config(values["divisor"]), config(1)


def init_position_embeddings(network) -> None:
    """Make the position embeddings of a new Hugging Face model sinusoids if its config's `position_init` says so:
    Vaswani et al., "Attention Is All You Need" (2017), 3.5, scaled to the root mean square `initializer_range`.

    They are trained like any others. Before that the product of two depends on their distance alone, so what is learned
    about neighbours at one place holds at all, those beyond the trained length too.
    """
    if getattr(network.config, "position_init", None) != "sinusoidal":
        return
    weight = network.base_model.embeddings.position_embeddings.weight
    n, width = weight.shape
    angles = torch.arange(n)[:, None] * 10_000.0 ** (-torch.arange(0, width, 2) / width)
    pairs = torch.stack((angles.sin(), angles.cos()), -1).flatten(1)[:, :width]
    with torch.no_grad():
        weight.copy_(pairs * network.config.initializer_range * 2**0.5)


# ------------------------------------------------------------------------------------------------ masking


def mask_count(lengths, share):
    """Positions to mask in examples of the given lengths (CLS and SEP included): max(1, round(share · length))."""
    return np.maximum(1, np.rint(share * np.asarray(lengths))).astype(np.int64)


class Masked(NamedTuple):
    """int64 arrays: what the generator reads [R, T], the masked positions [R, K] in rising order and the tokens that
    stood there [R, K]; places that are not used have position 0 and label -100."""

    ids: np.ndarray
    positions: np.ndarray
    labels: np.ndarray


def mask_tokens(ids, lengths, candidates, share, style, mask_id, ordinary_ids, random, K=None):
    """Choose and mask tokens; a Masked.

    ids: int [R, T]; lengths: int [R]; candidates: bool [R, T], where a token may be masked (no special, no padding);
    of a row with fewer of them than `mask_count` all are masked. style: "electra" writes [MASK] at 85 % of the masked
    positions and leaves the rest, "bert" writes [MASK] at 80 %, one of `ordinary_ids` at 10 %. random: uint64
    [R, T + 2 K] of random bits, so that the caller decides what they depend on. K: default, what the longest row needs.
    """
    R, T = ids.shape
    counts = np.minimum(mask_count(lengths, share), candidates.sum(1))
    K = int(counts.max()) if K is None else K
    # Any candidate comes before all others.
    keys = np.where(candidates, random[:, :T] >> np.uint64(1), ~np.uint64(0))
    chosen = np.argpartition(keys, np.arange(min(K, T)), axis=1)[:, :K]
    used = np.arange(K) < counts[:, None]
    # Unused ones last.
    positions = np.sort(np.where(used, chosen, T), axis=1)
    positions[~used] = 0
    rows = np.arange(R)[:, None]
    tokens = ids[rows, positions]
    labels = np.where(used, tokens, IGNORE)

    # In [0, 1).
    unit = (random[:, T : T + K] >> np.uint64(11)).astype(np.float64) * 2.0**-53
    if style == "electra":
        written = np.where(unit < 0.85, mask_id, tokens)
    else:
        replacement = ordinary_ids[random[:, T + K : T + 2 * K] % np.uint64(len(ordinary_ids))]
        written = np.where(unit < 0.8, mask_id, np.where(unit < 0.9, replacement, tokens))
    masked = ids.copy()
    masked[np.broadcast_to(rows, used.shape)[used], positions[used]] = written[used]
    return Masked(masked, positions, labels)


def sample(logits, how="fp32_gumbel"):
    """One token id from softmax(logits) of each row: [M, V] -> int64 [M]. Uses torch's global random numbers.

    fp32_gumbel: argmax of logits + Gumbel noise in float32. multinomial: the same distribution by one uniform number a
    row and the cumulative probabilities. fp16_gumbel: noise in half precision, as public trainers have it; it favours
    likely tokens (p = 0.98 is drawn as 0.9993) and is here to compare with.
    """
    if how == "multinomial":
        cumulative = (
            logits.double().softmax(-1).cumsum(-1) if logits.device.type != "mps" else logits.softmax(-1).cumsum(-1)
        )
        threshold = torch.rand(len(logits), 1, device=logits.device, dtype=cumulative.dtype) * cumulative[:, -1:]
        return torch.searchsorted(cumulative, threshold, right=True).squeeze(-1).clamp(max=logits.shape[-1] - 1)
    dtype = torch.float16 if how == "fp16_gumbel" else torch.float32
    uniform = torch.rand(logits.shape, device=logits.device).to(dtype)
    finest = torch.finfo(dtype)
    noise = -torch.log(-torch.log(uniform.clamp(finest.tiny, 1 - finest.eps / 2)))
    return (logits.to(dtype) + noise).argmax(-1)


# ------------------------------------------------------------------------------------------------ the model


class Losses(NamedTuple):
    """What a batch gives. mlm and disc: 0-d sums of the losses over masked and over all non-padding positions."""

    mlm: torch.Tensor
    disc: torch.Tensor
    sampled: torch.Tensor  # [R, K] what the generator put there
    replaced: torch.Tensor  # bool [R, T]: the discriminator's labels
    disc_logits: torch.Tensor  # [R, T]
    correct: torch.Tensor  # 0-d: masked positions whose likeliest token is the right one


class ElectraPretrainer(torch.nn.Module):
    """Generator and discriminator with one set of embeddings."""

    def __init__(self, generator, discriminator, sampling="fp32_gumbel", gen_smooth=0.0, disc_smooth=0.0) -> None:
        """generator: ElectraForMaskedLM; discriminator: ElectraForPreTraining, whose embeddings both will use."""
        super().__init__()
        self.generator, self.discriminator = generator, discriminator
        self.compiled_shape = None
        self.sampling, self.gen_smooth, self.disc_smooth = sampling, gen_smooth, disc_smooth
        # The modules, not their weights: a weight assigned anew would leave the generator's head with the old one.
        generator.electra.embeddings = discriminator.electra.embeddings
        generator.tie_weights()
        assert generator.generator_lm_head.weight is discriminator.electra.embeddings.word_embeddings.weight

    @classmethod
    def from_configs(cls, generator, discriminator, **options):
        model = cls(ElectraForMaskedLM(generator), ElectraForPreTraining(discriminator), **options)
        init_position_embeddings(model.discriminator)
        return model

    @classmethod
    def from_pretrained(cls, folder, **options):
        """The networks in `{folder}/generator` and `{folder}/discriminator`, tied again."""
        networks = (
            network.from_pretrained(Path(folder, name), local_files_only=True, trust_remote_code=False)
            for network, name in ((ElectraForMaskedLM, "generator"), (ElectraForPreTraining, "discriminator"))
        )
        return cls(*networks, **options)

    def forward(self, ids, masked_ids, positions, labels, token_type_ids, lengths, sampled=None):
        """The Losses of a batch. ids, masked_ids, token_type_ids: int64 [R, T]; positions, labels: [R, K]; lengths: [R].

        sampled: int64 [R, K] in place of the generator's draw (tests).
        """
        R, T = ids.shape
        with eager_if(self.compiled_shape is not None and self.compiled_shape != (R, T)):
            return self._losses(ids, masked_ids, positions, labels, token_type_ids, lengths, sampled)

    def _losses(self, ids, masked_ids, positions, labels, token_type_ids, lengths, sampled):
        R, T = ids.shape
        real = torch.arange(T, device=ids.device) < lengths[:, None]
        # 4-d: transformers takes it as it is, without a look inside
        visible = real[:, None, None, :].expand(R, 1, T, T)
        inputs = {"token_type_ids": token_type_ids, "attention_mask": visible}

        hidden = self.generator.electra(masked_ids, **inputs).last_hidden_state
        rows = torch.arange(R, device=ids.device)[:, None]
        at_masked = self.generator.generator_predictions(hidden[rows, positions].flatten(0, 1))
        logits = self.generator.generator_lm_head(at_masked).float()  # [M, V]
        flat = labels.flatten()
        mlm = F.cross_entropy(logits, flat, ignore_index=IGNORE, reduction="sum", label_smoothing=self.gen_smooth)
        with torch.no_grad():
            used = labels != IGNORE
            correct = (logits.argmax(-1) == flat).sum()
            if sampled is None:
                sampled = sample(logits, self.sampling).view_as(labels)
            # A place that is not used points at position 0: what it adds there is 0.
            change = torch.where(used, sampled - ids[rows, positions], 0)
            corrupted = ids.scatter_add(1, positions, change)
            replaced = corrupted != ids

        disc_logits = self.discriminator(corrupted, **inputs).logits.float()
        # As https://github.com/richarddwang/electra_pytorch smooths: "replaced" stays 1, "original" becomes disc_smooth.
        target = torch.where(replaced, 1.0, self.disc_smooth)
        disc = F.binary_cross_entropy_with_logits(disc_logits, target, reduction="none")
        disc = torch.where(real, disc, 0.0).sum()
        return Losses(mlm, disc, sampled, replaced, disc_logits, correct)

    def gradient_checkpointing_enable(self) -> None:
        for network in (self.generator, self.discriminator):
            recompute_layers(network)

    def compile_training(self, shape=None) -> None:
        """Compile the layers, one graph for all of a network. shape: (rows, positions) of the batches that use it; others,
        as an epoch's last, are computed without. None: all use it, each shape with a graph of its own."""
        self.compiled_shape = shape
        for network in (self.generator, self.discriminator):
            compile_layers(network)


def flops_per_token(generator, discriminator, length, masked_share):
    """Floating-point operations of a training step per position, as report.flops_per_token counts them: matrix products
    alone, 2 per multiply-add forward and twice that backward, full attention over `length` positions."""
    weights = attention = 0
    for config in (generator, discriminator):
        h, e, L = config.hidden_size, config.embedding_size, config.num_hidden_layers
        weights += L * (4 * h * h + 2 * h * config.intermediate_size) + (e * h if e != h else 0)
        attention += 2 * L * length * h
    e = generator.embedding_size
    weights += masked_share * (generator.hidden_size * e + e * generator.vocab_size) + discriminator.hidden_size**2
    return 6 * (weights + attention)
