"""Pretraining of a MiniMind as a Job: data, model, loss, learning rate and files, in the order of their creation."""

import glob
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch

from common.errors import user_errors
from dataset.packing import RowPlan
from model.config import ARCHITECTURE, DECLARATIONS
from model.weight_record import ROW_LENGTH_FIELD
from trainer.batching import Batching
from trainer.cuda_graphs import can_be_recorded
from trainer.engine import Update, make_engine
from trainer.evaluation import Sampler, evaluate, read_prompts
from trainer.job import Evaluation, Forecast, Identity, Job, Progress, RunContext, RunFiles, RunOverview
from trainer.launch import lock_files
from trainer.machine.compiling import compile_blocks
from trainer.machine.devices import pick_dtype, seed_everything
from trainer.optim.schedules import SCHEDULES, wsd
from trainer.pretrain.data import DOCUMENTS, TextKind, length_of_mixture, length_of_run, open_data
from trainer.pretrain.initial_model import open_model
from trainer.pretrain.loss import n_sums, pretrain_loss
from trainer.pretrain.memory import free_memory, resolve_batch_size
from trainer.pretrain.overview import pretraining_overview
from trainer.pretrain.settings import PretrainSettings
from trainer.saving.weights import save_pth


class PretrainJob(Job):
    """train_pretrain.py's part of a run.

    The constructor opens everything that can fail, quick steps first: prompts, tokenizer and model, the run's files, and the
    data, which a first run tokenises. Then it chooses a batch size and builds the engine. The Trainer calls the methods,
    see trainer/job.py.
    Errors: UserError, in one line, for flags that do not fit.
    """

    settings: PretrainSettings

    # Documents or conversations, and where they are stored (data.py)
    kind: ClassVar[TextKind] = DOCUMENTS
    # (job, plan of epoch 0, overview) -> (lines for the user, the expected loss), set by the command
    advise: Callable[["PretrainJob", RowPlan, RunOverview], tuple[list[str], Forecast | None]] | None = None

    def __init__(self, settings: PretrainSettings, run_context: RunContext) -> None:
        ranks, device = run_context.ranks, run_context.device
        self.ranks = ranks
        self.device = device
        # lines for the user
        dtype, self.notices = pick_dtype(settings.dtype, device)
        # measured before the model is on the device
        free = free_memory(device, ranks)
        # The same seed on all ranks, so that all start with the same weights.
        seed_everything(settings.seed)
        with user_errors():
            self.prompts = read_prompts(settings.sample_prompts)
            # Tokenizer and model. A folder of --from_weight sets some of the settings.
            self.initial_model = open_model(settings, self.kind.make_encoder, ranks, device)
            self.notices += self.initial_model.notices
            settings = self.initial_model.settings
            self.model = self.initial_model.model
            self.config = self.model.config

            # The run's files. From here on no other run may write them.
            stem = settings.stem(self.config.hidden_size, self.config.use_moe)
            lock_files(ranks, stem)

            # The data, and the loss of a batch
            self.corpus = open_data(settings, self.initial_model, self.kind, ranks)
            self.model.train()

            # From here on --batch_size is a number.
            settings, lines = resolve_batch_size(settings, stem, self.model, self.corpus, dtype, device, ranks, free)
            self.notices += lines
        self.settings = settings
        self.batching = Batching.of(settings, ranks)

        self.files = RunFiles(
            stem,
            outputs={"weights": Path(f"{stem}.pth"), "config": Path(f"{stem}.json")},
            settings=settings,
            stale_patterns=[f"{glob.escape(stem.name)}.best.*"],
        )

        # From here on ranks draw different random numbers (dropout).
        seed_everything(settings.seed, ranks.rank)
        encoder = self.initial_model.encoder
        self.identity = Identity(
            entries={
                # The first difference is reported. This entry comes first, since it changes the tokenizer's fingerprint too.
                "reading of special tokens": encoder.parse_special_tokens,
                "tokenizer": encoder.fingerprint[:16],
                "data": self.corpus.fingerprint[:16],  # as this tokenizer reads it
                "architecture": {name: getattr(self.config, name) for name in ARCHITECTURE},
                "row layout": self.corpus.layout(),
                "length of the mixture": length_of_mixture(settings, self.corpus, self.batching.rows),
                "optimizer": settings.optimizer,
            },
            defaults={
                "architecture": {name: DECLARATIONS[name]["defaults"][self.config.generation] for name in ARCHITECTURE}
            },
            flags_to_check={
                "data": self.kind.data_flags,
                # entries of layout(), see flatten_facts
                "row layout shares": "--data_path, --mixture",
                "row layout repeats": "--data_path, --mixture",
                "tokenizer": "--tokenizer_path",
                "reading of special tokens": "--parse_special_tokens",
                "length of the mixture": "--max_updates, --rows_per_update",
            },
            # They only set the initial weights. A resume loads those of its checkpoint.
            ignored_on_resume=("from_weight", "init_scheme"),
        )
        self.engine = make_engine(
            self.model,
            partial(pretrain_loss, self.model),
            settings,
            n_sums=n_sums(self.config),
            identity={**self.identity.entries, "validation data": self.corpus.validation_fingerprint},
            shard=settings.shard,
            allows_cuda_graphs=can_be_recorded(
                device, ranks, dtype, settings.gradient_checkpointing, self.config.dropout
            ),
            cuda_graphs=settings.cuda_graphs != "0",
            dtype=dtype,
            ranks=ranks,
            device=device,
        )
        if settings.cuda_graphs == "1" and self.engine.graphs is None:
            self.notices.append("warning: --cuda_graphs 1 has no effect here (docs/gpu.md lists the cases)")
        self.assembler = self.corpus.assembler()
        # Reads all tokens in a thread. One rank per machine is enough: its ranks read the same files.
        self.digest_check = self.corpus.digest_check() if ranks.local_rank == 0 else None

        # Evaluations, and where the run ends
        self.validation = validation = self.corpus.validation()
        self.evaluation = Evaluation(
            eval_interval=settings.eval_interval,
            save_best=self.write_weights,
            data=self.corpus.validation_fingerprint,
        )
        if validation:
            self.evaluation.evaluate = lambda engine, signals, update: evaluate(engine, validation, signals)
        if self.prompts:
            self.evaluation.samples = Sampler(
                self.initial_model.tokenizer,
                encoder,
                self.prompts,
                settings.seed,
                with_prompt=not self.kind.trains_answers,
            )
        self.length = length_of_run(settings, self.corpus, self.batching.rows)

    # ------------------------------------------------------------------------------------------ what the Trainer asks

    def plan(self, epoch: int) -> RowPlan:
        return self.corpus.plan(epoch)

    def overview(self, progress: Progress) -> RunOverview:
        # Always epoch 0: a resume decides on compiling as the first start did.
        first_plan = self.corpus.plan(0)
        overview = pretraining_overview(
            self.settings,
            self.initial_model,
            self.corpus,
            first_plan,
            self.batching,
            # A run that is one plan is described as a whole.
            epoch=0 if self.corpus.is_one_plan else progress.epoch,
            epochs=self.length.epochs,
            answers=self.kind.trains_answers,
        )
        lines: list[str] = []
        if self.advise is not None:
            lines, overview.forecast = self.advise(self, first_plan, overview)
        overview.notices = [*self.notices, *overview.notices, *lines]
        return overview

    def compile_model(self, overview: RunOverview) -> list[str]:
        """Compile the model if that pays off, and use an assembler whose batches suit it. Returns lines to print."""
        settings = self.settings
        dtype, is_gpu = self.engine.dtype, self.device.type == "cuda"
        rows = self.batching.micro_rows
        if is_gpu:
            # rows of the largest micro-batch: a small epoch has fewer
            rows = min(rows, overview.plan.n_rows)
        shape, width = (rows, overview.plan.T), self.config.hidden_size
        notices = compile_blocks(
            self.model.compile_training, settings.use_compile, self.device, shape, overview.flops, dtype, width
        )
        if is_gpu and (self.model.compiled_backend is not None or self.engine.graphs is not None):
            # The last micro-batch of an epoch has fewer rows; padded, it runs the compiled code too. The backward pass of
            # eager attention may add up in any order on a GPU, so a resume would end with other bits. Beside a CUDA graph, whose
            # memory nothing else can use, another shape would need room for its activations once more.
            self.assembler = self.corpus.assembler(rows)
        return notices

    def learning_rate(self, update: Update, progress: Progress) -> float:
        settings = self.settings
        # Counted to the end of the update: the first one would otherwise have a rate of 0.
        rows_at_its_end = update.epoch * update.n_rows + update.end_row
        warmup = rows_at_its_end / max(settings.warmup_iters * self.batching.flag_rows, 1)
        # The clock of a --budget, once it has moved the end of the run
        factor = self.length.clock.factor(progress.update) if self.length.clock else None
        if factor is None:
            if settings.max_updates:
                done = progress.update / settings.max_updates
            else:
                # Progress in rows, not updates: with another batch size or number of ranks the rate ends at the same value.
                done = (update.epoch + update.first_row / update.n_rows) / self.length.epochs
            is_wsd = settings.lr_schedule == "wsd"
            factor = wsd(done, settings.decay_share) if is_wsd else SCHEDULES[settings.lr_schedule](done)
        # The order of the factors decides the last bit of the rate.
        progress.is_warm |= warmup >= 1
        return settings.learning_rate * factor * (1.0 if progress.is_warm else warmup)

    def metrics(self, sums: Sequence[float]) -> tuple[dict[str, Any], float]:
        """expert_load: share of the routed tokens that each expert got, mean over the layers; expert_load_max: the largest
        share in any layer (1 / num_experts where the load is even)."""
        cross_entropy, aux_loss, targets, documents, *slots = sums
        # All updates since the last line were skipped.
        if not targets:
            return {"loss": math.nan, "aux_loss": math.nan}, 0
        values: dict[str, Any] = {"loss": cross_entropy / targets, "aux_loss": aux_loss / documents}
        if slots:
            by_layer = torch.tensor(slots, dtype=torch.float64).view(-1, self.config.num_experts)
            load = by_layer / by_layer.sum(1, keepdim=True).clamp(min=1)
            values["expert_load"] = load.mean(0).tolist()
            values["expert_load_max"] = load.max().item()
        return values, targets

    def save_weights(self, weights: Mapping[str, torch.Tensor], update: int, is_last: bool) -> None:
        self.write_weights(self.files.stem, weights)

    def write_weights(self, stem: Path, weights: Mapping[str, torch.Tensor]) -> None:
        """`{stem}.pth` and `{stem}.json`."""
        special_tokens = bool(self.settings.parse_special_tokens)
        save_pth(dict(weights), self.weight_record(), stem, self.initial_model.vocabulary, special_tokens)

    def weight_record(self) -> dict[str, Any]:
        """What the .json beside the weights says about them, besides their tokenizer."""
        return {**self.config.to_dict(), ROW_LENGTH_FIELD: self.settings.max_seq_len}

    def trained(self, progress: Progress) -> Sequence[tuple[str, int, float]]:
        return self.corpus.tokens_of_sources(progress.epoch, progress.row)
