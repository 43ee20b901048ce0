"""The files of a fine-tuning command: those that it reads, and the results of an earlier one that it replaces."""

from collections.abc import Collection, Iterable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from common.errors import DataError, UserError
from common.files import remove
from common.wording import counted
from dataset.glue.feature_cache import cached_features, read_features
from dataset.glue.features import Features
from dataset.glue.glue_dataset import GlueAssembler
from dataset.glue.glue_tasks import DIAGNOSTICS, QUESTIONS, TASKS, UNORDERED, Task
from dataset.glue.questions import n_with_gaps, read_questions, without_misplaced
from dataset.reading.file_kinds import expanded
from dataset.tokenizing.vocabulary import FEWEST, MOST_UNKNOWN, check_known
from trainer.glue.results import read_json
from trainer.glue.settings import GlueSettings
from trainer.launch import make_folder
from trainer.machine.agreement import compare_with_main
from trainer.machine.collectives import first_rank_first, on_main
from trainer.reporting.reporter import Say
from trainer.saving.places import check_writable

if TYPE_CHECKING:
    from trainer.glue.job import Command

# How many of the first examples are looked at.
LOOKED_AT = 1000


class Data(NamedTuple):
    """The files of a task, as GlueAssemblers."""

    name: str
    task: Task
    # Changes with the training file, the tokenizer and the length.
    key: str
    # None: nothing is trained.
    train: GlueAssembler | None
    # {suffix of the metrics' names: ...}.
    dev: dict[str, GlueAssembler]
    # {leaderboard's name: ...}.
    test: dict[str, GlueAssembler]
    # {"dev" or "test", and the name above: what changes with that file, the tokenizer and the length}.
    eval_keys: dict[str, str]


def data_top(settings: GlueSettings) -> Path:
    """The folder that --data_dir names on this machine."""
    assert settings.data_dir is not None
    return expanded(settings.data_dir)


def task_folders(settings: GlueSettings, say: Say) -> dict[str, str]:
    """{task: its folder below --data_dir, "" for that itself} of --task. Errors: UserError where there is none."""
    top = data_top(settings)
    if settings.task != "all":
        names = settings.task.split(",")
        return {name: folder_of_task(top, name, is_alone=len(names) == 1) for name in names}
    found = {name: task.folder for name, task in TASKS.items() if (top / task.folder).is_dir()}
    if not found:
        wanted = ", ".join(task.folder for task in TASKS.values())
        raise UserError(f"--data_dir {top}: no folder of a task is in there ({wanted})")
    if absent := [TASKS[name].folder for name in TASKS if name not in found]:
        say(f"not in {top}, so left out: {', '.join(absent)}")
    return found


def folder_of_task(top: Path, name: str, is_alone: bool) -> str:
    """The folder of a task below --data_dir; --data_dir itself, "", may be that of the only one. Errors: UserError."""
    task = TASKS[name]
    if (top / task.folder).is_dir():
        return task.folder
    files = ["train.tsv", *(file for _, file in task.dev)]
    if is_alone and any((top / file).exists() for file in files):
        return ""
    raise UserError(f"--data_dir {top}: neither a folder {task.folder} nor its train.tsv is in there")


def read_task(command: "Command", name: str, folder: Path, own: Task | None = None) -> Data:
    """The Data of a task; the files that this command needs must be there, those of the test may be absent.

    own: the task, where it is none of the benchmark's. Each rank opens its own files, which must have the same content. Whether
    there is a file is decided by rank 0.
    """
    settings = command.settings
    ranks = command.ranks
    task = own or TASKS[name]

    def read(
        file: str, labelled: bool = True, both_orders: bool = False, is_trained: bool = False
    ) -> tuple[GlueAssembler, str]:
        """The examples of a file, and the name of their features."""
        made: list[Path] = []

        def make_features(overwrites: bool) -> Path:
            options = (settings.max_seq_len, settings.cache_dir, labelled, overwrites, command.say, both_orders)
            return cached_features(folder / file, task, command.encoder, *options)

        def make_on_main() -> tuple[str, str]:
            made.append(make_features(settings.overwrite_cache))
            return made[0].stem, Path(file).name

        def make_or_find() -> Path:
            # Where a machine has a cache of its own, its first rank makes what is in there.
            return made[0] if made else make_features(settings.overwrite_cache and ranks.local_rank == 0)

        # What is wrong with the file is told by rank 0 alone.
        key, name_on_main = on_main(ranks, make_on_main)
        path = first_rank_first(ranks, make_or_find)
        # An own file may have another name on this machine.
        compare_with_main(ranks, {f"{task.folder}/{name_on_main}": digest_of(path)})
        features = read_features(path)
        check_sentences(features, command.encoder.unk_id, f"{folder / file}, --model_path {settings.model_path}")
        if features.skipped:
            command.say(f"{folder / file}: skipped {counted(int(features.skipped), 'line')} with too few fields")
        asked = read_questions(folder / file, labelled) if task.kind == QUESTIONS else []
        # To be evaluated, an answer's text is enough.
        if asked and is_trained:
            features, line = without_misplaced(features, asked, folder / file)
            if line is not None:
                command.say(line)
        return GlueAssembler(features, command.encoder, settings.max_seq_len, questions=asked), key

    training: GlueAssembler | None = None
    key = ""
    if settings.do_train:
        training, key = read(task.train, both_orders=settings.double_unordered and name in UNORDERED, is_trained=True)
    dev = {}
    eval_keys = {}
    if settings.do_eval:
        for suffix, file in task.dev:
            dev[suffix], eval_keys[f"dev {suffix}"] = read(file)
    test = {}
    if settings.do_predict:
        for target, usual in task.test:
            # A task of one's own may have that name too.
            places = DIAGNOSTICS if own is None and target == "AX" else (usual,)
            # A number, since the path of an own file is that of one machine.
            number = on_main(ranks, partial(first_there, folder, places))
            if number is not None:
                test[target], eval_keys[f"test {target}"] = read(places[number], labelled=False)
            else:
                command.say(f"{folder / usual} is not there: no predictions {target}.tsv")
    data = Data(name, task, key, training, dev, test, eval_keys)
    for line in window_notices(data, settings.max_seq_len):
        command.say(line)
    return data


