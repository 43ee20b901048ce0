"""The settings of train_glue.py, and the flags of run.py, the script that was published for the benchmark."""

import os
import re
from dataclasses import MISSING, dataclass
from typing import ClassVar

from common.flags import at_least, fraction, not_negative, positive
from common.settings import Settings, setting, switch, with_default
from common.start import ROOT
from encoders.glue.tasks import METRICS, TASKS, task_list
from encoders.schedules import ENCODER_SCHEDULES
from trainer.settings import MachineSettings, OutputSettings, UpdateSettings

# flags of run.py without effect
IGNORED = ("model_type", "fp16_opt_level", "server_ip", "server_port")


@dataclass(kw_only=True)
class GlueOutput(OutputSettings):
    """output"""

    default_save_interval: ClassVar[int] = 500

    out_dir: str = with_default(OutputSettings, "out_dir", str(ROOT / "out" / "glue"), ("--output_dir",))
    log_interval: int = with_default(OutputSettings, "log_interval", 100, ("--logging_steps",))
    wandb_project: str = with_default(OutputSettings, "wandb_project", "MiniMind-GLUE")
    save_steps: int = setting(0, check=not_negative(int), help="updates between models in checkpoint-{update}; 0: none")
    overwrite_output_dir: bool = switch(False, help="replace the results in --out_dir")


@dataclass(kw_only=True)
class EncoderSettings(Settings):
    """model"""

    model_path: str = setting(
        str(ROOT / "out" / "electra_small" / "discriminator"),
        help="folder from save_pretrained, or a Hugging Face name in the local cache",
        aliases=("--model_name_or_path",),
        first=True,
        may_be_path=os.path.exists,
    )
    from_scratch: bool = switch(False, help="random weights of that shape: shows what pretraining is worth")
    dropout: float | None = setting(None, check=fraction, help="dropout of all parts (default: the model's config)")


@dataclass(kw_only=True)
class TaskSettings(Settings):
    """data"""

    task: str = setting(
        MISSING,
        check=task_list,
        metavar="TASK",
        help=f"{', '.join(TASKS)}, or as the benchmark spells them; several as sst2,mrpc; all: those with a folder in "
        "--data_dir; with --kind a name of your own",
        aliases=("--task_name",),
        first=True,
    )
    data_dir: str | None = setting(None, help="folder with CoLA, SST-2 ..., or that of the one task", first=True)
    max_seq_len: int = setting(
        128, check=at_least(5, "for two sentences"), help="positions of an example", aliases=("--max_seq_length",)
    )
    cache_dir: str | None = setting(None, help="folder for features (default: .glue_cache beside the data)")
    overwrite_cache: bool = switch(False, help="rebuild the features")
    vocab_path: str | None = setting(None, help="vocab.txt or a tokenizer folder (default: that of --model_path)")
    lower_case: bool = switch(
        True, help="lower-case the text (no effect on a tokenizer folder)", aliases=("--do_lower_case",)
    )


@dataclass(kw_only=True)
class CustomTaskSettings(Settings):
    """a task of your own"""

    kind: str | None = setting(None, choices=tuple(METRICS), help="examples have a class or a score")
    train_file: str | None = setting(None, help=".tsv, or .jsonl; its labels, sorted, are the classes")
    dev_file: str | None = setting(None, help="examples to evaluate on, in the same format")
    test_file: str | None = setting(None, help="examples for --do_predict, in the same format without labels")
    text: list[str] = setting(["text"], several=True, help="columns of the one or two sentences")
    label: str = setting("label", help="column of the label")


@dataclass(kw_only=True)
class FineTuningSettings(UpdateSettings):
    """training"""

    do_train: bool = switch(True, help="0: evaluate the model of --model_path as it is")
    epochs: float | None = setting(
        None,
        check=positive(float),
        help="passes over the data, such as 3 or 0.5 (default: 3; RTE and STS-B 10)",
        aliases=("--num_train_epochs",),
        first=True,
    )
    max_steps: int = setting(-1, check=at_least(-1, "(no limit)"), help="updates, instead of --epochs; -1: no limit")
    batch_size: int = with_default(UpdateSettings, "batch_size", 32, ("--per_gpu_train_batch_size",))
    accumulation_steps: int = with_default(UpdateSettings, "accumulation_steps", 1, ("--gradient_accumulation_steps",))
    grad_clip: float = with_default(UpdateSettings, "grad_clip", 1.0, ("--max_grad_norm",))
    learning_rate: float = with_default(UpdateSettings, "learning_rate", 1e-4)
    num_seeds: int = setting(1, check=positive(int), help="runs of a task: --seed, --seed + 1 ...", first=True)
    lr_schedule: str = setting("separate_linear", choices=tuple(ENCODER_SCHEDULES), help="learning rate over the run")
    warmup_share: float = setting(0.1, check=fraction, help="share of the run for the warm-up")
    warmup_steps: int | None = setting(None, check=not_negative(int), help="warm-up updates, instead of --warmup_share")
    layer_decay: float = setting(
        0.8, check=positive(float), help="factor of the learning rate from each layer to the one below"
    )
    adam_bias_correction: bool = switch(True, help="0: use Adam's moments uncorrected, like the original code")
    adam_epsilon: float = setting(1e-6, check=positive(float), help="added to the root of the second moment")


