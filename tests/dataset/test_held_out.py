"""dataset/held_out.py, beside what tests/dataset/test_leaks_at_start.py says of it. Reference: sets of texts."""

from types import SimpleNamespace

import numpy as np

from dataset.held_out import are_shared


def test_shared_documents_are_those_with_the_same_hash():
    generator = np.random.default_rng(0)
    training = generator.integers(0, 200, 500).astype(np.uint64)
    validation = generator.integers(0, 400, 90).astype(np.uint64)

    class Store(SimpleNamespace):
        def __len__(self):
            return len(self.doc_hash)

    found = are_shared(Store(doc_hash=training), Store(doc_hash=validation))
    known = set(training.tolist())
    assert found.tolist() == [value in known for value in validation.tolist()]
    assert 0 < found.sum() < 90
