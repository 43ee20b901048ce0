"""Pretraining of an ELECTRA as a Job: its data, networks, loss, rate and files."""

import math
from collections.abc import Container, Mapping, Sequence
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
from dataset.held_out import hold_out
from dataset.store.check import DigestCheck
from dataset.store.deduplicate import check_library, notice_of, open_sources
from dataset.store.sharded import Store
from dataset.store.token_store import StoreOptions
from dataset.tokenizing.encoder import LineEncoder
from dataset.tokenizing.vocabulary import check_known
from dataset.tokenizing.wordpiece import save_wordpiece
from model.electra.masking import original_cap
from model.electra.model_electra import ElectraPretrainer, flops_per_token
from model.electra.sizes import SIZES
from trainer.electra.example import look_at
from trainer.electra.loss import N_SUMS, LossWeights, electra_loss, metrics
from trainer.electra.micro_batch import batch_size_of
from trainer.electra.networks import NETWORKS, OWN, architecture, init_model, open_vocabulary
from trainer.electra.settings import WARM_UP, ElectraSettings
from trainer.electra.validation import AucAlarm, Validation, has_text
from trainer.engine import Engine
from trainer.job import Job, Outlook, Progress, Surroundings, Update
from trainer.launch import claim
from trainer.machine.compiling import compile_blocks
from trainer.machine.devices import pick_dtype
from trainer.machine.random_state import seed_everything
from trainer.machine.ranks import Ranks, on_main
from trainer.machine.signals import StopSignals
from trainer.optim.build import build_optimizer
from trainer.optim.schedules import ENCODER_SCHEDULES
from trainer.parallel import Shards, ranks_of_group
from trainer.recipes import PRETRAINING, is_of_recipe, recipe_lines
from trainer.reporting.charts import LOSS, SKIPPED, SPEED, Chart
from trainer.reporting.next_commands import NextCommand
from trainer.saving.places import check_kinds
from trainer.updates import rows_of_update, schedule_of
from trainer.without_effect import common_warnings, is_changed, warnings_of


