"""The settings of train_pretrain.py."""

import argparse
import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from common.flags import as_text, at_least, fraction, not_negative, positive, quantity, share
from common.settings import Settings, flags_of, setting, switch, with_default
from common.start import ROOT
from dataset.reading.settings import DocumentSettings
from model.weight_record import SPECIAL_TOKENS_FIELD, read_record, tokenizer_beside
from trainer.optim.schedules import SCHEDULES, WSD_DECAY_SHARE
from trainer.settings import NONE, MachineSettings, OptimizerSettings, OutputSettings

# Value of --batch_size auto in the settings, until the job knows how many rows fit
AUTO_ROWS = 0
DEFAULT_TOKENIZER = str(ROOT / "model")
# Defaults of flags that are not given, unless a folder of weights sets them
DEFAULT_MODEL: dict[str, Any] = {
    "generation": "minimind2",
    "hidden_size": 512,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "use_moe": False,
}
# Files by which a folder of a Hugging Face model is recognised
FILES_OF_MODELS = ("config.json", "*.safetensors", "*.safetensors.index.json", "pytorch_model*")

BUDGETS = ("budget", "budget_tokens", "budget_flops")
_DURATION = re.compile(r"(?:(\d+(?:\.\d+)?)h)?(?:(\d+(?:\.\d+)?)m)?(?:(\d+(?:\.\d+)?)s)?")
# A shorter run learns nothing; a longer one is a typing error.
MIN_BUDGET_S = 20
MAX_BUDGET_S = 366 * 24 * 3600
# Tokens or floating-point operations: more than the largest run that was ever published
MAX_BUDGET = 10**27


def rows_or_auto(text: str) -> int:
    """A number of rows, or AUTO_ROWS."""
    return AUTO_ROWS if text == "auto" else positive(int)(text)


# its name in argparse's message
rows_or_auto.__name__ = "positive int or auto"


def file_prefix(text: str) -> str:
    """Prefix of file names; --out_dir is their folder."""
    # A colon has a special meaning on Windows and macOS.
    if not text.strip() or set(text) & set("/\\:"):
        raise argparse.ArgumentTypeError(
            f"{text!r} must be the start of a file name, without / \\ or colons; its folder is --out_dir"
        )
    return text


def seconds_of(text: str) -> float:
    """Seconds of `90s`, `10m`, `1h30m`. Errors: argparse.ArgumentTypeError."""
    match = _DURATION.fullmatch(text.strip())
    if match is None or not any(match.groups()):
        raise argparse.ArgumentTypeError(f"{text!r} is not a time such as 90s, 10m or 1h30m")
    hours, minutes, seconds = (float(part or 0) for part in match.groups())
    total = 3600 * hours + 60 * minutes + seconds
    if not MIN_BUDGET_S <= total <= MAX_BUDGET_S:
        raise argparse.ArgumentTypeError(f"{text} must be from {MIN_BUDGET_S}s to {MAX_BUDGET_S // 3600}h")
    return total


def duration(text: str) -> str:
    """The text itself, checked to be a time, so that a settings file shows it as typed."""
    seconds_of(text)
    return text.strip()


@dataclass(kw_only=True)
class BudgetSettings(Settings):
    """budget"""

    budget: str | None = setting(
        None,
        check=duration,
        help="how long the command may take, such as 90s, 10m or 1h30m: plans size, rows, batch, learning rates and updates",
        first=True,
    )
    budget_tokens: float | None = setting(
        None, check=positive(quantity, MAX_BUDGET), help="a budget of tokens instead, such as 200k or 5e7"
    )
    budget_flops: float | None = setting(
        None, check=positive(quantity, MAX_BUDGET), help="a budget of floating-point operations instead, such as 1e16"
    )
    dry_run: bool = switch(False, help="only print the plan of a budget")
    # The budget that the updates of a --config file were planned for, as its flag; "": none
    planned_for: str = field(default="", repr=False, compare=False)

    def check(self) -> None:
        budgets = [name for name in BUDGETS if getattr(self, name) is not None]
        if len(budgets) > 1:
            raise ValueError(f"--{budgets[0]} and --{budgets[1]} exclude each other: drop one")
        if self.dry_run and not budgets:
            raise ValueError("--dry_run prints a budget's plan: add --budget 10m, --budget_tokens or --budget_flops")

    @classmethod
    def of_file(cls, values: dict[str, Any]) -> dict[str, Any]:
        """A budget with its updates is the plan of a run: --config trains these again, without planning and without a clock."""
        if not values.get("max_updates"):
            return values
        budget = BudgetSettings(**{name: values.pop(name) for name in BUDGETS if name in values})
        return {**values, "planned_for": budget.budget_flag}

    @property
    def budget_flag(self) -> str:
        """As --budget 10m; "": no budget."""
        return " ".join(f"--{name} {as_text(value)}" for name in BUDGETS if (value := getattr(self, name)) is not None)

    @property
    def budget_seconds(self) -> float | None:
        """Of a budget of time."""
        return seconds_of(self.budget) if self.budget else None

    @property
    def has_budget(self) -> bool:
        """The run is planned."""
        return bool(self.budget_flag)


