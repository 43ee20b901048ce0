"""The configuration of both MiniMind generations."""

import math

from transformers import PretrainedConfig

# The other generation's name -> the name under which the field is kept
ALIASES = {"n_routed_experts": "num_experts", "aux_loss_alpha": "router_aux_loss_coef"}

DEFAULTS = {
    "minimind2": {
        "hidden_size": 512,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-5,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "router_aux_loss_coef": 0.1,
        "seq_aux": True,
    },
    "minimind3": {
        "hidden_size": 768,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-6,
        "num_experts_per_tok": 1,
        "n_shared_experts": 0,
        "router_aux_loss_coef": 5e-4,
        "seq_aux": False,
    },
}


class MiniMindConfig(PretrainedConfig):
    """Keyword arguments only; a field that is None takes the default of its generation ("minimind2" or "minimind3").

    The MoE fields go by both generations' names: n_routed_experts is num_experts, aux_loss_alpha router_aux_loss_coef.
    `inference_rope_scaling` switches YaRN on (minimind3); `rope_scaling`, a dict with factor, beta_fast, beta_slow and
    original_max_position_embeddings, does so with its own numbers. ValueError (one line) for values that do not fit.
    """

    model_type = "minimind"
    keys_to_ignore_at_inference = ["past_key_values"]
    attribute_map = ALIASES

    generation: str = "minimind2"
    vocab_size: int = 6400
    hidden_size: int | None = None
    num_hidden_layers: int = 8
    num_attention_heads: int = 8
    num_key_value_heads: int | None = None
    head_dim: int | None = None  # hidden_size / num_attention_heads
    intermediate_size: int | None = None
    hidden_act: str = "silu"
    rms_norm_eps: float | None = None
    rope_theta: float = 1e6
    max_position_embeddings: int = 32768
    dropout: float = 0.0
    tie_word_embeddings: bool = True
    initializer_range: float = 0.02  # minimind3 only
    bos_token_id: int | None = 1
    eos_token_id: int | list[int] | None = 2
    pad_token_id: int | None = 0
    inference_rope_scaling: bool = False
    yarn_factor: float = 16.0
    yarn_beta_fast: float = 32.0
    yarn_beta_slow: float = 1.0
    yarn_original_positions: int = 2048
    use_moe: bool = False
    num_experts: int = 4
    num_experts_per_tok: int | None = None
    n_shared_experts: int | None = None
    moe_intermediate_size: int | None = None  # intermediate_size
    router_aux_loss_coef: float | None = None
    seq_aux: bool | None = None
    norm_topk_prob: bool = True
    scoring_func: str = "softmax"

    def __init__(self, **kwargs):
        kwargs = public_spellings(kwargs)
        generation = kwargs.get("generation") or type(self).generation
        if generation not in DEFAULTS:
            raise ValueError(f"generation={generation!r} is unknown: {' or '.join(DEFAULTS)}")
        for name in FIELDS:
            default = DEFAULTS[generation].get(name, getattr(MiniMindConfig, name))
            value = kwargs.pop(name, default)
            if value is None and name not in TOKEN_IDS:  # a tokenizer may lack a special token: None is a value there
                value = default
            setattr(self, name, value)
        self.derive()
        self.check()
        super().__init__(**kwargs)

    def to_dict(self):
        """The fields, those with two names under both: either generation's public code reads its own."""
        fields = super().to_dict()
        return {**fields, **{alias: fields[name] for alias, name in ALIASES.items()}}

    def derive(self):
        """Fills the fields that follow from others."""
        positive(self, "hidden_size", "num_attention_heads", "num_key_value_heads")
        if self.head_dim is None:
            if self.hidden_size % self.num_attention_heads:
                raise ValueError(
                    f"hidden_size={self.hidden_size} is not divisible by num_attention_heads={self.num_attention_heads}"
                )
            self.head_dim = self.hidden_size // self.num_attention_heads
        if self.intermediate_size is None:
            width = int(self.hidden_size * 8 / 3) if self.generation == "minimind2" else self.hidden_size * math.pi
            self.intermediate_size = math.ceil(width / 64) * 64
        if self.moe_intermediate_size is None:
            self.moe_intermediate_size = self.intermediate_size

    def check(self):
        positive(self, "vocab_size", "num_hidden_layers", "head_dim", "intermediate_size", "max_position_embeddings")
        positive(self, "num_experts", "num_experts_per_tok", "moe_intermediate_size", "yarn_original_positions")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads={self.num_attention_heads} is not divisible by "
                f"num_key_value_heads={self.num_key_value_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim} is odd: RoPE turns pairs of dimensions")
        if self.hidden_act != "silu":
            raise ValueError(f"hidden_act={self.hidden_act!r} is not offered: silu")
        if self.scoring_func != "softmax":
            raise ValueError(f"scoring_func={self.scoring_func!r} is not offered: softmax")
        if self.num_experts_per_tok > self.num_experts:
            raise ValueError(f"num_experts_per_tok={self.num_experts_per_tok} exceeds num_experts={self.num_experts}")
        if self.n_shared_experts < 0:
            raise ValueError(f"n_shared_experts={self.n_shared_experts} is negative")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout={self.dropout} is not in [0, 1)")
        if not self.yarn_factor >= 1:
            raise ValueError(f"yarn_factor={self.yarn_factor} is below 1")


