"""`from trainer import train`: a run called from Python. Reference: the weights of the command with the same flags, bit for bit."""

import os
import random
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from common import processes
from common.errors import UserError
from tests.chats import write_chats
from tests.helpers import SMALL, command_line, flags, records, run_program
from trainer import train, train_sft, train_tokenizer
from trainer.machine.devices import SWITCHES, switches_kept

RUN = {**SMALL, "epochs": 2, "dropout": 0.1, "val_fraction": 0.2, "sample_prompts": ["the", "a"]}


@pytest.fixture(scope="module")
def weights(data, tmp_path_factory):
    out = tmp_path_factory.mktemp("command")
    ended = command_line(flags(**RUN, data_path=data, out_dir=out))
    assert ended.returncode == 0, ended.stderr
    return (out / "pretrain_16.pth").read_bytes()


def state_of_process():
    return [str(get()) for get, _, _ in SWITCHES], signal.getsignal(signal.SIGINT), dist.is_initialized()


def set_switches():
    """To what changes bits, or ends a run in torch's traceback."""
    torch.set_float32_matmul_precision("medium")
    torch.set_default_device("meta")
    torch.set_grad_enabled(False)
    torch.use_deterministic_algorithms(True)
    torch.set_flush_denormal(False)
    torch.backends.mkldnn.enabled = False
    torch.backends.cuda.enable_math_sdp(False)
    torch.manual_seed(random.getrandbits(9))


def test_calls_have_the_bits_of_the_command(data, weights, tmp_path, monkeypatch):
    """Whatever switches of torch are set, also by on_log. The second in a thread, in a process group of the program, as of Ray Train.
    Budgets start at the call; nothing is left."""
    for variable in ("RANK=0", "LOCAL_RANK=0", "WORLD_SIZE=1", "MASTER_ADDR=localhost", "MASTER_PORT=1"):
        monkeypatch.setenv(*variable.split("="))
    monkeypatch.setattr(processes, "_start_time", time.monotonic() - 3600)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    torch.set_default_dtype(torch.float64)
    lines, results = {"a": [], "b": []}, {}

    def call(name):
        options = {**RUN, "data_path": Path(data), "out_dir": tmp_path / name, "report": True}

        def on_log(line):
            lines[name].append(line)
            set_switches()

        with torch.autocast("cpu", torch.bfloat16, enabled=name == "b"), torch.inference_mode(name == "b"):
            results[name] = train(**options, on_log=on_log), processes.seconds_since_start()

    try:
        with switches_kept():
            set_switches()
            before = state_of_process()
            call("a")
            assert state_of_process() == before
        before = state_of_process()
        thread = threading.Thread(target=call, args="b")
        thread.start()
        thread.join()
        assert state_of_process() == before
    finally:
        torch.set_default_dtype(torch.float32)
        dist.destroy_process_group()
    assert len(results) == 2
    for name, (result, seconds) in results.items():
        assert result.weights == tmp_path / name / "pretrain_16.pth" and result.weights.read_bytes() == weights
        assert result.reason == "finished" and result.report.is_file() and seconds < 600
        recorded = records(result.weights.with_suffix(".metrics.jsonl"), None)
        assert lines[name] == recorded
        last = {name: value for record in recorded for name, value in record.items()}
        assert (result.training_loss, result.val_loss) == (last["loss"], last["val_loss"])
        assert [prompt for prompt, _ in result.samples] == ["the", "a"]
        assert "train_pretrain.py --hidden_size=16 --num_hidden_layers=1 " in recorded[0]["command"]


def test_an_event_stops_a_run_which_a_resume_finishes(data, weights, tmp_path, capsys, monkeypatch):
    """Meanwhile the program goes to another folder, which stays empty; the settings file has the paths as they were given."""
    stop, elsewhere = threading.Event(), tmp_path / "elsewhere"
    elsewhere.mkdir()

    def on_log(line):
        os.chdir(elsewhere)
        if line["update"] == 3:
            stop.set()

    def call(**more):
        monkeypatch.chdir(tmp_path)
        return train(**RUN, data_path=os.path.relpath(data), out_dir="out", on_log=on_log, **more)

    stopped = call(stop=stop)
    assert (stopped.reason, stopped.report) == ("stopped", None) and stopped.training_loss > 0
    assert "stopped by its caller after update 4; everything is saved" in capsys.readouterr().out
    assert call(from_resume=True).reason == "finished"
    assert " was " not in capsys.readouterr().out
    assert stopped.weights == tmp_path / "out" / "pretrain_16.pth" and stopped.weights.read_bytes() == weights
    assert "out_dir: out\n" in stopped.weights.with_suffix(".settings.yaml").read_text()
    assert not [*elsewhere.iterdir()]


