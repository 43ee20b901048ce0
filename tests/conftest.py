"""Fixtures of several test files, and their order."""

from collections import Counter

import pytest

from tests.helpers import write_corpus
from tests.older_transformers import install


def pytest_collection_modifyitems(items):
    """Files with many slow tests come first: a long one that begins last would leave the other processes of `make test-all` idle."""
    slow = Counter(item.path for item in items if item.get_closest_marker("slow"))
    # The tests of a file stay together, since files with as many keep their order.
    items.sort(key=lambda item: -slow[item.path])


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    """A small corpus, with its token store beside it once a run has used it."""
    return write_corpus(tmp_path_factory.mktemp("data") / "data.jsonl")


@pytest.fixture(scope="session")
def older_transformers(tmp_path_factory):
    """A function: version -> the folder that holds it, for PYTHONPATH. Each is installed once in a session."""
    folders = {}

    def folder_of(version):
        if version not in folders:
            folders[version] = tmp_path_factory.mktemp(f"transformers-{version}")
            install(version, folders[version])
        # Where pip failed the first time, it is not asked again.
        if not any(folders[version].iterdir()):
            pytest.skip(f"transformers {version} could not be installed")
        return folders[version]

    return folder_of
