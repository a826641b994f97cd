"""The small types that data, rollout and rewards pass to each other."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable


@dataclass(frozen=True)
class Prompt:
    """One problem: what the policy reads and the columns that a reward may read."""

    id: str
    messages: tuple[dict[str, str], ...] = ()  # chat turns; rendered with the tokenizer's template
    text: str | None = None  # a raw text instead of turns (base models)
    token_ids: tuple[int, ...] = ()  # filled in when the data is tokenized
    columns: dict[str, Any] = field(default_factory=dict)  # answer, style, source, …


@dataclass(frozen=True)
class Example:
    """A prompt with the completion to imitate."""

    prompt: Prompt
    completion: str


@dataclass(frozen=True)
class PreferencePair:
    """A prompt with two completions, the first preferred.

    Completions that were sampled carry their token ids: nothing is re-tokenized.
    """

    prompt: Prompt
    chosen: str
    rejected: str
    chosen_ids: tuple[int, ...] | None = None
    rejected_ids: tuple[int, ...] | None = None
    margin: float | None = None


@dataclass(frozen=True)
class LabelledCompletion:
    """A prompt, a completion and whether it is desirable (KTO)."""

    prompt: Prompt
    completion: str
    desirable: bool
    completion_ids: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Completion:
    """What the model wrote: tokens in, tokens out; `text` has the special tokens removed."""

    text: str
    token_ids: tuple[int, ...]  # the stop token included
    logprobs: tuple[float, ...]  # log-prob of each token under the sampler, at its temperature
    truncated: bool  # stopped by the length limit


@dataclass(frozen=True)
class RewardOutput:
    """Scores of B completions; None means «cannot be scored», never 0."""

    total: list[float | None]
    components: dict[str, list[float | None]] = field(default_factory=dict)  # unweighted
    reasons: list[str] = field(default_factory=list)  # one a completion; "" if there is none


@runtime_checkable
class Reward(Protocol):
    """Anything that scores completions.

    It may have `load(device)`, called before the first step, and `fingerprint()`: a short hash of
    files that its settings only point at, so that a run resumed with others is refused.
    """

    def __call__(self, prompts: list[Prompt], completions: list[Completion]) -> RewardOutput: ...


@dataclass(frozen=True)
class EvaluationSet:
    """Problems (or texts) on which a policy is judged."""

    name: str  # heldout, independent, guard, …
    kind: str  # "accuracy": prompts + verifier; "perplexity": texts
    prompts: tuple[Prompt, ...] = ()
    verifier: Reward | None = None
    texts: tuple[str, ...] = ()


@runtime_checkable
class Data(Protocol):
    """A data set: a frozen dataclass of settings that says what it offers.

    `offers` is a subset of {"prompts", "examples", "pairs", "labelled"}; the methods of the kinds
    that are not offered need not exist. Everything is deterministic given the settings.
    """

    @property
    def offers(self) -> frozenset[str]: ...

    @property
    def max_new_tokens(self) -> int:
        """A limit of new tokens that fits the answers."""
        ...

    def prompts(self) -> list[Prompt]:
        """Training prompts."""
        ...

    def verifier(self) -> Reward | None:
        """The check of right and wrong that belongs to the data (score 1 or 0), if there is one."""
        ...

    def evaluation_sets(self) -> list[EvaluationSet]:
        """heldout (same verifier), and where possible independent and guard."""
        ...
