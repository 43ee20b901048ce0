"""The trainers where packages are missing that only some users need. Reference: a Python that does not find them."""

import importlib.metadata
import re

import pytest

from tests.all_trainers import run_program, write_inputs
from tests.helpers import ROOT, flags
from tests.trainer.glue.glue_helpers import arguments
from tests.trainer.test_train_electra import flags as electra_flags

# Runs {trainer: arguments of its main}, one after the other, in a process where the packages are not found: torch and
# transformers too look for packages that they can do without.
PROGRAM = """
import importlib, json, sys
from importlib.machinery import PathFinder

missing, commands = json.loads(sys.argv[1])
found = PathFinder.find_spec

def find_spec(name, path=None, target=None):
    return None if name.partition(".")[0] in missing else found(name, path, target)

PathFinder.find_spec = find_spec
for trainer, arguments in commands.items():
    code = importlib.import_module("trainer." + trainer).main(arguments)
    print("ended", trainer, code)
"""
MISSING = [
    "wandb",
    "zstandard",
    "pyarrow",
    "tiktoken",
    "rensa",
    "matplotlib",
    "sklearn",
    "scipy",
    "gguf",
    "pandas",
    "fsspec",
    "s3fs",
    "aiohttp",
]


def name_of(requirement: str) -> str:
    """'Jinja2>=3; extra == "x"' -> 'jinja2'"""
    return re.match(r"[\w.-]+", requirement)[0].lower().replace("_", "-")


def test_what_is_not_tried_without_comes_with_torch_and_transformers():
    """`make gpu` runs in images that have these two alone. Reference: what they ask pip for."""
    come_with_them = set()
    to_look_at = {"torch", "transformers"}
    while to_look_at:
        package = to_look_at.pop()
        come_with_them.add(package)
        try:
            wanted = importlib.metadata.requires(package) or []
        except importlib.metadata.PackageNotFoundError:
            # For another system or Python
            continue
        to_look_at |= {name_of(one) for one in wanted if "extra ==" not in one} - come_with_them
    lines = (ROOT / "requirements.txt").read_text(encoding="utf-8").splitlines()
    ours = {name_of(line) for line in lines if re.match(r"\w", line)}
    tried = {{"sklearn": "scikit-learn"}.get(module, module) for module in MISSING}
    assert "torch" in ours and ours <= come_with_them | tried


@pytest.mark.slow
def test_the_trainers_train_without_packages_that_only_some_need(tmp_path):
    data, chats, electra, place = write_inputs(tmp_path)
    commands = {
        "train_pretrain": flags(data_path=data, out_dir=tmp_path / "out", report=1, val_fraction=0.2),
        "train_sft": flags(**chats),
        "train_electra": electra_flags(**electra, max_steps=3),
        "train_glue": arguments(place, tmp_path / "glue", epochs=1, do_eval=0, do_predict=1),
    }
    ended = run_program(PROGRAM, [MISSING, commands])
    assert ended.returncode == 0, ended.stderr
    for trainer in commands:
        assert f"ended {trainer} 0" in ended.stdout
    assert "no report was written: pip install matplotlib, then python scripts/report.py" in ended.stdout
    assert (tmp_path / "out" / "pretrain_16.pth").is_file()
