"""The configuration of both MiniMind generations. A field is declared once, in `ModelConfig`; the rest follows from there."""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Integral
from typing import Any

GENERATIONS = ("minimind2", "minimind3")
# name of the architecture in files
MODEL_TYPE = "minimind"

# target of a position without a prediction, as in torch's cross-entropy
IGNORE = -100

# values of `exported`: the Hugging Face exports that have the field, all or only those of models with experts
ALL_EXPORTS = "all"
EXPERT_EXPORTS = "experts"


def declare(*defaults: Any, architecture: bool = False, exported: str | None = None, alias: str | None = None) -> Any:
    """A field of the config with one default, or one for each of GENERATIONS.

    architecture: with another value the weights do not fit, or compute something else, so a resumed run must have the same.
    exported: ALL_EXPORTS, EXPERT_EXPORTS or None; alias: its name in the other generation's public code, also read and
    written. A default of None is computed in `ModelConfig`.
    """
    declared = {"architecture": architecture, "exported": exported, "alias": alias}
    by_generation = dict(zip(GENERATIONS, (defaults[0], defaults[-1]), strict=True))
    return dataclasses.field(default=defaults[0], metadata={"defaults": by_generation, **declared})


@dataclass(init=False)
class ModelConfig:
    """What a model is built from. Keyword arguments only; a field that is None takes the default of its generation ("minimind2" or
    "minimind3"). model/hf_config.py gives it the interface of transformers, whose import takes half as long as that of torch.

    MoE fields have the names of both generations: n_routed_experts is num_experts, aux_loss_alpha router_aux_loss_coef.
    `inference_rope_scaling` turns YaRN on (minimind3); `rope_scaling`, a dict with factor, beta_fast, beta_slow and
    original_max_position_embeddings, also sets its parameters. Errors: ValueError, one line, for invalid values.
    """

    # in the order in which they are written to a file
    generation: str = declare("minimind2", "minimind3", architecture=True)
    vocab_size: int = declare(6400, architecture=True, exported=ALL_EXPORTS)
    hidden_size: int = declare(512, 768, architecture=True, exported=ALL_EXPORTS)
    num_hidden_layers: int = declare(8, architecture=True, exported=ALL_EXPORTS)
    num_attention_heads: int = declare(8, architecture=True, exported=ALL_EXPORTS)
    num_key_value_heads: int = declare(2, 4, architecture=True, exported=ALL_EXPORTS)
    head_dim: int = declare(None, architecture=True, exported=ALL_EXPORTS)  # default: hidden_size / num_attention_heads
    intermediate_size: int = declare(None, architecture=True, exported=ALL_EXPORTS)
    hidden_act: str = declare("silu")
    rms_norm_eps: float = declare(1e-5, 1e-6, architecture=True, exported=ALL_EXPORTS)
    rope_theta: float = declare(1e6, architecture=True)
    max_position_embeddings: int = declare(32768, exported=ALL_EXPORTS)
    dropout: float = declare(0.0, architecture=True)
    tie_word_embeddings: bool = declare(True, exported=ALL_EXPORTS)
    initializer_range: float = declare(0.02)  # minimind3; minimind2's is uniform, see `MiniMindLM._init_weights`
    bos_token_id: int | None = declare(1, exported=ALL_EXPORTS)
    eos_token_id: int | list[int] | None = declare(2, exported=ALL_EXPORTS)
    pad_token_id: int | None = declare(0, exported=ALL_EXPORTS)
    # YaRN, which stretches the rotary positions, and its four parameters
    inference_rope_scaling: bool = declare(False, architecture=True)
    yarn_factor: float = declare(16.0, architecture=True)
    yarn_beta_fast: float = declare(32.0, architecture=True)
    yarn_beta_slow: float = declare(1.0, architecture=True)
    yarn_original_positions: int = declare(2048, architecture=True)
    use_moe: bool = declare(False, architecture=True)
    num_experts: int = declare(4, architecture=True, exported=EXPERT_EXPORTS, alias="n_routed_experts")
    num_experts_per_tok: int = declare(2, 1, architecture=True, exported=EXPERT_EXPORTS)
    n_shared_experts: int = declare(1, 0, architecture=True)
    moe_intermediate_size: int = declare(None, architecture=True, exported=EXPERT_EXPORTS)  # default: intermediate_size
    router_aux_loss_coef: float = declare(0.1, 5e-4, architecture=True, exported=EXPERT_EXPORTS, alias="aux_loss_alpha")
    seq_aux: bool = declare(True, False, architecture=True)
    norm_topk_prob: bool = declare(True, architecture=True, exported=EXPERT_EXPORTS)
    scoring_func: str = declare("softmax")

    def __init__(self, **kwargs: Any) -> None:
        if others := self.set_fields(kwargs):
            raise TypeError(f"{next(iter(others))} is not a field of ModelConfig")

    def set_fields(self, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Set all fields. Returns the keyword arguments that are none."""
        kwargs = public_spellings(kwargs)
        generation = kwargs.get("generation") or GENERATIONS[0]
        if generation not in GENERATIONS:
            raise ValueError(f"generation={generation!r} is unknown: {' or '.join(GENERATIONS)}")
        for name, declared in DECLARATIONS.items():
            default = declared["defaults"][generation]
            value = kwargs.pop(name, default)
            if value is None and name not in TOKEN_IDS:
                value = default
            # Some publishers write -1 for a token that the tokenizer does not have.
            setattr(self, name, None if name in TOKEN_IDS and value == -1 else value)
        for name in POSITIVE:
            value = getattr(self, name)
            if not isinstance(value, Integral) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name}={value!r} is not a whole number above 0")
            # also NumPy's integers
            setattr(self, name, int(value))
        if self.head_dim is None:
            if self.hidden_size % self.num_attention_heads:
                raise ValueError(
                    f"hidden_size={self.hidden_size} is not divisible by num_attention_heads={self.num_attention_heads}"
                )
            self.head_dim = self.hidden_size // self.num_attention_heads
        if self.intermediate_size is None:
            width = int(self.hidden_size * 8 / 3) if generation == "minimind2" else self.hidden_size * math.pi
            self.intermediate_size = math.ceil(width / 64) * 64
        if self.moe_intermediate_size is None:
            self.moe_intermediate_size = self.intermediate_size
        heads, kv_heads, experts = self.num_attention_heads, self.num_key_value_heads, self.num_experts
        divisible = f"divisible by num_key_value_heads={kv_heads} (--num_key_value_heads)"
        for name, is_right, what in (
            ("num_attention_heads", heads % kv_heads == 0, divisible),
            ("num_experts_per_tok", self.num_experts_per_tok <= experts, f"within num_experts={experts}"),
            ("head_dim", self.head_dim % 2 == 0, "even: RoPE turns pairs (default: hidden_size / num_attention_heads)"),
            ("hidden_act", self.hidden_act == "silu", "supported: only silu is"),
            ("scoring_func", self.scoring_func == "softmax", "supported: only softmax is"),
        ):
            if not is_right:
                raise ValueError(f"{name}={getattr(self, name)!r} is not {what}")
        return kwargs


# {field: its metadata of `declare`}
DECLARATIONS = {field.name: field.metadata for field in dataclasses.fields(ModelConfig)}

# The fields that determine which weights fit and what they compute: a resumed run must have the same.
ARCHITECTURE = tuple(name for name, declared in DECLARATIONS.items() if declared["architecture"])

# {the other generation's name: the field's name here}
ALIASES = {declared["alias"]: name for name, declared in DECLARATIONS.items() if declared["alias"]}

# Fields for which None is a value and not the default: a tokenizer may lack a special token.
TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")

# whole numbers from 1 on
POSITIVE = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")

# {parameter of YaRN in the public `rope_scaling`: our field}
YARN_NAMES = {
    "factor": "yarn_factor",
    "beta_fast": "yarn_beta_fast",
    "beta_slow": "yarn_beta_slow",
    "original_max_position_embeddings": "yarn_original_positions",
}


def weights_of_layer(config: ModelConfig, experts: int) -> int:
    """Number of weights in the matrices of a layer, with so many of its routed experts."""
    width = config.hidden_size
    # q_proj and o_proj; k_proj and v_proj
    attention = 2 * width * config.head_dim * (config.num_attention_heads + config.num_key_value_heads)
    if not config.use_moe:
        return attention + 3 * width * config.intermediate_size
    router = width * config.num_experts
    return attention + router + 3 * width * config.moe_intermediate_size * (experts + config.n_shared_experts)


def parameter_count(config: ModelConfig) -> int:
    """Number of parameters, all experts included, a tied head once. No model is built."""
    width = config.hidden_size
    norms = 2 * width
    if config.generation == "minimind3":
        # q_norm and k_norm
        norms += 2 * config.head_dim
    layer = weights_of_layer(config, config.num_experts) + norms
    tables = 1 if config.tie_word_embeddings else 2
    last_norm = width
    return config.num_hidden_layers * layer + tables * config.vocab_size * width + last_norm


def record_of(config: ModelConfig) -> dict[str, Any]:
    """The fields for a .json, also under their aliases: the public code of each generation reads its own names."""
    fields = {name: getattr(config, name) for name in DECLARATIONS}
    return {"model_type": MODEL_TYPE, **fields, **{alias: fields[name] for alias, name in ALIASES.items()}}


def own_fields(record: Mapping[str, Any]) -> dict[str, Any]:
    """Keyword arguments of ModelConfig from a .json. Only our fields: others could make transformers import or fetch programs."""
    return {name: value for name, value in public_spellings(record).items() if name in DECLARATIONS}


def public_spellings(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a copy of the keyword arguments with aliases and `rope_scaling`, the public form of YaRN, under our names.

    Errors: ValueError for an alias that contradicts its field, and for unsupported RoPE scaling.
    """
    fields = dict(fields)
    for alias, name in ALIASES.items():
        if alias in fields:
            value = fields.pop(alias)
            if fields.setdefault(name, value) != value:
                raise ValueError(f"{alias}={value} and {name}={fields[name]} are one field: pass one of them")
    scaling = fields.pop("rope_scaling", None)
    # Its name in transformers 5, where the base is one of the parameters
    parameters = fields.pop("rope_parameters", None)
    if isinstance(parameters, Mapping):
        if parameters.get("rope_theta") is not None:
            fields.setdefault("rope_theta", parameters["rope_theta"])
        if parameters.get("rope_type", "default") != "default":
            scaling = scaling or parameters
    if not scaling:
        return fields
    is_mapping = isinstance(scaling, Mapping)
    rope_type = scaling.get("type", scaling.get("rope_type", "yarn")) if is_mapping else None
    if rope_type != "yarn" or scaling.get("attention_factor") not in (None, 1):
        raise ValueError(f"rope_scaling={scaling!r:.100} is not supported: only type yarn with attention_factor 1 is")
    fields.setdefault("inference_rope_scaling", True)
    for name, field in YARN_NAMES.items():
        if name in scaling:
            fields.setdefault(field, scaling[name])
    return fields
