"""Fine-tuning on one GLUE task with one seed: a run of the loop, its evaluation and its files."""

import contextlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from common.errors import user_errors
from common.files import remove
from common.wording import counted
from dataset.glue.glue_dataset import Batch, GlueAssembler, GluePlan, Totals
from dataset.store.format import Ints
from trainer.engine import Engine
from trainer.glue.command import COMPARED, RESULTS, Command, Data, done_before, line_of, write_json
from trainer.glue.loss import N_SUMS, evaluate, glue_loss, logged, outputs, write_predictions
from trainer.glue.model import Layers, init_model, layer_groups, rates, save_model
from trainer.glue.settings import GlueSettings
from trainer.job import LATEST_UPDATE, UNLIMITED, Evaluation, Identity, Job, Length, Outlook, Progress, RunFiles, Update
from trainer.launch import make_folder
from trainer.loop import Trainer
from trainer.machine.command_line import StopSignals, name_of
from trainer.machine.compiling import COMPILED_TIME, PLAIN_TIME, compile_blocks
from trainer.machine.devices import notes_on_precision, seed_everything
from trainer.machine.measure import plain_advice, told_in_a_line
from trainer.machine.ranks import on_main
from trainer.optim.build import build_adamw
from trainer.optim.schedules import ENCODER_SCHEDULES
from trainer.reporting.charts import COMMON, LOSS, METRICS, Chart
from trainer.saving.checkpoint import Checkpoints
from trainer.sharding import group_size_of, put_on_device
from trainer.updates import epochs_of_updates, rows_of_run, rows_of_update, schedule_of


