"""A tokenizer in the terms of llama.cpp, which has the ways to cut text into pieces built in and knows them by name."""

import json
import re
from collections.abc import Collection, Mapping
from typing import Any

from tokenizers.models import BPE
from transformers import PreTrainedTokenizerBase

from common.errors import UserError
from dataset.tokenizing.byte_level_bpe import GPT2, LLAMA_BPE, QWEN2
from scripts.chat_template import can_chat, default_template
from scripts.gguf_format import Metadata

# {rule: (its name where a piece that is an entry is taken whole, its name where the merges alone decide)}. llama.cpp cuts
# by these exactly; docs/tokenizer.md tells for which characters it does not, and why its gpt-4o is not among them.
NAMES: dict[str, tuple[str | None, str]] = {
    LLAMA_BPE: ("llama-bpe", "smaug-bpe"),
    QWEN2: (None, "qwen2"),
    GPT2: (None, "gpt-2"),
}

# Types of tokens; numbers of llama.cpp. The text of a control token is only text in a prompt, as in our training; that of a
# user-defined one is always the token.
NORMAL = 1
CONTROL = 3
USER_DEFINED = 4
UNUSED = 5

# {% generation %} marks what fine-tuning trains on. It is of transformers alone.
GENERATION_MARK = re.compile(r"\{%([-+]?)\s*(end)?generation\s*([-+]?)%\}")


def tokenizer_metadata(
    tokenizer: PreTrainedTokenizerBase, vocab_size: int, where: str, begins_with_bos: bool
) -> Metadata:
    """What a GGUF file says of a tokenizer; vocab_size: the model's; where: names the tokenizer in an error.

    begins_with_bos: whether llama.cpp is to put BOS before a prompt; of no effect without such a token.
    Errors: UserError for one that llama.cpp would not follow exactly.
    """
    if not getattr(tokenizer, "is_fast", False):
        raise UserError(f"{where}: llama.cpp needs a tokenizer.json, and this tokenizer has none")
    content = json.loads(tokenizer.backend_tokenizer.to_str())
    try:
        rule = llama_cpp_rule(content)
    except UserError as error:
        raise UserError(f"{where}: {error}") from None
    fields: Metadata = {"model": "gpt2", "pre": rule}
    tokens, types = entries(tokenizer, vocab_size)
    fields["tokens"] = tokens
    fields["token_type"] = types
    fields["merges"] = [" ".join(pair) for pair in merges_of(content)]
    for ours, theirs in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"), ("unk", "unknown")):
        token_id = getattr(tokenizer, f"{ours}_token_id")
        if token_id is not None:
            fields[f"{theirs}_token_id"] = token_id
    fields["add_bos_token"] = begins_with_bos and tokenizer.bos_token_id is not None
    # A prompt is the beginning of a document, and EOS is its end.
    fields["add_eos_token"] = False
    metadata: Metadata = {f"tokenizer.ggml.{name}": value for name, value in fields.items()}
    template = chat_template(tokenizer)
    if template is not None:
        metadata["tokenizer.chat_template"] = template
        # Left out, llama.cpp takes any token that is spelled like the end of a turn, one time this and one time that.
        if tokenizer.eos_token_id is not None:
            metadata["tokenizer.ggml.eot_token_id"] = tokenizer.eos_token_id
    return metadata


def llama_cpp_rule(content: Mapping[str, Any]) -> str:
    """llama.cpp's name for how a tokenizer cuts texts and merges. Errors: UserError where it would not follow it exactly.

    content: of its tokenizer.json, as the library tokenizers writes it.
    """
    refuse_what_it_lacks(content)
    rule = piece_rule(content["pre_tokenizer"])
    if rule not in NAMES:
        raise UserError(
            "llama.cpp does not have the rule by which this tokenizer cuts texts into pieces, and by another rule the model "
            "reads worse; train a tokenizer with train_tokenizer.py --pieces llama-bpe, and a model with it"
        )
    whole_first, merges_alone = NAMES[rule]
    takes_whole = content["model"]["ignore_merges"]
    # Where each entry is what the merges make of its own bytes, both ways give the same.
    same = all_merge_to_themselves(content)
    if whole_first is not None and (same or takes_whole):
        return whole_first
    if takes_whole and not same:
        raise UserError(
            "the tokenizer takes entries whole that its merges do not make (ignore_merges); llama.cpp does not where texts "
            f"are cut by the rule {merges_alone}, but does with --pieces llama-bpe of train_tokenizer.py"
        )
    return merges_alone


