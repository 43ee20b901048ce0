"""A task of one's own, from the settings that describe it. What does not fit is told before anything is read or trained."""

from pathlib import Path

from common.errors import DataError, UserError
from dataset.glue.glue_tasks import CLASSIFICATION, METRICS, N_USUAL, QUESTIONS, REGRESSION, TAGS, Task, Windows
from dataset.glue.tables import TABLES, fault_of_label, words_of_labels
from dataset.glue.tagging import tags_of_file
from dataset.reading.file_kinds import expanded
from trainer.glue.entities import are_entity_tags
from trainer.glue.settings import GlueSettings
from trainer.reporting.reporter import Say

SUFFIXES = {CLASSIFICATION: TABLES, REGRESSION: TABLES, TAGS: (".jsonl",), QUESTIONS: (".json",)}
# Where --text and --label are not given.
USUAL_TEXT = {CLASSIFICATION: ("text",), REGRESSION: ("text",), TAGS: ("words",), QUESTIONS: ("question", "context")}
USUAL_LABEL = {CLASSIFICATION: "label", REGRESSION: "label", TAGS: "tags", QUESTIONS: "answers"}
USUAL_EPOCHS = {QUESTIONS: 2}
# A column with more different words holds no classes.
MOST_LABELS = 1000


def own_task(settings: GlueSettings, say: Say) -> Task:
    """The task that the settings describe. Errors: UserError, DataError."""
    kind = settings.kind
    assert kind is not None
    check_files(settings, kind)
    text, label = columns(settings, kind)
    task = Task(
        settings.task,
        text,
        label,
        labels=tuple(settings.labels),
        metrics=(),
        epochs=USUAL_EPOCHS.get(kind, 3),
        dev=(),
        test=(),
        kind=kind,
        bounds=(float("-inf"), float("inf")),
        windows=Windows(settings.doc_stride, settings.max_query_length, settings.max_answer_length),
    )
    task = with_own_files(task, settings)
    if kind in (CLASSIFICATION, TAGS):
        task = task._replace(labels=labels_of(settings, task, say))
    elif settings.labels:
        raise UserError(f"--labels: {kind} has no classes")
    return task._replace(metrics=metrics_of(settings, task))


def with_own_files(task: Task, settings: GlueSettings) -> Task:
    """The task with the files that these settings name: each machine may have them in a place of its own."""
    # Where nothing is trained or evaluated, there may be no such file.
    train, dev, test = (str(expanded(name)) if name else "" for name in files_of(settings).values())
    return task._replace(train=train, dev=(("", dev),), test=((settings.task, test),))


def files_of(settings: GlueSettings) -> dict[str, str | None]:
    """{flag: file}"""
    return {
        "train_file": settings.train_file,
        "dev_file": settings.dev_file,
        "test_file": settings.test_file,
    }


def check_files(settings: GlueSettings, kind: str) -> None:
    """Errors: UserError for a file that this command needs and does not have, or that is of another kind."""
    needed = {
        "train_file": (settings.do_train, "--do_train 1"),
        "dev_file": (settings.do_eval, "--do_eval 1"),
        "test_file": (settings.do_predict, "--do_predict 1"),
    }
    for name, file in files_of(settings).items():
        is_needed, by = needed[name]
        if file is None:
            if is_needed:
                raise UserError(f"--task {settings.task}: {by} needs --{name}")
            continue
        if Path(file).suffix not in SUFFIXES[kind]:
            raise UserError(f"--{name} {file}: for {kind} {' or '.join(SUFFIXES[kind])} is wanted")
        if is_needed and not expanded(file).is_file():
            raise UserError(f"--{name} {file}: no such file")


def columns(settings: GlueSettings, kind: str) -> tuple[tuple[str, ...], str]:
    """(columns of the text, of the label). Errors: UserError."""
    if kind == QUESTIONS and (settings.text or settings.label):
        raise UserError("--text, --label: the format of SQuAD 1.1 has its own names")
    text = tuple(settings.text) or USUAL_TEXT[kind]
    label = settings.label or USUAL_LABEL[kind]
    most = 1 if kind == TAGS else 2
    if len(text) > most:
        raise UserError(f"--text {' '.join(text)}: {kind} takes {most} column{'s' * (most > 1)} at most")
    if len({*text, label}) <= len(text):
        raise UserError(f"--text {' '.join(text)} --label {label}: a column may be named once")
    return text, label


def labels_of(settings: GlueSettings, task: Task, say: Say) -> tuple[str, ...]:
    """The classes in their order. Errors: UserError, DataError."""
    labels = settings.labels
    if not labels:
        if not task.train:
            raise UserError(
                f"--task {task.folder}: --labels is wanted where there is no --train_file to read them from"
            )
        path = Path(task.train)
        labels = tags_of_file(path, task) if task.kind == TAGS else words_of_labels(path, task)
        if len(labels) > MOST_LABELS:
            raise DataError(
                f"{path}: {len(labels):,} different words in the column {task.label!r}; at most {MOST_LABELS:,} are "
                "classes; for numbers --kind regression is wanted"
            )
        say(f"classes in {path}: {', '.join(labels)[:300]}")
    for label in settings.labels:
        fault = fault_of_label(label)
        if fault is not None:
            raise UserError(f"--labels: a class {fault}; name it otherwise")
    if len(set(labels)) < len(labels):
        raise UserError(f"--labels {' '.join(labels)[:200]}: a class stands there twice")
    if len(labels) < 2:
        raise UserError(
            f"--task {task.folder}: {len(labels)} class ({', '.join(labels)[:80]}); two and more are wanted"
        )
    return tuple(labels)


def metrics_of(settings: GlueSettings, task: Task) -> tuple[str, ...]:
    """What is shown. Errors: UserError for a metric that the task does not have."""
    known = METRICS[task.kind]
    if not settings.metrics:
        if task.kind == TAGS and not are_entity_tags(task.labels):
            return ("accuracy",)
        return known[: N_USUAL[task.kind]]
    for name in settings.metrics:
        if name not in known:
            raise UserError(f"--metrics {name}: {task.kind} has {', '.join(known)}")
        if name == "f1" and task.kind == CLASSIFICATION and len(task.labels) != 2:
            raise UserError(
                f"--metrics f1: of two classes, and {task.folder} has {len(task.labels)}; macro_f1 is of all"
            )
        if name.startswith("entity") and not are_entity_tags(task.labels):
            raise UserError(f"--metrics {name}: the tags are no entities', which are O and B-NAME, I-NAME ...")
    return tuple(dict.fromkeys(settings.metrics))
