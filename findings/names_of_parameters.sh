#!/usr/bin/env bash
# torch 2.13.0, optimizers built from named_parameters()
# One would guess: an optimizer that was given names saves them to find its moments again by name, or to refuse another order.
# What happens: the names are saved, and load_state_dict passes them over. The moments go to the parameters by their position, also
# between tensors of the same shape that have changed places; nothing is said.
# In a run: after two layers were renamed or moved in the code, a resume gives each layer the other one's moments: the first updates have
# the wrong sizes, and as the second moment is long remembered, hundreds of updates have.
# Instead: compare param_names of both before loading, or order the saved state by them (register_load_state_dict_pre_hook).
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
"${PYTHON:-python3}" -m venv env
env/bin/pip install --quiet --no-compile torch==2.13.0
env/bin/python - <<'END'
import warnings

import torch

torch.manual_seed(0)
weights = {name: torch.nn.Parameter(torch.zeros(3)) for name in ("attention", "mlp")}
optimizer = torch.optim.AdamW(list(weights.items()), lr=0.1)
weights["attention"].grad = torch.ones(3)
weights["mlp"].grad = torch.full((3,), 100.0)
optimizer.step()
saved = optimizer.state_dict()

moved = torch.optim.AdamW(list(reversed(weights.items())), lr=0.1)
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    moved.load_state_dict(saved)
moments = {name: moved.state[weight]["exp_avg"][0].item() for name, weight in weights.items()}
print("torch", torch.__version__)
print("names saved:", saved["param_groups"][0]["param_names"])
print("first moments saved:  attention 0.1, mlp 10.0")
print("first moments loaded:", moments, "warnings:", len(said))
assert saved["param_groups"][0]["param_names"] == ["attention", "mlp"]
assert abs(moments["attention"] - 10) < 1e-4 and abs(moments["mlp"] - 0.1) < 1e-6 and not said
END
