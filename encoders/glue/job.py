"""Fine-tuning on one task with one seed as a Job: model, loss, learning rate, evaluation and files.

The classifier is an encoder of transformers with its own sequence classification head. N: examples, R: rows of a batch,
n: outputs (classes, or one score).
"""

import math
import re
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from transformers import AutoModelForSequenceClassification, PretrainedConfig, PreTrainedTokenizerBase
from transformers.tokenization_utils_base import VERY_LARGE_INTEGER

from common.errors import UserError, user_errors
from common.files import atomic_folder
from common.wording import counted
from dataset.loader import to_device
from dataset.tokenizing.tokenizer_files import check_vocabulary_size, save_tokenizer
from encoders.electra.networks import init_position_embeddings
from encoders.fast_layers import ready_mask, use_fast_attention
from encoders.glue.examples import Batch, GlueAssembler, GluePlan, Totals
from encoders.glue.settings import GlueSettings
from encoders.glue.tasks import Task
from encoders.schedules import ENCODER_SCHEDULES
from encoders.vocabulary import return_segments
from model.hf_format import load_config, load_network
from trainer.batching import Batching
from trainer.engine import Engine, Update
from trainer.evaluation import gather_batch_rows
from trainer.job import Evaluation, Identity, Job, Length, Progress, RunContext, RunFiles, RunOverview
from trainer.machine.command_line import StopSignals
from trainer.machine.compiling import set_up
from trainer.machine.devices import pick_dtype, seed_everything
from trainer.optim.build import Groups, build_adamw, parameter_groups
from trainer.sharding import put_on_device

# Families that take a mask per query unchanged. transformers inspects a mask of [R, T], which waits for the device.
READY_MASK = frozenset({"albert", "bert", "camembert", "distilbert", "electra", "roberta", "xlm-roberta"})
# supported families; tests/encoders/glue/test_families.py checks that their padding is masked
FAMILIES = sorted({*READY_MASK, "deberta-v2", "modernbert", "mpnet", "xlm", "xlnet"})
# The layer number in a parameter's name. XLM lists its attentions and its FFNs separately; layers of an ALBERT that
# share weights are a group.
LAYER = re.compile(r"\.(?:layers?|albert_layer_groups|attentions|ffns|layer_norm1|layer_norm2)\.(\d+)\.")
# parts of an encoder after its layers
BEHIND_LAYERS = re.compile(r"\.(?:pooler|final_norm)\.")


class TaskData(NamedTuple):
    """Inputs of a task's runs: its files as GlueAssemblers, a tokenizer and a model."""

    name: str
    task: Task
    digests: dict[str, str]  # {part of a run's identity: a digest that changes with it}
    model_folder: Path
    tokenizer: PreTrainedTokenizerBase
    train: GlueAssembler | None  # None: nothing is trained
    dev: dict[str, GlueAssembler]  # {suffix of the metrics' names: development file}
    test: dict[str, GlueAssembler]  # {name of the predictions: test file}


