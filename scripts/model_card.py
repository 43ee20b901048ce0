"""The README.md of an export, made from the run's own records."""

import contextlib
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from transformers import PretrainedConfig, PreTrainedTokenizerBase

from common.errors import UserError
from dataset.tokenizing.tokenizer_files import starts_with_bos
from model.config import MiniMindConfig
from model.model_minimind import MiniMindForCausalLM
from trainer.reporting.records import FIGURES, RunRecords

SIZES = (
    ("layers", "num_hidden_layers"),
    ("width", "hidden_size"),
    ("query heads", "num_attention_heads"),
    ("key/value heads", "num_key_value_heads"),
    ("vocabulary", "vocab_size"),
    ("positions", "max_position_embeddings"),
)


# Flags that tell of the machine, its places and its accounts, not of the training
UNPUBLISHED = {
    "out_dir", "cache_dir", "tokenizer_path", "sample_prompts", "save_weight", "wandb_project", "tracker", "use_wandb",
    "device", "local_rank", "ddp", "dist_timeout", "num_workers", "report", "keep_checkpoints", "from_resume",
}  # fmt: skip

# The block that model hubs read.
METADATA = """---
library_name: transformers
pipeline_tag: text-generation
tags:
- minimind
---"""

SNIPPET = """```python
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("{name}")
model = AutoModelForCausalLM.from_pretrained("{name}")
ids = tokenizer("The harbour", return_tensors="pt")
print(tokenizer.decode(model.generate(**ids, max_new_tokens=64)[0], skip_special_tokens=True))
```"""

LIMITS = (
    "A language model writes what is likely after its training text, true or not. Its training text decides its language, "
    "knowledge and bias; look at it before you rely on an answer."
)

# Of a table: label, value.
Row = tuple[str, str]


def model_card(
    model: MiniMindForCausalLM,
    weight: str | Path,
    hf_config: PretrainedConfig,
    verdict: str,
    name: str,
    tokenizer: PreTrainedTokenizerBase,
) -> str:
    """Markdown with the metadata block that model hubs read. `verdict`: the line about the comparison of logits."""
    config: MiniMindConfig = model.config
    file_name = Path(weight).name
    run = rows_of_run(Path(weight).with_name(f"{Path(weight).stem}.metrics.jsonl"))
    training = f"## Training\nNo record of the run lay beside `{file_name}`."
    if run:
        training = f"## Training\nFrom the records beside `{file_name}`.\n\n" + table(run)
    sections = [
        METADATA,
        f"# {name}",
        what_it_is(model, hf_config),
        SNIPPET.format(name=name),
        bos_line(tokenizer),
        versions_line(config),
        "## Architecture\n" + table(rows_of_architecture(config)),
        training,
        f"## Check\n{verdict[0].upper() + verdict[1:]}.\n\n{LIMITS}",
    ]
    return "\n\n".join(sections) + "\n"


def what_it_is(model: MiniMindForCausalLM, hf_config: PretrainedConfig) -> str:
    """The first sentences of the card."""
    parameters = sum(p.numel() for p in model.parameters())
    kind = "mixture of experts" if model.config.use_moe else "dense"
    dtype = str(hf_config.dtype).removeprefix("torch.")
    assert hf_config.architectures
    return (
        f"A {kind} {model.config.generation} with {parameters / 1e6:.2f} M parameters, stored as "
        f"`{hf_config.architectures[0]}` in {dtype}. It loads without remote code."
    )


def rows_of_architecture(config: MiniMindConfig) -> list[Row]:
    rows = [(label, f"{getattr(config, field):,}") for label, field in SIZES]
    if config.use_moe:
        experts = f"{config.num_experts}, {config.num_experts_per_tok} per token, {config.n_shared_experts} shared"
        rows.append(("experts", experts))
    return rows


def rows_of_run(metrics: Path) -> list[Row]:
    """The last figures of a run and its settings; none where it left no record, or ended before its first line."""
    rows: list[Row] = []
    with contextlib.suppress(UserError):
        records = RunRecords(metrics)
        for label, field, write in FIGURES:
            value = records.last(field)
            if value is not None:
                rows.append((label, write(value)))
        rows += published_settings(records.settings)
    return rows


def bos_line(tokenizer: PreTrainedTokenizerBase) -> str:
    """What the tokenizer puts before a text, and why that matters."""
    if tokenizer.bos_token is None:
        return "The tokenizer has no begin token, so documents began without one in training too."
    if not starts_with_bos(tokenizer):
        return (
            f"In training each document began with `{tokenizer.bos_token}`. The tokenizer does not put it there: begin a "
            "prompt with it."
        )
    return (
        f"The tokenizer puts `{tokenizer.bos_token}` before a text, as each document began in training; without it short "
        "texts are continued worse. It adds no end token. `apply_chat_template` and "
        '`pipeline("text-generation")` need nothing more; do not write the token into a plain prompt yourself.'
    )


def versions_line(config: MiniMindConfig) -> str:
    """The transformers that compute this model."""
    if config.inference_rope_scaling:
        return "It needs transformers 4.51 or newer: older ones leave out a part of its YaRN scaling, without a word."
    least = "4.51" if config.generation == "minimind3" else "4.48"
    return f"It loads in transformers {least} or newer, 4 and 5 alike."


def published_settings(settings: Mapping[str, Any]) -> list[Row]:
    """Rows of the flags that tell of the training; of a path its last part alone."""
    rows = []
    for name, value in sorted(settings.items()):
        if name not in UNPUBLISHED:
            rows.append((f"`--{name}`", f"`{without_places(value)}`"))
    return rows


def without_places(value: object) -> object:
    """A flag's value with each path cut down to its last part, which may carry a share (`data.jsonl:0.7`)."""
    if isinstance(value, list | tuple):
        return [without_places(part) for part in value]
    if not isinstance(value, str) or not re.search(r"[/\\]|^~", value):
        return value
    has_share = re.search(r":[\d.]+\Z", value)
    share = has_share[0] if has_share else ""
    path = value.removesuffix(share).rstrip("/\\")
    last = re.split(r"[/\\]", path)[-1]
    # The home folder tells who the user is.
    if last.startswith("~") or last.lower() == Path.home().name.lower():
        last = "a folder"
    return last + share


def table(rows: Iterable[Row]) -> str:
    lines = ["| | |", "|---|---|"]
    for left, right in rows:
        lines.append(f"| {left} | {right} |")
    return "\n".join(lines)
