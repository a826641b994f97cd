"""Batches from data that exist: the order, the groups, and precomputed reference log-probs."""

from __future__ import annotations

import dataclasses
import itertools
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.models.tiny import llama, tokens
from zoo.algorithms.dpo import DPO
from zoo.batch import Batch, row_key
from zoo.data import source as source_module
from zoo.data.reference_cache import reference_logprobs
from zoo.data.source import DatasetSource, Group
from zoo.models.models import Models
from zoo.models.policy import Policy
from zoo.types import Prompt


def pair_groups(count: int, seed: int = 0) -> list[Group]:
    generator = torch.Generator().manual_seed(seed)
    groups = []
    for i in range(count):
        prompt = Prompt(id=f"p{i}", token_ids=tuple(tokens(generator, 1 + i % 4)))
        sides = tuple(tuple(tokens(generator, 1 + (i + k) % 5)) for k in range(2))
        groups.append(Group(prompt, sides, ("good", "bad")))
    return groups


def made(groups: list[Group], per_step: int = 4, seed: int = 0) -> DatasetSource:
    return DatasetSource(groups, per_step, seed, pad_token_id=2)


def ids(batch: Batch | None) -> tuple[str, ...]:
    assert batch is not None
    return batch.prompt_ids


# --- order ----------------------------------------------------------------------------------------


def test_B88_each_group_comes_once_an_epoch_and_epochs_differ() -> None:
    source = made(pair_groups(12))
    taken = list(itertools.chain(*(ids(source.next(step).batch) for step in range(1, 10))))
    epochs = [tuple(taken[i : i + 12]) for i in (0, 12, 24)]
    assert all(sorted(e) == sorted(f"p{i}" for i in range(12)) for e in epochs)
    assert len(set(epochs)) == 3


def test_a_resumed_source_goes_on_at_its_place() -> None:
    whole = made(pair_groups(10), per_step=3)
    batches = [whole.next(step).batch for step in range(1, 9)]
    cut = made(pair_groups(10), per_step=3)
    for step in range(1, 5):
        cut.next(step)
    resumed = made(pair_groups(10), per_step=3)
    resumed.load_state_dict(cut.state_dict())
    for step in range(5, 9):
        assert ids(resumed.next(step).batch) == ids(batches[step - 1])


def test_the_content_hash_is_of_everything_that_a_group_trains_on() -> None:
    group = Group(Prompt("p", token_ids=(1, 2)), ((3, 4), (5,)), ("a", "b"), labels=(1.0, 0.0))
    changes: list[dict[str, Any]] = [
        {},
        {"prompt": Prompt("p", token_ids=(1, 3))},
        {"completions": ((5,), (3, 4))},
        {"completions": ((3,), (4, 5))},
        {"prompt": Prompt("p", token_ids=(1,)), "completions": ((2, 3, 4), (5,))},
        {"labels": (0.0, 1.0)},
        {"strengths": (0.5, 0.0)},
        {"present": (True, False)},
    ]
    sets = [[dataclasses.replace(group, **change), *pair_groups(2)] for change in changes]
    sets += [sets[0][:2], sets[0][::-1]]
    assert len({made(groups).content_hash for groups in sets}) == len(sets)
    again = [dataclasses.replace(group, texts=("b", "c")), *pair_groups(2)]  # shown, not trained on
    assert made(again).state_dict() == made(sets[0]).state_dict()


def test_two_processes_share_the_groups_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = [ids(made(pair_groups(8)).next(1).batch)]
    monkeypatch.setattr(source_module, "world_size", lambda: 2)
    parts = []
    for rank in (0, 1):
        monkeypatch.setattr(source_module, "rank", lambda rank=rank: rank)
        parts.append(ids(made(pair_groups(8)).next(1).batch))
    assert parts[0] + parts[1] == alone[0]


