"""benchmarks/bench.py: its documents, the turns of its sides, and what it leaves."""

import json

import pytest

from tests.helpers import ROOT, command_line


@pytest.mark.slow
def test_all_sides_run_side_by_side(tmp_path):
    pytest.importorskip("accelerate")
    out = tmp_path / "bench.json"
    size = "--sizes tiny --threads 1 --seconds 1 --slice 0.1 --rows 2 --documents 60 --use_compile 0 --device cpu"
    flags = [*size.split(), "--sides", "plain", "hf", "ours", "--out", out]
    done = command_line(flags, script=ROOT / "benchmarks" / "bench.py")
    assert done.returncode == 0, done.stderr
    (record,) = json.loads(out.read_text())
    assert list(record["sides"]) == ["plain", "hf", "ours"] and len(record["ratios"]) == 2
    assert len({side["parameters"] for side in record["sides"].values()}) == 1
    for side in record["sides"].values():
        assert len(side["slices"]) == record["rounds"] >= 3
        assert side["text_tokens_per_second"] > 0 and side["peak_memory_bytes"] > 1e8 and side["utilisation"] < 1
    assert record["sides"]["plain"]["padding"] > 0.2 > record["sides"]["ours"]["padding"]
