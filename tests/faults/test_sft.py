"""Kill -9 of a fine-tuning, which goes on as pretraining does; the reference is a run that nobody disturbed."""

import pytest

from tests.chats import write_chats
from tests.faults.harness import Lab, seeded_random
from tests.faults.test_kill import kill_often


class SftLab(Lab):
    """Runs of train_sft.py. Its tokenizer has a token for each byte, so rows are long."""

    trainer = "train_sft"
    prefix = "full_sft"

    def __init__(self, folder, server, tokenizer, corpus):
        super().__init__(folder, server, tokenizer, corpus, from_weight="none", max_seq_len=96, learning_rate=1e-3)


@pytest.fixture
def labs(lab):
    """(a Lab for runs that are killed, the Lab of one that is not)"""
    chats = write_chats(lab.folder / "chats.jsonl", 60, most_words=3)
    folders = [lab.folder / name for name in ("killed", "undisturbed")]
    for folder in folders:
        folder.mkdir()
    killed, whole = (SftLab(folder, lab.server, lab.tokenizer, chats) for folder in folders)
    whole.run("whole")
    return killed, whole


def test_a_fine_tuning_that_is_killed_ends_as_one_that_is_not(labs):
    kill_often(*labs, 4, 1, seeded_random("kills of a fine-tuning"))
