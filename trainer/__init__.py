"""Training from Python: `from trainer import train`. Imports nothing that takes time before a call."""

from __future__ import annotations

# As typing's, whose import takes as long as all the rest
TYPE_CHECKING = False
if TYPE_CHECKING:
    from trainer.calls import Caller, Event, OnLog, Result


def train(*, on_log: OnLog = None, stop: Event | None = None, **flags: object) -> Result:
    """Pretrain as trainer/train_pretrain.py does with these flags: `train(data_path=["a.jsonl"], budget="10m", use_moe=True)`.

    on_log: gets each line of the metrics file. stop: once it is set, the run ends as after Ctrl-C: saved, after its update.
    The call may be in any thread; relative paths are seen from the folder that is current at its start. It has the bits of the
    command with --cpu_processes 1, since its process is not forked.
    Errors: UserError for what a user can fix, such as a second run at the same time.
    """
    from trainer.machine.command_line import call
    from trainer.pretrain.settings import PretrainSettings

    def main(words: list[str], caller: Caller, settings: PretrainSettings) -> int:
        from trainer.command import run_command
        from trainer.pretrain.job import PretrainJob

        return run_command(PretrainJob, settings, words, caller)

    return call(PretrainSettings, main, on_log, stop, **flags)
