"""Small tokenizers of all the kinds that people have, made here from their published rules."""

from collections.abc import Callable

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from dataset.tokenizing.byte_level_bpe import DEEPSEEK, GPT4O, LLAMA_BPE, QWEN2, QWEN35
from tests.helpers import ROOT

# Text that merges are learned from, with pairs that no piece may hold.
LEARNED = (
    "the cat's hat, that's all! The  cats\n\nsat at 12345 and 1234. it'll be  there; CAT'S\n"
    "二零二六年，北京。我们在这里，你好！ 東京 に 行く。 हिन्दी दुनिया ภาษาไทย cafe\u0301 café naïve Straße ﬁne \t a\tb\r\nc .. -- // <x> [y]"
) * 3


def byte_level(pattern: str | None, normalizer=None, before=()) -> Tokenizer:
    backend = Tokenizer(models.BPE())
    if normalizer is not None:
        backend.normalizer = normalizer
    steps = list(before)
    if pattern is not None:
        steps.append(pre_tokenizers.Split(Regex(pattern), "isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pattern is None))
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps) if len(steps) > 1 else steps[0]
    backend.decoder = decoders.ByteLevel()
    _train(backend, 420, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    return backend


def _train(backend: Tokenizer, vocab_size: int, specials: tuple[str, ...] = ("<s>", "</s>"), **options) -> None:
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=list(specials), show_progress=False, **options)
    backend.train_from_iterator([LEARNED], trainer)


def own() -> Tokenizer:
    return Tokenizer.from_file(str(ROOT / "model" / "tokenizer.json"))


def with_added_tokens() -> Tokenizer:
    backend = byte_level(LLAMA_BPE)
    tokens = [AddedToken("<x>", lstrip=True), AddedToken("at", rstrip=True, normalized=False)]
    tokens += [AddedToken("cat", single_word=True), AddedToken("a b", normalized=True)]
    backend.add_tokens([*tokens, AddedToken("。我", normalized=False)])
    return backend


def deepseek() -> Tokenizer:
    numbers, words, others = DEEPSEEK
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in (numbers, words)]
    return byte_level(others, before=splits)


def bert() -> Tokenizer:
    backend = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer(lowercase=True)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(vocab_size=150, special_tokens=["[UNK]", "<s>", "</s>"], show_progress=False)
    backend.train_from_iterator([LEARNED], trainer)
    return backend


def llama2() -> Tokenizer:
    """SentencePiece's BPE, which gets the whole text, spaces as U+2581."""
    backend = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    _train(backend, 130, specials=("<unk>", "<s>", "</s>"))
    backend.pre_tokenizer = None
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.add_tokens(["<x>"])
    return backend


KINDS: dict[str, Callable[[], Tokenizer]] = {
    "own": own,
    "gpt2": lambda: byte_level(None),
    "llama3": lambda: byte_level(LLAMA_BPE),
    "qwen": lambda: byte_level(QWEN2, normalizers.NFC()),
    "qwen3.5": lambda: byte_level(QWEN35),
    "gpt-4o": lambda: byte_level(GPT4O),
    "added tokens": with_added_tokens,
    "deepseek": deepseek,
    "bert": bert,
    "numbers alone": lambda: byte_level(DEEPSEEK[0]),
    "llama2": llama2,
}


def tokenizer_of(backend: Tokenizer) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=backend)
