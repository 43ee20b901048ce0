"""Pretraining of an ELECTRA as a Job: its data, networks, loss, rate and files."""

import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers.utils.logging import disable_progress_bar

from common.errors import user_errors
from common.files import atomic_folder
from common.flags import seed
from common.paths import ROOT
from common.settings import read_plain
from common.wording import counted
from dataset.corpus import Corpus
from dataset.electra.electra_dataset import Batch, ElectraAssembler, ElectraPlan, Examples, Recipe, Totals
from dataset.embedded_corpus import build_embedded_corpus
from dataset.reading.file_kinds import expanded
from dataset.shares import Source
from dataset.store.deduplicate import check_library
from dataset.tokenizing.encoder import LineEncoder
from dataset.tokenizing.vocabulary import check_known
from dataset.tokenizing.wordpiece import save_wordpiece
from model.electra.model_electra import NETWORKS, ElectraPretrainer, flops_per_token
from model.electra.sizes import SIZES
from trainer.advice import NextCommand, common_warnings, is_changed, warnings_of
from trainer.electra.loss import N_SUMS, electra_loss, metrics
from trainer.electra.networks import OWN, architecture, init_model, open_vocabulary
from trainer.electra.settings import ElectraSettings, batch_size_of, warmup_of
from trainer.electra.validation import Validation, look_at
from trainer.engine import Engine, make_engine
from trainer.job import Evaluation, Identity, Job, Length, Outlook, Progress, RunFiles, Surroundings, Update
from trainer.launch import claim
from trainer.machine.command_line import StopSignals
from trainer.machine.compiling import compile_blocks
from trainer.machine.devices import notes_on_precision, pick_dtype, seed_everything
from trainer.machine.ranks import first_rank_first, on_main, until_all_are_ready
from trainer.optim.schedules import ENCODER_SCHEDULES
from trainer.reporting.charts import LOSS, SKIPPED, SPEED, Chart
from trainer.sharding import group_size_of
from trainer.updates import epochs_of_updates, rows_of_update