def test_visited_are_the_groups_that_the_steps_read() -> None:
    for steps in (0, 1, 2, 3, 7):
        source = made(pair_groups(10))
        visited = [g.prompt.id for g in source.visited(steps)]
        read = {p for step in range(steps) for p in ids(source.next(step).batch)}
        assert len(set(visited)) == len(visited)
        assert set(visited) == read


# --- batches --------------------------------------------------------------------------------------


def test_a_pair_is_a_group_of_two_with_the_chosen_first() -> None:
    group = Group(Prompt(id="q", token_ids=(7, 8)), ((3, 4, 2), (5,)), ("good", "bad"))
    sampled = made([group], per_step=1).next(1)
    batch = sampled.batch
    assert batch is not None
    assert batch.input_ids.tolist() == [[7, 8, 3, 4, 2], [7, 8, 5, 2, 2]]
    assert batch.completion_mask.int().tolist() == [[0, 0, 1, 1, 1], [0, 0, 1, 0, 0]]
    assert batch.group_size == 2 and batch.ref_logprobs is None and batch.rewards is None
    assert batch.row_keys.tolist() == group.row_keys()
    assert group.row_keys() == [row_key([7, 8, 3, 4, 2], 2), row_key([7, 8, 5], 2)]
    assert [sampled.texts[k].completion.text for k in group.row_keys()] == ["good", "bad"]


def test_labels_become_rewards() -> None:
    groups = [
        Group(Prompt(id=str(i), token_ids=(7,)), ((9 + i,),), ("x",), labels=(float(i),))
        for i in (0, 1)
    ]
    batch = made(groups, per_step=2).collate(groups)
    assert batch.rewards is not None and batch.rewards.tolist() == [0.0, 1.0]
    assert batch.scored is not None and batch.scored.all()


# --- reference log-probs, computed once -----------------------------------------------------------


class Reference:
    """A reference whose passes are counted."""

    def __init__(self, seed: int = 0) -> None:
        self.policy = Policy(llama(seed))
        self.passes = 0

    def __call__(self, batch: Batch) -> torch.Tensor:
        self.passes += 1
        return Models(policy=None, reference=self.policy).reference_logprobs(batch)


def cached(
    source: DatasetSource, folder: Path, reference: Reference, steps: int = 3, **changes: Any
) -> dict[int, torch.Tensor]:
    settings = {"model_hash": "m", "temperature": 1.0, **changes}
    return reference_logprobs(source, steps, folder, compute=reference, **settings)


def test_B60_precomputed_is_on_the_fly_after_any_shuffle(tmp_path: Path) -> None:
    reference = Reference()
    groups = pair_groups(10)
    found = cached(made(groups), tmp_path, reference)
    for seed in (0, 1, 2):  # other seeds: other orders, other neighbours and padding
        source = made(groups, per_step=3, seed=seed)
        for step in range(1, 6):
            source.ref_logprobs = found
            batch = source.next(step).batch
            assert batch is not None and batch.ref_logprobs is not None
            fresh = reference(batch.replace(ref_logprobs=None))
            mask = batch.completion_mask
            assert (batch.ref_logprobs - fresh)[mask].abs().max() < 1e-5
            assert not bool(batch.ref_logprobs[~mask].any())


def test_rows_that_are_there_again_are_computed_once(tmp_path: Path) -> None:
    once, again = Reference(), Reference()
    groups = pair_groups(20)
    found = cached(made(groups), tmp_path / "once", once, steps=5)
    told: list[tuple[int, int]] = []
    repeated = cached(
        made([*groups, *groups, *groups]),
        tmp_path / "again",
        again,
        steps=15,
        progress=lambda done, total: told.append((done, total)),
    )
    assert again.passes == once.passes == 1  # 20 groups, of at most 32 a pass
    assert told == [(60, 60)]  # of the places that are read
    assert found.keys() == repeated.keys()
    for key, values in found.items():
        torch.testing.assert_close(values, repeated[key])


