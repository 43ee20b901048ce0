"""Tokenizer files: what a tokenizer adds to a text by default, a folder that transformers 4.48 to 5 read alike, how it is
written, and checks that the tokenizer fits a model or a text. A wrong one would silently train on [UNK].
"""

import contextlib
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer, models
from tokenizers.processors import TemplateProcessing

from common.errors import DataError, UserError, library_errors, optional_package
from common.files import digest_of_json
from common.start import ROOT
from common.wording import counted
from model.weight_record import tokenizer_beside

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# The tokenizer of this repository, used by default
DEFAULT = ROOT / "model"
CONFIG = "tokenizer_config.json"
# Fields in which save_pretrained of transformers 5 records the machine and the loading call
LOCAL_FIELDS = ("backend", "is_local", "local_files_only", "name_or_path", "trust_remote_code")
# Files that hold a whole tokenizer, of any class
WHOLE_TOKENIZER = ("tokenizer.json", "tokenizer.*.json", "*.model", "*.spm", "*.tiktoken", "tekken.json")
CONFIGS = (CONFIG, "config.json")
GPT2_CONFIG = f'write a {CONFIG}: {{"tokenizer_class": "GPT2Tokenizer"}}'
BERT_CONFIG = (
    f'write a {CONFIG}: {{"tokenizer_class": "BertTokenizer", "do_lower_case": true}}, false if it has capitals'
)
# (files, others of which transformers needs one to read them, what to do without)
BARE_FILES = (
    (("vocab.txt",), CONFIGS, BERT_CONFIG),
    (("vocab.json", "merges.txt"), CONFIGS, GPT2_CONFIG),
    (("encoder.json", "vocab.bpe"), ("vocab.json",), f"rename them to vocab.json and merges.txt, and {GPT2_CONFIG}"),
)
# How a tokenizer treats text before and after its model, and options of it that a config may set
RULES = ("normalizer", "pre_tokenizer", "decoder")
OPTIONS = re.compile(
    rb'"(add_prefix_space|prepend_scheme|trim_offsets|lowercase|strip_accents|handle_chinese_chars)":[^,}]*'
)
# {pattern in a chat template: what replaces it}
PORTABLE = {
    # Marks of what the assistant writes, for a mask of transformers; these strip the same white space.
    r"\{%([-+]?)\s*generation\s*([-+]?)%\}": r"{%\1 if true \2%}",
    r"\{%([-+]?)\s*endgeneration\s*([-+]?)%\}": r"{%\1 endif \2%}",
    # In our own template: plain Jinja escapes the < and > of text that is added to JSON.
    r"""('<tool_call>\\n\{"name": ') \+ (call\.name \| tojson) \+ (', "arguments": ') \+ (arguments) \+ """: (
        r"\1 }}{{ \2 }}{{ \3 }}{{ \4 }}{{ "
    ),
}
# Characters by which a tokenizer and a text are compared
SAMPLE = 100_000
# `lost_text`: minimum number of visible characters among those that are compared; maximum share of them that may vanish
MIN_SAMPLE = 50
MAX_LOST_SHARE = 0.5
# Text of many kinds: a tokenizer that gives it back loses nothing.
PROBE = " \nA  b\t,\r\n 中，ﬁée\u0301x2024 I'LL\U00013000 \n"
# A visible character, or a run of white space
UNITS = re.compile(r"\S|\s+")
SPACES = {"spaces": " \u00a0\u3000", "tabs": "\t", "line breaks": "\r\n"}
# Minimum share of a model's embeddings that its own tokenizer has entries for: some models round the number of embeddings
# up, for speed.
MIN_FILLED_SHARE = 0.9

# transformers 5's post-processor of a tokenizer.json without one
NO_TEMPLATE = TemplateProcessing(single="$A:0", pair="$A:0 $B:1", special_tokens=[])


def bos_template(bos: str, bos_id: int) -> TemplateProcessing:
    """Puts BOS before each text, as in training; EOS comes from the model."""
    return TemplateProcessing(single=[bos, "$A"], pair=[bos, "$A", bos, "$B"], special_tokens=[(bos, bos_id)])


def remove_bos_template(backend: Tokenizer, bos: str | None, bos_id: int | None) -> None:
    """Removes the post-processor of `bos_template`, in place.

    Then a tokenizer's `to_str` is the same, byte for byte, whether its file has that post-processor or, as in earlier
    releases, none. Other post-processors stay as they are.
    """
    if bos is None or bos_id is None or backend.post_processor is None:
        return
    ours = Tokenizer(models.BPE())
    ours.post_processor = bos_template(bos, bos_id)
    # The library exposes a post-processor only in the whole tokenizer.json.
    if json.loads(backend.to_str())["post_processor"] == json.loads(ours.to_str())["post_processor"]:
        backend.post_processor = NO_TEMPLATE


