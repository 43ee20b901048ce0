"""The README.md of an export, made from the run's own records."""

import json
import math
from pathlib import Path

SIZES = (
    ("layers", "num_hidden_layers"),
    ("width", "hidden_size"),
    ("query heads", "num_attention_heads"),
    ("key/value heads", "num_key_value_heads"),
    ("vocabulary", "vocab_size"),
    ("positions", "max_position_embeddings"),
)
# What the last lines of metrics.jsonl say about a run: (label, key, format)
FIGURES = (
    ("updates", "update", ",d"),
    ("tokens trained", "tokens", ",d"),
    ("training loss (nats per token)", "loss", ".4f"),
    ("validation loss (nats per token)", "val_loss", ".4f"),
    ("perplexity per token", "perplexity", ".2f"),
    ("bits per byte", "bits_per_byte", ".4f"),
    ("tokens per second", "tokens_per_second", ",.0f"),
)


def model_card(model, weight, hf_config, verdict, name):
    """Markdown with the metadata block that model hubs read. `verdict`: the line about the comparison of logits."""
    config, parameters = model.config, sum(p.numel() for p in model.parameters())
    kind = "mixture of experts" if config.use_moe else "dense"
    architecture = [(label, f"{getattr(config, field):,}") for label, field in SIZES]
    if config.use_moe:
        experts = f"{config.num_experts}, {config.num_experts_per_tok} per token, {config.n_shared_experts} shared"
        architecture.append(("experts", experts))
    figures, settings = run_records(weight)
    run = [(label, format(figures[key], form)) for label, key, form in FIGURES if key in figures]
    run += [(f"`--{key}`", f"`{value}`") for key, value in sorted(settings.items())]
    sections = [
        "---\nlibrary_name: transformers\npipeline_tag: text-generation\ntags:\n- minimind\n---",
        f"# {name}",
        f"A {kind} {config.generation} with {parameters / 1e6:.2f} M parameters, stored as `{hf_config.architectures[0]}` in "
        f"{str(hf_config.dtype).removeprefix('torch.')}. It loads without remote code.",
        "```python\nfrom transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
        f'tokenizer = AutoTokenizer.from_pretrained("{name}")\nmodel = AutoModelForCausalLM.from_pretrained("{name}")\n'
        'ids = tokenizer(tokenizer.bos_token + "The harbour", add_special_tokens=False, return_tensors="pt")\n'
        "print(tokenizer.decode(model.generate(**ids, max_new_tokens=64)[0]))\n```",
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


def run_records(weight):
    """({metric: last finite value}, {flag: value}) of {stem}.metrics.jsonl beside a .pth; empty without one."""
    path = Path(weight)
    path = path.with_name(f"{path.stem}.metrics.jsonl")
    figures, settings = {}, {}
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            record = json.loads(line)
        except ValueError:  # a line that a crash cut off
            continue
        if isinstance(record.get("settings"), dict):
            settings = {key: value for key, value in record["settings"].items() if value is not None}
        figures.update({k: v for k, v in record.items() if isinstance(v, int | float) and math.isfinite(v)})
    return figures, settings


def table(rows):
    return "\n".join(["| | |", "|---|---|", *(f"| {left} | {right} |" for left, right in rows)])
