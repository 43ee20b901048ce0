"""Pretraining of a MiniMind as a Job: its data, model, loss, rate and files."""

import math
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from common.arithmetic import ceil_div
from common.command_clock import seconds_since_start
from common.errors import UserError, user_errors
from common.paths import utf8_folder
from common.wording import counted
from dataset.corpus import EVAL_ROWS, Corpus
from dataset.leaks_at_start import leak_notices
from dataset.loader import Batch
from dataset.packing import Recipe, RowPlan, Totals
from dataset.tokenizing.encoder import DocumentEncoder, load_tokenizer
from dataset.tokenizing.shipped import unnamed_vocabulary
from dataset.tokenizing.vocabulary import (
    check_ids_fit,
    check_known,
    check_size,
    note_on_spelt_tokens,
    vocabulary_digest,
)
from model.checkpointing import recompute_layers
from model.config import TOKEN_IDS, MiniMindConfig, architecture, parameter_count
from model.hf_folder import checked_files, read_config
from model.model_minimind import MiniMindForCausalLM
from model.weight_record import vocabulary_of
from trainer.budget import laws
from trainer.budget.clock import Clock, Course
from trainer.budget.forecast import Alarm, Forecast
from trainer.budget.kept_plan import keep_plan, plan_path
from trainer.budget.reserves import evaluation_share, sample_seconds, seconds_at_end
from trainer.budget.settings import seconds_of
from trainer.budget.text import parts_of, text_scale
from trainer.engine import Engine
from trainer.evaluation import evaluate
from trainer.job import SHORT_RUN_FLOPS, UNLIMITED, Job, Outlook, Progress, Surroundings, Update
from trainer.launch import claim
from trainer.machine.agreement import compare_precision
from trainer.machine.collectives import least_of_ranks, on_main, until_all_are_ready
from trainer.machine.compiling import compile_blocks
from trainer.machine.devices import notes_on_precision, pick_dtype
from trainer.machine.out_of_memory import told_in_a_line
from trainer.machine.random_state import seed_everything
from trainer.machine.ranks import Ranks
from trainer.machine.signals import StopSignals
from trainer.optim.build import optimizer_of
from trainer.optim.schedules import learning_rate
from trainer.pretrain import trial
from trainer.pretrain.auto_batch import note_on_small, settle
from trainer.pretrain.compressors import compressed
from trainer.pretrain.data import USUAL_TEXT, open_corpus
from trainer.pretrain.first_model import check_length, config_from_flags, find_weight, init_model
from trainer.pretrain.flops import flops_per_token, mean_context
from trainer.pretrain.loss import metrics, n_sums, pretrain_loss
from trainer.pretrain.memory_plan import MemoryPlan
from trainer.pretrain.notices import WORTH_A_NOTICE, SizeOfRun, notices
from trainer.pretrain.planned_end import PlannedEnd
from trainer.pretrain.public_weights import (
    PublicModel,
    model_of_folder,
    settings_of_folder,
    tokenizer_notices,
)
from trainer.pretrain.settings import (
    AUTO_ROWS,
    DEFAULT_TOKENIZER,
    PretrainSettings,
    weight_name,
)
from trainer.reporting.charts import LOSS, SKIPPED, SPEED, Chart
from trainer.reporting.next_commands import NextCommand
from trainer.sample_prompts import read_prompts
from trainer.sampling import samples
from trainer.saving.weights import save_weights
from trainer.sharding import build_on_main, group_size_of, put_on_device
from trainer.updates import epochs_of_updates, rows_of_run, rows_of_update, rows_of_warmup


