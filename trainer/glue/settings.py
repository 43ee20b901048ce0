"""The settings of train_glue.py."""

import re
from collections.abc import Collection, Sequence
from dataclasses import MISSING, dataclass, fields
from typing import ClassVar, NoReturn

from common.flags import at_least, end_with_line, fraction, not_negative, positive
from common.paths import ROOT
from common.settings import Settings, SettingsParser, setting, switch, with_default
from dataset.glue.glue_tasks import KINDS, METRICS, QUESTIONS, TAGS, TASKS, Windows, task_list
from dataset.reading.file_kinds import expanded
from trainer.electra.original import ORIGINAL, RECIPES, fine_tuning, take
from trainer.machine.settings import ShardedMachineSettings
from trainer.optim.schedules import ENCODER_SCHEDULES
from trainer.optim.settings import UpdateSettings
from trainer.reporting.settings import OutputSettings, log_interval, save_interval

USUAL_SAVE_INTERVAL = 500
PROG = "train_glue.py"
DESCRIPTION = "Fine-tune an encoder on GLUE."
# The flags that only training reads, and that decide on what comes of it
SCHEDULE_FLAGS = (
    "epochs",
    "max_steps",
    "learning_rate",
    "lr_schedule",
    "weight_decay",
    "warmup_share",
    "warmup_steps",
    "layer_decay",
    "top_layer_exponent",
    "adam_bias_correction",
    "adam_epsilon",
    "loss_reduction",
    "double_unordered",
    "score_divisor",
)
# All flags that only training reads
TRAINING_FLAGS = (
    *SCHEDULE_FLAGS,
    "save_steps",
    "grad_clip",
    "accumulation_steps",
    "rows_per_update",
    "max_bad_updates",
    "use_compile",
    "gradient_checkpointing",
)
# What is on top of the encoder
HEADS = ("huggingface", "plain")
# Of the losses of a batch's examples
REDUCTIONS = ("mean", "sum")
# Whose predictions are sent to the leaderboard
CHOICES = ("best", "median", "ensemble")
# Positions of an example, where the user gives no number: of questions, whose texts are long, and of all else.
LENGTH_OF_QUESTIONS = 384
USUAL_LENGTH = 128
# Suffixes of the files that describe a task.
DESCRIPTIONS = (".yaml", ".yml")
# Of a task of one's own: it names the folder of its results.
OWN_NAME = re.compile(r"[\w][\w.-]{0,80}")
# What lies beside these folders.
RESULT_FILES = ("eval_results.json", "eval_results.md", "submission.zip")


@dataclass(kw_only=True)
class GlueOutput(OutputSettings):
    """output"""

    usual_save_interval: ClassVar[int] = USUAL_SAVE_INTERVAL

    out_dir: str = with_default(OutputSettings, "out_dir", str(ROOT / "out" / "glue"))
    save_interval: int = save_interval(USUAL_SAVE_INTERVAL, "updates")
    log_interval: int = log_interval("updates")
    wandb_project: str = with_default(OutputSettings, "wandb_project", "MiniMind-GLUE")
    save_steps: int = setting(
        0, check=not_negative(int), help="updates between models kept in checkpoint-{update}; 0: none"
    )
    overwrite_output_dir: bool = switch(False, help="replace the results in --out_dir")


@dataclass(kw_only=True)
class EncoderSettings(Settings):
    """model"""

    model_path: str = setting(
        str(ROOT / "out" / "electra_small" / "discriminator"),
        help="folder of save_pretrained, or a Hugging Face name that is in the local cache",
        first=True,
    )
    from_scratch: bool = switch(False, help="random weights of that folder's config: what pretraining is worth")
    dropout: float | None = setting(
        None, check=fraction, help="all of the model's dropout (default: as its config says)"
    )
    head: str = setting(
        "huggingface",
        choices=HEADS,
        help="plain: dropout and one matrix, as in ELECTRA's original code; saved so that transformers loads it",
    )


@dataclass(kw_only=True)
class TaskSettings(Settings):
    """data"""

    task: str = setting(
        MISSING,
        check=task_list,
        metavar="TASK",
        help=f"{', '.join(TASKS)}, or as the benchmark spells them; several as sst2,mrpc; all: every one whose folder is "
        "there; one of your own: a YAML file of the settings below, or its name beside these flags",
        first=True,
    )
    data_dir: str | None = setting(
        None, help="the benchmark's folder (with CoLA, SST-2 ...), or the task's own", first=True
    )
    # The settings hold the kind's value where the user gives none.
    max_seq_len: int = setting(
        None,
        check=at_least(5, "for two sentences: CLS a SEP b SEP"),
        help="positions of an example (default: 128, of questions 384)",
    )
    cache_dir: str | None = setting(None, help="folder for features (default: .glue_cache beside the data)")
    overwrite_cache: bool = switch(False, help="make the features anew")
    vocab_path: str | None = setting(None, help="vocab.txt or a tokenizer folder (default: that of --model_path)")
    lower_case: bool = switch(True, help="lower-case the text (for a vocab.txt; a folder knows by itself)")
    double_unordered: bool = switch(False, help="train MRPC and STS-B on both orders of their two sentences")


