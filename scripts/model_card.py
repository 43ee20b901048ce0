"""The README.md of an export, and the picture of the loss beside it, made from the run's own records."""

import contextlib
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from transformers import PretrainedConfig, PreTrainedTokenizerBase

from common.errors import UserError
from common.wording import counted, one_line
from dataset.tokenizing.encoder import load_tokenizer
from dataset.tokenizing.tokenizer_files import starts_with_bos
from model.config import MiniMindConfig
from model.model_minimind import MiniMindForCausalLM
from scripts.card_snippet import snippet
from scripts.gguf_tokenizer import llama_cpp_rule
from trainer.reporting.charts import LOSS
from trainer.reporting.records import FIGURES, RunRecords, is_number

SIZES = (
    ("layers", "num_hidden_layers"),
    ("width", "hidden_size"),
    ("query heads", "num_attention_heads"),
    ("key/value heads", "num_key_value_heads"),
    ("vocabulary", "vocab_size"),
    ("positions", "max_position_embeddings"),
)

# The flags that shape what is learned, in this order; the sizes stand in the table of the architecture.
SHAPING = (
    "data_path", "mixture", "val_path", "val_fraction", "max_seq_len", "pack", "long_documents", "epochs", "batch_size",
    "accumulation_steps", "optimizer", "learning_rate", "muon_lr", "embed_lr", "lr_schedule", "warmup_iters", "weight_decay",
    "grad_clip", "dtype", "init_scheme", "from_weight", "seed",
)  # fmt: skip
# Flags that tell of the machine, its places and its accounts, not of the training
UNPUBLISHED = {
    "out_dir", "cache_dir", "tokenizer_path", "sample_prompts", "save_weight", "wandb_project", "tracker", "use_wandb",
    "device", "local_rank", "ddp", "dist_timeout", "num_workers", "report", "keep_checkpoints", "from_resume",
}  # fmt: skip

PICTURE = "loss.png"

# The block that model hubs read. Language and license are the user's to add: nothing here knows them.
METADATA = """---
library_name: transformers
pipeline_tag: text-generation
tags:
- minimind
---"""

INTENDED_USE = """## Intended use and limits
- For: continuing text of the kinds it was trained on, studying how small language models learn, and as a beginning for
  further training.
{not_for}
- It continues text. Pretraining does not teach it to follow instructions, to keep up a conversation or to refuse; the chat
  template is there for a later training that does.
- It writes what is likely after its training text, true or not. That text decides its language, knowledge and bias; look
  at it before you rely on an answer. {word_for_word}"""

# Of a run that began with the weights of another model, of whose training nothing is known here
INTENDED_USE_GOING_ON = """## Intended use and limits
- The run began with the weights of {source}, whose license and limits hold here too.
- For: studying how small language models learn, and as a beginning for further training.
{not_for}
- It writes what is likely after its training texts, those of {source} included, true or not. {word_for_word}"""

NOT_FOR = """- Not for: answers that somebody relies on, advice on health, law or money, decisions about people, or texts that the
  public reads unchecked."""
WORD_FOR_WORD = "Whether it repeats training text word for word was not measured."

# Of a table: label, value.
Row = tuple[str, str]


def write_model_card(
    folder: Path, model: MiniMindForCausalLM, weight: str | Path, hf_config: PretrainedConfig, verdict: str, name: str
) -> None:
    """Write README.md, and where the run left losses a picture of them, beside the other files of an export.

    verdict: the line about the comparison of logits. name: what the export is to be called.
    """
    records = records_beside(Path(weight))
    picture = picture_of(records)
    if picture:
        (folder / PICTURE).write_bytes(picture)
    text = model_card(folder, model, records, hf_config, verdict, name)
    # A path of the run that is not UTF-8 holds lone surrogates, which are shown as \udcff.
    (folder / "README.md").write_bytes(text.encode(errors="backslashreplace"))


def records_beside(weight: Path) -> RunRecords | None:
    """What the run of a weight has recorded; None where it left nothing, or ended before its first line."""
    with contextlib.suppress(UserError):
        return RunRecords(weight.with_name(f"{weight.stem}.metrics.jsonl"))
    return None


def picture_of(records: RunRecords | None) -> bytes | None:
    """The loss over the tokens trained as a PNG; None where no loss is recorded."""
    if records is None or not any(field in records.curves for field in LOSS.fields):
        return None
    # Matplotlib takes a second to import.
    from trainer.reporting.html_report import loss_picture

    return loss_picture([records], [""])


