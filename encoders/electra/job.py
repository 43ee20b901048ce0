"""ELECTRA pretraining: the parts of a run, and the Job made of them: loss, learning rate, files, evaluation and samples."""

import math
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import ElectraConfig, ElectraModel, PreTrainedTokenizerBase
from transformers.utils.logging import disable_progress_bar

from common.errors import UserError, library_errors, user_errors
from common.files import atomic_folder, read_object
from common.start import next_command
from common.wording import announce, counted
from dataset.corpus import Corpus
from dataset.embedded_corpus import build_embedded_corpus
from dataset.loader import to_device
from dataset.reading.file_kinds import expand_user
from dataset.shares import Source
from dataset.tokenizing.sample import draw_sample
from dataset.tokenizing.wordpiece import save_wordpiece, train_wordpiece
from encoders.electra.examples import Batch, ElectraAssembler, ElectraPlan, Examples, LineEncoder, Totals
from encoders.electra.networks import NETWORKS, ElectraPretrainer, Output, non_padding
from encoders.electra.settings import WARM_UP, ElectraSettings, batch_size_of
from encoders.schedules import ENCODER_SCHEDULES
from encoders.vocabulary import load_wordpiece, return_segments
from model.config import IGNORE
from trainer.advice import common_warnings, warnings_of
from trainer.batching import Batching
from trainer.engine import Engine, Update, make_engine
from trainer.evaluation import evaluation_mode, sums_over_batches
from trainer.job import Evaluation, Identity, Job, Length, Progress, RunContext, RunFiles, RunOverview
from trainer.launch import lock_files
from trainer.machine.command_line import StopSignals
from trainer.machine.compiling import compile_blocks
from trainer.machine.devices import pick_dtype, seed_everything
from trainer.machine.ranks import Ranks, first_rank_first, on_main, wait_for_all_ranks
from trainer.saving.checkpoint import file_of_resumed_run

# folder and number of entries of the vocabulary that is trained if none is given
VOCABULARY = "vocabulary"
VOCABULARY_ENTRIES = 8192
# bytes of text that it is trained on
SAMPLE_BYTES = 60e6
# Seed of the validation's examples, masks and draws: fixed, so that runs with the same --eval_batch_size compare.
VAL_SEED = 0
# config fields that may differ at a resume
NOT_COMPARED = ("_name_or_path", "architectures", "dtype", "initializer_range", "transformers_version")
# weight of the discriminator's loss, as published
DISC_WEIGHT = 50.0
# Equal bins of the discriminator's logit from -MAX_LOGIT to MAX_LOGIT; the outer ones include what is beyond.
# Logits, not probabilities: few tokens are replaced, so most probabilities are near 0, where bins of a logit are small.
AUC_BINS = 200
MAX_LOGIT = 10.0
N_SUMS = 4 + 2 * AUC_BINS
VAL_METRICS = ("loss", "mlm_loss", "disc_loss", "gen_acc", "disc_acc", "disc_auc")


@dataclass(frozen=True)
class Parts:
    """What a run is made of. dtype: of matrix products. notices: lines for the user. stem: path of the run's files without suffix.
    examples: of the training documents. held_out: of the validation documents; None: there are none.
    """

    settings: ElectraSettings
    run_context: RunContext
    dtype: torch.dtype
    notices: list[str]
    stem: Path
    tokenizer: PreTrainedTokenizerBase
    encoder: LineEncoder
    corpus: Corpus
    model: ElectraPretrainer
    examples: Examples
    held_out: Examples | None


