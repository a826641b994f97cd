"""TRL's preference losses beside zoo's: DPO's variants, CPO and SimPO, ORPO, KTO, reward models.

TRL tokenises, collates and masks; zoo's batch is made of the ids that TRL's batch holds.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.peers.common import (
    PAD,
    assert_differ,
    assert_same,
    gradient,
    llama,
    moved,
    only_term,
    plain,
    tokenizer,
    words,
    zoo_models,
)
from zoo.algorithms.dpo import DPO, PairLoss
from zoo.algorithms.ipo import IPO
from zoo.algorithms.kto import KTO
from zoo.algorithms.orpo import ORPO
from zoo.algorithms.reward_model import BradleyTerry
from zoo.algorithms.simpo import SimPO
from zoo.batch import Batch, collate
from zoo.functional import (
    bradley_terry,
    dpo_robust,
    dpo_sigmoid,
    hinge,
    ipo,
    kto_baseline,
    nll_mixed,
    orpo,
    preference_margins,
    sequence_logprobs,
    simpo,
)
from zoo.models.models import Models
from zoo.models.reward_model import RewardModel

pytestmark = pytest.mark.peers

PAIRS = [  # prompt, chosen, rejected; TRL appends the stop token
    ([3, 4, 5], [9, 10, 11], [12]),
    ([6], [13, 14], [15, 16, 17, 18, 19]),
    ([7, 8], [20], [21, 22, 23]),
    ([3, 9, 3, 4], [5, 6, 7, 8, 9, 10], [11, 12]),
]


def pairs_dataset() -> Any:
    from datasets import Dataset

    return Dataset.from_dict(
        {
            "prompt": [words(p) for p, _, _ in PAIRS],
            "chosen": [" " + words(c) for _, c, _ in PAIRS],
            "rejected": [" " + words(r) for _, _, r in PAIRS],
        }
    )


def to_batch(prompts: list[list[int]], completions: list[list[int]], group_size: int) -> Batch:
    return collate(
        prompts,
        completions,
        group_size=group_size,
        prompt_ids=[str(i) for i in range(len(prompts) // group_size)],
        pad_token_id=PAD,
    )


def rows_of(ids: Tensor, real: Tensor, completion: Tensor) -> tuple[list[Any], list[Any]]:
    """Prompts and completions of a padded batch of TRL."""
    real, completion = real.bool(), completion.bool() & real.bool()
    prompts = [r[a & ~c].tolist() for r, a, c in zip(ids, real, completion, strict=True)]
    return prompts, [r[c].tolist() for r, c in zip(ids, completion, strict=True)]


def interleaved(rows: list[Any]) -> list[Any]:
    """Chosen rows, then rejected rows → chosen, rejected of each pair in turn."""
    half = len(rows) // 2
    return [row for pair in zip(rows[:half], rows[half:], strict=True) for row in pair]


# DPO ---------------------------------------------------------------------------------------------


class Pairs:
    """DPOTrainer, its batch and zoo's of the same tokens; the policy has left the reference."""

    def __init__(self, folder: Path, pairs: slice = slice(None), **settings: Any) -> None:
        from trl import DPOConfig, DPOTrainer

        dataset = pairs_dataset().select(range(len(PAIRS))[pairs])
        given = {"per_device_train_batch_size": len(dataset), "beta": 0.3} | settings
        self.trainer: Any = DPOTrainer(
            model=llama(folder),
            ref_model=llama(folder),
            args=DPOConfig(**plain(folder, **given)),
            train_dataset=dataset,
            processing_class=tokenizer(),
        )
        self.model = self.trainer.model.train()
        moved(self.model, 0.1)
        (self.inputs,) = self.trainer.get_train_dataloader()
        prompts, completions = rows_of(
            self.inputs["input_ids"], self.inputs["attention_mask"], self.inputs["completion_mask"]
        )
        self.batch = to_batch(interleaved(prompts), interleaved(completions), 2)
        self.models = zoo_models(self.model, self.trainer.ref_model)

    def trl(self) -> tuple[Tensor, Tensor]:
        loss = self.trainer.compute_loss(self.model, self.inputs)
        return loss.detach(), gradient(self.model, loss)

    def zoo(self, algorithm: Any) -> tuple[Tensor, Tensor]:
        term = only_term(algorithm, algorithm.prepare(self.batch, self.models), self.models)
        return term.loss.detach(), gradient(self.model, term.loss)

    def logprobs(self, average: bool = False) -> tuple[Tensor, ...]:
        """Policy's chosen and rejected, then the reference's: [N] each."""
        mask = self.batch.completion_mask
        policy = sequence_logprobs(self.models.policy(self.batch).logprobs, mask, average)
        reference = sequence_logprobs(self.models.reference_logprobs(self.batch), mask, average)
        return policy[0::2], policy[1::2], reference[0::2], reference[1::2]

    def agree(self, losses: Tensor) -> None:
        """The mean over pairs and its gradient."""
        loss, theirs = self.trl()
        assert_same(losses.mean(), loss)
        assert_same(gradient(self.model, losses.mean()), theirs)