# The fields that decide which weights fit and what they compute: a run goes on only with the same ones.
ARCHITECTURE = (
    "generation",
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
    "rms_norm_eps",
    "rope_theta",
    "dropout",
    "use_moe",
    "num_experts",
    "num_experts_per_tok",
    "n_shared_experts",
    "moe_intermediate_size",
    "router_aux_loss_coef",
    "seq_aux",
    "norm_topk_prob",
)


def architecture(config: MiniMindConfig) -> dict[str, object]:
    """{field: value} of ARCHITECTURE."""
    return {name: getattr(config, name) for name in ARCHITECTURE}


def parameter_count(config: MiniMindConfig) -> int:
    """Numbers in the weights of such a model, all experts included, a tied head once. Nothing is built."""
    width, heads, head_dim = config.hidden_size, config.num_attention_heads, config.head_dim
    attention = 2 * width * heads * head_dim + 2 * width * config.num_key_value_heads * head_dim
    if config.generation == "minimind3":  # the norms of queries and keys
        attention += 2 * head_dim
    if config.use_moe:
        experts = config.num_experts + config.n_shared_experts
        mlp = 3 * width * config.moe_intermediate_size * experts + width * config.num_experts
    else:
        mlp = 3 * width * config.intermediate_size
    layer = attention + mlp + 2 * width
    tables = 1 if config.tie_word_embeddings else 2
    return config.num_hidden_layers * layer + tables * config.vocab_size * width + width


FIELDS = [name for name in MiniMindConfig.__annotations__ if not name.startswith("_")]
TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
YARN_NAMES = {
    "factor": "yarn_factor",
    "beta_fast": "yarn_beta_fast",
    "beta_slow": "yarn_beta_slow",
    "original_max_position_embeddings": "yarn_original_positions",
}


def public_spellings(fields):
    """A copy of the keyword arguments with aliases and `rope_scaling` translated into this class's own fields."""
    return yarn_fields(canonical_names(fields))


def canonical_names(fields):
    """A copy of the dict with each alias under its canonical name; ValueError when both are there and differ."""
    fields = dict(fields)
    for alias, name in ALIASES.items():
        if alias in fields:
            value = fields.pop(alias)
            if fields.setdefault(name, value) != value:
                raise ValueError(f"{alias}={value} and {name}={fields[name]} are one field: pass one of them")
    return fields


def yarn_fields(fields):
    """A copy of the dict with `rope_scaling`, the public spelling of YaRN, spread over our flat fields."""
    fields = dict(fields)
    scaling = fields.pop("rope_scaling", None)
    if scaling:
        kind = scaling.get("type", scaling.get("rope_type", "yarn"))
        if kind != "yarn" or scaling.get("attention_factor") not in (None, 1, 1.0):
            raise ValueError(f"rope_scaling={scaling} is not offered: type yarn with attention_factor 1")
        fields.setdefault("inference_rope_scaling", True)
        for theirs, ours in YARN_NAMES.items():
            if theirs in scaling:
                fields.setdefault(ours, scaling[theirs])
    return fields


def positive(config, *names):
    for name in names:
        value = getattr(config, name)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{name}={value!r} is not a positive whole number")
