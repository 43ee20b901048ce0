"""Windows over a text. Reference: a loop over its tokens."""

from dataset.tokenizing.windows import window_of_tokens, windows_of


def test_windows_overlap_and_hold_every_token():
    for n_tokens in (0, 1, 5, 6, 7, 13, 40):
        for room, stride in ((5, 2), (5, 5), (5, 9), (8, 1)):
            windows = windows_of(n_tokens, room, stride)
            assert {i for begin, end in windows for i in range(begin, end)} == set(range(n_tokens))
            assert all(end - begin == room for begin, end in windows[:-1]) and windows[-1][1] == n_tokens
            begins = [begin for begin, _ in windows]
            assert begins == [min(stride, room) * k for k in range(len(windows))]


def test_a_token_is_taken_from_the_window_with_most_text_around_it():
    """Reference: of each token, the windows that hold it, one by one."""
    for n_tokens in (1, 5, 6, 7, 13, 40):
        for room, stride in ((5, 2), (8, 4), (8, 1), (100, 50)):
            windows = windows_of(n_tokens, room, stride)
            chosen = window_of_tokens(windows, n_tokens)
            for token in range(n_tokens):
                around = [min(token - begin, end - 1 - token) if begin <= token < end else -1 for begin, end in windows]
                assert chosen[token] == around.index(max(around))
