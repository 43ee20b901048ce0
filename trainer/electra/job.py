"""Pretraining of an ELECTRA as a Job: its data, rate and files. Networks and loss: objective.py."""

from collections.abc import Container, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers.utils.logging import disable_progress_bar

from common.errors import user_errors
from common.files import atomic_folder
from common.paths import ROOT
from common.wording import counted
from dataset.corpus import notices_of_paths
from dataset.electra.electra_dataset import Batch, ElectraAssembler, ElectraPlan, Examples, Recipe, Totals
from dataset.embedded_corpus import build_embedded_corpus
from dataset.held_out import HeldOut, hold_out, with_last_part
from dataset.reading.file_kinds import expanded
from dataset.store.check import DigestCheck
from dataset.store.deduplicate import check_library, notice_of, open_sources
from dataset.store.format import TokenStore
from dataset.store.token_store import StoreOptions
from dataset.tokenizing.encoder import LineEncoder
from dataset.tokenizing.vocabulary import check_known
from dataset.tokenizing.wordpiece import save_wordpiece
from model.electra.masking import original_cap
from model.electra.pretrainer import Pretrainer
from model.electra.sizes import MLM, SIZES
from trainer.electra.clock import clock_of, most_updates, seconds_to_show
from trainer.electra.closing import closing_of
from trainer.electra.micro_batch import batch_size_of
from trainer.electra.networks import OWN, PRETRAINERS, architecture, open_vocabulary
from trainer.electra.objective import objective_of
from trainer.electra.original import PRETRAINING, is_as_published, original_lines
from trainer.electra.published import differences
from trainer.electra.settings import ElectraSettings, warmup_of
from trainer.electra.validation import Validation, has_text
from trainer.engine import Engine
from trainer.job import LATEST_UPDATE, Closing, Job, Outlook, Progress, Surroundings, Update
from trainer.launch import claim
from trainer.machine.agreement import compare_precision
from trainer.machine.collectives import first_rank_first, on_main, until_all_are_ready
from trainer.machine.compiling import compile_blocks
from trainer.machine.devices import notes_on_precision, pick_dtype
from trainer.machine.random_state import seed_everything
from trainer.machine.ranks import Ranks
from trainer.machine.signals import StopSignals
from trainer.optim.build import optimizer_of
from trainer.optim.schedules import ENCODER_SCHEDULES
from trainer.reporting.next_commands import NextCommand
from trainer.sharding import group_size_of, put_on_device
from trainer.updates import epochs_of_updates, rows_of_update
from trainer.without_effect import common_warnings, is_changed, warnings_of

# What --objective mlm has no use for.
OF_TWO_NETWORKS = (
    "generator_divisor",
    "generator_layers",
    "untied_embeddings",
    "gen_weight",
    "disc_weight",
    "sampling",
    "temperature",
    "disallow_correct",
    "disc_smooth",
    "example_interval",
)
LINE_ON_CLOCK = "the clock of --budget sets the number of updates once the first ones are timed; so far it is a guess"


