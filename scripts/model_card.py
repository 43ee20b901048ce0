"""The README.md of an export, made from the run's own records."""

import contextlib
import re
from pathlib import Path

from common.errors import UserError
from dataset.tokenizing.tokenizer_files import starts_with_bos
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
UNPUBLISHED = (
    *(
        "out_dir",
        "cache_dir",
        "tokenizer_path",
        "sample_prompts",
        "save_weight",
        "wandb_project",
        "tracker",
        "use_wandb",
    ),
    *("device", "local_rank", "ddp", "dist_timeout", "num_workers", "report", "keep_checkpoints", "from_resume"),
)


def model_card(model, weight, hf_config, verdict, name, tokenizer):
    """Markdown with the metadata block that model hubs read. `verdict`: the line about the comparison of logits."""
    config, parameters = model.config, sum(p.numel() for p in model.parameters())
    kind = "mixture of experts" if config.use_moe else "dense"
    architecture = [(label, f"{getattr(config, field):,}") for label, field in SIZES]
    if config.use_moe:
        experts = f"{config.num_experts}, {config.num_experts_per_tok} per token, {config.n_shared_experts} shared"
        architecture.append(("experts", experts))
    metrics = Path(weight).with_name(f"{Path(weight).stem}.metrics.jsonl")
    run = []
    # None there, or a run that ended before its first line.
    with contextlib.suppress(UserError):
        records = RunRecords(metrics)
        run = [
            (label, write(records.last(field))) for label, field, write in FIGURES if records.last(field) is not None
        ]
        run += published_settings(records.settings)
    sections = [
        "---\nlibrary_name: transformers\npipeline_tag: text-generation\ntags:\n- minimind\n---",
        f"# {name}",
        f"A {kind} {config.generation} with {parameters / 1e6:.2f} M parameters, stored as `{hf_config.architectures[0]}` in "
        f"{str(hf_config.dtype).removeprefix('torch.')}. It loads without remote code.",
        "```python\nfrom transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
        f'tokenizer = AutoTokenizer.from_pretrained("{name}")\nmodel = AutoModelForCausalLM.from_pretrained("{name}")\n'
        'ids = tokenizer("The harbour", return_tensors="pt")\n'
        "print(tokenizer.decode(model.generate(**ids, max_new_tokens=64)[0], skip_special_tokens=True))\n```",
        bos_line(tokenizer),
        versions_line(config),
        "## Architecture\n" + table(architecture),
    ]
    if run:
        sections.append(f"## Training\nFrom the records beside `{Path(weight).name}`.\n\n" + table(run))
    else:
        sections.append(f"## Training\nNo record of the run lay beside `{Path(weight).name}`.")
    sections.append(
        f"## Check\n{verdict[0].upper() + verdict[1:]}.\n\nA language model writes what is likely after its training text, "
        "true or not. Its training text decides its language, knowledge and bias; look at it before you rely on an answer."
    )
    return "\n\n".join(sections) + "\n"


def bos_line(tokenizer) -> str:
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


def versions_line(config) -> str:
    """The transformers that compute this model."""
    if config.inference_rope_scaling:
        return "It needs transformers 4.57 or newer: older ones leave out a part of its YaRN scaling, without a word."
    least = "4.51" if config.generation == "minimind3" else "4.48"
    return f"It loads in transformers {least} or newer, 4 and 5 alike."


def published_settings(settings: dict) -> list[tuple[str, str]]:
    """Rows of the flags that tell of the training; of a path its last part alone."""
    rows = []
    for name, value in sorted(settings.items()):
        if name not in UNPUBLISHED:
            rows.append((f"`--{name}`", f"`{without_places(value)}`"))
    return rows


def without_places(value):
    """A flag's value with each path cut down to its last part, which may carry a share (`data.jsonl:0.7`)."""
    if isinstance(value, list | tuple):
        return [without_places(part) for part in value]
    if not isinstance(value, str):
        return value
    if not re.search(r"[/\\]|^~", value):
        return value
    path, share = re.fullmatch(r"(.*?)(:[\d.]+)?", value, re.DOTALL).groups(default="")
    last = re.split(r"[/\\]", path.rstrip("/\\"))[-1]
    # The home folder tells who the user is.
    if last.startswith("~") or last.lower() == Path.home().name.lower():
        last = "a folder"
    return last + share


def table(rows):
    return "\n".join(["| | |", "|---|---|", *(f"| {left} | {right} |" for left, right in rows)])
