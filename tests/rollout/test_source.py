"""The rollout source: whole groups in order, abstentions, refills, and honest counts."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from zoo.batch import Batch, Scale, row_key
from zoo.config import ConfigError
from zoo.functional import dead_groups
from zoo.rewards.check import RESERVED, RewardError
from zoo.rollout import source as source_module
from zoo.rollout.engine import Sampling
from zoo.rollout.source import RolloutSource, Sampled
from zoo.types import Completion, Prompt, RewardOutput


class Scripted:
    """An engine that answers prompt p, sample i with the tokens [100 + p, i, stop]."""

    def __init__(self) -> None:
        self.asked: list[tuple[list[int], list[str], tuple[int | str, ...]]] = []
        self.synced: list[Any] = []

    def generate(
        self, prompts: Sequence[Sequence[int]], keys: Sequence[str], n: int, sampling: Sampling
    ) -> list[list[Completion]]:
        self.asked.append(([p[0] for p in prompts], list(keys), sampling.seed))
        return [
            [
                Completion(
                    f"{p[0]}/{i}",
                    (100 + p[0], i, 2)[: 2 + i % 2],
                    (-0.5,) * (2 + i % 2),
                    i % 2 == 0,
                )
                for i in range(n)
            ]
            for p in prompts
        ]

    def sync(self, policy: Any) -> None:
        self.synced.append(policy)


Scorer = Callable[[int, int], float | None]


def by_place(scorer: Scorer) -> Any:
    """A reward of (prompt number, sample number)."""

    def reward(prompts: list[Prompt], completions: list[Completion]) -> RewardOutput:
        pairs = [tuple(map(int, c.text.split("/"))) for c in completions]
        assert [p.token_ids[0] for p in prompts] == [p for p, _ in pairs]
        total = [scorer(p, i) for p, i in pairs]
        parts: list[float | None] = [None if t is None else t / 2 for t in total]
        reasons = ["unparsed" if t is None else "" for t in total]
        return RewardOutput(total, {"half": parts}, reasons)

    return reward


def make(
    scorer: Scorer = lambda p, i: float(i % 2),
    *,
    prompts: int = 9,
    groups: int = 3,
    group_size: int = 2,
    keep: Callable[[Batch], torch.Tensor] | None = None,
    max_rounds: int = 1,
    shuffle: bool = False,
    seed: int = 0,
) -> RolloutSource:
    made = RolloutSource(
        [Prompt(id=f"p{i}", token_ids=(i, 50 + i)) for i in range(prompts)],
        Scripted(),
        by_place(scorer),
        groups=groups,
        group_size=group_size,
        sampling=Sampling(0.9, 3, (2,)),
        seed=seed,
        pad_token_id=2,
        keep=keep or (lambda batch: torch.ones(batch.n_groups, dtype=torch.bool)),
        max_rounds=max_rounds,
        timer=lambda name: nullcontext(),
    )
    made.order.shuffle = shuffle
    return made


def alive(batch: Batch) -> torch.Tensor:
    assert batch.rewards is not None
    return ~dead_groups(batch.rewards, batch.group_size, batch.scored).dead


def row_prompts(sampled: Sampled) -> list[int]:
    assert sampled.batch is not None
    return sampled.batch.input_ids[:, 0].tolist()


# --- order ----------------------------------------------------------------------------------------


def test_B88_prompts_come_once_an_epoch_with_their_samples_together() -> None:
    source = make()
    assert [row_prompts(source.next(step)) for step in (1, 2, 3)] == [
        [0, 0, 1, 1, 2, 2],
        [3, 3, 4, 4, 5, 5],
        [6, 6, 7, 7, 8, 8],
    ]


def test_B88_two_processes_share_the_prompts_without_overlap(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: dict[int, list[list[int]]] = {}
    monkeypatch.setattr(source_module, "world_size", lambda: 2)
    for rank in (0, 1):
        monkeypatch.setattr(source_module, "rank", lambda rank=rank: rank)
        source = make(prompts=8, groups=4)
        seen[rank] = [row_prompts(source.next(step)) for step in (1, 2)]
    assert seen == {
        0: [[0, 0, 1, 1], [4, 4, 5, 5]],
        1: [[2, 2, 3, 3], [6, 6, 7, 7]],
    }


def test_shuffled_order_resumes_at_its_place_with_the_same_draws() -> None:
    whole = make(shuffle=True, seed=4)
    batches = [whole.next(step) for step in range(1, 8)]
    cut = make(shuffle=True, seed=4)
    for step in (1, 2, 3):
        cut.next(step)
    state = cut.state_dict()
    resumed = make(shuffle=True, seed=4)
    resumed.load_state_dict(state)
    for step in range(4, 8):
        assert row_prompts(resumed.next(step)) == row_prompts(batches[step - 1])
    engine, again = whole.engine, resumed.engine
    assert isinstance(engine, Scripted) and isinstance(again, Scripted)
    assert again.asked == engine.asked[3:]  # prompts, keys and seeds alike


def test_the_content_hash_is_of_all_prompts_in_their_order() -> None:
    def made(*prompts: Prompt) -> str:
        source = make()
        source.prompts = prompts
        assert source.state_dict()["content_hash"] == source.content_hash
        return source.content_hash

    one, two = Prompt("a", token_ids=(1, 2)), Prompt("b", token_ids=(3,))
    sets = [
        (one, two),
        (two, one),
        (one,),
        (Prompt("c", token_ids=(1, 2)), two),
        (Prompt("a", token_ids=(1, 2, 3)), Prompt("b", token_ids=())),  # the same tokens in a row
        (one, Prompt("b", token_ids=(3,), columns={"answer": "4"})),
        (one, Prompt("b", token_ids=(3,), columns={"answer": "5"})),
        (one, Prompt("b", token_ids=(3,), columns={"tests": [{"in": [1], "out": None}]})),
        (one, Prompt("b", token_ids=(3,), columns={"tests": [{"in": [2], "out": None}]})),
    ]
    assert len({made(*prompts) for prompts in sets}) == len(sets)
    # an object of somebody's reads otherwise in each process
    for held in (object, lambda: [object()], lambda: {"x": object()}):
        assert made(Prompt("a", columns={"x": held()})) == made(Prompt("a", columns={"x": held()}))


def test_every_place_has_its_own_draws() -> None:
    source = make(prompts=2, groups=2)
    for step in (1, 2, 3):
        source.next(step)
    engine = source.engine
    assert isinstance(engine, Scripted)
    draws = [(seed, key) for _, keys, seed in engine.asked for key in keys]
    assert len(set(draws)) == len(draws) == 6


# --- batches --------------------------------------------------------------------------------------


def test_a_batch_holds_what_was_sampled_and_scored() -> None:
    batch = make(group_size=3, groups=1).next(1).batch
    assert batch is not None
    # prompt [0, 50]; samples [100, 0], [100, 1, 2], [100, 2]; padded with EOS = 2
    assert batch.input_ids.tolist() == [[0, 50, 100, 0, 2], [0, 50, 100, 1, 2], [0, 50, 100, 2, 2]]
    assert batch.completion_mask.int().tolist() == [
        [0, 0, 1, 1, 0],
        [0, 0, 1, 1, 1],
        [0, 0, 1, 1, 0],
    ]
    assert batch.truncated.tolist() == [True, False, True]
    assert batch.rewards is not None and batch.rewards.tolist() == [0.0, 1.0, 0.0]
    assert batch.scored is not None and batch.scored.all()
    assert batch.sampling_logprobs is not None
    assert batch.sampling_logprobs[0].tolist() == [0, 0, -0.5, -0.5, 0]
    assert batch.prompt_ids == ("p0",) and batch.group_size == 3


def test_B16_an_abstention_is_unscored_and_not_zero() -> None:
    sampled = make(lambda p, i: [1.0, 0.0, None, 0.0][i], group_size=4, groups=1).next(1)
    batch = sampled.batch
    assert batch is not None and batch.scored is not None
    assert batch.scored.tolist() == [True, True, False, True]
    means = sampled.pool.means()
    assert means["reward/total"] == pytest.approx(1 / 3)  # of the three scored, not of four
    assert means["reward/half"] == pytest.approx(1 / 6)
    assert means["reward/abstained"] == pytest.approx(1 / 4)
    # no component may be called as one of the others
    curves = {name.removeprefix("reward/") for name in means if name.startswith("reward/")}
    assert curves | {"std"} == {"half", *RESERVED}  # the deviation comes with the step's metrics
    assert sampled.rewards == [1.0, 0.0, 0.0]
    assert sampled.pool.sum("reason/unparsed") == 1


def test_texts_are_found_by_the_key_of_their_row() -> None:
    sampled = make().next(1)
    assert sampled.batch is not None and len(sampled.texts) == 6
    for i, key in enumerate(sampled.batch.row_keys.tolist()):
        text = sampled.texts[key]
        assert text.completion.text == f"{i // 2}/{i % 2}"
        assert text.prompt.id == f"p{i // 2}" and text.total == float(i % 2)
        assert key == row_key([*text.prompt.token_ids, *text.completion.token_ids], 2)


def test_a_reward_of_the_wrong_length_is_an_error_that_names_it() -> None:
    source = make()

    def one_score(prompts: list[Prompt], completions: list[Completion]) -> RewardOutput:
        return RewardOutput([1.0])

    source.reward = one_score
    with pytest.raises(RewardError, match="one_score returned 1 scores for 6"):
        source.next(1)


# --- keep and refill ------------------------------------------------------------------------------


def only_multiples_of(k: int) -> Scorer:
    """Prompts whose number k divides have a right and a wrong sample; the others are all wrong."""
    return lambda p, i: float(i == 1 and p % k == 0)


def test_keep_drops_dead_groups_and_refills_until_enough_pass() -> None:
    source = make(only_multiples_of(2), keep=alive, max_rounds=4)
    sampled = source.next(1)
    # round 1: 0 1 2 → 0 2; round 2 takes the one missing: 3 → none; round 3: 4 → 4
    engine = source.engine
    assert isinstance(engine, Scripted)
    assert [prompts for prompts, _, _ in engine.asked] == [[0, 1, 2], [3], [4]]
    assert row_prompts(sampled) == [0, 0, 2, 2, 4, 4]
    assert source.state_dict()["position"] == 5
    assert sampled.completions == 10


def test_after_max_rounds_it_goes_on_with_fewer_groups() -> None:
    sampled = make(only_multiples_of(2), keep=alive, max_rounds=2).next(1)
    assert row_prompts(sampled) == [0, 0, 2, 2]


def test_when_every_group_is_dead_there_is_no_batch_but_the_costs_are_counted() -> None:
    sampled = make(lambda p, i: 1.0, keep=alive, max_rounds=3).next(1)
    assert sampled.batch is None
    assert sampled.completions == 3 * 3 * 2
    assert sampled.tokens_generated == 9 * (2 + 3)
    assert sampled.tokens_wasted == sampled.tokens_generated
    assert sampled.pool.means()["groups/all_right"] == 1.0


def test_rounds_of_different_width_are_joined() -> None:
    source = make(only_multiples_of(2), keep=alive, max_rounds=2, groups=2)
    long = list(source.prompts)
    long[2] = Prompt(id="p2", token_ids=(2, *range(60, 70)))
    source.prompts = long
    batch = source.next(1).batch  # round 1: 0 1 → 0; round 2: the long 2
    assert batch is not None and batch.prompt_ids == ("p0", "p2")
    assert batch.prompt_lengths.tolist() == [2, 2, 11, 11]
    assert batch.lengths.tolist() == [4, 5, 13, 14]


def test_a_process_with_fewer_groups_is_filled_up_with_what_counts_nowhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(source_module, "gathered", lambda mine: [4, mine])
    batch = make(only_multiples_of(2), keep=alive).next(1).batch  # 0 1 2 → 0 2; the other has 4
    assert batch is not None and batch.prompt_ids == ("p0", "p2", "p0", "p1")
    assert batch.scored is not None
    assert batch.scored.tolist() == [True] * 4 + [False] * 4
    assert batch.completion_mask.any(1).tolist() == [True] * 4 + [False] * 4
    scale = batch.local_scale(3)
    assert (scale.groups, scale.sequences, scale.tokens) == (2, 4, 2 * (2 + 3))


def test_a_process_without_any_signal_goes_along(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source_module, "gathered", lambda mine: [2, mine])
    batch = make(lambda p, i: 1.0, keep=alive).next(1).batch
    assert batch is not None and batch.local_scale(3) == Scale(0, 0, 0, 3)


class Keeps:
    name = "mine"

    def __init__(self, answer: Any) -> None:
        self.answer = answer

    def keep(self, batch: Batch) -> Any:
        return self.answer


@pytest.mark.parametrize(
    ("answer", "found"),
    [
        (None, "None"),
        ([True, True, True], "[True, True, True]"),
        (torch.ones(3), "torch.float32 [3]"),  # as an index: the second group, three times
        (torch.ones(2, dtype=torch.bool), "torch.bool [2]"),
        (torch.ones(3, 1, dtype=torch.bool), "torch.bool [3, 1]"),
        (torch.tensor(True), "torch.bool []"),
    ],
)
def test_keep_must_say_of_each_group_whether_it_stays(answer: Any, found: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make(keep=Keeps(answer).keep).next(1)
    assert "algorithm=mine: keep must return a bool tensor [3]" in str(caught.value)
    assert f"got {found}." in str(caught.value)


# --- counts ---------------------------------------------------------------------------------------


def test_tokens_are_counted_once_for_prompts_and_for_each_sample() -> None:
    sampled = make(only_multiples_of(3), groups=4, prompts=9).next(1)
    # 4 prompts of 2 tokens; a group has samples of 2 and 3 tokens; groups 1 and 2 are dead
    assert sampled.tokens_prompt == 8
    assert sampled.tokens_generated == 4 * 5
    assert sampled.tokens_wasted == 2 * 5
    assert sampled.completions == 8
    means = sampled.pool.means()
    assert means["length/mean"] == 2.5 and means["truncated"] == 0.5
    assert means["entropy/sampled"] == 0.5  # −log π of each token, dead groups and all


def test_B91_dead_groups_are_counted_from_the_rewards_per_group() -> None:
    both = make(lambda p, i: float(p == 0), groups=2).next(1).pool.means()
    assert (both["groups/dead"], both["groups/all_right"], both["groups/all_wrong"]) == (
        1,
        0.5,
        0.5,
    )
    half = make(lambda p, i: 1.0 if p == 1 else float(i == 0), groups=2).next(1).pool.means()
    assert (half["groups/dead"], half["groups/all_right"]) == (0.5, 0.5)
    tied = make(lambda p, i: 0.3, groups=2).next(1).pool.means()
    assert (tied["groups/dead"], tied["groups/tied"]) == (1, 1)


@pytest.mark.parametrize(
    ("base", "step", "told"),
    [(1e8, 1.0, True), (1.0, 1e-9, True), (1e8, 0.0, False), (0.0, 1e-9, False)],
)
def test_rewards_that_differ_by_less_than_float32_holds_are_told(
    base: float, step: float, told: bool
) -> None:
    source = make(lambda p, i: base + step * i)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")  # once
        source.next(1)
        source.next(2)
    assert [("equal in float32" in str(one.message)) for one in caught] == [True] * told


def test_sync_reaches_the_engine() -> None:
    source, policy = make(), object()
    source.sync(policy)
    assert isinstance(source.engine, Scripted) and source.engine.synced == [policy]
