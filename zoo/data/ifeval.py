"""IFEval: prompts with instructions that a program can check (Zhou et al. 2023)."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from zoo.config import ConfigError, settle_choices
from zoo.data.gsm8k import check_counts, rows_of
from zoo.data.left_out import remembered
from zoo.data.plain_texts import PLAIN_TEXTS
from zoo.data.rows import Malformed, half_character, without_duplicates
from zoo.rewards.constraints import CHECKS, Constraints, Mode, check_instructions
from zoo.rewards.language import known_language
from zoo.types import EvaluationSet, Prompt, Reward


@dataclass(frozen=True)
class IFEval:
    """541 prompts, each with one to three instructions that a program can check.

    Source: Zhou et al. 2023, arXiv:2311.07911. The folder holds `input_data.jsonl` as published
    (`key`, `prompt`, `instruction_id_list`, `kwargs`). It is published as a test set and has no
    training split: a part of it, chosen by the hash of each key, is held out here, and a model
    that was trained on the rest must not be compared with others on all of it. The guard is the
    perplexity of plain English.

    Raises:
        ValueError: a setting out of range.
        ConfigError: (when read) no files, no hub, malformed rows, or instructions that have no
            check or whose arguments are wrong.
    """

    path: str | None = None  # folder with input_data.jsonl; null: from the hub
    name: str = "google/IFEval"  # on the hub
    heldout: float = 0.3  # share of the prompts held out, by the hash of their keys
    mode: Mode = Mode.all  # of the verifier: all instructions followed, or the share of them
    n_problems: int | None = None  # training prompts, the first ones; null: all
    n_heldout: int | None = None  # held-out prompts, the first ones; null: all
    max_new_tokens: int = 512  # a limit of new tokens that fits most of the answers

    def __post_init__(self) -> None:
        settle_choices(self, "data")
        check_counts(self, ("n_problems", "n_heldout"))
        if not 0.0 < self.heldout < 1.0:
            raise ValueError(
                f"data.heldout must lie between 0 and 1, got {self.heldout}: both sides need "
                "prompts. Try data.heldout=0.3."
            )

    @property
    def offers(self) -> frozenset[str]:
        return frozenset({"prompts"})

    def prompts(self) -> list[Prompt]:
        return self._sides()[0][: self.n_problems]

    def verifier(self) -> Reward:
        return Constraints(mode=self.mode)

    def evaluation_sets(self) -> list[EvaluationSet]:
        """heldout, where every instruction must be followed whatever the mode, and the guard."""
        heldout = tuple(self._sides()[1][: self.n_heldout])
        return [
            EvaluationSet("heldout", "accuracy", heldout, Constraints()),
            EvaluationSet("guard", "perplexity", texts=PLAIN_TEXTS),
        ]

    def _sides(self) -> tuple[list[Prompt], list[Prompt]]:
        """Training and held-out prompts; both in the order of their hashes, which is mixed."""
        ordered = sorted(read_ifeval(self.path, self.name), key=_place)
        train = [prompt for prompt in ordered if _place(prompt) >= self.heldout]
        heldout = [prompt for prompt in ordered if _place(prompt) < self.heldout]
        if not train or not heldout:
            raise ConfigError(
                f"data.heldout={self.heldout} of {len(ordered)} prompts leaves {len(train)} to "
                f"train on and {len(heldout)} to hold out. Give more rows, or another share."
            )
        return train, heldout


@remembered
def read_ifeval(path: str | None, name: str) -> tuple[Prompt, ...]:
    """All prompts, with the columns instruction_id_list and kwargs.

    Raises:
        ConfigError: see `IFEval`.
    """
    source = "ifeval"
    malformed = Malformed(source)
    rows = rows_of(path, name, None, "train", "input_data.jsonl")
    prompts = []
    for line, row in rows:
        prompt, fault = _prompt(line, row)
        if prompt is None:
            malformed.add(line, fault)
        else:
            prompts.append(prompt)
    malformed.settle(len(rows), 0.0)
    return tuple(without_duplicates(prompts, lambda prompt: prompt.id, source))


def _prompt(line: int, row: Mapping[str, Any]) -> tuple[Prompt | None, str]:
    text, ids, kwargs = row.get("prompt"), row.get("instruction_id_list"), row.get("kwargs")
    if not isinstance(text, str) or not text.strip():
        return None, f"no prompt (it has {', '.join(sorted(row))})"
    if fault := half_character(text):
        return None, fault
    if not isinstance(ids, list) or not ids or not isinstance(kwargs, list):
        return None, "instruction_id_list and kwargs must be lists with something in them"
    if len(ids) != len(kwargs):
        return None, f"{len(ids)} instructions and {len(kwargs)} kwargs"
    if not all(isinstance(one, str) for one in ids):
        return None, "instruction_id_list must hold texts"
    if not all(isinstance(one, dict) for one in kwargs):
        return None, "kwargs must hold one mapping an instruction"
    # A table has every argument in every row, null where it does not apply.
    given = [{k: v for k, v in one.items() if v is not None} for one in kwargs]
    for verdict, arguments in zip(check_instructions("A text.", ids, given), given, strict=True):
        # A short text's language cannot be told; anything else that is unjudged is the row's fault.
        short = known_language(str(arguments.get("language", "")))
        if verdict.followed is None and not (verdict.instruction in CHECKS and short):
            return None, f"{verdict.instruction}: {verdict.reason}"
    columns = {"instruction_id_list": list(ids), "kwargs": given}
    turns = ({"role": "user", "content": text},)
    return Prompt(f"ifeval:{row.get('key', line)}", turns, columns=columns), ""


def _place(prompt: Prompt) -> float:
    """Between 0 and 1, by the prompt's key alone."""
    digest = hashlib.blake2b(prompt.id.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64
