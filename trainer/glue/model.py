"""The classifier of train_glue.py: an encoder of transformers with its own head for sentences, and a rate for each layer."""

import contextlib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoModelForSequenceClassification, PretrainedConfig, PreTrainedTokenizerBase
from transformers.tokenization_utils_base import VERY_LARGE_INTEGER
from transformers.utils import cached_file

from common.errors import UserError
from common.files import atomic_folder
from dataset.glue.glue_tasks import Task
from dataset.reading.file_kinds import expanded
from dataset.tokenizing.encoder import load_tokenizer
from dataset.tokenizing.tokenizer_files import save_tokenizer
from dataset.tokenizing.vocabulary import check_size
from dataset.tokenizing.wordpiece import load_wordpiece
from model.electra.compiled_encoder import compile_layers, quicken_attention
from model.electra.model_electra import init_position_embeddings
from model.electra.saved_network import load_config, load_network
from trainer.glue.settings import GlueSettings
from trainer.optim.build import Groups, parameter_groups

# The families whose padding a mask of [R, T] keeps out; tests/trainer/glue/test_families.py goes through them.
FAMILIES = (
    "albert",
    "bert",
    "camembert",
    "deberta-v2",
    "distilbert",
    "electra",
    "modernbert",
    "mpnet",
    "roberta",
    "xlm",
    "xlm-roberta",
    "xlnet",
)
# The number of a layer in the name of a parameter. XLM has its attentions in one list and its FFNs in another one beside it; an
# ALBERT's layers that share their weights are a group.
LAYER = re.compile(r"\.(?:layers?|albert_layer_groups|attentions|ffns|layer_norm1|layer_norm2)\.(\d+)\.")
# Parts of an encoder that come behind its layers.
BEHIND_LAYERS = re.compile(r"\.(?:pooler|final_norm)\.")


def has_segments(config: PretrainedConfig) -> bool:
    """Whether an encoder tells the first sentence from the second by their segments. XLNet's config does not say it."""
    return config.model_type == "xlnet" or (getattr(config, "type_vocab_size", 0) or 0) >= 2


def find_model(model_path: str) -> Path:
    """The folder that --model_path names; a name is looked up in the local cache of Hugging Face. Errors: UserError."""
    path = expanded(model_path)
    if (path / "config.json").exists():
        return path
    if not path.exists():
        with contextlib.suppress(OSError, ValueError):
            cached = cached_file(model_path, "config.json", local_files_only=True)
            if cached is not None:
                return Path(cached).parent
    found = ", nor such a name in the local Hugging Face cache; train_electra.py leaves electra_small/discriminator"
    # The folder of a run of train_electra.py holds its networks, and users name it as a whole.
    if (path / "discriminator" / "config.json").is_file():
        found = f"; {path / 'discriminator'} has one"
    raise UserError(f"--model_path {model_path}: no config.json there{found}")


def open_tokenizer(settings: GlueSettings, folder: Path) -> PreTrainedTokenizerBase:
    """The tokenizer of --vocab_path, or that in the model's folder. Errors: ValueError."""
    path = expanded(settings.vocab_path) if settings.vocab_path else folder
    is_folder = path.is_dir() or not settings.vocab_path
    tokenizer = load_tokenizer(path) if is_folder else load_wordpiece(path, settings.lower_case)
    if tokenizer.pad_token_id is None:
        raise ValueError(f"{path}: the tokenizer has no padding token; that of an encoder such as ELECTRA is wanted")
    return tokenizer


def init_model(settings: GlueSettings, task: Task, folder: Path, vocab_size: int) -> tuple[Any, set[str]]:
    """(classifier of a folder, --model_path's, for a task, in fp32 on the CPU; names of its weights that are new).

    Errors: UserError where it does not fit the task, --max_seq_len or a tokenizer of `vocab_size` entries.
    """
    what = f"--model_path {settings.model_path}"
    config = load_config(what, folder)
    if config.model_type not in FAMILIES:
        raise UserError(f"{what}: {config.model_type} is none of the families that are known: {', '.join(FAMILIES)}")
    if config.vocab_size < vocab_size:
        raise UserError(f"{what}: vocab_size is {config.vocab_size}, and the tokenizer has {vocab_size} entries")
    if not settings.from_scratch:
        # New embeddings fit any tokenizer.
        check_size(vocab_size, config.vocab_size, what)
    saved_classes = [word for _, word in sorted((config.id2label or {}).items())]
    words = task.labels or ("LABEL_0",)
    config.id2label = dict(enumerate(words))
    config.label2id = {word: i for i, word in enumerate(words)}
    config.problem_type = "regression" if task.is_regression else "single_label_classification"
    if settings.dropout is not None:
        # Of hidden states, attention and head. A field that is None follows another one.
        for name, value in config.to_dict().items():
            if "dropout" in name and type(value) in (int, float):
                setattr(config, name, settings.dropout)
    if settings.from_scratch:
        model = AutoModelForSequenceClassification.from_config(config, trust_remote_code=False)
        init_position_embeddings(model)
        new = set(model.state_dict())
    else:
        model, new = load_network(what, folder, AutoModelForSequenceClassification, config)
        check_new(settings, task, model, new)
        order_classes(model, saved_classes, task.labels)
    for name, table in model.named_modules():
        if name.endswith(".position_embeddings") and isinstance(table, torch.nn.Embedding):
            # RoBERTa counts from behind the number of its padding.
            usable = table.num_embeddings - (0 if table.padding_idx is None else table.padding_idx + 1)
            if usable < settings.max_seq_len:
                raise UserError(f"{what}: {usable} positions can be used, so a lower --max_seq_len is wanted")
    if config._attn_implementation == "sdpa":
        quicken_attention(model)
    return model, new