@dataclass(kw_only=True)
class OwnTaskSettings(Settings):
    """a task of your own"""

    kind: str | None = setting(
        None, choices=KINDS, help="what an example is given: a class, a score, a tag for each word, an answer in a text"
    )
    train_file: str | None = setting(
        None, help=".csv, .tsv or .jsonl; of tags .jsonl, of questions .json in the format of SQuAD 1.1"
    )
    dev_file: str | None = setting(None, help="what is evaluated on, of the same kind")
    test_file: str | None = setting(None, help="what --do_predict predicts, of the same kind, without labels")
    text: list[str] = setting(
        [], several=True, help="columns of the one or two sentences, or of the words (default: text; of tags words)"
    )
    label: str | None = setting(None, help="column of the label (default: label; of tags tags)")
    labels: list[str] = setting(
        [], several=True, help="the classes in their order (default: those in the training file, sorted)"
    )
    metrics: list[str] = setting(
        [],
        several=True,
        choices=tuple(dict.fromkeys(name for names in METRICS.values() for name in names)),
        help="what is shown; the first one counts most (default: accuracy; pearson, spearman; entity_f1; exact_match, f1)",
    )
    doc_stride: int = setting(
        Windows().stride, check=positive(int), help="tokens from one window of a long text to the next, of questions"
    )
    max_query_length: int = setting(
        Windows().longest_question, check=positive(int), help="tokens of a question; more are cut off"
    )
    max_answer_length: int = setting(Windows().longest_answer, check=positive(int), help="tokens of an answer")


@dataclass(kw_only=True)
class FineTuningSettings(UpdateSettings):
    """training"""

    recipe: str = setting(
        "default",
        choices=RECIPES,
        help="original: all settings as in the published code; flags and --config win over them",
        first=True,
    )
    do_train: bool = switch(True, help="0: evaluate the model of --model_path as it is")
    epochs: float | None = setting(
        None,
        check=positive(float),
        help="passes over the data, as 3 or 0.5 (default: 3, of RTE and STS-B 10, of questions 2)",
        first=True,
    )
    max_steps: int | None = setting(None, check=positive(int), help="updates of a run; they override --epochs")
    accumulation_steps: int = with_default(UpdateSettings, "accumulation_steps", 1)
    learning_rate: float = with_default(UpdateSettings, "learning_rate", 1e-4)
    num_seeds: int = setting(
        1, check=positive(int), help="runs of each task, of seeds --seed, --seed + 1 ...", first=True
    )
    lr_schedule: str = setting("separate_linear", choices=tuple(ENCODER_SCHEDULES), help="of the rate")
    warmup_share: float = setting(0.1, check=fraction, help="of the run, for the warm-up")
    warmup_steps: int | None = setting(
        None, check=not_negative(int), help="updates of warm-up, in place of --warmup_share"
    )
    layer_decay: float = setting(
        0.8,
        check=positive(float),
        help="what the rate is multiplied with from layer to layer, head to embeddings",
    )
    top_layer_exponent: int = setting(
        1, check=not_negative(int), help="of --layer_decay at the top layer; the head has 0; 2: as in the original code"
    )
    adam_bias_correction: bool = switch(True, help="0: Adam's moments as they are, as the original code takes them")
    adam_epsilon: float = setting(
        1e-6, check=positive(float), help="AdamW's epsilon, beside the root of the second moment"
    )
    loss_reduction: str = setting(
        "mean", choices=REDUCTIONS, help="over the examples of an update; sum, as in the original code: mostly clipped"
    )
    score_divisor: float = setting(
        1.0, check=positive(float), help="what STS-B's scores are divided by to train; 5 as in the original code"
    )


@dataclass(kw_only=True)
class EvaluationSettings(Settings):
    """evaluation"""

    do_eval: bool = switch(True, help="evaluate on the development files")
    do_predict: bool = switch(False, help="write predictions for the test files, as the leaderboard wants them")
    submit: str = setting(
        "best",
        choices=CHOICES,
        help="whose predictions go into submission.zip: the best or the median seed of each task, or the ensemble of all",
    )
    evaluate_during_training: bool = switch(False, help="evaluate while training, too")
    # The settings of a run hold the epoch's updates where the user gives none.
    eval_interval: int = setting(
        None, check=positive(int), help="updates between evaluations (default: those of an epoch)"
    )
    eval_batch_size: int | None = setting(
        None, check=positive(int), help="examples that a rank evaluates at once (default: --batch_size)"
    )
    eval_all_checkpoints: bool = switch(False, help="evaluate the models of --save_steps too, at the end")


@dataclass(kw_only=True)
class GlueMachine(ShardedMachineSettings):
    """machine"""

    num_workers: int = with_default(ShardedMachineSettings, "num_workers", 0)


