"""Layers that are computed again in the backward pass, in every transformers 5."""

from transformers import PreTrainedModel


def recompute_layers(model: PreTrainedModel) -> None:
    """Keep only what enters each layer of the model; the backward pass computes the rest again.

    Newer transformers 5 call this `activation_checkpointing_enable` and warn of the name that older ones have alone.
    `use_reentrant` is named because the defaults differ: the reentrant form stores other random states, and it loses
    the gradients behind a frozen input.
    """
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})
