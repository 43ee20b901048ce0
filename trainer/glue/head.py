"""The head of ELECTRA's original code, and the form in which transformers loads it.

The original has dropout and one matrix on the first position. Hugging Face's ELECTRA has a layer with a GELU between, so
a model with the plain head would load there with a random head, and without an error. But gelu(x) - gelu(-x) = x: a layer
that gives each output and its negative, and a matrix that subtracts the two, are the plain head again. Models are saved so.

Shapes. n: outputs, H: width of the encoder.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from common.errors import UserError

Weights = Mapping[str, torch.Tensor]

# Of the names of a head's weights in a model.
PREFIX = "classifier."


class PlainHead(torch.nn.Module):
    """Dropout and a matrix: get_prediction_module in finetune/classification/classification_tasks.py of
    https://github.com/google-research/electra. Its weights begin as those of tf.layers.dense do: Glorot's uniform
    distribution, and biases of 0."""

    def __init__(self, width: int, outputs: int, dropout: float) -> None:
        super().__init__()
        self.dropout = torch.nn.Dropout(dropout)
        self.out_proj = torch.nn.Linear(width, outputs)
        torch.nn.init.xavier_uniform_(self.out_proj.weight)
        torch.nn.init.zeros_(self.out_proj.bias)

    def forward(self, features: torch.Tensor, **_: Any) -> torch.Tensor:
        """[R, T, H] -> [R, n]"""
        logits: torch.Tensor = self.out_proj(self.dropout(features[:, 0]))
        return logits


def set_plain_head(model: Any, what: str) -> bool:
    """Give a classifier of Hugging Face the plain head, with the weights that its own one holds if that was saved by
    `for_transformers`. Returns whether it was. Errors: UserError for an encoder that is no ELECTRA; `what` names it."""
    config = model.config
    if config.model_type != "electra":
        raise UserError(
            f"--head plain: it is ELECTRA's, and {what} is {config.model_type}; --head huggingface keeps its own"
        )
    if config.hidden_size < 2 * config.num_labels:
        raise UserError(
            f"--head plain: {what} has width {config.hidden_size}, too little for {config.num_labels} outputs"
        )
    saved = from_transformers(model.classifier.state_dict())
    model.classifier = PlainHead(config.hidden_size, config.num_labels, model.classifier.dropout.p)
    if saved is not None:
        model.classifier.load_state_dict(saved)
    return saved is not None


def for_transformers(weights: Weights) -> dict[str, torch.Tensor]:
    """The weights of a Hugging Face head that gives the same outputs as a plain one, without dropout."""
    matrix = weights["out_proj.weight"]
    n, width = matrix.shape
    dense = matrix.new_zeros(width, width)
    dense[0 : 2 * n : 2] = matrix
    dense[1 : 2 * n : 2] = -matrix
    return {
        "dense.weight": dense,
        "dense.bias": matrix.new_zeros(width),
        "out_proj.weight": differences(n, width).to(matrix),
        "out_proj.bias": weights["out_proj.bias"],
    }


def differences(n: int, width: int) -> torch.Tensor:
    """[n, H]: the matrix that subtracts the second of each pair of numbers from the first."""
    matrix = torch.zeros(n, width)
    numbers = torch.arange(n)
    matrix[numbers, 2 * numbers] = 1
    matrix[numbers, 2 * numbers + 1] = -1
    return matrix


def from_transformers(weights: Weights) -> dict[str, torch.Tensor] | None:
    """The plain head that `for_transformers` was given, to the last bit; None where it did not make these weights."""
    n = len(weights["out_proj.bias"])
    if len(weights["dense.weight"]) < 2 * n:
        return None
    found = {
        "out_proj.weight": weights["dense.weight"][0 : 2 * n : 2].clone(),
        "out_proj.bias": weights["out_proj.bias"],
    }
    made = for_transformers(found)
    is_same = all(torch.equal(made[name], weights[name]) for name in made)
    return found if is_same else None


def own_and_others(weights: Weights) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """(the weights of a model's head, without PREFIX; all others)."""
    own = {}
    others = {}
    for name, weight in weights.items():
        if name.startswith(PREFIX):
            own[name.removeprefix(PREFIX)] = weight
        else:
            others[name] = weight
    return own, others


def to_save(model: Any, weights: Weights) -> dict[str, torch.Tensor]:
    """The state dict of a model as transformers loads it."""
    if not isinstance(getattr(model, "classifier", None), PlainHead):
        return dict(weights)
    own, others = own_and_others(weights)
    return others | {f"{PREFIX}{name}": weight for name, weight in for_transformers(own).items()}


def saved_weights(model: Any, path: Path) -> dict[str, torch.Tensor]:
    """The state dict of a model, of a model.safetensors that was saved of it."""
    weights = load_file(path)
    if isinstance(getattr(model, "classifier", None), PlainHead):
        own, others = own_and_others(weights)
        plain = from_transformers(own)
        assert plain is not None, f"{path} has another head"
        weights = others | {f"{PREFIX}{name}": weight for name, weight in plain.items()}
    return weights
