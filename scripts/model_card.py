"""The README.md of an export, and the picture of the loss beside it, made from the run's own records."""

import contextlib
import re
from pathlib import Path

from transformers import PretrainedConfig

from common.errors import UserError
from common.wording import one_line
from model.model_minimind import MiniMindForCausalLM
from trainer.reporting.records import RunRecords, trains_answers

# The flags that shape what is learned; those that name places and accounts stay at home.
SHAPING = (
    "data_path", "val_path", "val_fraction", "max_seq_len", "epochs", "max_updates", "batch_size", "accumulation_steps",
    "optimizer", "learning_rate", "muon_lr", "lr_schedule", "warmup_iters", "weight_decay", "dtype", "from_weight", "seed",
)  # fmt: skip
SIZES = ("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "vocab_size")
TEXT = 'prompt = tokenizer("The harbour", return_tensors="pt")'
TURN = """turns = [{"role": "user", "content": "Who are you?"}]
prompt = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=True, return_tensors="pt")"""
# Language and license are the user's to add: nothing here knows them.
CARD = """---
library_name: transformers
pipeline_tag: text-generation
tags:
- minimind
---

# {name}

A {kind} with {parameters:.2f} M parameters, stored as `{architecture}` in {dtype}. It loads without remote code in
transformers {least} or newer.

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("{name}")
model = AutoModelForCausalLM.from_pretrained("{name}")
{asked}
print(tokenizer.decode(model.generate(**prompt, max_new_tokens=64)[0], skip_special_tokens=True))
```

## Use and limits
It writes what is likely after its training text, true or not; that text decides its language, knowledge and bias. {answers}
Not for answers that somebody relies on. Whether it repeats training text word for word was not measured.
Sizes: {sizes}.

## Training
{training}

## Check
{verdict}.
"""


def write_model_card(
    folder: Path, model: MiniMindForCausalLM, weight: str | Path, hf_config: PretrainedConfig, verdict: str, name: str
) -> None:
    """Write README.md, and where the run left losses a picture of them. verdict: the line about the comparison of logits."""
    config = model.config
    records = None
    # The run left nothing, or ended before its first line.
    with contextlib.suppress(UserError):
        records = RunRecords.read(Path(weight).with_name(f"{Path(weight).stem}.metrics.jsonl"))
    training = "No record of the run lay beside the weights."
    if records is not None:
        from trainer.reporting.html_report import loss_picture

        flags = [(f"`--{flag}`", shown(records.settings[flag])) for flag in SHAPING if flag in records.settings]
        training = f"{table(records.figures())}\n\n{table(flags)}"
        if "loss" in records.columns:
            (folder / "loss.png").write_bytes(loss_picture([records], [""]))
            training = f"![loss over the tokens trained](loss.png)\n\n{training}"
    chats = records is not None and trains_answers(records)
    card = CARD.format(
        name=name,
        kind=f"{'mixture of experts' if config.use_moe else 'dense'} {config.generation}",
        parameters=sum(parameter.numel() for parameter in model.parameters()) / 1e6,
        architecture=(hf_config.architectures or [""])[0],
        dtype=str(hf_config.dtype).removeprefix("torch."),
        least="4.51" if config.generation == "minimind3" or config.inference_rope_scaling else "4.48",
        asked=TURN if chats else TEXT,
        answers="It was fine-tuned on conversations."
        if chats
        else "It continues text and does not follow instructions.",
        sizes=", ".join(f"{size} {getattr(config, size):,}" for size in SIZES),
        training=training,
        verdict=verdict[0].upper() + verdict[1:],
    )
    (folder / "README.md").write_bytes(card.encode(errors="backslashreplace"))


def shown(value: object) -> str:
    """A flag's value in a cell, of each path its last part alone: the folders above tell who the user is."""
    values = value if isinstance(value, list) else [value]
    names = " ".join(re.split(r"[/\\]", str(part).rstrip("/\\"))[-1] for part in values)
    return f"`{one_line(names).replace('`', chr(39)).replace('|', chr(92) + '|')}`"


def table(rows: list[tuple[str, str]]) -> str:
    return "\n".join(["| | |", "|---|---|", *(f"| {label} | {value} |" for label, value in rows)])