class GlueJob(Job[Ints, Batch, Totals]):
    """train_glue.py's part of a run. Errors: UserError, in one line, where the model does not fit the task."""

    settings: GlueSettings
    # A classifier of Hugging Face. What its config is like depends on the family.
    model: Any

    MENDED_BY = {
        "data": "--data_dir, --train_file, --max_seq_len",
        "tokenizer": "--model_path",
        "optimizer": "--layer_decay, --adam_bias_correction",
    }

    def __init__(self, command: Command, settings: GlueSettings, data: Data, folder: Path) -> None:
        """settings: those of this run, with its seed. folder: of its results."""
        self.command = command
        self.settings = settings
        self.data = data
        self.folder = folder
        self.ranks = command.surroundings.ranks
        self.device = command.surroundings.device
        self.dtype = command.dtype
        self.files = RunFiles(
            folder / f"{data.name}_{folder.name}",
            {"model": folder / "model"},
            # Those of the command, for this task and seed alone
            replace(command.settings, task=data.name, seed=settings.seed, num_seeds=1),
            # What an earlier run of this seed may have left
            replaced=[RESULTS, "checkpoint-*[0-9]"],
        )
        # The same seed on all ranks, so that all begin with the same weights.
        seed_everything(settings.seed)
        with user_errors():
            self.model, self.new_weights = init_model(settings, data.task, command.model_folder, command.vocab_size)
            make_folder(folder)
        if settings.gradient_checkpointing:
            self.model.activation_checkpointing_enable({"use_reentrant": False})
        # FSDP2 gives its class another name.
        self.model_name = type(self.model).__name__
        self.model.train()
        group_size = group_size_of(settings.shard, self.ranks)
        entries = {
            "tokenizer": command.fingerprint[:16],
            "data": data.key,  # as this tokenizer reads it, cut to --max_seq_len
            "model (--model_path, --from_scratch)": command.model_key,
            "row layout": {"seed": settings.seed},
            "optimizer": f"layer_decay {settings.layer_decay}, bias correction {settings.adam_bias_correction}",
        }
        self.identity = Identity(entries, self.MENDED_BY)
        shards = put_on_device(self.model, entries, group_size, self.ranks, self.device)
        # From here on every rank draws other numbers (dropout).
        seed_everything(settings.seed, self.ranks.rank)
        optimizer = build_adamw(
            layer_groups(self.model, settings.weight_decay, settings.layer_decay),
            settings.learning_rate,
            eps=settings.adam_epsilon,
            bias_correction=settings.adam_bias_correction,
        )
        self.engine = Engine(
            self.model,
            optimizer,
            self.loss,
            device=self.device,
            dtype=self.dtype,
            ranks=self.ranks,
            grad_clip=settings.grad_clip,
            n_sums=N_SUMS,
            shards=shards,
        )
        assert settings.epochs is not None
        self.length = Length(math.ceil(settings.epochs))
        self.evaluation = Evaluation(evaluate=self.evaluate if settings.do_eval else None, counts_updates=True)
        if data.train is not None:
            self.assembler = data.train
            schedule = schedule_of(settings, self.ranks, len(data.train.features.lengths))
            if settings.max_steps:
                self.length.max_updates = settings.max_steps
                self.length.flag = "--max_steps"
            elif self.length.epochs != settings.epochs:
                # A part of an epoch ends with the update in which its last row is. Rounded, as 0.55 * 100 is a little more
                # than 55 in binary numbers.
                self.length.max_updates = math.ceil(round(settings.epochs * schedule.n_updates, 6))
            if settings.evaluate_during_training:
                self.evaluation.eval_interval = settings.eval_interval or schedule.n_updates
        # A range answers "is this update one of them?" without a list of them.
        if settings.save_steps:
            self.files.save_at = range(settings.save_steps, LATEST_UPDATE, settings.save_steps)
        # Examples that a rank evaluates at once; the update that was evaluated last, and its figures
        self.eval_batch_size = settings.eval_batch_size or settings.batch_size
        self.latest: tuple[int, dict[str, float]] = (-1, {})

    # ------------------------------------------------------------------------------------------ what is trained

    def plan(self, epoch: int) -> GluePlan:
        assert self.data.train is not None
        return GluePlan(self.data.train.features, self.settings.seed, epoch)

    def loss(self, batch: Batch, totals: Totals) -> tuple[torch.Tensor, torch.Tensor]:
        return glue_loss(self.data.task, self.model, batch, totals)

    def learning_rate(self, update: Update, progress: Progress) -> float:
        """Progress is counted in updates where --max_steps or a part of an epoch ends the run, and in rows elsewhere: batches
        of another size after a resume then lead to the same end."""
        settings = self.settings
        # How much of what is counted an update is.
        of_update = 1
        done = progress.update
        total = self.length.max_updates
        if total == UNLIMITED:
            of_update = rows_of_update(settings, self.ranks)
            done = update.epoch * update.n_rows + update.first_row
            total = self.length.epochs * update.n_rows
        warmup = int(settings.warmup_share * total)
        if settings.warmup_steps is not None:
            warmup = settings.warmup_steps * of_update
        factor = ENCODER_SCHEDULES[settings.lr_schedule](done, int(total), warmup)
        return settings.learning_rate * max(0.0, factor)

    def metrics(self, sums: Sequence[float]) -> tuple[dict[str, Any], float]:
        return logged(self.data.task, sums)

    def evaluate(self, engine: Engine, signals: StopSignals, update: int) -> tuple[dict[str, float], int]:
        """Asked again for the same update, at the end of a run, nothing is computed."""
        if self.latest[0] == update:
            return self.latest[1], 0
        found, stop_signal = evaluate(engine, self.data.task, self.data.dev, self.eval_batch_size, signals)
        if not stop_signal:
            self.latest = (update, found)
        return found, stop_signal

    def save_weights(self, weights: Mapping[str, torch.Tensor], update: int, is_last: bool) -> None:
        every = self.settings.save_steps
        names = ["model"] if is_last else []
        if every and update and update % every == 0:
            names.append(f"checkpoint-{update}")
        for name in names:
            save_model(self.folder / name, self.model, self.command.tokenizer, weights)

    # ---------------------------------------------------------------------------------------- what is said of it

    def outlook(self, progress: Progress) -> Outlook:
        settings = self.settings
        plan = self.plan(0)
        config = self.model.config
        parameters = sum(p.numel() for p in self.model.parameters())
        source = "random weights"
        if not settings.from_scratch:
            parts = sorted({name.split(".")[0] for name in self.new_weights})
            head = f"but a new {', '.join(parts)}" if parts else "with its head"
            source = f"from {self.command.model_folder}, {head}"
        lines = [
            f"model: {self.model_name}, {parameters / 1e6:.2f} M parameters, "
            f"{counted(config.num_hidden_layers, 'layer')} of width {config.hidden_size}, {source}",
            f"data: {self.data.task.folder}, {counted(plan.n_rows, 'example')} of {plan.fill * plan.T:.0f} tokens in the mean, "
            f"{plan.T} at most",
        ]
        # Those of the other seeds are the same.
        notices = []
        if settings.seed == self.command.settings.seed:
            notices.append(rates(self.engine.optimizer.param_groups, settings.learning_rate))
            if self.engine.shards is not None:
                notices.append(self.engine.shards.described)
        # Updates limit the run: the epochs that they take.
        epochs = None
        if settings.max_steps:
            epochs = epochs_of_updates(settings.max_steps, settings, self.ranks, plan.n_rows)
        notices += self._make_fast(epochs or self.length.epochs)
        charts: Sequence[Chart] = COMMON
        if settings.do_eval:
            # Behind the loss the metrics of each development file
            names = tuple(name + suffix for suffix in self.data.dev for name in self.data.task.metrics)
            charts = (LOSS, Chart(METRICS, names), *(chart for chart in COMMON if chart is not LOSS))
        return Outlook(
            plan=plan,
            lines=lines,
            notices=notices,
            model_fields={**config.to_diff_dict(), "parameters": parameters},
            n_documents=plan.n_rows,
            epochs=epochs,
            shown=("train_acc", "grad_norm", "updates_per_second"),
            charts=charts,
        )

    def _make_fast(self, epochs: int) -> list[str]:
        """Compiled batches have one shape, the longest example's. What that adds is taken off what compiling saves."""
        settings = self.settings
        plan = self.plan(0)
        assert self.data.train is not None
        in_layers = sum(p.numel() for name, p in self.model.named_parameters() if "embeddings." not in name)
        rows = rows_of_run(settings, self.ranks, plan.n_rows, epochs, self.length.max_updates)
        flops_per_position = 6 * in_layers * rows / self.ranks.world_size
        # Two ways to train: batches padded to their own longest example, or all of one shape and compiled.
        padded_width = plan.width(settings.batch_size)
        full = GlueAssembler(self.data.train.features, self.command.tokenizer, settings.max_seq_len, full=True)
        saved = flops_per_position * (PLAIN_TIME * padded_width - COMPILED_TIME * full.width)
        said: list[str] = []
        if settings.seed == self.command.settings.seed:
            said += notes_on_precision(self.device, self.dtype, flops_per_position * padded_width)
        shape = (settings.batch_size, full.width)
        # What is recomputed would draw other dropout masks than the compiled forward pass has drawn.
        choice = "0" if settings.gradient_checkpointing else settings.use_compile
        width = self.model.config.hidden_size
        compile_blocks(Layers(self.model), choice, self.device, said.append, shape, saved, self.dtype, width=width)
        if getattr(self.model, "compiled_shape", None):
            self.assembler = full
        return said


