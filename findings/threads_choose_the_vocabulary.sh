#!/usr/bin/env bash
# sentencepiece 0.2.3, training of a unigram model
# One would guess: num_threads makes the training faster or slower; text and other settings decide the vocabulary.
# What happens: the counts of each thread are sums of 32-bit floats, so their rounding depends on how many threads there are. Pieces near the limit come
# and go, others swap ids. With one number of threads each training gives the same model; BPE models do not depend on it.
# In a run: a tokenizer built again from the same text on a machine with more cores gives other ids; weights and token stores of the first one
# are then read with the wrong words, since the size is equal and all ids are valid.
# Instead: keep and ship the .model file; write num_threads down with the settings.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
"${PYTHON:-python3}" -m venv env
env/bin/pip install --quiet --no-compile sentencepiece==0.2.3
env/bin/python - <<'END'
import pydoc_data.topics

import sentencepiece

lines = [line for text in pydoc_data.topics.topics.values() for line in text.split("\n") if line.strip()][:6000]
with open("text.txt", "w") as file:
    file.write("\n".join(lines))


def train(kind, threads):
    options = {"model_type": kind, "vocab_size": 800, "num_threads": threads, "minloglevel": 2}
    sentencepiece.SentencePieceTrainer.train(input="text.txt", model_prefix="model", **options)
    return sentencepiece.SentencePieceProcessor(model_file="model.model")


def pieces(model):
    return [model.id_to_piece(id) for id in range(800)]


one, again, two, eight = (train("unigram", threads) for threads in (1, 1, 2, 8))
print("sentencepiece", sentencepiece.__version__)
for threads, model in ((2, two), (8, eight)):
    other_pieces = len(set(pieces(one)) - set(pieces(model)))
    other_lines = sum(one.encode(line) != model.encode(line) for line in lines)
    print(f"1 and {threads} threads: {other_pieces} of 800 pieces are others; {other_lines} of {len(lines)} lines have other ids")
    assert other_lines > 100
assert pieces(one) == pieces(again)
assert pieces(train("bpe", 1)) == pieces(train("bpe", 8))
END