def tokenizer_folder(weight: str | Path) -> Path:
    """The folder of a weight's tokenizer: its own if it is a folder with one, else that beside a .pth, else DEFAULT."""
    folders = (Path(weight), tokenizer_beside(Path(weight)), DEFAULT)
    return next(folder for folder in folders if folder == DEFAULT or has_tokenizer(folder))


def check_vocabulary(weight: Path, recorded: object, vocabulary: str, folder: str | Path) -> list[str]:
    """A line where it is not known whether a weight has the tokenizer of `folder`. recorded, vocabulary: digests, by the weight's record
    (None: it names none) and of that tokenizer. Errors: UserError for another one."""
    if recorded not in (None, vocabulary):
        raise UserError(
            f"{weight} was trained with another tokenizer than {folder}: copy the folder {tokenizer_beside(weight).name} of its "
            "run beside it, or name the tokenizer with --tokenizer_path"
        )
    if recorded is not None or Path(folder) != DEFAULT:
        return []
    # Weights of this repository name one; the public code has another tokenizer of the same size.
    return [
        f"warning: {weight} does not say which tokenizer it was trained with, so the one in model/ is used: if that is wrong, name "
        "its own with --tokenizer_path"
    ]


def check_readable(folder: Path) -> None:
    """Errors: DataError for files that transformers does not read as they are: what to install, write or rename."""
    if is_filled(folder / "tokenizer.json") or is_filled(folder / "tekken.json"):
        return
    for path in [*folder.glob("*.model"), *folder.glob("*.spm")]:
        # tiktoken's files of this name are text.
        with path.open("rb") as file:
            is_sentencepiece = file.read(1) == b"\n"
        if is_sentencepiece:
            optional_package("sentencepiece", f"to read {path}")
    for files, others, remedy in BARE_FILES:
        if all(is_filled(folder / name) for name in files) and not any((folder / name).exists() for name in others):
            raise DataError(f"{folder}: {' and '.join(files)} alone cannot be read: {remedy}")


def load_by_transformers(folder: Path) -> "PreTrainedTokenizerBase":
    """As `encoder.load_tokenizer`, in the class of transformers."""
    # Slow imports, which worker processes do not need either. AutoTokenizer reads a config.json beside the tokenizer too.
    from transformers import AutoTokenizer

    import model.hf_config  # noqa: F401

    with library_errors(f"{folder}: no tokenizer can be loaded from there"):
        tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
        if (folder / "tokenizer.json").exists():
            follow_file(folder / "tokenizer.json", tokenizer)
    check_files(folder, tokenizer)
    tokenizer.chat_template = portable_template(tokenizer.chat_template)
    return tokenizer


def follow_file(path: Path, tokenizer: "PreTrainedTokenizerBase") -> None:
    """Let a tokenizer treat text as its tokenizer.json says, in place: of some classes, or beside some config.json,
    transformers 5 takes only the vocabulary from that file. path: of the file.

    Errors: DataError if an added token has another id there: its embedding would be another row.
    """
    # A slow import
    from transformers import PreTrainedTokenizerFast

    for token in json.loads(path.read_text(encoding="utf-8")).get("added_tokens") or []:
        token_id = tokenizer.added_tokens_encoder.get(token["content"], token["id"])
        if token_id != token["id"]:
            raise DataError(
                f"{path}: {token['content']} has the id {token['id']:,}, and is read as {token_id:,}, since ids of added tokens "
                "follow the vocabulary without a gap: add a token for each id between"
            )
    # This class reads the whole file.
    if type(tokenizer) is not PreTrainedTokenizerFast and tokenizer.is_fast:
        ours: Tokenizer = tokenizer.backend_tokenizer
        of_file = Tokenizer.from_file(str(path))
        # Rules written otherwise that act alike stay: token stores name them.
        if rules_of(of_file) != rules_of(ours) and pieces_of(of_file) != pieces_of(ours):
            for part in ("model", *RULES):
                setattr(ours, part, getattr(of_file, part))


def rules_of(backend: Tokenizer) -> list[bytes]:
    """How a tokenizer treats text before and after its model, as JSON, without the options that its config sets."""
    rules = [getattr(backend, part) for part in RULES]
    return [b"" if rule is None else OPTIONS.sub(b"", rule.__getstate__()) for rule in rules]


def pieces_of(backend: Tokenizer) -> list[str]:
    """The pieces of PROBE that the model gets, and what these are decoded to."""
    text = PROBE if backend.normalizer is None else backend.normalizer.normalize_str(PROBE)
    pieces = [text]
    if backend.pre_tokenizer is not None:
        pieces = [piece for piece, _ in backend.pre_tokenizer.pre_tokenize_str(text)]
    return [*pieces, "".join(pieces) if backend.decoder is None else backend.decoder.decode(pieces)]


def portable_template(template: Any) -> Any:
    """A chat template, or {name: template}, that writes the same in all engines: transformers', plain Jinja, minijinja."""
    if isinstance(template, dict):
        return {name: portable_template(one) for name, one in template.items()}
    if isinstance(template, str):
        for pattern, replacement in PORTABLE.items():
            template = re.sub(pattern, replacement, template)
    return template