@dataclass(kw_only=True)
class EvaluationSettings(Settings):
    """evaluation"""

    do_eval: bool = switch(True, help="evaluate on the development files")
    do_predict: bool = switch(False, help="write predictions for the test files in the leaderboard's format")
    evaluate_during_training: bool = switch(False, help="also evaluate during training")
    eval_interval: int | None = setting(
        None, check=positive(int), help="updates between evaluations (default: those of an epoch)"
    )
    eval_batch_size: int | None = setting(
        None, check=positive(int), help="per rank (default: --batch_size)", aliases=("--per_gpu_eval_batch_size",)
    )
    eval_all_checkpoints: bool = switch(False, help="evaluate the models of --save_steps (500 by default) at the end")


@dataclass(kw_only=True)
class PublishedFlags(Settings):
    """flags of the published run.py; its other flags are accepted too, as those above or their aliases"""

    no_cuda: bool = switch(False, help="--device cpu")
    fp16: bool = switch(False, help="--dtype float16")
    model_type: str | None = setting(None, help="ignored: config.json determines it")
    fp16_opt_level: str | None = setting(None, help="ignored: an option of apex")
    # run.py's own defaults
    server_ip: str = setting("", help="ignored: for a debugger", may_be_empty=True)
    server_port: str = setting("", help="ignored: for a debugger", may_be_empty=True)


@dataclass(kw_only=True)
class GlueSettings(
    PublishedFlags,
    MachineSettings,
    EvaluationSettings,
    FineTuningSettings,
    CustomTaskSettings,
    TaskSettings,
    EncoderSettings,
    GlueOutput,
):
    """All settings of train_glue.py; --help shows the groups from the last to the first."""

    prog: ClassVar[str] = "train_glue.py"
    description: ClassVar[str] = "Fine-tune an encoder on GLUE."
    num_workers: int = with_default(MachineSettings, "num_workers", 0)

    def check(self) -> None:
        if self.fp16 and self.dtype == "float32":
            raise ValueError("--fp16 is --dtype float16, and --dtype float32 is given: drop one")
        if self.no_cuda and self.device not in (None, "cpu"):
            raise ValueError(f"--no_cuda is --device cpu, and --device {self.device} is given: drop one")
        if self.from_scratch and not self.do_train:
            raise ValueError("--from_scratch 1 with --do_train 0: random weights would be evaluated; leave one out")
        if not (self.do_train or self.do_eval or self.do_predict):
            raise ValueError("--do_train, --do_eval and --do_predict are all 0: nothing is left to do")
        if self.kind is not None:
            return self._check_custom_task(self.kind)
        if unknown := [name for name in self.task.split(",") if name not in (*TASKS, "all")]:
            raise ValueError(
                f"--task {unknown[0][:80]}: not one of {', '.join(TASKS)}, all; a task of your own needs --kind"
            )
        if self.data_dir is None:
            raise ValueError(f"--task {self.task} needs --data_dir, the folder of the benchmark's files")

    def _check_custom_task(self, kind: str) -> None:
        # The name of a results folder.
        if self.task in (*TASKS, "all") or not re.fullmatch(r"\w[\w.-]{0,80}", self.task):
            raise ValueError(f"--task {self.task[:80]!r}: with --kind, give a name of your own, as my_task")
        if len(self.text) > 2:
            raise ValueError(f"--text {' '.join(self.text)[:80]}: expected one or two columns")
        # Classes come from the training file.
        needed = {"train": self.do_train or kind == "classification", "dev": self.do_eval, "test": self.do_predict}
        for part, is_needed in needed.items():
            if is_needed and getattr(self, f"{part}_file") is None:
                raise ValueError(f"--{part}_file is needed")

    def fill_in(self) -> None:
        if self.eval_all_checkpoints and not self.save_steps:
            # As published.
            self.save_steps = 500
        if self.no_cuda:
            self.device = "cpu"
        if self.fp16:
            self.dtype = "float16"
