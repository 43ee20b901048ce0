"""MiniMind with the interface of Hugging Face's models: forward with labels, caches and padding, generate, save_pretrained.

The trainers do without: the imports below take longer than those of torch. Everybody else gets the class as
`model.model_minimind.MiniMindForCausalLM`.

Shape letters: B rows, T positions, S keys (cached ones included), H hidden, V vocabulary.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, Cache, DynamicCache, GenerationMixin, PreTrainedModel
from transformers.masking_utils import find_packed_sequence_indices
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import can_return_tuple

from model.config import IGNORE, ModelConfig
from model.hf_config import MiniMindConfig
from model.masks import cached_mask, dense_mask, first_keys
from model.model_minimind import MiniMindLM, MiniMindModel


@dataclass
class MiniMindOutput(CausalLMOutputWithPast):
    """`loss` is the mean cross-entropy alone; to train, add `aux_loss` (0-d; zero for a dense model and in eval mode)."""

    aux_loss: torch.FloatTensor | None = None
    last_hidden_state: torch.FloatTensor | None = None


# name of the cache in an output, which transformers 5.24 renamed
CACHE_NAME = "cache" if "cache" in MiniMindOutput.__dataclass_fields__ else "past_key_values"


class MiniMindForCausalLM(MiniMindLM, PreTrainedModel, GenerationMixin):
    """MiniMindLM, also to other people's code."""

    config: MiniMindConfig
    config_class = MiniMindConfig
    supports_gradient_checkpointing = True
    # transformers.Trainer then passes num_items_in_batch, so that its accumulation is exact.
    accepts_loss_kwargs = True
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}
    _no_split_modules = ["Block"]
    _supports_sdpa = True

    def __init__(self, config: ModelConfig) -> None:
        if not isinstance(config, MiniMindConfig):
            config = MiniMindConfig(**vars(config))
        PreTrainedModel.__init__(self, config)
        self.model = MiniMindModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        # Initialises by `_init_weights`, except where weights were loaded, and ties the head.
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        use_cache: bool = False,
        logits_to_keep: int | torch.Tensor = 0,
        labels: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        num_items_in_batch: int | torch.Tensor | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        tokenizer: object = None,
        cache: Cache | None = None,
    ) -> MiniMindOutput:
        """input_ids [B, T] (or inputs_embeds [B, T, H]) -> MiniMindOutput with logits [B, T, V].

        attention_mask: [B, S] with 0 at padding, or a ready [B, 1, T, S]; past_key_values: a transformers Cache;
        logits_to_keep: an int (that many last positions, 0: all) or an index tensor.
        labels [B, T], with logits_to_keep 0: shifted inside, -100 ignored; the loss is the mean, or the sum / num_items_in_batch.
        position_ids that restart, without mask and cache, begin another document.
        tokenizer: not used; `generate(stop_strings=...)` passes it on. cache: past_key_values, by its name from transformers 5.24 on.
        Errors: ValueError for output_attentions.
        """
        if output_attentions:
            raise ValueError("output_attentions: attention weights are not computed")
        keeps_all = isinstance(logits_to_keep, int) and logits_to_keep == 0
        assert labels is None or keeps_all, "labels need the logits of all positions: leave logits_to_keep out"
        assert (input_ids is None) != (inputs_embeds is None), "pass exactly one of input_ids and inputs_embeds"
        x = self.model.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        B, T, _ = x.shape
        if past_key_values is None:
            past_key_values = cache
        if use_cache and past_key_values is None:
            past_key_values = DynamicCache(config=self.config)
        # positions in the cache; a tensor for a StaticCache
        past = past_key_values.get_seq_length() if past_key_values is not None else 0
        positions = torch.arange(T, device=x.device) + past
        documents = None
        if position_ids is None:
            position_ids = positions.unsqueeze(0)
        elif attention_mask is None and past_key_values is None:
            # [B or 1, T]: the document of each position in packed rows, as transformers' own models read them; None: not packed
            documents = find_packed_sequence_indices(position_ids)
        if documents is None:
            self._check_length(T + past if isinstance(past, int) else T)
        padding = attention_mask if attention_mask is not None and attention_mask.dim() == 2 else None
        mask = attention_mask
        if documents is not None:
            mask = dense_mask(first_keys(self.config, positions, documents))
        elif mask is None or padding is not None:
            mask = cached_mask(self.config, positions, past_key_values, padding)
        segments: tuple[torch.Tensor | None, int] = (None, 0)
        if self.training:
            if documents is None:
                # One document per row, 0; padding is -1.
                documents = (x.new_ones(B, T) if padding is None else padding[:, -T:]).long() - 1
            segments = self.segments(documents.expand(B, T))

        if output_hidden_states is None:
            output_hidden_states = bool(self.config.output_hidden_states)
        hidden, aux_loss, inputs = self.model(
            x, position_ids, mask, segments, past_key_values, output_hidden_states=output_hidden_states
        )
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(hidden[:, kept])
        loss = None
        if labels is not None:
            if num_items_in_batch is None:
                # transformers' own mean is NaN if no label counts.
                num_items_in_batch = (labels[:, 1:] != IGNORE).sum().clamp(min=1)
            loss = self.loss_function(logits, labels, self.config.vocab_size, num_items_in_batch=num_items_in_batch)
        named_cache: dict[str, Any] = {CACHE_NAME: past_key_values}
        return MiniMindOutput(
            loss=loss,
            logits=logits,
            hidden_states=(*inputs, hidden) if output_hidden_states else None,
            aux_loss=aux_loss,
            last_hidden_state=hidden,
            **named_cache,
        )


AutoModelForCausalLM.register(MiniMindConfig, MiniMindForCausalLM)
# By this table the Trainer of transformers shifts the labels for its label smoothing.
MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[MiniMindConfig.model_type] = MiniMindForCausalLM.__name__
# where it has always been, for pickles
MiniMindForCausalLM.__module__ = MiniMindOutput.__module__ = MiniMindModel.__module__
