"""Whether an encoder fits a task of train_glue.py: its config with the task's classes, and the limits that it sets."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import PretrainedConfig

from common.errors import UserError, user_errors
from common.packages import refuse_foreign_attention
from dataset.glue.glue_tasks import QUESTIONS, REGRESSION, Task
from dataset.tokenizing.vocabulary import check_size
from model.electra.saved_network import load_config
from trainer.glue.padding import entries_of
from trainer.glue.settings import GlueSettings

# What Hugging Face calls the outputs that are no classes.
OUTPUT_NAMES = {REGRESSION: ("LABEL_0",), QUESTIONS: ("LABEL_0", "LABEL_1")}


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
    set_task_fields(config, settings, task, words)
    return config


def set_task_fields(config: Any, settings: GlueSettings, task: Task, words: Sequence[str]) -> None:
    """Write the classes of a task, --dropout, --score_divisor and the kind of the loss into a config. words: the classes.

    Errors: UserError for a --dropout that the config has no field for, and for a divisor that none can be.
    """
    config.id2label = dict(enumerate(words))
    config.label2id = {word: i for i, word in enumerate(words)}
    if settings.dropout is not None:
        names = dropouts_of(config)
        if not names:
            raise UserError(
                f"--dropout {settings.dropout}: --model_path {settings.model_path}'s config has no field of dropout"
            )
        for name in names:
            setattr(config, name, settings.dropout)
    if settings.do_train:
        config.score_divisor = settings.score_divisor if task.kind == REGRESSION else 1.0
    else:
        # A model that is evaluated as it is keeps its own.
        check_divisor(config, f"--model_path {settings.model_path}")
    if getattr(config, "score_divisor", None) == 1:
        # The usual value is left out, so that such a config is as other people's code writes it.
        del config.score_divisor
    if not task.is_of_positions:
        config.problem_type = "regression" if task.kind == REGRESSION else "single_label_classification"


def check_divisor(config: Any, what: str) -> None:
    """Errors: UserError where a config has a divisor of scores that no training has written."""
    divisor = getattr(config, "score_divisor", 1.0)
    # JSON's integers know no bound, and a bool is an int in Python.
    if type(divisor) not in (int, float) or not 0 < divisor <= sys.float_info.max:
        raise UserError(f"{what}: score_divisor is {str(divisor)[:40]}, a number above 0 is wanted in its config.json")


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
    """The fields of a config that say how much is dropped: of hidden states, attention, head and whatever else has it. A
    field that is None follows another field. A bool is a switch (ESM's `token_dropout`)."""
    found = []
    for name, value in config.to_dict().items():
        if "dropout" in name and type(value) in (int, float):
            found.append(name)
    return found
