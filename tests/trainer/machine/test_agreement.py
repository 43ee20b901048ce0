"""What ranks are compared by. References: lines written out, and the list of all flags."""

import pytest
import torch
import torch.distributed as dist

from common.errors import SaidByAnotherRank, UserError
from tests.common.test_settings import DEFAULTS
from trainer.machine import agreement
from trainer.machine.agreement import (
    OWN_OF_A_MACHINE,
    compare_precision,
    compare_settings,
    compare_with_main,
)
from trainer.machine.ranks import Ranks
from trainer.pretrain.settings import parse_args


def test_one_process_compares_nothing():
    compare_with_main(Ranks(), {"--seed": 1})


@pytest.fixture
def of_rank_0(monkeypatch):
    """Facts that come from rank 0; and what the ranks say."""
    facts, said = {}, []

    def broadcast(message, src):
        message[0] = {**message[0], **facts}

    def first_said(ranks, text):
        said.append(text)
        return text

    monkeypatch.setattr(dist, "broadcast_object_list", broadcast)
    monkeypatch.setattr(agreement, "first_said", first_said)
    return facts, said


def test_another_rank_says_it_to_rank_0(of_rank_0):
    facts, said = of_rank_0
    other = Ranks(rank=3, world_size=4)
    compare_settings(other, parse_args(["--seed", "5"]))
    facts["--seed"] = 42
    with pytest.raises(SaidByAnotherRank):
        compare_settings(other, parse_args(["--seed", "5"]))
    assert said[0] == "" and said[1].startswith("rank 3 on ") and "has --seed 5 (rank 0: 42): all ranks need" in said[1]


@pytest.mark.parametrize("flag", ["--data_path", "--mixture", "--from_weight", "--tokenizer_path"])
def test_files_may_lie_elsewhere_on_each_machine(monkeypatch, flag):
    """Reference: the facts that rank 0 sends."""
    sent = []
    monkeypatch.setattr(agreement, "first_said", lambda ranks, text: text)
    monkeypatch.setattr(dist, "broadcast_object_list", lambda message, src: sent.append(message[0]))
    compare_settings(Ranks(world_size=2), parse_args([flag, "/home/a/file"]))

    def receive(message, src):
        message[0] = sent[0]

    monkeypatch.setattr(dist, "broadcast_object_list", receive)
    compare_settings(Ranks(rank=1, world_size=2), parse_args([flag, "/home/b/file"]))


def test_rank_0_prints_it(of_rank_0, monkeypatch):
    monkeypatch.setattr(agreement, "first_said", lambda ranks, text: text or "rank 1 has another seed")
    with pytest.raises(UserError, match="rank 1 has another seed"):
        compare_settings(Ranks(world_size=2), parse_args([]))


def test_other_packages_are_a_difference(of_rank_0):
    facts, said = of_rank_0
    facts["torch"] = "1.0"
    with pytest.raises(SaidByAnotherRank):
        compare_settings(Ranks(rank=1, world_size=2), parse_args([]))
    assert "(rank 0: 1.0)" in said[0]


def test_a_precision_that_a_rank_has_chosen_for_its_hardware_is_a_difference(of_rank_0):
    """All of them were given --dtype bfloat16."""
    facts, said = of_rank_0
    other = Ranks(rank=1, world_size=2)
    facts["precision"] = "bfloat16"
    compare_precision(other, torch.bfloat16)
    with pytest.raises(SaidByAnotherRank):
        compare_precision(other, torch.float16)
    assert said[0] == ""
    assert (
        "has precision float16 (rank 0: bfloat16): name one that all of them have: --dtype float16 on GPUs" in said[1]
    )


def test_what_machines_may_have_of_their_own_are_flags():
    names = {name for defaults in DEFAULTS.values() for name in defaults} | {"data_dir"}
    assert names >= OWN_OF_A_MACHINE
