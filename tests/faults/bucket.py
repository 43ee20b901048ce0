"""A folder as FUSE mounts of object stores are: python bucket.py STORE MOUNT [OPERATION ...]; the operations are refused too.

A file is written once, from its start on, and is there when it is closed. A rename copies file by file. fsync does nothing; locks, links,
appends and writes into a file that exists are refused. STORE: a plain folder that has what was uploaded.
"""

import errno
import os
import stat
import sys
import time
from pathlib import Path

from mfusepy import FUSE, FuseOSError, Operations

# of each request
SECONDS = 0.002
FIELDS = ("st_mode", "st_size", "st_nlink", "st_uid", "st_gid")


def refuse(*_):
    raise FuseOSError(errno.ENOTSUP)


class Bucket(Operations):
    use_ns = True

    def __init__(self, store):
        self.store = Path(store)
        # {handle: (path, what was written)}; {path: handle of a file that is not there yet}
        self.written, self.pending = {}, {}

    def at(self, path):
        time.sleep(SECONDS)
        return self.store / path[1:]

    def put(self, target, content):
        part = self.store.with_name(f"{self.store.name}.part")
        part.write_bytes(content)
        part.replace(target)

    def getattr(self, path, handle=None):
        if path in self.pending:
            return {"st_mode": stat.S_IFREG | 0o644, "st_size": len(self.written[self.pending[path]][1]), "st_nlink": 1}
        found = self.at(path).lstat()
        return {**{name: getattr(found, name) for name in FIELDS}, "st_mtime": found.st_mtime_ns}

    def readdir(self, path, handle):
        pending = [os.path.basename(other) for other in self.pending if os.path.dirname(other) == path]
        return [".", "..", *os.listdir(self.at(path)), *pending]

    def open(self, path, flags):
        if not flags & (os.O_WRONLY | os.O_RDWR):
            return 0
        if not flags & os.O_TRUNC:
            raise FuseOSError(errno.EPERM)
        return self.create(path)

    def create(self, path, mode=0, info=None):
        handle = max(self.written, default=0) + 1
        self.written[handle] = path, bytearray()
        self.pending[path] = handle
        return handle

    def read(self, path, size, offset, handle):
        return self.at(path).read_bytes()[offset : offset + size]

    def write(self, path, data, offset, handle):
        path, content = self.written[handle]
        if self.pending.get(path) != handle or offset != len(content):
            refuse()
        content += data
        return len(data)

    def flush(self, path, handle):
        """At each close, also at the end of a killed process. Programs close copies of a descriptor before they write."""
        path, content = self.written.get(handle, (path, b""))
        if content and self.pending.get(path) == handle:
            self.put(self.at(path), content)
            del self.pending[path]

    def release(self, path, handle):
        path, content = self.written.pop(handle, (path, b""))
        if self.pending.get(path) == handle:
            self.put(self.at(path), content)
            del self.pending[path]

    def unlink(self, path):
        if not self.pending.pop(path, None):
            self.at(path).unlink()

    def rename(self, old, new):
        self.move(self.at(old), self.at(new))

    def move(self, source, target):
        if source.is_dir():
            target.mkdir(exist_ok=True)
            for path in sorted(source.iterdir()):
                self.move_inside(path, target / path.name)
            source.rmdir()
        else:
            self.put(target, source.read_bytes())
            time.sleep(5 * SECONDS)
            source.unlink()

    def move_inside(self, source, target):
        """Of a folder that is moved: many mounts refuse those that are not empty."""
        self.move(source, target)

    def mkdir(self, path, mode):
        self.at(path).mkdir()

    def rmdir(self, path):
        self.at(path).rmdir()

    def ignore(self, *_):
        return 0

    chmod = chown = utimens = ignore
    lock = flock = link = symlink = truncate = refuse


if __name__ == "__main__":
    for name in sys.argv[3:]:
        setattr(Bucket, name, refuse)
    FUSE(Bucket(sys.argv[1]), sys.argv[2], foreground=True, nothreads=True, hard_remove=True)
