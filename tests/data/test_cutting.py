"""Rows of data that are longer than they may be: cut at the end that the config names, or out."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.e2e.small import folder_of, run_small
from tests.train.modules import ScriptedPolicy, captured, rows
from tests.train.test_update import step
from zoo.algorithms.dpo import DPO
from zoo.algorithms.sft import SFT
from zoo.config import ConfigError
from zoo.data.fitting import cut_group, cut_groups
from zoo.data.source import DatasetSource, Group
from zoo.data.tokenize import Truncation
from zoo.models.models import Models
from zoo.types import Prompt

START, END = Truncation.keep_start, Truncation.keep_end


def group(prompt: int, *completions: int) -> Group:
    """Prompt tokens 1, 2, …; completion tokens 11, 12, …"""
    ids = tuple(range(1, prompt + 1))
    texts = tuple("x" * n for n in completions)
    return Group(
        Prompt("p", token_ids=ids), tuple(tuple(range(11, 11 + n)) for n in completions), texts
    )


def shape(found: Group | None) -> tuple[tuple[int, ...], tuple[tuple[int, ...], ...]] | None:
    return None if found is None else (found.prompt.token_ids, found.completions)


def test_B63_keep_start_and_keep_end_of_one_row() -> None:
    # prompt 6, completion 6, room for 8
    assert shape(cut_group(group(6, 6), 8, START)) == ((1, 2, 3, 4, 5, 6), ((11, 12),))
    assert shape(cut_group(group(6, 6), 8, END)) == ((5, 6), (tuple(range(11, 17)),))
    assert cut_group(group(8, 6), 8, START) is None
    whole = group(2, 6)
    assert cut_group(whole, 8, START) is whole and cut_group(whole, 8, END) is whole


def test_B63_both_sides_of_a_pair_keep_one_prompt() -> None:
    # the longest completion (6) leaves room for 2 of the prompt, for the shorter one as well
    assert shape(cut_group(group(6, 6, 3), 8, END)) == (
        (5, 6),
        (tuple(range(11, 17)), (11, 12, 13)),
    )
    assert shape(cut_group(group(6, 6, 1), 8, START)) == (
        (1, 2, 3, 4, 5, 6),
        ((11, 12), (11,)),
    )
    assert cut_group(group(6, 9, 3), 8, END) is None  # no prompt would be left
    assert cut_group(group(8, 6, 1), 8, START) is None
    # a ranking's empty place stays one
    assert shape(cut_group(group(6, 6, 0), 8, START)) == ((1, 2, 3, 4, 5, 6), ((11, 12), ()))


def test_B63_rows_without_completion_are_dropped_and_counted() -> None:
    kept, told = cut_groups([group(6, 6), group(8, 6), group(1, 1)], 8, START)
    assert [g.completions for g in kept] == [((11, 12),), ((11,),)]
    assert told.startswith("1 of 3 training rows were cut to 8 tokens (keep_start), and 1 left out")
    assert cut_groups([group(1, 1)], 8, START)[1] == ""
    with pytest.raises(ConfigError, match=r"0 of 2 .* and 2 left out.*Raise train.max_row_tokens"):
        cut_groups([group(8, 6)] * 2, 8, START)


@pytest.mark.parametrize("how", [START, END])
def test_B63_what_is_left_trains_with_a_finite_loss(how: Truncation) -> None:
    kept, _ = cut_groups([group(6, 6), group(8, 6), group(3, 9)], 8, how)
    source = DatasetSource(kept, len(kept), 0, 0)
    batch = source.next(1).batch
    assert batch is not None and batch.input_ids.shape[1] == 8
    said = torch.where(batch.completion_mask, -1.0, 0.0)
    policy = ScriptedPolicy()
    _, metrics = step(
        batch.with_extra(logprobs=said), SFT(), Models(policy=policy), captured(policy=policy)
    )
    assert metrics["loss/policy"] == pytest.approx(1.0)


def test_B63_batch_of_empty_rows_is_a_loss_of_zero_with_a_graph_or_is_refused_by_row() -> None:
    batch = rows([2, 3], {})
    none = batch.replace(completion_mask=torch.zeros_like(batch.completion_mask))
    policy = ScriptedPolicy()
    trainables = captured(policy=policy)
    done, metrics = step(none, SFT(), Models(policy=policy), trainables)
    assert done.applied and metrics["loss/policy"] == metrics["grad_norm/policy"] == 0.0
    assert [float(g) for g in trainables["policy"].optimizer.grads] == [0.0]
    pair = rows([2, 3], {"ref_logprobs": [-1.0, -1.0]}, group_size=2)
    empty = pair.completion_mask & torch.tensor([[True], [False]])
    with pytest.raises(ValueError, match=r"no trained token in row\(s\) \[1\]"):
        step(pair.replace(completion_mask=empty), DPO(), Models(policy=policy), trainables)


def test_B63_run_cuts_where_the_config_says_so_and_tells(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ZOO_CACHE", str(tmp_path / "cache"))
    small = ["algorithm=sft", "train.steps=1", "evaluate.first=false", "evaluate.last=false"]
    small += ["train.max_row_tokens=12", "measure.memory=false"]
    with pytest.raises(ConfigError, match=r"more tokens than train.max_row_tokens of 12.*too_long"):
        run_small(tmp_path / "drop", *small)
    run_small(tmp_path / "cut", *small, "train.too_long=keep_end")
    told = (folder_of(tmp_path / "cut") / "warnings.jsonl").read_text()
    assert "were cut to 12 tokens (keep_end)" in told
    with pytest.raises(ConfigError, match=r"train.max_row_tokens must be at least 2"):
        run_small(tmp_path / "one", *small[:-2], "train.max_row_tokens=1")
