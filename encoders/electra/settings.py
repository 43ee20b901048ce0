"""The settings of train_electra.py."""

import argparse
import math
from dataclasses import dataclass, fields
from typing import ClassVar

from common.flags import at_least, fraction, not_negative, open_fraction, positive, seed
from common.settings import Settings, setting, switch, with_default
from dataset.reading.settings import OFF, DocumentSettings, TextSettings
from encoders.schedules import ENCODER_SCHEDULES
from trainer.pretrain.settings import ValidationDataSettings, ValidationSettings
from trainer.settings import MachineSettings, OptimizerSettings, OutputSettings, UpdateSettings


@dataclass(frozen=True)
class Size:
    """A published configuration, its fields named as the flags: the networks, and their training.

    The generator's width, heads and FFN are the discriminator's divided by `generator_divisor`.
    """

    num_hidden_layers: int
    hidden_size: int
    num_attention_heads: int
    intermediate_size: int
    embedding_size: int
    generator_divisor: int
    max_steps: int
    batch_size: int
    max_seq_len: int
    learning_rate: float
    mask_share: float


SIZES = {
    "small": Size(12, 256, 4, 1024, 128, 4, 1_000_000, 128, 128, 5e-4, 0.15),
    "base": Size(12, 768, 12, 3072, 768, 3, 766_000, 256, 512, 2e-4, 0.15),
    "large": Size(24, 1024, 16, 4096, 1024, 4, 400_000, 2048, 512, 2e-4, 0.25),
}
# fields of Size that describe the networks
NETWORK_SIZES = tuple(field.name for field in fields(Size))[:6]
# updates
WARM_UP = 10_000
# With 0.02, right for a language model, the discriminator of a measured run learned nothing: few tokens are replaced,
# so its gradient is mostly noise, which Muon scales up (docs/experiments.md, "ELECTRA with little text").
MUON_RATE = 0.006


def percents(text: str) -> list[float]:
    """25,50,100 -> [25.0, 50.0, 100.0]"""
    values = [float(part) for part in text.split(",")]
    if not all(0 < value <= 100 for value in values):
        raise argparse.ArgumentTypeError(f"{text}: percents of the run, above 0 and at most 100, such as 25,50,100")
    return values


def seed_or_none(text: str) -> int | None:
    return None if text == "None" else seed(text)


@dataclass(kw_only=True)
class ElectraOutput(OutputSettings):
    """output"""

    default_save_interval: ClassVar[int] = 1000

    wandb_project: str = with_default(OutputSettings, "wandb_project", "MiniMind-ELECTRA")
    save_percents: list[float] = setting(
        [6.25, 12.5, 25.0, 50.0, 100.0],
        check=percents,
        help="percents of the run at which both networks are saved, such as 25,50,100",
    )
    save_steps: int = setting(
        0, check=not_negative(int), help="updates between networks in checkpoint-{update}; 0: none"
    )
    example_interval: int = setting(0, check=not_negative(int), help="updates between printed predictions; 0: none")


@dataclass(kw_only=True)
class NetworkSettings(Settings):
    """model (default: the size's)"""

    size: str = setting("small", choices=tuple(SIZES), help="published configuration", first=True)
    hidden_size: int | None = setting(None, check=positive(int), help="width of the discriminator")
    num_hidden_layers: int | None = setting(None, check=positive(int), help="layers of each network")
    num_attention_heads: int | None = setting(None, check=positive(int), help="heads of the discriminator")
    intermediate_size: int | None = setting(None, check=positive(int), help="FFN width of the discriminator")
    embedding_size: int | None = setting(None, check=positive(int), help="embedding size of both networks")
    generator_divisor: int | None = setting(None, check=positive(int), help="width, heads, FFN / this: the generator's")
    generator_config: str | None = setting(None, metavar="FILE", help="JSON of an ElectraConfig, instead of sizes")
    discriminator_config: str | None = setting(None, metavar="FILE", help="the same for the discriminator")
    init_std: float = setting(
        0.02,
        check=positive(float, most=10),
        help="standard deviation of random weights; narrow networks learn sooner with 1 / sqrt(width)",
    )
    position_init: str = setting(
        "normal", choices=("normal", "sinusoidal"), help="with sinusoidal, attention finds neighbours sooner"
    )
    dropout: float = setting(0.1, check=fraction, help="dropout on hidden states and attention")

    def network_sizes(self) -> dict[str, int]:
        """The flags of NETWORK_SIZES, as published if not given."""
        user_set = {name: getattr(self, name) for name in NETWORK_SIZES if getattr(self, name) is not None}
        return {name: getattr(SIZES[self.size], name) for name in NETWORK_SIZES} | user_set


