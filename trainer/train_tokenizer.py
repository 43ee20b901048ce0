"""Train a tokenizer (byte-level BPE, or WordPiece for ELECTRA), or compare tokenizers on a text.

The committed model/tokenizer.json (half a minute on two cores, 2 GB of memory):
    C=../shared/corpora
    python trainer/train_tokenizer.py --out_dir model --vocab_size 6400 --sample_mb 60 \\
        --data_path $C/en_wiki.train.jsonl $C/en_novels.train.jsonl $C/zh_wiki.train.jsonl \\
                    $C/zh_lctt_tech.train.jsonl $C/zh_laws.train.jsonl $C/code_python.train.jsonl \\
        --weights 32 8 30 12 2 16

On your own text:
    python trainer/train_tokenizer.py --data_path my_corpus.jsonl --vocab_size 6400 --out_dir out/my_tokenizer
    python trainer/train_tokenizer.py --type wordpiece --data_path my_corpus.jsonl --vocab_size 8192 --out_dir out/my_wordpiece

Bytes per token of several tokenizers, as a markdown table:
    python trainer/train_tokenizer.py --compare model ../shared/tokenizers/minimind2 --data_path $C/en_wiki.valid.jsonl
"""

import argparse
import json
import math
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path

if __package__ in (None, ""):
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from common.flags import Parser, positive
from common.notices import announce
from common.wording import one_line
from dataset.reading.documents import BadLines, DataError, find_files, read_documents
from dataset.reading.file_kinds import TEXT_SUFFIXES_HELP, text_suffix
from dataset.tokenizing.tokenizer_files import bos_template
from dataset.tokenizing.wordpiece import WORDPIECE_TOKENS, save_wordpiece, train_wordpiece

# Ids are the places in this list; the first three are those of the public tokenizers.
# All are "special": then encode_special_tokens (split_special_tokens=True in transformers), which the data path uses,
# keeps literal text from becoming one of them. Added tokens that are not special would be matched even so.
PAD, BOS, EOS = "<|endoftext|>", "<|im_start|>", "<|im_end|>"  # pad is unk too; byte-level BPE never needs an unk
CHAT_TOKENS = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"]
SPARE_TOKENS = [f"<|buffer{i}|>" for i in range(1, 5)]
SPECIAL_TOKENS = [PAD, BOS, EOS, *CHAT_TOKENS, *SPARE_TOKENS]

# Text is cut into these pieces, the first alternative that fits, and merges never cross a border between two.
PIECES = [
    # A number, four digits at most: a year is one piece, and a long number takes no entry of its own.
    r" ?\p{N}{1,4}",
    # A word or a run of Han characters, with the space, bracket, dot or comma before it.
    r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+",
    # Punctuation with the line break and the indentation after it, as in ":\n       ".
    r" ?[^\s\p{L}\p{N}]+(?:[\r\n]+(?:[ \t]+(?=[ \t]))?)?",
    # White space; the last character is left to the word that follows.
    r"\s+(?!\S)",
    r"\s+",
]
# The flags that only training reads
TRAINING_FLAGS = ("sample_mb", "weights", "type", "lower_case", "vocab_size", "max_token_bytes")
BATCH = 1000  # documents encoded at a time by --compare

