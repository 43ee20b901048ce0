"""Our tokenizer: a byte-level BPE with the special tokens and the chat template of MiniMind; the rules by which BPEs cut text."""

import json
import re
import string
import sys
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from common.files import atomic_file
from dataset.tokenizing.tokenizer_files import bos_template, portable_template

# Ids are indices into SPECIAL_TOKENS; the first three are those of the public tokenizers.
# All are "special": then encode_special_tokens (split_special_tokens=True in transformers), which the data path uses,
# keeps literal text from becoming one of them. Other added tokens would still be matched.
# Pad doubles as unk, which byte-level BPE never needs.
PAD = "<|endoftext|>"
BOS = "<|im_start|>"
EOS = "<|im_end|>"
CHAT_TOKENS = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"]
# Free marks for fine-tuning: a new entry would change the size of the embeddings.
SPARE_TOKENS = ["<|buffer1|>", "<|buffer2|>", "<|buffer3|>", "<|buffer4|>"]
SPECIAL_TOKENS = [PAD, BOS, EOS, *CHAT_TOKENS, *SPARE_TOKENS]

# Pre-tokenizer patterns that cut text into pieces, named as in llama.cpp. The first matching alternative wins. llama.cpp
# and Ollama do not read the pattern from a model file, but know some tokenizers by name and have their patterns built in.
# So a model can be exported to them only with one of those.