def test_dpo_agrees_and_so_do_its_margins(tiny: Path) -> None:
    side = Pairs(tiny, loss_type=["sigmoid"])
    for ours, theirs in zip(side.zoo(DPO(beta=0.3)), side.trl(), strict=True):
        assert_same(ours, theirs)
    metrics = side.trainer._metrics["train"]
    margins = preference_margins(*side.logprobs(), beta=0.3)
    assert metrics["rewards/margins"][-1] == pytest.approx(float(margins.margin.mean()), abs=1e-5)
    assert metrics["rewards/accuracies"][-1] == float(margins.correct.float().mean())


def test_trls_sigmoid_ignores_label_smoothing_and_its_unpaired_aot_is_cdpo_of_one_pair(
    tiny: Path,
) -> None:
    side = Pairs(tiny, loss_type=["sigmoid"], label_smoothing=0.2)
    assert_same(side.zoo(DPO(beta=0.3))[0], side.trl()[0])
    assert_differ(side.zoo(DPO(beta=0.3, label_smoothing=0.2))[0], side.trl()[0], 1e-3)
    # `aot_unpaired` sorts the log-ratios over the batch; with one pair nothing is sorted.
    for at in range(len(PAIRS)):
        given = {"loss_type": ["aot_unpaired"], "label_smoothing": 0.2}
        side = Pairs(tiny, slice(at, at + 1), **given)
        for ours, theirs in zip(
            side.zoo(DPO(beta=0.3, label_smoothing=0.2)), side.trl(), strict=True
        ):
            assert_same(ours, theirs)


def test_robust_dpo_agrees(tiny: Path) -> None:
    side = Pairs(tiny, loss_type=["robust"], label_smoothing=0.2)
    side.agree(dpo_robust(*side.logprobs(), beta=0.3, label_smoothing=0.2))
    algorithm = DPO(beta=0.3, label_smoothing=0.2, loss=PairLoss.robust)
    for ours, theirs in zip(side.zoo(algorithm), side.trl(), strict=True):
        assert_same(ours, theirs)


def test_ipo_in_trl_takes_means_over_tokens_where_zoo_and_the_paper_take_sums(tiny: Path) -> None:
    side = Pairs(tiny, loss_type=["ipo"])
    for ours, theirs in zip(
        side.zoo(IPO(beta=0.3, average_logprobs=True)), side.trl(), strict=True
    ):
        assert_same(ours, theirs)
    assert_differ(side.zoo(IPO(beta=0.3))[0], side.trl()[0], 0.1)


def test_hinge_agrees(tiny: Path) -> None:
    side = Pairs(tiny, loss_type=["hinge"], beta=2.0)
    losses = hinge(*side.logprobs(), beta=2.0)
    assert 0 < int((losses == 0).sum()) < len(losses), "one side of the hinge is not tried"
    side.agree(losses)
    for ours, theirs in zip(side.zoo(DPO(beta=2.0, loss=PairLoss.hinge)), side.trl(), strict=True):
        assert_same(ours, theirs)