def refuse_what_it_lacks(content: Mapping[str, Any]) -> None:
    """Errors: UserError for what a tokenizer.json has and llama.cpp has no counterpart of."""
    model = content["model"]
    if model["type"] != "BPE":
        raise UserError(f"llama.cpp takes a byte-level BPE, and this tokenizer is a {model['type']}")
    for option in ("byte_fallback", "dropout", "continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(option):
            raise UserError(f"llama.cpp takes a byte-level BPE, and knows none with {option}")
    if not model["merges"]:
        raise UserError("the tokenizer has no merges, and llama.cpp takes none without")
    if content["normalizer"] is not None:
        kind = content["normalizer"]["type"]
        raise UserError(f"the tokenizer changes texts first ({kind}), which llama.cpp does not")
    for added in content["added_tokens"]:
        if added["lstrip"] or added["rstrip"] or added["single_word"]:
            raise UserError(f"the token {added['content']!r} takes white space or whole words; llama.cpp does not")


def piece_rule(pre_tokenizer: Mapping[str, Any] | None) -> str | None:
    """The expression by which texts are cut before their bytes are merged; None where there is more to it."""
    if pre_tokenizer is None:
        return None
    steps = [pre_tokenizer]
    if pre_tokenizer["type"] == "Sequence":
        steps = pre_tokenizer["pretokenizers"]
    to_bytes = steps[-1]
    if to_bytes["type"] != "ByteLevel" or to_bytes["add_prefix_space"]:
        return None
    if len(steps) == 1:
        return GPT2 if to_bytes["use_regex"] else None
    if len(steps) > 2 or to_bytes["use_regex"] or steps[0]["type"] != "Split":
        return None
    split = steps[0]
    # Two ways to say that what matches is a piece. What does not match is one as well, or is lost; the rules of NAMES match
    # every character.
    if (split["behavior"], split["invert"]) not in (("Isolated", False), ("Removed", True)):
        return None
    return split["pattern"].get("Regex")


def merges_of(content: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The merges in their order."""
    merges = []
    for merge in content["model"]["merges"]:
        # A string with a space in older files.
        left, right = merge.split(" ") if isinstance(merge, str) else merge
        merges.append((left, right))
    return merges


def all_merge_to_themselves(content: Mapping[str, Any]) -> bool:
    """Whether the merges make each entry of its own bytes. It is so where they were learned and none was taken out."""
    vocabulary = content["model"]["vocab"]
    merging = BPE(vocabulary, merges_of(content))
    added = {token["content"] for token in content["added_tokens"]}
    return all(len(merging.tokenize(entry)) == 1 for entry in vocabulary if entry not in added)


def entries(tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> tuple[list[str], list[int]]:
    """The token and its type for each row of the embeddings; rows without a token get a name that no token has."""
    vocabulary = tokenizer.get_vocab()
    tokens = [unused_name(i, vocabulary) for i in range(vocab_size)]
    types = [UNUSED] * vocab_size
    for token, i in vocabulary.items():
        tokens[i] = token
        types[i] = NORMAL
    for i, added in tokenizer.added_tokens_decoder.items():
        types[i] = CONTROL if added.special else USER_DEFINED
    # llama.cpp ends where two are alike.
    assert len(set(tokens)) == len(tokens)
    return tokens, types


def unused_name(i: int, vocabulary: Collection[str]) -> str:
    """A name for row `i` that no entry of the vocabulary has, and no other row gets."""
    name = f"[PAD{i}]"
    while name in vocabulary:
        name = f"[{name}]"
    return name


def chat_template(tokenizer: PreTrainedTokenizerBase) -> str | None:
    """The chat template without what transformers alone understands; it writes the same. None: there is none."""
    if not can_chat(tokenizer):
        return None
    return GENERATION_MARK.sub(plain_mark, default_template(tokenizer))


def plain_mark(mark: re.Match[str]) -> str:
    """A mark that does nothing in the place of {% generation %}. It takes the same white space away."""
    before, end, after = mark.groups()
    word = "endif" if end else "if true"
    return f"{{%{before} {word} {after}%}}"
