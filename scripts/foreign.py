"""Models in folders, which transformers loads, and text from them by its `generate`."""

from collections import deque
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel
from transformers.generation.logits_process import LogitsProcessor, LogitsProcessorList
from transformers.generation.streamers import BaseStreamer
from transformers.utils.logging import disable_progress_bar

from common.errors import UserError
from common.files import read_object
from model.decoding import OnTokens, Sampling
from model.hf import MiniMindForCausalLM
from model.hf_format import load_config, load_folder, load_network, read_config


def load_foreign_model(path: Path) -> PreTrainedModel:
    """Load a folder of any causal language model of transformers; fp32, eval mode. Errors: UserError, ValueError."""
    disable_progress_bar()
    settings = path / "generation_config.json"
    generation_fields = read_object(settings) if settings.exists() else {}
    config = load_config(str(path), path)
    class_names = config.architectures or []
    causal = ("CausalLM", "LMHead", "ConditionalGeneration")
    if class_names and not any(part in name for name in class_names for part in causal):
        # Such as an ELECTRA, which transformers would load anyway
        raise UserError(f"{path}: {class_names[0]} is no causal language model: it cannot continue a text")
    model: PreTrainedModel
    # An empty GenerationConfig instead of the folder's: our flags set the sampling.
    model, faults = load_network(str(path), path, AutoModelForCausalLM, config, generation_config=GenerationConfig())
    # transformers fills missing weights with random numbers, and only logs it.
    for what in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if keys := faults[what]:
            raise UserError(f"{path}: {len(keys)} {what.replace('_', ' ')}, {keys[0]}")
    eos: Any = generation_fields.get("eos_token_id", getattr(config, "eos_token_id", None))
    model.generation_config = GenerationConfig(eos_token_id=eos)
    return model.eval()


def as_minimind(model: nn.Module, folder: Path) -> MiniMindForCausalLM:
    """The MiniMind equivalent to `model`, which was loaded from `folder`. Errors: ValueError if there is none."""
    if isinstance(model, MiniMindForCausalLM):
        return model
    return load_folder(MiniMindForCausalLM, folder, read_config(folder))


class Listener(BaseStreamer, LogitsProcessor):
    """Calls on_tokens as `decode` does: transformers passes on the logits of a position and its token apart."""

    def __init__(self, on_tokens: OnTokens) -> None:
        self.on_tokens = on_tokens
        # Of tokens not yet received: on a Mac's GPU one comes only when the next one is computed.
        self.logits: deque[torch.Tensor] = deque()
        self.prompt_seen = False

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        """Sees the logits of a position [1, V], after the repetition penalty and before the temperature."""
        self.logits.append(scores)
        return scores

    def put(self, value: torch.Tensor) -> None:
        """Called with the prompt, then with each new token."""
        if self.prompt_seen:
            self.on_tokens(value.view(1), self.logits.popleft())
        self.prompt_seen = True

    def end(self) -> None:
        """Nothing is held back here."""


def generate_foreign(
    model: PreTrainedModel,
    ids: list[int],
    sampling: Sampling,
    end_ids: list[int],
    pad_id: int,
    on_tokens: OnTokens | None,
) -> list[int]:
    """`model.decoding.decode` of one prompt, by transformers."""
    prompt = torch.tensor([ids], device=model.device)
    drawing: dict[str, Any] = {}
    if sampling.temperature > 0:
        drawing = {"temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": sampling.top_k}
    listener = Listener(on_tokens) if on_tokens else None
    # Typed by transformers for some classes only.
    model_of_any_kind: Any = model
    output: torch.Tensor = model_of_any_kind.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=sampling.max_new_tokens,
        do_sample=sampling.temperature > 0,
        repetition_penalty=sampling.repetition_penalty,
        eos_token_id=end_ids or None,
        pad_token_id=pad_id,
        streamer=listener,
        logits_processor=LogitsProcessorList([listener] if listener else []),
        **drawing,
    )
    return output[0, len(ids) :].tolist()