class GlueJob(Job):
    """The job of train_glue.py. Errors: UserError, in one line, if the model does not fit the task."""

    settings: GlueSettings
    assembler: GlueAssembler

    def __init__(
        self, settings: GlueSettings, run_context: RunContext, data: TaskData, made_with: Mapping[str, object]
    ) -> None:
        """settings: those of this run, with its seed. made_with: what a resume must share with it."""
        self.settings = settings
        self.data = data
        self.folder = Path(settings.out_dir) / data.name / f"seed_{settings.seed}"
        self.ranks = run_context.ranks
        self.batching = Batching.of(settings, self.ranks)
        self.device = run_context.device
        self.dtype, _ = pick_dtype(settings.dtype, self.device)
        # Not in `compile_model`, which a run that only evaluates does not reach.
        set_up(self.device, self.dtype)
        stem = self.folder / f"{data.name}_{self.folder.name}"
        self.files = RunFiles(stem, {"model": self.folder / "model"}, settings)
        # The same seed on all ranks, so that all start with the same weights.
        seed_everything(settings.seed)
        with user_errors():
            self.folder.mkdir(parents=True, exist_ok=True)
            self.model, self.new_weights = init_model(settings, data.task, data.model_folder, data.tokenizer)
        self.model.train()
        # A checkpoint of version 1.0.0 has these two, and lacks most others.
        optimizer = f"layer_decay {settings.layer_decay}, bias correction {settings.adam_bias_correction}"
        of_1_0 = {"row layout": {"seed": settings.seed}, "optimizer": optimizer}
        self.identity = Identity({**made_with, **of_1_0}, defaults=made_with)
        put_on_device(self.model, made_with, settings.shard, self.ranks, self.device)
        # From here on each rank has other random numbers (dropout).
        seed_everything(settings.seed, self.ranks.rank)
        adamw = build_adamw(
            layer_groups(self.model, settings.weight_decay, settings.layer_decay),
            settings.learning_rate,
            eps=settings.adam_epsilon,
            bias_correction=settings.adam_bias_correction,
        )
        self.engine = Engine(
            self.model,
            [adamw],
            self.loss,
            device=self.device,
            dtype=self.dtype,
            ranks=self.ranks,
            grad_clip=settings.grad_clip,
            n_sums=4,
        )
        self.length = Length(flag="")
        self.evaluation = Evaluation(evaluate=self.evaluate if settings.do_eval else None, counts_updates=True)
        if data.train is not None:
            self.assembler = data.train
            of_epoch = self.batching.schedule(len(data.train.features.lengths)).n_updates
            # A partial epoch ends with the update of its last row. Rounded, as 0.55 * 100 is slightly above 55.
            of_epochs = math.ceil(round((settings.epochs or data.task.epochs) * of_epoch, 6))
            self.length.max_updates = settings.max_steps if settings.max_steps > 0 else of_epochs
            if settings.evaluate_during_training:
                self.evaluation.eval_interval = settings.eval_interval or of_epoch
        if settings.save_steps:
            # A range: a membership test without a list.
            self.files.save_at = range(settings.save_steps, 10**12, settings.save_steps)

    # ------------------------------------------------------------------------------------------------- training

    def plan(self, epoch: int) -> GluePlan:
        return GluePlan(self.assembler.features, self.settings.seed, epoch)

    def loss(self, batch: Batch, totals: Totals) -> tuple[torch.Tensor, torch.Tensor]:
        """(a micro-batch's part of the update's loss, 0-d; float32 [4] to accumulate: loss, examples, correct ones, tokens)."""
        logits = forward(self.model, batch)
        loss = loss_sum(self.data.task, logits, batch.labels)
        with torch.no_grad():
            # A fill: a copy from the host would wait for the device.
            n = logits.new_full((), len(batch.labels))
            right = (logits.argmax(-1) == batch.labels).sum().float()
            sums = torch.stack((loss.detach(), n, right, batch.mask.sum().float()))
        return loss / max(totals.examples, 1), sums

    def metrics(self, sums: Sequence[float]) -> tuple[dict[str, Any], float]:
        loss, n, right, tokens = sums
        # All updates since the last line were skipped.
        if not n:
            return {"loss": math.nan}, 0
        values = {"loss": loss / n}
        if not self.data.task.is_regression:
            values["train_acc"] = right / n
        return values, tokens

    def learning_rate(self, update: Update, progress: Progress) -> float:
        settings, n_updates = self.settings, int(self.length.max_updates)
        warmup = settings.warmup_steps
        if warmup is None:
            warmup = int(settings.warmup_share * n_updates)
        return settings.learning_rate * ENCODER_SCHEDULES[settings.lr_schedule](progress.update, n_updates, warmup)

    # ---------------------------------------------------------------------------------------- evaluation and saving

    def evaluate(self, engine: Engine, signals: StopSignals, update: int) -> tuple[dict[str, float], int]:
        """({metric: value} over the development files, with the first's val_loss; number of a stop signal or 0)."""
        task = self.data.task
        values: dict[str, float] = {}
        for suffix, assembler in self.data.dev.items():
            logits, stop_request = self.outputs(assembler, signals)
            if stop_request:
                return {}, stop_request
            labels = assembler.features.labels
            # MNLI has two development files; val_loss is that of the first.
            values.setdefault("val_loss", float(loss_sum(task, logits, torch.from_numpy(labels))) / len(labels))
            for name, value in metrics_of(task, logits, labels).items():
                values[name + suffix] = value
        return values, 0

    def outputs(self, assembler: GlueAssembler, signals: StopSignals) -> tuple[torch.Tensor, int]:
        """(logits of all examples of an assembler, float32 [N, n] on the CPU, the same on every world size; number of a stop
        signal or 0)."""
        batch_size = self.settings.eval_batch_size or self.settings.batch_size
        # Examples of similar length are batched together, so that little is padding.
        order = np.argsort(assembler.features.lengths, kind="stable")
        batches = [order[lo : lo + batch_size] for lo in range(0, len(order), batch_size)]

        def compute(number: int) -> torch.Tensor:
            with self.engine.autocast():
                return forward(self.model, to_device(assembler[batches[number]], self.device)).cpu()

        shape = (len(order), self.model.config.num_labels)
        logits, stop_request = gather_batch_rows(self.engine, batches, compute, shape, signals)
        return logits.float(), stop_request

    def save_weights(self, weights: Mapping[str, torch.Tensor], update: int, is_last: bool) -> None:
        if is_last:
            save_model(self.folder / "model", self.model, self.data.tokenizer, weights)
        if update in self.files.save_at:
            save_model(self.folder / f"checkpoint-{update}", self.model, self.data.tokenizer, weights)

    # --------------------------------------------------------------------------------------------------- reports

    def overview(self, progress: Progress) -> RunOverview:
        settings = self.settings
        plan = self.plan(0)
        config = self.model.config
        parameters = sum(p.numel() for p in self.model.parameters())
        source = "random weights"
        if not settings.from_scratch:
            parts = sorted({name.rsplit(".", 1)[0] for name in self.new_weights})
            source = f"from {self.data.model_folder}, new parts: {', '.join(parts) or 'none'}"
        lines = [
            f"model: {config.model_type}, {parameters / 1e6:.2f} M parameters, "
            f"{counted(config.num_hidden_layers, 'layer')} of width {config.hidden_size}, {source}",
            f"data: {self.data.task.folder}, {counted(plan.n_rows, 'example')} of {plan.fill * plan.T:.0f} tokens on average, "
            f"{plan.T} at most",
        ]
        return RunOverview(
            plan=plan,
            lines=lines,
            notices=(),
            model_fields={**config.to_diff_dict(), "parameters": parameters},
            n_documents=plan.n_rows,
            shown=("train_acc", "grad_norm", "updates_per_second"),
        )


