"""Log-probabilities of many continuations at once.

A `Group` is some continuations of one beginning, which is computed once: the tokens form a tree in one row, and the
attention mask lets each branch see the beginning and itself. Rows of like length share a forward.

Shape letters: B rows, T positions, C positions in a batch that predict something, H hidden, V vocabulary.
"""

from dataclasses import dataclass

import torch

from model.model_minimind import MiniMindForCausalLM

# Targets whose logits are held together: 50 MB at a vocabulary of 6,400.
LOGITS_AT_ONCE = 2048


@dataclass
class Group:
    """prefix: ids, at least one. branches: ids that go on from there. starts: how many ids of each branch are only read."""

    prefix: list
    branches: list
    starts: list

    @property
    def length(self):
        """Positions of its row: the last token of a branch is predicted but not read."""
        return len(self.prefix) + sum(len(branch) - 1 for branch in self.branches)

    @classmethod
    def of(cls, sequences, starts, max_length):
        """Whole sequences of ids and where in each the scored part begins (at least 1) -> their Group.

        A sequence of more than max_length + 1 tokens loses its beginning, and then all of them lose as much.
        """
        cut = max(0, max(map(len, sequences)) - max_length - 1)
        if cut >= min(starts):
            raise ValueError(
                f"{max(map(len, sequences)) - 1} positions, of which the scored ones alone exceed {max_length}"
            )
        sequences, starts = [ids[cut:] for ids in sequences], [start - cut for start in starts]
        shared = 0
        while shared < min(starts) and len({ids[shared] for ids in sequences}) == 1:
            shared += 1
        return cls(sequences[0][:shared], [ids[shared:] for ids in sequences], [start - shared for start in starts])


@dataclass
class Score:
    """Of one branch: sum of the log-probabilities of its scored tokens in nats, and whether each is the likeliest."""

    logprob: float
    greedy: bool


def batches(groups, batch_tokens):
    """Lists of indices into `groups`, longest rows first, of at most batch_tokens padded positions (or one row)."""
    order = sorted(range(len(groups)), key=lambda i: (-groups[i].length, i))
    batch = []
    for i in order:
        if batch and (len(batch) + 1) * groups[batch[0]].length > batch_tokens:
            yield batch
            batch = []
        batch.append(i)
    if batch:
        yield batch


@torch.no_grad()
def score_groups(model, groups):
    """[[Score of each branch] of each group], in one forward."""
    B, T = len(groups), max(group.length for group in groups)
    ids, positions, segments = (torch.zeros(B, T, dtype=torch.long) for _ in range(3))
    # Padding; 0: the prefix; 1, 2, ...: a branch.
    segments -= 1
    owners, places, targets = (
        [],
        [],
        [],
    )  # of each target: its branch, counted through; the flat position that predicts it
    branch_number = 0
    for row, group in enumerate(groups):
        n = len(group.prefix)
        ids[row, :n], positions[row, :n], segments[row, :n] = torch.tensor(group.prefix), torch.arange(n), 0
        at = n
        for k, (branch, start) in enumerate(zip(group.branches, group.starts, strict=True), start=1):
            read = len(branch) - 1
            ids[row, at : at + read] = torch.tensor(branch[:-1])
            positions[row, at : at + read] = torch.arange(n, n + read)
            segments[row, at : at + read] = k
            # The position before each token.
            before = [row * T + n - 1, *range(row * T + at, row * T + at + read)]
            places += before[start:]
            targets += branch[start:]
            owners += [branch_number] * (len(branch) - start)
            at, branch_number = at + read, branch_number + 1
    logprobs, hits = target_logprobs(model, ids, positions, segments, places, targets)
    owners = torch.tensor(owners)
    sums = torch.zeros(branch_number, dtype=torch.float64).index_add(0, owners, logprobs.double()).tolist()
    misses = torch.zeros(branch_number).index_add(0, owners, (~hits).float()).tolist()
    scores = iter([Score(total, missed == 0) for total, missed in zip(sums, misses, strict=True)])
    return [[next(scores) for _ in group.branches] for group in groups]


def target_logprobs(model, ids, positions, segments, places, targets):
    """-> (log-probability, whether it is the likeliest token) of each target, [C] on the CPU.

    ids, positions, segments [B, T]; places: positions in the flattened [B*T] that predict the targets.
    """
    # One branch a row, padding at its end: plain causal attention is right.
    mask = None
    if int(segments.max()) > 1:
        ancestor = (segments.unsqueeze(1) == 0) | (segments.unsqueeze(2) == segments.unsqueeze(1))
        mask = (ancestor & torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).tril()).unsqueeze(1)  # [B, 1, T, T]
    device = model.device
    hidden = hidden_states(model, ids.to(device), positions.to(device), None if mask is None else mask.to(device))
    hidden = hidden.flatten(0, 1)[torch.tensor(places, device=device)]  # [C, H]
    head, targets = model.get_output_embeddings(), torch.tensor(targets, device=device)
    logprobs, hits = [], []
    for some, ids in zip(hidden.split(LOGITS_AT_ONCE), targets.split(LOGITS_AT_ONCE), strict=True):
        logits = head(some).float()
        chosen = logits.gather(1, ids.unsqueeze(1)).squeeze(1)
        logprobs.append(chosen - logits.logsumexp(-1))
        hits.append(logits.argmax(-1) == ids)
    return torch.cat(logprobs).cpu(), torch.cat(hits).cpu()


def hidden_states(model, ids, positions, mask):
    """The last hidden states [B, T, H], final norm included, of our model or one of transformers' own."""
    if isinstance(model, MiniMindForCausalLM):
        return model(ids, attention_mask=mask, position_ids=positions, logits_to_keep=1).last_hidden_state
    return model.base_model(
        input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=False
    ).last_hidden_state
