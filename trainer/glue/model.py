"""The model of train_glue.py: a pretrained encoder with a head for a task, its rates by layer, loss and saving."""

import hashlib
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from transformers import (
    MODEL_FOR_QUESTION_ANSWERING_MAPPING,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PretrainedConfig,
    PreTrainedModel,
)

from common.errors import UserError, user_errors
from common.files import atomic_folder
from common.packages import loader_reason, refuse_foreign_attention
from dataset.glue.features import NO_CLASS
from dataset.glue.glue_dataset import Batch, Totals
from dataset.glue.glue_tasks import CLASSIFICATION, QUESTIONS, REGRESSION, TAGS, Task
from dataset.tokenizing.tokenizer_files import save_tokenizer
from dataset.tokenizing.vocabulary import check_size
from model.electra.compiled_encoder import compile_layers, graphs_for
from model.electra.model_electra import init_position_embeddings
from model.electra.saved_network import load_config
from trainer.glue.head import PREFIX as HEAD_PREFIX
from trainer.glue.head import set_plain_head, to_save
from trainer.glue.padding import (
    choose_way,
    computes_in,
    entries_of,
    has_segments,
    is_in_parts,
    is_known,
    notice,
    way_of,
)
from trainer.glue.settings import GlueSettings
from trainer.machine.settings import NONE

# What transformers calls a model with a head for each kind of task.
MODEL_CLASSES: dict[str, Any] = {
    CLASSIFICATION: AutoModelForSequenceClassification,
    REGRESSION: AutoModelForSequenceClassification,
    TAGS: AutoModelForTokenClassification,
    QUESTIONS: AutoModelForQuestionAnswering,
}
# The kinds of config that it has such a model for.
CONFIG_CLASSES: dict[str, Any] = {
    CLASSIFICATION: MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    REGRESSION: MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    TAGS: MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING,
    QUESTIONS: MODEL_FOR_QUESTION_ANSWERING_MAPPING,
}
# What Hugging Face calls the outputs that are no classes.
OUTPUT_NAMES = {REGRESSION: ("LABEL_0",), QUESTIONS: ("LABEL_0", "LABEL_1")}


def init_model(settings: GlueSettings, task: Task, folder: Path, vocab_size: int) -> tuple[Any, set[str]]:
    """(classifier of a folder, --model_path's, for a task, in fp32 on the CPU; names of its weights that are new).

    Errors: UserError where it does not fit the task, --max_seq_len or a tokenizer of `vocab_size` entries.
    """
    what = f"--model_path {settings.model_path}"
    config = read_config(settings, task, folder, vocab_size)
    check_kind(config, task, what)
    if settings.from_scratch:
        model = new_model(settings, task, config)
        init_position_embeddings(model)
        new = set(model.state_dict())
        check_positions(model, settings)
    else:
        model, new = load_pretrained(settings, task, config, folder)
        check_positions(model, settings)
        check_new(settings, task, model, new)
    # Words and answers have a head of one matrix anyway.
    if settings.head == "plain" and not task.is_of_positions:
        new = with_plain_head(settings, task, model, new)
    choose_way(model, what, settings.max_seq_len, settings.do_train)
    return model, new


def with_plain_head(settings: GlueSettings, task: Task, model: Any, new: set[str]) -> set[str]:
    """Give a model the plain head. Returns the names of its weights that are new then. Errors: UserError."""
    what = f"--model_path {settings.model_path}"
    of_encoder = {name for name in new if not name.startswith(HEAD_PREFIX)}
    was_plain = set_plain_head(model, what)
    # A fresh head of Hugging Face's is nothing to keep.
    if was_plain and len(of_encoder) == len(new):
        return of_encoder
    if not settings.do_train:
        raise UserError(f"--do_train 0: {what} was not saved with --head plain for {task.folder}; drop that flag")
    return of_encoder | {f"{HEAD_PREFIX}{name}" for name in model.classifier.state_dict()}


def score_divisor(model: Any) -> float:
    """What the scores of a regression were divided by to train the model. Its config says it: a field of our own."""
    return float(getattr(model.config, "score_divisor", 1.0))


