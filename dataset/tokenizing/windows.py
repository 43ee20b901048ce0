"""Windows over a text that is longer than an encoder reads at once. They overlap, so that each token has some text around it."""

import numpy as np

from dataset.store.interface import Ints


def windows_of(n_tokens: int, room: int, stride: int) -> list[tuple[int, int]]:
    """[begin, end) of the windows of a text: as many as it takes until one reaches its end."""
    windows = []
    begin = 0
    while True:
        end = min(begin + room, n_tokens)
        windows.append((begin, end))
        if end == n_tokens:
            return windows
        begin += min(stride, room)


def window_of_tokens(windows: list[tuple[int, int]], n_tokens: int) -> Ints:
    """For each token the number of the window that shows most of the text around it: int64 [n_tokens]. Of two that show as
    much it is the first."""
    window = np.zeros(n_tokens, dtype=np.int64)
    most = np.full(n_tokens, -1, dtype=np.int64)
    for number, (begin, end) in enumerate(windows):
        from_begin = np.arange(end - begin)
        # Of the two sides the one with less text counts.
        around = np.minimum(from_begin, from_begin[::-1])
        is_better = around > most[begin:end]
        most[begin:end][is_better] = around[is_better]
        window[begin:end][is_better] = number
    return window
