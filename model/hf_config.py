"""The configuration with the interface of transformers."""

from typing import Any

from transformers import AutoConfig, PretrainedConfig

from model.config import ALIASES, MODEL_TYPE, ModelConfig, record_of
from model.weight_record import with_generation


class MiniMindConfig(ModelConfig, PretrainedConfig):
    """ModelConfig, also to other people's code. The keyword arguments may include those of PretrainedConfig."""

    model_type = MODEL_TYPE
    keys_to_ignore_at_inference = ["past_key_values", "cache", "aux_loss", "last_hidden_state"]
    attribute_map = ALIASES

    def __init__(self, **kwargs: Any) -> None:
        PretrainedConfig.__init__(self, **self.set_fields(kwargs))

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """From a config.json; see `with_generation`."""
        return super().from_dict(with_generation(config_dict), **kwargs)

    def to_dict(self) -> dict[str, Any]:
        return {**super().to_dict(), **record_of(self)}


AutoConfig.register(MODEL_TYPE, MiniMindConfig)
