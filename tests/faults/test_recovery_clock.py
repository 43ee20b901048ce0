"""The clock of the faults over two nodes. Reference: a ledger that is written here."""

import json
from types import SimpleNamespace

from tests.faults.two_nodes import Job


def test_an_update_that_was_under_way_at_the_fault_is_no_recovery(tmp_path):
    job = Job(SimpleNamespace(folder=tmp_path), [], "run")
    # (when the process began, when the update was done): the fault strikes at 20.0
    lines = [(1.0, 19.9), (1.0, 20.1), (24.0, 30.5), (24.0, 30.7)]
    with open(f"{job.ledger}.0", "w") as file:
        for number, (began, done) in enumerate(lines):
            file.write(json.dumps({"update": number, "time": done, "began": began}) + "\n")
    assert job.goes_on_after(20.0) == 10.5
    # Where no process ends, the next update counts.
    assert round(job.goes_on_after(20.0, anew=False), 6) == 0.1
    assert [number for _, number in job.updates()] == [0, 1, 2, 3]
