"""Train a tokenizer: byte-level BPE, or WordPiece for ELECTRA.

How model/tokenizer.json was made (a minute on two cores, 3.3 GB of memory), where $C is the folder of the corpora
that docs/corpora.md describes:
    python trainer/train_tokenizer.py --out_dir model --vocab_size 6400 --sample_mb 90 \\
        --data_path $C/en_wiki.train.jsonl $C/en_novels.train.jsonl $C/zh_wiki.train.jsonl \\
                    $C/zh_lctt_tech.train.jsonl $C/zh_laws.train.jsonl $C/code_python.train.jsonl \\
        --weights 35 9 35 10.5 1.5 9

On your own text:
    python trainer/train_tokenizer.py --data_path my_corpus.jsonl --vocab_size 6400 --out_dir out/my_tokenizer
    python trainer/train_tokenizer.py --type wordpiece --data_path my_corpus.jsonl --vocab_size 8192 --out_dir out/my_wordpiece

Bytes per token of a tokenizer on texts (the share :1 gives each its own line):
    python scripts/inspect_data.py --tokenizer_path out/my_tokenizer --data_path one.jsonl:1 other.jsonl:1 --texts 0
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import ClassVar

if __package__ in (None, ""):
    sys.path[0] = str(Path(__file__).resolve().parents[1])
if __name__ == "__main__":
    from common.start import guard_imports

    # Ctrl-C ends the process inside the training library too; nothing is written before the end.
    guard_imports()

from common.errors import UserError, user_errors
from common.flags import positive
from common.processes import signals_blocked
from common.settings import Settings, field_default, setting, switch
from common.wording import announce
from dataset.reading.settings import FileSettings
from dataset.tokenizing.byte_level_bpe import AUTO, PIECE_RULES, SPECIAL_TOKENS, piece_rule, save, train_bpe
from dataset.tokenizing.encoder import DocumentEncoder
from dataset.tokenizing.sample import draw_sample
from dataset.tokenizing.tokenizer_files import lost_text
from dataset.tokenizing.wordpiece import WORDPIECE_TOKENS, save_wordpiece, train_wordpiece
from trainer.calls import CallableModule
from trainer.machine.command_line import end_process

BPE, WORDPIECE = "bpe", "wordpiece"
# In the class below, __doc__ is the class's.
DESCRIPTION = __doc__ or ""


@dataclass(kw_only=True)
class SampleSettings(FileSettings):
    """data"""

    data_path: list[str] = setting(
        MISSING,
        several=True,
        metavar="PATH",
        help="the sources: each a file, a folder or a glob; dataset/README.md lists the kinds of files",
        first=True,
    )
    sample_mb: float = setting(
        60.0,
        check=positive(float),
        help="size of the sample in MB (10^6 bytes of UTF-8), at most all the text; takes 40 times as much memory",
    )
    weights: list[float] | None = setting(
        None,
        check=positive(float),
        several=True,
        metavar="W",
        help="share of each source in the sample, in any unit; a source too small for its share is repeated (default: equal)",
    )

    def check(self) -> None:
        """Errors: ValueError."""
        if self.weights and len(self.weights) != len(self.data_path):
            raise ValueError(
                f"--weights has {len(self.weights)} values for {len(self.data_path)} sources; one for each --data_path"
            )


@dataclass(kw_only=True)
class VocabularySettings(Settings):
    """vocabulary"""

    out_dir: str = setting(
        MISSING,
        help="folder for tokenizer.json and tokenizer_config.json, with WordPiece also vocab.txt",
        first=True,
    )
    type: str = setting(
        BPE,
        choices=(BPE, WORDPIECE),
        help="bpe: byte-level, for train_pretrain.py; wordpiece: like BERT's, for train_electra.py",
    )
    lower_case: bool = switch(True, help="wordpiece: lower-case the text and strip its accents, like bert-base-uncased")
    vocab_size: int = setting(
        6400, check=positive(int), help="number of entries, special tokens and (bpe) the 256 bytes included", first=True
    )
    pieces: str = setting(
        AUTO,
        choices=(AUTO, *PIECE_RULES),
        help="bpe: rule that splits text into pieces (docs/tokenizer.md); auto: by the number of combining marks in it",
    )

    def check(self) -> None:
        """Errors: ValueError."""
        unread = "pieces" if self.type == WORDPIECE else "lower_case"
        if getattr(self, unread) != field_default(VocabularySettings, unread):
            raise ValueError(f"--{unread} has no effect: --type is {self.type}; leave it out")
        # The 256 bytes are always included, so that a byte-level tokenizer can write any text.
        smallest = len(WORDPIECE_TOKENS) + 1 if self.type == WORDPIECE else len(SPECIAL_TOKENS) + 256
        if self.vocab_size < smallest:
            raise ValueError(
                f"--vocab_size is {self.vocab_size}, but it must be at least {smallest}: special tokens and characters"
            )


@dataclass(kw_only=True)
class TokenizerSettings(VocabularySettings, SampleSettings):
    """All settings of train_tokenizer.py; --help shows the groups from the last to the first."""

    prog: ClassVar[str] = "train_tokenizer.py"
    description: ClassVar[str] = DESCRIPTION


def main(argv: Sequence[str] | None = None, settings: TokenizerSettings | None = None) -> int:
    """Train with the given flags (default: the command line's). Returns the exit code. Errors: UserError."""
    settings = settings or TokenizerSettings.parse(argv)
    out_dir = Path(settings.out_dir)
    weights = settings.weights or [1.0] * len(settings.data_path)
    sample = draw_sample(settings.data_path, weights, settings.sample_mb * 1e6, settings)
    # The text may be too small for this many entries, and the folder not writable.
    with user_errors():
        if settings.type == WORDPIECE:
            texts = list(sample)
            wordpiece = train_wordpiece(texts, settings.vocab_size, settings.lower_case)
            round_trip = DocumentEncoder(wordpiece).round_trip
            for notice in lost_text(texts, round_trip, f"{settings.data_path[0]}: the new tokenizer"):
                announce(notice)
            with signals_blocked():
                save_wordpiece(wordpiece, out_dir)
            announce(f"wrote {len(wordpiece)} entries to {out_dir / 'vocab.txt'}")
        else:
            tokenizer = train_bpe(sample, settings.vocab_size, pieces=settings.pieces)
            with signals_blocked():
                save(tokenizer, out_dir)
            rule = piece_rule(json.loads(tokenizer.to_str()))
            announce(f"wrote {tokenizer.get_vocab_size()} entries to {out_dir / 'tokenizer.json'}; --pieces {rule}")
    return 0


def train(**flags: object) -> Path:
    """Train with these flags, see `trainer.train`. Returns the folder of the tokenizer."""
    settings, words = TokenizerSettings.of_call(flags)
    main(words, settings)
    return Path(settings.out_dir)


# `from trainer import train_tokenizer` is this function too.
sys.modules[__name__].__class__ = CallableModule

if __name__ == "__main__":
    try:
        sys.exit(main())
    except UserError as error:
        end_process(error)
