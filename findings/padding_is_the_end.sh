#!/usr/bin/env bash
# transformers 5.24.0 with torch 2.13.0: pad_token_id in the config of a Llama (also Qwen 3 and others)
# One would guess: pad_token_id matters where batches are padded, so for text without padding it may be any id, such as the end's.
# What happens: the model hands it to nn.Embedding as padding_idx. The row of that id is zero in a new model, and looking it up gives it no
# gradient, padded or not. With pad_token_id = eos_token_id = bos_token_id (the habit of GPT-2) the start of each document is the
# zero vector, in all updates; with tied embeddings the row learns only as an output.
# In a run: packed documents get no signal from their mark, and a later use of the weights with another pad_token_id trains it for the first time.
# Instead: a pad id of its own that no text has, or None; the tokenizer's pad token is another matter and may be the end.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
"${PYTHON:-python3}" -m venv env
env/bin/pip install --quiet --no-compile torch==2.13.0 transformers==5.24.0
env/bin/python - <<'END'
import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM

transformers.logging.set_verbosity_error()


def first_row(pad_token_id):
    """Norms of the gradient of id 2's and id 5's rows, and of row 2 itself, for a row of two documents that start with id 2."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        bos_token_id=2, eos_token_id=2, pad_token_id=pad_token_id,
    )
    model = LlamaForCausalLM(config)
    ids = torch.tensor([[2, 5, 6, 7, 2, 8, 9]])
    model(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids).loss.backward()
    embedding = model.model.embed_tokens.weight
    return embedding.grad[2].norm().item(), embedding.grad[5].norm().item(), embedding[2].norm().item()


print("torch", torch.__version__, "transformers", transformers.__version__)
for pad_token_id in (None, 2):
    end, other, weight = first_row(pad_token_id)
    print(f"pad_token_id {pad_token_id}: gradient of the end {end:.3f}, of another token {other:.3f}; norm of the end's row {weight:.3f}")
    assert other > 0 and (end == weight == 0) == (pad_token_id == 2)
END
