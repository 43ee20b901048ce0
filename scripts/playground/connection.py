"""The two directions of a connection, each with the seconds that it may keep its thread waiting in all.

A timeout of a socket begins anew with each byte that comes. So whoever sends or takes a byte now and then could hold a
thread for days, and a model along with it. Here each wait takes its time from one account.
"""

import io
import socket
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer, WriteableBuffer

Result = TypeVar("Result")


class Patience:
    """The waits for one direction of a connection. Errors: TimeoutError once they have taken `seconds` together."""

    def __init__(self, connection: socket.socket, seconds: float) -> None:
        self.connection = connection
        self.seconds_left = seconds

    def wait_for(self, operation: Callable[[], Result]) -> Result:
        """Call an operation of the socket."""
        if self.seconds_left <= 0:
            raise TimeoutError("the other side is too slow")
        self.connection.settimeout(self.seconds_left)
        start = time.monotonic()
        try:
            return operation()
        finally:
            self.seconds_left -= time.monotonic() - start


class PatientReader(io.RawIOBase):
    """What comes on a connection."""

    def __init__(self, connection: socket.socket, seconds: float) -> None:
        self.connection = connection
        self.patience = Patience(connection, seconds)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: "WriteableBuffer") -> int:
        return self.patience.wait_for(lambda: self.connection.recv_into(buffer))


class PatientWriter(io.BufferedIOBase):
    """What goes. Nothing is kept back."""

    def __init__(self, connection: socket.socket, seconds: float) -> None:
        self.connection = connection
        self.patience = Patience(connection, seconds)

    def writable(self) -> bool:
        return True

    def write(self, content: "ReadableBuffer") -> int:
        # The timeout of `sendall` is for all of the content.
        self.patience.wait_for(lambda: self.connection.sendall(content))
        return memoryview(content).nbytes
