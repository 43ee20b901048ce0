"""What llama.cpp makes of GGUF files, by llama-cpp-python in a process of its own."""

import json
import subprocess
import sys
from importlib.util import find_spec

import pytest

# Answers requests from its standard input, and knows nothing of this repository. Caches of keys and values in float32:
# by default they are in float16.
READER = """
import json, sys
import llama_cpp, numpy
from llama_cpp.llama_chat_format import Jinja2ChatFormatter

answers = []
for request in json.load(sys.stdin):
    only_tokens = "ids" not in request
    llama = llama_cpp.Llama(
        request["path"], vocab_only=only_tokens, n_ctx=1024, logits_all=True, type_k=0, type_v=0, verbose=False
    )
    answer = {"tokens": [llama.tokenize(text.encode()) for text in request.get("texts", [])]}
    answer["name"] = llama.metadata["general.architecture"]
    if not only_tokens:
        llama.eval(request["ids"])
        numpy.save(request["logits"], llama.scores[: len(request["ids"])])
        llama.reset()
        written = []
        for token in llama.generate(request["ids"][:16], temp=0.0, repeat_penalty=1.0):
            written.append(int(token))
            if len(written) == 24:
                break
        answer["greedy"] = written
        answer["text"] = llama.detokenize(written).decode(errors="replace")
    if "chats" in request:
        template = llama.metadata["tokenizer.chat_template"]
        words = {name: llama._model.token_get_text(id) for name, id in
                 (("bos_token", llama.token_bos()), ("eos_token", llama.token_eos()))}
        formatter = Jinja2ChatFormatter(template=template, **words)
        answer["chats"] = []
        for chat in request["chats"]:
            formatted = formatter(**chat)
            ids = llama.tokenize(formatted.prompt.encode(), add_bos=not formatted.added_special, special=True)
            answer["chats"].append([formatted.prompt, ids])
    if "asked" in request:
        # As its server does: the file's own template, with what the asker says of thoughts.
        chat = llama.chat_handler or llama._chat_handlers[llama.chat_format]
        answer["said"] = []
        for messages in request["asked"]:
            said = []
            for words in request["words"]:
                found = chat(llama=llama, messages=messages, temperature=0.0, repeat_penalty=1.0, max_tokens=24, **words)
                said.append(found["choices"][0]["message"]["content"])
            answer["said"].append(said)
    answers.append(answer)
json.dump(answers, sys.stdout)
"""


def want_llama_cpp():
    """Skips the test where llama-cpp-python is not there. `make test-all` compiles it."""
    if find_spec("llama_cpp") is None:
        pytest.skip("llama-cpp-python is not installed: pip install -r requirements-llama.txt")


def read_with(requests):
    """The reader's answers."""
    done = subprocess.run(
        [sys.executable, "-c", READER], input=json.dumps(requests), capture_output=True, text=True, timeout=400
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)
