"""A tokenizer's files: what it adds to a text unasked, and a folder that transformers 4.48 to 5 read alike."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from common.paths import ROOT

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# The tokenizer that comes with this repository: what is used where the user names none.
DEFAULT = ROOT / "model"
CONFIG = "tokenizer_config.json"
# What save_pretrained of transformers 5 notes about the machine and the call that loaded the tokenizer
OF_THIS_MACHINE = ("backend", "is_local", "local_files_only", "name_or_path", "trust_remote_code")


def bos_template(bos: str, bos_id: int) -> TemplateProcessing:
    """Put BOS before each text, as a document begins in training; EOS comes from the model."""
    return TemplateProcessing(single=[bos, "$A"], pair=[bos, "$A", bos, "$B"], special_tokens=[(bos, bos_id)])


def plain_template() -> TemplateProcessing:
    """Add nothing: what transformers 5 gives a tokenizer.json that has no post-processor."""
    return TemplateProcessing(single="$A:0", pair="$A:0 $B:1", special_tokens=[])


def leave_bos_to_the_caller(backend: Tokenizer, bos: str | None, bos_id: int | None) -> None:
    """In place: take back what `bos_template` adds.

    Then a tokenizer is the same one, byte for byte in `to_str`, whether its file was written with that post-processor
    or, as in earlier releases, without any. Other post-processors stay as they are.
    """
    if bos is None or bos_id is None or backend.post_processor is None:
        return
    # The library shows a post-processor only as a part of the whole tokenizer.json, so its JSON is compared with what
    # `bos_template` becomes there.
    processor = json.loads(backend.to_str())["post_processor"]
    head = {"SpecialToken": {"id": bos, "type_id": 0}}
    first = {"Sequence": {"id": "A", "type_id": 0}}
    second = {"Sequence": {"id": "B", "type_id": 0}}
    ours = {
        "type": "TemplateProcessing",
        "single": [head, first],
        "pair": [head, first, head, second],
        "special_tokens": {bos: {"id": bos, "ids": [bos_id], "tokens": [bos]}},
    }
    if processor == ours:
        backend.post_processor = plain_template()


def add_bos(tokenizer: "PreTrainedTokenizerBase") -> None:
    """In place: a fast tokenizer that adds nothing to a text adds its BOS from now on, as our training does."""
    if not getattr(tokenizer, "is_fast", False) or tokenizer.bos_token_id is None:
        return
    if tokenizer("a").input_ids == tokenizer("a", add_special_tokens=False).input_ids:
        template = bos_template(str(tokenizer.bos_token), tokenizer.bos_token_id)
        tokenizer.backend_tokenizer.post_processor = template


def save_tokenizer(tokenizer: "PreTrainedTokenizerBase", folder: Path) -> None:
    """Write a Hugging Face tokenizer so that transformers 4.48 to 5 load it, without a path of this machine."""
    # In the config alone: transformers 4.48 knows no chat_template.jinja, and a second copy could differ one day.
    tokenizer.save_pretrained(folder, save_jinja_files=False)
    path = Path(folder) / CONFIG
    fields = json.loads(path.read_text(encoding="utf-8"))
    for name in OF_THIS_MACHINE:
        fields.pop(name, None)
    fields = in_older_words(fields)
    # Left to a default, transformers 4 gives a PreTrainedTokenizerFast token_type_ids, which generate() refuses.
    fields["model_input_names"] = list(tokenizer.model_input_names)
    if fields["tokenizer_class"] == "PreTrainedTokenizerFast" and starts_with_bos(tokenizer):
        # What tokenizer.json says already, for programs that look here (llama.cpp, vLLM).
        fields["add_bos_token"] = True
        fields["add_eos_token"] = tokenizer("a").input_ids[-1] == tokenizer.eos_token_id
    path.write_text(json.dumps(fields, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def starts_with_bos(tokenizer: "PreTrainedTokenizerBase") -> bool:
    """Whether a text gets a BOS unasked."""
    return tokenizer.bos_token_id is not None and tokenizer("a").input_ids[:1] == [tokenizer.bos_token_id]


def in_older_words(fields: dict[str, Any]) -> dict[str, Any]:
    """The fields of a tokenizer_config.json in the names of transformers 4, which transformers 5 reads too."""
    if fields.get("tokenizer_class") == "TokenizersBackend":
        fields["tokenizer_class"] = "PreTrainedTokenizerFast"
    # A dict in this place names tokens (image_token, say); transformers 4.48 and later know that.
    if isinstance(fields.get("extra_special_tokens"), list):
        fields["additional_special_tokens"] = fields.pop("extra_special_tokens")
    return fields


def unnamed_vocabulary(weight: Path) -> str:
    """What to say of a .pth that is read with DEFAULT, and whose .json names no vocabulary."""
    # Every weight of this repository says so; the public code has another tokenizer of the same size.
    return (
        f"warning: {weight} does not say which tokenizer it was trained with, and the one in model/ is taken: name its own "
        "with --tokenizer_path"
    )