def open_run(settings: ElectraSettings, run_context: RunContext) -> Parts:
    """As open_run in trainer/pretrain/parts.py. A collective. Errors: UserError, in one line, for flags that do not fit."""
    ranks = run_context.ranks
    dtype, notices = pick_dtype(settings.dtype, run_context.device)
    if settings.batch_size and settings.rows_per_update:
        # The number of micro-batches follows.
        notices += warnings_of(settings, {"accumulation_steps": "--batch_size and --rows_per_update are given"})
    settings.batch_size = batch_size_of(settings, ranks.batches_at_once)
    with user_errors():
        folder = Path(settings.out_dir) / f"electra_{settings.size}"
        stem = folder / folder.name
        lock_files(ranks, stem, sized=True)
        if settings.seed is None:
            settings.seed = on_main(ranks, lambda: draw_seed(settings, stem))
        seed_everything(settings.seed)
        data_path = settings.data_path or [str(build_embedded_corpus())]
        tokenizer = open_vocabulary(settings, data_path, stem, ranks)
        encoder = LineEncoder(tokenizer)
        # Training and held-out text. The plans of a Corpus are for language models and not used here.
        tokenise = partial(Corpus.of, settings, [Source(data_path)], encoder, progress=ranks.is_main)
        corpus = first_rank_first(ranks, tokenise)
        model = init_model(settings, tokenizer)
        # Saved with the networks, so that a pipeline knows where to truncate a long text.
        tokenizer.model_max_length = model.discriminator.config.max_position_embeddings
        # Pretraining gives the second part of a pair another type.
        return_segments(tokenizer)
        T, sep, unknown = settings.max_seq_len, encoder.sep_id, tokenizer.unk_token_id
        held_out = None
        # Building examples reads all tokens.
        with wait_for_all_ranks(ranks):
            examples = Examples(corpus.store, T, sep, settings.seed, unknown, corpus.documents)
            if corpus.val_store is not None and corpus.val_documents is not None:
                held_out = Examples(corpus.val_store, T, sep, VAL_SEED, unknown, corpus.val_documents)
    return Parts(settings, run_context, dtype, notices, stem, tokenizer, encoder, corpus, model, examples, held_out)


