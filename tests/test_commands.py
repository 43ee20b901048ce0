"""What newcomers read holds: command lines by the parsers of their scripts (tests/scripts/test_export.py runs some), links; and how
`make` sets up an environment: what it hands to a Python that only writes down its arguments."""

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from common.settings import SettingsParser
from dataset import embedded_corpus
from encoders.electra.settings import ElectraSettings
from encoders.glue.settings import GlueSettings
from scripts import arguments as script_arguments
from scripts import parsers
from tests.helpers import ROOT, command_line, run_program, write_weights
from trainer import train_tokenizer
from trainer.pretrain.settings import PretrainSettings
from trainer.sft.settings import SftSettings

DOCUMENTS = [*sorted(ROOT.glob("*.md")), *sorted(ROOT.glob("docs/*.md")), ROOT / "dataset" / "README.md"]
PARSERS = {
    "trainer/train_pretrain.py": partial(SettingsParser, PretrainSettings),
    "trainer/train_sft.py": partial(SettingsParser, SftSettings),
    "trainer/train_electra.py": partial(SettingsParser, ElectraSettings),
    "trainer/train_glue.py": partial(SettingsParser, GlueSettings),
    "trainer/train_tokenizer.py": partial(SettingsParser, train_tokenizer.TokenizerSettings),
    **{f"scripts/{name}.py": parser for name, parser in parsers.PARSERS.items()},
}
READMES = ("README.md", "README_zh.md")
# Makes an "environment" of itself, and fails where it is asked for an index.
PYTHON = """#!/bin/sh
echo "$@" >> "$LOG"
case "$*" in
  *"-m venv "*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
  *--index-url*) exit 1 ;;
  *version_info*) exec "$REAL" "$@" ;;
esac
"""
CPU_INDEX = "https://download.pytorch.org/whl/cpu"


def commands():
    """(document, words) of each line of a code block that starts a script of ours, with the block's variables put in."""
    for path in DOCUMENTS:
        text = path.read_text(encoding="utf-8")
        for block, indented in re.findall(r"(?sm)^```\w*\n(.*?)^```|^((?:    .*\n)+)", text):
            variables = {}
            for line in (block or indented).replace("\\\n", " ").splitlines():
                line = re.sub(r"\$([A-Z]+)\b", lambda name: variables.get(name[1], name[0]), line)  # noqa: B023 - is called at once
                if set_here := re.fullmatch(r'([A-Z]+)="?([^"]*)"?', line):
                    variables[set_here[1]] = set_here[2]
                if re.match(r"\s*(chrt -r 1 )?(python|torchrun)\b", line) and ".py" in line and "llama.cpp" not in line:
                    yield path.name, shlex.split(line, comments=True)


@pytest.mark.parametrize("document, words", list(commands()), ids=lambda value: "".join(value)[:60])
def test_a_command_of_the_documents(document, words):
    at = next(i for i, word in enumerate(words) if word.endswith(".py"))
    script, arguments = words[at], [word for word in words[at + 1 :] if word != "..."]
    source = (ROOT / script).read_text(encoding="utf-8")
    if script in PARSERS:
        PARSERS[script]().parse_args(arguments)
    else:
        missing = [word for word in arguments if word.startswith("--") and f'"{word}"' not in source]
        assert not missing, f"{script} has no {missing}"


def test_make_targets_of_the_readme_exist():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for path in DOCUMENTS:
        for target in re.findall(r"^make (\w[\w-]*)|`make (\w[\w-]*)`", path.read_text(encoding="utf-8"), re.MULTILINE):
            assert re.search(rf"^{''.join(target)}:", makefile, re.MULTILINE), target


def lines_of_make(*words):
    command = ["make", "-n", "-C", str(ROOT), *words]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()


def settings_of_make(*words):
    (words,) = [shlex.split(line) for line in lines_of_make(*words) if "trainer/train_" in line]
    return PretrainSettings.parse(words[2:])