# ------------------------------------------------------------------------------------------------- the classifier


def init_model(
    settings: GlueSettings, task: Task, folder: Path, tokenizer: PreTrainedTokenizerBase
) -> tuple[Any, set[str]]:
    """(classifier for a task from the folder of --model_path, fp32 on the CPU; names of its new weights).

    Errors: UserError if it does not fit the task, --max_seq_len or the tokenizer.
    """
    what = f"--model_path {settings.model_path}"
    config = load_config(what, folder)
    if config.model_type not in FAMILIES:
        raise UserError(f"{what}: {config.model_type} is none of the supported families: {', '.join(FAMILIES)}")
    if getattr(config, "is_decoder", False):
        raise UserError(f"{what}: is_decoder in its config.json is true, expected false: a decoder sees half of a text")
    # the largest id + 1
    vocab_size = max(tokenizer.get_vocab().values()) + 1
    # A new model may have more embeddings than entries: no tokenizer was trained with it.
    flag = f"--vocab_path {settings.vocab_path}" if settings.vocab_path else what
    check_vocabulary_size(vocab_size, config.vocab_size, flag, fewer_are_fine=settings.from_scratch)
    saved_classes = [word for _, word in sorted((config.id2label or {}).items())]
    words = task.labels or ("LABEL_0",)
    config.id2label = dict(enumerate(words))
    config.label2id = {word: i for i, word in enumerate(words)}
    config.problem_type = "regression" if task.is_regression else "single_label_classification"
    if settings.dropout is not None:
        # For hidden states, attention and head. A field that is None follows another one.
        for name, value in config.to_dict().items():
            if "dropout" in name and type(value) in (int, float):
                setattr(config, name, settings.dropout)
    if settings.from_scratch:
        model = AutoModelForSequenceClassification.from_config(config, trust_remote_code=False)
        init_position_embeddings(model)
        new = set(model.state_dict())
    else:
        model, faults = load_network(what, folder, AutoModelForSequenceClassification, config)
        new = {*faults["missing_keys"], *faults["mismatched_keys"]}
        # Fine-tuning starts with a new pooler and a new head; a new encoder means that nothing was loaded.
        encoder = sorted(key for key in new if key.startswith(f"{model.base_model_prefix}.") and ".pooler." not in key)
        if encoder:
            raise UserError(f"{what}: {len(encoder)} weights of the encoder are missing or do not fit, {encoder[0]}")
        if new and not settings.do_train:
            raise UserError(
                f"--do_train 0: {what} has no classification head for {task.folder} ({min(new)}); name a fine-tuned model"
            )
        has_same_classes = order_classes(model, saved_classes, task.labels)
        # A head whose config names no classes may have those of the file.
        is_named = not saved_classes or not saved_classes[0].startswith("LABEL_")
        if settings.kind == "classification" and not settings.do_train and is_named and not has_same_classes:
            raise UserError(
                f"--do_train 0: the classes of {what} are {', '.join(saved_classes)[:200]}; --train_file has others"
            )
    positions = learned_positions(model)
    if 0 < positions < settings.max_seq_len:
        raise UserError(f"{what}: {positions} positions can be used; lower --max_seq_len")
    if config._attn_implementation == "sdpa":
        use_fast_attention(model)
    if settings.gradient_checkpointing:
        if not model.supports_gradient_checkpointing:
            raise UserError(f"--gradient_checkpointing 1: transformers has none for {config.model_type}: leave it out")
        model.activation_checkpointing_enable({"use_reentrant": False})
    return model, new