@dataclass(kw_only=True)
class PretrainOutput(OutputSettings):
    """output"""

    save_weight: str = setting(
        "pretrain", check=file_prefix, help="prefix of weight files: {prefix}_{hidden}[_moe].pth"
    )
    # An empty prompt counts: the model starts by itself.
    sample_prompts: list[str] = setting(
        [],
        several=True,
        may_be_empty=True,
        help="prompts to continue (fine-tuning: to answer) at every evaluation and at the end; or a file of them",
        may_be_path=lambda prompts: len(prompts) == 1 and os.path.isfile(prompts[0]),
    )


@dataclass(kw_only=True)
class ModelSettings(Settings):
    """model"""

    # None: not given. The value is then that of DEFAULT_MODEL, or of the folder that --from_weight names.
    generation: str | None = setting(None, choices=("minimind2", "minimind3"), help="architecture (default: minimind2)")
    hidden_size: int | None = setting(None, check=positive(int), help="width (default: 512)", first=True)
    num_hidden_layers: int | None = setting(None, check=positive(int), help="blocks (default: 8)", first=True)
    num_attention_heads: int | None = setting(None, check=positive(int), help="query heads (default: 8)")
    num_key_value_heads: int | None = setting(
        None, check=positive(int), help="key and value heads (default: the generation's)"
    )
    use_moe: bool | None = switch(None, help="mixture of experts in place of the dense MLP (default: False)")
    init_scheme: str = setting(
        "default",
        choices=("default", "zero_out", "induction"),
        help="zero_out: o_proj and down_proj start at 0; induction: the same, except two heads that copy what followed "
        "an earlier occurrence of the current token (minimind2)",
    )
    from_weight: str = setting(
        "none",
        help="start from out/{name}_{hidden}[_moe].pth, from a path, or from a Hugging Face folder of a Llama, Qwen3 or "
        "Qwen3-MoE, whose shape and tokenizer are used",
        may_be_path=lambda text: text.endswith(".pth") or os.path.isfile(f"{text}/config.json"),
    )
    tokenizer_path: str | None = setting(
        None,
        help="folder of a Hugging Face tokenizer; model: this repository's (default: that of --from_weight, else model/; a budget "
        "trains one on the text)",
    )

    def check(self) -> None:
        # With --from_weight the flag has no effect, and a warning says so.
        is_used = self.init_scheme == "induction" and self.from_weight == "none"
        if is_used and (self.generation == "minimind3" or self.num_hidden_layers == 1):
            raise ValueError("--init_scheme induction is for models of generation minimind2 with two layers or more")


# The flags that are fields of the model's config
MODEL_FLAGS = tuple(
    name for name in flags_of(ModelSettings) if name not in ("init_scheme", "from_weight", "tokenizer_path")
)


@dataclass(kw_only=True)
class DataSettings(DocumentSettings):
    """data"""

    data_path: list[str] | None = setting(
        None,
        several=True,
        help=".jsonl, .json, .csv, .txt, source code, .parquet, .arrow and so on, a folder or a glob "
        "(dataset/README.md lists the kinds); several with shares, such as a.jsonl:0.7 b.jsonl:0.3; "
        "shares that change from the start to the end of the run: a.jsonl:0.7..0.2 b.jsonl:0.3..0.8; up to 4 passes over one: "
        "b.jsonl:0.3:x4 (default: dataset/pretrain_hq.jsonl if it exists, else the embedded corpus)",
        first=True,
    )
    mixture: str | None = setting(
        None, help="a YAML or JSON file of sources with shares over the run, instead of --data_path (docs/data.md)"
    )
    max_seq_len: int = setting(512, check=at_least(2, "to hold an input and a target"), help="positions per row")
    pack: bool = switch(True, help="documents share rows; 0: one padded document per row, as in MiniMind")
    long_documents: str = setting(
        "split", choices=("split", "truncate"), help="documents longer than a row: split into pieces, or truncated"
    )

    def check(self) -> None:
        if self.data_path and self.mixture:
            raise ValueError("--data_path and --mixture both name the data: drop one")


