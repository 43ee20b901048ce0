#!/usr/bin/env bash
# lm_eval 0.4.13: log-likelihood of an answer, where the tokenizer joins its first letters with the end of the context
# One would guess: the score of an answer is the probability of all its letters, however context and answer are cut into tokens.
# What happens: context + answer is encoded, and as many tokens are cut off as the context alone has. If a token lies across the border, the
# model reads another text: letters of the answer are in neither part and are not scored, or a part of the context comes twice.
# In a run: texts without blanks (Chinese) and cloze tasks are hit. An answer that loses letters is shorter and so likelier, and can win.
# Instead: end contexts with a sign that the tokenizer never joins; before a task is trusted, compare decode(context ids + answer ids) with the text.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
"${PYTHON:-python3}" -m venv env
env/bin/pip install --quiet --no-compile lm_eval==0.4.13 tokenizers==0.23.3
env/bin/python - <<'END'
import importlib.metadata

from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

text = ["我们今天去北京大学看朋友", "北京大学很大", "他在北京", "大学生很多", "北京大人很多"] * 50
tokenizer = Tokenizer(models.BPE())
tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
tokenizer.decoder = decoders.ByteLevel()
alphabet = pre_tokenizers.ByteLevel.alphabet()
tokenizer.train_from_iterator(text, trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False))


class Model(TemplateLM):
    """A model that keeps the ids it was asked to score."""

    backend = "causal"
    eot_token_id = 0

    def tok_encode(self, string, **options):
        return tokenizer.encode(string).ids

    def _loglikelihood_tokens(self, requests, **options):
        self.asked = requests
        return [(0.0, True) for _ in requests]

    def loglikelihood_rolling(self, requests, **options):
        raise NotImplementedError

    def generate_until(self, requests, **options):
        raise NotImplementedError


print("lm_eval", importlib.metadata.version("lm_eval"))
expected = {
    ("他在北京", "大人"): "他在北京大人",
    ("我们今", "天去北京大学看"): "我们今看",
    ("他在北京", "大学"): "他在北京\ufffd北京大学",
}
model = Model()
model.loglikelihood([Instance("loglikelihood", {}, pair, 0) for pair in expected], disable_tqdm=True)
for (context, answer), context_ids, answer_ids in model.asked:
    assert tokenizer.decode(tokenizer.encode(context + answer).ids) == context + answer
    read = tokenizer.decode(context_ids + answer_ids)
    print(f"context {context}, answer {answer}: the model reads {read}, of which {len(answer_ids)} tokens are scored")
    assert read == expected[context, answer]
END
