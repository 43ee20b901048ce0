"""Fixtures of several files of this folder."""

import pytest

from dataset.store import builder, dealing


@pytest.fixture
def small_shards(monkeypatch, tmp_path):
    """Blocks of 1 kB and shards of 4 kB: a corpus of 400 short texts has about eight. The user's cache folder is an empty one."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setattr(builder, "BLOCK_BYTES", 1000)
    monkeypatch.setattr(dealing, "SHARD_BYTES", 4000)
