"""The processes that a command starts beside itself: copies of it, which do the same work as other ranks.

They are forked, not started anew: the imports of PyTorch and transformers take seconds of a core, and a copy has them
already. That is safe only before the process has computed anything, since the threads of OpenMP are not copied.

How they end, whatever happens:
- The command is gone, even by kill -9: the kernel kills the copies at once. They write no files.
- A copy is gone: the others cannot go on without its rows. The command ends with one line and exit code 1.
- A copy has an error that a user can mend. It says nothing, since the command and the other copies may have the same one.
  It leaves its line in a pipe, and the command ends with it, unless it has one of its own.
"""

import contextlib
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import NoReturn

from common.errors import ProcessLostError, SaidByAnotherRank, UserError
from common.notices import announce
from common.processes import end_with
from trainer.machine.command_line import line_of
from trainer.machine.meeting import LostRankError

POLL_S = 0.2
# When a copy is gone, most often the command's own next message to it fails. The thread that watches leaves it to that for
# so long. A copy that has done all its work is waited for so long, too.
GRACE_S = 5.0
# How long after the end of a connection the process at its other end is known to have ended.
NOTICE_S = 2.0
# A copy ends with this where another process is gone or says what happened.
NOTHING_TO_SAY = 75
# Of its line; the pipe holds more.
MOST_BYTES = 16_384

# The work of one rank: (its number, the socket at which rank 0 will be reached) -> exit code.
Work = Callable[[int, socket.socket], int]


def side_by_side(n: int, work: Work) -> int:
    """work(rank, meeting_place) in n processes: this one is rank 0. Returns its exit code.

    Nothing may have been computed before. meeting_place: a listening socket on 127.0.0.1 that rank 0 serves.
    Errors: what `work` raises here, or what a user can mend of a copy's; ProcessLostError where a copy is gone;
    UserError where none can be started.
    """
    meeting_place = socket.socket()
    meeting_place.bind(("127.0.0.1", 0))
    meeting_place.listen(n)
    # What is in their buffers would be printed by each copy.
    sys.stdout.flush()
    sys.stderr.flush()
    with Copies() as copies:
        for rank in range(1, n):
            copies.start(partial(work, rank, meeting_place))
        copies.watch()
        return work(0, meeting_place)


def be_a_copy(work: Callable[[], int], parent: int, line_to: int) -> NoReturn:
    """In a copy: do its work, and end without going back to whoever called the command.

    line_to: the file descriptor that takes its line, if there is one.
    """
    code = 1
    try:
        end_with(parent)
        # Otherwise it was gone before the kernel was asked to tell.
        if os.getppid() == parent:
            code, line = ending_of(work)
            os.write(line_to, line.encode(errors="backslashreplace")[:MOST_BYTES])
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
    finally:
        os._exit(code)


def ending_of(work: Callable[[], int]) -> tuple[int, str]:
    """(exit code, line for the user or "") of a copy's work. A defect of ours is printed with its traceback."""
    try:
        return work(), ""
    except SaidByAnotherRank:
        return NOTHING_TO_SAY, ""
    except Exception as error:
        # The lost process has the better explanation.
        if is_of_a_lost_peer(error):
            return NOTHING_TO_SAY, ""
        ending = line_of(error)
        if ending is not None:
            line, code = ending
            return code, line
        traceback.print_exc()
    except BaseException as end:
        # Ctrl-C before the handlers are there, or sys.exit.
        code_of_exit = end.code if isinstance(end, SystemExit) else 130
        return code_of_exit if isinstance(code_of_exit, int) else 1, ""
    return 1, ""


def is_of_a_lost_peer(error: Exception) -> bool:
    """Whether it is that of a wait for another process: in shared memory, or of Gloo, which carries the messages."""
    return isinstance(error, LostRankError) or (isinstance(error, RuntimeError) and "gloo" in str(error).lower())


@dataclass
class Copy:
    """A process that was started. code: None while it runs, its exit code, or the negative number of a signal."""

    pid: int
    # The file descriptor from which its line comes.
    line_from: int
    code: int | None = None
    line: str = ""