@dataclass(kw_only=True)
class TrainingSettings(OptimizerSettings):
    """training"""

    batch_size: int = setting(
        32,
        check=rows_or_auto,
        help="rows per micro-batch and rank; auto: as many as fit (at most 16; 256 with CUDA), same updates, warm-up and intervals",
        first=True,
    )
    epochs: int = setting(1, check=positive(int), help="passes over the data", first=True)
    max_updates: int = setting(
        0, check=not_negative(int), help="end after this many updates, in as many passes as needed; 0: after --epochs"
    )
    lr_schedule: str = setting("minimind", choices=tuple(SCHEDULES), help="schedule of the learning rate")
    decay_share: float = setting(
        WSD_DECAY_SHARE, check=share, help="with --lr_schedule wsd: share of the run over which the rate decays"
    )
    warmup_iters: int = setting(0, check=not_negative(int), help="linear warm-up, in micro-batches")
    sampled_softmax: int = setting(
        0,
        check=not_negative(int),
        help="ids of the vocabulary that a row's loss computes: its targets, and drawn ones that stand for the others; 0: all",
    )
    dropout: float = setting(
        0.0, check=fraction, help="dropout on embeddings, attention and block outputs, for text that is read many times"
    )


@dataclass(kw_only=True)
class ValidationDataSettings(Settings):
    """validation"""

    val_path: list[str] | None = setting(None, several=True, help="validation documents: files, folders or globs")
    val_fraction: float = setting(0.0, check=fraction, help="share of the text held out, by hashes")

    def check(self) -> None:
        if self.val_path and self.val_fraction:
            raise ValueError("--val_path and --val_fraction exclude each other: drop one")


@dataclass(kw_only=True)
class ValidationSettings(ValidationDataSettings):
    """validation"""

    allow_val_overlap: bool = switch(False, help="train even if all documents of --val_path are in the training data")
    eval_interval: int = setting(500, check=not_negative(int), help="micro-batches between evaluations; 0: at the end")


@dataclass(kw_only=True)
class PretrainMachine(MachineSettings):
    """machine"""

    # PyTorch's attention is faster without, but a repeated run ends with other weights.
    deterministic: bool = with_default(MachineSettings, "deterministic", True)
    cuda_graphs: str = setting(
        "auto", choices=("auto", "0", "1"), help="replay updates as CUDA graphs; auto: on one GPU, if it works"
    )
    ddp: bool = switch(False, help="fail without a launcher such as torchrun; otherwise no effect")