def check_files(folder: Path, tokenizer: "PreTrainedTokenizerBase") -> None:
    """From a config alone transformers makes a tokenizer that has only the special tokens.

    Errors: ValueError if the folder lacks the vocabulary files of the tokenizer's class.
    """
    # such as {"vocab_file": "vocab.json", "merges_file": "merges.txt", "tokenizer_file": "tokenizer.json"}.
    files_of_class = type(tokenizer).vocab_files_names
    # Byte and character tokenizers need none.
    if not files_of_class or any(is_filled(path) for pattern in WHOLE_TOKENIZER for path in folder.glob(pattern)):
        return
    # Without a file that holds all, every other one is required.
    wanted = [name for what, name in files_of_class.items() if what != "tokenizer_file"]
    missing = [name for name in wanted if not is_filled(folder / name)]
    if wanted and not missing:
        return
    lacks = f"neither tokenizer.json nor {' and '.join(missing)}" if missing else "no tokenizer.json"
    raise ValueError(
        f"{folder}: no vocabulary is in there ({lacks}), and a tokenizer made without one "
        "knows no word; copy the tokenizer's files into this folder"
    )


def has_tokenizer(folder: Path) -> bool:
    """True if `folder` exists and has a tokenizer file of any kind."""
    return any(is_filled(path) for pattern in (CONFIG, *WHOLE_TOKENIZER) for path in folder.glob(pattern))


def is_filled(path: Path) -> bool:
    """True for a file that is not empty."""
    return path.is_file() and path.stat().st_size > 0


def lost_text(texts: Iterable[str], round_trip: Callable[[str], str], what: str) -> list[str]:
    """A line on what a tokenizer loses of the first texts, if anything. round_trip: text to ids to text, without unknown
    tokens. what: "texts: the tokenizer".

    Errors: DataError if most of the characters vanish or are unknown: nothing can be learned from the rest.
    """
    # Some tokenizers raise an error for an unknown character.
    with contextlib.suppress(Exception):
        if round_trip(PROBE) == PROBE:
            return []
    before: Counter[str] = Counter()
    after: Counter[str] = Counter()
    n_read = 0
    for text in texts:
        part = text[: SAMPLE - n_read]
        before.update(UNITS.findall(part))
        after.update(UNITS.findall(round_trip(part)))
        n_read += len(part)
        if n_read >= SAMPLE:
            break
    lost = before - after
    added = after - before
    spaces = "".join(unit for unit in lost if unit.isspace())
    visible = [unit for unit, _ in lost.most_common() if not unit.isspace()]
    total = sum(number for unit, number in before.items() if not unit.isspace())
    # An added character stands for a lost one, as a lower-case letter does.
    n_gone = sum(lost[unit] for unit in visible) - sum(number for unit, number in added.items() if not unit.isspace())
    if total >= MIN_SAMPLE and n_gone > MAX_LOST_SHARE * total:
        raise DataError(
            f"{what} does not know {n_gone / total:.0%} of the first {total:,} characters, such as "
            f"{' '.join(visible[:5])}; it is for another language or model, or its vocabulary is incomplete: name or train another"
        )
    others = [unit for unit in visible if not added[unit.lower()]]
    losses = ["case"] if len(others) < len(visible) else []
    losses += [name for name, marks in SPACES.items() if set(spaces) & set(marks)]
    if others:
        losses.append(f"{counted(len(others), 'character')} ({' '.join(others[:10])})")
    if not losses:
        return []
    return [
        f"note: {what} loses some of the text: {', '.join(losses)}; bits per byte count the bytes of all text, "
        "so they are too low by that"
    ]


def vocabulary_digest(tokenizer: "PreTrainedTokenizerBase | Tokenizer") -> str:
    """SHA-256 of the tokens and their ids, which differs between tokenizers of the same size."""
    return digest_of_json(sorted((i, token) for token, i in tokenizer.get_vocab().items()))


def check_vocabulary_size(entries: int, embeddings: int, what: str, fewer_are_fine: bool = False) -> None:
    """entries: the tokenizer's highest id + 1. embeddings: their number in the model. what: the tokenizer's name.

    Errors: ValueError for another model's tokenizer: an id has no embedding, or there are far more embeddings than ids.
    """
    least = 0.0 if fewer_are_fine else MIN_FILLED_SHARE * embeddings
    if not least <= entries <= embeddings:
        raise ValueError(
            f"{what}: the tokenizer has {entries:,} entries and the model embeddings for {embeddings:,}: it is the tokenizer of "
            "another model, or has entries that were added later; name the model's own"
        )


def save_tokenizer(tokenizer: "PreTrainedTokenizerBase", folder: Path) -> None:
    """Write a Hugging Face tokenizer so that transformers 4.48 to 5 load it, without local paths."""
    # Template in the config alone: transformers 4.48 ignores chat_template.jinja, and two copies could diverge.
    tokenizer.save_pretrained(folder, save_jinja_files=False)
    path = folder / CONFIG
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
