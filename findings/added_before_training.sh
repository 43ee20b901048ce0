#!/usr/bin/env bash
# tokenizers 0.23.3, tokens added to a tokenizer before it is trained
# One would guess: add_special_tokens before train does what the trainer's special_tokens= does, or the training sees to free ids.
# What happens: the training gives out ids from 0 again. The marks keep theirs, so one id stands for a mark and for a letter, and no call complains.
# Once the tokenizer is saved and read again, the marks have other ids than before.
# In a run: each "!" of the text is trained as the start of a turn, and decoded as one. If the text was encoded before the tokenizer was saved, all
# marks in it are ids of letters to whoever reads the file. A tokenizer trained a second time, with another list of marks, is of the same kind.
# Instead: give all marks to the trainer, train on a new Tokenizer, and look that get_vocab() has no id twice.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
"${PYTHON:-python3}" -m venv env
env/bin/pip install --quiet --no-compile tokenizers==0.23.3
env/bin/python - <<'END_OF_PYTHON'
import tokenizers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

marks = ["<|im_start|>", "<|im_end|>"]
text = "<|im_start|>Hello!<|im_end|>"


def untrained():
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def train(tokenizer, special_tokens):
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=alphabet, special_tokens=special_tokens, show_progress=False
    )
    tokenizer.train_from_iterator(["Hello World!"] * 50, trainer)


def there_and_back(tokenizer):
    return tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False)


def ids_of_marks(tokenizer):
    return [tokenizer.token_to_id(mark) for mark in marks]


print("tokenizers", tokenizers.__version__)
added = untrained()
added.add_special_tokens(marks)
train(added, [])
read_again = Tokenizer.from_str(added.to_str())
print(f"added before: {text} comes back as {there_and_back(added)}; marks {ids_of_marks(added)}, ! {added.encode('!').ids}")
print("saved and read again: marks", ids_of_marks(read_again))
assert there_and_back(added) == "<|im_start|>Hello<|im_start|><|im_end|>"
assert ids_of_marks(added) == [0, 1] and added.encode("!").ids == [0]
assert there_and_back(read_again) == text and min(ids_of_marks(read_again)) > 255

twice = untrained()
train(twice, ["<|im_start|>", "<|im_end|>"])
train(twice, ["<|pad|>", "<|im_start|>", "<|im_end|>"])
print("trained twice, the second time with a mark more:", twice.token_to_id("<|pad|>"), *ids_of_marks(twice))
assert twice.token_to_id("<|pad|>") == twice.token_to_id("<|im_start|>") == 0

given = untrained()
train(given, marks)
print("given to the trainer:", there_and_back(given), ids_of_marks(given), given.encode("!").ids)
assert there_and_back(given) == text and len(set(given.get_vocab().values())) == len(given.get_vocab())
END_OF_PYTHON
