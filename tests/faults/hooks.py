"""What a test plants in a run's process before it starts. The product code knows nothing of it."""

import atexit
import ctypes
import errno
import json
import multiprocessing
import os
import resource
import signal
import sys
import threading
import time
from functools import partial
from itertools import chain, repeat
from unittest import mock

import torch

from common import files
from dataset import loader
from dataset.batches import Assembler
from trainer import engine, loop, reducer
from trainer.machine import devices
from trainer.saving import checkpoint
from trainer.saving.saver import Saver


class Count:
    """Updates of the run that are done, over all resumes, and those that were when this process resumed."""

    done = 0
    before = 0


def count_updates():
    update, resume = engine.Engine.update, Saver.resume

    def counting_update(self, *arguments, **named):
        update(self, *arguments, **named)
        Count.done += 1

    def counting_resume(saver):
        resumed = resume(saver)
        Count.done = Count.before = resumed.update if resumed else 0
        return resumed

    engine.Engine.update, Saver.resume = counting_update, counting_resume


def ledger(path):
    """Write a line per update to `{path}.{rank}`: its number, its cross-entropy sum, the tokens of its documents, when it was done."""
    seen, losses = [], []
    updates = loader.Loader.updates
    start, update = engine.Engine.__init__, engine.Engine.update
    micro_batch = engine.Engine.micro_batch

    def recorded(update):
        for batch in update[1]:
            if batch is not None:
                seen.extend(pieces(batch))
        return update

    def recording_updates(*arguments, **named):
        return map(recorded, updates(*arguments, **named))

    def recording_start(self, model, optimizer, objective, **named):
        def recording_objective(batch, totals):
            loss, sums = objective(batch, totals)
            losses.append(float(sums[0]))
            return loss, sums

        start(self, model, optimizer, recording_objective, **named)

    def recording_micro_batch(self, *arguments, counts=True, **named):
        micro_batch(self, *arguments, counts=counts, **named)
        if not counts:
            # Computed for the sake of other ranks alone.
            losses.pop()

    def recording_update(self, *arguments, **named):
        update(self, *arguments, **named)
        with open(f"{path}.{self.ranks.rank}", "a") as file:
            line = {"update": Count.done, "attempt": os.environ["FAULTS_ATTEMPT"], "time": time.monotonic()}
            file.write(json.dumps({**line, "loss": sum(losses), "pieces": list(seen)}) + "\n")
        seen.clear()
        losses.clear()

    loader.Loader.updates = recording_updates
    engine.Engine.__init__, engine.Engine.update = recording_start, recording_update
    engine.Engine.micro_batch = recording_micro_batch


def signal_at(updates, name="SIGTERM", rank=0, once=None):
    """Raise a signal before one of the updates (from 1, over all resumes); once: only if `{once}.{update}` does not exist yet."""
    at_update(updates, lambda: os.kill(os.getpid(), getattr(signal, name)), rank, once)


def fail_at(updates, kind, rank=0, message="planted failure"):
    """Raise an exception, or hang, before an update."""

    def fail():
        if kind == "raise":
            raise torch.AcceleratorError(message)
        while True:
            time.sleep(1)

    at_update(updates, fail, rank)


# What a rank may do in a collective: end, be stopped, stand still, stand still with the interpreter's lock, so that none of its
# threads runs, or answer late.
FAULTS = {
    "die": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "sleep": lambda: time.sleep(3600),
    "hold": lambda: ctypes.PyDLL(None).sleep(3600),
    "late": lambda: time.sleep(1.5),
}
# {phase: method in whose collectives a fault strikes}
COLLECTIVES = {
    "exchange": (reducer.DistributedReducer, "finish"),
    "log": (engine.Engine, "collect"),
    "evaluation": (loop.Trainer, "run_evaluation"),
    "save": (Saver, "save"),
}
PHASES = ("before", "after", *COLLECTIVES)


