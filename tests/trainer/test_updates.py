"""--rows_per_update: which rows, micro-batches and rates follow from it. References: consecutive slices, one rank."""

from types import SimpleNamespace

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers import losses, records, steps_of, train, write_corpus
from trainer.batching import Batching
from trainer.machine.ranks import Ranks


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 80), st.integers(1, 30), st.integers(1, 5), st.integers(1, 4), st.booleans(), st.integers(0, 80))
def test_updates_have_the_same_rows_on_any_number_of_ranks(n_rows, rows, batch, world, is_divided, start):
    """Reference: slices of `rows` rows, whatever the ranks and their micro-batches are."""
    start = min(start, n_rows)
    flags = SimpleNamespace(batch_size=batch, accumulation_steps=8, rows_per_update=rows)
    schedule = Batching.of(flags, Ranks(world_size=world, sharing=world if is_divided else 1)).schedule(n_rows, start)
    seen = {}
    steps = set()
    for rank in range(world):
        mine = steps_of(schedule, rank)
        sizes = [hi - lo for update, _, lo, hi in mine if update == schedule.first_update]
        assert rows % (len(sizes) * world or 1) or n_rows - start < rows or len(set(sizes)) == 1, "an uneven update"
        steps.add(tuple((update, micro) for update, micro, *_ in mine))
        for update, _, lo, hi in mine:
            assert hi - lo <= batch
            seen.setdefault(update, []).extend(range(lo, hi))
    assert len(steps) == 1, "ranks disagree about the micro-batches"
    in_order = [sorted(seen[update]) for update in sorted(seen)]
    assert in_order == [list(range(at, min(at + rows, n_rows))) for at in range(start, n_rows, rows)]
    if start == 0:
        assert schedule.n_updates == len(in_order)
        assert schedule.n_steps == len(steps.pop())


def test_a_run_has_the_updates_of_accumulation_steps(tmp_path, capsys):
    """Reference: the same rows by --accumulation_steps, which the settings that are kept do not name."""
    write_corpus(tmp_path / "data.jsonl")
    options = {"data_path": tmp_path / "data.jsonl", "batch_size": 2, "log_interval": 3, "warmup_iters": 6}
    by_rows = train(out_dir=tmp_path / "rows", rows_per_update=6, accumulation_steps=None, **options)
    assert "(2 x 3 micro-batches x 1 rank)" in capsys.readouterr().out
    by_steps = train(out_dir=tmp_path / "steps", accumulation_steps=3, **options)
    assert losses(by_rows) == losses(by_steps)
    assert [line["lr"] for line in records(by_rows)] == [line["lr"] for line in records(by_steps)]
    assert f"{records(by_rows)[0]['lr']:.6f}" == "0.000275", "half of the warm-up, at MiniMind's 1.1 times 5e-4"
    kept = (tmp_path / "rows" / "pretrain_16.settings.yaml").read_text()
    assert "rows_per_update: 6" in kept and "accumulation_steps: 8" in kept