# ChatML. tools: JSON schemas, listed in the system turn. enable_thinking: true opens the assistant's thoughts, false
# closes them empty, left out the model chooses. What stands between the generation marks is what fine-tuning trains on
# (return_assistant_tokens_mask).
CHAT_TEMPLATE = """\
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


def build_parser() -> Parser:
    parser = Parser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        prog="train_tokenizer.py",
        allow_abbrev=False,
    )
    g = parser.add_argument_group("data")
    paths = "the sources: each a file, a folder or a glob; dataset/README.md lists the kinds of files"
    g.add_argument("--data_path", nargs="+", required=True, metavar="PATH", help=paths)
    g.add_argument("--text_field", default="text", help="name of the field that holds the text (default: text)")
    g.add_argument("--text_suffixes", type=text_suffix, nargs="+", metavar="SUFFIX", help=TEXT_SUFFIXES_HELP)
    parser.switch(
        g, "--skip_bad_lines", False, "pass over faulty lines and report them, instead of stopping at the first"
    )
    size = "size of the sample in MB (10^6 bytes of UTF-8), at most all the text; memory is 40 times it (default: 60)"
    g.add_argument("--sample_mb", type=positive(float), default=60, metavar="MB", help=size)
    shares = (
        "share of each source in the sample, in any unit; a source too small for its share is repeated (default: equal)"
    )
    g.add_argument("--weights", type=positive(float), nargs="+", metavar="W", help=shares)
    g = parser.add_argument_group("vocabulary")
    kinds = "bpe: byte-level, for the main trainer; wordpiece: as BERT's, for trainer/train_electra.py (default: bpe)"
    g.add_argument("--type", choices=("bpe", "wordpiece"), default="bpe", help=kinds)
    cased = "wordpiece: lower-case the text and strip its accents, as bert-base-uncased does (default: true)"
    parser.switch(g, "--lower_case", True, cased)
    entries = "number of entries, special tokens and (bpe) the 256 bytes included (default: 6400)"
    g.add_argument("--vocab_size", type=positive(int), default=6400, metavar="N", help=entries)
    longest = "bpe: longest entry, in bytes (default: 32)"
    g.add_argument("--max_token_bytes", type=positive(int), default=32, metavar="N", help=longest)
    g = parser.add_argument_group("what to do (one of these)").add_mutually_exclusive_group(required=True)
    g.add_argument("--out_dir", help="train, and write tokenizer.json and tokenizer_config.json to this folder")
    table = "train nothing; print bytes per token of the tokenizers in these folders on the data, as a markdown table"
    g.add_argument("--compare", nargs="+", metavar="FOLDER", help=table)
    return parser


class Source:
    """One --data_path: a file, a folder or a glob. Only one document is held at a time."""

    def __init__(
        self,
        data_path: str,
        text_field: str = "text",
        skip_bad_lines: bool = False,
        text_suffixes: Sequence[str] | None = None,
    ):
        self.name = data_path
        self.text_field = text_field
        self.files = find_files(data_path, text_suffixes)
        self.bad_lines = BadLines() if skip_bad_lines else None

    def documents(self) -> Iterator[str]:
        for file in self.files:
            for _, text in read_documents(file, self.text_field, self.bad_lines):
                yield text

    def count_bytes(self) -> int:
        """Bytes of text, in UTF-8: a compressed file or one with escapes is weighed by its text."""
        total = sum(len(text.encode("utf-8")) for text in self.documents())
        if not total:
            raise DataError(f"{self.name}: no text in it")
        if self.bad_lines:
            for line in self.bad_lines.report():
                announce(line, to_stderr=True)
        return total

    def sample(self, share: float) -> Iterator[str]:
        """Documents worth about `share` times the source, spread evenly over it; above 1 documents come repeatedly.

        Documents are counted, not bytes: taking one whenever the sample falls behind in bytes favours long documents.
        """
        for i, text in enumerate(self.documents()):
            for _ in range(math.ceil((i + 1) * share) - math.ceil(i * share)):
                yield text


def draw_sample(sources: list[Source], weights: list[float], sample_bytes: float) -> Iterator[str]:
    """The mixture, source after source (the order does not matter to BPE); prints what each source gives."""
    totals = [source.count_bytes() for source in sources]
    sample_bytes = min(sample_bytes, sum(totals))
    for source, weight, total in zip(sources, weights, totals, strict=True):
        wanted = sample_bytes * weight / sum(weights)
        announce(f"{source.name}: {wanted / 1e6:.1f} of {total / 1e6:.1f} MB ({wanted / total:.2f} times the source)")
        yield from source.sample(wanted / total)


def train_bpe(texts: Iterable[str], vocab_size: int, max_token_bytes: int = 32) -> Tokenizer:
    """A byte-level BPE of exactly `vocab_size` entries: SPECIAL_TOKENS, the 256 bytes, then merges by frequency.

    The same texts give the same tokenizer, byte for byte: pairs of equal count are taken in the order of their ids.
    Errors: ValueError where the texts hold too few different pairs.
    """
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex("|".join(PIECES)), behavior="isolated")
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, to_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    # The trainers encode without it and put BOS and EOS themselves; it is for those who call the tokenizer plainly.
    tokenizer.post_processor = bos_template(BOS, SPECIAL_TOKENS.index(BOS))
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        max_token_length=max_token_bytes,
        show_progress=sys.stderr.isatty(),
    )
    tokenizer.train_from_iterator(texts, trainer)
    if (got := tokenizer.get_vocab_size()) != vocab_size:
        raise ValueError(f"the sample gives {got} entries, not {vocab_size}: give more text or a smaller --vocab_size")
    return tokenizer


def config() -> dict:
    """tokenizer_config.json: what transformers needs beside tokenizer.json."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": PAD,
        "unk_token": PAD,
        # The name of transformers 4; transformers 5, which says extra_special_tokens, reads it too.
        "additional_special_tokens": CHAT_TOKENS + SPARE_TOKENS,
        # What tokenizer.json says already, for programs that look here (llama.cpp, vLLM).
        "add_bos_token": True,
        "add_eos_token": False,
        # No token_type_ids, which generate() would refuse.
        "model_input_names": ["input_ids", "attention_mask"],
        "clean_up_tokenization_spaces": False,
        "model_max_length": 32768,
        "chat_template": CHAT_TEMPLATE,
    }


