import os
import shutil
import sys
import tempfile
from pathlib import Path

import pytest

from tests.faults.harness import ForkServer, Lab, make_corpus, make_tokenizer


def pytest_collection_modifyitems(items):
    if not hasattr(sys, "getwindowsversion"):
        return
    for item in items:  # fork, kill and resource limits are POSIX
        if "faults" in item.nodeid:
            item.add_marker(pytest.mark.skip(reason="needs a POSIX system"))


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


@pytest.fixture
def lab(scratch, server, tokenizer, corpus):
    folder = Path(tempfile.mkdtemp(dir=scratch))
    yield Lab(folder, server, tokenizer, corpus)
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def whole(scratch, server, tokenizer, corpus):
    """A run that nothing disturbed, for comparison: its Lab; the run is called "whole"."""
    folder = scratch / "whole"
    folder.mkdir()
    lab = Lab(folder, server, tokenizer, corpus)
    lab.run("whole", hooks={"ledger": {"path": str(folder / "ledger")}})
    return lab