def test_dpo_with_likelihood_has_each_completions_mean_in_zoo_and_one_token_mean_in_trl(
    tiny: Path,
) -> None:
    given = {"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.5]}
    side = Pairs(tiny, **given)
    chosen = side.batch.select_rows(torch.arange(0, len(PAIRS) * 2, 2), 1)
    lengths = chosen.completion_mask.sum(1)
    # TRL: Σ over all chosen tokens of the micro-batch ÷ their number, so long ones weigh more.
    policy, plain_loss = side.logprobs()[0], dpo_sigmoid(*side.logprobs(), beta=0.3)
    ours = nll_mixed(plain_loss, policy, lengths, 0.5)
    assert_same(side.zoo(DPO(beta=0.3, nll_coef=0.5))[0], ours.mean())
    by_token = plain_loss.mean() + 0.5 * -policy.sum() / lengths.sum()
    loss, theirs = side.trl()
    assert_same(by_token, loss)
    assert_same(gradient(side.model, by_token), theirs)
    assert_differ(ours.mean(), loss, 1e-3)
    # One pair has one completion: no difference.
    side = Pairs(tiny, slice(3, 4), **given)
    for ours, theirs in zip(side.zoo(DPO(beta=0.3, nll_coef=0.5)), side.trl(), strict=True):
        assert_same(ours, theirs)


def test_trl_averages_pairs_of_a_micro_batch_and_zoo_those_of_the_step(tiny: Path) -> None:
    whole = Pairs(tiny).zoo(DPO(beta=0.3))[1]
    parts = [Pairs(tiny, rows, loss_type=["sigmoid"]) for rows in (slice(0, 1), slice(1, 4))]
    # Under gradient accumulation the Trainer divides each micro-batch's mean by their number, 2.
    theirs = sum(side.trl()[1] for side in parts) / 2
    assert_differ(whole, theirs, 1e-3)
    weighed = parts[0].trl()[1] * 1 / 4 + parts[1].trl()[1] * 3 / 4
    assert_same(whole, weighed)


# CPO, SimPO, ORPO --------------------------------------------------------------------------------


class Concatenated:
    """A trainer of TRL's older kind (CPO, ORPO), its batch, and zoo's."""

    def __init__(self, folder: Path, kind: str, pairs: slice = slice(None), **settings: Any):
        module = pytest.importorskip(f"trl.experimental.{kind}", reason=f"this TRL has no {kind}")
        name = kind.upper()
        dataset = pairs_dataset().select(range(len(PAIRS))[pairs])
        given = {"per_device_train_batch_size": len(dataset), "remove_unused_columns": False}
        self.trainer: Any = getattr(module, f"{name}Trainer")(
            model=llama(folder),
            args=getattr(module, f"{name}Config")(**plain(folder, **(given | settings))),
            train_dataset=dataset,
            processing_class=tokenizer(),
        )
        self.model = self.trainer.model.train()
        moved(self.model, 0.1)
        (self.inputs,) = self.trainer.get_train_dataloader()
        prompts, completions = [], []
        for role in ("chosen", "rejected"):
            some = rows_of(
                self.inputs[f"{role}_input_ids"],
                self.inputs[f"{role}_attention_mask"],
                self.inputs[f"{role}_labels"] != -100,
            )
            prompts += some[0]
            completions += some[1]
        self.batch = to_batch(interleaved(prompts), interleaved(completions), 2)
        self.models = zoo_models(self.model)

    trl = Pairs.trl
    zoo = Pairs.zoo

    def logprobs(self, average: bool) -> tuple[Tensor, Tensor]:
        mask = self.batch.completion_mask
        policy = sequence_logprobs(self.models.policy(self.batch).logprobs, mask, average)
        return policy[0::2], policy[1::2]


def test_simpo_agrees_with_cpos_simpo_without_its_likelihood_term(tiny: Path) -> None:
    side = Concatenated(tiny, "cpo", loss_type="simpo", beta=2.0, simpo_gamma=0.7, cpo_alpha=0.0)
    for ours, theirs in zip(side.zoo(SimPO(beta=2.0, margin=0.7)), side.trl(), strict=True):
        assert_same(ours, theirs)
    assert_same(simpo(*side.logprobs(True), beta=2.0, margin=0.7).mean(), side.trl()[0])


def test_cpo_is_dpo_against_a_reference_that_gives_everything_the_same_likelihood(
    tiny: Path,
) -> None:
    given = {"beta": 0.3, "cpo_alpha": 0.0}
    for kind, smoothing in [("sigmoid", 0.0), ("sigmoid", 0.2), ("hinge", 0.0), ("ipo", 0.0)]:
        side = Concatenated(tiny, "cpo", loss_type=kind, label_smoothing=smoothing, **given)
        chosen, rejected = side.logprobs(average=kind == "ipo")
        pair = (chosen, rejected, torch.zeros_like(chosen), torch.zeros_like(chosen))
        losses = {
            "sigmoid": lambda p=pair, s=smoothing: dpo_sigmoid(*p, beta=0.3, label_smoothing=s),
            "hinge": lambda p=pair: hinge(*p, beta=0.3),
            "ipo": lambda p=pair: ipo(*p, beta=0.3),
        }[kind]()
        loss, theirs = side.trl()
        assert_same(losses.mean(), loss)
        assert_same(gradient(side.model, losses.mean()), theirs)


def test_orpos_odds_agree_and_its_likelihood_covers_the_prompt_in_trl(tiny: Path) -> None:
    side = Concatenated(tiny, "orpo", beta=0.5)
    odds = orpo(*side.logprobs(average=True))
    # TRL: cross-entropy of the chosen rows, prompt included, over all tokens of the micro-batch.
    rows = torch.arange(0, side.batch.n_rows, 2)
    whole = side.batch.select_rows(rows, 1)
    everything = whole.attention_mask.clone()
    everything[:, 0] = False
    whole = whole.replace(completion_mask=everything)
    likelihood = side.models.policy(whole).logprobs[whole.completion_mask].mean()
    loss, theirs = side.trl()
    expected = -likelihood + 0.5 * odds.mean()
    assert_same(expected, loss)
    assert_same(gradient(side.model, expected), theirs)
    # zoo: each completion's own mean, as the paper's Eq. 3 has it; then the mean over pairs.
    chosen, rejected = side.logprobs(average=True)
    ours = side.zoo(ORPO(odds_coef=0.5))[0]
    assert_same(ours, (-chosen + 0.5 * orpo(chosen, rejected)).mean())
    assert_differ(ours, loss, 1e-2)


# KTO ---------------------------------------------------------------------------------------------

LABELLED = [  # prompt, completion, is it desirable
    ([3, 4, 5], [9, 10, 11], True),
    ([6], [13, 14], False),
    ([7, 8], [20], True),
    ([3, 9, 3, 4], [5, 6, 7, 8, 9, 10], False),
    ([10, 11], [12, 13, 14, 15], True),
    ([16, 17, 18], [19, 20], True),
]


class Labelled:
    """KTOTrainer with its mismatched completions, and zoo's batch of the same rows."""

    def __init__(
        self,
        folder: Path,
        rows: list[Any],
        *,
        micro_batch: int = 0,
        moves: str = "model",
        **settings: Any,
    ) -> None:
        from datasets import Dataset
        from trl import KTOConfig, KTOTrainer

        given = {"per_device_train_batch_size": micro_batch or len(rows), "beta": 0.3}
        self.trainer: Any = KTOTrainer(
            model=llama(folder),
            ref_model=llama(folder),
            args=KTOConfig(**plain(folder, **(given | settings))),
            train_dataset=Dataset.from_dict(
                {
                    "prompt": [words(p) for p, _, _ in rows],
                    "completion": [" " + words(c) for _, c, _ in rows],
                    "label": [desirable for _, _, desirable in rows],
                }
            ),
            processing_class=tokenizer(),
        )
        self.model = self.trainer.model.train()
        moved(getattr(self.trainer, moves), 0.1)
        self.inputs = list(self.trainer.get_train_dataloader())
        self.batch = labelled_batch(rows)
        self.models = zoo_models(self.model, self.trainer.ref_model)

    def trl(self, part: int = 0) -> tuple[Tensor, Tensor]:
        loss = self.trainer.compute_loss(self.model, self.inputs[part])
        return loss.detach(), gradient(self.model, loss)

    def baseline(self) -> float:
        return self.trainer._metrics["train"]["kl"][-1]


def labelled_batch(rows: list[Any]) -> Batch:
    batch = to_batch([p for p, _, _ in rows], [[*c, 2] for _, c, _ in rows], 1)
    labels = torch.tensor([float(desirable) for _, _, desirable in rows])
    return batch.replace(rewards=labels, scored=torch.ones(len(rows), dtype=torch.bool))


def by_descending_content() -> list[Any]:
    """In this order the row that zoo pairs with row i (the next by content) is TRL's row i − 1."""
    keys = labelled_batch(LABELLED).row_keys.tolist()
    return [LABELLED[i] for i in sorted(range(len(keys)), key=keys.__getitem__, reverse=True)]


def test_kto_agrees_with_its_mismatched_baseline_where_both_pair_the_same_rows(
    tiny: Path,
) -> None:
    weights = {"desirable_weight": 1.2, "undesirable_weight": 0.8}
    side = Labelled(tiny, by_descending_content(), **weights)
    algorithm = KTO(beta=0.3, **weights)
    prepared = algorithm.prepare(side.batch, side.models)
    term = only_term(algorithm, prepared, side.models)
    loss, theirs = side.trl()
    assert side.baseline() > 0.1, "the clamp at 0 would hide the baseline"
    assert float(prepared.extra["kl_baseline"][0]) == pytest.approx(side.baseline(), rel=1e-5)
    assert_same(term.loss, loss)
    assert_same(gradient(side.model, term.loss), theirs)


def test_trl_rotates_completions_within_a_micro_batch_and_averages_its_baselines_apart(
    tiny: Path,
) -> None:
    # Row i gets the completion of row i − 1 of its own micro-batch, and each micro-batch a z₀ of
    # its own; zoo pairs rows by content over the step, and has one z₀ whatever the micro-batches.
    rows = by_descending_content()
    side = Labelled(tiny, rows, micro_batch=3)
    algorithm = KTO(beta=0.3)
    for part in range(2):
        side.trl(part)
        some = rows[3 * part : 3 * part + 3]
        mixed = [(p, some[i - 1][1], d) for i, (p, _, d) in enumerate(some)]
        other = labelled_batch(mixed)
        policy, reference = (
            sequence_logprobs(logprobs, other.completion_mask, False)
            for logprobs in (
                side.models.policy_logprobs(other),
                side.models.reference_logprobs(other),
            )
        )
        assert float(kto_baseline(policy, reference)) == pytest.approx(side.baseline(), abs=1e-5)
        whole = float(algorithm.prepare(side.batch, side.models).extra["kl_baseline"][0])
        assert whole != pytest.approx(side.baseline(), rel=1e-2)


def test_a_negative_baseline_is_clamped_alike(tiny: Path) -> None:
    # The other model has moved, so every log-ratio of the test above changes its sign.
    side = Labelled(tiny, by_descending_content(), moves="ref_model")
    algorithm = KTO(beta=0.3)
    prepared = algorithm.prepare(side.batch, side.models)
    loss, theirs = side.trl()
    assert side.baseline() == 0.0
    assert float(prepared.extra["kl_baseline"].abs().max()) == 0.0
    term = only_term(algorithm, prepared, side.models)
    assert_same(term.loss, loss)
    assert_same(gradient(side.model, term.loss), theirs)


# reward models -----------------------------------------------------------------------------------


@pytest.mark.parametrize("centre", [None, 0.05])
@pytest.mark.parametrize("margins", [None, [0.5, 0.0, 1.0, 0.25]])
def test_bradley_terry_agrees_with_margin_and_centring(
    tiny: Path, centre: float | None, margins: list[float] | None
) -> None:
    from transformers import AutoModelForSequenceClassification
    from trl import RewardConfig, RewardTrainer

    dataset = pairs_dataset()
    if margins is not None:
        dataset = dataset.add_column("margin", margins)
    model = AutoModelForSequenceClassification.from_pretrained(
        tiny, num_labels=1, dtype=torch.float32
    )
    given = {"per_device_train_batch_size": len(PAIRS), "center_rewards_coefficient": centre}
    trainer: Any = RewardTrainer(
        model=model,
        args=RewardConfig(**plain(tiny, **given)),
        train_dataset=dataset,
        processing_class=tokenizer(),
    )
    trainer.model.train()
    (inputs,) = trainer.get_train_dataloader()
    given = inputs.get("margin")
    # The rows without a mask of the prompt: a reward model reads both.
    ids, real = inputs["input_ids"], inputs["attention_mask"].bool()
    rows = interleaved([row[keep].tolist() for row, keep in zip(ids, real, strict=True)])
    batch = to_batch([row[:1] for row in rows], [row[1:] for row in rows], 2)
    batch = batch.replace(rewards=torch.tensor([1.0, 0.0] * len(PAIRS)))
    loss = trainer.compute_loss(model, dict(inputs))
    theirs = gradient(model, loss)

    ours = RewardModel(model)
    chosen, rejected = ours(batch).view(-1, 2).unbind(1)
    losses = bradley_terry(chosen, rejected, given, centre or 0.0)
    assert_same(losses.mean(), loss)
    assert_same(gradient(model, losses.mean()), theirs)

    # In zoo the algorithm's margin is a price per unit of the data's strength.
    algorithm = BradleyTerry(margin=0.0 if given is None else 1.0, centre=centre or 0.0)
    if given is not None:
        strength = torch.stack([given, torch.zeros_like(given)], 1).reshape(-1)
        batch = batch.with_extra(strength=strength)
    term = only_term(algorithm, batch, Models(policy=None, reward_model=ours))
    assert_same(term.loss, loss)
    assert_same(gradient(model, term.loss), theirs)


def test_at_the_start_both_say_ln_2(tiny: Path) -> None:
    side = Pairs(tiny, loss_type=["sigmoid"])
    side.trainer.ref_model.load_state_dict(side.model.state_dict())
    assert float(side.trl()[0]) == pytest.approx(math.log(2), abs=1e-6)
    assert float(side.zoo(DPO(beta=0.3))[0]) == pytest.approx(math.log(2), abs=1e-6)
