#!/usr/bin/env bash
# torchao 0.18.0, quantize_, on a model with experts of transformers 5.24.0 (Qwen 3 MoE)
# One would guess: quantize_(model, Int8WeightOnlyConfig()) makes the matrices int8, and above all the experts', which are most of the model.
# What happens: it changes nn.Linear modules. transformers 5 keeps all experts of a layer as one parameter of three dimensions, which is none, so
# they stay in fp32 without a word.
# In a run: the model "in int8" takes nearly the memory of the whole, and its measured loss says nothing on int8 experts.
# Instead: add up the bytes after quantising; give a filter and a config for parameters, or use the export to a format that knows experts.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
"${PYTHON:-python3}" -m venv env
env/bin/pip install --quiet --no-compile torch==2.13.0 transformers==5.24.0 torchao==0.18.0
env/bin/python - <<'END'
import torch
import transformers
from torchao.quantization import Int8WeightOnlyConfig, quantize_
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

import torchao

torch.manual_seed(0)
config = Qwen3MoeConfig(
    vocab_size=300, hidden_size=64, moe_intermediate_size=64, num_experts=16, num_experts_per_tok=2,
    num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
)
model = Qwen3MoeForCausalLM(config)
quantize_(model, Int8WeightOnlyConfig())
experts = [weight for name, weight in model.named_parameters() if "experts" in name]
attention = [weight for name, weight in model.named_parameters() if name.endswith("_proj.weight")]
share = sum(weight.numel() for weight in experts) / sum(weight.numel() for weight in model.parameters())
print("torchao", torchao.__version__, "transformers", transformers.__version__, "torch", torch.__version__)
print("attention:", {type(weight).__name__ for weight in attention})
print("experts:", {(type(weight).__name__, weight.dtype) for weight in experts}, f"{100 * share:.0f} % of all weights")
assert share > 0.8
assert {type(weight).__name__ for weight in attention} == {"Int8Tensor"}
assert {(type(weight), weight.dtype) for weight in experts} == {(torch.nn.Parameter, torch.float32)}
END