# Llama 3's, verbatim, since other programs recognise it by its text (Ollama by its SHA-256).
LLAMA_BPE = (
    # The English contractions: 's, 't, 're, ...
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
    # A word or a run of Han characters, with the space, bracket, dot or comma before it.
    r"|[^\r\n\p{L}\p{N}]?\p{L}+"
    # Three digits at most, so that long numbers take no entries.
    r"|\p{N}{1,3}"
    # Punctuation with the line breaks after it.
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*"
    # Line breaks with the white space before them.
    r"|\s*[\r\n]+"
    # Other white space; the last character is left to the word that follows.
    r"|\s+(?!\S)"
    r"|\s+"
)
# Qwen 2's and Qwen 3's: Llama 3's, but with each digit a piece.
QWEN2 = LLAMA_BPE.replace(r"\p{N}{1,3}", r"\p{N}")
# Qwen 3.5's: Qwen 2's, but combining marks belong to the word: vowels of Hindi, tones of Thai, accents that stand alone.
QWEN35 = QWEN2.replace(r"\p{L}+", r"[\p{L}\p{M}]+").replace(r"[^\s\p{L}\p{N}]", r"[^\s\p{L}\p{M}\p{N}]")
# ByteLevel's default (`use_regex`): the pattern of GPT-2 and of the public MiniMind tokenizers.
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# GPT-4o's and gpt-oss's, and the three of DeepSeek V3, which are applied one after the other.
GPT4O = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
DEEPSEEK = (
    r"\p{N}{1,3}",
    "[一-龥\u3040-ゟ゠-ヿ]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
# DeepSeek's first two split numbers and Chinese alone.
WORD_PATTERNS = {GPT2, LLAMA_BPE, QWEN2, QWEN35, GPT4O, DEEPSEEK[-1]}
KNOWN_PATTERNS = {*WORD_PATTERNS, *DEEPSEEK}

# Choices of train_tokenizer.py --pieces, and the one that takes the rule with more bytes per token
PIECE_RULES = {"llama-bpe": LLAMA_BPE, "qwen2": QWEN2, "qwen35": QWEN35}
AUTO = "auto"
# Combining marks per letter (Hindi 0.6, Thai 0.3) from which on QWEN35's words gain more bytes per token than its single
# digits cost: measured on English with a share of Hindi or Thai, the balance is at a fifth.
MANY_MARKS = 0.03
# Maximum characters of a part of a text in training, whose time grows with the square of a piece
LONGEST_PIECE = 4096
# Maximum characters encoded at once: about 700 MB in the tokenizer if each is a token
LONGEST_WHOLE = 1 << 21
# Characters that a part may end before: after a letter, and after a digit
MARKS = "\n ,.，。"
AFTER_DIGITS = string.whitespace[:4] + string.punctuation

# Byte-level BPE (Radford et al., "Language models are unsupervised multitask learners", 2019) in four steps:
# 1. The text is cut into pieces, by one of the rules above. Merges never cross a border between pieces.
# 2. Each piece is written as its bytes in UTF-8. JSON holds text, not bytes, so GPT-2's table maps each of the 256 bytes
#    to a visible character (a space is "Ġ"). All 256 are entries: nothing is ever unknown.
# 3. Training counts the adjacent pairs of entries in the pieces of the sample, merges the most frequent pair into a new
#    entry everywhere, and counts again, until the vocabulary is full. The result is the ordered list of merges.
# 4. Encoding repeats these merges: in each piece, the adjacent pair that comes first in the list is merged, until no
#    pair is in the list.

# ChatML. tools: JSON schemas, listed in the system turn. enable_thinking: true opens the assistant's thoughts, false
# closes them empty, undefined lets the model choose. Fine-tuning trains what is between the generation marks, which
# transformers alone knows (return_assistant_tokens_mask). Token stores of conversations depend on this very text.
MARKED_TEMPLATE = """\
{%- macro text_of(content) -%}
    {%- if content is string %}{{ content }}
    {%- else %}{% for part in content or [] %}{{ part.text }}{% endfor %}{% endif -%}
{%- endmacro -%}
{%- set system = text_of(messages[0].content) if messages and messages[0].role == 'system' else '' -%}
{%- if system or tools -%}
    {{ '<|im_start|>system\\n' + system }}
    {%- if tools -%}
        {{ ('\\n\\n' if system else '') + 'Functions that you may call, a JSON schema each:' }}
        {%- for tool in tools %}{{ '\\n' + tool | tojson }}{% endfor -%}
        {{ '\\nA call is a JSON object with "name" and "arguments" between <tool_call> and </tool_call>.' }}
    {%- endif -%}
    {{ '<|im_end|>\\n' }}
{%- endif -%}
{%- for message in messages -%}
    {%- set text = text_of(message.content) -%}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) -%}
        {{ '<|im_start|>' + message.role + '\\n' + text + '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' -%}
        {{ '<|im_start|>tool\\n<tool_response>\\n' + text + '\\n</tool_response><|im_end|>\\n' }}
    {%- elif message.role == 'assistant' -%}
        {{ '<|im_start|>assistant\\n' }}
        {%- generation -%}
        {%- if message.reasoning_content -%}
            {{ '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' }}
        {%- endif -%}
        {{ text }}
        {%- for call in message.tool_calls or [] -%}
            {%- set call = call.function or call -%}
            {%- set arguments = call.arguments if call.arguments is string else call.arguments | tojson -%}
            {{ '\\n' if text or not loop.first else '' }}
            {{- '<tool_call>\\n{"name": ' + call.name | tojson + ', "arguments": ' + arguments + '}\\n</tool_call>' }}
        {%- endfor -%}
        {{ '<|im_end|>' }}
        {%- endgeneration -%}
        {{ '\\n' }}
    {%- elif message.role != 'system' -%}
        {{ raise_exception('unknown role ' + message.role + ': system, user, assistant or tool') }}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{ '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined -%}
        {{ '<think>\\n' if enable_thinking else '<think>\\n\\n</think>\\n\\n' }}
    {%- endif -%}
{%- endif -%}
"""
# In files, which other engines read
CHAT_TEMPLATE = portable_template(MARKED_TEMPLATE)
# Template for exports of models that were trained without thoughts. llama.cpp and others set enable_thinking by default,
# which would put tags before the answer that such a model has never seen.
WITHOUT_THOUGHTS = re.sub(r" *{%- if enable_thinking .*?{%- endif -%}\n", "", CHAT_TEMPLATE, flags=re.DOTALL)
OUR_TEMPLATES = (CHAT_TEMPLATE, WITHOUT_THOUGHTS)


def untrained_bpe(pieces: str) -> Tokenizer:
    """A byte-level BPE before training: its pre-tokenizer, no entries. pieces: a name in PIECE_RULES."""
    # ignore_merges: a piece that is an entry becomes it directly, as in Llama 3, llama.cpp and tiktoken.
    tokenizer = Tokenizer(models.BPE(ignore_merges=True))
    # isolated: unmatched text would be a piece too, but the rules match everything.
    split = pre_tokenizers.Split(Regex(PIECE_RULES[pieces]), behavior="isolated")
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, to_bytes])
    return tokenizer


def piece_rule(content: dict[str, Any]) -> str | None:
    """llama.cpp's name for a tokenizer's pre-tokenizer; None: it has no exact equivalent.

    content: its tokenizer.json, as the tokenizers library writes it.
    """
    of_minimind = Tokenizer(models.BPE())
    of_minimind.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    known = {"gpt-2": of_minimind} | {name: untrained_bpe(name) for name in PIECE_RULES}
    takes_white_space = any(
        token[flag] for token in content["added_tokens"] for flag in ("lstrip", "rstrip", "single_word")
    )
    for name, tokenizer in known.items():
        theirs = json.loads(tokenizer.to_str())
        # Compare the rules, without the learned vocabulary and merges
        learned = {field: content["model"].get(field) for field in ("vocab", "merges")}
        is_same = {**theirs["model"], **learned} == content["model"]
        is_same &= all(theirs[part] == content[part] for part in ("normalizer", "pre_tokenizer"))
        if is_same and not takes_white_space:
            return name
    return None