def read_config(settings: GlueSettings, task: Task, folder: Path, vocab_size: int) -> Any:
    """The config of a folder with the classes of a task and --dropout. Errors: UserError where it does not fit."""
    what = f"--model_path {settings.model_path}"
    config = load_config(what, folder)
    refuse_foreign_attention(config, what)
    if config.get_text_config() is not config:
        raise UserError(
            f"{what}: {config.model_type} consists of several networks, as for pictures and text; name an encoder of text"
        )
    check_config(config, settings, vocab_size)
    entries = entries_of(config)
    # New embeddings fit any tokenizer.
    if entries is not None and not settings.from_scratch:
        with user_errors():
            check_size(vocab_size, entries, what)
    words = OUTPUT_NAMES.get(task.kind, task.labels)
    # A saved classifier may have its classes in another order; its answers would be read wrongly, without an error.
    saved = [word for _, word in sorted((config.id2label or {}).items())]
    if not settings.do_train and set(saved) == set(words) and saved != list(words):
        raise UserError(f"{what}: its classes are {', '.join(saved)}, in another order than {', '.join(words)}")
    config.id2label = dict(enumerate(words))
    config.label2id = {word: i for i, word in enumerate(words)}
    if settings.dropout is not None:
        names = dropouts_of(config)
        if not names:
            raise UserError(f"--dropout {settings.dropout}: {what}'s config has no field of dropout")
        for name in names:
            setattr(config, name, settings.dropout)
    # A model that is evaluated as it is keeps its own.
    if settings.do_train:
        config.score_divisor = settings.score_divisor if task.kind == REGRESSION else 1.0
    if getattr(config, "score_divisor", None) == 1:
        # The usual value is left out, so that such a config is as other people's code writes it.
        del config.score_divisor
    if not task.is_of_positions:
        config.problem_type = "regression" if task.kind == REGRESSION else "single_label_classification"
    return config


def check_kind(config: Any, task: Task, what: str) -> None:
    """Errors: UserError for an encoder to which transformers has no head for the task."""
    if type(config) not in CONFIG_CLASSES[task.kind]:
        raise UserError(
            f"{what}: transformers has no head for {task.kind} to {config.model_type}; name another encoder"
        )


def new_model(settings: GlueSettings, task: Task, config: PretrainedConfig) -> Any:
    """A model of a config, with random weights. Errors: UserError."""
    try:
        return MODEL_CLASSES[task.kind].from_config(config, trust_remote_code=False)
    except Exception as error:
        # Each family raises its own kinds, such as ImportError where it wants a package.
        reason = loader_reason(error)
        raise UserError(f"--model_path {settings.model_path}: no model can be made of its config ({reason})") from error


def load_pretrained(settings: GlueSettings, task: Task, config: PretrainedConfig, folder: Path) -> tuple[Any, set[str]]:
    """(the model of a folder, names of its weights that are not in there or do not fit). Errors: UserError."""
    try:
        model, faults = MODEL_CLASSES[task.kind].from_pretrained(
            folder,
            ignore_mismatched_sizes=True,
            trust_remote_code=False,
            config=config,
            dtype=torch.float32,
            local_files_only=True,
            output_loading_info=True,
        )
    except Exception as error:
        # Each loader raises its own kinds.
        reason = loader_reason(error)
        raise UserError(f"--model_path {settings.model_path}: no model can be loaded from there ({reason})") from error
    return model, {*faults["missing_keys"], *(key for key, *_ in faults["mismatched_keys"])}


def check_new(settings: GlueSettings, task: Task, model: Any, new: set[str]) -> None:
    """Errors: UserError where weights are new that must be pretrained, or, without training, any."""
    what = f"--model_path {settings.model_path}"
    # A new pooler and a new head are what fine-tuning is for; a new encoder means that nothing was loaded.
    encoder = sorted(key for key in new if key.startswith(f"{model.base_model_prefix}.") and ".pooler." not in key)
    if encoder:
        raise UserError(f"{what}: {len(encoder)} weights of the encoder are not in there or do not fit, {encoder[0]}")
    if new and not settings.do_train:
        raise UserError(
            f"--do_train 0: {what} has no {head_name(task)} for {task.folder} ({min(new)}); name a fine-tuned model"
        )


