#!/usr/bin/env bash
# transformers 5.24.0 with tokenizers 0.23.3, train_new_from_iterator of a tokenizer with byte_fallback (Llama 2, Mistral, Gemma)
# One would guess: the new tokenizer has the kind of the old one, so what is not in its vocabulary is written in bytes.
# What happens: the 256 tokens of the bytes are not taken over. A BPE still says byte_fallback: true and has no bytes to fall back on, a unigram model
# says false (so it does after train of tokenizers itself). Each character that the training text did not have is <unk>.
# In a run: a small vocabulary for one language loses rare Chinese characters, accents and formulas in silence, in training and in answers alike.
# On text like the training text nothing is seen.
# Instead: a byte-level BPE (pre_tokenizers.ByteLevel, its alphabet as initial_alphabet), or at least decode(encode(x)) == x on other text.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
"${PYTHON:-python3}" -m venv env
env/bin/pip install --quiet --no-compile transformers==5.24.0 tokenizers==0.23.3
env/bin/python - <<'END'
import json

import tokenizers
import transformers
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
vocabulary = ["<unk>", *byte_tokens, "a", "b", "ab"]
bpe = models.BPE(
    {token: id for id, token in enumerate(vocabulary)}, [("a", "b")], unk_token="<unk>", byte_fallback=True
)
unigram = models.Unigram([(token, -1.0) for token in vocabulary], unk_id=0, byte_fallback=True)


def report(name, tokenizer):
    """Tokens of a letter that no training text has, whether the file says byte_fallback, and how many byte tokens there are."""
    falls_back = json.loads(tokenizer.backend_tokenizer.to_str())["model"]["byte_fallback"]
    tokens = tokenizer.convert_ids_to_tokens(tokenizer.encode("龙"))
    count = len(set(byte_tokens) & set(tokenizer.get_vocab()))
    print(f"{name}: 龙 is {tokens}, byte_fallback {falls_back}, {count} tokens of bytes")
    return tokens, falls_back, count


print("transformers", transformers.__version__, "tokenizers", tokenizers.__version__)
for model, says_so in ((bpe, True), (unigram, False)):
    backend = Tokenizer(model)
    backend.decoder = decoders.ByteFallback()
    old = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>")
    name = type(model).__name__
    before = report(name, old)
    after = report(f"{name} trained anew", old.train_new_from_iterator([["ab ab abba"] * 50], vocab_size=300))
    assert before == (["<0xE9>", "<0xBE>", "<0x99>"], True, 256)
    assert after == (["<unk>"], says_so, 0)
END
