"""benchmarks/bench.py: its documents, the turns of its sides, and what it leaves."""

import json
import subprocess
import sys

import pytest

from tests.helpers import ROOT


@pytest.mark.slow
def test_all_sides_run_side_by_side(tmp_path):
    """The whole benchmark on the smallest size: each side trains, and the JSON holds every figure."""
    pytest.importorskip("accelerate")
    out = tmp_path / "bench.json"
    command = "--sizes tiny --threads 1 --seconds 1 --slice 0.1 --rows 2 --documents 60 --use_compile 0 --device cpu"
    command = [*command.split(), "--sides", "plain", "hf", "ours", "--out", str(out)]
    command = [sys.executable, str(ROOT / "benchmarks" / "bench.py"), *command]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    (record,) = json.loads(out.read_text())
    assert list(record["sides"]) == ["plain", "hf", "ours"] and len(record["ratios"]) == 2
    assert len({side["parameters"] for side in record["sides"].values()}) == 1
    for side in record["sides"].values():
        assert len(side["slices"]) == record["rounds"] >= 3
        assert side["text_tokens_per_second"] > 0 and side["peak_memory_bytes"] > 1e8 and side["utilisation"] < 1
    assert record["sides"]["plain"]["padding"] > 0.2 > record["sides"]["ours"]["padding"]
