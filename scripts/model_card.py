"""The README.md of an export, made from the run's own records."""

import contextlib
from pathlib import Path

from trainer.records import FIGURES, RunRecords
from trainer.runtime import UserError

SIZES = (
    ("layers", "num_hidden_layers"),
    ("width", "hidden_size"),
    ("query heads", "num_attention_heads"),
    ("key/value heads", "num_key_value_heads"),
    ("vocabulary", "vocab_size"),
    ("positions", "max_position_embeddings"),
)


def model_card(model, weight, hf_config, verdict, name):
    """Markdown with the metadata block that model hubs read. `verdict`: the line about the comparison of logits."""
    config, parameters = model.config, sum(p.numel() for p in model.parameters())
    kind = "mixture of experts" if config.use_moe else "dense"
    architecture = [(label, f"{getattr(config, field):,}") for label, field in SIZES]
    if config.use_moe:
        experts = f"{config.num_experts}, {config.num_experts_per_tok} per token, {config.n_shared_experts} shared"
        architecture.append(("experts", experts))
    metrics = Path(weight).with_name(f"{Path(weight).stem}.metrics.jsonl")
    run = []
    with contextlib.suppress(UserError):  # none there, or a run that ended before its first line
        records = RunRecords(metrics)
        run = [
            (label, write(records.last(field))) for label, field, write in FIGURES if records.last(field) is not None
        ]
        run += [(f"`--{name}`", f"`{value}`") for name, value in sorted(records.settings.items())]
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


def table(rows):
    return "\n".join(["| | |", "|---|---|", *(f"| {left} | {right} |" for left, right in rows)])
