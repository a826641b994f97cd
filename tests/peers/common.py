"""The same tokens and weights for TRL's trainers and for zoo's algorithms.

TRL's own code runs: its trainers are built as a user builds them and asked for the loss of a batch.
Both libraries read one model. TRL's head computes in float32, so what is equal is so to a few parts
in a million of the largest entry, and what is claimed to differ must differ by far more.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from zoo.algorithms.base import Algorithm, LossTerm
from zoo.batch import Batch, collate
from zoo.models.models import Models
from zoo.models.policy import Policy
from zoo.testing import STOP, VOCABULARY, nudge

PAD = 0
LIMIT = 8  # the longest completion: TRL's max_completion_length, zoo's rollout.max_new_tokens

PROMPTS = [[3, 4, 5], [6], [7, 8]]
# Four completions of each prompt, of unlike lengths; those without the stop token were cut.
COMPLETIONS = [
    [9, 10, 11, STOP],
    [12, 13, STOP],
    [14, 15, 16, 17, 18, 19, 20, 21],
    [22, STOP],
    [23, 3, 4, 5, 6, STOP],
    [7, 8, 9, STOP],
    [10, STOP],
    [11, 12, 13, 14, 15, 16, STOP],
    [17, 18, 19, STOP],
    [20, 21, 22, 23, 3, STOP],
    [4, 5, 6, 7, 8, 9, 10, 11],
    [12, 13, 14, 15, STOP],
]
REWARDS = [1.0, 0.0, 0.5, 0.25, 0.0, 0.0, 1.0, 0.0, 0.75, 0.5, 0.0, 1.0]


def tokenizer() -> Any:
    """A tokenizer of words: `w7` is token 7."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"<pad>": PAD, "<s>": 1, "</s>": STOP}
    words |= {f"w{i}": i for i in range(3, VOCABULARY)}
    made = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", eos_token="</s>", bos_token="<s>"
    )


def words(ids: Sequence[int]) -> str:
    return " ".join(f"w{i}" for i in ids)


def plain(folder: Path, **settings: Any) -> dict[str, Any]:
    """What every trainer's config says here: one process on the CPU, float32, nothing written."""
    return {
        "output_dir": str(folder / "out"),
        "use_cpu": True,
        "bf16": False,
        "report_to": "none",
        "gradient_checkpointing": False,
        "disable_tqdm": True,
        "save_strategy": "no",
        **settings,
    }


def llama(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def sampled_batch(
    rewards: Sequence[float | None] = REWARDS,
    completions: Sequence[Sequence[int]] = COMPLETIONS,
    trained: Sequence[Sequence[bool]] | None = None,
    group_size: int = 4,
) -> Batch:
    """zoo's batch of these completions; a reward of None abstained."""
    prompts = [PROMPTS[i // group_size] for i in range(len(completions))]
    batch = collate(
        prompts,
        completions,
        group_size=group_size,
        prompt_ids=[str(i) for i in range(len(completions) // group_size)],
        pad_token_id=PAD,
        truncated=[row[-1] != STOP for row in completions],
        trained=trained,
    )
    return batch.replace(
        rewards=torch.tensor([float("nan") if r is None else r for r in rewards]),
        scored=torch.tensor([r is not None for r in rewards]),
    )


def with_scale(batch: Batch) -> Batch:
    return batch.replace(scale=batch.local_scale(LIMIT))


def gradient(model: nn.Module, loss: Tensor) -> Tensor:
    """The gradient of a loss by all weights, flat; the model is left without one."""
    model.zero_grad(set_to_none=True)
    loss.backward()
    flat = torch.cat(
        [
            (torch.zeros_like(p) if p.grad is None else p.grad).reshape(-1)
            for p in model.parameters()
        ]
    ).clone()
    model.zero_grad(set_to_none=True)
    return flat


def only_term(algorithm: Algorithm, prepared: Batch, models: Models) -> LossTerm:
    (term,) = algorithm.losses(with_scale(prepared), models)
    return term


def zoo_models(model: Any, reference: Any = None, temperature: float = 1.0) -> Models:
    """zoo's view of the models that a trainer of TRL holds."""
    return Models(
        policy=Policy(model, temperature),
        reference=None if reference is None else Policy(reference, temperature),
    )


def moved(model: nn.Module, size: float = 0.02) -> None:
    """A few updates further: the ratio to the old policy is no longer 1."""
    nudge(model, size, seed=5)


def assert_same(first: Tensor, second: Tensor, tolerance: float = 5e-6) -> None:
    """Equal up to float32: within `tolerance` of the largest entry, or of 1 if that is smaller."""
    assert first.shape == second.shape, f"{tuple(first.shape)} is not {tuple(second.shape)}"
    first, second = first.detach().double(), second.detach().double()
    gap = float((first - second).abs().max())
    limit = tolerance * max(1.0, float(second.abs().max()))
    assert gap <= limit, f"{gap:.3g} apart, above {limit:.3g}: {first} and {second}"


def assert_differ(first: Tensor, second: Tensor, least: float) -> None:
    """The difference that a test names is there, and not a rounding error."""
    gap = float((first.detach() - second.detach()).abs().max())
    assert gap > least, f"no difference: {gap:.3g} is not above {least:.3g}"