def test_fine_tuning_and_a_tokenizer_by_the_names_of_their_modules(data, tmp_path):
    folder = train_tokenizer(data_path=[data], vocab_size=300, out_dir=tmp_path / "tokenizer")
    assert (folder / "tokenizer.json").is_file()
    options = {**SMALL, "max_seq_len": 64, "max_updates": 1, "out_dir": tmp_path}
    base = train(**options, data_path=data)
    tuned = train_sft(**options, data_path=write_chats(tmp_path / "chats.jsonl"), from_weight=base.weights)
    assert tuned.weights == tmp_path / "full_sft_16.pth" and tuned.weights.is_file() and tuned.val_loss is None


def test_what_a_user_can_fix_is_a_user_error(data, tmp_path):
    for wrong, said in (
        ({"learing_rate": 1e-3}, r"unrecognized arguments: --learing_rate=0.001; did you mean --learning_rate\?$"),
        ({"batch_size": -1}, "argument --batch_size: -1 must be a number above 0"),
        ({"data_path": {}}, "data_path: expected a text, a number"),
        ({"config": "no.yaml"}, "argument --config: no.yaml cannot be read"),
        ({"data_path": "no.jsonl"}, "no.jsonl"),
        ({"on_log": lambda line: train()}, "another run is going on in this process"),
    ):
        with pytest.raises(UserError, match=said):
            train(**{**SMALL, "data_path": data, "out_dir": tmp_path, **wrong})


def test_a_notebook_shows_it_in_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    shell = pytest.importorskip("IPython.core.interactiveshell").InteractiveShell()
    shell.run_cell("from trainer import train\ntrain(budget='20s', budget_tokens='200k')")
    printed = capsys.readouterr()
    assert (printed.out + printed.err).strip() == "error: --budget and --budget_tokens exclude each other: drop one"


def test_an_import_brings_next_to_nothing():
    """And a wrong flag nothing of torch."""
    program = "import sys; old = set(sys.modules); from trainer import train; print(len(sys.modules.keys() - old))\n"
    program += "try: train(nonsense=1)\nexcept ValueError: print({'torch', 'numpy'} & sys.modules.keys())"
    ended = run_program(program)
    imported, heavy = ended.stdout.splitlines()
    assert int(imported) == 2 and heavy == "set()", ended.stderr


@pytest.mark.parametrize("first", [True, False])
def test_ctrl_c_before_a_run_starts_ends_a_call_and_the_next_one_works(first, data, tmp_path):
    """In the middle of torch's import, and in the collector of garbage. What the program has frozen stays so."""
    program = f"""if True:
        import builtins, gc, signal, sys
        from trainer import train
        # Tests in the background ignore it.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        options = dict(data_path={str(data)!r}, out_dir={str(tmp_path)!r}, save_weight="--", **{SMALL!r})
        class Cycle:
            def __init__(self): self.me = self
            def __del__(self): signal.raise_signal(signal.SIGINT)
        importing = builtins.__import__
        def interrupted(name, *given):
            if name == "torch._ops" or "torch.nn" in sys.modules and builtins.__import__ is interrupted:
                builtins.__import__ = importing
                signal.raise_signal(signal.SIGINT)
            return importing(name, *given)
        if {first}:
            builtins.__import__ = interrupted
        else:
            train(**options, max_updates=1)
            gc.collect(); gc.disable(); Cycle()
        gc.freeze() if {first} else None
        try:
            train(**options, max_updates=2)
        except KeyboardInterrupt:
            print(train(**options, max_updates=2).reason, gc.get_freeze_count() > 0)
    """
    ended = run_program(program)
    assert ended.stdout.splitlines()[-1:] == [f"finished {first}"], ended.stderr
    assert (tmp_path / "--_16.pth").is_file()
