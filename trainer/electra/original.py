"""`--recipe original`: train as the published code does, https://github.com/google-research/electra.

The settings of the published code stand in tables: for each setting its value, and the file there that says it. A flag
that the user gives, or a key of the --config file, wins over it. Nothing else in the trainers knows of these tables: each
point is a setting with a switch of its own. docs/electra.md tells why our defaults differ.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from common.settings import SettingsParser, SettingsT
from common.wording import counted

ORIGINAL = "original"
RECIPES = ("default", ORIGINAL)


class Choice(NamedTuple):
    """What the published code has for a setting. source: its file there, and the place in it."""

    value: Any
    source: str


PublishedSettings = Mapping[str, Choice]

# What both of its programs have: they share the optimiser.
OPTIMISER: PublishedSettings = {
    "adam_bias_correction": Choice(False, "model/optimization.py, AdamWeightDecayOptimizer"),
    "lr_schedule": Choice("original_linear", "model/optimization.py, create_optimizer"),
    "adam_epsilon": Choice(1e-6, "model/optimization.py, create_optimizer: epsilon"),
    "weight_decay": Choice(0.01, "configure_pretraining.py, configure_finetuning.py: weight_decay_rate"),
    "grad_clip": Choice(1.0, "model/optimization.py, create_optimizer: clip_by_global_norm"),
    "dropout": Choice(0.1, "model/modeling.py, BertConfig"),
}

# Network, batch, length, rate, share and number of updates are those of --size, with --recipe original and without: see
# trainer/electra/published.py.
PRETRAINING: PublishedSettings = {
    **OPTIMISER,
    "optimizer": Choice("adamw", "model/optimization.py, AdamWeightDecayOptimizer"),
    "warmup_steps": Choice(10_000, "configure_pretraining.py: num_warmup_steps"),
    "mask_choice": Choice("original", "pretrain/pretrain_helpers.py, mask; configure_pretraining.py"),
    "mask_style": Choice("electra", "pretrain/pretrain_helpers.py, mask"),
    "sampling": Choice("fp32_gumbel", "pretrain/pretrain_helpers.py, sample_from_softmax"),
    "temperature": Choice(1.0, "configure_pretraining.py: temperature"),
    "disallow_correct": Choice(False, "configure_pretraining.py: disallow_correct"),
    "untied_embeddings": Choice(False, "configure_pretraining.py: untied_generator_embeddings"),
    "gen_weight": Choice(1.0, "configure_pretraining.py: gen_weight"),
    "disc_weight": Choice(50.0, "configure_pretraining.py: disc_weight"),
    "gen_smooth": Choice(0.0, "run_pretraining.py, get_softmax_output"),
    "disc_smooth": Choice(0.0, "run_pretraining.py, _get_discriminator_output"),
    "weight_init": Choice("original", "model/modeling.py, create_initializer; tf.layers.dense"),
    "init_std": Choice(0.02, "model/modeling.py, BertConfig: initializer_range"),
    "position_init": Choice("normal", "model/modeling.py, embedding_postprocessor"),
}

# None: what the size says, see FINE_TUNING_RATES.
FINE_TUNING: PublishedSettings = {
    **OPTIMISER,
    "learning_rate": Choice(None, "configure_finetuning.py: learning_rate"),
    "layer_decay": Choice(None, "configure_finetuning.py: layerwise_lr_decay"),
    "top_layer_exponent": Choice(2, "model/optimization.py, _get_layer_lrs"),
    "warmup_share": Choice(0.1, "configure_finetuning.py: warmup_proportion"),
    "loss_reduction": Choice("sum", "run_finetuning.py, FinetuningModel: reduce_sum over the batch"),
    "head": Choice("plain", "finetune/classification/classification_tasks.py, get_prediction_module"),
    "double_unordered": Choice(True, "configure_finetuning.py; classification_tasks.py, MRPC and STS"),
    "score_divisor": Choice(5.0, "finetune/classification/classification_tasks.py, RegressionTask._add_features"),
    "batch_size": Choice(32, "configure_finetuning.py: train_batch_size"),
    "accumulation_steps": Choice(1, "run_finetuning.py"),
    "max_seq_len": Choice(128, "configure_finetuning.py: max_seq_length"),
}
# Compared as the rows of an update, which ranks and micro-batches cut in many ways.
OF_ROWS = ("batch_size", "accumulation_steps")
# Of tasks of the benchmark alone: whose two sentences have no order, and whose scores go up to 5.
OF_BENCHMARK = ("double_unordered", "score_divisor")


class Rates(NamedTuple):
    """Of fine-tuning: the rate of the head, and what it is multiplied with from layer to layer."""

    learning_rate: float
    layer_decay: float


# By size: "default hyperparameters for different model sizes" of configure_finetuning.py.
FINE_TUNING_RATES = {"small": Rates(1e-4, 0.8), "base": Rates(1e-4, 0.8), "large": Rates(5e-5, 0.9)}
# Widths of the discriminators: get_bert_config in util/training_utils.py.
WIDTHS = {"small": 256, "base": 768, "large": 1024}


def parse_with_original(
    kind: type[SettingsT], prog: str, description: str, published: PublishedSettings, argv: Sequence[str] | None = None
) -> SettingsT:
    """The settings of a command line, those of `published` with --recipe original; argv None: of this process."""
    parser = SettingsParser(kind, prog, description)
    settings, given = parser.read(argv)
    assert isinstance(settings, kind)
    if vars(settings)["recipe"] == ORIGINAL:
        take(settings, published, given)
    return settings


def fine_tuning(kind: str | None) -> PublishedSettings:
    """What the published code has for fine-tuning. kind: of a task of one's own; None: tasks of the benchmark."""
    if kind is None:
        return FINE_TUNING
    return {name: choice for name, choice in FINE_TUNING.items() if name not in OF_BENCHMARK}