def test_make_pretrain_is_a_plan_and_make_reference_is_none():
    """The plan has everything to choose but the text and the prompts of the samples."""
    plan, reference = settings_of_make("pretrain", "ARGS=--seed 7"), settings_of_make("reference")
    assert plan.user_set == {"budget", "data_path", "sample_prompts", "seed"}
    assert [plan.budget, settings_of_make("pretrain", "BUDGET=2h").budget] == ["10m", "2h"]
    assert not reference.has_budget and reference.optimizer == "muon" and reference.save_weight == "reference"
    # Named, so that no other file in dataset/ is trained in its place.
    assert plan.data_path == reference.data_path == ["dataset/python_docs.jsonl"]


@pytest.mark.parametrize("target", ["pretrain", "chat"])
def test_make_builds_the_text_that_it_trains(target, tmp_path, monkeypatch):
    """The lines of Python by which it does so, run in another folder, with little text."""
    monkeypatch.setattr(embedded_corpus, "documents", lambda: iter(["a text"]))
    monkeypatch.setattr(embedded_corpus, "answers", lambda: {"what": "that."})
    monkeypatch.chdir(tmp_path)
    # As if none of it were there.
    lines = lines_of_make("--always-make", target)
    programs = [shlex.split(line)[2] for line in lines if '-c "from dataset' in line]
    for program in programs:
        exec(program)  # noqa: S102 - the Makefile's own
    built = sorted(str(path) for path in Path("dataset").glob("*.jsonl"))
    trained = [shlex.split(line) for line in lines if "trainer/train_" in line]
    assert built == sorted({words[words.index("--data_path") + 1] for words in trained})


def test_the_commands_of_make_chat():
    """Each goes on from what the one before has left."""
    pretrain, sft, evaluate = (shlex.split(line) for line in lines_of_make("chat") if ".py " in line)
    base = PretrainSettings.parse(pretrain[pretrain.index("trainer/train_pretrain.py") + 1 :])
    settings = SftSettings.parse(sft[2:])
    assert settings.weight() == Path(f"{base.stem(settings.hidden_size, False)}.pth")
    asked = script_arguments.evaluate_parser().parse_args(evaluate[2:])
    assert asked.weight == f"out/full_sft_{settings.hidden_size}.pth"
    assert (asked.task, asked.questions, asked.data_path) == ("answers", None, None)
    assert base.data_path == ["dataset/python_docs.jsonl"] and settings.data_path == ["dataset/python_questions.jsonl"]
    # What make pretrain has left may be half-trained.
    assert base.save_weight != PretrainSettings.parse([]).save_weight
    assert base.from_resume and settings.from_resume


def run_with_stand_ins(folder, names, code, script, *flags):
    """Run a script where this code is the packages of these names, which take seconds to import."""
    for name in names:
        (folder / f"{name}.py").write_text(code, encoding="utf-8")
    return command_line(flags, script=ROOT / script, PYTHONPATH=str(folder))


@pytest.mark.parametrize("script", PARSERS)
def test_help_and_wrong_flags_are_answered_without_importing_torch(script, tmp_path):
    # All parsers are of one class.
    flag = "--no_such_flag" if script == "trainer/train_pretrain.py" else "--help"
    ended = run_with_stand_ins(tmp_path, ("torch", "transformers"), "raise SystemExit('imported')\n", script, flag)
    if flag == "--help":
        assert ended.returncode == 0 and ended.stdout.startswith("usage: "), ended.stderr
    else:
        assert ended.returncode == 2 and re.match(r"error: .*\(--help lists the flags\)", ended.stderr), ended.stderr


@pytest.mark.parametrize("script", ["trainer/train_pretrain.py", "scripts/play.py"])
def test_ctrl_c_during_the_imports_prints_nothing(script, tmp_path):
    pressed = "import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(9)\n"
    ended = run_with_stand_ins(tmp_path, ("torch", "transformers", "tokenizers"), pressed, script)
    assert ended.returncode == -signal.SIGINT
    assert ended.stderr == ""