class ElectraJob(Job[Recipe, Batch, Totals]):
    """train_electra.py's part of a run. Errors: UserError, in one line, for whatever of the flags does not fit."""

    settings: ElectraSettings
    model: Pretrainer
    save_at: "SavedUpdates"

    counts_updates = True
    may_change = (
        "learning_rate",
        "muon_lr",
        "embed_lr",
        "lr_schedule",
        "batch_size",
        "accumulation_steps",
        "rows_per_update",
        "grad_clip",
        "weight_decay",
        "max_steps",
        "budget",
        "budget_flops",
        "gen_weight",
        "disc_weight",
        "sampling",
        "temperature",
        "disallow_correct",
        "gen_smooth",
        "disc_smooth",
        "warmup_steps",
        "adam_epsilon",
    )

    only_at_start = ("model_path", "init_std", "weight_init")

    mended_by = {
        "data": "--data_path, --text_field, --skip_bad_lines, --deduplicate",
        "tokenizer": "--vocab_path or --model_path",
    }

    def __init__(self, settings: ElectraSettings, surroundings: Surroundings) -> None:
        self.settings = settings
        self.ranks = surroundings.ranks
        self.device = surroundings.device
        settings.batch_size = batch_size_of(settings, self.ranks.micro_batches_at_once)
        group_size = group_size_of(settings.shard, self.ranks)
        self.dtype, self.precision_notice = pick_dtype(settings.dtype, self.device)
        compare_precision(self.ranks, self.dtype)
        # The same seed on all ranks, so that all begin with the same weights.
        seed_everything(settings.seed)
        with user_errors():
            self._claim_files()
            self._read_data()
            self._build_networks(group_size)
            self._choose_updates()
            self._find_examples()
        self.identity = self._identity()
        self.shards = put_on_device(self.model, self.identity, group_size, self.ranks, self.device)
        # From here on every rank draws other numbers (dropout).
        seed_everything(settings.seed, self.ranks.rank)

        self.optimizer = optimizer_of(
            settings,
            self.model,
            self.ranks,
            self.shards,
            eps=settings.adam_epsilon,
            bias_correction=settings.adam_bias_correction,
        )
        self.assembler = ElectraAssembler(
            self.store,
            self.tokenizer,
            max_seq_len=settings.max_seq_len,
            share=settings.mask_share,
            style=settings.mask_style,
            seed=settings.seed,
            cap=self.mask_cap,
        )
        # One rank of each machine reads all tokens: they have the same files.
        self.digest_check = DigestCheck(self._stores()) if self.ranks.local_rank == 0 else None
        if settings.budget is not None:
            shows = self.objective.tells_replaced
            self.clock = clock_of(settings, self.validation, self.ranks, warmup_of(settings), shows)
        self.n_sums = self.objective.n_sums
        self.shown = (*self.objective.shown, "grad_norm", "updates_per_second")
        self.charts = self.objective.charts
        self.save_at = SavedUpdates(settings)
        self.evaluates = self.validation is not None
        self.eval_interval = settings.eval_interval
        self.sample_interval = settings.example_interval

    def _claim_files(self) -> None:
        """The names of the run's files. From here on no other run may write them."""
        objective = self.settings.objective
        self.folder = Path(self.settings.out_dir) / f"{objective}_{self.settings.size}"
        self.stem = self.folder / self.folder.name
        self.outputs = {name: self.folder / name for name in PRETRAINERS[objective].NETWORKS}
        claim(self.ranks, self.stem)
        # Networks that an earlier run has saved on its way.
        self.replaced = ["percent_*", "checkpoint-*[0-9]"]
        # A vocabulary of its own is written before the first update.
        self.begun = [self.folder / OWN]

    def _read_data(self) -> None:
        settings = self.settings
        # Before the vocabulary is made, which takes a while.
        check_library(settings.deduplicate)
        data_path = settings.data_path or [str(build_embedded_corpus(ROOT / "dataset" / "python_docs.jsonl"))]
        self.data_path = data_path
        self.tokenizer = open_vocabulary(settings, data_path, self.stem, self.ranks)
        self.encoder = LineEncoder(self.tokenizer)
        self.store, self.held_out = first_rank_first(self.ranks, self._open_stores)
        # Those to train; None: all.
        self.documents = None if self.held_out is None else self.held_out.documents

    def _open_stores(self) -> tuple[TokenStore, HeldOut | None]:
        """The text to train, and what is held out of it."""
        settings = self.settings
        store_options: StoreOptions = {
            "progress": self.ranks.is_main,
            "cache_dir": settings.cache_dir,
            "text_field": settings.text_field,
            "text_suffixes": settings.text_suffixes,
            "skip_bad_lines": settings.skip_bad_lines,
        }
        (store,) = open_sources([self.data_path], self.encoder, settings.deduplicate, **store_options)
        (store,) = with_last_part([store], self.encoder, settings.val_fraction)
        what = f"--data_path {self.data_path[0]}"
        if settings.vocab_path:
            what += f", --vocab_path {settings.vocab_path}"
        check_known(store.tokens, self.tokenizer.unk_token_id, what, (self.encoder.sep_id,))
        held_out = hold_out(
            store,
            self.encoder,
            settings.val_path,
            settings.val_fraction,
            settings.allow_val_overlap,
            has_text,
            "no document with text",
            **store_options,
        )
        return store, held_out

    def _build_networks(self, group_size: int) -> None:
        """group_size: ranks that share one copy of the networks."""
        self.objective = objective_of(self.settings, self.tokenizer, self.device, group_size)
        self.model = self.objective.model
        # Saved with the networks, so that a pipeline knows where to cut a long text.
        self.tokenizer.model_max_length = self.model.encoder_config.max_position_embeddings
        if self.settings.gradient_checkpointing:
            self.model.gradient_checkpointing_enable()
        self.model.train()

    def _choose_updates(self) -> None:
        """How many there are. ELECTRA is published by its number of updates, so these end the run, and epochs follow."""
        settings = self.settings
        if settings.budget_flops is not None:
            settings.max_steps = max(1, round(settings.budget_flops / self.flops_of_update()))
        if settings.budget is not None:
            settings.max_steps = most_updates(settings, self.flops_of_update(), self.device, self.ranks)
        self.max_updates = settings.max_steps

    def _find_examples(self) -> None:
        """The texts to train and those to validate with."""
        settings = self.settings
        self.mask_cap = mask_cap(settings)
        # The original code masks [UNK] like any word.
        unknown = self.tokenizer.unk_token_id if self.mask_cap is None else None
        self.validation: Validation | None = None
        # They read all tokens.
        with until_all_are_ready(self.ranks):
            self.examples = Examples(
                self.store, settings.max_seq_len, self.encoder.sep_id, settings.seed, unknown, self.documents
            )
            if self.held_out is not None:
                self.validation = Validation(
                    self.held_out, settings, self.tokenizer, self.mask_cap, unknown, self.objective
                )

    def _identity(self) -> dict[str, Any]:
        """What a resume must have in common with the run that it goes on with."""
        settings = self.settings
        row_layout = ["max_seq_len", "seed", "mask_share", "mask_style"]
        # Earlier versions have no such fields, and must still resume.
        if settings.mask_choice != "exact":
            row_layout.append("mask_choice")
        if settings.val_fraction:
            row_layout.append("val_fraction")
        return {
            "tokenizer": self.encoder.fingerprint[:16],
            "data": self.store.fingerprint[:16],  # as this tokenizer reads it
            "architecture": architecture(self.model),
            "row layout": {name: getattr(settings, name) for name in row_layout},
            "optimizer": f"{settings.optimizer}, adam_bias_correction {settings.adam_bias_correction}",
        }

    def _stores(self) -> list[TokenStore]:
        """Those of the data, and of validation documents of their own."""
        stores = [self.store]
        if self.settings.val_path and self.held_out is not None:
            assert isinstance(self.held_out.val_store, TokenStore)
            stores.append(self.held_out.val_store)
        return stores

    # ------------------------------------------------------------------------------------------ what is trained

    def plan(self, epoch: int) -> ElectraPlan:
        return ElectraPlan(self.examples, self.settings.mask_share, self.settings.seed, epoch, self.mask_cap)

    def loss(self, batch: Batch, totals: Totals) -> tuple[torch.Tensor, torch.Tensor]:
        return self.objective.loss(batch, totals)

    def learning_rate(self, update: Update, progress: Progress) -> float:
        course = self.clock.moved if self.clock is not None else None
        if course is None:
            return rate(self.settings, progress.update)
        # The clock of --budget has moved the end.
        warmup = min(1.0, progress.update / max(warmup_of(self.settings), 1))
        return self.settings.learning_rate * warmup * course.factor(progress.update)

    def metrics(self, sums: Sequence[float]) -> tuple[dict[str, Any], float]:
        return self.objective.metrics(sums)

    def evaluate(
        self, engine: Engine[Batch, Totals], signals: StopSignals, update: int
    ) -> tuple[dict[str, float], int]:
        assert self.validation is not None
        return self.validation(engine, signals)

    def alarm_of_evaluation(self, values: Mapping[str, float], progress: Progress) -> str | None:
        # The clock of --budget sets the end; its settings have a guess, which is far too high.
        end = self.settings.max_steps if self.clock is None else self.clock.end
        return self.objective.alarm(values, progress.update, end)

    def kept(self) -> dict[str, float | None]:
        own = self.clock.state_dict() if self.clock is not None else {}
        return {**self.objective.kept(), **own}

    def take_kept(self, kept: Mapping[str, float | None]) -> None:
        self.objective.take_kept(kept)
        if self.clock is not None:
            self.clock.load_state_dict(kept)

    def samples(
        self, engine: Engine[Batch, Totals], signals: StopSignals, is_last: bool
    ) -> tuple[list[tuple[str, str]], int]:
        """The first example of the first epoch, masked as it is there, at every look."""
        batch = self.assembler[self.plan(0).recipe(range(1))]
        # So short that a stop waits for the next update, where the ranks agree on it.
        return self.objective.look(engine, self.tokenizer, batch), 0

    def flops_of_update(self) -> float:
        """Of all ranks, padding included: it is computed too."""
        settings = self.settings
        positions = rows_of_update(settings, self.ranks) * settings.max_seq_len
        return positions * self.objective.flops_per_position(settings.max_seq_len, settings.mask_share)

    def settings_to_keep(self) -> ElectraSettings:
        """Of --budget_flops the updates, with which --from_resume may go on for longer; of --budget the time alone."""
        if self.settings.budget is not None:
            return replace(self.settings, max_steps=None)  # type: ignore[arg-type]  # as where no flag says it
        return replace(self.settings, budget_flops=None)

    def goal(self, progress: Progress, epochs: int) -> tuple[str, str]:
        if self.settings.budget is not None:
            # The clock has set the end.
            return f"{counted(progress.update, 'update')} of --budget {self.settings.budget}", ""
        return super().goal(progress, epochs)

    def lines_at_the_end(self, progress: Progress) -> list[str]:
        if self.settings.budget is None:
            return []
        return [line_on_work(progress.update * self.flops_of_update())]

    def begin(self) -> None:
        if not self.settings.vocab_path:
            on_main(self.ranks, lambda: save_wordpiece(self.tokenizer, self.folder / OWN))

    def save_weights(self, weights: Mapping[str, torch.Tensor], update: int, is_last: bool) -> None:
        """Write the networks if `update` is one of --save_percents or --save_steps: the last ones to the run's folder,
        earlier ones below it."""
        percent = 100.0 if is_last else self.save_at.points.get(update)
        # What is published has the names that users expect; what was saved on the way lies below it.
        if percent is not None:
            self._save_networks(
                self.folder if percent == 100 else self.folder / f"percent_{percent:g}", weights, is_last
            )
        if update in self.save_at.kept:
            self._save_networks(self.folder / f"checkpoint-{update}", weights, is_last)

    def _save_networks(self, target: Path, weights: Mapping[str, torch.Tensor], is_last: bool) -> None:
        """Write all networks and the tokenizer to a folder."""
        target.mkdir(exist_ok=True)
        self.objective.note_in_configs(is_last)
        # It would be drawn over our own.
        disable_progress_bar()
        for name in self.model.NETWORKS:
            # Generator and discriminator are one module here, and two models on the disk.
            prefix = f"{name}."
            own = {key.removeprefix(prefix): value for key, value in weights.items() if key.startswith(prefix)}
            with atomic_folder(target / name, target / f"{self.folder.name}.{name}.tmp") as temporary:
                getattr(self.model, name).save_pretrained(temporary, state_dict=own)
                save_wordpiece(self.tokenizer, temporary)

    # ---------------------------------------------------------------------------------------- what is said of it

    def closing(self) -> Closing | None:
        if not self.objective.tells_replaced:
            return None
        discriminator = self.outputs["discriminator"]
        seconds = seconds_to_show(self.clock, self.settings.report)
        return closing_of(self.settings, self.data_path, self.held_out, self.encoder, discriminator, seconds)

    def next_commands(self) -> list[NextCommand]:
        encoder = self.model.ENCODER
        fine_tune = (
            f"python {{top}}trainer/train_glue.py --task all --data_dir glue_data --model_path {{folder}}/{encoder}"
        )
        commands = [NextCommand(f"fine-tune the {encoder}", fine_tune)]
        if self.objective.tells_replaced:
            detect = 'python {top}scripts/detect.py --model {folder} --corrupt 0.15 "Any text of yours."'
            commands.append(NextCommand("see which words it doubts", detect))
        return commands

    def outlook(self, progress: Progress) -> Outlook:
        settings = self.settings
        plan = self.plan(progress.epoch)
        others = {name: getattr(self.model, name) for name in self.model.NETWORKS if name != self.model.ENCODER}
        per_position = self.objective.flops_per_position(settings.max_seq_len, settings.mask_share)
        flops = settings.max_steps * self.flops_of_update()
        precision = [self.precision_notice] if self.precision_notice else []
        if self.shards is not None:
            precision.append(self.shards.described)
        return Outlook(
            plan=plan,
            lines=self._lines_on_data_and_model(plan, per_position),
            notices=[
                line_on_work(flops) if settings.budget is None else LINE_ON_CLOCK,
                *precision,
                *notices(settings, self.ranks),
            ],
            model_fields={
                **self.model.encoder_config.to_diff_dict(),
                **{name: network.config.to_diff_dict() for name, network in others.items()},
                "parameters": self._parameters(),
                "flops_of_update": self.flops_of_update(),
            },
            n_documents=len(self.store),
            flops_per_token=per_position / plan.fill,  # of a token; the products take the padding too
            flops=flops / self.ranks.world_size,
            epochs=epochs_of_updates(settings.max_steps, settings, self.ranks, plan.n_rows),
        )

    def _lines_on_data_and_model(self, plan: ElectraPlan, per_position: float) -> list[str]:
        """What is trained, and on what. per_position: FLOPs of a training step."""
        settings = self.settings
        encoder = self.model.encoder_config
        # Networks from files have sizes of their own.
        is_of_files = settings.model_path is not None or settings.discriminator_config is not None
        size = "" if is_of_files else f" {settings.size}"
        one_segment = float((self.examples.second == 0).mean())
        lines = notices_of_paths(settings.data_path or [], settings.text_suffixes)
        copies = notice_of(self.store)
        if copies:
            lines.append(copies)
        lines += self.store.bad_lines.report()
        lines += [
            f"model: {self.objective.title}{size}, {self._parameters() / 1e6:.2f} M parameters, "
            f"{counted(encoder.num_hidden_layers, 'layer')} of width {encoder.hidden_size}"
            f"{self.objective.remark}, {encoder.vocab_size:,} entries, "
            f"{per_position / 1e6:.1f} MFLOP per position",
            f"data: {counted(len(self.store), 'document')}, {int(self.examples.lengths.sum()):,} positions in "
            f"{counted(plan.n_rows, 'example')} of {plan.T} ({plan.fill:.1%} full), {one_segment:.0%} of one segment",
        ]
        if self.held_out is not None and self.validation is not None:
            lines += [self.validation.described, *self.held_out.notices]
        return lines

    def _parameters(self) -> int:
        """Of all networks together."""
        return sum(parameter.numel() for parameter in self.model.parameters())

    def make_fast(self, outlook: Outlook) -> list[str]:
        said = notes_on_precision(self.device, self.dtype, outlook.flops)
        # What is recomputed would draw other dropout masks than the compiled forward pass has drawn.
        choice = "0" if self.settings.gradient_checkpointing else self.settings.use_compile
        shape = (self.ranks.rows_of(self.settings.batch_size), outlook.plan.T)
        width = self.model.encoder_config.hidden_size
        compile_blocks(self.model, choice, self.device, said.append, shape, outlook.flops, self.dtype, width=width)
        return said