def strike(kind, phase, update, rank=0, once=None):
    """One of FAULTS from an update on, at its first time in this phase: before or after the exchange of gradients, or inside one of
    COLLECTIVES. once: a file; only if it does not exist yet, and then it does."""
    is_inside = is_done = False

    def act(*_):
        nonlocal is_done
        number = Count.done + (phase in ("before", "exchange"))
        if is_done or number < update or torch.distributed.get_rank() != rank or (once and os.path.exists(once)):
            return
        is_done = True
        if once:
            open(once, "w").close()
        FAULTS[kind]()

    def enclosing(method):
        def enclosed(*arguments, **named):
            nonlocal is_inside
            is_inside = True
            returned = method(*arguments, **named)
            is_inside = False
            return returned

        return enclosed

    def striking(collective):
        def struck(*arguments, **named):
            if is_inside and collective is all_reduce and not named:
                # The others get what this rank has sent.
                work = collective(*arguments, async_op=True)
                act()
                return work.wait()
            if is_inside:
                act()
            return collective(*arguments, **named)

        return struck

    all_reduce = torch.distributed.all_reduce
    if phase == "before":
        before_calls(engine.Engine, "micro_batch", act)
    elif phase == "after":
        before_calls(loop.Trainer, "after_update", act)
    else:
        owner, name = COLLECTIVES[phase]
        setattr(owner, name, enclosing(getattr(owner, name)))
        torch.distributed.broadcast_object_list = striking(torch.distributed.broadcast_object_list)
        torch.distributed.all_reduce = striking(all_reduce)


def hold_until_signal(update):
    """Wait before an update until a stop signal has come."""
    from trainer.machine.command_line import StopSignals

    entered = []
    before_calls(StopSignals, "__enter__", entered.append)

    def hold():
        while not entered[-1].signum:
            time.sleep(0.05)

    at_update([update], hold)


def before_calls(owner, name, act):
    """Call act(object) before each call of a method."""
    method = getattr(owner, name)

    def acting(self, *arguments, **named):
        act(self)
        return method(self, *arguments, **named)

    setattr(owner, name, acting)


def at_update(updates, action, rank=0, once=None):
    """Call `action` in the first micro-batch of each of the updates; where the rank has no rows in it, in its next one."""
    pending = set(updates)

    def act_if_due(running):
        for due in sorted(number for number in pending if number <= Count.done + 1):
            pending.discard(due)
            is_here = due > Count.before and running.ranks.rank == rank
            if is_here and not (once and os.path.exists(f"{once}.{due}")):
                if once:
                    open(f"{once}.{due}", "w").close()
                action()

    before_calls(engine.Engine, "micro_batch", act_if_due)


def pieces(batch):
    """The inputs of each document piece of a Batch."""
    for ids, documents in zip(batch.input_ids, batch.document_ids, strict=True):
        for number in range(int(documents.max()) + 1):
            yield ids[documents == number].tolist()


def slow_save(seconds=0.5):
    """Make the middle of each checkpoint file last."""

    def sleep_once(writer):
        if not hasattr(writer, "slept") and ".pt." in str(writer.file.name) and writer.file.tell() > 20_000:
            writer.slept = True
            writer.file.flush()
            time.sleep(seconds)

    before_calls(files.HashingWriter, "write", sleep_once)


def signal_at_end(name):
    """Raise a signal in this process when its run is over."""
    atexit.register(lambda: os.kill(os.getpid(), getattr(signal, name)))


def fail_first_load(message):
    outcomes = chain([RuntimeError(message)], repeat(mock.DEFAULT))
    torch.load = mock.Mock(wraps=torch.load, side_effect=outcomes)


def no_threads():
    threading.Thread.start = mock.Mock(side_effect=RuntimeError("can't start new thread"))


def kill_in_prune():
    """kill -9 of this process when it begins to prune: after the save and before anything is deleted."""
    checkpoint.Checkpoints._prune = lambda self, newest, keep: os.kill(os.getpid(), signal.SIGKILL)


