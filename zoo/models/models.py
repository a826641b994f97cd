"""The models of a run, and no-gradient passes over them in micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from zoo.batch import Batch
from zoo.config import ConfigError

if TYPE_CHECKING:
    from zoo.algorithms.base import LossTerm

# A pass without gradient keeps one layer's activations where one with it keeps all: its
# micro-batches may be larger, and large products run faster.
LIGHTER = 4


@dataclass
class Models:
    """Modules by role; a role that the algorithm does not need is None.

    `policy` and `critic` may be wrapped (DDP); call them, do not reach inside. `state` holds an
    algorithm's own floats across steps (adaptive KL).
    """

    policy: Any  # Policy(Batch) → PolicyOutput; None where only a reward model is trained
    reference: Any = None  # Policy, frozen
    critic: Any = None  # Critic(Batch) → CriticOutput
    reward_model: Any = None  # RewardModel(Batch) → scores [B]
    state: dict[str, float] = field(default_factory=dict)
    micro_batch_tokens: int = 8192
    reference_home: torch.device | None = None  # where it waits while it is not used
    # the sampler decodes with the policy's own weights, not with a copy in another precision
    sampler_is_policy: bool = False
    # of the step's only update, which `learn` adds to; None: there are several, or none to come
    gradients: Any = None

    def trainable(self, roles: tuple[str, ...]) -> dict[str, nn.Module]:
        return {role: getattr(self, role) for role in roles}

    @torch.no_grad()
    def in_micro_batches(
        self, batch: Batch, forward: Callable[[Batch], tuple[Tensor, ...]]
    ) -> tuple[Tensor, ...]:
        """`forward` over micro-batches of `batch`; [b, t] outputs are padded and joined."""
        budget = self.micro_batch_tokens * LIGHTER
        parts = batch.micro_batches_needed(budget, rows_coupled=False)
        pieces = batch.split(parts, rows_coupled=False)
        return joined([forward(piece) for piece in pieces], batch.input_ids.shape[1])

    def learn(
        self, batch: Batch, forward: Callable[[Batch], tuple[LossTerm, tuple[Tensor, ...]]]
    ) -> tuple[Tensor, ...]:
        """A pass that learns from what it reads: outputs as of `in_micro_batches`, and gradients.

        `forward` gives a micro-batch's loss term, divided by `batch.scale`, and the outputs to
        keep. The term is backpropagated into the step's only update, at the weights that a pass
        of its own would have found in `losses`: one forward for two.

        Raises:
            ConfigError: there is no update to add to (`gradients` is None).
        """
        if self.gradients is None:
            raise ConfigError(
                "models.learn adds to the only update of a step, and this step has several or "
                "none. Ask whether models.gradients is None, and use models.critic_values then."
            )
        return self.gradients.learn(batch, forward)

    def policy_logprobs(self, batch: Batch) -> Tensor:
        """[B, T] log-probs of the policy, without gradient."""
        return self.in_micro_batches(batch, lambda b: (self.policy(b).logprobs,))[0]

    def policy_values(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """log-probs [B, T], values [B, T], final [B] of a policy with a value head, one pass.

        Raises:
            ConfigError: the policy has no value head.
        """

        def forward(piece: Batch) -> tuple[Tensor, ...]:
            out = self.policy(piece)
            if out.values is None:
                raise ConfigError(
                    "the algorithm reads values of the policy but its `needs.value_head` is False. "
                    "Return Needs(value_head=True) from `needs`."
                )
            return out.logprobs, out.values, out.final

        logprobs, values, final = self.in_micro_batches(batch, forward)
        return logprobs, values, final

    def reference_logprobs(self, batch: Batch) -> Tensor:
        """[B, T] log-probs of the reference; those the batch already carries are kept.

        Raises:
            ConfigError: no reference is loaded and the batch has none.
        """
        if batch.ref_logprobs is not None:
            return batch.ref_logprobs
        if self.reference is None:
            raise ConfigError(
                "the algorithm reads reference log-probs but its `needs.reference` is False, "
                "so no reference was loaded. Return Needs(reference=True) from `needs`."
            )
        with visiting(self.reference, batch.device, self.reference_home):
            return self.in_micro_batches(batch, lambda b: (self.reference(b).logprobs,))[0]

    def critic_values(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """values [B, T] before each token and final [B] after the last, without gradient.

        Raises:
            ConfigError: no critic is loaded.
        """
        if self.critic is None:
            raise ConfigError(
                "the algorithm reads values of a critic but its `needs.critic` is False, so none "
                "was loaded. Return Needs(critic=True) from `needs`."
            )

        def forward(piece: Batch) -> tuple[Tensor, ...]:
            out = self.critic(piece)
            return out.values, out.final

        values, final = self.in_micro_batches(batch, forward)
        return values, final


@contextmanager
def visiting(module: nn.Module, device: torch.device, home: torch.device | None) -> Iterator[None]:
    """The module is on `device` inside, and at `home` afterwards; home None: it stays where it is.

    Written for a GPU and not run on one: the movements are tested, what they save is not measured.
    """
    if home is None:
        yield
        return
    module.to(device)
    try:
        yield
    finally:
        module.to(home)


def joined(outputs: Sequence[tuple[Tensor, ...]], width: int) -> tuple[Tensor, ...]:
    """Each output over the rows of all micro-batches; [b, t] ones padded to `width` columns."""
    padded = [tuple(_widen(value, width) for value in found) for found in outputs]
    return tuple(torch.cat(values) for values in zip(*padded, strict=True))


def _widen(value: Tensor, width: int) -> Tensor:
    if value.dim() < 2 or value.shape[1] == width:
        return value
    return torch.nn.functional.pad(value, (0, width - value.shape[1]))
