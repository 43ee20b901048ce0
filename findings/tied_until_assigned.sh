#!/usr/bin/env bash
# torch 2.13.0, load_state_dict(assign=True), the way to fill a model that was made on the meta device
# One would guess: a model whose output layer shares its weight with the embedding still does after loading its own weights.
# What happens: there are two parameters in one memory. Each gets its own part of the gradient and its own moments, and an optimizer
# that is built from parameters() updates the same numbers twice. Nothing shows it: a forward pass is right to the bit.
# In a run: the matrix that has most of a small model's weights takes steps of up to twice the size, and clipping and weight decay of it
# are others than before the restart too.
# Instead: tie again after loading, before the optimizer is built; count len(list(model.parameters())).
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
"${PYTHON:-python3}" -m venv env
env/bin/pip install --quiet --no-compile torch==2.13.0
env/bin/python - <<'END'
import torch


class Tied(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(8, 4)
        self.head = torch.nn.Linear(4, 8, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids):
        return self.head(self.embedding(ids))


def step(model):
    """One update; how far it moved the embedding."""
    before = model.embedding.weight.detach().clone()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0)
    ids = torch.arange(8)
    torch.nn.functional.cross_entropy(model(ids), ids.flip(0)).backward()
    optimizer.step()
    return (model.embedding.weight - before).abs().mean().item()


torch.manual_seed(0)
model = Tied()
torch.save(model.state_dict(), "model.pt")
with torch.device("meta"):
    loaded = Tied()
print("torch", torch.__version__)
print("made on meta: parameters", len(list(loaded.parameters())))
loaded.load_state_dict(torch.load("model.pt"), assign=True)
one, two = len(list(model.parameters())), len(list(loaded.parameters()))
same_memory = loaded.head.weight.data_ptr() == loaded.embedding.weight.data_ptr()
print("parameters:", one, "before saving,", two, "after loading, in the same memory:", same_memory)
assert (one, two, same_memory) == (1, 2, True)
ids = torch.arange(8)
assert torch.equal(model(ids), loaded(ids))
whole, halves = step(model), step(loaded)
print(f"one update with rate 0.01 moves the embedding by {whole:.4f} before, by {halves:.4f} after")
assert abs(whole - 0.01) < 1e-4 and abs(halves - whole) > 1e-3
END
