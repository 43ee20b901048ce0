"""The model of train_glue.py: a pretrained encoder with a head for a task; loading, compiling and saving it."""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import (
    MODEL_FOR_QUESTION_ANSWERING_MAPPING,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PretrainedConfig,
)

from common.errors import UserError
from common.files import atomic_folder
from common.packages import loader_reason
from dataset.glue.glue_tasks import CLASSIFICATION, QUESTIONS, REGRESSION, TAGS, Task
from dataset.tokenizing.tokenizer_files import save_tokenizer
from model.config_bounds import refuse_oversize
from model.electra.compiled_encoder import compile_layers, quicken_attention
from model.electra.model_electra import init_position_embeddings
from trainer.glue.config import read_config
from trainer.glue.head import PREFIX as HEAD_PREFIX
from trainer.glue.head import set_plain_head, to_save
from trainer.glue.padding import (
    choose_way,
    computes_in,
    has_segments,
    is_in_parts,
    is_known,
    notice,
)
from trainer.glue.settings import GlueSettings
from trainer.machine.settings import NONE


class Classes(NamedTuple):
    """What transformers has for a kind of task."""

    # Makes a model with a head for it.
    model: Any
    # The kinds of config for which there is such a model.
    configs: Any


OF_SENTENCES = Classes(AutoModelForSequenceClassification, MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING)
CLASSES = {
    CLASSIFICATION: OF_SENTENCES,
    REGRESSION: OF_SENTENCES,
    TAGS: Classes(AutoModelForTokenClassification, MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING),
    QUESTIONS: Classes(AutoModelForQuestionAnswering, MODEL_FOR_QUESTION_ANSWERING_MAPPING),
}


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
    if is_known(model):
        quicken_attention(model)
    return model, new


def check_kind(config: PretrainedConfig, task: Task, what: str) -> None:
    """Errors: UserError for an encoder to which transformers has no head for the task."""
    if type(config) not in CLASSES[task.kind].configs:
        raise UserError(
            f"{what}: transformers has no head for {task.kind} to {config.model_type}; name another encoder"
        )


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


def new_model(settings: GlueSettings, task: Task, config: PretrainedConfig) -> Any:
    """A model of a config, with random weights. Errors: UserError."""
    try:
        return CLASSES[task.kind].model.from_config(config, trust_remote_code=False)
    except Exception as error:
        # Each family raises its own kinds, such as ImportError where it wants a package.
        reason = loader_reason(error)
        raise UserError(f"--model_path {settings.model_path}: no model can be made of its config ({reason})") from error


def load_pretrained(settings: GlueSettings, task: Task, config: PretrainedConfig, folder: Path) -> tuple[Any, set[str]]:
    """(the model of a folder, names of its weights that are not in there or do not fit). Errors: UserError."""
    kind = CLASSES[task.kind].model
    refuse_oversize(folder, lambda: kind.from_config(config, trust_remote_code=False))
    try:
        model, faults = kind.from_pretrained(
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
    # All tasks have the same encoder, so what follows looks at the last model alone.
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