def head_name(task: Task) -> str:
    """What a model needs for a task, in a part of a line."""
    return f"head for {task.kind}" if task.is_of_positions else "classification head"


def check_config(config: PretrainedConfig, settings: GlueSettings, vocab_size: int) -> None:
    """Errors: UserError where a config has too few positions or entries. Positions that are counted from one token to
    another have no table: such a config has no limit, or one below 1."""
    positions = getattr(config, "max_position_embeddings", None)
    entries = entries_of(config)
    limits = []
    if positions is not None and positions > 0:
        why = "a lower --max_seq_len is wanted"
        limits.append(("max_position_embeddings", positions, settings.max_seq_len, why))
    if entries is not None:
        limits.append(("vocab_size", entries, vocab_size, "its tokenizer has more entries"))
    for name, value, least, why in limits:
        if value < least:
            raise UserError(f"--model_path {settings.model_path}: {name} is {value}, not {least}: {why}")


def dropouts_of(config: PretrainedConfig) -> list[str]:
    """The fields of a config that say how much is dropped: of hidden states, attention, head and whatever else has it. Of
    one that is None another field decides. A bool says something else, as ESM's `token_dropout`."""
    found = []
    for name, value in config.to_dict().items():
        if "dropout" in name and type(value) in (int, float):
            found.append(name)
    return found


def check_positions(model: Any, settings: GlueSettings) -> None:
    """Errors: UserError where --max_seq_len is beyond the table of positions, as far as it can be used: RoBERTa counts
    from behind the number of its padding."""
    for name, table in model.named_modules():
        if name.endswith(".position_embeddings") and isinstance(table, torch.nn.Embedding):
            usable = table.num_embeddings - (0 if table.padding_idx is None else table.padding_idx + 1)
            if usable < settings.max_seq_len:
                raise UserError(
                    f"--model_path {settings.model_path}: {usable} of its {table.num_embeddings} positions can be used, "
                    f"not {settings.max_seq_len}: a lower --max_seq_len is wanted"
                )


class Checked(NamedTuple):
    """What is known of a model before hours are spent on it."""

    # For the user, on what it lacks.
    lines: list[str]
    # Of its products.
    dtype: torch.dtype


def check_models(
    settings: GlueSettings, tasks: list[Task], folder: Path, vocab_size: int, dtype: torch.dtype = torch.float32
) -> Checked:
    """Load the model for every task once, for the errors of init_model. dtype: the one that is asked for."""
    for task in tasks:
        model, _ = init_model(settings, task, folder, vocab_size)
    lines = [notice(model)]
    if settings.shard != NONE and is_in_parts(model):
        # Each call of the model needs all ranks, and their batches have other numbers of lengths.
        raise UserError(
            f"--shard: {type(model).__name__} computes examples of like length together, which ranks that have a model together "
            "cannot do: drop the flag"
        )
    if not computes_in(model, dtype, settings.max_seq_len):
        lines.append(f"{type(model).__name__} cannot compute in {dtype}: training in float32 instead")
        dtype = torch.float32
    if not has_segments(model) and any(len(task.text) > 1 for task in tasks):
        lines.append(
            f"{type(model).__name__} has no segments: two sentences are told apart by the separator between them alone"
        )
    if settings.use_compile == "1" and not is_known(model):
        lines.append(f"{type(model).__name__} has no compiled form here: training without torch.compile")
    return Checked([line for line in lines if line], dtype)


class Layers(NamedTuple):
    """What compile_blocks compiles of a Hugging Face encoder."""

    model: Any

    def compile_training(self, shape: tuple[int, int] | None = None, dtype: torch.dtype = torch.bfloat16) -> str:
        """Compile for training batches of `shape` (rows, positions): one graph. All else is computed without, so that
        no number depends on which shapes came before; nor does it on an earlier run's graphs.

        Nothing depends on dtype here, and nothing is to be said.
        """
        torch.compiler.reset()
        self.model.compiled_shape = shape
        compile_layers(self.model)
        return ""


