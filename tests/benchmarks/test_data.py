"""The synthetic corpus that benchmarks/data.py plans. Reference: its offsets."""

import numpy as np

from benchmarks import data
from dataset import grouped_plan
from dataset.grouped_plan import Groups


def test_synthetic_shards_are_planned_in_groups_as_their_documents_would_be(monkeypatch):
    monkeypatch.setattr(data, "SHARD_DOCUMENTS", 500)
    monkeypatch.setattr(grouped_plan, "GROUP_PIECES", 4000)
    store = data.ManyShards(10_000)
    groups = Groups(store, 512, 42)
    assert groups.n_groups > 3
    lengths = np.diff(store.offsets[0:10_001])
    assert sum(size.pairs for size in groups.sizes()) == (lengths - 1).sum()
    for group, size in enumerate(groups.sizes()):
        plan = groups.plan_of_group(group, 0)
        assert plan.totals(0, plan.n_rows) == size.totals
    documents = np.concatenate([groups.documents_of_group(group) for group in range(groups.n_groups)])
    assert np.array_equal(np.sort(documents), np.arange(10_000))