class PretrainJob(Job[Recipe, Batch, Totals]):
    """train_pretrain.py's part of a run: what it trains, and what is said and saved of it.

    The constructor opens whatever can be wrong, the quick things first: prompts, tokenizer and model, the names of the run's
    files, and then the data, which a first run tokenises. Then it settles on a batch size, and puts the model on its device
    before the optimiser is made. The methods after it are the answers to what the Trainer asks, in the words of trainer/job.py.
    Errors: UserError, in one line, for whatever of the flags does not fit.
    """

    settings: PretrainSettings
    model: MiniMindForCausalLM

    # How the data is read, and what one of its texts is called.
    corpus_kind: type[Corpus] = Corpus
    document = "document"
    usual_data = USUAL_TEXT

    # These shape how a run goes on from here, and leave alone which document stands in which row.
    may_change = (
        "epochs",
        "max_updates",
        "learning_rate",
        "muon_lr",
        "embed_lr",
        "lr_schedule",
        "decay_share",
        "warmup_iters",
        "batch_size",
        "accumulation_steps",
        "rows_per_update",
        "grad_clip",
        "weight_decay",
        "dtype",
    )

    # They decide the first weights. A resume takes those of its checkpoint.
    only_at_start = ("from_weight", "init_scheme")

    mended_by = {
        "data": "--data_path, --text_field, --skip_bad_lines, --deduplicate",
        "tokenizer": "--tokenizer_path",
        "reading of special tokens": "--parse_special_tokens",
    }

    charts: Sequence[Chart] = (
        LOSS,
        Chart("Validation: bits per byte", ("bits_per_byte",)),
        *SPEED,
        Chart("Auxiliary loss", ("aux_loss",), unless_zero=True),
        Chart("Expert load: largest share in a layer", ("expert_load_max",)),
        SKIPPED,
        Chart("Expert load: mean over the layers", ("expert_load/*",)),
    )

    def __init__(self, settings: PretrainSettings, surroundings: Surroundings) -> None:
        self.settings = settings
        self.ranks = surroundings.ranks
        self.device = surroundings.device
        self.epochs = settings.epochs
        self.max_updates = settings.max_updates or UNLIMITED
        self.dtype, self.precision_notice = pick_dtype(settings.dtype, self.device)
        compare_precision(self.ranks, self.dtype)
        self.group_size = group_size_of(settings.shard, self.ranks)
        available = surroundings.available_memory
        self.memory = MemoryPlan(settings, self.dtype, self.device, self.ranks, self.group_size, available)
        self.free_memory = self.memory.free_on_all_ranks()
        # The same seed on all ranks, so that all begin with the same weights.
        seed_everything(settings.seed)
        with user_errors():
            self.prompts = read_prompts(settings.sample_prompts)
            self._open_model()
            self._claim_files()
            self._open_data()
            if settings.gradient_checkpointing:
                recompute_layers(self.model)
            self.model.train()
            self._settle_batch()
            self._check_memory()
        # Other ones than at the top: the model's folder and --batch_size auto have decided on some of them.
        settings = self.settings
        # From here on every rank draws other numbers (dropout).
        seed_everything(settings.seed, self.ranks.rank)

        self.identity = {
            # Before the tokenizer, whose fingerprint has it too.
            "reading of special tokens": self.encoder.parse_special_tokens,
            "tokenizer": self.encoder.fingerprint[:16],
            "data": self.corpus.fingerprint[:16],  # as this tokenizer reads it
            "architecture": architecture(self.config),
            "row layout": self.corpus.layout(),
            "optimizer": settings.optimizer,
        }
        self.shards = put_on_device(self.model, self.identity, self.group_size, self.ranks, self.device)
        self.optimizer = optimizer_of(settings, self.model, self.ranks, self.shards)
        self.n_sums = n_sums(self.config)
        self.assembler = self.corpus.assembler(self.pad_id)
        self.validation = self.corpus.validation(self.pad_id)
        # It reads all tokens in a thread. One rank of each machine does it, since all read the same files.
        self.digest_check = self.corpus.digest_check() if self.ranks.local_rank == 0 else None
        # A dense model has no auxiliary loss: its record says 0, its line leaves it out.
        self.shown = (
            ("expected_loss", "aux_loss", "grad_norm") if self.config.use_moe else ("expected_loss", "grad_norm")
        )
        # Made when the run is described, since it takes a second.
        self.forecast: Forecast | None = None
        self.loss_alarm = Alarm(settings.names_of_rates())
        self.clock = self._clock(settings.budget) if settings.budget else None
        self.planned_end = PlannedEnd(settings, self.ranks, self.corpus, self.clock) if self.plans_to_end else None
        self.evaluates = bool(self.validation)
        self.eval_interval = settings.eval_interval
        self.has_samples = bool(self.prompts)

    @classmethod
    def make_encoder(cls, tokenizer: PreTrainedTokenizerBase, settings: PretrainSettings) -> DocumentEncoder:
        """What makes ids of a document."""
        return DocumentEncoder(tokenizer, bool(settings.parse_special_tokens))

    @classmethod
    def open_corpus(cls, settings: PretrainSettings, encoder: DocumentEncoder, ranks: Ranks) -> Corpus:
        """The data of the run, tokenised now if it is new. Errors: DataError."""
        return open_corpus(settings, encoder, ranks, cls.corpus_kind, cls.usual_data)

    def _open_model(self) -> None:
        """Tokenizer and model, which must fit each other and the rows."""
        folder = self.settings.weight_folder()
        public = None if folder is None else self._read_folder(folder)
        settings = self.settings
        assert settings.tokenizer_path is not None
        self.tokenizer_path = settings.tokenizer_path
        self.tokenizer = load_tokenizer(self.tokenizer_path)
        self.encoder = self.make_encoder(self.tokenizer, settings)
        self.vocabulary = vocabulary_digest(self.tokenizer)
        self.tokenizer_notices: list[str] = []
        if folder is not None:
            self.tokenizer_notices = tokenizer_notices(folder, self.tokenizer_path, self.vocabulary)
        self.model = self._build_model(public)
        self.config: MiniMindConfig = self.model.config
        check_length(settings.max_seq_len, self.config)
        check_size(self.encoder.vocab_size, self.config.vocab_size, f"--tokenizer_path {self.tokenizer_path}")

    def _open_data(self) -> None:
        """What is trained."""
        # The first run on a corpus tokenises it here, which may take long: whatever else can be wrong was looked at.
        self.corpus = self.open_corpus(self.settings, self.encoder, self.ranks)
        if self.corpus.planned is not None:
            # All passes over all sources are one plan.
            self.epochs = 1
            self.plans_to_end = bool(self.settings.max_updates)
        # A rank may have to fetch the first group of documents.
        with until_all_are_ready(self.ranks):
            self._check_tokens()
            self.plan(0)
        # Padding is not trained, so any id that the model has will do.
        self.pad_id = self.tokenizer.pad_token_id or 0

    def _read_folder(self, folder: Path) -> PublicModel:
        """The model in a Hugging Face folder, whose config the settings take over; no weight is read.

        The loader of its tokenizer reads that config too, and would make whatever it speaks of. So it comes after this.
        """
        utf8_folder("--from_weight", folder)
        config = read_config(folder)
        self.settings = settings_of_folder(self.settings, folder, config)
        self.memory.check_weights(config)
        return PublicModel(folder, config, checked_files(MiniMindForCausalLM, folder, config))

    def _claim_files(self) -> None:
        """The names of the run's files. From here on no other run may write them."""
        self.stem = Path(self.settings.out_dir) / self._weight_name()
        self.outputs = {"weights": Path(f"{self.stem}.pth"), "config": Path(f"{self.stem}.json")}
        claim(self.ranks, self.stem)
        self.begun = [plan_path(self.stem)]

    def _weight_name(self) -> str:
        return weight_name(self.settings.save_weight, self.config.hidden_size, self.config.use_moe)

    def _build_model(self, public: PublicModel | None) -> MiniMindForCausalLM:
        """public: the folder that --from_weight names; None: it names none."""
        settings = self.settings
        if public is not None:
            config = public.config
            # The documents begin and end with the tokenizer's own.
            for name in TOKEN_IDS:
                setattr(config, name, getattr(self.tokenizer, name))
            check_ids_fit(self.encoder.vocab_size, config.vocab_size, f"--tokenizer_path {self.tokenizer_path}")
            model = self._made(partial(model_of_folder, public))
        else:
            config = config_from_flags(settings, self.encoder.vocab_size, self.tokenizer)
            # Before the model is made: the system would end a process that asks for too much, without a line.
            self.memory.note(config, rows=1, T=settings.max_seq_len)
            self.memory.refuse_too_much()
            if settings.from_weight != "none":
                self._check_vocabulary(find_weight(settings.from_weight, config, Path(settings.out_dir)))
            weights = (settings.from_weight, settings.out_dir, settings.init_scheme)
            model = self._made(partial(init_model, config, *weights))
        if self.group_size > 1:
            # Its parts go to the device.
            return model
        with told_in_a_line(self.device, self.memory.advice):
            return model.to(self.device)  # type: ignore[arg-type]  # transformers wraps it without its types

    def _made(self, make: Callable[[], MiniMindForCausalLM]) -> MiniMindForCausalLM:
        """What `make` makes on the CPU; on a rank that will get its part of the weights, a model without content."""
        with told_in_a_line(self.device, self.memory.advice):
            return make() if self.group_size == 1 else build_on_main(self.ranks, make)

    def _check_vocabulary(self, weight: Path) -> None:
        """Errors: UserError where the weight's .json says that it was trained with another tokenizer."""
        recorded = vocabulary_of(weight)
        if recorded is None and self.tokenizer_path == DEFAULT_TOKENIZER:
            self.tokenizer_notices.append(unnamed_vocabulary(weight))
        if recorded is None or recorded == self.vocabulary:
            return
        raise UserError(
            f"--from_weight {weight} was trained with another tokenizer than --tokenizer_path "
            f"{self.tokenizer_path}: name its own (or take vocabulary_sha256 out of the .json beside it)"
        )

    def _check_tokens(self) -> None:
        """Whether the tokens of the data, the tokenizer and the model fit each other."""
        what = f"--tokenizer_path {self.tokenizer_path}"
        # Each document has them, so they do not count as known.
        added = (self.encoder.bos_id, self.encoder.eos_id)
        check_known(self.corpus.store.tokens, self.tokenizer.unk_token_id, f"--data_path, {what}", added)
        if self.corpus.max_token_id >= self.config.vocab_size:
            raise UserError(
                f"{what} gives token id {self.corpus.max_token_id}, beyond the model's vocabulary of "
                f"{self.config.vocab_size}: use the tokenizer that the weights were trained with"
            )

    def _settle_batch(self) -> None:
        """Put numbers in the place of --batch_size auto."""
        self.batch_notice: str | None = None
        # The flags as the user has given them: what is said of flags is said of these.
        self.asked = self.settings
        if self.settings.batch_size != AUTO_ROWS:
            return
        plan = self.plan(0)
        self.settings, self.batch_notice = settle(
            self.settings, self.stem, self.config, plan.n_rows, plan.T, self.memory, self.free_memory, self._trial
        )
        # Its advice begins with the flags of the run.
        self.memory.settings = self.settings

    def _trial(self, rows: int) -> bool:
        """Whether a micro-batch of so many rows fits all ranks' GPUs. A collective."""
        plan = self.plan(0)
        first_rows = range(min(rows, plan.n_rows))
        batch = self.corpus.assembler(self.pad_id, rows)[plan.recipe(first_rows)]
        totals = plan.totals(0, len(first_rows))
        states = self.memory.optimizer_states(self.config)
        own = trial.fits(self.model, batch, totals, self.device, self.dtype, states)
        return least_of_ranks(self.ranks, float(own), self.device) > 0

    def _check_memory(self) -> None:
        """Errors: UserError where a micro-batch cannot fit."""
        plan = self.plan(0)
        self.memory.note(self.config, self._most_rows(plan), plan.T)
        self.memory.refuse_too_much()

    def _most_rows(self, plan: RowPlan) -> int:
        """The rows of the largest micro-batch of an epoch, which may have fewer than --batch_size for a rank."""
        return min(self.settings.batch_size, ceil_div(plan.n_rows, self.ranks.micro_batches_at_once))

    def memory_advice(self) -> str:
        return self.memory.advice()

    # ------------------------------------------------------------------------------------------ what is trained

    def plan(self, epoch: int) -> RowPlan:
        return self.corpus.plan(epoch)

    def loss(self, batch: Batch, totals: Totals) -> tuple[torch.Tensor, torch.Tensor]:
        return pretrain_loss(self.model, batch, totals)

    def learning_rate(self, update: Update, progress: Progress) -> float:
        """See schedules.learning_rate."""
        settings = self.settings
        if settings.max_updates:
            done = progress.update / settings.max_updates
        else:
            # The share of the run's rows that is done, not of its updates: with another batch size or another number of ranks the
            # rate ends at the same value.
            done = (update.epoch + update.first_row / update.n_rows) / self.epochs
        rows_at_its_end = update.epoch * update.n_rows + update.end_row
        warmup = rows_at_its_end / max(rows_of_warmup(settings, settings.warmup_iters, self.ranks), 1)
        if self.clock is not None and self.clock.moved is not None:
            return settings.learning_rate * self.clock.moved.factor(progress.update) * min(1.0, warmup)
        return learning_rate(done, warmup, settings.learning_rate, settings.lr_schedule, settings.decay_share)

    # The rows of a mixture whose shares change over the run depend on its end, see trainer/pretrain/planned_end.py.

    def replan(self, progress: Progress) -> bool:
        return self.planned_end is not None and self.planned_end.replan(progress)

    def notice_of_rows(self) -> str | None:
        return None if self.planned_end is None else self.planned_end.notice()

    def trained(self, progress: Progress) -> list[tuple[str, int, float]]:
        return self.corpus.trained(progress.epoch, progress.row)

    def _clock(self, budget: str) -> Clock:
        """The clock of --budget."""
        settings = self.settings
        updates = settings.max_updates
        planned = Course(fall_from=updates - round(settings.decay_share * updates), end=updates)
        rows = rows_of_update(settings, self.ranks)
        evaluated = len(self.validation) * EVAL_ROWS if self.validation else 0
        steps = settings.accumulation_steps
        return Clock(
            seconds_of(budget),
            seconds_since_start(),
            planned,
            self.ranks,
            seconds_at_end=seconds_at_end(settings.report),
            samples=sample_seconds(self.config.num_hidden_layers, len(self.prompts)),
            evaluation=evaluation_share(settings.use_compile != "0") * evaluated / rows,
            # Without validation there are samples at the end alone.
            evaluation_every=max(1, settings.eval_interval // steps)
            if settings.eval_interval and self.validation
            else 0,
            most_updates=max(updates, self._most_updates()),
        )

    def _most_updates(self) -> float:
        """A machine that is faster than planned reads the text no more often than a plan does."""
        most_passes = laws.most_passes(self.settings.from_weight)
        first = self.plan(0)
        targets = first.row_targets(0, first.n_rows)
        # A pass over a mixture ends where one source is used up. Later passes bring other text of the others.
        different = laws.different_tokens(parts_of(self.corpus) or targets)
        most_rows = most_passes * first.n_rows * different / targets
        return int(most_rows / rows_of_update(self.settings, self.ranks))

    def kept(self) -> dict[str, float | None]:
        return {} if self.clock is None else self.clock.state_dict()

    def take_kept(self, kept: Mapping[str, float | None]) -> None:
        if self.clock is not None and kept:
            self.clock.load_state_dict(kept)

    def settings_to_keep(self) -> PretrainSettings:
        """Without the budget: the plan is in the other settings."""
        return replace(self.settings, budget=None, budget_tokens=None, budget_flops=None)

    def begin(self) -> None:
        if self.settings.has_budget:
            on_main(self.ranks, lambda: keep_plan(self.settings, self.ranks, self.stem))

    def expected_loss(self, tokens: int, rate: float) -> float | None:
        if self.forecast is None:
            return None
        return self.forecast.loss(tokens, rate / self.settings.learning_rate)

    def alarm(self, loss: float, expected: float | None) -> str | None:
        return self.loss_alarm.look(loss, expected)

    def metrics(self, sums: Sequence[float]) -> tuple[dict[str, Any], float]:
        return metrics(sums, self.config.num_experts)

    def evaluate(self, engine: Engine, signals: StopSignals, update: int) -> tuple[dict[str, float], int]:
        assert self.validation is not None
        return evaluate(engine, self.validation, signals)

    def samples(self, engine: Engine, signals: StopSignals, is_last: bool) -> tuple[list[tuple[str, str]], int]:
        return samples(engine, self.tokenizer, self.encoder, self.prompts, signals, self.settings.seed, is_last)

    def save_weights(self, weights: Mapping[str, torch.Tensor], update: int, is_last: bool) -> None:
        special_tokens = bool(self.settings.parse_special_tokens)
        save_weights(dict(weights), self.config.to_dict(), self.stem, self.vocabulary, special_tokens)

    # ---------------------------------------------------------------------------------------- what is said of it

    def outlook(self, progress: Progress) -> Outlook:
        settings, config = self.settings, self.config
        # Of epoch 0 whatever comes next: a resume decides on compiling as the first start did.
        first = self.corpus.plan(0)
        epochs = self._epochs(first)
        n_rows = rows_of_run(settings, self.ranks, first.n_rows, epochs, self.max_updates)
        # As if each row were one document, which is the most that it can cost: this decides on compiling.
        flops = flops_per_token(config, first.T) * n_rows * first.T / self.ranks.world_size
        trained = first.row_targets(0, first.n_rows)
        plan = self.corpus.plan(progress.epoch)
        self.forecast = self._forecast(first, flops)
        parameters = sum(p.numel() for p in self.model.parameters())
        return Outlook(
            plan=plan,
            lines=self._description(progress.epoch, plan, parameters),
            notices=self._notices(first, n_rows, parameters),
            model_fields={**config.to_diff_dict(), "parameters": parameters},
            n_documents=len(self.corpus.store),
            data_fields=self._data_fields(progress),
            # For the share of the product rate in the log: what a trained token of this corpus really needs.
            flops_per_token=flops_per_token(config, mean_context(first)) * (first.n_pairs / trained),
            flops=flops,
            epochs=epochs,
        )

    def _description(self, epoch: int, plan: RowPlan, parameters: int) -> list[str]:
        """Lines on the data and the model. plan: of the epoch."""
        settings, config = self.settings, self.config
        lines = [*self.corpus.notices, *self.corpus.mixture_report(epoch)]
        lines += self.corpus.cut_off_report(plan)
        if self.ranks.is_main:
            lines += leak_notices(self.corpus)
        for bad_lines in self.corpus.bad_lines:
            lines += bad_lines.report()
        lines += [
            f"model: {config.generation}, {parameters / 1e6:.2f} M parameters, "
            f"{counted(config.num_hidden_layers, 'layer')} of width {config.hidden_size}, "
            f"{flops_per_token(config, settings.max_seq_len) / 1e6:.1f} MFLOP per token (full rows)",
            f"data: {counted(len(self.corpus.store), self.document)}, "
            f"{counted(plan.row_targets(0, plan.n_rows), 'token')} to train in {counted(plan.n_rows, 'row')} of {plan.T} "
            f"({plan.fill:.1%} full)",
        ]
        return lines

    def _notices(self, first: RowPlan, n_rows: float, parameters: int) -> list[str]:
        """Lines on what a user may want to change. first: the plan of epoch 0. n_rows: of the run."""
        settings = self.settings
        # As the flags count them, rounded up: the last micro-batch may have fewer rows.
        rows_of_flags = settings.usual_rows() if self.asked.batch_size == AUTO_ROWS else self.asked.batch_size
        of_all_ranks = rows_of_flags * (1 if settings.rows_per_update else self.ranks.micro_batches_at_once)
        micro_batches = math.ceil(n_rows / of_all_ranks)
        run = SizeOfRun(
            parameters=parameters,
            tokens=n_rows * first.T * first.fill,
            rows=rows_of_update(settings, self.ranks),
            row_tokens=first.T * first.fill,
            ranks=self.ranks,
            device_type=self.device.type,
        )
        own_notices = [*self.tokenizer_notices, *self._note_on_special_tokens()]
        if self.encoder.eos_id is None:
            own_notices.append("warning: the tokenizer has no EOS, so no document tells the model where it ends")
        if self.precision_notice:
            own_notices.append(self.precision_notice)
        if run.tokens >= WORTH_A_NOTICE and not self.batch_notice:
            self.batch_notice = note_on_small(
                settings, self.config, first.n_rows, first.T, self.memory, self.free_memory
            )
        shards = self.shards.described if self.shards is not None else None
        for line in (shards, self.batch_notice, self.memory.warning()):
            if line:
                own_notices.append(line)
        return [*own_notices, *notices(self.asked, self.ranks, self.corpus, micro_batches, run)]

    def _note_on_special_tokens(self) -> list[str]:
        """A line where the texts spell special tokens, and nobody has said how to read these."""
        if self.settings.parse_special_tokens is not None or not self.ranks.is_main:
            return []
        return note_on_spelt_tokens(self.corpus.stores, self.tokenizer)

    def _forecast(self, first: RowPlan, flops: float) -> Forecast | None:
        """What the run may expect; None where no law is known for it, and for a run of seconds."""
        is_known = self.settings.from_weight == "none" and not self.config.use_moe
        if not is_known or not self.ranks.is_main or flops < SHORT_RUN_FLOPS:
            return None
        return Forecast(
            parameters=parameter_count(self.config),
            depth=laws.Depth(self.config.num_hidden_layers, self.config.num_attention_heads),
            unique=parts_of(self.corpus) or first.row_targets(0, first.n_rows),
            T=first.T,
            text_scale=text_scale(self.corpus.store, self.tokenizer, self.bytes_per_token),
            muon=self.settings.optimizer == "muon",
        )

    def _epochs(self, first: RowPlan) -> int:
        """Those that the run takes. first: the plan of epoch 0; the others have about as many rows."""
        if not self.settings.max_updates:
            return self.epochs
        if self.corpus.planned is not None:
            return 1
        return epochs_of_updates(self.settings.max_updates, self.settings, self.ranks, first.n_rows)

    def goal(self, progress: Progress, epochs: int) -> tuple[str, str]:
        if self.corpus.planned is not None and not self.settings.max_updates:
            # Another number of passes would be another plan from the first row on.
            return f"{counted(progress.update, 'update')}, the whole of its mixture", ""
        if self.settings.budget:
            # The clock has set the end, and a plan is for one budget.
            return f"{counted(progress.update, 'update')} of --budget {self.settings.budget}", ""
        if self.settings.max_updates:
            return counted(self.settings.max_updates, "update"), "--max_updates"
        return super().goal(progress, epochs)

    @cached_property
    def bytes_per_token(self) -> float:
        """Of the texts. To count those of a large corpus takes a while."""
        return self.corpus.bytes_per_token(self.encoder.added_tokens)

    def _data_fields(self, progress: Progress) -> dict[str, object]:
        """What the metrics say of the data. Only the main rank writes them, and the bytes of a large corpus take a while."""
        if not self.ranks.is_main:
            return {}
        fields: dict[str, object] = {
            "sources": self.corpus.sources_of_epoch(progress.epoch),
            "bytes_per_token": self.bytes_per_token,
        }
        if self.validation is not None:
            assert self.corpus.val_documents is not None
            fields["compressors"] = compressed(self.validation.store, self.corpus.val_documents, self.tokenizer)
        return fields

    def _weight_flags(self) -> str:
        """What the scripts are told of the run."""
        flags = "--weight {stem}.pth"
        # They take the repository's own tokenizer unless they are told of another.
        if self.tokenizer_path != DEFAULT_TOKENIZER:
            flags += f" --tokenizer_path {shlex.quote(self.tokenizer_path)}"
        return flags

    def next_commands(self) -> list[NextCommand]:
        weight = self._weight_flags()
        measure = f"python {{top}}scripts/evaluate.py perplexity {weight} --data_path my.txt"
        return [
            NextCommand("continue texts, chat", f"python {{top}}scripts/generate.py {weight}"),
            NextCommand("the same on a page in your browser", f"python {{top}}scripts/play.py {weight}"),
            NextCommand("measure", measure),
            NextCommand("export to Hugging Face", f"python {{top}}scripts/export_hf.py {weight} --out_dir {{stem}}_hf"),
        ]

    def make_fast(self, outlook: Outlook) -> list[str]:
        # A plan has looked at it already.
        said = [] if self.settings.has_budget else notes_on_precision(self.device, self.dtype, outlook.flops)
        on_gpu = self.device.type == "cuda"
        rows = self._most_rows(self.plan(0)) if on_gpu else self.ranks.rows_of(self.settings.batch_size)
        shape = (rows, outlook.plan.T)
        choice = self.settings.use_compile
        width = self.config.hidden_size
        compile_blocks(self.model, choice, self.device, said.append, shape, outlook.flops, self.dtype, width=width)
        if on_gpu and self.model.compiled_backend is not None:
            # The last micro-batch of an epoch has fewer rows. Filled up it takes the compiled code too. The plain code's
            # attention may add up in any order in its backward pass there, so that a resume would end with other bits.
            self.assembler = self.corpus.assembler(self.pad_id, rows)
        return said
