"""The cache of what was fetched. References: the content that was to be fetched, and a list of what was used when."""

import os
import signal
import threading
import time

import pytest

from common.errors import DataError
from dataset.reading.disk_cache import DiskCache, Wanted


def writes(content):
    def fill(path):
        path.write_bytes(content)

    return fill


def names(cache):
    return sorted(path.name for path in cache.folder.iterdir() if not path.name.startswith("."))


def bytes_below(folder):
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def use(cache, name, content=b"x" * 10):
    return cache.use(Wanted(name, len(content), writes(content)), lambda path: path.read_bytes())


def test_an_entry_is_fetched_once(tmp_path):
    cache = DiskCache(tmp_path / "cache", 100)
    assert use(cache, "a", b"abc") == b"abc"
    assert cache.use(Wanted("a", 3, None), lambda path: path.read_bytes()) == b"abc"


def test_what_was_used_least_lately_goes_and_the_limit_holds(tmp_path):
    """Reference: a list in the order of use."""
    cache = DiskCache(tmp_path / "cache", 35)
    lately = []
    for name in "abcadbaecab":
        use(cache, name)
        lately = [*(other for other in lately if other != name), name][-3:]
        assert names(cache) == sorted(lately)
        assert bytes_below(cache.folder) <= cache.limit_bytes


@pytest.mark.parametrize("change", ["another byte", "cut off", "gone"])
@pytest.mark.parametrize("knows_content", [True, False])
def test_an_entry_that_somebody_wrote_to_is_fetched_again(tmp_path, change, knows_content):
    cache = DiskCache(tmp_path / "cache", 3)
    is_whole = (lambda path: path.read_bytes() == b"abc") if knows_content else None
    wanted = Wanted("a", 3, writes(b"abc"), is_whole)
    cache.use(wanted, lambda path: None)
    path = cache.folder / "a"
    path.unlink() if change == "gone" else path.write_bytes({"another byte": b"abd", "cut off": b"ab"}[change])
    for _ in range(2):
        assert cache.use(wanted, lambda path: path.read_bytes()) == b"abc"
    assert names(cache) == ["a"]


def test_an_entry_is_compared_with_its_digest_only_where_its_time_or_size_is_another(tmp_path):
    """As after a copy of the cache, which has the time of the copy."""
    cache = DiskCache(tmp_path / "cache", 100)
    compared = []
    wanted = Wanted("a", 3, writes(b"abc"), lambda path: compared.append(path) or True)
    for _ in range(3):
        cache.use(wanted, lambda path: None)
    assert compared == []
    os.utime(cache.folder / "a")
    for _ in range(3):
        assert cache.use(wanted._replace(fill=None), lambda path: path.read_bytes()) == b"abc"
    assert compared == [cache.folder / "a"]


def test_what_another_user_has_fetched_is_used(tmp_path, monkeypatch):
    """Nobody may set the times of another user's files."""
    cache = DiskCache(tmp_path / "cache", 100)
    use(cache, "a", b"abc")

    def refuse(*_, **__):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "utime", refuse)
    assert cache.use(Wanted("a", 3, None), lambda path: path.read_bytes()) == b"abc"


def test_a_download_that_takes_too_long_is_told(tmp_path):
    """A lock that is not to be had raises an error of the same kind, which is left to whoever holds it."""
    cache = DiskCache(tmp_path / "cache", 100)

    def fill(path):
        raise TimeoutError("the server is slow")

    for fetch in (lambda wanted: cache.use(wanted, lambda path: path), cache.prefetch):
        with pytest.raises(TimeoutError, match="slow"):
            fetch(Wanted("a", 3, fill))


def test_more_than_the_limit_ends_with_the_flag_that_raises_it(tmp_path):
    with pytest.raises(DataError, match="--cache_gb"):
        use(DiskCache(tmp_path / "cache", 9), "a")


def test_what_is_under_way_counts(tmp_path):
    cache = DiskCache(tmp_path / "cache", 15)
    began, go_on = threading.Event(), threading.Event()

    def slow(path):
        began.set()
        go_on.wait(30)
        path.write_bytes(b"x" * 10)

    thread = threading.Thread(target=cache.prefetch, args=(Wanted("a", 10, slow),))
    thread.start()
    began.wait(30)
    with pytest.raises(DataError, match="--cache_gb"):
        use(cache, "b")
    go_on.set()
    thread.join()
    assert use(cache, "b") and names(cache) == ["b"]


def test_a_failure_leaves_nothing(tmp_path):
    cache = DiskCache(tmp_path / "cache", 100)

    def fails(path):
        path.write_bytes(b"ab")
        raise ValueError("the connection broke")

    with pytest.raises(ValueError, match="broke"):
        cache.use(Wanted("a", 4, fails), lambda path: path)
    assert bytes_below(cache.folder) == 0
    assert use(cache, "a", b"abcd") == b"abcd"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="fork is not there")
@pytest.mark.parametrize("same", [True, False], ids=["the same entry", "another entry"])
def test_what_a_killed_process_left_is_never_used_and_gives_its_room_back(tmp_path, same):
    cache = DiskCache(tmp_path / "cache", 12)

    def killed_half_way(path):
        path.write_bytes(b"x" * 5)
        os.kill(os.getpid(), signal.SIGKILL)

    child = os.fork()
    if child == 0:
        cache.use(Wanted("a", 10, killed_half_way), lambda path: path)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert list(cache.folder.glob(".tmp-*")), "the test killed nothing"
    name = "a" if same else "b"
    assert use(cache, name) == b"x" * 10
    assert names(cache) == [name] and not list(cache.folder.glob(".tmp-*"))


def test_threads_that_want_the_same_entry_fetch_it_once(tmp_path):
    cache = DiskCache(tmp_path / "cache", 100)
    fetched = []

    def fill(path):
        fetched.append(path)
        time.sleep(0.05)
        path.write_bytes(b"abc")

    results = []
    threads = [
        threading.Thread(target=lambda: results.append(cache.use(Wanted("a", 3, fill), lambda path: path.read_bytes())))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [b"abc"] * 4 and len(fetched) == 1