def check_new(settings: GlueSettings, task: Task, model: Any, new: set[str]) -> None:
    """Errors: UserError where weights are new that must be pretrained, or, without training, any."""
    what = f"--model_path {settings.model_path}"
    # A new pooler and a new head are what fine-tuning is for; a new encoder means that nothing was loaded.
    encoder = sorted(key for key in new if key.startswith(f"{model.base_model_prefix}.") and ".pooler." not in key)
    if encoder:
        raise UserError(f"{what}: {len(encoder)} weights of the encoder are not in there or do not fit, {encoder[0]}")
    if new and not settings.do_train:
        raise UserError(
            f"--do_train 0: {what} has no classification head for {task.folder} ({min(new)}); name a fine-tuned model"
        )


@torch.no_grad()
def order_classes(model: Any, saved: Sequence[str], labels: Sequence[str]) -> None:
    """Put the rows of a saved head into the order of the task's classes, where it has the same ones in another order: in
    public RoBERTas of MNLI "CONTRADICTION, NEUTRAL, ENTAILMENT"."""
    have = [word.lower().replace("-", "_") for word in saved]
    want = [word.lower().replace("-", "_") for word in labels]
    if have == want or sorted(have) != sorted(want):
        return
    own = {id(module) for module in model.base_model.modules()}
    rows = [have.index(word) for word in want]
    # The last matrix of the head gives the classes.
    heads = [m for m in model.modules() if isinstance(m, torch.nn.Linear) and id(m) not in own]
    for parameter in heads[-1].parameters():
        parameter.copy_(parameter[rows])


def save_model(
    folder: Path, model: Any, tokenizer: PreTrainedTokenizerBase, weights: Mapping[str, torch.Tensor]
) -> None:
    """Write a save_pretrained folder, whole or not at all; `weights` is the state dict to write.

    Its tokenizer gives what the model was trained with: segments where it has them (in transformers 5 an ALBERT's and an
    XLNet's give none unless they are asked), and the longest text that it can take.
    """
    if has_segments(model.config):
        names = list(dict.fromkeys([*tokenizer.model_input_names, "token_type_ids"]))
        tokenizer.model_input_names = names
        tokenizer.init_kwargs["model_input_names"] = names
    positions = getattr(model.config, "max_position_embeddings", None) or 0
    if tokenizer.model_max_length >= VERY_LARGE_INTEGER and positions > 0:
        tokenizer.model_max_length = positions
    with atomic_folder(folder, folder.with_name(f"{folder.name}.tmp")) as temporary:
        model.save_pretrained(temporary, state_dict=dict(weights))
        save_tokenizer(tokenizer, temporary)


class Layers(NamedTuple):
    """What compile_blocks compiles of a Hugging Face encoder."""

    model: Any

    def compile_training(self, shape: tuple[int, int] | None = None, dtype: torch.dtype = torch.bfloat16) -> str:
        """Compile for training batches of `shape` (rows, positions): one graph. All else is computed without, so that
        no number depends on which shapes came before; nor does it on an earlier run's graphs."""
        torch.compiler.reset()
        self.model.compiled_shape = shape
        compile_layers(self.model)
        return ""


# ------------------------------------------------------------------------------------------- a rate for each layer


def layer_groups(model: Any, weight_decay: float, layer_decay: float) -> Groups:
    """Optimiser groups with `lr_scale` = layer_decay ** depth: 0 in the head, 1 in the top layer, and one more for each
    below it, down to the embeddings; each with and without weight decay. Every parameter is in exactly one."""
    found = {name: LAYER.search(name) for name, _ in model.named_parameters()}
    n_layers = 1 + max(int(match[1]) for match in found.values() if match)
    parts: dict[int, list[torch.nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        match = found[name]
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


def rates(groups: Groups, learning_rate: float) -> str:
    """One line: what each part's rate is at the top of the schedule."""
    scales = {group["depth"]: group["lr_scale"] for group in groups}
    parts = []
    for depth, scale in scales.items():
        name = "head" if depth == 0 else "embeddings" if depth == max(scales) else f"layer {max(scales) - 1 - depth}"
        parts.append(f"{name} {learning_rate * scale:.2e}")
    return f"rates: {', '.join(parts)}"
