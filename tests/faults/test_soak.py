"""Thirty random faults on one run after the other, and an exact ledger of its documents."""

import time
from pathlib import Path

import pytest

from tests.faults.harness import seeded_random
from trainer.saving.checkpoint import verified


def kill(lab, ledger, world_size, generator):
    hooks = {**ledger, "signal_at": {"updates": later(lab, generator), "name": "SIGKILL", "rank": world_size - 1}}
    return run(lab, hooks, world_size, (-9, 1))


def kill_in_save(lab, ledger, world_size, generator):
    return run(
        lab,
        {**ledger, "kill_at_call": {"name": generator.choice(("replace", "fsync")), "at": generator.randint(2, 9)}},
        1,
        (-9, 0),
    )


def stop(lab, ledger, world_size, generator):
    name = generator.choice(("SIGTERM", "SIGINT", "SIGHUP"))
    hooks = {**ledger, "signal_at": {"updates": later(lab, generator), "name": name, "rank": 0}}
    return run(lab, hooks, world_size, (143, 130, 129))


def disk_full(lab, ledger, world_size, generator):
    """Then stopped, so that there is a next time."""
    hooks = {**ledger, "full_disk": {"at_save": 1, "offset": generator.randint(20_000, 250_000)}}
    hooks["signal_at"] = {"updates": [later(lab, generator)[0] + 4]}
    return run(lab, hooks, 1, (143, 2))


def damage(lab, ledger, world_size, generator):
    """The newest checkpoint loses its end, a bit or its digest; it is only done where another one is there."""
    paths = lab.checkpoints("run")
    if len(paths) > 1 and verified(paths[1]):
        kind = generator.choice(("cut", "flip", "digest"))
        data = bytearray(paths[0].read_bytes())
        if kind == "cut":
            paths[0].write_bytes(data[: generator.randrange(len(data))])
        elif kind == "flip":
            data[generator.randrange(len(data))] ^= 1
            paths[0].write_bytes(data)
        else:
            Path(f"{paths[0]}.sha256").unlink(missing_ok=True)
    return stop(lab, ledger, world_size, generator)


def hang(lab, ledger, world_size, generator):
    """A rank that stops answering; its launcher would kill it."""
    if world_size == 1:
        return stop(lab, ledger, world_size, generator)
    hooks = {**ledger, "fail_at": {"updates": later(lab, generator), "kind": "hang", "rank": 1}}
    processes = lab.start_ranks("run", 2, hooks, accumulation_steps=1, from_resume=1, dist_timeout=2)
    assert processes[0].wait() not in (0, 2), processes[0].out
    processes[1].kill()
    processes[1].wait()


def later(lab, generator):
    """An update that is not done yet, one of the next few."""
    paths = [path for path in lab.checkpoints("run") if verified(path)]
    done = int(paths[0].stem.removeprefix("update_")) if paths else 0
    return [done + generator.randint(1, 5)]


def run(lab, hooks, world_size, codes):
    """One attempt that must end in one of the ways given. The global batch is 4 rows on any world size."""
    accumulation = 2 // world_size
    options = {"accumulation_steps": accumulation, "save_interval": 3 * accumulation, "from_resume": 1}
    if world_size == 1:
        processes = [lab.start("run", hooks, **options)]
    else:
        processes = lab.start_ranks("run", world_size, hooks, **options)
    for process in processes:
        assert process.wait() in codes, process.out + process.err


@pytest.mark.slow
def test_soak_of_random_faults(lab):
    """No manual step between the faults; every document exactly once in each epoch at the end."""
    generator = seeded_random("soak")
    lab.settings.update(epochs=12, num_workers=0)  # 120 updates for 30 faults
    ledger = {"ledger": {"path": str(lab.folder / "ledger")}}
    start, done = time.monotonic(), []
    for _ in range(30):
        fault = generator.choice((kill, kill, kill_in_save, stop, stop, disk_full, damage, hang))
        world_size = generator.choice((1, 1, 2))
        done.append(f"{fault.__name__}/{world_size}")
        print(done[-1], flush=True)
        fault(lab, ledger, world_size, generator)
    lab.run("run", hooks=ledger, from_resume=1, num_workers=2)
    lab.check_ledger(lab.folder / "ledger", epochs=12)
    assert lab.leftovers("run") == []
    print(f"{len(done)} faults in {time.monotonic() - start:.0f} s: {' '.join(done)}")