def test_closed_streams_are_opened(tmp_path):
    """After 2>&- a file of the run would get the stream's number, and what libraries print there."""
    script = "from common.start import guard_imports\nguard_imports()\nimport sys\n"
    script += f"file = open({str(tmp_path / 'numbers')!r}, 'w')\n"
    script += "file.write(f'{file.fileno()} {sys.stderr.fileno()} {sys.stdin.read()}')\n"
    closed = partial(os.closerange, 0, 3)
    assert subprocess.run([sys.executable, "-c", script], cwd=ROOT, preexec_fn=closed, timeout=60).returncode == 0
    assert (tmp_path / "numbers").read_text() == "3 2 "


def test_a_script_that_is_terminated_leaves_nothing_half_written(tmp_path):
    """While it writes: exit code 143 as from the trainers, no traceback, no temporary."""
    script = "import os, signal\nfrom common.files import atomic_file, atomic_folder\nfrom pathlib import Path\n"
    script += "from trainer.machine.command_line import run_cli\n"
    script += "def main():\n with atomic_file('file') as file, atomic_folder(Path('folder'), Path('half')) as folder:\n"
    script += "  folder.mkdir()\n  os.kill(os.getpid(), signal.SIGTERM)\nrun_cli(main)\n"
    ended = run_program(script, cwd=tmp_path, PYTHONPATH=str(ROOT))
    assert (ended.returncode, ended.stdout, ended.stderr) == (128 + signal.SIGTERM, "", "")
    assert list(tmp_path.iterdir()) == []


def test_the_command_for_a_python_without_the_packages(tmp_path):
    """-S: a Python that sees the standard library alone. Beside an environment of `make` its activation, otherwise pip's command."""
    (tmp_path / "common").mkdir()
    shutil.copy(ROOT / "common" / "start.py", tmp_path / "common")
    program = "from common.start import guard_imports\nguard_imports()\nimport torch\n"
    (tmp_path / "run.py").write_text(program, encoding="utf-8")

    def command_from(folder):
        ended = subprocess.run([sys.executable, "-S", tmp_path / "run.py"], cwd=folder, capture_output=True, text=True)
        return ended.stderr.partition("first: ")[2]

    assert command_from(tmp_path) == "pip install -r requirements.txt\n"
    (tmp_path / ".venv").mkdir()
    assert command_from(tmp_path) == ". .venv/bin/activate\n"
    assert command_from(ROOT) == f". {tmp_path}/.venv/bin/activate\n"


@pytest.fixture
def set_up(tmp_path, monkeypatch):
    """What is printed, and the lines of pip, where `make` sets up an environment."""
    python = tmp_path / "python"
    python.write_text(PYTHON)
    python.chmod(0o755)
    monkeypatch.setenv("LOG", str(tmp_path / "log"))
    monkeypatch.setenv("REAL", "python3")

    def run(*variables, has_gpu=False):
        (tmp_path / "bin").mkdir()
        if has_gpu:
            (tmp_path / "bin" / "nvidia-smi").symlink_to("/bin/true")
        path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
        environment = tmp_path / "env"
        command = ["make", "--no-print-directory", f"PYTHON={python}", f"VENV={environment}", *variables]
        command.append(f"{environment}/.installed")
        ended = subprocess.run(command, cwd=ROOT, env={**os.environ, "PATH": path}, capture_output=True, text=True)
        asked = [line for line in (tmp_path / "log").read_text().splitlines() if "pip install" in line]
        return ended, asked

    return run


