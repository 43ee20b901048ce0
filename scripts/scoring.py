"""Log-probabilities of many continuations at once.

A `Group` is some continuations of one beginning, such as the four answers to one question. To compute the beginning four
times would waste most of the work, so it stands once in a row, and the branches stand behind it, one after the other:

    row        the  cat  sat | on  a  | under  the
    position    0    1    2  | 3   4  |   3     4
    segment     0    0    0  | 1   1  |   2     2

Each branch has the positions that it would have right behind the beginning. The attention mask lets a token see what
stands before it in the beginning (segment 0) and in its own branch, and nothing of the other branches. So each token is
computed from the very context that it would have alone. Rows of like length share a forward.

That holds for a MiniMind. For a model of another class each branch has a row of its own, see `score_groups`.

Shape letters: B rows, T positions, C positions in a batch that predict something, H hidden, V vocabulary.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from transformers import PreTrainedModel

from model.model_minimind import MiniMindForCausalLM

# Targets whose logits are held together: 50 MB at a vocabulary of 6,400.
LOGITS_AT_ONCE = 2048


@dataclass
class Group:
    """prefix: ids, at least one. branches: ids that go on from there. starts: how many ids of each branch are only read."""

    prefix: Sequence[int]
    branches: Sequence[Sequence[int]]
    starts: list[int]

    @property
    def length(self) -> int:
        """Positions of its row: the last token of a branch is predicted but not read."""
        return len(self.prefix) + sum(len(branch) - 1 for branch in self.branches)

    @classmethod
    def of(cls, sequences: list[list[int]], starts: list[int], max_length: int) -> "Group":
        """Whole sequences of ids and where in each the scored part begins (at least 1) -> their Group.

        A sequence of more than max_length + 1 tokens loses its beginning, and then all of them lose as much.
        """
        longest = max(map(len, sequences))
        cut = max(0, longest - max_length - 1)
        if cut >= min(starts):
            raise ValueError(f"{longest - 1} positions, of which the scored ones alone exceed {max_length}")
        sequences = [ids[cut:] for ids in sequences]
        starts = [start - cut for start in starts]
        # No further than where the scored part of any begins: the prefix is only read.
        shared = 0
        while shared < min(starts) and len({ids[shared] for ids in sequences}) == 1:
            shared += 1
        return cls(sequences[0][:shared], [ids[shared:] for ids in sequences], [start - shared for start in starts])


@dataclass
class Score:
    """Of one branch: sum of the log-probabilities of its scored tokens in nats, and whether each is the likeliest."""

    logprob: float
    greedy: bool


def batches(groups: Sequence[Group], batch_tokens: int) -> Iterator[list[int]]:
    """Lists of indices into `groups`, longest rows first, of at most batch_tokens padded positions (or one row)."""
    # Stable, so equal lengths stay in their order.
    order = sorted(range(len(groups)), key=lambda i: -groups[i].length)
    batch: list[int] = []
    for i in order:
        # The first row of a batch is its longest, to which the others are padded.
        if batch and (len(batch) + 1) * groups[batch[0]].length > batch_tokens:
            yield batch
            batch = []
        batch.append(i)
    if batch:
        yield batch


@dataclass
class Rows:
    """Groups laid out in rows, and where their targets are predicted. ids, positions, segments: [B, T].

    places, targets, owners: of each target the flat position in [B*T] that predicts it, its id, and the number of its
    branch, counted through all groups.
    """

    ids: torch.Tensor
    positions: torch.Tensor
    segments: torch.Tensor
    places: list[int] = field(default_factory=list)
    targets: list[int] = field(default_factory=list)
    owners: list[int] = field(default_factory=list)
    n_branches: int = 0

    @classmethod
    def of(cls, groups: Sequence[Group]) -> "Rows":
        """A row for each group, as long as the longest of them."""
        B = len(groups)
        T = max(group.length for group in groups)
        # Padding has a segment of its own, which no token belongs to.
        rows = cls(
            ids=torch.zeros(B, T, dtype=torch.long),
            positions=torch.zeros(B, T, dtype=torch.long),
            segments=torch.full((B, T), -1),
        )
        for row, group in enumerate(groups):
            rows._lay_out(row, group)
        return rows

    def _lay_out(self, row: int, group: Group) -> None:
        """Write one group into its row."""
        n = len(group.prefix)
        self.ids[row, :n] = torch.tensor(group.prefix)
        self.positions[row, :n] = torch.arange(n)
        self.segments[row, :n] = 0
        first = row * self.ids.shape[1]
        at = n
        for segment, (branch, start) in enumerate(zip(group.branches, group.starts, strict=True), start=1):
            # The last token of a branch is predicted, and nothing after it: it is not read.
            read = len(branch) - 1
            self.ids[row, at : at + read] = torch.tensor(branch[:-1])
            self.positions[row, at : at + read] = torch.arange(n, n + read)
            self.segments[row, at : at + read] = segment
            # Token i of a branch is predicted by the position before it; the first one by the end of the prefix.
            before = [first + n - 1, *range(first + at, first + at + read)]
            self.places += before[start:]
            self.targets += branch[start:]
            self.owners += [self.n_branches] * (len(branch) - start)
            self.n_branches += 1
            at += read

    def attention_mask(self) -> torch.Tensor | None:
        """[B, 1, T, T], True: the query (third axis) sees the key (fourth axis). None: plain causal attention is right."""
        # One branch a row is a plain text, with padding at its end that no earlier position sees.
        if int(self.segments.max()) <= 1:
            return None
        T = self.ids.shape[1]
        of_key = self.segments.unsqueeze(1)  # [B, 1, T]
        of_query = self.segments.unsqueeze(2)  # [B, T, 1]
        is_context = (of_key == 0) | (of_query == of_key)  # [B, T, T]
        is_earlier = torch.ones(T, T, dtype=torch.bool).tril()
        return (is_context & is_earlier).unsqueeze(1)


def score_groups(model: PreTrainedModel, groups: Sequence[Group]) -> list[list[Score]]:
    """[[Score of each branch] of each group]; of a MiniMind in one forward."""
    if isinstance(model, MiniMindForCausalLM):
        return score_rows(model, groups)
    # A model of another class may compute something else from a mask or from positions of ours, or read neither. So each
    # branch stands behind a beginning of its own, in a plain row.
    alone = []
    for group in groups:
        for branch, start in zip(group.branches, group.starts, strict=True):
            alone.append(Group(group.prefix, [branch], [start]))
    of_branches: dict[int, Score] = {}
    # Its forward gives the logits of every position.
    for batch in batches(alone, LOGITS_AT_ONCE):
        found = score_rows(model, [alone[i] for i in batch])
        for i, (score,) in zip(batch, found, strict=True):
            of_branches[i] = score
    in_order = iter([of_branches[i] for i in range(len(alone))])
    return [[next(in_order) for _ in group.branches] for group in groups]


@torch.no_grad()
def score_rows(model: PreTrainedModel, groups: Sequence[Group]) -> list[list[Score]]:
    """[[Score of each branch] of each group], in one forward with a row for each group."""
    rows = Rows.of(groups)
    logprobs, hits = target_logprobs(model, rows)
    owners = torch.tensor(rows.owners)
    # In fp64: a sum over thousands of tokens keeps its digits.
    sums = torch.zeros(rows.n_branches, dtype=torch.float64).index_add(0, owners, logprobs.double())
    misses = torch.zeros(rows.n_branches).index_add(0, owners, (~hits).float())
    totals = iter(zip(sums.tolist(), misses.tolist(), strict=True))
    scores = []
    for group in groups:
        of_group = []
        for _ in group.branches:
            total, missed = next(totals)
            of_group.append(Score(total, missed == 0))
        scores.append(of_group)
    return scores


def target_logprobs(model: PreTrainedModel, rows: Rows) -> tuple[torch.Tensor, torch.Tensor]:
    """-> (log-probability, whether it is the likeliest token) of each target, [C] on the CPU."""
    targets = torch.tensor(rows.targets, device=model.device)
    logprobs = []
    hits = []
    for logits, ids in zip(target_logits(model, rows), targets.split(LOGITS_AT_ONCE), strict=True):
        chosen = logits.gather(1, ids.unsqueeze(1)).squeeze(1)
        logprobs.append(chosen - logits.logsumexp(-1))
        hits.append(logits.argmax(-1) == ids)
    return torch.cat(logprobs).cpu(), torch.cat(hits).cpu()


def target_logits(model: PreTrainedModel, rows: Rows) -> Iterator[torch.Tensor]:
    """Yields the logits of LOGITS_AT_ONCE targets at a time, [at most so many, V] in fp32."""
    device = model.device
    ids = rows.ids.to(device)
    places = torch.tensor(rows.places, device=device)
    if not isinstance(model, MiniMindForCausalLM):
        # Some scale or bound what the head gives, so they are asked for the logits themselves.
        of_all = model(input_ids=ids, use_cache=False).logits.flatten(0, 1)  # [B*T, V]
        for some in places.split(LOGITS_AT_ONCE):
            yield of_all[some].float()
        return
    mask = rows.attention_mask()
    if mask is not None:
        mask = mask.to(device)
    output = model(ids, attention_mask=mask, position_ids=rows.positions.to(device), logits_to_keep=1)
    hidden = output.last_hidden_state.flatten(0, 1)[places]  # [C, H]
    # The logits [C, V] of a whole batch would be the largest tensor of all: a part of them at a time.
    for some in hidden.split(LOGITS_AT_ONCE):
        yield model.lm_head(some).float()