def best_pieces(texts: Iterable[str]) -> str:
    """The name in PIECE_RULES of the rule with most bytes per token; single digits ("qwen2") never have it."""
    # by general category: letters, marks, numbers, ...
    kinds: Counter[str] = Counter()
    for character, number in Counter(chain.from_iterable(texts)).items():
        kinds[unicodedata.category(character)[0]] += number
    return "qwen35" if kinds["M"] > MANY_MARKS * kinds["L"] else "llama-bpe"


# A tokenizer holds more than 100 bytes per byte of a text until it is done, so a long text is encoded in parts, with the
# ids of the whole. A part ends after a letter and before a line end, a space, a comma or a full stop, or after a digit and
# before any mark of ASCII. There all WORD_PATTERNS end a piece, whatever follows: a run of letters or digits is over, and
# the next character starts a new piece; no merge crosses a border between pieces. Without such a place, or for another tokenizer, a text is encoded whole, up to
# LONGEST_WHOLE characters.
def is_cut(before: str, after: str) -> bool:
    """True if a part may end between two characters."""
    if before in string.digits:
        return after in AFTER_DIGITS
    # a letter of the Unicode tables of 2002, on which all later ones agree
    return after in MARKS and unicodedata.ucd_3_2_0.category(before)[0] == "L"


def parts_of(text: str, max_characters: int) -> Iterator[str]:
    """Yields parts of at most `max_characters`; a longer one only if it has no place to cut."""
    begin = 0
    while len(text) - begin > max_characters:
        # one character too many: the caller refuses such a part
        furthest = min(len(text), begin + LONGEST_WHOLE + 1)
        # the last place within the part, else the first one after it
        last = begin + max_characters
        places = chain(range(last, begin, -1), range(last + 1, furthest))
        end = next((at for at in places if is_cut(text[at - 1], text[at])), furthest)
        yield text[begin:end]
        begin = end
    yield text[begin:]


def train_bpe(texts: Iterable[str], vocab_size: int, pieces: str = AUTO, may_be_fewer: bool = False) -> Tokenizer:
    """A byte-level BPE of exactly `vocab_size` entries: SPECIAL_TOKENS, the 256 bytes, then merges by frequency.

    pieces: a name in PIECE_RULES, or AUTO. may_be_fewer: of as many entries as the texts give, if these are fewer. The same
    texts give the same tokenizer, byte for byte: pairs of equal count are merged in the order of their ids. Errors: ValueError if the texts have too few distinct pairs.
    """
    texts = list(texts)
    tokenizer = untrained_bpe(best_pieces(texts) if pieces == AUTO else pieces)
    tokenizer.decoder = decoders.ByteLevel()
    # For direct calls of the tokenizer; the trainers encode without it and add BOS and EOS themselves.
    tokenizer.post_processor = bos_template(BOS, SPECIAL_TOKENS.index(BOS))
    special_tokens = [AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        # A pair that occurs once says nothing about the language.
        min_frequency=2,
        special_tokens=special_tokens,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        # In bytes, exclusive: entries have 31 at most. The library does not apply it to pairs of single bytes.
        max_token_length=32,
        show_progress=sys.stderr.isatty(),
    )
    parts = (part for text in texts for part in parts_of(text, LONGEST_PIECE))
    # Only longer pieces are divided: a cut within a word takes one pair of some thousand from the counts.
    pieces_of = (part[at : at + LONGEST_PIECE] for part in parts for at in range(0, len(part), LONGEST_PIECE))
    tokenizer.train_from_iterator(pieces_of, trainer)
    got = tokenizer.get_vocab_size()
    if got != vocab_size and not may_be_fewer:
        raise ValueError(
            f"the sample gives {got} entries at most, not {vocab_size}: pass --vocab_size {got}, or give more text of other words"
        )
    return tokenizer


def save(tokenizer: Tokenizer, out_dir: Path) -> None:
    """Write the two files of a tokenizer to a folder."""
    out_dir.mkdir(parents=True, exist_ok=True)
    # what transformers needs beside tokenizer.json
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": PAD,
        "unk_token": PAD,
        # transformers 4's name, which transformers 5 (extra_special_tokens) reads too
        "additional_special_tokens": CHAT_TOKENS + SPARE_TOKENS,
        # As in tokenizer.json, for programs that look here (llama.cpp, vLLM)
        "add_bos_token": True,
        "add_eos_token": False,
        # No token_type_ids, which generate() would refuse.
        "model_input_names": ["input_ids", "attention_mask"],
        "clean_up_tokenization_spaces": False,
        "model_max_length": 32768,
        "chat_template": CHAT_TEMPLATE,
    }
    settings = json.dumps(config, indent=2, ensure_ascii=False)
    contents = {"tokenizer.json": tokenizer.to_str(pretty=True), "tokenizer_config.json": settings}
    for name, content in contents.items():
        with atomic_file(out_dir / name) as file:
            file.write(f"{content}\n".encode())
