"""Fine-tuning on one GLUE task with one seed as a Job: its data, classifier, loss, rate and files."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedTokenizerBase
from transformers.tokenization_utils_base import VERY_LARGE_INTEGER

from common.arithmetic import ceil_div
from common.errors import user_errors
from common.wording import counted
from dataset.glue.features import Features
from dataset.glue.glue_dataset import Batch, GlueAssembler, GluePlan, Totals
from dataset.loader import UpdateSchedule
from dataset.store.interface import Ints
from dataset.tokenizing.sentence_encoder import SentenceEncoder
from model.checkpointing import recompute_layers
from model.electra.compiled_encoder import compiled_shape
from trainer.engine import Engine
from trainer.glue.files import Data
from trainer.glue.head import saved_weights
from trainer.glue.layer_rates import depths, layer_groups, rates
from trainer.glue.loss import glue_loss, metrics
from trainer.glue.model import Layers, init_model, save_model, weights_digest
from trainer.glue.padding import is_known
from trainer.glue.scores import Evaluation
from trainer.glue.settings import GlueSettings
from trainer.job import (
    LATEST_UPDATE,
    UNLIMITED,
    Identity,
    Job,
    Length,
    Looks,
    Outlook,
    Progress,
    RunFiles,
    Surroundings,
    Update,
)
from trainer.launch import make_folder
from trainer.machine.compiling import COMPILED_TIME, PLAIN_TIME, compile_blocks
from trainer.machine.devices import notes_on_precision
from trainer.machine.random_state import seed_everything
from trainer.machine.ranks import Ranks
from trainer.machine.signals import StopSignals
from trainer.optim.build import build_adamw
from trainer.optim.schedules import ENCODER_SCHEDULES
from trainer.reporting.charts import COMMON, LOSS, METRICS, Chart
from trainer.reporting.reporter import Say
from trainer.sharding import group_size_of, put_on_device
from trainer.updates import epochs_of_updates, rows_of_run, rows_of_update, schedule_of


@dataclass(frozen=True)
class Command:
    """What all runs of a command share. `settings` are those that the user gave."""

    settings: GlueSettings
    surroundings: Surroundings
    dtype: torch.dtype
    say: Say
    model_folder: Path
    # Changes with what lies in there.
    model_key: str
    tokenizer: PreTrainedTokenizerBase
    encoder: SentenceEncoder

    @property
    def ranks(self) -> Ranks:
        return self.surroundings.ranks


class GlueJob(Job[Ints, Batch, Totals]):
    """train_glue.py's part of a run. Errors: UserError, in one line, where the model does not fit the task."""

    settings: GlueSettings
    # A classifier of Hugging Face. What its config is like depends on the family.
    model: Any

    MAY_CHANGE = (
        "epochs",
        "learning_rate",
        "batch_size",
        "accumulation_steps",
        "rows_per_update",
        "grad_clip",
        "weight_decay",
        "max_steps",
        "dropout",
        "warmup_share",
        "warmup_steps",
        "lr_schedule",
        "loss_reduction",
        "adam_epsilon",
    )

    MENDED_BY = {
        "data": "--data_dir, --train_file, --max_seq_len, --double_unordered",
        "tokenizer": "--model_path",
        "model (--model_path, --from_scratch)": "--head, --score_divisor",
        "optimizer": "--layer_decay, --top_layer_exponent, --adam_bias_correction",
    }

    def __init__(
        self, command: Command, settings: GlueSettings, data: Data, folder: Path, trained: Path | None = None
    ) -> None:
        """settings: those of this run, with its seed. folder: of its results. trained: weights that are to be evaluated
        and not trained again."""
        self.command = command
        self.settings = settings
        self.data = data
        self.folder = folder
        self.ranks = command.ranks
        self.device = command.surroundings.device
        self.dtype = command.dtype
        self.files = RunFiles(
            folder / f"{data.name}_{folder.name}",
            {"model": folder / "model"},
            # Those of the command, for this task and seed alone
            dataclasses.replace(command.settings, task=data.name, seed=settings.seed, num_seeds=1),
            # What an earlier run of this seed may have left.
            replaced=["eval_results.json", "checkpoint-*[0-9]"],
        )
        # The same seed on all ranks, so that all begin with the same weights.
        seed_everything(settings.seed)
        with user_errors():
            self._open_model()
            make_folder(folder)
        # Before trained weights are loaded: the identity says what the run has begun with.
        begins_with = weights_digest(self.model)
        if trained is not None:
            self.model.load_state_dict(saved_weights(self.model, trained))
        depth_of = depths(self.model, settings.max_seq_len)
        if settings.gradient_checkpointing:
            recompute_layers(self.model)
        # FSDP2 gives its class another name.
        self.model_name = type(self.model).__name__
        self.model.train()
        group_size = group_size_of(settings.shard, self.ranks)
        entries = {
            "tokenizer": command.encoder.fingerprint[:16],
            "data": data.key,  # as this tokenizer reads it, cut to --max_seq_len
            "model (--model_path, --from_scratch)": begins_with + model_words(settings),
            "row layout": {"seed": settings.seed},
            "optimizer": f"adamw, layer_decay {settings.layer_decay}" + optimizer_words(settings),
        }
        self.identity = Identity(entries, self.MENDED_BY, self.MAY_CHANGE)
        shards = put_on_device(self.model, entries, group_size, self.ranks, self.device)
        # From here on every rank draws other numbers (dropout).
        seed_everything(settings.seed, self.ranks.rank)

        self.engine = Engine(
            self.model,
            self._build_optimizer(depth_of),
            self.loss,
            device=self.device,
            dtype=self.dtype,
            ranks=self.ranks,
            grad_clip=settings.grad_clip,
            n_sums=4,
            shards=shards,
        )
        if data.train is not None:
            self.assembler = data.train
        self._set_length()
        # A range answers "is this update one of them?" without a list of them.
        if settings.save_steps:
            self.files.save_at = range(settings.save_steps, LATEST_UPDATE, settings.save_steps)
        self.looks = Looks(
            evaluate=self.evaluate if settings.do_eval else None,
            eval_interval=settings.eval_interval or 0,
            counts_updates=True,
        )
        self._evaluation: Evaluation | None = None

    def _open_model(self) -> None:
        """The classifier, on the CPU."""
        command = self.command
        self.model, self.new_weights = init_model(
            self.settings, self.data.task, command.model_folder, command.encoder.vocab_size
        )
        set_longest_text(command.tokenizer, self.model.config)

    def _build_optimizer(self, depth_of: Mapping[str, int]) -> torch.optim.Optimizer:
        """AdamW with a rate for each layer."""
        settings = self.settings
        groups = layer_groups(
            self.model, depth_of, settings.weight_decay, settings.layer_decay, settings.top_layer_exponent
        )
        return build_adamw(
            groups, settings.learning_rate, eps=settings.adam_epsilon, bias_correction=settings.adam_bias_correction
        )

    def _set_length(self) -> None:
        """Epochs and updates of the run."""
        settings = self.settings
        self.wanted_epochs = settings.epochs or self.data.task.epochs
        self.length = Length(math.ceil(self.wanted_epochs), settings.max_steps or UNLIMITED)
        if settings.max_steps:
            self.length.flag = "--max_steps"
        self.ends_within_epoch = (
            settings.do_train and not settings.max_steps and self.length.epochs != self.wanted_epochs
        )

    def replan(self, progress: Progress) -> str | None:
        """A run that ends within an epoch ends by updates. Where batches had another size before a resume, the rows that are
        left are counted in updates of today's size."""
        if self.ends_within_epoch:
            of_epoch = update_schedule(self.settings, self.ranks, self.data)
            wanted = updates_of_epochs(self.wanted_epochs, of_epoch.n_updates)
            left = max(0, wanted - updates_before(of_epoch, progress.epoch, progress.row))
            self.length.max_updates = progress.update + left
        return None

    # ------------------------------------------------------------------------------------------ what is trained

    @property
    def features(self) -> Features:
        """The examples to train."""
        assert self.data.train is not None
        return self.data.train.features

    def plan(self, epoch: int) -> GluePlan:
        return GluePlan(self.features, self.settings.seed, epoch)

    def loss(self, batch: Batch, totals: Totals) -> tuple[torch.Tensor, torch.Tensor]:
        return glue_loss(self.data.task, self.model, batch, totals, self.settings.loss_reduction)

    def learning_rate(self, update: Update, progress: Progress) -> float:
        """Progress is counted in updates where --max_steps or a part of an epoch ends the run, and in rows elsewhere: batches of another size
        after a resume then lead to the same end. The original schedule counts updates alone."""
        schedule_of_run = ENCODER_SCHEDULES[self.settings.lr_schedule]
        is_original = self.settings.lr_schedule == "original_linear"
        # How much of what is counted an update is.
        of_update = 1
        if is_original:
            done, total = self._updates_done(update, progress)
        elif self.length.max_updates == UNLIMITED:
            of_update = rows_of_update(self.settings, self.ranks)
            done = update.epoch * update.n_rows + update.first_row
            total = self.length.epochs * update.n_rows
        else:
            done = progress.update
            total = int(self.length.max_updates)
        warmup: float
        if self.settings.warmup_steps is not None:
            warmup = self.settings.warmup_steps * of_update
        elif is_original:
            warmup = self.settings.warmup_share * total
        else:
            warmup = int(self.settings.warmup_share * total)
        return self.settings.learning_rate * max(0.0, schedule_of_run(done, total, warmup))

    def _updates_done(self, update: Update, progress: Progress) -> tuple[int, int]:
        """(updates before this one, updates of the run)"""
        if self.length.max_updates < UNLIMITED:
            return progress.update, int(self.length.max_updates)
        of_epoch = update_schedule(self.settings, self.ranks, self.data)
        done = updates_before(of_epoch, update.epoch, update.first_row)
        return done, self.length.epochs * of_epoch.n_updates

    def metrics(self, sums: Sequence[float]) -> tuple[dict[str, Any], float]:
        return metrics(self.data.task, sums)

    def evaluation(self, engine: Engine, signals: StopSignals) -> Evaluation:
        """The Evaluation of this run, which remembers what it has computed last."""
        if self._evaluation is None:
            at_once = self.settings.eval_batch_size or self.settings.batch_size
            self._evaluation = Evaluation(engine, self.data.task, self.data.dev, at_once, signals)
        return self._evaluation

    def evaluate(self, engine: Engine, signals: StopSignals, update: int) -> tuple[dict[str, float], int]:
        return self.evaluation(engine, signals)(update)

    def save_weights(self, weights: Mapping[str, torch.Tensor], update: int, is_last: bool) -> None:
        every = self.settings.save_steps
        if is_last:
            save_model(self.folder / "model", self.model, self.command.tokenizer, weights)
        if every and update and update % every == 0:
            save_model(self.folder / f"checkpoint-{update}", self.model, self.command.tokenizer, weights)

    # ---------------------------------------------------------------------------------------- what is said of it

    def outlook(self, progress: Progress) -> Outlook:
        settings = self.settings
        plan = self.plan(0)
        # None: the job's own number of epochs holds.
        epochs = None
        # The updates decide, as in the benchmark's own script; the epochs are those that they take.
        if settings.max_steps:
            epochs = epochs_of_updates(settings.max_steps, settings, self.ranks, plan.n_rows)
        config = self.model.config
        lengths = self.features.lengths
        parameters = sum(p.numel() for p in self.model.parameters())
        source = "random weights"
        if not settings.from_scratch:
            source = f"from {self.command.model_folder}, {head_text(self.new_weights)}"
        lines = [
            f"model: {self.model_name}, {parameters / 1e6:.2f} M parameters, {size_of(config)}{source}",
            f"data: {self.data.task.folder}, {counted(plan.n_rows, 'example')} of {lengths.mean():.0f} tokens in the mean, "
            f"{plan.T} at most",
        ]
        # Those of the other seeds are the same.
        notices = []
        if settings.seed == self.command.settings.seed:
            notices.append(rates(self.engine.optimizer.param_groups, settings))
            if self.engine.shards is not None:
                notices.append(self.engine.shards.described)
        notices += self._make_fast(epochs)
        return Outlook(
            plan=plan,
            lines=lines,
            notices=notices,
            model_fields={**config.to_diff_dict(), "parameters": parameters},
            n_documents=plan.n_rows,
            epochs=epochs,
            shown=("train_acc", "grad_norm", "updates_per_second"),
            charts=charts_of(self.data) if settings.do_eval else COMMON,
        )

    def _make_fast(self, epochs: int | None) -> list[str]:
        """Compiled batches have one shape, the longest example's. What that adds is taken off what compiling saves."""
        settings = self.settings
        plan = self.plan(0)
        epochs = self.length.epochs if epochs is None else epochs
        parameters = sum(p.numel() for p in self.model.parameters())
        embeddings = sum(p.numel() for name, p in self.model.named_parameters() if "embeddings." in name)
        rows = rows_of_run(settings, self.ranks, plan.n_rows, epochs, self.length.max_updates)
        flops_per_position = 6 * (parameters - embeddings) * rows / self.ranks.world_size
        # Two ways to train: batches padded to their own longest example, or all of one shape and compiled.
        padded_width = plan.width(settings.batch_size)
        full = GlueAssembler(self.features, self.command.encoder, settings.max_seq_len, full=True)
        # In FLOPs, as compile_blocks weighs them against the seconds that compiling takes.
        saved = flops_per_position * (PLAIN_TIME * padded_width - COMPILED_TIME * full.width)
        can_compile = is_known(self.model) and not settings.gradient_checkpointing
        choice = settings.use_compile if can_compile else "0"
        said: list[str] = []
        # That of the other seeds is the same.
        if settings.seed == self.command.settings.seed:
            said += notes_on_precision(self.device, self.dtype, flops_per_position * padded_width)
        shape = (settings.batch_size, full.width)
        # Each family that is known has this field.
        width = self.model.config.hidden_size if can_compile else None
        compile_blocks(Layers(self.model), choice, self.device, said.append, shape, saved, self.dtype, width=width)
        if compiled_shape(self.model):
            self.assembler = full
        return said


