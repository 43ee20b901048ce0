#!/usr/bin/env bash
# transformers 5.24.0 with tokenizers 0.23.3: save_pretrained of a tokenizer that has been used
# One would guess: truncation=True and padding=True are arguments of one call, and do not change what is saved.
# What happens: tokenizer.json keeps truncation and padding of the last call. transformers passes them over when it reads the file, so there
# nothing is seen; tokenizers, and with it every program that reads tokenizer.json itself, cuts and pads each text.
# In a run: a tokenizer that is saved beside a checkpoint after batches of 512 tokens tokenizes the next corpus elsewhere to 512 tokens a
# document, and pads the short ones in batches. No count of documents tells.
# Instead: backend_tokenizer.no_truncation() and no_padding() before saving, or save before the first call.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
"${PYTHON:-python3}" -m venv env
env/bin/pip install --quiet --no-compile transformers==5.24.0 tokenizers==0.23.3
env/bin/python - <<'END'
import tokenizers
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

words = Tokenizer(models.WordLevel({"[PAD]": 0, "word": 1}, unk_token="[PAD]"))
words.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="[PAD]")
texts = ["word", "word " * 100]


def lengths():
    """Tokens of both texts after saving, as transformers and as tokenizers read the folder."""
    tokenizer.save_pretrained("saved")
    by_transformers = [len(ids) for ids in AutoTokenizer.from_pretrained("saved")(texts)["input_ids"]]
    by_tokenizers = [len(encoding.ids) for encoding in Tokenizer.from_file("saved/tokenizer.json").encode_batch(texts)]
    return by_transformers, by_tokenizers


print("transformers", transformers.__version__, "tokenizers", tokenizers.__version__)
before = lengths()
tokenizer(texts, truncation=True, max_length=8, padding=True)
after = lengths()
tokenizer(texts)
after_a_plain_call = lengths()
print("tokens of a text of 1 word and of one of 100, by transformers and by tokenizers")
print("before any call", *before)
print("after a call with truncation and padding", *after)
print("after a plain call", *after_a_plain_call)
assert before == after_a_plain_call == ([1, 100], [1, 100])
assert after == ([1, 100], [8, 8])
END
