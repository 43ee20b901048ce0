"""DocumentEncoder. References: the tokenizers' own plain calls."""

import hashlib
import pickle
from types import SimpleNamespace

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizer, PreTrainedTokenizerFast

from dataset.tokenizing.byte_level_bpe import PIECE_RULES
from dataset.tokenizing.encoder import DocumentEncoder

TEXTS = ["the cat sat", "a 二 <b> </s>", "", "   two\n\nlines  "]
# By which Ollama's converter knows a rule: SHA-256 of the expression's text; that of Qwen 3.5's own file.
DIGESTS = {
    "llama-bpe": "d98f9631be1e9607a9848c26c1f9eac1aa9fc21ac6ba82a2fc0741af9780a48f",
    "qwen2": "1ff7f41064896984db5d1bb6ff64fa4bc29007d08c1b439e505b7392777a319e",
    "qwen35": "00431aed57e696b747435f734d1e3b9b1bfd931a121fb5cac7129e97c181e9ba",
}


def small_tokenizer(
    bos="<s>", eos="</s>", pad=None, template=False, vocab_size=300, texts=("the cat sat on the mat", "a cat")
):
    """A byte-level BPE tokenizer with these special tokens; template: its post-processor adds BOS and EOS itself."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    specials = list(dict.fromkeys(token for token in (bos, eos, pad) if token))
    options = {"initial_alphabet": pre_tokenizers.ByteLevel.alphabet(), "show_progress": False}
    backend.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=specials, **options))
    if template:
        pairs = [(bos, backend.token_to_id(bos)), (eos, backend.token_to_id(eos))]
        backend.post_processor = processors.TemplateProcessing(single=f"{bos} $A {eos}", special_tokens=pairs)
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token=bos, eos_token=eos, pad_token=pad)


@pytest.mark.parametrize("template", [False, True])
def test_bos_and_eos_stand_once(template):
    """Neither doubled by the tokenizer's own post-processor nor by a text that carries them."""
    tokenizer = small_tokenizer(template=template)
    encoder = DocumentEncoder(tokenizer)
    plain = tokenizer("the cat sat", add_special_tokens=False)["input_ids"]
    expected = [encoder.bos_id, *plain, encoder.eos_id]
    for text in ("the cat sat", "<s>the cat sat", "the cat sat</s>", "<s>the cat sat</s>"):
        assert encoder.encode([text]) == [expected], text
        assert encoder.encode([text, text]) == [expected, expected], text
    assert encoder.encode(["", "<s></s>"]) == [[encoder.bos_id, encoder.eos_id]] * 2


def test_literal_specials_in_user_text_stay_text():
    tokenizer = small_tokenizer(pad="<pad>")
    specials = {tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id}
    text = "a<s>b</s>c<pad>d </s> e"
    for batch in ([text], [text, "x"]):
        ids = DocumentEncoder(tokenizer).encode(batch)[0]
        assert specials.isdisjoint(ids[1:-1]) and tokenizer.decode(ids[1:-1]) == text
    parsed = DocumentEncoder(tokenizer, parse_special_tokens=True).encode([text])[0]
    assert parsed[1:-1] == tokenizer(text, add_special_tokens=False)["input_ids"]
    assert [token for token in parsed if token in specials] == [0, 0, 1, 2, 1, 1]


class PythonTokenizer(PreTrainedTokenizer):
    vocab_size = 0

    def get_vocab(self):
        return dict(self.added_tokens_encoder)


def test_a_tokenizer_that_runs_python_is_refused_in_a_line():
    """Written in Python, or with a part that is, as RoFormer's."""
    with_a_part = small_tokenizer()
    words = SimpleNamespace(pre_tokenize=lambda text: text.split(lambda number, piece: [piece]))
    with_a_part.backend_tokenizer.pre_tokenizer = pre_tokenizers.PreTokenizer.custom(words)
    for tokenizer in (PythonTokenizer(bos_token="<s>"), with_a_part):
        with pytest.raises(ValueError, match="runs Python code for each text; use a fast tokenizer") as caught:
            DocumentEncoder(tokenizer)
        assert "\n" not in str(caught.value)


def test_pickled_encoder_is_the_same():
    """The Rust tokenizer's own pickle forgets that special tokens are to be read as text."""
    for parse in (False, True):
        encoder = DocumentEncoder(small_tokenizer(), parse)
        copy = pickle.loads(pickle.dumps(encoder))
        assert copy.encode([*TEXTS, "a<s>b"]) == encoder.encode([*TEXTS, "a<s>b"])
        assert (copy.fingerprint, copy.vocab_size) == (encoder.fingerprint, encoder.vocab_size)


@pytest.mark.parametrize("rule", DIGESTS)
def test_a_rule_is_known_to_other_programs(rule):
    assert hashlib.sha256(PIECE_RULES[rule].encode()).hexdigest() == DIGESTS[rule]