def model_card(
    folder: Path,
    model: MiniMindForCausalLM,
    records: RunRecords | None,
    hf_config: PretrainedConfig,
    verdict: str,
    name: str,
) -> str:
    """Markdown with the metadata block that model hubs read. folder: of the finished files of the export."""
    tokenizer = load_tokenizer(folder)
    config: MiniMindConfig = model.config
    sections = [
        METADATA,
        f"# {name}",
        what_it_is(model, hf_config),
        snippet(folder, tokenizer, name, records),
        versions_line(config),
        intended_use(records) + line_on_length(records),
        "## Architecture\n" + table(rows_of_architecture(config)),
        *training_sections(records),
        "## Tokenizer\n" + about_tokenizer(tokenizer, records),
        f"## Check\n{verdict[0].upper() + verdict[1:]}.",
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


def intended_use(records: RunRecords | None) -> str:
    """What the model is for, as far as that is known of the weights that its run began with."""
    begun_with = records.settings.get("from_weight", "none") if records else "none"
    if begun_with == "none":
        return INTENDED_USE.format(not_for=NOT_FOR, word_for_word=WORD_FOR_WORD)
    source = in_code(str(without_places(begun_with)))
    return INTENDED_USE_GOING_ON.format(source=source, not_for=NOT_FOR, word_for_word=WORD_FOR_WORD)


def line_on_length(records: RunRecords | None) -> str:
    """What is known of long texts, as one more point of `intended_use`; nothing without a record."""
    positions = records.settings.get("max_seq_len") if records else None
    if not isinstance(positions, int):
        return ""
    return (
        f"\n- It was trained on rows of {positions:,} tokens. What it makes of longer texts was not measured, whatever the "
        "table of positions allows."
    )


def rows_of_architecture(config: MiniMindConfig) -> list[Row]:
    rows = [(label, f"{getattr(config, field):,}") for label, field in SIZES]
    if config.use_moe:
        experts = f"{config.num_experts}, {config.num_experts_per_tok} per token, {config.n_shared_experts} shared"
        rows.append(("experts", experts))
    return rows


def versions_line(config: MiniMindConfig) -> str:
    """The transformers that compute this model."""
    if config.inference_rope_scaling:
        return "It needs transformers 4.51 or newer: older ones leave out a part of its YaRN scaling, without a word."
    least = "4.51" if config.generation == "minimind3" else "4.48"
    return f"It loads in transformers {least} or newer, 4 and 5 alike."


# ---------------------------------------------------------------------------------------------- training


def training_sections(records: RunRecords | None) -> list[str]:
    """What the run has recorded: last figures, curves, shares of the data, settings."""
    if records is None:
        return ["## Training\nNo record of the run lay beside the weights."]
    sections = ["## Training\nFrom the run's own records. The last figures:\n\n" + table(rows_of_figures(records))]
    if picture_of(records):
        sections.append(f"![training and validation loss over the tokens trained]({PICTURE})")
    sources = rows_of_sources(records)
    if sources:
        header = ("source", "share of the trained tokens")
        sections.append("### Data\n" + table(sources, header))
    shaping, others = rows_of_settings(records.settings)
    if shaping:
        sections.append("### Settings\n" + table(shaping))
    if others:
        sections.append(f"<details>\n<summary>All other settings</summary>\n\n{table(others)}\n\n</details>")
    return sections


def rows_of_figures(records: RunRecords) -> list[Row]:
    """The last figures of a run, those that it has."""
    rows: list[Row] = []
    for label, field, write in FIGURES:
        value = records.last(field)
        if value is not None:
            rows.append((label, write(value)))
    return rows


def rows_of_sources(records: RunRecords) -> list[Row]:
    """(names of its files, share of an epoch's trained tokens) of each source of the last start; earlier records have none."""
    sources = records.starts[-1]["data"].get("sources") if records.starts else None
    rows: list[Row] = []
    for source in sources if isinstance(sources, list) else []:
        # The record may have been written by anything.
        if not isinstance(source, dict) or not isinstance(source.get("paths"), list):
            continue
        share, tokens, documents = (source.get(field) for field in ("share", "tokens", "documents"))
        if not (is_number(share) and isinstance(tokens, int) and isinstance(documents, int)):
            continue
        names = [str(without_places(str(path))) for path in source["paths"]]
        more = f" and {len(names) - 3:,} more" if len(names) > 3 else ""
        named = ", ".join(in_code(name) for name in names[:3]) + more
        rows.append((named, f"{share:.1%}: {tokens:,} of an epoch, in {counted(documents, 'document')}"))
    return rows


def rows_of_settings(settings: Mapping[str, Any]) -> tuple[list[Row], list[Row]]:
    """(flags that shape what is learned, the others that may be published); of a path its last part alone."""
    left_out = set(UNPUBLISHED)
    if settings.get("optimizer") != "muon":
        left_out |= {"muon_lr", "embed_lr"}
    shaping: list[Row] = []
    others: list[Row] = []
    for name in (*SHAPING, *sorted(settings.keys() - set(SHAPING))):
        if name in left_out or name not in settings:
            continue
        row = (in_code(f"--{name}"), in_code(str(without_places(settings[name]))))
        if name in SHAPING:
            shaping.append(row)
        else:
            others.append(row)
    return shaping, others


# Behind the path of a source: its share, or that at the begin and that at the end of the run, and the passes over it.
SHARE = re.compile(r":[\d.]+(>[\d.]+)?(:x[\d.]+)?\Z")


def without_places(value: object) -> object:
    """A flag's value with each path cut down to its last part, which may carry a share (`data.jsonl:0.7..0.2:x4`)."""
    if isinstance(value, list | tuple):
        return [without_places(part) for part in value]
    if not isinstance(value, str) or not re.search(r"[/\\]|^~", value):
        return value
    has_share = SHARE.search(value)
    share = has_share[0] if has_share else ""
    path = value.removesuffix(share).rstrip("/\\")
    last = re.split(r"[/\\]", path)[-1]
    # The home folder tells who the user is.
    if last.startswith("~") or last.lower() == Path.home().name.lower():
        last = "a folder"
    return last + share


# --------------------------------------------------------------------------------------------- tokenizer


def about_tokenizer(tokenizer: PreTrainedTokenizerBase, records: RunRecords | None) -> str:
    """What it is made of, what it puts around a text, and how many bytes a token holds where the run has noted it."""
    # Of its tokenizer.json, which those in Python do not have.
    content = json.loads(tokenizer.backend_tokenizer.to_str()) if getattr(tokenizer, "is_fast", False) else None
    kind = f"A {type(tokenizer).__name__}" if content is None else kind_of_tokenizer(content)
    lines = [
        f"- {kind} of {len(tokenizer):,} entries. {pieces_line(content)}",
        f"- {bos_line(tokenizer)}",
    ]
    if tokenizer.eos_token is not None:
        lines.append(f"- A document ends with `{tokenizer.eos_token}`, which the model writes itself.")
    bytes_per_token = records.starts[-1]["data"].get("bytes_per_token") if records and records.starts else None
    if is_number(bytes_per_token):
        lines.append(f"- A token holds {bytes_per_token:.2f} bytes of the training text (UTF-8) on average.")
    return "\n".join(lines)


def kind_of_tokenizer(content: Mapping[str, Any]) -> str:
    """As `A byte-level BPE`. content: of a tokenizer.json."""
    kind = content["model"]["type"]
    decoder = json.dumps(content.get("decoder"))
    return f"A byte-level {kind}" if '"ByteLevel"' in decoder else f"A {kind}"


def pieces_line(content: Mapping[str, Any] | None) -> str:
    """By which rule a tokenizer cuts texts before it merges, by the name that other programs know."""
    rule = None if content is None else llama_cpp_rule(content)
    if rule is None:
        return "Its way to cut texts into pieces has no name in llama.cpp, which cannot run this model exactly."
    return f"It cuts texts into pieces by the rule that llama.cpp calls `{rule}`."


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


# ------------------------------------------------------------------------------------------------ Markdown


def in_code(text: str) -> str:
    """A text as code in a cell of a table: on one line, and without what would end the code or the cell."""
    plain = one_line(text).replace("`", "'").replace("|", "\\|")
    return f"`{plain}`"


def table(rows: Iterable[Row], header: Row = ("", "")) -> str:
    lines = [f"| {header[0]} | {header[1]} |", "|---|---|"]
    for left, right in rows:
        lines.append(f"| {left} | {right} |")
    return "\n".join(lines)