@dataclass(kw_only=True)
class PretrainSettings(
    PretrainMachine,
    ValidationSettings,
    TrainingSettings,
    DataSettings,
    ModelSettings,
    BudgetSettings,
    PretrainOutput,
):
    """All settings of train_pretrain.py; --help shows the groups from the last to the first."""

    prog: ClassVar[str] = "train_pretrain.py"
    description: ClassVar[str] = "Pretrain a MiniMind causal language model."
    # Settings that a plan leaves as they are, though not given
    fixed_in_plans: ClassVar[frozenset[str]] = frozenset()

    @property
    def fixed(self) -> frozenset[str]:
        """Names of the settings that a plan leaves as they are: given ones, and the shape of existing weights."""
        shape = () if self.from_weight == "none" else (*MODEL_FLAGS, "init_scheme", "optimizer")
        return self.user_set.union(self.fixed_in_plans, shape)

    @property
    def length_flags(self) -> list[str]:
        """The flags by which the user says where the run ends."""
        return [name for name in ("epochs", "max_updates") if name in self.user_set and getattr(self, name)]

    def stem(self, hidden_size: int, use_moe: bool) -> Path:
        """The path of a run's files without suffix. hidden_size, use_moe: of its model, perhaps from a folder."""
        return Path(self.out_dir) / weight_name(self.save_weight, hidden_size, use_moe)

    def weight(self) -> Path | None:
        """The folder or .pth of --from_weight, see find_weight; None: fresh weights."""
        if self.from_weight == "none":
            return None
        width = self.hidden_size or DEFAULT_MODEL["hidden_size"]
        return find_weight(self.from_weight, self.out_dir, width, bool(self.use_moe))

    def weight_folder(self) -> Path | None:
        """The folder of a model that --from_weight names, if any."""
        weight = self.weight()
        return None if weight is None or weight.suffix == ".pth" else weight

    def check(self) -> None:
        chosen = "--batch_size auto" if self.batch_size == AUTO_ROWS else "a budget" if self.has_budget else None
        # Those of a plan are its own.
        has_rows = self.rows_per_update and "rows_per_update" in self.user_set
        other = "--shard" if self.shard != NONE else "--rows_per_update" if has_rows else None
        if chosen and other:
            raise ValueError(
                f"{chosen} chooses the micro-batches, for ranks that each have the whole model: drop it or {other}"
            )

    def fill_in(self) -> None:
        """Sets what is not given by the weights of --from_weight. The shape of those in a folder is read later.

        Errors: ValueError for an unreadable .json beside them, and for another --parse_special_tokens than theirs.
        """
        if self.batch_size == AUTO_ROWS:
            # auto leaves the rows open, as if the flag were not there.
            self.user_set -= {"batch_size"}
        weight = self.weight()
        shape = dict(DEFAULT_MODEL)
        if weight is not None and os.path.exists(weight):
            # As a path, so that a repeated run with another --out_dir finds it. Not a folder: as a Path, ./base becomes base, which
            # is looked up in --out_dir first.
            if weight.suffix == ".pth":
                self.from_weight = str(weight)
            record = read_record(weight)
            recorded = record.get(SPECIAL_TOKENS_FIELD)
            if recorded is not None and self.parse_special_tokens not in (None, recorded):
                raise ValueError(
                    f"--parse_special_tokens {int(not recorded)}: {weight} was trained with --parse_special_tokens "
                    f"{int(recorded)}: leave the flag out"
                )
            if recorded is not None:
                self.parse_special_tokens = recorded
            for name in MODEL_FLAGS if weight.suffix == ".pth" else ():
                if record.get(name) is not None:
                    shape[name] = record[name]
        if self.weight_folder() is not None:
            return
        for name, value in shape.items():
            if getattr(self, name) is None:
                setattr(self, name, value)
        if self.tokenizer_path is None:
            self.tokenizer_path = self.usual_tokenizer()
        elif self.tokenizer_path == "model" and not os.path.isfile("model/tokenizer.json"):
            # From another folder too, --tokenizer_path model means this repository's.
            self.tokenizer_path = DEFAULT_TOKENIZER

    def usual_tokenizer(self) -> str:
        """The folder of the tokenizer where no flag names one: of the run to resume, of the weights to start from, or ours."""
        assert self.hidden_size is not None
        stem = self.stem(self.hidden_size, bool(self.use_moe))
        is_resumed = self.from_resume and os.path.isdir(f"{stem}_resume")
        weights = [Path(f"{stem}.pth") if is_resumed else None, self.weight()]
        folders = [str(tokenizer_beside(weight)) for weight in weights if weight is not None]
        return next(filter(os.path.isdir, folders), DEFAULT_TOKENIZER)


def weight_name(prefix: str, hidden_size: int, use_moe: bool) -> str:
    """Name of a model's weight files without suffix."""
    return f"{prefix}_{hidden_size}{'_moe' if use_moe else ''}"


def find_weight(from_weight: str, out_dir: str | Path, hidden_size: int, use_moe: bool) -> Path:
    """The path that --from_weight means: the folder of a Hugging Face model, or a .pth, which need not exist.

    Any folder may have the name of a weight, as trainer/pretrain has where a run is started in trainer/. So the folder of
    a model is recognised by its files, and a bare name means a .pth first.
    """
    path = Path(from_weight)
    if path.suffix == ".pth":
        return path
    # MiniMind's way: --from_weight pretrain means out/pretrain_512.pth.
    candidates = [Path(out_dir) / f"{weight_name(from_weight, hidden_size, use_moe)}.pth"]
    # Or the full name without its suffix, with a folder or in --out_dir. A path such as / has no name.
    if path.name:
        candidates += [path.with_name(f"{path.name}.pth"), Path(out_dir) / f"{path.name}.pth"]
    # Unlike methods of Path, os.path does not raise for strings that are no path.
    file = next((candidate for candidate in candidates if os.path.isfile(candidate)), None)
    is_bare_name = path.name == from_weight
    is_model = os.path.isdir(path) and any(any(path.glob(pattern)) for pattern in FILES_OF_MODELS)
    if is_model and not (is_bare_name and file):
        return path
    return file or candidates[0]