def rate(settings: ElectraSettings, update: int) -> float:
    """The learning rate of the update that comes after `update` others."""
    schedule = ENCODER_SCHEDULES[settings.lr_schedule]
    return settings.learning_rate * schedule(update, settings.max_steps, warmup_of(settings))


def line_on_work(flops: float) -> str:
    """What a run computes, and how another one gets as much."""
    return f"work: {flops:.6g} FLOP; --budget_flops {flops:.6g} gives a run with other networks as much"


def mask_cap(settings: ElectraSettings) -> int | None:
    """The cap of `mask_tokens`; None where --mask_choice is exact."""
    if settings.mask_choice == "exact":
        return None
    return original_cap(settings.max_seq_len, settings.mask_share)


def save_points(settings: ElectraSettings) -> dict[int, float]:
    """{updates: percent} of --save_percents; the end is always one. With --budget nobody knows them."""
    if settings.budget is not None:
        return {}
    points = {}
    for percent in (*settings.save_percents, 100.0):
        points[max(1, round(settings.max_steps * percent / 100))] = percent
    return points


class SavedUpdates(Container[int]):
    """The updates after which networks are written; asked of each update, since there may be a million."""

    def __init__(self, settings: ElectraSettings) -> None:
        self.points = save_points(settings)
        self.kept = kept_updates(settings)

    def __contains__(self, update: object) -> bool:
        return update in self.points or update in self.kept


