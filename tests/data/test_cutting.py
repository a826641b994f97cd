"""Rows of data that are longer than they may be: cut at the end that the config names, or out."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from tests.e2e.small import SMALL, folder_of, run_small
from tests.train.modules import ScriptedPolicy, captured, rows
from tests.train.test_update import step
from zoo.algorithms.dpo import DPO
from zoo.algorithms.sft import SFT
from zoo.compose import compose
from zoo.config import ConfigError
from zoo.data.fitting import cut_group, cut_groups, cut_texts, distinct_groups, fitting_prompts
from zoo.data.left_out import LeftOut
from zoo.data.source import DatasetSource, Group
from zoo.data.tokenize import Truncation
from zoo.data.tokenizer import arithmetic_tokenizer
from zoo.instantiate import structured
from zoo.models.loading import save_policy
from zoo.models.models import Models
from zoo.train.run import run
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


def test_texts_are_cut_to_the_context_and_that_is_said() -> None:
    texts = ((1, 2, 3), (4, 5, 6, 7, 8), (9, 10, 11, 12))
    with pytest.warns(LeftOut, match=r"^2 of 3 texts of the set guard .* of 3 tokens .* has 5\)"):
        found = cut_texts(texts, 3, "texts of the set guard")
    assert found == ((1, 2, 3), (4, 5, 6), (9, 10, 11))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert cut_texts(texts, 5, "") == texts == cut_texts(texts, None, "")
        assert cut_texts((), 5, "") == ()


def test_texts_longer_than_a_table_of_positions_end_no_run(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    rows = [{"prompt": f"{i}?", "completion": str(i)} for i in range(30)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    model = GPT2LMHeadModel(
        GPT2Config(vocab_size=512, n_positions=20, n_embd=32, n_layer=1, n_head=2)
    )
    save_policy(model, arithmetic_tokenizer(), tmp_path / "gpt2")
    small = [one for one in SMALL if not one.startswith(("data.", "model"))]
    settings = [f"data.path={file}", "data.kind=examples", "train.steps=1", "evaluate.every=0"]
    settings += ["algorithm=sft", "data=jsonl", "model=hub", f"model.path={tmp_path / 'gpt2'}"]
    run(structured(compose([*small, *settings, f"output={tmp_path / 'out'}"])))
    (_, last) = (folder_of(tmp_path / "out") / "evals.jsonl").read_text().splitlines()
    told = json.loads(last)
    assert told["set"] == "guard" and told["n_tokens"] <= 19 * told["n_texts"]
    warned = (folder_of(tmp_path / "out") / "warnings.jsonl").read_text()
    assert "texts of the set guard are longer than the model's context of 20 tokens" in warned


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
    for odd, how, alone, other in (
        (group(8, 6), START, "prompt", "keep_end"),
        (group(1, 9, 8), END, "completion", "keep_start"),  # no prompt would be left of a pair
    ):
        fills = rf"0 of 5 .*, and 5 left out, where a {alone} alone fills "
        named = r"=8 \(p, p, p, p and 1 more\)"
        way_out = rf"raise it, or use train.too_long={other}\.$"
        with pytest.raises(ConfigError, match=f"{fills}train.max_row_tokens{named}: {way_out}"):
            cut_groups([odd] * 5, 8, how)
        assert len(cut_groups([odd], 8, END if how is START else START)[0]) == 1
        with pytest.raises(ConfigError, match=f"{fills}the model's context{named}: use a model"):
            cut_groups([odd] * 5, 8, how, "the model's context")


def test_prompts_that_alone_fill_the_context_are_not_to_be_shortened_by_what_comes_after() -> None:
    prompts = [Prompt("p", token_ids=(1,) * 8)]
    with pytest.raises(ConfigError, match=r"p \(12\)\. Set rollout.max_new_tokens to at most 2 "):
        fitting_prompts(prompts, 4, 10, "training prompts")
    larger = r"Prompts alone fill it: use a model .*model\.architecture\.max_position_embeddings"
    with pytest.raises(ConfigError, match=larger):
        fitting_prompts(prompts, 4, 8, "training prompts")


A, B, AB = (1, 9), (2, 9), (1, 2, 9)


@pytest.mark.parametrize(
    ("completions", "labels", "present", "kept"),
    [
        ((A, B), (), (), True),
        ((A, A), (), (), False),  # a pair: each place is a rank
        ((A, B, AB), (2.0, 1.0, 0.0), (), True),
        ((A, B, A), (2.0, 1.0, 0.0), (), False),
        ((A, B, A), (1.0, 0.0, 1.0), (), True),  # equals among equals
        ((A, B, (), ()), (1.0, 0.0, 0.0, 0.0), (True, True, False, False), True),
        ((A, (), ()), (1.0, 0.0, 0.0), (True, True, False), False),  # not written
        (((),), (), (), False),
        ((A,), (1.0,), (), True),
    ],
)
def test_groups_that_cannot_be_told_apart_are_left_out(
    completions: tuple[tuple[int, ...], ...],
    labels: tuple[float, ...],
    present: tuple[bool, ...],
    kept: bool,
) -> None:
    texts = ("",) * len(completions)
    one = Group(Prompt("odd", token_ids=(5,)), completions, texts, labels, (), present)
    assert distinct_groups([group(1, 1)])[1] == ""
    found, told = distinct_groups([group(1, 1), one])
    assert (one in found) == kept and len(found) == 1 + kept
    assert told.startswith("" if kept else "1 of 2 training rows ") and bool(told) != kept
    if not kept:
        assert "odd. They are left out." in told
        with pytest.raises(ConfigError, match=r"2 of 2 .*odd, odd\. Nothing is left to train on"):
            distinct_groups([one, one])


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


@pytest.mark.parametrize("algorithm", ["dpo", "orpo", "reward_model"])
def test_pairs_that_the_cut_makes_equal_are_told_and_not_trained_or_judged(
    algorithm: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ZOO_CACHE", str(tmp_path / "cache"))
    long = "1 " * 30
    rows = [{"prompt": f"q{i}", "chosen": long + "a", "rejected": long + "b"} for i in range(4)]
    words = [one for one in SMALL if not one.startswith("data.")]
    words += [f"algorithm={algorithm}", "data=jsonl", f"data.path={tmp_path / 'rows.jsonl'}"]
    words += ["data.kind=pairs", "train.steps=1", "train.max_row_tokens=20", "train.groups=2"]
    words += ["train.too_long=keep_start", f"output={tmp_path / 'out'}", "measure.memory=false"]
    words += ["evaluate.heldout_pairs=0.5"] if algorithm == "reward_model" else []

    def train(rows: list[dict[str, str]]) -> Path:
        (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
        run(structured(compose(words)))
        return folder_of(tmp_path / "out")

    with pytest.raises(ConfigError, match=r"4 of 4 training rows have the same tokens .*other end"):
        train(rows)
    # Here a stop token that the data spell is all that the two have in common.
    rows += [{"prompt": f"p{i}", "chosen": "1<eos>a", "rejected": "1<eos>b"} for i in range(4)]
    folder = train(rows)
    told = (folder / "warnings.jsonl").read_text()
    assert "4 of 8 training rows have the same tokens" in told and "jsonl:1, " in told
    metrics = json.loads((folder / "metrics.jsonl").read_text())
    assert metrics["length/mean"] == 7  # 1 < e os > a, and the stop; a cut row has 18 or so
    judged = (folder / "eval_samples.jsonl").read_text()
    assert ("1<eos>a" in judged) == (algorithm == "reward_model") and "1 1" not in judged
