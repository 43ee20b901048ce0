import os
import shutil
import sys
import tempfile
from pathlib import Path

import pytest

from tests.faults.harness import ForkServer, Lab, make_corpus, make_tokenizer

# Fork, kill and resource limits are POSIX.
collect_ignore_glob = ["test_*"] if hasattr(sys, "getwindowsversion") else []


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory):
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="session")
def server(tokenizer):
    server = ForkServer(tokenizer)
    yield server
    server.close()


@pytest.fixture(scope="session")
def scratch():
    """A folder in memory where there is one: every save waits for fsync, and that is not what is tested."""
    folder = tempfile.mkdtemp(prefix="faults-", dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None)
    yield Path(folder)
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def corpus(scratch):
    (scratch / "corpus").mkdir()
    return make_corpus(scratch / "corpus" / "corpus.jsonl")


@pytest.fixture(scope="session")
def new_lab(scratch, server, tokenizer, corpus):
    """new_lab(**settings): a Lab in a folder of its own."""
    return lambda **settings: Lab(tempfile.mkdtemp(dir=scratch), server, tokenizer, corpus, **settings)


@pytest.fixture
def lab(new_lab):
    lab = new_lab()
    yield lab
    shutil.rmtree(lab.folder, ignore_errors=True)


@pytest.fixture(scope="session")
def whole(new_lab):
    """A run that nothing disturbed, for comparison: its Lab; the run is called "whole"."""
    lab = new_lab()
    lab.run("whole", hooks={"ledger": {"path": str(lab.folder / "ledger")}})
    return lab