class ElectraJob(Job[Recipe, Batch, Totals]):
    """train_electra.py's part of a run. Errors: UserError, in one line, for whatever of the flags does not fit."""

    settings: ElectraSettings
    model: ElectraPretrainer

    SHOWN = ("mlm_loss", "disc_loss", "gen_acc", "disc_acc", "disc_auc", "grad_norm", "updates_per_second")
    CHARTS = (
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
    ONLY_AT_START = ("model_path", "init_std")
    MENDED_BY = {
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
        self.loss_weights = (settings.gen_weight, settings.disc_weight)
        self.folder = Path(settings.out_dir) / f"electra_{settings.size}"
        self.files = RunFiles(
            self.folder / self.folder.name,
            {name: self.folder / name for name in NETWORKS},
            settings,
            # A vocabulary of its own is written before the first update.
            begun={self.folder / OWN: self._write_vocabulary},
            # Networks that an earlier run has saved on its way
            replaced=["percent_*", "checkpoint-*[0-9]"],
        )
        with user_errors():
            # From here on no other run may write these files.
            claim(self.ranks, self.files.stem)
            if settings.seed is None:
                settings.seed = on_main(self.ranks, self._draw_seed)
            # The same seed on all ranks, so that all begin with the same weights.
            seed_everything(settings.seed)
            # Before the vocabulary is made, which takes a while.
            check_library(settings.deduplicate)
            embedded = ROOT / "dataset" / "python_docs.jsonl"
            self.data_path = settings.data_path or [str(build_embedded_corpus(embedded))]
            self.tokenizer = open_vocabulary(settings, self.data_path, self.files.stem, self.ranks)
            self.encoder = LineEncoder(self.tokenizer)
            self.corpus = first_rank_first(self.ranks, self._open_corpus)
            self.store = self.corpus.store
            self.model = init_model(settings, self.tokenizer)
            # Saved with the networks, so that a pipeline knows where to cut a long text.
            self.tokenizer.model_max_length = self.model.discriminator.config.max_position_embeddings
            if settings.gradient_checkpointing:
                self.model.gradient_checkpointing_enable()
            self.model.train()
            self.length = Length(max_updates=settings.max_steps, flag="--max_steps")
            self.validation: Validation | None = None
            # They read all tokens.
            with until_all_are_ready(self.ranks):
                T, unknown = settings.max_seq_len, self.tokenizer.unk_token_id
                documents = self.corpus.documents
                self.examples = Examples(self.store, T, self.encoder.sep_id, settings.seed, unknown, documents)
                if self.corpus.val_store is not None:
                    self.validation = Validation(self.corpus, settings, self.tokenizer)
        row_layout = [
            "max_seq_len",
            "seed",
            "mask_share",
            "mask_style",
            *(["val_fraction"] if settings.val_fraction else []),
        ]
        # What a resume must have in common with the run that it goes on with.
        entries = {
            "tokenizer": self.encoder.fingerprint[:16],
            "data": self.store.fingerprint[:16],  # as this tokenizer reads it
            "architecture": architecture(self.model),
            "row layout": {name: getattr(settings, name) for name in row_layout},
            "optimizer": f"{settings.optimizer}, adam_bias_correction {settings.adam_bias_correction}",
        }
        self.identity = Identity(entries, self.MENDED_BY, self.ONLY_AT_START)
        # From here on every rank draws other numbers (dropout).
        seed_everything(settings.seed, self.ranks.rank)

        self.engine = make_engine(
            self.model,
            self.loss,
            settings,
            n_sums=N_SUMS,
            identity=entries,
            group_size=group_size,
            dtype=self.dtype,
            ranks=self.ranks,
            device=self.device,
            eps=settings.adam_epsilon,
            bias_correction=settings.adam_bias_correction,
        )
        self.assembler = ElectraAssembler(
            self.store, self.tokenizer, settings.max_seq_len, settings.mask_share, settings.mask_style, settings.seed
        )
        # One rank of each machine reads all tokens: they have the same files.
        if self.ranks.local_rank == 0:
            self.digest_check = self.corpus.digest_check()
        # {updates: percent} of --save_percents; the end is always one. And the updates of --save_steps.
        n, every = settings.max_steps, settings.save_steps
        self.percents = {max(1, round(n * percent / 100)): percent for percent in (*settings.save_percents, 100.0)}
        self.kept_updates = range(every, n + 1, every) if every else range(0)
        self.files.save_at = {*self.percents, *self.kept_updates}
        self.evaluation = Evaluation(
            evaluate=self.evaluate if self.validation is not None else None,
            eval_interval=settings.eval_interval,
            samples=self.samples if settings.example_interval else None,
            sample_interval=settings.example_interval,
            counts_updates=True,
        )

    def _draw_seed(self) -> int:
        """Of --seed None: a random one, and at a resume that of the run."""
        saved = Path(f"{self.files.stem}.settings.yaml")
        if self.settings.from_resume and saved.exists():
            settings = read_plain(saved, "--seed None:")
            assert isinstance(settings, dict)
            return seed(settings["seed"])
        return secrets.randbelow(2**32)

    def _open_corpus(self) -> Corpus:
        """The text to train, and what is held out of it. Its plans are those of a language model, and are not used."""
        settings = self.settings
        corpus = Corpus(
            [Source(self.data_path)],
            self.encoder,
            max_seq_len=settings.max_seq_len,
            seed=settings.seed,
            val_path=settings.val_path,
            val_fraction=settings.val_fraction,
            allow_val_overlap=settings.allow_val_overlap,
            deduplicate=settings.deduplicate,
            cache_dir=settings.cache_dir,
            text_field=settings.text_field,
            text_suffixes=settings.text_suffixes,
            skip_bad_lines=settings.skip_bad_lines,
            progress=self.ranks.is_main,
        )
        what = f"--data_path {self.data_path[0]}"
        if settings.vocab_path:
            what += f", --vocab_path {settings.vocab_path}"
        check_known(corpus.store.tokens, self.tokenizer.unk_token_id, what, (self.encoder.sep_id,))
        return corpus

    # ------------------------------------------------------------------------------------------ what is trained

    def plan(self, epoch: int) -> ElectraPlan:
        return ElectraPlan(self.examples, self.settings.mask_share, self.settings.seed, epoch)

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

    def samples(
        self, engine: Engine[Batch, Totals], signals: StopSignals, is_last: bool
    ) -> tuple[list[tuple[str, str]], int]:
        """The first example of the first epoch, masked as it is there, at every look."""
        batch = self.assembler[self.plan(0).recipe(range(1))]
        # So short that a stop waits for the next update, where the ranks agree on it.
        return [look_at(engine, self.model, self.tokenizer, batch)], 0

    # --------------------------------------------------------------------------------------------- what is saved

    def _write_vocabulary(self) -> None:
        if not self.settings.vocab_path:
            save_wordpiece(self.tokenizer, self.folder / OWN)

    def save_weights(self, weights: Mapping[str, torch.Tensor], update: int, is_last: bool) -> None:
        """Write the networks if `update` is one of --save_percents or --save_steps: the last ones to the run's folder,
        where users expect them, earlier ones below it."""
        places = []
        percent = 100.0 if is_last else self.percents.get(update)
        if percent is not None:
            places.append(self.folder if percent == 100 else self.folder / f"percent_{percent:g}")
        if update in self.kept_updates:
            places.append(self.folder / f"checkpoint-{update}")
        # It would be drawn over our own.
        disable_progress_bar()
        for target in places:
            target.mkdir(exist_ok=True)
            for name, network in zip(NETWORKS, self.model.networks(), strict=True):
                # Generator and discriminator are one module here, and two models on the disk.
                own = {
                    key.removeprefix(f"{name}."): value for key, value in weights.items() if key.startswith(f"{name}.")
                }
                with atomic_folder(target / name, target / f"{self.folder.name}.{name}.tmp") as temporary:
                    network.save_pretrained(temporary, state_dict=own)
                    save_wordpiece(self.tokenizer, temporary)

    # ---------------------------------------------------------------------------------------- what is said of it

    def outlook(self, progress: Progress) -> Outlook:
        settings = self.settings
        plan = self.plan(progress.epoch)
        generator, discriminator = (network.config for network in self.model.networks())
        per_position = flops_per_token(generator, discriminator, settings.max_seq_len, settings.mask_share)
        # Of all ranks, padding included: it is computed too.
        flops = settings.max_steps * rows_of_update(settings, self.ranks) * settings.max_seq_len * per_position
        parameters = sum(parameter.numel() for parameter in self.model.parameters())
        # Networks from files have sizes of their own.
        size = "" if settings.model_path or settings.discriminator_config else f" {settings.size}"
        one_segment = float((self.examples.second == 0).mean())
        lines = [
            *self.corpus.notices,
            *(line for bad_lines in self.corpus.bad_lines for line in bad_lines.report()),
            f"model: ELECTRA{size}, {parameters / 1e6:.2f} M parameters, "
            f"{counted(discriminator.num_hidden_layers, 'layer')} of width {discriminator.hidden_size} "
            f"(generator {generator.hidden_size}), {discriminator.vocab_size:,} entries, "
            f"{per_position / 1e6:.1f} MFLOP per position",
            f"data: {counted(len(self.store), 'document')}, {int(self.examples.lengths.sum()):,} positions in "
            f"{counted(plan.n_rows, 'example')} of {plan.T} ({plan.fill:.1%} full), {one_segment:.0%} of one segment",
        ]
        if self.validation is not None:
            lines.append(self.validation.described)
        shards = self.engine.shards
        told = [self.precision_notice, shards.described if shards is not None else None]
        of_rank = flops / self.ranks.world_size
        fine_tune = (
            "python {top}trainer/train_glue.py --task all --data_dir glue_data --model_path {folder}/discriminator"
        )
        return Outlook(
            plan=plan,
            lines=lines,
            notices=[*(line for line in told if line), *self._notices(), *self._make_fast(plan, of_rank)],
            model_fields={
                **discriminator.to_diff_dict(),
                "generator": generator.to_diff_dict(),
                "parameters": parameters,
            },
            n_documents=len(self.store),
            flops_per_token=per_position / plan.fill,  # of a token; the products take the padding too
            flops=of_rank,
            epochs=epochs_of_updates(settings.max_steps, settings, self.ranks, plan.n_rows),
            shown=self.SHOWN,
            charts=self.CHARTS,
            next_commands=[NextCommand("fine-tune the discriminator", fine_tune)],
        )

    def _notices(self) -> list[str]:
        """Lines on settings that do not do what they seem to."""
        settings = self.settings
        # A folder says by itself whether its vocabulary is lower-cased; so does that of --model_path.
        own_case = expanded(settings.vocab_path).is_dir() if settings.vocab_path else bool(settings.model_path)
        one_cycle = settings.warmup_steps is not None and settings.lr_schedule == "one_cycle"
        of_files = bool(settings.model_path or settings.discriminator_config)
        cases = [
            ("warmup_steps", one_cycle, "--lr_schedule one_cycle has its own"),
            ("init_std", of_files and is_changed(settings, "init_std"), "the networks come from files"),
            ("position_init", of_files and is_changed(settings, "position_init"), "the networks come from files"),
            ("lower_case", own_case and is_changed(settings, "lower_case"), "the tokenizer folder says it"),
        ]
        lines = warnings_of(settings, cases)
        highest = max(rate(settings, settings.max_steps * i // 1000) for i in range(1000)) / settings.learning_rate
        if highest < 0.5:
            lines.append(
                f"warning: with a warm-up of {counted(warmup_of(settings), 'update')} the rate is never above {highest:.0%} "
                "of --learning_rate; --warmup_steps sets it"
            )
        size = SIZES[settings.size]
        rows = rows_of_update(settings, self.ranks)
        if settings.max_steps == size.max_steps and rows != size.batch_size:
            lines.append(
                f"note: an update has {counted(rows, 'example')}, in the published run of this size {size.batch_size}"
            )
        return lines + common_warnings(settings, self.ranks)

    def _make_fast(self, plan: ElectraPlan, flops: float) -> list[str]:
        said = notes_on_precision(self.device, self.dtype, flops)
        # What is recomputed would draw other dropout masks than the compiled forward pass has drawn.
        choice = "0" if self.settings.gradient_checkpointing else self.settings.use_compile
        shape = (self.ranks.rows_of(self.settings.batch_size), plan.T)
        width = self.model.discriminator.config.hidden_size
        compile_blocks(self.model, choice, self.device, said.append, shape, flops, self.dtype, width=width)
        return said


def rate(settings: ElectraSettings, update: int) -> float:
    """The learning rate of the update that comes after `update` others."""
    schedule = ENCODER_SCHEDULES[settings.lr_schedule]
    return settings.learning_rate * schedule(update, settings.max_steps, warmup_of(settings))