def take(settings: Any, published: PublishedSettings, given: Iterable[str]) -> None:
    """Give the settings the published values, but those that are `given`."""
    for name in published.keys() - set(given):
        setattr(settings, name, published[name].value)


def take_rates(settings: Any, width: object) -> Rates:
    """Give fine-tuning with --recipe original the rates of the size that an encoder of this width has, and return these,
    whatever flags say. width: what a config says, which may be no number, as of an encoder with several widths; then the
    rates are those of the small size."""
    size = "small"
    for name, least in WIDTHS.items():
        if isinstance(width, int) and width >= least:
            size = name
    rates = FINE_TUNING_RATES[size]
    for name, value in rates._asdict().items():
        if getattr(settings, name) is None:
            setattr(settings, name, value)
    return rates


def is_as_published(settings: Any, name: str, published: PublishedSettings) -> bool:
    """Whether a run has --recipe original, and a setting is what the published code has. A value that the size decides
    counts as such."""
    if settings.recipe == "default" or name not in published:
        return False
    wanted = published[name].value
    return wanted is None or getattr(settings, name) == wanted


def original_lines(settings: Any, published: PublishedSettings, further: Sequence[str] = ()) -> list[str]:
    """What is said of a run with --recipe original: which settings are not those of the published code. further: such
    differences in what depends on the size, the task or the ranks."""
    if settings.recipe == "default":
        return []
    line = "recipe original: all settings as in the published code"
    others = []
    for name, choice in published.items():
        if name not in OF_ROWS and not is_as_published(settings, name, published):
            others.append(difference(f"--{name} {getattr(settings, name)}", choice.value))
    others += further
    return [f"{line}, but {', '.join(others)}" if others else line]


def difference(ours: str, published: object) -> str:
    """From the published code, in the line of `original_lines`."""
    return f"{ours} (published: {published})"


def difference_of_rows(rows: int, published: int) -> list[str]:
    """Where an update has other rows."""
    return [] if rows == published else [difference(f"{counted(rows, 'example')} an update", published)]