@pytest.mark.skipif(shutil.which("nvidia-smi") is not None, reason="this machine has an NVIDIA GPU")
def test_without_a_gpu_torch_comes_from_the_index_of_its_cpu_builds(set_up):
    """... and where that cannot be reached, from pip's own, with a line."""
    ended, (first, second) = set_up()
    assert ended.returncode == 0
    assert f"--index-url {CPU_INDEX} torch==2.13.0" in first
    assert second.endswith("-r requirements.txt") and "index-url" not in second
    # A line before each step, since pip is silent, and one for the index
    assert [line[:2] for line in ended.stdout.splitlines()] == ["1.", "2.", "Py", "3."]
    assert "PyTorch for the CPU" in ended.stdout and "0.4 GB" in ended.stdout
    assert f"PyTorch comes from pip's own index: {CPU_INDEX}" in ended.stdout


@pytest.mark.parametrize("variables, has_index", [([], False), (["TORCH=cpu"], True)])
def test_with_a_gpu_torch_comes_with_the_others_unless_its_cpu_build_is_asked_for(set_up, variables, has_index):
    ended, asked = set_up(*variables, has_gpu=True)
    assert (CPU_INDEX in asked[0], "PyTorch for NVIDIA GPUs" not in ended.stdout) == (has_index, has_index)
    assert asked[-1].endswith("-r requirements.txt")


def test_an_old_python_is_named_before_anything_is_made(set_up, tmp_path, monkeypatch):
    old = tmp_path / "old"
    python = f"{os.path.realpath('/usr/bin/env')} python3"
    old.write_text(f'#!/bin/sh\n{python} -c "import sys; sys.version_info = (3, 10); $2"\n')
    old.chmod(0o755)
    monkeypatch.setenv("REAL", str(old))
    ended, asked = set_up()
    assert ended.returncode != 0
    assert "error: Python 3.11 or newer is needed" in ended.stderr
    assert not asked and not (tmp_path / "env").exists()


def text_of(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


@pytest.mark.slow
def test_the_snippet_runs_from_another_folder(tmp_path):
    """With the repository's full path in it, as its comment says, and weights of a tiny model."""
    (snippet,) = re.findall(r"```python\n(.*?)```", text_of("docs/pretraining.md"), re.DOTALL)
    weight = write_weights(tmp_path / "pretrain_512", vocab_size=6400)
    snippet = snippet.replace('repository = "."', f"repository = {str(ROOT)!r}")
    snippet = snippet.replace('f"{repository}/out/pretrain_512.pth"', repr(weight))
    ended = run_program(snippet, cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.startswith("<|im_start|>Return the")


def test_the_readmes_name_the_versions_that_are_installed():
    requirements = dict(re.findall(r"^([\w-]+)==([\d.]+)", text_of("requirements.txt"), re.MULTILINE))
    for name in READMES:
        for package in ("torch", "transformers"):
            assert f"{package} {requirements[package]}" in text_of(name)


def test_both_readmes_have_the_same_commands_and_tables():
    english, chinese = map(text_of, READMES)
    for pattern in (r"^(?:python|torchrun|make|pip|hf) [^#\n]*", r"^## ", r"^\|"):
        found = [[line.strip() for line in re.findall(pattern, text, re.MULTILINE)] for text in (english, chinese)]
        assert found[0] == found[1], pattern


def test_what_the_pages_name_exists():
    """Links and their headings (GitHub's anchors: lower case, blanks as hyphens, without other signs), and files of ours."""
    for page in DOCUMENTS:
        text = page.read_text(encoding="utf-8")
        folders = "model|dataset|trainer|scripts|launch|tests|docs"
        for file in re.findall(rf"`((?:{folders})/[\w/]+\.(?:py|sh|md|yaml|sbatch))`", text):
            assert (ROOT / file).is_file(), f"{page.name}: {file}"
        for link, anchor in re.findall(r"\]\(([^):#\s]*)(?:#([^)\s]*))?\)", text):
            target = page.parent / link if link else page
            assert target.exists(), f"{page.name}: {link}"
            if anchor:
                titles = re.findall(r"^#+ (.*)", target.read_text(encoding="utf-8"), re.MULTILINE)
                anchors = [re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles]
                assert anchor in anchors, f"{page.name}: {link}#{anchor}"
