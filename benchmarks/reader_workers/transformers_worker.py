"""What transformers makes of an export: a request in JSON on standard input, the answer in JSON on standard output.

It runs in a process of its own, perhaps with another version of transformers, and knows nothing of this repository.
"""

import json
import sys

try:
    import numpy
    import torch
    import transformers
    from transformers import AutoModelForCausalLM, AutoTokenizer
except ImportError as error:
    json.dump({"missing": str(error)}, sys.stdout)
    sys.exit()


@torch.no_grad()
def main() -> None:
    request = json.load(sys.stdin)
    tokenizer = AutoTokenizer.from_pretrained(request["folder"], trust_remote_code=False)
    # `.float()`, since the word for the type differs between the versions.
    model = AutoModelForCausalLM.from_pretrained(request["folder"], trust_remote_code=False).float().eval()
    logits = []
    greedy = []
    for ids in request["texts"]:
        logits.append(model(torch.tensor([ids])).logits[0].numpy())
        prompt = torch.tensor([ids[: request["prompt_tokens"]]])
        written = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=request["new_tokens"],
            do_sample=False,
        )
        greedy.append(tokenizer.decode(written[0], skip_special_tokens=True))
    numpy.savez(request["logits"], *logits)
    ids_of_documents = [tokenizer(document).input_ids for document in request["documents"]]
    json.dump({"version": transformers.__version__, "ids": ids_of_documents, "greedy": greedy}, sys.stdout)


main()
