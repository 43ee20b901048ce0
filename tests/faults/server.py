"""A process that has imported the trainer and forks a copy of itself for each run, which spares the seconds of imports. It reads a
JSON request a line, with the flags, environment and hooks (hooks.py) of a run, and ends with its standard input. A run writes to
`{log}.out` and `{log}.err`; its exit code appears in `{log}.status`."""

import contextlib
import gc
import json
import os
import runpy
import select
import signal
import sys
import traceback
from pathlib import Path

# The terminal sends these to its whole group. There they are for pytest.
OF_THE_TERMINAL = (signal.SIGINT, signal.SIGHUP)


def main():
    for number in OF_THE_TERMINAL:
        signal.signal(number, signal.SIG_IGN)
    import torch._dynamo  # noqa: F401 - imported by the first optimiser otherwise

    from dataset.tokenizing.encoder import load_tokenizer
    from tests.faults import hooks
    from trainer import train_pretrain, train_sft

    trainers = {"train_pretrain": train_pretrain, "train_sft": train_sft}
    load_tokenizer(sys.argv[1])
    # A collection in a copy would look at all that stands here, and by that copy its memory.
    gc.collect()
    gc.freeze()
    print("ready", flush=True)
    running = {}
    while True:
        ready, _, _ = select.select([sys.stdin], [], [], 0.01)
        if ready:
            line = sys.stdin.readline()
            if not line:
                return
            request = json.loads(line)
            # A signal for the copy may come before it has run an instruction: it waits until the copy no longer ignores it.
            signal.pthread_sigmask(signal.SIG_BLOCK, OF_THE_TERMINAL)
            pid = os.fork()
            if pid == 0:
                run(request, hooks, trainers[request["trainer"]])
            signal.pthread_sigmask(signal.SIG_UNBLOCK, OF_THE_TERMINAL)
            running[pid] = Path(f"{request['log']}.status")
            print(pid, flush=True)
        while running:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            path = running.pop(pid)
            with contextlib.suppress(FileNotFoundError):  # its test is over, and the folder gone
                path.with_suffix(".part").write_text(str(os.waitstatus_to_exitcode(status)))
                path.with_suffix(".part").rename(path)


def run(request, hooks, trainer):
    """The forked copy: become the process that `python trainer/train_pretrain.py ...` would be, and never return."""
    code = 70
    try:
        os.setsid()
        for number in OF_THE_TERMINAL:
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, OF_THE_TERMINAL)
        with open(os.devnull) as nothing:
            os.dup2(nothing.fileno(), 0)
        for number, kind in ((1, "out"), (2, "err")):
            with open(f"{request['log']}.{kind}", "a") as file:
                os.dup2(file.fileno(), number)
            # anew: those of the server know their own file's kind, for instance whether it can seek
            stream = open(number, "w", buffering=1, closefd=False)  # noqa: SIM115
            vars(sys).update({f"std{kind}": stream, f"__std{kind}__": stream})
        os.environ.update(request["environment"])
        os.chdir(request["cwd"])
        sys.argv = [f"{request['trainer']}.py", *request["arguments"]]
        hooks.plant(request["hooks"])
        code = leave(runpy.run_path, trainer.__file__, None, "__main__")
    finally:
        os._exit(code)


def leave(call, *arguments):
    """The exit code of a call that ends as a script does, after what an interpreter does at its end."""
    import atexit
    import threading

    try:
        call(*arguments)
        code = 0
    except SystemExit as end:
        code = end.code or 0
    except BaseException:
        traceback.print_exc()
        code = 1
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    return code


if __name__ == "__main__":
    main()