def kill_at_call(name, at=1):
    """kill -9 of this process at the `at`-th call of os.replace, os.fsync ... in this process."""
    count, call = 0, getattr(os, name)

    def killing(*arguments, **named):
        nonlocal count
        count += 1
        if count == at:
            os.kill(os.getpid(), signal.SIGKILL)
        return call(*arguments, **named)

    setattr(files.os, name, killing)


def save_again():
    """Save what a resume has found, and leave."""
    resume = Saver.resume

    def saving_resume(saver):
        saver.save(resume(saver), is_last=False)
        saver.finish()
        sys.exit(0)

    Saver.resume = saving_resume


def full_disk(at_tries, offset, ending=".pt"):
    """In these tries to save the disk takes `offset` bytes of each file; ending: ".pt" of checkpoints, ".pth" of weights."""
    count, enter, write = 0, files.HashingWriter.__init__, files.HashingWriter.write

    def start(self, file):
        nonlocal count
        is_meant = f"{ending}." in str(file.name)
        count += is_meant
        self.disk_is_full = is_meant and count in at_tries
        enter(self, file)

    def limited_write(self, data):
        if self.disk_is_full and self.file.tell() + memoryview(data).nbytes > offset:
            # A torn piece stays: as much as there was room for.
            self.file.write(memoryview(data)[: max(offset - self.file.tell(), 0)])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(self, data)

    files.HashingWriter.__init__, files.HashingWriter.write = start, limited_write


def quick_compile():
    """torch.compile without its code generation: the graphs are traced and run by eager kernels."""
    torch.compile = partial(torch.compile, backend="aot_eager")


def slow_updates(seconds):
    """Make every update last at least so long, as one of a larger model does."""
    before_calls(engine.Engine, "update", lambda _: time.sleep(seconds))


def slow_evaluation(seconds):
    """Make every validation batch last, and the batches small."""
    from dataset import corpus
    from dataset.corpus import ValidationBatches

    corpus.EVAL_ROWS = 2

    def say_and_sleep(_):
        print("evaluating", flush=True)
        time.sleep(seconds)

    before_calls(ValidationBatches, "__getitem__", say_and_sleep)


def any_cpu_has_bfloat16():
    devices.cpu_has_bfloat16 = lambda: True


def kill_worker_at(updates, rank=0):
    at_update(updates, lambda: os.kill(multiprocessing.active_children()[0].pid, signal.SIGKILL), rank)


def bad_batch(at, rank=0):
    """The `at`-th batch of a process (from 1) finds a document where no token is."""
    get, start = Assembler.__getitem__, loader.Loader.__init__
    count, own_rank = 0, 0

    def knowing_start(self, assembler, number=0, *arguments, **named):
        nonlocal own_rank
        own_rank = number
        start(self, assembler, number, *arguments, **named)

    def failing(self, what):
        nonlocal count
        count += 1
        if count == at and own_rank == rank:
            what.begin[:] = 1 << 40
        return get(self, what)

    Assembler.__getitem__, loader.Loader.__init__ = failing, knowing_start


def shared_memory_is_full():
    """No tensor can go to another process through /dev/shm."""

    def full(*arguments, **named):
        raise RuntimeError("unable to write to file </torch_1_2_3>: No space left on device (28)")

    for name in ("_share_fd_cpu_", "_share_filename_cpu_"):
        setattr(torch.UntypedStorage, name, full)


def limit(name, value):
    """A limit of the shell: RLIMIT_NOFILE (open files), RLIMIT_FSIZE (bytes of a file: a full disk, EFBIG in place of ENOSPC)."""
    resource.setrlimit(getattr(resource, name), (value, value))


def plant(wanted):
    """Hooks by their names: {name: arguments}."""
    count_updates()
    for name, arguments in wanted.items():
        globals()[name](**arguments)