def one_run(command: Command, data: Data, seed: int) -> tuple[int, dict[str, Any]]:
    """Train, evaluate and predict with one seed. Returns (exit code, what its eval_results.json holds)."""
    folder = Path(command.settings.out_dir) / data.name / f"seed_{seed}"
    ranks = command.surroundings.ranks
    signals = command.surroundings.signals
    say = command.say
    # What {out_dir}/{task}/seed_{seed}/eval_results.json says of how the run is made; the figures come behind it.
    result: dict[str, Any] = {
        "task": data.name,
        "seed": seed,
        "settings": {name: getattr(command.settings, name) for name in COMPARED},
        "data": data.key,
        "model": command.model_key,
        "dtype": str(command.dtype).removeprefix("torch."),
    }
    earlier = on_main(ranks, lambda: done_before(command, folder, result))
    if earlier is not None:
        say(f"{data.name}, seed {seed}: done before, {line_of(earlier['results'])}")
        return 0, earlier
    say(f"--- {data.name}, seed {seed}")
    on_main(ranks, lambda: remove(folder / "predictions"))
    settings = replace(command.settings, seed=seed, epochs=command.settings.epochs or data.task.epochs)
    job = GlueJob(command, settings, data, folder)
    trainer = Trainer(job, command.surroundings)
    if settings.do_train:
        exit_code = trainer.run()
        if exit_code:
            return exit_code, {}
    result["updates"] = trainer.progress.update
    with told_in_a_line(job.device, partial(plain_advice, settings, "a smaller --max_seq_len or model")):
        stop_signal = look_back(job, signals, result)
    # Computed with again after the run's own end.
    trainer.engine.close()
    if job.engine.shards is not None:
        job.engine.shards.leave_group()
    if stop_signal:
        say(f"stopped by {name_of(stop_signal)}; the same command with --from_resume 1 evaluates what is trained")
        return 128 + stop_signal, {}

    def finish() -> None:
        write_json(folder / RESULTS, result)
        # Nobody goes on from the checkpoints of a finished run: they are three times the model, per seed.
        with contextlib.suppress(OSError):
            Checkpoints(f"{job.files.stem}_resume").remove_all()

    on_main(ranks, finish)
    return 0, result


def look_back(job: GlueJob, signals: StopSignals, result: dict[str, Any]) -> int:
    """Evaluate and predict at the end of a run, into `result` and files; the number of a stop signal that came, or 0."""
    settings, engine, task, say = job.settings, job.engine, job.data.task, job.command.say
    where = f"{result['task']}, seed {result['seed']}"

    def metrics_after(update: int) -> tuple[dict[str, float], int]:
        values, stop_signal = job.evaluate(engine, signals, update)
        return {name: value for name, value in values.items() if name != "val_loss"}, stop_signal

    result["results"] = {}
    if settings.do_eval:
        result["results"], stop_signal = metrics_after(result["updates"])
        if stop_signal:
            return stop_signal
        say(f"{where}: {line_of(result['results'])}")
    for name, assembler in job.data.test.items():
        logits, stop_signal = outputs(engine, task, assembler, job.eval_batch_size, signals)
        if stop_signal:
            return stop_signal
        target = job.folder / "predictions" / f"{name}.tsv"
        # All ranks have the same logits; one writes.
        on_main(job.ranks, partial(write_predictions, target, task, logits))
        say(f"predictions: {target}")
    if settings.eval_all_checkpoints and settings.do_eval:
        result["checkpoints"] = {}
        for update, path in sorted((int(path.name[11:]), path) for path in job.folder.glob("checkpoint-*[0-9]")):
            engine.load_weights(load_file(path / "model.safetensors"))
            metrics, stop_signal = metrics_after(update)
            if stop_signal:
                return stop_signal
            result["checkpoints"][str(update)] = metrics
            say(f"{where}, update {update}: {line_of(metrics)}")
    return 0