def learned_positions(model: Any) -> int:
    """Maximum tokens of a text by the encoder's table of positions; 0 without one."""
    for name, table in model.named_modules():
        if name.endswith(".position_embeddings") and isinstance(table, torch.nn.Embedding):
            # RoBERTa's positions start after the number of its padding.
            return table.num_embeddings - (0 if table.padding_idx is None else table.padding_idx + 1)
    return 0


@torch.no_grad()
def order_classes(model: Any, saved: Sequence[str], labels: Sequence[str]) -> bool:
    """Reorder the rows of a saved head if it has the task's classes in another order, as public RoBERTas of MNLI do:
    "CONTRADICTION, NEUTRAL, ENTAILMENT". Returns whether it has these classes."""
    have = [word.lower().replace("-", "_") for word in saved]
    want = [word.lower().replace("-", "_") for word in labels]
    if have == want or sorted(have) != sorted(want):
        return have == want
    in_encoder = {id(module) for module in model.base_model.modules()}
    rows = [have.index(word) for word in want]
    # The last linear layer of the head gives the classes.
    heads = [m for m in model.modules() if isinstance(m, torch.nn.Linear) and id(m) not in in_encoder]
    for parameter in heads[-1].parameters():
        parameter.copy_(parameter[rows])
    return True


def save_model(
    folder: Path, model: Any, tokenizer: PreTrainedTokenizerBase, weights: Mapping[str, torch.Tensor]
) -> None:
    """Write a save_pretrained folder atomically. weights: the state dict to write.

    Its tokenizer returns what the model was trained with: segments if it has them, and the maximum length of a text.
    """
    if has_segments(model.config):
        return_segments(tokenizer)
    positions = learned_positions(model) or getattr(model.config, "max_position_embeddings", None) or 0
    if tokenizer.model_max_length >= VERY_LARGE_INTEGER and positions > 0:
        tokenizer.model_max_length = positions
    with atomic_folder(folder, folder.with_name(f"{folder.name}.tmp")) as temporary:
        model.save_pretrained(temporary, state_dict=dict(weights))
        save_tokenizer(tokenizer, temporary)


