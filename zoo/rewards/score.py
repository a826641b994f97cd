"""Ask a reward, and trust nothing that it says."""

from __future__ import annotations

from collections.abc import Sequence

from zoo.rewards.check import RewardError, check_output
from zoo.types import Completion, Prompt, Reward, RewardOutput


def score(
    reward: Reward, prompts: Sequence[Prompt], completions: Sequence[Completion]
) -> RewardOutput:
    """The checked output of `reward` for B completions of B prompts.

    Raises:
        RewardError: the reward raised, or its output is not one number or None for each
            completion; names the reward, the row and its text.
    """
    name = getattr(reward, "__name__", type(reward).__name__)
    try:
        output = reward(list(prompts), list(completions))
    except RewardError:
        raise
    # SystemExit too: a reward that calls exit() would otherwise end the run as if all were well.
    except (Exception, SystemExit) as error:
        first = completions[0].text if completions else ""
        raise RewardError(
            f"reward {name} raised {type(error).__name__}: {error}. It was asked about "
            f"{len(completions)} completions, the first {first[:80]!r}. Mend it, or let it return "
            "None for what it cannot score."
        ) from error
    return check_output(output, completions, name)