def kept_updates(settings: ElectraSettings) -> range:
    """The updates whose networks --save_steps keeps."""
    every = settings.save_steps
    # A clock may move the end of a run beyond what was planned.
    end = LATEST_UPDATE if settings.budget is not None else settings.max_steps
    return range(every, end + 1, every) if every else range(0)


def notices(settings: ElectraSettings, ranks: Ranks) -> list[str]:
    """Lines on settings that do not do what they seem to."""
    unused = settings.warmup_steps is not None and settings.lr_schedule == "one_cycle"
    recomputed = settings.use_compile == "1" and settings.gradient_checkpointing
    evaluates = bool(settings.val_path or settings.val_fraction)
    # A folder says by itself whether its vocabulary is lower-cased; so does that of --model_path.
    own_case = expanded(settings.vocab_path).is_dir() if settings.vocab_path else bool(settings.model_path)
    cases = [
        ("lower_case", own_case and is_changed(settings, "lower_case"), "the tokenizer folder says it"),
        (
            "save_percents",
            settings.budget is not None and is_changed(settings, "save_percents"),
            "--budget moves the end",
        ),
        ("warmup_steps", unused, "--lr_schedule one_cycle has its own"),
        ("eval_interval", is_changed(settings, "eval_interval") and not evaluates, "no validation data"),
        ("eval_batch_size", is_changed(settings, "eval_batch_size") and not evaluates, "no validation data"),
        ("allow_val_overlap", settings.allow_val_overlap and not settings.val_path, "no --val_path"),
        ("use_compile", recomputed, "--gradient_checkpointing recomputes layers without it"),
    ]
    if settings.objective == MLM:
        cases += [(name, is_changed(settings, name), "--objective mlm has one network") for name in OF_TWO_NETWORKS]
    for name in ("init_std", "position_init", "weight_init"):
        is_given = is_changed(settings, name) and not is_as_published(settings, name, PRETRAINING)
        cases.append((name, bool(settings.model_path) and is_given, "the weights come from --model_path"))
    if settings.discriminator_config is not None:
        for name in ("init_std", "position_init", "dropout"):
            is_given = is_changed(settings, name) and not is_as_published(settings, name, PRETRAINING)
            cases.append((name, is_given, "the files of the networks say it"))
    rows = rows_of_update(settings, ranks)
    lines = original_lines(settings, PRETRAINING, differences(settings, rows)) + warnings_of(settings, cases)
    highest = max(rate(settings, settings.max_steps * i // 1000) for i in range(1000)) / settings.learning_rate
    if highest < 0.5:
        lines.append(
            f"warning: with a warm-up of {counted(warmup_of(settings), 'update')} the rate is never above {highest:.0%} of "
            "--learning_rate; --warmup_steps sets it"
        )
    size = SIZES[settings.size]
    # The line of a recipe has said it.
    if settings.recipe == "default" and settings.max_steps == size.max_steps and rows != size.batch_size:
        lines.append(
            f"note: an update has {counted(rows, 'example')}, in the published run of this size {size.batch_size}"
        )
    return lines + common_warnings(settings, ranks)
