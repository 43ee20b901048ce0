"""Writing a Hugging Face tokenizer, with the defaults that transformers 4.48 to 5 share."""

import json
from pathlib import Path
from typing import TYPE_CHECKING

from dataset.tokenizing.tokenizer_files import CONFIG

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Fields in which save_pretrained of transformers 5 records the machine and the loading call
LOCAL_FIELDS = ("backend", "is_local", "local_files_only", "name_or_path", "trust_remote_code")


def save_tokenizer(tokenizer: "PreTrainedTokenizerBase", folder: Path) -> None:
    """Write a Hugging Face tokenizer so that transformers 4.48 to 5 load it, without local paths."""
    # Template in the config alone: transformers 4.48 ignores chat_template.jinja, and two copies could diverge.
    tokenizer.save_pretrained(folder, save_jinja_files=False)
    path = Path(folder) / CONFIG
    fields = json.loads(path.read_text(encoding="utf-8"))
    for name in LOCAL_FIELDS:
        fields.pop(name, None)
    # The names of transformers 4, which transformers 5 reads too
    if fields.get("tokenizer_class") == "TokenizersBackend":
        fields["tokenizer_class"] = "PreTrainedTokenizerFast"
    # A dict here names tokens (such as image_token), which transformers 4.48 and later read.
    if isinstance(fields.get("extra_special_tokens"), list):
        fields["additional_special_tokens"] = fields.pop("extra_special_tokens")
    # By default transformers 4 gives a PreTrainedTokenizerFast token_type_ids, which generate() refuses.
    fields["model_input_names"] = list(tokenizer.model_input_names)
    if fields["tokenizer_class"] == "PreTrainedTokenizerFast" and starts_with_bos(tokenizer):
        # As in tokenizer.json, for programs that look here (llama.cpp, vLLM)
        fields["add_bos_token"] = True
        fields["add_eos_token"] = tokenizer("a").input_ids[-1] == tokenizer.eos_token_id
    path.write_text(json.dumps(fields, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def starts_with_bos(tokenizer: "PreTrainedTokenizerBase") -> bool:
    """True if a text gets a BOS by default."""
    return tokenizer.bos_token_id is not None and tokenizer("a").input_ids[:1] == [tokenizer.bos_token_id]