class Copies:
    """The copies that this process has started; none is left when the block ends, however it ends."""

    def __init__(self) -> None:
        self.copies: list[Copy] = []
        # Two threads look at them.
        self._lock = threading.Lock()
        self._leaving = threading.Event()

    def __enter__(self) -> "Copies":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._leaving.set()
        try:
            if error is None:
                self._wait_until(self._all_have_ended, GRACE_S)
            elif isinstance(error, SaidByAnotherRank):
                self._wait_until(self._has_explanation, GRACE_S)
                self._explain(error)
            elif isinstance(error, Exception) and is_of_a_lost_peer(error):
                self._wait_until(self._has_explanation, NOTICE_S)
                self._explain(error)
            elif isinstance(error, Exception) and line_of(error) is None:
                self._explain(error)
        finally:
            self._kill()

    def start(self, work: Callable[[], int]) -> None:
        """Errors: UserError where the machine starts no more processes."""
        parent = os.getpid()
        line_from, line_to = os.pipe()
        try:
            pid = os.fork()
        except OSError as error:
            raise UserError(
                f"no further process can be started ({error.strerror}): --cpu_processes 1 needs none"
            ) from error
        if pid == 0:
            be_a_copy(work, parent, line_to)
        os.close(line_to)
        self.copies.append(Copy(pid, line_from))

    def watch(self) -> None:
        """From here on a thread ends this process when a copy is gone, where it does not notice by itself."""
        threading.Thread(target=self._watch, name="copies", daemon=True).start()

    def _watch(self) -> None:
        while not self._leaving.wait(POLL_S):
            if not self._has_explanation():
                continue
            if self._leaving.wait(GRACE_S):
                return
            line, code = self._what_is_lost()
            announce(f"error: {line}", to_stderr=True)
            self._kill()
            os._exit(code)

    def _explain(self, error: Exception) -> None:
        """Raise what a copy has to say, or that one is gone, in the place of `error`; nothing where no copy has ended."""
        if not self._has_explanation():
            return
        line, code = self._what_is_lost()
        if code == 1:
            raise ProcessLostError(line) from error
        raise UserError(line) from error

    def _what_is_lost(self) -> tuple[str, int]:
        """(a line on the copy that has ended too early, the command's exit code for it)."""
        copy = next(copy for copy in self.copies if copy.code not in (None, NOTHING_TO_SAY))
        assert copy.code is not None
        if copy.line:
            return copy.line, copy.code
        how = f"was killed by signal {-copy.code}" if copy.code < 0 else f"has ended with exit code {copy.code}"
        number = self.copies.index(copy) + 2
        line = (
            f"process {number} of {len(self.copies) + 1} (pid {copy.pid}) {how}, and the others cannot go on without it; "
            "--from_resume 1 goes on from the last save, --cpu_processes 1 needs less memory"
        )
        return line, 1

    def _has_explanation(self) -> bool:
        """Whether a copy has ended for a reason of its own."""
        self._look()
        return any(copy.code not in (None, NOTHING_TO_SAY) for copy in self.copies)

    def _all_have_ended(self) -> bool:
        self._look()
        return all(copy.code is not None for copy in self.copies)

    def _look(self) -> None:
        """Note which copies have ended, and their lines."""
        with self._lock:
            for copy in self.copies:
                if copy.code is not None:
                    continue
                try:
                    pid, status = os.waitpid(copy.pid, os.WNOHANG)
                except ChildProcessError:
                    # Whoever started this process has it ignore the ends of others: nobody knows how it ended.
                    pid, status = copy.pid, 0
                if pid:
                    copy.line = os.read(copy.line_from, MOST_BYTES).decode(errors="replace")
                    os.close(copy.line_from)
                    copy.code = os.waitstatus_to_exitcode(status)

    def _wait_until(self, condition: Callable[[], bool], seconds: float) -> None:
        """Until it holds, or for so long."""
        deadline = time.monotonic() + seconds
        while not condition() and time.monotonic() < deadline:
            time.sleep(0.01)

    def _kill(self) -> None:
        """End those that still run, and wait for them."""
        self._look()
        for copy in self.copies:
            if copy.code is None:
                os.kill(copy.pid, signal.SIGKILL)
        self._wait_until(self._all_have_ended, GRACE_S)
