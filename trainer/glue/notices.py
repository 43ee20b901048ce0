"""Lines on settings of train_glue.py that cannot do what they are there for."""

from collections.abc import Sequence
from dataclasses import fields

from dataset.glue.glue_tasks import QUESTIONS, REGRESSION, REGRESSIONS, UNORDERED, Task
from dataset.reading.file_kinds import expanded
from trainer.advice import Case, common_warnings, is_changed, warnings_of
from trainer.electra.original import (
    FINE_TUNING,
    PublishedSettings,
    Rates,
    difference,
    difference_of_rows,
    fine_tuning,
    is_as_published,
    original_lines,
)
from trainer.glue.settings import TRAINING_FLAGS, GlueSettings, OwnTaskSettings
from trainer.machine.ranks import Ranks
from trainer.updates import rows_of_update


def notices(
    settings: GlueSettings, ranks: Ranks, tasks: Sequence[Task], published_rates: Rates | None = None
) -> list[str]:
    """The lines, in the order in which they are printed. published_rates: with --recipe original, those of the encoder's size."""
    published = fine_tuning(settings.kind)
    cases = [
        *training_cases(settings, published),
        *task_cases(settings, tasks, published),
        *own_task_cases(settings),
        *overridden_cases(settings),
        *evaluation_cases(settings),
    ]
    further = [] if published_rates is None else differences(settings, ranks, tasks, published_rates)
    return (
        original_lines(settings, published, further) + warnings_of(settings, cases) + common_warnings(settings, ranks)
    )


def is_asked(settings: GlueSettings, name: str, published: PublishedSettings) -> bool:
    """Whether the user has set it, and not --recipe original."""
    return is_changed(settings, name) and not is_as_published(settings, name, published)


def training_cases(settings: GlueSettings, published: PublishedSettings) -> list[Case]:
    """Flags of training where nothing is trained."""
    cases: list[Case] = []
    for name in TRAINING_FLAGS:
        cases.append((name, not settings.do_train and is_asked(settings, name, published), "--do_train is 0"))
    return cases


def task_cases(settings: GlueSettings, tasks: Sequence[Task], published: PublishedSettings) -> list[Case]:
    """Flags that are for other tasks."""
    cases: list[Case] = []
    for name, its_tasks in (("double_unordered", UNORDERED), ("score_divisor", REGRESSIONS)):
        has_effect = settings.task == "all" or not its_tasks.isdisjoint(settings.task.split(","))
        if name == "score_divisor" and any(task.kind == REGRESSION for task in tasks):
            has_effect = True
        is_due = settings.do_train and is_asked(settings, name, published) and not has_effect
        cases.append((name, is_due, f"it is for {', '.join(sorted(its_tasks))}"))
    is_plain = settings.head == "plain" and not is_as_published(settings, "head", published)
    of_positions = any(task.is_of_positions for task in tasks)
    cases.append(("head", is_plain and of_positions, "words and answers have a head of one matrix anyway"))
    return cases


def overridden_cases(settings: GlueSettings) -> list[Case]:
    """Flags in whose place another one, or the tokenizer, decides."""
    has_both_lengths = bool(settings.epochs and settings.max_steps)
    has_warmup_steps = settings.warmup_steps is not None
    several_alike = settings.num_seeds > 1 and not settings.do_train
    return [
        ("epochs", has_both_lengths, f"--max_steps {settings.max_steps} overrides it"),
        ("warmup_share", has_warmup_steps and is_changed(settings, "warmup_share"), "--warmup_steps says it"),
        (
            "lower_case",
            is_changed(settings, "lower_case") and not reads_vocab_txt(settings),
            "the tokenizer folder says it",
        ),
        ("num_seeds", several_alike, "--do_train is 0, and one evaluation is like another"),
    ]


def evaluation_cases(settings: GlueSettings) -> list[Case]:
    """Flags of predictions and evaluations that are not made; among them two of results and of compiling."""
    evaluated = settings.evaluate_during_training
    compiled = settings.use_compile == "1"
    return [
        ("submit", is_changed(settings, "submit") and not settings.do_predict, "--do_predict is 0"),
        (
            "submit",
            seeds_are_alike(settings),
            "--do_eval is 0, so no seed is known to be better: the first one is sent",
        ),
        ("eval_interval", bool(settings.eval_interval) and not evaluated, "no evaluation while training"),
        (
            "eval_batch_size",
            is_changed(settings, "eval_batch_size") and not (settings.do_eval or settings.do_predict),
            "nothing is evaluated",
        ),
        (
            "overwrite_output_dir",
            settings.overwrite_output_dir and settings.from_resume,
            "--from_resume 1 goes on with the results that are there",
        ),
        ("evaluate_during_training", evaluated and not settings.do_eval, "--do_eval is 0"),
        ("eval_all_checkpoints", settings.eval_all_checkpoints and not settings.do_eval, "--do_eval is 0"),
        (
            "use_compile",
            compiled and settings.gradient_checkpointing and settings.do_train,
            "--gradient_checkpointing 1 goes without compiling",
        ),
    ]


def seeds_are_alike(settings: GlueSettings) -> bool:
    """Whether one of several seeds is to be sent, and nothing tells which is better."""
    has_seeds = settings.num_seeds > 1 and settings.do_train
    return has_seeds and settings.do_predict and not settings.do_eval and settings.submit != "ensemble"


def differences(settings: GlueSettings, ranks: Ranks, tasks: Sequence[Task], published_rates: Rates) -> list[str]:
    """From the published code, in what the size, the task or the ranks decide."""
    found = []
    for name, published in published_rates._asdict().items():
        value = getattr(settings, name)
        if value != published:
            found.append(difference(f"--{name} {value}", published))
    # Tasks may have different ones.
    epochs = sorted({task.epochs for task in tasks})
    of_tasks = " or ".join(map(str, epochs))
    if settings.max_steps is not None:
        found.append(difference(f"--max_steps {settings.max_steps}", f"--epochs {of_tasks}"))
    elif settings.epochs is not None and epochs != [settings.epochs]:
        found.append(difference(f"--epochs {settings.epochs:g}", of_tasks))
    if settings.warmup_steps is not None:
        found.append(
            difference(f"--warmup_steps {settings.warmup_steps}", f"--warmup_share {FINE_TUNING['warmup_share'].value}")
        )
    return found + difference_of_rows(rows_of_update(settings, ranks), FINE_TUNING["batch_size"].value)


def reads_vocab_txt(settings: GlueSettings) -> bool:
    """Whether the tokenizer is made of a vocab.txt."""
    return settings.vocab_path is not None and not expanded(settings.vocab_path).is_dir()


def own_task_cases(settings: GlueSettings) -> list[Case]:
    """Flags of one's own tasks beside the benchmark's, and those of questions beside other kinds."""
    cases: list[Case] = []
    for field in fields(OwnTaskSettings):
        is_given = is_changed(settings, field.name)
        if settings.kind is None:
            cases.append((field.name, is_given, f"--task {settings.task} is of the benchmark"))
        elif field.name in ("doc_stride", "max_query_length", "max_answer_length"):
            cases.append((field.name, is_given and settings.kind != QUESTIONS, f"it is for {QUESTIONS}"))
    cases.append(
        ("data_dir", settings.kind is not None and settings.data_dir is not None, "the task has its own files")
    )
    return cases