def save(tokenizer: Tokenizer, out_dir: Path) -> None:
    out_dir.mkdir(parents=True, exist_ok=True)
    (out_dir / "tokenizer.json").write_text(tokenizer.to_str(pretty=True) + "\n", encoding="utf-8")
    settings = json.dumps(config(), indent=2, ensure_ascii=False)
    (out_dir / "tokenizer_config.json").write_text(settings + "\n", encoding="utf-8")


def load(folder: str) -> Tokenizer:
    """The tokenizer of a folder, literal special tokens encoded as text, as the data path does."""
    path = Path(folder) / "tokenizer.json"
    if not path.is_file():
        raise ValueError(f"{path}: no such file; --compare takes folders with a tokenizer.json")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing narrower
        raise ValueError(f"{path}: not a tokenizer ({error})") from error
    tokenizer.encode_special_tokens = True
    return tokenizer


def compare(folders: list[str], sources: list[Source]) -> str:
    """A markdown table: bytes of UTF-8 per token without BOS and EOS; speed of encode_batch_fast over all sources."""
    names = [source.files[0].name.split(".jsonl")[0] if len(source.files) == 1 else source.name for source in sources]
    lines = [f"| tokenizer | {' | '.join(names)} | MB/s | M tokens/s |", "|---|" + "---|" * (len(sources) + 2)]
    for folder in folders:
        tokenizer, ratios, all_bytes, all_tokens, seconds = load(folder), [], 0, 0, 0.0
        for source in sources:
            documents, n_bytes, n_tokens = source.documents(), 0, 0
            while batch := list(islice(documents, BATCH)):
                n_bytes += sum(len(text.encode("utf-8")) for text in batch)
                start = time.perf_counter()
                encodings = tokenizer.encode_batch_fast(batch, add_special_tokens=False)
                seconds += time.perf_counter() - start
                n_tokens += sum(len(encoding.ids) for encoding in encodings)
            if not n_tokens:
                raise DataError(f"{source.name}: no text in it")
            ratios.append(f"{n_bytes / n_tokens:.3f}")
            all_bytes, all_tokens = all_bytes + n_bytes, all_tokens + n_tokens
        speed = f"{all_bytes / seconds / 1e6:.1f} | {all_tokens / seconds / 1e6:.2f}"
        lines.append(f"| {folder} | {' | '.join(ratios)} | {speed} |")
    return "\n".join(lines)


def check_effect(args: argparse.Namespace) -> None:
    """ValueError for a flag that was given and that this kind of work does not read."""
    if args.compare:
        unread, reason = TRAINING_FLAGS, "--compare trains nothing"
    elif args.type == "wordpiece":
        unread, reason = ("max_token_bytes",), "--type is wordpiece"
    else:
        unread, reason = ("lower_case",), "--type is bpe"
    default = build_parser().get_default
    for name in unread:
        if getattr(args, name) != default(name):
            raise ValueError(f"--{name} has no effect: {reason}; leave it out")


def run(args: argparse.Namespace) -> None:
    check_effect(args)
    sources = [Source(path, args.text_field, args.skip_bad_lines, args.text_suffixes) for path in args.data_path]
    if args.compare:
        announce(compare(args.compare, sources))
        return
    weights = args.weights or [1.0] * len(sources)
    if len(weights) != len(sources):
        raise ValueError(f"--weights has {len(weights)} values for {len(sources)} sources; one for each --data_path")
    smallest = len(WORDPIECE_TOKENS) + 1 if args.type == "wordpiece" else len(SPECIAL_TOKENS) + 256
    if args.vocab_size < smallest:
        raise ValueError(
            f"--vocab_size is {args.vocab_size}, but it must be at least {smallest}: special tokens and characters"
        )
    sample = draw_sample(sources, weights, args.sample_mb * 1e6)
    if args.type == "wordpiece":
        tokenizer = train_wordpiece(sample, args.vocab_size, args.lower_case)
        save_wordpiece(tokenizer, Path(args.out_dir))
        announce(f"wrote {len(tokenizer)} entries to {Path(args.out_dir) / 'vocab.txt'}")
        return
    tokenizer = train_bpe(sample, args.vocab_size, args.max_token_bytes)
    save(tokenizer, Path(args.out_dir))
    announce(f"wrote {tokenizer.get_vocab_size()} entries to {Path(args.out_dir) / 'tokenizer.json'}")


def main(argv: list[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    try:
        run(args)
    except (ValueError, OSError) as error:
        announce(f"error: {one_line(error)}", to_stderr=True)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