def has_segments(config: PretrainedConfig) -> bool:
    """True if an encoder takes segment ids of the two sentences. XLNet's config does not show it."""
    return config.model_type == "xlnet" or (getattr(config, "type_vocab_size", 0) or 0) >= 2


def layer_groups(model: Any, weight_decay: float, layer_decay: float) -> Groups:
    """Optimiser groups with `lr_scale` = layer_decay ** depth: 0 in the head, 1 in the top layer, rising to the
    embeddings; each with and without weight decay. Every parameter is in exactly one."""
    matches = {name: LAYER.search(name) for name, _ in model.named_parameters()}
    n_layers = 1 + max(int(match[1]) for match in matches.values() if match)
    parts: dict[int, list[torch.nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        match = matches[name]
        depth = 0
        if match:
            depth = n_layers - int(match[1])
        elif name.startswith(f"{model.base_model_prefix}.") and not BEHIND_LAYERS.search(name):
            depth = n_layers + 1
        parts.setdefault(depth, []).append(parameter)
    groups = []
    for depth, parameters in sorted(parts.items()):
        for group in parameter_groups(torch.nn.ParameterList(parameters), weight_decay):
            if group["params"]:
                groups.append({**group, "depth": depth, "lr_scale": layer_decay**depth})
    return groups


# ------------------------------------------------------------------------------------- outputs, losses, metrics


def forward(model: Any, batch: Batch) -> torch.Tensor:
    """Logits, float32 [R, n]."""
    inputs = {"input_ids": batch.ids, "attention_mask": batch.mask}
    if model.config.model_type in READY_MASK:
        inputs["attention_mask"] = ready_mask(batch.mask.bool())
    if has_segments(model.config):
        inputs["token_type_ids"] = batch.types
    return model(**inputs).logits.float()


def loss_sum(task: Task, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The sum over examples of the cross-entropy, or of a score's squared error. logits: [N, n]; labels: [N]."""
    if task.is_regression:
        return F.mse_loss(logits[:, 0], labels, reduction="sum")
    return F.cross_entropy(logits, labels, reduction="sum")


def predicted(task: Task, logits: torch.Tensor) -> np.ndarray:
    """Class numbers, or scores, of logits [N, n]."""
    return (logits[:, 0] if task.is_regression else logits.argmax(-1)).numpy()


def metrics_of(task: Task, logits: torch.Tensor, labels: np.ndarray) -> dict[str, float]:
    """{metric: value} of logits [N, n] and the labels of a file."""
    # Imported here: a command that does not evaluate needs neither.
    from scipy import stats
    from sklearn import metrics

    predictions = predicted(task, logits)
    if task.is_regression and (np.ptp(labels) == 0 or not np.ptp(predictions) > 0):
        # A correlation is undefined if one side is constant (or not finite).
        return dict.fromkeys(task.metrics, math.nan)
    by_name = {
        "accuracy": metrics.accuracy_score,
        "f1": metrics.f1_score,
        "macro_f1": partial(metrics.f1_score, average="macro", zero_division=0.0),
        "matthews": metrics.matthews_corrcoef,
        "pearson": lambda x, y: stats.pearsonr(x, y).statistic,
        "spearman": lambda x, y: stats.spearmanr(x, y).statistic,
    }
    return {name: float(by_name[name](labels, predictions)) for name in task.metrics}
