"""What llama.cpp makes of a GGUF file: a request in JSON on standard input, the answer in JSON on standard output.

It runs in a process of its own and knows nothing of this repository.
"""

import json
import sys

try:
    import llama_cpp
    import numpy
except ImportError as error:
    json.dump({"missing": str(error)}, sys.stdout)
    sys.exit()

# GGML_TYPE_F32: keys and values would be kept in float16 otherwise.
FLOAT32 = 0


def main() -> None:
    request = json.load(sys.stdin)
    positions = max(len(ids) for ids in request["texts"]) + request["new_tokens"]
    llama = llama_cpp.Llama(
        request["file"], n_ctx=positions, logits_all=True, type_k=FLOAT32, type_v=FLOAT32, verbose=False
    )
    logits = []
    greedy = []
    for ids in request["texts"]:
        llama.reset()
        llama.eval(ids)
        logits.append(llama.scores[: len(ids)].copy())
        llama.reset()
        written = list(ids[: request["prompt_tokens"]])
        for token in llama.generate(written[:], temp=0.0, repeat_penalty=1.0):
            if token == llama.token_eos():
                break
            written.append(int(token))
            if len(written) == request["prompt_tokens"] + request["new_tokens"]:
                break
        # The begin token is no text. detokenize leaves it out by itself only in some versions.
        text_ids = [token for token in written if token != llama.token_bos()]
        greedy.append(llama.detokenize(text_ids).decode(errors="replace"))
    numpy.savez(request["logits"], *logits)
    ids_of_documents = [llama.tokenize(document.encode()) for document in request["documents"]]
    version = f"llama-cpp-python {llama_cpp.__version__}"
    json.dump({"version": version, "ids": ids_of_documents, "greedy": greedy}, sys.stdout)


main()