# -------------------------------------------------------------------------------------------- loss and metrics


def forward(model: Any, batch: Batch) -> torch.Tensor:
    """Logits, float32 [R, outputs], or [R, T, outputs] where every position has its own."""
    with graphs_for(model, batch.ids.shape):
        return way_of(model)(model, batch).float()


def loss_sum(task: Task, logits: torch.Tensor, labels: torch.Tensor, divisor: float = 1.0) -> torch.Tensor:
    """The sum over examples (over words, where they have classes) of cross-entropy, or of the squared error of a score that
    is divided by `divisor`. The cross-entropy of an answer is the mean of its beginning's and its end's."""
    if task.kind == REGRESSION:
        return F.mse_loss(logits[:, 0], labels / divisor, reduction="sum")
    if task.kind == QUESTIONS:
        # [R, T, 2] -> [2 R, T]: a choice among positions for each beginning and each end
        choices = logits.transpose(1, 2).flatten(0, 1)
        return F.cross_entropy(choices, labels.flatten(), reduction="sum") / 2
    return F.cross_entropy(logits.flatten(0, -2), labels.flatten().long(), reduction="sum", ignore_index=NO_CLASS)


def without_padding_as_answer(task: Task, logits: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Logits in which no answer begins or ends in the padding. mask: [R, T]."""
    if task.kind != QUESTIONS:
        return logits
    return logits.masked_fill(mask[:, :, None] == 0, torch.finfo(logits.dtype).min)


def glue_loss(
    task: Task, model: PreTrainedModel, batch: Batch, totals: Totals, reduction: str = "mean"
) -> tuple[torch.Tensor, torch.Tensor]:
    """(a micro-batch's share of the update's loss, 0-d; float32 [4] to add up: loss, labels, those that are right, tokens).
    A label is an example's or, where words have them, a word's. reduction: of the update's loss over them, mean or sum."""
    logits = without_padding_as_answer(task, forward(model, batch), batch.mask)
    loss = loss_sum(task, logits, batch.labels, score_divisor(model))
    with torch.no_grad():
        right, n_labels = right_labels(task, logits, batch.labels)
        sums = torch.stack((loss.detach(), n_labels.float(), right.float(), batch.mask.sum().float()))
    return loss if reduction == "sum" else loss / max(totals.labels, 1), sums


def right_labels(task: Task, logits: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(how many labels of a batch are what is likeliest, how many there are), 0-d each. An answer is one label."""
    if task.kind == TAGS:
        return (logits.argmax(-1) == labels).sum(), (labels != NO_CLASS).sum()
    # A fill: a copy from the host would wait for the device.
    n_labels = labels.new_full((), len(labels))
    if task.kind == QUESTIONS:
        return (logits.argmax(1) == labels).all(-1).sum(), n_labels
    return (logits.argmax(-1) == labels).sum(), n_labels


def metrics(task: Task, sums: Sequence[float]) -> tuple[dict[str, Any], float]:
    """(what to log, tokens) of the sums of `glue_loss`."""
    loss, n_labels, right, tokens = sums
    # All updates since the last line were skipped.
    if not n_labels:
        return {"loss": math.nan}, 0
    values = {"loss": loss / n_labels}
    if task.kind != REGRESSION:
        values["train_acc"] = right / n_labels
    return values, tokens


# ------------------------------------------------------------------------------------------------- saving


def save_model(folder: Path, model: Any, tokenizer: Any, weights: Mapping[str, torch.Tensor]) -> None:
    """Write a save_pretrained folder, whole or not at all; `weights` is the state dict to write."""
    with atomic_folder(folder, folder.with_name(f"{folder.name}.tmp")) as temporary:
        model.save_pretrained(temporary, state_dict=to_save(model, weights))
        save_tokenizer(tokenizer, temporary)


def weights_digest(model: Any) -> str:
    """Of the encoder's weights on the CPU: what a resumed run must have begun with. The head is drawn by the seed."""
    digest = hashlib.sha256()
    for parameter in model.base_model.parameters():
        digest.update(parameter.detach().numpy().tobytes())
    return digest.hexdigest()[:16]