@dataclass(kw_only=True)
class GlueSettings(
    GlueMachine,
    EvaluationSettings,
    FineTuningSettings,
    OwnTaskSettings,
    TaskSettings,
    EncoderSettings,
    GlueOutput,
):
    """All settings of train_glue.py; --help shows the groups from the last to the first."""

    def check(self) -> None:
        if self.eval_all_checkpoints and not self.save_steps:
            raise ValueError("--eval_all_checkpoints 1 needs --save_steps N, which keeps the models to evaluate")
        if self.eval_all_checkpoints and not self.do_train:
            raise ValueError(
                "--eval_all_checkpoints 1 needs a training, which saves them on its way: drop it or --do_train 0"
            )
        if self.seed + self.num_seeds > 2**32:
            raise ValueError(f"--seed {self.seed} --num_seeds {self.num_seeds}: the last seed would be beyond 2**32")
        check_task(self)
        if self.from_scratch and not self.do_train:
            raise ValueError("--from_scratch 1 draws random weights, which --do_train 0 would evaluate: drop one")
        if not (self.do_train or self.do_eval or self.do_predict):
            raise ValueError("--do_train 0, --do_eval 0 and --do_predict 0 leave nothing to do")


def parser() -> SettingsParser:
    """The command line of train_glue.py."""
    return SettingsParser(GlueSettings, PROG, DESCRIPTION)


def check_task(settings: GlueSettings) -> None:
    """Errors: ValueError where it is not clear what --task names. A file that describes one is read later."""
    name = settings.task
    if name.endswith(DESCRIPTIONS):
        return
    if settings.kind is None:
        names = name.split(",")
        for one in names:
            if one not in (*TASKS, "all"):
                raise ValueError(
                    f"--task {one[:80]}: not one of {', '.join(TASKS)}, all; a task of your own is a YAML file, or needs "
                    "--kind"
                )
        if "all" in names and len(names) > 1:
            raise ValueError(f"--task {name}: all is every task; give it alone")
        if settings.data_dir is None:
            raise ValueError(f"--task {name} needs --data_dir, the folder of the benchmark's files")
        return
    if name in (*TASKS, "all"):
        raise ValueError(f"--task {name} is of the benchmark; give your own task, with --kind, another name")
    if name in RESULT_FILES:
        raise ValueError(f"--task {name} is the name of a file of results; give your task another name")
    if not OWN_NAME.fullmatch(name):
        raise ValueError(f"--task {name[:80]!r}: a name of letters, digits, '.', '-' and '_' is wanted")


@dataclass(kw_only=True)
class TaskFile(OwnTaskSettings):
    """What a file that describes a task may hold."""


class TaskFileParser(SettingsParser):
    """Reads such a file. Errors: ValueError."""

    def __init__(self) -> None:
        super().__init__(TaskFile, PROG, "A task of your own.")

    def error(self, message: str) -> NoReturn:
        raise ValueError(message.replace("argument --config", "argument --task"))


def take_description(settings: GlueSettings, given: Collection[str]) -> None:
    """Give the settings what the file says that --task names; `given` are those that flags have set, which win.

    The files that it names lie beside it, unless their paths are whole. Errors: ValueError.
    """
    path = expanded(settings.task)
    described = TaskFileParser().read(["--config", str(path)])[0]
    for field in fields(OwnTaskSettings):
        value = getattr(described, field.name)
        if field.name in given:
            continue
        if field.name.endswith("_file") and value is not None:
            value = str(path.parent / expanded(value))
        setattr(settings, field.name, value)
    if settings.kind is None:
        raise ValueError(f"{path}: no kind in there; one of {', '.join(KINDS)} is wanted")
    settings.task = task_list(path.stem)
    check_task(settings)


def take_defaults(settings: GlueSettings, given: Collection[str]) -> None:
    """Give the settings what depends on the kind of the task; `given` are those that the user has set.

    Errors: ValueError.
    """
    if settings.max_seq_len is None:
        settings.max_seq_len = LENGTH_OF_QUESTIONS if settings.kind == QUESTIONS else USUAL_LENGTH
    if settings.recipe != ORIGINAL:
        return
    if settings.kind in (TAGS, QUESTIONS):
        raise ValueError(
            f"--recipe original: it is of the published code for classes and scores, and {settings.kind} are trained "
            "in another way here; drop it, and give its settings by their flags"
        )
    take(settings, fine_tuning(settings.kind), given)


def parse_args(argv: Sequence[str] | None = None) -> GlueSettings:
    """The settings of a command line, and of the file that describes its task; None: of this process."""
    reader = parser()
    settings, given = reader.read(argv)
    assert isinstance(settings, GlueSettings)
    try:
        if settings.task.endswith(DESCRIPTIONS):
            take_description(settings, given)
        take_defaults(settings, given)
    except ValueError as error:
        end_with_line(str(error))
    return settings
