"""Pretraining of a MiniMind as a Job: data, model, loss, learning rate and files, in the order of their creation."""

import glob
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch

from common.wording import counted
from dataset.corpus import Corpus
from dataset.packing import RowPlan
from model.config import ARCHITECTURE, DECLARATIONS, record_of
from model.weight_record import ROW_LENGTH_FIELD
from trainer.cuda_graphs import may_record
from trainer.engine import Engine, Update, make_engine
from trainer.evaluation import Sampler, evaluate
from trainer.forecast import Forecast
from trainer.job import UNLIMITED, Evaluation, Identity, Job, Length, Progress, RunFiles, RunOverview
from trainer.machine.command_line import StopSignals
from trainer.machine.compiling import compile_blocks
from trainer.machine.devices import seed_everything
from trainer.optim.schedules import SCHEDULES, wsd
from trainer.pretrain.data import DOCUMENTS, TextKind
from trainer.pretrain.loss import n_sums, pretrain_loss
from trainer.pretrain.overview import pretraining_overview
from trainer.pretrain.parts import Parts
from trainer.pretrain.sampled_head import HeadSampler, rows_targets
from trainer.pretrain.settings import PretrainSettings
from trainer.saving.weights import kept_tokenizer, save_pth
from trainer.settings import NONE


