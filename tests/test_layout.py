"""Imports run one way, every flag is read, and what would harm does not occur. Reference: the sources, parsed."""

import ast
import graphlib
import re
import subprocess
import sys
from dataclasses import fields
from functools import cache

import pytest

from common.settings import SettingsParser
from dataset.corpus import FLAGS as CORPUS_FLAGS
from encoders.electra.settings import NETWORK_SIZES, ElectraSettings
from encoders.glue.settings import GlueSettings, PublishedFlags
from tests.helpers import ROOT
from trainer.pretrain.settings import MODEL_FLAGS, PretrainSettings
from trainer.sft.settings import SftSettings

# Each imports those before it and none behind it; benchmarks/ and scripts/ stand beside each other.
FOLDERS = ("common", "model", "dataset", "trainer", "scripts", "benchmarks", "encoders")
# What may import encoders/: its scripts, which stand where users type them
DOORS = ("trainer/train_electra.py", "trainer/train_glue.py")
SOURCES = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))
SCRIPTS = {path.stem for path in (ROOT / "trainer").glob("train_*.py")}


@cache
def nodes(path):
    return list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))


def imports(path):
    """The modules that a file imports, those within functions included."""
    for node in nodes(path):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import breaks running by path"
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def relative(path):
    return str(path.relative_to(ROOT))


def test_imports_run_one_way():
    """common/ <- model/ <- dataset/ <- trainer/ <- scripts/, benchmarks/ <- encoders/; and nobody imports a script of trainer/."""
    for path in SOURCES:
        folder = "encoders" if relative(path) in DOORS else path.relative_to(ROOT).parts[0]
        behind = [*FOLDERS[FOLDERS.index(folder) + 1 :], "tests"]
        for name in imports(path):
            assert name.split(".")[0] not in behind, f"{path}: {name}"
            if folder in ("trainer", "encoders") and path.stem not in SCRIPTS:
                assert name.split(".")[-1] not in SCRIPTS, f"{path}: {name}"


def test_no_module_imports_itself_in_a_circle():
    """What each of our modules imports, imports within functions left out."""
    modules = {relative(path).removesuffix(".py").replace("/", "."): path for path in SOURCES}
    edges = {}
    for module, path in modules.items():
        names = set()
        for node in nodes(path)[0].body:
            if isinstance(node, ast.ImportFrom):
                names.add(node.module)
                names |= {f"{node.module}.{alias.name}" for alias in node.names}
        edges[module] = names & modules.keys()
    # raises a CycleError that names the circle
    graphlib.TopologicalSorter(edges).prepare()


@pytest.mark.parametrize("folder", ["trainer", "dataset"])
def test_no_rooms_import_each_other_in_a_circle(folder):
    """The rooms of a folder: its subfolders, and the files beside them. Imports within functions count."""
    edges = {}
    for path in (ROOT / folder).rglob("*.py"):
        rooms = {name.split(".")[1] for name in imports(path) if name.startswith(f"{folder}.")}
        room = path.relative_to(ROOT / folder).parts[0].removesuffix(".py")
        edges.setdefault(room, set()).update(rooms - {room})
    graphlib.TopologicalSorter(edges).prepare()


def calls(path):
    """(function name, call) of every call in a file."""
    for node in nodes(path):
        if isinstance(node, ast.Call):
            function = node.func
            yield function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", ""), node


# The methods with which transformers loads what a folder holds. That of ElectraPretrainer calls them.
LOADERS = ("from_pretrained", "from_config")


def test_forbidden_arguments_do_not_occur():
    """torch.load always says weights_only=True, and loaders of transformers trust_remote_code=False: left out, it means to ask."""
    loaders = 0
    for path in SOURCES:
        text = path.read_text(encoding="utf-8")
        assert "cudnn.deterministic" not in text
        assert "pickle" not in {name.split(".")[0] for name in imports(path)}, path
        for name, call in calls(path):
            place = f"{path}:{call.lineno}"
            given = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
            assert not (name == "load_state_dict" and given.get("strict", "True") != "True"), place
            assert given.get("weights_only", "True") == "True", place
            assert given.get("allow_pickle", "False") == "False", place
            assert given.get("trust_remote_code", "False") == "False", place
            assert given.get("type") != "bool", place
            is_warning = name in ("filterwarnings", "simplefilter")
            assert not (is_warning and '"ignore"' in ast.unparse(call).replace("'", '"')), place
            function = ast.unparse(call.func)
            if function == "torch.load":
                assert given.get("weights_only") == "True", place
            if name in LOADERS and "." in function:
                assert given.get("trust_remote_code") == "False", place
                loaders += 1
    assert loaders >= 5, "the search itself no longer finds them"


OWN_FILES = {PretrainSettings: "pretrain", SftSettings: "sft", ElectraSettings: "electra", GlueSettings: "glue"}
# Fine-tuning is pretraining on other data.
BUILT_ON = {SftSettings: ("pretrain",)}


@pytest.mark.parametrize("kind", OWN_FILES)
def test_every_flag_is_read(kind):
    """Reference: the parser's own list; `settings.<flag>`, in a store `reading.<flag>`, reads one."""
    own = (OWN_FILES[kind], *BUILT_ON.get(kind, ()))
    actions, others = SettingsParser(kind)._actions, [name for name in OWN_FILES.values() if name not in own]
    readers = [path for path in SOURCES if relative(path).startswith(("trainer/", "encoders/", "dataset/store/"))]
    files = [path for path in readers if path.stem != "settings" and not any(name in relative(path) for name in others)]
    text = "".join(path.read_text(encoding="utf-8") for path in files)
    # use_wandb becomes --tracker wandb; the launcher's LOCAL_RANK counts, not its flag; those of run.py become other flags, or are ignored with a line.
    of_run_py = {field.name for field in fields(PublishedFlags)}
    flags = {action.dest for action in actions} - {"help", "config", "use_wandb", "local_rank"} - of_run_py
    read = {flag for flag in flags if re.search(rf"\b(settings|reading)\.{flag}\b", text)}
    # Those that are fields of the model's config are read by a loop over them.
    by_name = set(MODEL_FLAGS) if "MODEL_FLAGS" in text else set()
    by_name |= set(NETWORK_SIZES) if "settings.network_sizes()" in text else set()
    by_name |= set(CORPUS_FLAGS) if re.search(r"corpus\.of\b", text, re.IGNORECASE) else set()
    assert set(CORPUS_FLAGS) <= flags or kind is not PretrainSettings
    assert flags - read - by_name == set()
    assert all(action.help for action in actions)


@pytest.mark.slow
def test_importing_the_trainer_has_no_side_effect(tmp_path):
    """In a process of its own: no process group, no signal handler, no file, no seed, no output."""
    probe = """
import os, random, signal, torch
def state():
    handlers = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    return torch.distributed.is_initialized(), handlers, os.listdir("."), torch.get_rng_state().tolist(), random.getstate()
before = state()
from trainer.train_pretrain import get_lr, init_distributed_mode, init_model, main, train_epoch
assert state() == before
"""
    path = {"PYTHONPATH": str(ROOT), "PATH": "", "OMP_NUM_THREADS": "1", "HOME": str(tmp_path)}
    ended = subprocess.run([sys.executable, "-c", probe], cwd=tmp_path, env=path, capture_output=True, text=True)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")
