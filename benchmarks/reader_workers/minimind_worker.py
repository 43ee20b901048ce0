"""What the public MiniMind code makes of a .pth: a request in JSON on standard input, the answer on standard output.

It runs in a process of its own, whose path begins with a checkout of the public repository, and does what eval_llm.py
there does: AutoTokenizer on the folder of the tokenizer, a model from the config's numbers, `load_state_dict`.
"""

import hashlib
import json
import sys
from pathlib import Path

try:
    import numpy
    import torch
    import transformers
    from transformers import AutoTokenizer

    from model import model_minimind
except ImportError as error:
    json.dump({"missing": str(error)}, sys.stdout)
    sys.exit()


@torch.no_grad()
def main() -> None:
    request = json.load(sys.stdin)
    if not Path(model_minimind.__file__).resolve().is_relative_to(request["checkout"]):
        # A package of that name that is installed would be found instead.
        json.dump({"missing": "no model/model_minimind.py in the checkout"}, sys.stdout)
        return
    tokenizer = AutoTokenizer.from_pretrained(request["tokenizer"], trust_remote_code=False)
    model = model_minimind.MiniMindForCausalLM(model_minimind.MiniMindConfig(**request["config"]))
    model.load_state_dict(torch.load(request["weight"], map_location="cpu", weights_only=True), strict=True)
    model = model.float().eval()
    logits = []
    greedy = []
    for ids in request["texts"]:
        logits.append(model(torch.tensor([ids])).logits[0].numpy())
        prompt = torch.tensor([ids[: request["prompt_tokens"]]])
        written = model.generate(
            inputs=prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=request["new_tokens"],
            do_sample=False,
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=tokenizer.eos_token_id,
        )
        greedy.append(tokenizer.decode(written[0], skip_special_tokens=True))
    numpy.savez(request["logits"], *logits)
    ids_of_documents = [tokenizer(document).input_ids for document in request["documents"]]
    # The public code has no version numbers, so the file is named by its digest,
    # as sha256sum prints it.
    digest = hashlib.sha256(Path(model_minimind.__file__).read_bytes()).hexdigest()[:8]
    version = f"model_minimind.py {digest}, transformers {transformers.__version__}"
    json.dump({"version": version, "ids": ids_of_documents, "greedy": greedy}, sys.stdout)


main()