class ElectraJob(Job[Recipe, Batch, Totals]):
    """train_electra.py's part of a run. Errors: UserError, in one line, for whatever of the flags does not fit."""

    settings: ElectraSettings
    model: ElectraPretrainer

    counts_updates = True
    n_sums = N_SUMS
    shown = ("mlm_loss", "disc_loss", "gen_acc", "disc_acc", "disc_auc", "grad_norm", "updates_per_second")
    may_change = (
        "learning_rate",
        "muon_lr",
        "lr_schedule",
        "batch_size",
        "accumulation_steps",
        "rows_per_update",
        "grad_clip",
        "weight_decay",
        "max_steps",
        "gen_weight",
        "disc_weight",
        "sampling",
        "temperature",
        "disallow_correct",
        "gen_smooth",
        "disc_smooth",
        "dropout",
        "warmup_steps",
        "adam_epsilon",
    )

    only_at_start = ("model_path", "init_std", "weight_init")

    mended_by = {
        "data": "--data_path, --text_field, --skip_bad_lines, --deduplicate",
        "tokenizer": "--vocab_path or --model_path",
    }

    charts = (
        LOSS,
        Chart(
            "Losses of generator (nats per token) and discriminator",
            ("mlm_loss", "disc_loss", "val_mlm_loss", "val_disc_loss"),
            logarithmic=True,
        ),
        Chart("Accuracy of generator and discriminator", ("gen_acc", "disc_acc", "val_gen_acc", "val_disc_acc")),
        Chart("Discriminator: precision, recall, AUC", ("disc_precision", "disc_recall", "disc_auc", "val_disc_auc")),
        *SPEED,
        SKIPPED,
    )

    def __init__(self, settings: ElectraSettings, surroundings: Surroundings) -> None:
        self.settings = settings
        self.ranks = surroundings.ranks
        self.device = surroundings.device
        settings.batch_size = batch_size_of(settings, self.ranks.micro_batches_at_once)
        group_size = ranks_of_group(settings.shard, self.ranks)
        self.dtype, self.precision_notice = pick_dtype(settings.dtype, self.device)
        # The same seed on all ranks, so that all begin with the same weights.
        seed_everything(settings.seed)
        with user_errors():
            self._claim_files()
            self._read_data()
            self.model = init_model(settings, self.tokenizer, self.device)
            self.mask_cap = mask_cap(settings)
            # The original code masks [UNK] like any word.
            unknown = self.tokenizer.unk_token_id if self.mask_cap is None else None
            self.examples = Examples(
                self.store, settings.max_seq_len, self.encoder.sep_id, settings.seed, unknown, self.documents
            )
            self.loss_weights = LossWeights(settings.gen_weight, settings.disc_weight)
            self.validation: Validation | None = None
            if self.held_out is not None:
                self.validation = Validation(self.held_out, settings, self.tokenizer, self.mask_cap, self.loss_weights)
        # Saved with the networks, so that a pipeline knows where to cut a long text.
        self.tokenizer.model_max_length = self.model.discriminator.config.max_position_embeddings
        if settings.gradient_checkpointing:
            self.model.gradient_checkpointing_enable()
        self.model.train()
        if group_size > 1:
            self.shards = Shards(self.model, group_size, self.ranks, self.device)
        else:
            self.model.to(self.device)
        # From here on every rank draws other numbers (dropout).
        seed_everything(settings.seed, self.ranks.rank)

        self.optimizer = build_optimizer(
            self.model,
            settings.learning_rate,
            settings.weight_decay,
            settings.optimizer,
            settings.muon_lr,
            self.ranks,
            self.shards,
            eps=settings.adam_epsilon,
            bias_correction=settings.adam_bias_correction,
        )
        self.assembler = ElectraAssembler(
            self.store,
            self.tokenizer,
            settings.max_seq_len,
            settings.mask_share,
            settings.mask_style,
            settings.seed,
            self.mask_cap,
        )
        # One rank of each machine reads all tokens: they have the same files.
        self.digest_check = DigestCheck(self._stores()) if self.ranks.local_rank == 0 else None
        # ELECTRA is published by its number of updates, so these end the run, and epochs follow.
        self.max_updates = settings.max_steps
        self.save_at = SavedUpdates(settings)
        self.evaluates = self.validation is not None
        self.eval_interval = settings.eval_interval
        self.auc_alarm = AucAlarm(settings)
        self.sample_interval = settings.example_interval
        row_layout = ["max_seq_len", "seed", "mask_share", "mask_style"]
        # Runs of earlier versions know no other choice, and can be gone on with.
        if settings.mask_choice != "exact":
            row_layout.append("mask_choice")
        # They held nothing out.
        if settings.val_fraction:
            row_layout.append("val_fraction")
        self.identity = {
            "tokenizer": self.encoder.fingerprint[:16],
            "data": self.store.fingerprint[:16],  # as this tokenizer reads it
            "architecture": architecture(self.model),
            "row layout": {name: getattr(settings, name) for name in row_layout},
            "optimizer": f"{settings.optimizer}, adam_bias_correction {settings.adam_bias_correction}",
        }

    def _claim_files(self) -> None:
        """The names of the run's files. From here on no other run may write them."""
        self.folder = Path(self.settings.out_dir) / f"electra_{self.settings.size}"
        self.stem = self.folder / self.folder.name
        self.outputs = {name: self.folder / name for name in NETWORKS}
        claim(self.ranks, self.stem)
        on_main(self.ranks, lambda: check_kinds(self.stem, folders=self.outputs.values()))
        # Networks that an earlier run has saved on its way.
        self.replaced = [*sorted(self.folder.glob("percent_*")), *sorted(self.folder.glob("checkpoint-*[0-9]"))]
        # A vocabulary of its own is written before the first update.
        self.begun = [self.folder / OWN]

    def _read_data(self) -> None:
        settings = self.settings
        # Before the vocabulary is made, which takes a while.
        check_library(settings.deduplicate)
        data_path = settings.data_path or [str(build_embedded_corpus(ROOT / "dataset" / "python_docs.jsonl"))]
        self.tokenizer = open_vocabulary(settings, data_path, self.folder, self.ranks)
        self.encoder = LineEncoder(self.tokenizer)
        store_options: StoreOptions = {
            "progress": self.ranks.is_main,
            "cache_dir": settings.cache_dir,
            "cache_gb": settings.cache_gb,
            "text_field": settings.text_field,
            "text_suffixes": settings.text_suffixes,
            "skip_bad_lines": settings.skip_bad_lines,
        }
        (self.store,) = open_sources(
            [data_path],
            self.encoder,
            settings.deduplicate,
            **store_options,
        )
        what = f"--data_path {data_path[0]}"
        if settings.vocab_path:
            what += f", --vocab_path {settings.vocab_path}"
        check_known(self.store.tokens, self.tokenizer.unk_token_id, what, (self.encoder.sep_id,))
        self.held_out = hold_out(
            self.store,
            self.encoder,
            settings.val_path,
            settings.val_fraction,
            settings.allow_val_overlap,
            has_text,
            "no document with text",
            **store_options,
        )
        # Those to train; None: all.
        self.documents = None if self.held_out is None else self.held_out.documents

    def _stores(self) -> list[Store]:
        """Those of the data, and of validation documents of their own."""
        stores = [self.store]
        if self.settings.val_path and self.held_out is not None:
            assert isinstance(self.held_out.val_store, Store)
            stores.append(self.held_out.val_store)
        return stores

    # ------------------------------------------------------------------------------------------ what is trained

    def plan(self, epoch: int) -> ElectraPlan:
        return ElectraPlan(self.examples, self.settings.mask_share, self.settings.seed, epoch, self.mask_cap)

    def loss(self, batch: Batch, totals: Totals) -> tuple[torch.Tensor, torch.Tensor]:
        return electra_loss(self.model, batch, totals, self.loss_weights)

    def learning_rate(self, update: Update, progress: Progress) -> float:
        return rate(self.settings, progress.update)

    def metrics(self, sums: Sequence[float]) -> tuple[dict[str, Any], float]:
        return metrics(sums, self.loss_weights)

    def evaluate(
        self, engine: Engine[Batch, Totals], signals: StopSignals, update: int
    ) -> tuple[dict[str, float], int]:
        assert self.validation is not None
        return self.validation(engine, self.model, signals)

    def alarm_of_evaluation(self, values: Mapping[str, float], update: int) -> str | None:
        return self.auc_alarm.line(update, values["val_disc_auc"], values["val_mlm_loss"])

    def samples(
        self, engine: Engine[Batch, Totals], signals: StopSignals, is_last: bool
    ) -> tuple[list[tuple[str, str]], int]:
        """The first example of the first epoch, masked as it is there, at every look."""
        batch = self.assembler[self.plan(0).recipe(range(1))]
        # So short that a stop waits for the next update, where the ranks agree on it.
        return [look_at(engine, self.model, self.tokenizer, batch)], 0

    def begin(self) -> None:
        if not self.settings.vocab_path:
            on_main(self.ranks, lambda: save_wordpiece(self.tokenizer, self.folder / OWN))

    def save_weights(self, weights: Mapping[str, torch.Tensor], update: int, is_last: bool) -> None:
        """Write both networks if `update` is one of --save_percents or --save_steps: the last ones to the run's folder,
        earlier ones below it."""
        settings = self.settings
        percent = 100.0 if update >= settings.max_steps else save_points(settings).get(update)
        # What is published has the names that users expect; what was saved on the way lies below it.
        if percent is not None:
            self._save_networks(self.folder if percent == 100 else self.folder / f"percent_{percent:g}", weights)
        if update in kept_updates(settings):
            self._save_networks(self.folder / f"checkpoint-{update}", weights)

    def _save_networks(self, target: Path, weights: Mapping[str, torch.Tensor]) -> None:
        """Write both networks and the tokenizer to a folder."""
        target.mkdir(exist_ok=True)
        # It would be drawn over our own.
        disable_progress_bar()
        for name in NETWORKS:
            # Generator and discriminator are one module here, and two models on the disk.
            prefix = f"{name}."
            own = {key.removeprefix(prefix): value for key, value in weights.items() if key.startswith(prefix)}
            with atomic_folder(target / name, target / f"{self.folder.name}.{name}.tmp") as temporary:
                getattr(self.model, name).save_pretrained(temporary, state_dict=own)
                save_wordpiece(self.tokenizer, temporary)

    # ---------------------------------------------------------------------------------------- what is said of it

    def next_commands(self) -> list[NextCommand]:
        fine_tune = (
            "python {top}trainer/train_glue.py --task all --data_dir glue_data --model_path {folder}/discriminator"
        )
        return [NextCommand("fine-tune the discriminator", fine_tune)]

    def outlook(self, progress: Progress) -> Outlook:
        settings = self.settings
        plan = self.plan(progress.epoch)
        generator = self.model.generator.config
        discriminator = self.model.discriminator.config
        per_position = flops_per_token(generator, discriminator, settings.max_seq_len, settings.mask_share)
        updates_per_epoch = schedule_of(settings, self.ranks, plan.n_rows).n_updates
        positions_of_rank = settings.max_steps * rows_of_update(settings, self.ranks) / self.ranks.world_size * plan.T
        parameters = sum(p.numel() for p in self.model.parameters())
        one_segment = float((self.examples.second == 0).mean())
        copies = notice_of(self.store)
        held_out: list[str] = []
        if self.held_out is not None and self.validation is not None:
            held_out = [self.validation.described, *self.held_out.notices]
        lines = [
            *notices_of_paths(settings.data_path or [], settings.text_suffixes),
            *([copies] if copies else []),
            *self.store.bad_lines.report(),
            f"model: ELECTRA {settings.size}, {parameters / 1e6:.2f} M parameters, "
            f"{counted(discriminator.num_hidden_layers, 'layer')} of width {discriminator.hidden_size} "
            f"(generator {generator.hidden_size}), {generator.vocab_size:,} entries, "
            f"{per_position / 1e6:.1f} MFLOP per position",
            f"data: {counted(len(self.store), 'document')}, {int(self.examples.lengths.sum()):,} positions in "
            f"{counted(plan.n_rows, 'example')} of {plan.T} ({plan.fill:.1%} full), {one_segment:.0%} of one segment",
            *held_out,
        ]
        precision = [self.precision_notice] if self.precision_notice else []
        if self.shards is not None:
            precision.append(self.shards.described)
        return Outlook(
            rows=plan,
            lines=lines,
            notices=[*precision, *notices(settings, self.ranks)],
            model_fields={
                **discriminator.to_diff_dict(),
                "generator": generator.to_diff_dict(),
                "parameters": parameters,
            },
            n_documents=len(self.store),
            flops_per_token=per_position / plan.fill,  # of a token; the products take the padding too
            flops=per_position * positions_of_rank,
            epochs=math.ceil(settings.max_steps / updates_per_epoch),
        )

    def make_fast(self, outlook: Outlook) -> list[str]:
        said: list[str] = []
        # What is recomputed would draw other dropout masks than the compiled forward pass has drawn.
        choice = "0" if self.settings.gradient_checkpointing else self.settings.use_compile
        shape = (self.ranks.rows_of(self.settings.batch_size), outlook.rows.T)
        compile_blocks(self.model, choice, self.device, said.append, shape, outlook.flops, self.dtype)
        return said


