"""The learning rate of each part of an encoder: the further below the head, the lower it is (--layer_decay).

Each family of encoders has names of its own for its parts, so names do not say which part a weight belongs to. Its
structure does:

- The layers are the modules of the list that holds most weights. XLM has its attentions in one list and its FFNs in
  another one beside it, which are its layers together. Funnel has lists of layers in a list.
- What begins to be computed before the first layer belongs to the embeddings. A short example shows it.
- All else is the head: classifier, pooler, a norm behind the last layer.

Layers that share their weights are one layer here: they can only have one rate. An ALBERT mostly has one.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from trainer.glue.padding import fit_attention, single_rows, way_of
from trainer.glue.settings import GlueSettings
from trainer.optim.build import Groups, parameter_groups

HEAD = 0


def depths(model: Any, longest: int) -> dict[str, int]:
    """{name of a parameter: how deep it lies}: 0 in the head, 1 in the top layer, 2 in the one below, n_layers + 1 in the
    embeddings. model: on the CPU, and whole. longest: positions that it can take."""
    layers = layers_of(model)
    in_layers = {module for layer in layers for part in layer for module in part.modules()}
    called = modules_in_order(model, longest)
    first_layer = next((i for i, module in enumerate(called) if module in in_layers), len(called))
    # What is never called is a table that others look into, as DeBERTa's of relative positions.
    # (SqueezeBERT's layers are not called, but what they consist of.)
    above = set(called[first_layer:]) - set(called[:first_layer])
    depth_of: dict[nn.Module, int] = {}
    for module in model.base_model.modules():
        if module not in above:
            depth_of[module] = len(layers) + 1
    for number, layer in enumerate(layers):
        for part in layer:
            for module in part.modules():
                depth_of[module] = len(layers) - number
    found = {}
    for name, _ in model.named_parameters():
        owner = model.get_submodule(name.rpartition(".")[0])
        found[name] = depth_of.get(owner, HEAD)
    return found


def layers_of(model: Any) -> list[tuple[nn.Module, ...]]:
    """The modules of each layer, the lowest layer first."""
    stacks: list[list[tuple[nn.Module, ...]]] = []
    for parent in model.base_model.modules():
        if isinstance(parent, nn.ModuleList):
            continue
        lists = [flat(child) for child in parent.children() if isinstance(child, nn.ModuleList)]
        for length in {len(modules) for modules in lists}:
            beside = [modules for modules in lists if len(modules) == length]
            stacks.append(list(zip(*beside, strict=True)))
    # Weights are counted, not their elements: a list of embeddings may have more of these.
    return max(stacks, key=n_weights, default=[])


def flat(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """The modules of a list, and of the lists in it."""
    found: list[nn.Module] = []
    for module in modules:
        if isinstance(module, nn.ModuleList):
            found += flat(module)
        else:
            found.append(module)
    return found


def n_weights(layers: Sequence[tuple[nn.Module, ...]]) -> int:
    """How many weight tensors a stack of layers has."""
    return sum(len(list(module.parameters())) for layer in layers for module in layer)


@torch.no_grad()
def modules_in_order(model: Any, longest: int) -> list[nn.Module]:
    """The modules of a model in the order in which they begin to compute a short example, each as often as it does."""
    called: list[nn.Module] = []
    row = single_rows(model, longest)[0]
    was_training = model.training
    model.eval()
    handle = register_module_forward_pre_hook(lambda module, _: called.append(module))
    try:
        way_of(model)(model, row)
    finally:
        handle.remove()
        model.train(was_training)
        fit_attention(model, longest)
    return called


def layer_groups(
    model: nn.Module,
    depth_of: Mapping[str, int],
    weight_decay: float,
    layer_decay: float,
    top_layer_exponent: int = 1,
) -> Groups:
    """Optimiser groups with `lr_scale` = layer_decay ** exponent: 0 for the head, top_layer_exponent for the top layer, and
    one more for each below it, down to the embeddings; each with and without weight decay. Every parameter is in exactly
    one. depth_of: see `depths`."""
    parts: dict[int, list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        depth = depth_of[name]
        exponent = 0 if depth == HEAD else top_layer_exponent + depth - 1
        parts.setdefault(exponent, []).append(parameter)
    groups = []
    for exponent, parameters in sorted(parts.items()):
        for group in parameter_groups(nn.ParameterList(parameters), weight_decay):
            if group["params"]:
                groups.append({**group, "exponent": exponent, "lr_scale": layer_decay**exponent})
    return groups


def rates(groups: Groups, settings: GlueSettings) -> str:
    """One line: what each part's rate is at the top of the schedule."""
    scales = {group["exponent"]: group["lr_scale"] for group in groups}
    last = max(scales)
    parts = []
    for exponent, scale in scales.items():
        if exponent == 0:
            name = "head"
        elif exponent == last:
            name = "embeddings"
        else:
            name = f"layer {last - 1 - exponent}"
        parts.append(f"{name} {exponent} {settings.learning_rate * scale:.2e}")
    return f"group, exponent of --layer_decay {settings.layer_decay:g}, rate: {', '.join(parts)}"
