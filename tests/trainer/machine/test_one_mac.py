"""A start on a Mac with an Apple GPU, by all trainers, from the flags to the last update. No Mac is needed: see
simulated_mps.py. Reference: the same run on the CPU."""

import pytest
import torch

from common.errors import UserError
from tests.chats import train as train_chats
from tests.chats import write_chats
from tests.dataset.electra.test_electra_dataset import write_lines
from tests.helpers import losses, train, write_corpus
from tests.trainer.glue.glue_helpers import fine_tune, make_place
from tests.trainer.machine.simulated_mps import simulated_mps
from tests.trainer.test_train_electra import train as train_electra
from tests.trainer.test_train_electra import write_vocab
from trainer.machine import ranks as ranks_module


def test_the_simulated_device_has_no_float64():
    with simulated_mps(), pytest.raises(TypeError, match="float64"):
        torch.zeros(3, device="mps", dtype=torch.float64)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_pretraining_starts_ends_and_goes_on_there(tmp_path, dtype):
    data = write_corpus(tmp_path / "corpus.jsonl", 20)
    options = {"data_path": data, "dtype": dtype, "val_fraction": 0.2, "use_moe": 1}
    with simulated_mps() as mode:
        run = train(**options, out_dir=tmp_path / "mac", device=None)
        losses_there = losses(run)
        again = train(**options, out_dir=tmp_path / "mac", device=None, epochs=2, from_resume=1)
    assert run.engine.device.type == "mps" and mode.asked > 0
    assert again.progress.epoch == 2
    if dtype == "float32":
        on_cpu = train(**options, out_dir=tmp_path / "cpu", device="cpu")
        # Sums for the log are in float32 there.
        assert losses_there == pytest.approx(losses(on_cpu), rel=1e-5)


def test_muon_and_samples_work_there(tmp_path):
    data = write_corpus(tmp_path / "corpus.jsonl", 20)
    with simulated_mps():
        run = train(
            data_path=data,
            out_dir=tmp_path,
            device="mps",
            optimizer="muon",
            sample_prompts="the cat",
            use_compile="auto",
        )
    assert run.progress.update > 0


def test_chats_start_and_end_there(tmp_path):
    options = {"data_path": write_chats(tmp_path / "chats.jsonl", 12), "dtype": "float32", "epochs": 1}
    with simulated_mps():
        run = train_chats(**options, out_dir=tmp_path / "mac", device=None, sample_prompts="the cat?")
    assert run.engine.device.type == "mps"
    on_cpu = train_chats(**options, out_dir=tmp_path / "cpu", device="cpu")
    assert losses(run) == pytest.approx(losses(on_cpu), rel=1e-5)


def test_electra_starts_and_ends_there(tmp_path):
    data, vocabulary = write_lines(tmp_path / "data.jsonl")[0], write_vocab(tmp_path / "vocab.txt")
    with simulated_mps():
        run = train_electra(data_path=data, vocab_path=vocabulary, out_dir=tmp_path / "out", device=None, max_steps=2)
    assert run.engine.device.type == "mps" and run.progress.update == 2


def test_fine_tuning_starts_and_ends_there(tmp_path):
    place = make_place(tmp_path / "glue")
    with simulated_mps() as mode:
        fine_tune(place, tmp_path / "mac", device="mps", epochs=1)
    assert mode.asked > 0


def test_several_ranks_are_refused_in_a_line(monkeypatch):
    place = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    for name, value in place.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(ranks_module, "end_with_launcher", lambda: None)
    with simulated_mps(), pytest.raises(UserError, match="data parallel does not work on mps"):
        ranks_module.init_distributed_mode()