class PretrainJob(Job):
    """train_pretrain.py's part of a run, made of the parts that `open_run` has opened. The Trainer calls it, see trainer/job.py.

    Another job on the same parts overrides what differs: the loss with `n_sums` and `metrics`, `evaluate`, `weight_record`.
    """

    settings: PretrainSettings

    # Documents or conversations, and where they are stored (data.py)
    kind: ClassVar[TextKind] = DOCUMENTS
    # (plan of epoch 0, overview) -> (lines for the user, the forecast), set by the command
    advise: Callable[[RowPlan, RunOverview], tuple[list[str], Forecast | None]] | None = None

    def __init__(self, parts: Parts) -> None:
        settings, ranks, corpus = parts.settings, parts.ranks, parts.corpus
        self.parts = parts
        self.settings = settings
        self.batching = parts.batching
        self.corpus = corpus
        self.model = parts.model
        self.config = parts.model.config
        # None: the loss computes all ids.
        self.head_sampler = None
        if settings.sampled_softmax:
            self.head_sampler = HeadSampler(
                rows_targets(corpus),
                self.config.vocab_size,
                settings.sampled_softmax,
                settings.seed,
                tells=ranks.is_main,
            )
            # Gradients of the embedding, and of the head tied to it, have only the rows that an update uses.
            self.model.model.embed_tokens.sparse = parts.device.type == "cpu" and settings.shard == NONE
        self.files = RunFiles(
            parts.stem,
            outputs={"weights": Path(f"{parts.stem}.pth"), "config": Path(f"{parts.stem}.json")},
            settings=settings,
            write_at_start=kept_tokenizer(parts.tokenizer, parts.stem),
            # Version 1.0 kept plans in a file of their own.
            stale_patterns=[f"{glob.escape(parts.stem.name)}.{kind}" for kind in ("best.*", "plan.yaml")],
        )
        # From here on ranks draw different random numbers (dropout).
        seed_everything(settings.seed, ranks.rank)
        self.identity = identity_of(parts)
        self.engine = make_engine(
            self.model,
            self.loss,
            settings,
            n_sums=self.n_sums,
            identity={**self.identity.entries, "validation data": corpus.validation_fingerprint},
            shard=settings.shard,
            cuda_graphs=may_record(
                settings.cuda_graphs != "0" and not settings.sampled_softmax,
                parts.device,
                ranks,
                parts.dtype,
                settings.gradient_checkpointing,
                self.config.dropout,
            ),
            dtype=parts.dtype,
            ranks=ranks,
            device=parts.device,
        )
        self.assembler = corpus.assembler()
        self.evaluation = Evaluation(
            evaluate=self.evaluate if parts.validation else None,
            eval_interval=settings.eval_interval,
            save_best=self.write_weights,
            data=corpus.validation_fingerprint,
        )
        if parts.prompts:
            # The answer to a question is shown without it.
            with_prompt = not corpus.trains_answers
            self.evaluation.samples = Sampler(
                parts.tokenizer, parts.encoder, parts.prompts, settings.seed, with_prompt=with_prompt
            )
        self.length = length_of_run(settings, corpus, self.batching.rows)

    # ----------------------------------------------------------------------------------------- the loss, and its sums

    def loss(self, batch: Any, totals: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """The objective of an update, see trainer/engine.py."""
        return pretrain_loss(self.model, batch, totals, self.head_sampler)

    @property
    def n_sums(self) -> int:
        """Length of the sums that `loss` returns."""
        return n_sums(self.config)

    # ------------------------------------------------------------------------------------------ what the Trainer asks

    def plan(self, epoch: int) -> RowPlan:
        return self.corpus.plan(epoch)

    def overview(self, progress: Progress) -> RunOverview:
        # Always epoch 0: a resume decides on compiling as the first start did.
        first_plan = self.corpus.plan(0)
        overview = pretraining_overview(
            self.parts,
            first_plan,
            # One plan may be the whole run, where shares change.
            epoch=0 if self.corpus.is_one_plan else progress.epoch,
            epochs=self.length.epochs,
        )
        lines: list[str] = []
        if self.advise is not None:
            lines, overview.forecast = self.advise(first_plan, overview)
        overview.notices = [*self.parts.notices, *overview.notices, *lines]
        if self.settings.cuda_graphs == "1" and self.engine.graphs is None:
            overview.notices.append("warning: --cuda_graphs 1 has no effect here (docs/gpu.md lists the cases)")
        return overview

    def compile_model(self, overview: RunOverview) -> list[str]:
        """Compile the model if that pays off, and use an assembler whose batches suit it. Returns lines to print."""
        settings = self.settings
        dtype, is_gpu = self.engine.dtype, self.parts.device.type == "cuda"
        rows = self.batching.micro_rows
        if is_gpu:
            # rows of the largest micro-batch: a small epoch has fewer
            rows = min(rows, overview.plan.n_rows)
        shape, width = (rows, overview.plan.T), self.config.hidden_size
        notices = compile_blocks(
            self.model.compile_training, settings.use_compile, self.parts.device, shape, overview.flops, dtype, width
        )
        if is_gpu and (self.model.compiled_backend is not None or self.engine.graphs is not None):
            # The last micro-batch of an epoch has fewer rows; padded, it runs the compiled code too. The backward pass of
            # eager attention may add up in any order on a GPU, so a resume would end with other bits. Beside a CUDA graph, whose
            # memory nothing else can use, another shape would need room for its activations once more.
            self.assembler = self.corpus.assembler(rows)
        return notices

    def learning_rate(self, update: Update, progress: Progress) -> float:
        settings = self.settings
        # Counted to the end of the update: the first one would otherwise have a rate of 0. flag_rows: a micro-batch as flags count it.
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

    def evaluate(self, engine: Engine, signals: StopSignals, update: int) -> tuple[dict[str, float], int]:
        assert self.parts.validation is not None
        return evaluate(engine, self.parts.validation, signals)

    def save_weights(self, weights: Mapping[str, torch.Tensor], update: int, is_last: bool) -> None:
        self.write_weights(self.files.stem, weights)

    def write_weights(self, stem: Path, weights: Mapping[str, torch.Tensor]) -> None:
        """`{stem}.pth` and `{stem}.json`."""
        special_tokens = bool(self.settings.parse_special_tokens)
        save_pth(dict(weights), self.weight_record(), stem, self.parts.vocabulary, special_tokens)

    def weight_record(self) -> dict[str, Any]:
        """What the .json beside the weights says about them, besides their tokenizer."""
        return {**record_of(self.config), ROW_LENGTH_FIELD: self.settings.max_seq_len}

    def trained(self, progress: Progress) -> Sequence[tuple[str, int, float]]:
        if sources := self.corpus.tokens_of_sources(progress.epoch, progress.row):
            return sources
        of_last_pass = progress.row / self.corpus.plan(progress.epoch).n_rows if progress.row else 0.0
        return [("the text", progress.tokens, progress.epoch + of_last_pass)]


def identity_of(parts: Parts) -> Identity:
    """What a resume must share with its run."""
    settings, encoder, config, corpus = parts.settings, parts.encoder, parts.model.config, parts.corpus
    # that changing shares are laid out for; "": epochs, which are in the row layout
    length_of_mixture = ""
    if settings.max_updates and corpus.shares_change:
        length_of_mixture = f"{counted(settings.max_updates, 'update')} of {counted(parts.batching.rows, 'row')}"
    return Identity(
        entries={
            # The first difference is reported. This entry comes first, since it changes the tokenizer's fingerprint too.
            "reading of special tokens": encoder.parse_special_tokens,
            "tokenizer": encoder.fingerprint[:16],
            "data": corpus.fingerprint[:16],  # as this tokenizer reads it
            "architecture": {name: getattr(config, name) for name in ARCHITECTURE},
            "row layout": corpus.layout(),
            "length of the mixture": length_of_mixture,
            "optimizer": settings.optimizer,
        },
        defaults={"architecture": {name: DECLARATIONS[name]["defaults"][config.generation] for name in ARCHITECTURE}},
        flags_to_check={
            "data": corpus.data_flags,
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


def length_of_run(settings: PretrainSettings, corpus: Corpus, update_rows: int) -> Length:
    """The length of a run, by its flags."""
    length = Length(settings.epochs, settings.max_updates or UNLIMITED)
    if settings.max_updates:
        length.flag = "--max_updates"
    if corpus.is_one_plan:
        # All passes over all sources are one plan.
        length.epochs = 1
        length.rows_of_epoch = settings.max_updates * update_rows
    if corpus.shares_change or (corpus.is_one_plan and not settings.max_updates):
        # No flag makes such a run longer: a mixture of another length has other rows from the first on.
        length.flag = ""
    return length