def rate(settings: ElectraSettings, update: int) -> float:
    """The learning rate of the update that comes after `update` others."""
    warmup = settings.warmup_steps
    if warmup is None:
        warmup = min(WARM_UP, settings.max_steps // 10)
    schedule = ENCODER_SCHEDULES[settings.lr_schedule]
    return settings.learning_rate * schedule(update, settings.max_steps, warmup)


def mask_cap(settings: ElectraSettings) -> int | None:
    """The cap of `mask_tokens`; None where --mask_choice is exact."""
    if settings.mask_choice == "exact":
        return None
    return original_cap(settings.max_seq_len, settings.mask_share)


def save_points(settings: ElectraSettings) -> dict[int, float]:
    """{updates: percent} of --save_percents; the end is always one."""
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
    return range(every, settings.max_steps + 1, every) if every else range(0)


def notices(settings: ElectraSettings, ranks: Ranks) -> list[str]:
    """Lines on settings that do not do what they seem to."""
    unused = settings.warmup_steps is not None and settings.lr_schedule == "one_cycle"
    recomputed = settings.use_compile == "1" and settings.gradient_checkpointing
    evaluates = bool(settings.val_path or settings.val_fraction)
    # A folder says by itself whether its vocabulary is lower-cased; so does that of --model_path.
    own_case = Path(settings.vocab_path).is_dir() if settings.vocab_path else bool(settings.model_path)
    cases = [
        ("lower_case", own_case and is_changed(settings, "lower_case"), "the tokenizer folder says it"),
        ("warmup_steps", unused, "--lr_schedule one_cycle has its own"),
        ("eval_interval", is_changed(settings, "eval_interval") and not evaluates, "no validation data"),
        ("eval_batch_size", is_changed(settings, "eval_batch_size") and not evaluates, "no validation data"),
        ("allow_val_overlap", settings.allow_val_overlap and not settings.val_path, "no --val_path"),
        ("use_compile", recomputed, "--gradient_checkpointing recomputes layers without it"),
    ]
    for name in ("init_std", "position_init", "weight_init"):
        is_given = is_changed(settings, name) and not is_of_recipe(settings, name, PRETRAINING)
        cases.append((name, bool(settings.model_path) and is_given, "the weights come from --model_path"))
    if settings.generator_config is not None:
        for name in ("init_std", "position_init", "dropout"):
            is_given = is_changed(settings, name) and not is_of_recipe(settings, name, PRETRAINING)
            cases.append((name, is_given, "the files of the networks say it"))
    lines = recipe_lines(settings, PRETRAINING) + warnings_of(settings, cases)
    highest = max(rate(settings, settings.max_steps * i // 1000) for i in range(1000)) / settings.learning_rate
    if highest < 0.5:
        lines.append(
            f"warning: with --warmup_steps {settings.warmup_steps} the rate is never above {highest:.0%} of --learning_rate"
        )
    size = SIZES[settings.size]
    rows = rows_of_update(settings, ranks)
    if settings.max_steps == size.max_steps and rows != size.batch_size:
        lines.append(
            f"note: an update has {counted(rows, 'example')}, in the published run of this size {size.batch_size}"
        )
    return lines + common_warnings(settings, ranks)