@dataclass(kw_only=True)
class ElectraData(TextSettings):
    """data"""

    data_path: list[str] | None = setting(
        None,
        several=True,
        help="like train_pretrain.py's, without shares; in .txt and source code a blank line ends a document unless --split_text says otherwise "
        "(default: the embedded corpus)",
        first=True,
    )
    deduplicate: str = with_default(DocumentSettings, "deduplicate", OFF)
    vocab_path: str | None = setting(
        None, help="vocab.txt or a tokenizer folder (default: trained on the data)", first=True
    )
    lower_case: bool = switch(True, help="lower-case the text (no effect on a tokenizer folder)")
    # Filled in from the size if not given.
    max_seq_len: int = setting(None, check=at_least(5, "for two segments"), help="positions (default: the size's)")
    mask_share: float = setting(None, check=open_fraction, help="share to mask (default: the size's)")
    mask_style: str = setting("electra", choices=("electra", "bert"), help="electra: 85 %% [MASK]; bert: 80/10/10 %%")


@dataclass(kw_only=True)
class ElectraTraining(OptimizerSettings):
    """training (batch, rate and steps: default the size's)"""

    max_steps: int = setting(None, check=positive(int), help="updates", first=True)
    batch_size: int = with_default(UpdateSettings, "batch_size", None)
    accumulation_steps: int = with_default(UpdateSettings, "accumulation_steps", 1)
    learning_rate: float = with_default(UpdateSettings, "learning_rate", None)
    muon_lr: float = with_default(OptimizerSettings, "muon_lr", MUON_RATE)
    # None is replaced by the drawn seed.
    seed: int = setting(42, check=seed_or_none, help="seed of weights, order and masks; None: random")
    lr_schedule: str = setting("original_linear", choices=tuple(ENCODER_SCHEDULES), help="learning rate over the run")
    warmup_steps: int | None = setting(
        None, check=not_negative(int), help=f"updates of warm-up (default: {WARM_UP}, at most a tenth of the run)"
    )
    adam_bias_correction: bool = switch(True, help="0: use Adam's moments uncorrected, like the original code")
    adam_epsilon: float = setting(1e-6, check=positive(float), help="added to the root of the second moment")
    sampling: str = setting(
        "multinomial",
        choices=("multinomial", "fp32_gumbel", "fp16_gumbel"),
        help="how the generator's tokens are drawn",
    )
    gen_smooth: float = setting(0.0, check=fraction, help="label smoothing of the loss at masked tokens")
    disc_smooth: float = setting(0.0, check=fraction, help="label of an original token; a replaced one stays 1")


@dataclass(kw_only=True)
class ElectraValidation(ValidationDataSettings):
    """validation"""

    allow_val_overlap: bool = with_default(ValidationSettings, "allow_val_overlap", False)
    eval_interval: int = setting(500, check=not_negative(int), help="updates between evaluations; 0: at the end")
    eval_batch_size: int = setting(32, check=positive(int), help="examples that a rank evaluates at once")


@dataclass(kw_only=True)
class ElectraSettings(MachineSettings, ElectraValidation, ElectraTraining, ElectraData, NetworkSettings, ElectraOutput):
    """All settings of train_electra.py; --help shows the groups from the last to the first."""

    prog: ClassVar[str] = "train_electra.py"
    description: ClassVar[str] = (
        "Pretrain an ELECTRA (generator and discriminator). The published sizes need a GPU and days; on a laptop:\n"
        "train_electra.py --hidden_size 128 --num_hidden_layers 4 --max_seq_len 32 --max_steps 2000"
    )

    def check(self) -> None:
        files = [name for name in ("generator_config", "discriminator_config") if getattr(self, name) is not None]
        if len(files) == 1:
            raise ValueError(f"--{files[0]}: give both --generator_config and --discriminator_config, or neither")
        sizes = [name for name in NETWORK_SIZES if getattr(self, name) is not None]
        if files and sizes:
            raise ValueError(f"--{files[0]} decides the networks: drop --{sizes[0]}")

    def fill_in(self) -> None:
        """Fill in the values of the published run of this size."""
        for name in ("max_seq_len", "learning_rate", "mask_share", "max_steps"):
            if getattr(self, name) is None:
                setattr(self, name, getattr(SIZES[self.size], name))


def batch_size_of(settings: ElectraSettings, batches_at_once: int) -> int:
    """Rows of a micro-batch; by default those that together make --rows_per_update or the published batch."""
    if settings.batch_size is not None:
        return settings.batch_size
    parts = settings.accumulation_steps * batches_at_once
    rows = settings.rows_per_update or SIZES[settings.size].batch_size
    return math.ceil(rows / parts)