def model_words(settings: GlueSettings) -> str:
    """What a resume must agree with beside the weights; nothing where all is as in earlier versions."""
    words = "" if settings.head == "huggingface" else f", head {settings.head}"
    return words if settings.score_divisor == 1 else f"{words}, scores divided by {settings.score_divisor:g}"


def optimizer_words(settings: GlueSettings) -> str:
    """As `model_words`, of the optimiser."""
    words = "" if settings.top_layer_exponent == 1 else f" from exponent {settings.top_layer_exponent}"
    return words if settings.adam_bias_correction else f"{words}, no bias correction"


def update_schedule(settings: GlueSettings, ranks: Ranks, data: Data) -> UpdateSchedule:
    """How an epoch of the task is dealt out to updates."""
    assert data.train is not None
    n_examples = len(data.train.features.first)
    return schedule_of(settings, ranks, n_examples)


def updates_of_epochs(epochs: float, n_updates: int) -> int:
    """How many updates the epochs have, the last one in part. n_updates: of an epoch."""
    # A part of an epoch ends with the update in which its last row is. Rounded, as 0.55 * 100 is a little more than 55 in
    # binary numbers.
    return math.ceil(round(epochs * n_updates, 6))


def charts_of(data: Data) -> tuple[Chart, ...]:
    """What the report draws of a run that is evaluated: behind the loss the metrics of each development file."""
    names = [name + suffix for suffix in data.dev for name in data.task.metrics]
    others = [chart for chart in COMMON if chart is not LOSS]
    return (LOSS, Chart(METRICS, tuple(names)), *others)