def first_there(folder: Path, names: Iterable[str]) -> int | None:
    """The number of the first name under which there is something in a folder."""
    return next((number for number, name in enumerate(names) if (folder / name).exists()), None)


def digest_of(features: Path) -> str:
    """Of what the features were made from, whatever the file is called on this machine. See `cached_features`."""
    return features.stem.rpartition("-")[2]


def window_notices(data: Data, max_seq_len: int) -> list[str]:
    """A line on questions whose windows do not overlap; of several files the first one that has some is told."""
    if data.task.kind != QUESTIONS:
        return []
    assemblers = [*([data.train] if data.train is not None else []), *data.dev.values(), *data.test.values()]
    for assembler in assemblers:
        n = n_with_gaps(assembler.features, data.task.windows, max_seq_len)
        if n:
            return [
                f"warning: --doc_stride {data.task.windows.stride}: beside {counted(n, 'question')} a window of "
                f"--max_seq_len {max_seq_len} has room for no more tokens of the text, so windows do not overlap, and "
                "answers between two of them are lost"
            ]
    return []


def check_sentences(features: Features, unk_id: int | None, what: str) -> None:
    """Errors: DataError where the tokenizer knows little of the first sentences, or makes nothing of them."""
    check_known(features.tokens, unk_id, what)
    empty = (features.first + features.second == 0)[:LOOKED_AT]
    if len(empty) >= FEWEST and empty.mean() > MOST_UNKNOWN:
        raise DataError(
            f"{what}: the tokenizer makes no token of {empty.mean():.0%} of the first {len(empty):,} examples; its "
            "vocabulary is not whole, or the sentences are empty"
        )


def refuse_earlier(settings: GlueSettings, out: Path, names: Iterable[str]) -> None:
    """Errors: UserError where an earlier command has left results that nobody has asked to go on with, or to replace."""
    of_run = read_json(out / "eval_results.json", "settings")
    if of_run is not None and "seed" in of_run:
        raise UserError(f"--out_dir: {out} holds the results of a single seed: name another folder")
    if settings.from_resume:
        if not settings.do_train:
            refuse_trained(out, names)
        return
    for name in names:
        earlier = [*out.glob(f"{name}/seed_*/*"), *out.glob(f"{name}/eval_results.json")]
        if earlier and not settings.overwrite_output_dir:
            raise UserError(
                f"--out_dir: {out / name} holds results already: name another folder, replace them with "
                "--overwrite_output_dir 1, or go on where they stop with --from_resume 1"
            )


def refuse_trained(out: Path, names: Iterable[str]) -> None:
    """Errors: UserError where a seed of these tasks was trained: an evaluation alone would take its place, and that of the
    table of its task."""
    for name in names:
        for path in sorted(out.glob(f"{name}/seed_*/eval_results.json")):
            earlier = read_json(path, "settings")
            # Results of earlier versions may not say it.
            if earlier is not None and earlier["settings"].get("do_train", True):
                raise UserError(
                    f"--out_dir: {path.parent} holds a trained seed, which --do_train 0 would replace: name another --out_dir"
                )


def results_to_replace(settings: GlueSettings, out: Path, names: Iterable[str]) -> list[Path]:
    """What an earlier command has left of these tasks, and this one removes."""
    if settings.from_resume:
        return []
    found: list[Path] = []
    for name in names:
        found += [*out.glob(f"{name}/seed_*"), *out.glob(f"{name}/ensemble"), *out.glob(f"{name}/eval_results.json")]
    return found


def check_place(settings: GlueSettings, out: Path, names: Iterable[str], folder: Path) -> None:
    """Errors: UserError where the model of `folder`, --model_path's, is among what this command replaces."""
    own = [out / name / f"seed_{seed}" for name in names for seed in seeds(settings)]
    for path in (*results_to_replace(settings, out, names), *own):
        if folder.resolve().is_relative_to(path.resolve()):
            raise UserError(
                f"--model_path {settings.model_path} lies in {path}, which this command replaces: copy the model "
                "elsewhere, or name another --out_dir"
            )


def seeds(settings: GlueSettings) -> range:
    """The seeds of the runs of each task."""
    n_runs = settings.num_seeds if settings.do_train else 1
    return range(settings.seed, settings.seed + n_runs)


def make_room(settings: GlueSettings, out: Path, names: Collection[str]) -> None:
    """Remove the results that are to be replaced, and find out whether new ones can be written."""
    for path in results_to_replace(settings, out, names):
        remove(path)
    for name in names:
        make_folder(out / name)
        check_writable(out / name / name)