def test_dpo_uses_the_precomputed_ones_and_needs_no_reference(tmp_path: Path) -> None:
    reference = Reference()
    source = made(pair_groups(10))
    source.ref_logprobs = cached(source, tmp_path, reference)
    batch = source.next(1).batch
    assert batch is not None
    prepared = DPO().prepare(batch, Models(policy=None))
    assert prepared.ref_logprobs is batch.ref_logprobs


def test_B60_the_second_run_computes_nothing(tmp_path: Path) -> None:
    reference = Reference()
    first = cached(made(pair_groups(10)), tmp_path, reference)
    passes = reference.passes
    second = cached(made(pair_groups(10)), tmp_path, reference)
    assert passes > 0 and reference.passes == passes
    assert first.keys() == second.keys()
    assert all(torch.equal(first[key], second[key]) for key in first)


@pytest.mark.parametrize("change", ["token", "boundary", "model", "temperature"])
def test_B60_one_changed_token_or_model_is_a_miss(tmp_path: Path, change: str) -> None:
    reference = Reference()
    groups = pair_groups(10)
    cached(made(groups), tmp_path, reference)
    passes = reference.passes
    changed, key = list(groups), {}
    prompt, sides = groups[3].prompt, groups[3].completions
    if change == "token":
        one = (sides[0], (*sides[1][:-1], sides[1][-1] ^ 1))
        changed[3] = Group(prompt, one, groups[3].texts)
    elif change == "boundary":  # the same tokens, one moved from the completion to the prompt
        both = Prompt(id=prompt.id, token_ids=(*prompt.token_ids, sides[1][0]))
        changed[3] = Group(both, (sides[0], sides[1][1:]), groups[3].texts)
    else:
        key = {"model": {"model_hash": "n"}, "temperature": {"temperature": 0.9}}[change]
    cached(made(changed), tmp_path, reference, **key)
    assert reference.passes > passes


def test_rows_that_the_run_does_not_reach_are_not_computed(tmp_path: Path) -> None:
    source = made(pair_groups(40), per_step=4)
    found = cached(source, tmp_path, Reference(), steps=2)
    assert set(found) == {k for g in source.visited(2) for k in g.row_keys()}
    assert len(found) == 16


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-7])


def alter(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-2] ^= 64  # inside a number
    file.write_bytes(bytes(data))


def empty(file: Path) -> None:
    file.write_bytes(b"")


def pipe(file: Path) -> None:  # whose reader would wait for ever
    file.unlink()
    os.mkfifo(file)


@pytest.mark.parametrize("damage", [truncate, alter, empty, pipe])
def test_B60_a_damaged_file_is_made_anew(tmp_path: Path, damage: Any) -> None:
    reference = Reference()
    right = cached(made(pair_groups(10)), tmp_path, reference)
    (file,) = tmp_path.glob("*.safetensors")
    damage(file)
    again = cached(made(pair_groups(10)), tmp_path, reference)
    assert all(torch.equal(right[key], again[key]) for key in right)
    passes = reference.passes
    cached(made(pair_groups(10)), tmp_path, reference)
    assert reference.passes == passes, "the file was not mended"


def test_a_file_of_another_reference_is_made_anew(tmp_path: Path) -> None:
    reference, other = Reference(), Reference(seed=1)
    right = cached(made(pair_groups(10)), tmp_path, reference)
    (file,) = tmp_path.glob("*.safetensors")
    wrong = cached(made(pair_groups(10)), tmp_path, other, model_hash="n")
    (foreign,) = set(tmp_path.glob("*.safetensors")) - {file}
    file.write_bytes(foreign.read_bytes())  # a copy by hand; whole, and of the same rows
    again = cached(made(pair_groups(10)), tmp_path, reference)
    assert all(torch.equal(right[key], again[key]) for key in right)
    assert not any(torch.equal(right[key], wrong[key]) for key in right)
    passes = reference.passes
    cached(made(pair_groups(10)), tmp_path, reference)
    assert reference.passes == passes, "the file was not mended"