def updates_before(of_epoch: UpdateSchedule, epoch: int, row: int) -> int:
    """The updates before a row of an epoch. Where batches had another size before a resume, these are the updates of today's
    size that the rows would have been."""
    return epoch * of_epoch.n_updates + ceil_div(row, of_epoch.rows_of_update)


def size_of(config: PretrainedConfig) -> str:
    """Layers and width of an encoder, in a part of a line; nothing of one whose config has no such fields."""
    layers = getattr(config, "num_hidden_layers", None)
    width = getattr(config, "hidden_size", None)
    return f"{counted(layers, 'layer')} of width {width}, " if layers and width else ""


def set_longest_text(tokenizer: PreTrainedTokenizerBase, config: PretrainedConfig) -> None:
    """Give a tokenizer that knows no longest text the model's, so that a pipeline with the saved model can cut one."""
    positions = getattr(config, "max_position_embeddings", None) or 0
    if tokenizer.model_max_length >= VERY_LARGE_INTEGER and positions > 0:
        tokenizer.model_max_length = positions


def head_text(names: set[str]) -> str:
    """What a pretrained model lacks for the task, in a part of a line."""
    if not names:
        return "with its head"
    parts = {name.split(".")[0] for name in names}
    return f"but a new {', '.join(sorted(parts))}"