class ElectraJob(Job):
    """train_electra.py's part of a run, made of the parts that `open_run` has opened."""

    settings: ElectraSettings
    model: ElectraPretrainer

    def __init__(self, parts: Parts) -> None:
        settings, ranks, corpus = parts.settings, parts.run_context.ranks, parts.corpus
        self.parts = parts
        self.settings = settings
        self.batching = Batching.of(settings, ranks)
        self.model = parts.model
        self.folder = parts.stem.parent
        self.files = RunFiles(
            parts.stem,
            {name: self.folder / name for name in NETWORKS},
            settings,
            # A newly trained vocabulary is written before the first update.
            write_at_start={self.folder / VOCABULARY: self._write_vocabulary},
            # intermediate networks of an earlier run
            stale_patterns=["percent_*", "checkpoint-*[0-9]"],
        )
        self.length = Length(max_updates=settings.max_steps, flag="--max_steps")
        masking = parts.tokenizer, settings.max_seq_len, settings.mask_share, settings.mask_style
        self.assembler = ElectraAssembler(corpus.store, *masking, settings.seed)
        # Held-out documents in the order of the data, with fixed masks
        self.val_plan: ElectraPlan | None = None
        if parts.held_out is not None and corpus.val_store is not None:
            self.val_plan = ElectraPlan(parts.held_out, settings.mask_share, VAL_SEED, 0, shuffle=False)
            self.val_assembler = ElectraAssembler(corpus.val_store, *masking, VAL_SEED)
        self.identity = identity_of(parts)
        # From here on each rank has other random numbers (dropout).
        seed_everything(settings.seed, ranks.rank)
        self.engine = make_engine(
            self.model,
            self.loss,
            settings,
            n_sums=N_SUMS,
            identity={**self.identity.entries, "validation data": corpus.validation_fingerprint},
            shard=settings.shard,
            dtype=parts.dtype,
            ranks=ranks,
            device=parts.run_context.device,
            eps=settings.adam_epsilon,
            bias_correction=settings.adam_bias_correction,
        )
        # {update: percent} of --save_percents, the end included; and the updates of --save_steps
        n, every = settings.max_steps, settings.save_steps
        self.percents = {max(1, round(n * percent / 100)): percent for percent in (*settings.save_percents, 100.0)}
        self.checkpoint_updates = range(every, n + 1, every) if every else range(0)
        self.files.save_at = {*self.percents, *self.checkpoint_updates}
        self.evaluation = Evaluation(
            evaluate=self.evaluate if self.val_plan is not None else None,
            eval_interval=settings.eval_interval,
            samples=self.samples if settings.example_interval else None,
            sample_interval=settings.example_interval,
            counts_updates=True,
            data=corpus.validation_fingerprint,
        )

    # ------------------------------------------------------------------------------------------------- training

    def plan(self, epoch: int) -> ElectraPlan:
        return ElectraPlan(self.parts.examples, self.settings.mask_share, self.settings.seed, epoch)

    def loss(self, batch: Batch, totals: Totals) -> tuple[torch.Tensor, torch.Tensor]:
        """(a micro-batch's part of the update's loss, 0-d; the sums to accumulate, see `sums_of`)."""
        output = self.model(*batch)
        loss = output.mlm / max(totals.masked, 1) + DISC_WEIGHT * output.disc / max(totals.targets, 1)
        return loss, sums_of(output, batch)

    def learning_rate(self, update: Update, progress: Progress) -> float:
        settings = self.settings
        warmup = settings.warmup_steps
        if warmup is None:
            warmup = min(WARM_UP, settings.max_steps // 10)
        schedule = ENCODER_SCHEDULES[settings.lr_schedule]
        return settings.learning_rate * schedule(progress.update, settings.max_steps, warmup)

    @staticmethod
    def metrics(sums: Sequence[float]) -> tuple[dict[str, Any], float]:
        """(metrics to log, positions) from the sums of `sums_of`. Precision and recall refer to replaced tokens."""
        mlm, disc, masked, correct = sums[:4]
        original, replaced = torch.tensor(sums[4:], dtype=torch.float64).view(2, AUC_BINS)
        n_original, n_replaced = float(original.sum()), float(replaced.sum())
        positions = n_original + n_replaced
        # All updates since the last line were skipped.
        if not positions:
            return {"loss": math.nan}, 0
        # A token counts as replaced if its probability is 0.5 or more.
        false_alarms, hits = (float(counts[AUC_BINS // 2 :].sum()) for counts in (original, replaced))
        # Area under the curve: the fraction of pairs in which a replaced token is rated higher than an original one;
        # ties, in one bin, count half.
        pairs = n_original * n_replaced
        below = original.cumsum(0) - original / 2
        auc = float((replaced * below).sum()) / pairs if pairs else math.nan
        mlm_loss = mlm / max(masked, 1)
        disc_loss = disc / positions
        values = {
            "loss": mlm_loss + DISC_WEIGHT * disc_loss,
            "mlm_loss": mlm_loss,
            "disc_loss": disc_loss,
            "gen_acc": correct / max(masked, 1),
            "disc_acc": (hits + n_original - false_alarms) / positions,
            "disc_precision": hits / max(hits + false_alarms, 1),
            "disc_recall": hits / max(n_replaced, 1),
            "disc_auc": auc,
        }
        return values, positions

    @torch.no_grad()
    def evaluate(self, engine: Engine, signals: StopSignals, update: int) -> tuple[dict[str, float], int]:
        """({val_{metric}: value} of held-out examples, number of a stop signal received meanwhile, or 0), the same on
        every world size."""
        plan, size = self.val_plan, self.settings.eval_batch_size
        assert plan is not None

        def sums_of_batch(number: int) -> list[float]:
            rows = range(number * size, min((number + 1) * size, plan.n_rows))
            batch = to_device(self.val_assembler[plan.recipe(rows)], engine.device)
            # Sampling depends only on the batch.
            torch.manual_seed(VAL_SEED + number)
            with engine.autocast():
                sums: list[float] = sums_of(self.model(*batch), batch).tolist()
            return sums

        n_batches = math.ceil(plan.n_rows / size)
        sums, stop_request = sums_over_batches(engine, n_batches, sums_of_batch, N_SUMS, signals)
        values, _ = self.metrics(sums)
        return {f"val_{name}": values.get(name, math.nan) for name in VAL_METRICS}, stop_request

    @torch.no_grad()
    def samples(self, engine: Engine, signals: StopSignals) -> tuple[list[tuple[str, str]], int]:
        """([(first example of the first epoch, report)], 0). The report: the example, the generator's version of it,
        and label and prediction of each token that was masked or is predicted as replaced.

        All ranks compute it: a sharded model needs all of them. It is so short that a stop signal waits for the next update.
        """
        batch = to_device(self.assembler[self.plan(0).recipe(range(1))], engine.device)
        with evaluation_mode(engine), engine.autocast():
            # The same random numbers each time, so that only the networks change.
            torch.manual_seed(VAL_SEED)
            output = self.model(*batch)
        length = int(batch.lengths[0])
        ids, corrupted, replaced = (row[0, :length].tolist() for row in (batch.ids, output.corrupted, output.replaced))
        probabilities = output.disc_logits[0, :length].float().sigmoid().tolist()
        masked = batch.positions[0][batch.labels[0] != IGNORE].tolist()
        tokenizer = self.parts.tokenizer
        original, written = map(tokenizer.convert_ids_to_tokens, (ids, corrupted))
        line = "{:<9} {:<16} {:<16} {:<9} {:<10} {}".format
        text = str(tokenizer.decode(ids))
        lines = [text, str(tokenizer.decode(corrupted))]
        lines.append(line("position", "original", "generator", "label", "prediction", "probability"))
        names = ("original", "replaced")
        right = 0
        for i, probability in enumerate(probabilities):
            called = probability >= 0.5
            right += called == replaced[i]
            if i in masked or called:
                draw = written[i] if i in masked else ""
                lines.append(line(i, original[i], draw, names[replaced[i]], names[called], f"{probability:.2f}"))
        lines.append(f"{sum(replaced)} of {length} tokens are replaced; the discriminator is right on {right}")
        return [(text, "\n".join(lines))], 0

    def _write_vocabulary(self) -> None:
        # At a resume it was read from there.
        if not self.settings.vocab_path and not (self.folder / VOCABULARY).exists():
            save_wordpiece(self.parts.tokenizer, self.folder / VOCABULARY)

    def save_weights(self, weights: Mapping[str, torch.Tensor], update: int, is_last: bool) -> None:
        """Write the networks at the updates of --save_percents and --save_steps: the last ones to the run's folder,
        where users expect them, earlier ones below it."""
        folders = []
        percent = 100.0 if is_last else self.percents.get(update)
        if percent is not None:
            folders.append(self.folder if percent == 100 else self.folder / f"percent_{percent:g}")
        if update in self.checkpoint_updates:
            folders.append(self.folder / f"checkpoint-{update}")
        # transformers' bar would be drawn over ours.
        disable_progress_bar()
        for target in folders:
            target.mkdir(exist_ok=True)
            for name, network in zip(NETWORKS, self.model.networks(), strict=True):
                # Generator and discriminator are one module here, and two models on disk.
                own = f"{name}."
                state = {key.removeprefix(own): value for key, value in weights.items() if key.startswith(own)}
                with atomic_folder(target / name, target / f"{self.folder.name}.{name}.tmp") as temporary:
                    network.save_pretrained(temporary, state_dict=state)
                    save_wordpiece(self.parts.tokenizer, temporary)

    def overview(self, progress: Progress) -> RunOverview:
        settings, parts, corpus = self.settings, self.parts, self.parts.corpus
        ranks = parts.run_context.ranks
        plan = self.plan(progress.epoch)
        generator, discriminator = (network.config for network in self.model.networks())
        # Matrix products only: 2 per multiply-add forward, twice that backward. The generator's head works at masked positions.
        in_layers = sum(p.numel() for name, p in self.model.named_parameters() if ".layer." in name)
        head = settings.mask_share * generator.embedding_size * (generator.hidden_size + generator.vocab_size)
        per_position = 6 * (in_layers + head)
        # FLOPs of this rank, padding included: it is computed too.
        rows = self.batching.rows / ranks.world_size
        flops = settings.max_steps * rows * settings.max_seq_len * per_position
        parameters = sum(parameter.numel() for parameter in self.model.parameters())
        # Networks from files have other sizes.
        of_files = settings.discriminator_config is not None
        lines = [
            *corpus.notices,
            f"model: ELECTRA{'' if of_files else f' {settings.size}'}, {parameters / 1e6:.2f} M parameters, "
            f"{counted(discriminator.num_hidden_layers, 'layer')} of width {discriminator.hidden_size} "
            f"(generator {generator.hidden_size}), {discriminator.vocab_size:,} entries, "
            f"{per_position / 1e6:.1f} MFLOP per position",
            f"data: {counted(len(corpus.documents), 'document')}, {int(parts.examples.lengths.sum()):,} positions in "
            f"{counted(plan.n_rows, 'example')} of {plan.T} ({plan.fill:.1%} full)",
        ]
        if self.val_plan is not None:
            lines.append(f"validation: {counted(self.val_plan.n_rows, 'example')}")
        from_files = "the networks come from files" if of_files else ""
        unused = "" if self.val_plan is not None else "no validation data"
        reasons = {
            **dict.fromkeys(("init_std", "position_init", "dropout"), from_files),
            **dict.fromkeys(("eval_interval", "eval_batch_size"), unused),
            "warmup_steps": "one_cycle has its own warm-up" if settings.lr_schedule == "one_cycle" else "",
        }
        if discriminator.vocab_size > len(parts.tokenizer):
            lines.append(
                f"note: the networks' files have {discriminator.vocab_size:,} entries and the vocabulary {len(parts.tokenizer):,}: "
                "the others are never trained, or --vocab_path is that of another model"
            )
        notices = [*parts.notices, *warnings_of(settings, reasons), *common_warnings(settings, ranks)]
        fine_tune = next_command(
            "fine-tune the discriminator",
            "trainer/train_glue.py",
            *("--task", "all", "--data_dir", "glue_data", "--model_path", self.files.stem.parent / "discriminator"),
        )
        return RunOverview(
            plan=plan,
            lines=lines,
            notices=notices,
            model_fields={
                **discriminator.to_diff_dict(),
                "generator": generator.to_diff_dict(),
                "parameters": parameters,
            },
            n_documents=len(corpus.documents),
            flops_per_token=per_position / plan.fill,  # per token; the products include padding
            flops=flops,
            shown=("mlm_loss", "disc_loss", "gen_acc", "disc_acc", "disc_auc", "grad_norm", "updates_per_second"),
            next_commands=[fine_tune],
        )

    def compile_model(self, overview: RunOverview) -> list[str]:
        settings = self.settings
        # Recomputation would draw other dropout masks than the compiled forward pass.
        mode = "0" if settings.gradient_checkpointing else settings.use_compile
        shape = (self.batching.micro_rows, overview.plan.T)
        width = self.model.discriminator.config.hidden_size
        engine = self.engine
        return compile_blocks(
            self.model.compile_training, mode, engine.device, shape, overview.flops, engine.dtype, width
        )


def identity_of(parts: Parts) -> Identity:
    """What a resume must share with its run."""
    settings = parts.settings
    row_layout = ("max_seq_len", "seed", "mask_share", "mask_style", "val_fraction")
    return Identity(
        entries={
            "tokenizer": parts.encoder.fingerprint[:16],
            "data": parts.corpus.fingerprint[:16],  # as this tokenizer reads it
            "architecture": {
                f"{name} {field}": value
                for name, network in zip(NETWORKS, parts.model.networks(), strict=True)
                for field, value in network.config.to_diff_dict().items()
                if field not in NOT_COMPARED
            },
            "row layout": {name: getattr(settings, name) for name in row_layout} | parts.corpus.part_layout,
            "optimizer": f"{settings.optimizer}, adam_bias_correction {settings.adam_bias_correction}",
        },
        flags_to_check={"data": parts.corpus.data_flags, "tokenizer": "--vocab_path"},
        ignored_on_resume=("init_std",),
    )


# --------------------------------------------------------------------------------------- networks and vocabulary


def draw_seed(settings: ElectraSettings, stem: Path) -> int:
    """The seed of --seed None: random, or at a resume that of the run."""
    saved = file_of_resumed_run(stem, f"{stem.name}.settings.yaml") if settings.from_resume else None
    if saved is None:
        return secrets.randbelow(2**32)
    return ElectraSettings.parse(["--config", str(saved)]).seed


def open_vocabulary(
    settings: ElectraSettings, data_path: list[str], stem: Path, ranks: Ranks
) -> PreTrainedTokenizerBase:
    """The tokenizer of --vocab_path, or a WordPiece one trained on the data; a resume reuses that of its start.
    stem: the path of the run's files without suffix. Errors: ValueError."""
    if settings.vocab_path:
        return load_wordpiece(expand_user(settings.vocab_path), settings.lower_case)
    # Training on the same data would give the same one.
    vocab_file = file_of_resumed_run(stem, f"{VOCABULARY}/vocab.txt") if settings.from_resume else None
    if vocab_file is not None:
        return load_wordpiece(vocab_file.parent)

    def train_it() -> PreTrainedTokenizerBase:
        announce(f"no --vocab_path: training a WordPiece vocabulary of {VOCABULARY_ENTRIES:,} entries on the data")
        sample = draw_sample(data_path, [1.0] * len(data_path), SAMPLE_BYTES, settings)
        return train_wordpiece(sample, VOCABULARY_ENTRIES, settings.lower_case)

    return on_main(ranks, train_it)


def init_model(settings: ElectraSettings, tokenizer: PreTrainedTokenizerBase) -> ElectraPretrainer:
    """New networks. Errors: ValueError if flags, files and tokenizer do not fit."""
    if settings.generator_config:
        # Either both files are given or none.
        generator, discriminator = (config_of_file(f"{name}_config", settings, tokenizer) for name in NETWORKS)
    else:
        generator, discriminator = configs_of_sizes(settings, len(tokenizer), tokenizer.pad_token_id)
    model = ElectraPretrainer(generator, discriminator, settings.sampling, settings.gen_smooth, settings.disc_smooth)
    for network in model.networks() if settings.gradient_checkpointing else ():
        network.activation_checkpointing_enable({"use_reentrant": False})
    return model


def configs_of_sizes(
    settings: ElectraSettings, vocab_size: int, pad_id: int | None = 0
) -> tuple[ElectraConfig, ElectraConfig]:
    """(generator's, discriminator's) by flags and published sizes. Errors: ValueError where the divisor does not divide
    width, heads and FFN."""
    sizes = settings.network_sizes()
    divided = ("hidden_size", "num_attention_heads", "intermediate_size")
    for name in divided:
        if sizes[name] % sizes["generator_divisor"]:
            raise ValueError(
                f"--{name} {sizes[name]} is no multiple of --generator_divisor {sizes['generator_divisor']}, which the "
                "generator's is divided by"
            )

    divisor = sizes.pop("generator_divisor")
    # The default is left out, so that the config is as other code writes it.
    extra: dict[str, Any] = {} if settings.position_init == "normal" else {"position_init": settings.position_init}

    def config(sizes: Mapping[str, Any]) -> ElectraConfig:
        return ElectraConfig(
            **sizes,
            vocab_size=vocab_size,
            hidden_dropout_prob=settings.dropout,
            attention_probs_dropout_prob=settings.dropout,
            max_position_embeddings=max(512, settings.max_seq_len),
            pad_token_id=pad_id,
            initializer_range=settings.init_std,
            **extra,
        )

    return config(sizes | {name: sizes[name] // divisor for name in divided}), config(sizes)


def config_of_file(flag: str, settings: ElectraSettings, tokenizer: PreTrainedTokenizerBase) -> ElectraConfig:
    """The config in a JSON file of ElectraConfig fields, which the flag names; missing sizes of vocabulary and positions are
    as the run needs them. Errors: UserError if it cannot be read, or does not fit."""
    path = getattr(settings, flag)
    what = f"--{flag} {path}"
    usual = {"vocab_size": len(tokenizer), "max_position_embeddings": max(512, settings.max_seq_len)}
    # is_decoder: both networks see the whole text. pad_token_id only selects the row of the embedding table that stays 0.
    fixed = {"is_decoder": False, "pad_token_id": tokenizer.pad_token_id}
    # transformers has its own types of errors for invalid fields.
    with library_errors(f"{what}: expected a JSON object of an ElectraConfig's fields"):
        fields = {**usual, **read_object(expand_user(path)), **fixed}
        config = ElectraConfig(**fields)
        # Fields that make no encoder fail here: on this device nothing is allocated, and no random number drawn.
        with torch.device("meta"):
            one_layer = ElectraModel(ElectraConfig(**{**fields, "num_hidden_layers": 1}))
            one_layer(torch.zeros(1, 1, dtype=torch.int64)).last_hidden_state.size()
    # An example has two segments.
    minimum = {"vocab_size": len(tokenizer), "max_position_embeddings": settings.max_seq_len, "type_vocab_size": 2}
    minimum |= {"embedding_size": 1, "intermediate_size": 1, "num_hidden_layers": 1, "initializer_range": 0}
    for name, number in {**minimum, "tie_word_embeddings": True}.items():
        if getattr(config, name) < number:
            raise UserError(f"{what}: {name} is {getattr(config, name)}, expected {number}")
    return config


# ------------------------------------------------------------------------------------------- losses and figures


@torch.no_grad()
def sums_of(output: Output, batch: Batch) -> torch.Tensor:
    """Sums of a batch for `ElectraJob.metrics`, float32 [N_SUMS]: generator and discriminator loss, masked positions, those that
    the generator predicts correctly, and histograms of the logits of original and of replaced tokens, AUC_BINS bins each."""
    is_text = non_padding(batch.ids, batch.lengths)
    # bfloat16 would be coarser than the bins. The engine skips an update with a NaN, but an index must be valid before that.
    logits = output.disc_logits.float().nan_to_num(-MAX_LOGIT).clamp(-MAX_LOGIT, MAX_LOGIT)
    bins = ((logits + MAX_LOGIT) / (2 * MAX_LOGIT) * AUC_BINS).floor().clamp(max=AUC_BINS - 1).long()
    bins = bins + AUC_BINS * output.replaced
    counts = torch.zeros(2 * AUC_BINS, device=bins.device)
    counts = counts.scatter_add(0, bins.flatten(), is_text.flatten().float())
    masked = (batch.labels != IGNORE).sum()
    return torch.cat((torch.stack((output.mlm, output.disc, masked, output.correct)), counts))
