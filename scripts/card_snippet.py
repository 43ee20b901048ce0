"""The lines of Python in a model card: they draw the last sample of the run again, and the card says what they print."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from common.wording import printable
from dataset.chat.encoder import ChatEncoder
from dataset.tokenizing.encoder import DocumentEncoder
from model.weight_record import parses_special_tokens
from scripts.common import load_model
from trainer.reporting.records import RunRecords, trains_answers
from trainer.sampling import SAMPLE_TOKENS, TEMPERATURE, TOP_K, TOP_P, fitting_prompt, fitting_tokens

CODE = """```python
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained({name})
# In half precision another token may be drawn somewhere.
model = AutoModelForCausalLM.from_pretrained({name}).float()
torch.manual_seed({seed})
{asked}
sampling = dict(do_sample=True, temperature={temperature}, top_p={top_p}, top_k={top_k}, max_new_tokens={tokens})
{shown}
```"""
# Of a model that continues texts
TEXT_ASKED = 'prompt = tokenizer({prompt}, return_tensors="pt")'
TEXT_SHOWN = "print(tokenizer.decode(model.generate(**prompt, **sampling)[0], skip_special_tokens=True))"
# Of one that answers
TURN_ASKED = """turns = [{{"role": "user", "content": {prompt}}}]
prompt = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=True, return_tensors="pt")"""
TURN_SHOWN = """answer = model.generate(**prompt, **sampling)[0, prompt["input_ids"].shape[1] :]
print(tokenizer.decode(answer, skip_special_tokens=True))"""

# Of a card without a record of samples.
PROMPT = "The harbour"
SEED = 42
# A card is to be read: what is longer is no prompt for it.
MOST_CHARACTERS = 2000
# Of the last samples, from the last one on.
TRIED = 3


@dataclass(frozen=True)
class Sample:
    """A prompt and its text as the trainer recorded them. text, update: None where there is no record.

    is_turn: the prompt was asked in a conversation, and the text is the answer.
    """

    prompt: str
    seed: int
    text: str | None = None
    update: int | None = None
    is_turn: bool = False


def snippet(folder: Path, tokenizer: PreTrainedTokenizerBase, name: str, records: RunRecords | None) -> str:
    """Markdown: the lines of Python for the export in `folder`, which is to be called `name`, and what they print."""
    samples = last_samples(records)
    is_turn = answers(records)
    if not samples:
        return code(name, Sample(PROMPT, SEED, is_turn=is_turn))
    model = load_model(folder)
    encoder = ChatEncoder(tokenizer) if is_turn else DocumentEncoder(tokenizer, bool(parses_special_tokens(folder)))
    positions = model.config.max_position_embeddings
    comparable = [sample for sample in samples if has_same_ids(sample, tokenizer, encoder, positions)]
    if not comparable:
        return code(name, Sample(PROMPT, SEED, is_turn=is_turn))
    printed = ""
    tokens = SAMPLE_TOKENS
    for sample in comparable:
        prompt = asked(tokenizer, sample)
        tokens = fitting_tokens(prompt["input_ids"].shape[1], positions, SAMPLE_TOKENS)
        printed = continuation(model, tokenizer, sample, prompt, tokens)
        if printed == sample.text:
            said = f"This prints what the trainer's last sample from this prompt was, after update {sample.update:,}:"
            return f"{code(name, sample, tokens)}\n\n{said}\n\n{quoted(printed)}"
    said = "This prints the text below. The trainer's own last sample from this prompt is another one."
    return f"{code(name, sample, tokens)}\n\n{said}\n\n{quoted(printed)}"


def answers(records: RunRecords | None) -> bool:
    """Whether the run has trained answers of conversations."""
    return records is not None and trains_answers(records)


def has_same_ids(sample: Sample, tokenizer: PreTrainedTokenizerBase, encoder: DocumentEncoder, positions: int) -> bool:
    """Whether the snippet gives the model the ids that the trainer gave it.

    It does not where a prompt spells a special token, which is text in training, and where the trainer had to cut it.
    positions: of the model.
    """
    return bool(asked(tokenizer, sample)["input_ids"][0].tolist() == fitting_prompt(encoder, sample.prompt, positions))


def asked(tokenizer: PreTrainedTokenizerBase, sample: Sample) -> Any:
    """What the snippet gives the model, as tensors."""
    if not sample.is_turn:
        return tokenizer(sample.prompt, return_tensors="pt")
    turns = [{"role": "user", "content": sample.prompt}]
    return tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=True, return_tensors="pt")


def last_samples(records: RunRecords | None) -> list[Sample]:
    """The samples of the last update that has some, the last one first; only those that a card can show."""
    if records is None or not records.samples:
        return []
    seed = records.settings.get("seed")
    # The record may have been written by anything. torch takes no other seeds.
    if not isinstance(seed, int) or not 0 <= seed < 2**63:
        return []
    last_update = records.samples[-1]["update"]
    found = []
    for record in reversed(records.samples):
        if record["update"] == last_update and is_showable(record["prompt"]):
            found.append(Sample(record["prompt"], seed, record["text"], last_update, answers(records)))
    return found[:TRIED]


def is_showable(prompt: str) -> bool:
    """Whether a prompt can stand in a line of Python in a file of UTF-8. An empty one has no ids in some tokenizers."""
    try:
        prompt.encode()
    except UnicodeEncodeError:
        return False
    return 0 < len(prompt) <= MOST_CHARACTERS


def continuation(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, sample: Sample, prompt: Any, tokens: int
) -> str:
    """What the snippet prints on this export: the same calls. The random state of this process stays as it was.

    prompt: see `asked`. tokens: to draw at most.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(sample.seed)
        # The types of transformers know no `generate` of a model in general.
        output = model.generate(  # type: ignore[operator]
            **prompt,
            do_sample=True,
            temperature=TEMPERATURE,
            top_p=TOP_P,
            top_k=TOP_K,
            max_new_tokens=tokens,
        )
    shown = output[0, prompt["input_ids"].shape[1] :] if sample.is_turn else output[0]
    return str(tokenizer.decode(shown, skip_special_tokens=True))


def code(name: str, sample: Sample, tokens: int = SAMPLE_TOKENS) -> str:
    """The snippet as a block of Markdown. tokens: to draw at most."""
    to_ask = TURN_ASKED if sample.is_turn else TEXT_ASKED
    return CODE.format(
        name=literal(name),
        seed=sample.seed,
        asked=to_ask.format(prompt=literal(sample.prompt)),
        shown=TURN_SHOWN if sample.is_turn else TEXT_SHOWN,
        temperature=TEMPERATURE,
        top_p=TOP_P,
        top_k=TOP_K,
        tokens=tokens,
    )


def literal(text: str) -> str:
    """A text as Python spells it, on one line, and without a backtick, which could end the block in Markdown."""
    spelt = repr(text).replace("`", "\\x60")
    # As most people write it, where that makes no difference.
    if '"' not in spelt and "\\" not in spelt:
        spelt = f'"{text}"'
    return spelt


def quoted(text: str) -> str:
    """A text as a block of Markdown, within more backticks than it has itself."""
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}text\n{printable(text)}\n{fence}"
