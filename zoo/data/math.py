"""MATH: competition problems (Hendrycks et al. 2021, arXiv:2103.03874), judged on MATH-500."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from zoo.config import ConfigError
from zoo.data.gsm8k import check_counts, read_gsm8k, rows_of
from zoo.data.left_out import remembered
from zoo.data.plain_texts import PLAIN_TEXTS
from zoo.data.rows import (
    Kind,
    Malformed,
    Reader,
    Row,
    content_of,
    half_character,
    without_duplicates,
    without_overlap,
)
from zoo.rewards.extract import last_box
from zoo.rewards.math import check_gold
from zoo.rewards.verifiable import Verifier
from zoo.types import EvaluationSet, Example, Prompt, Reward

INSTRUCTION = r"Reason step by step, and put the final answer within \boxed{}."
_BARE_BOX = re.compile(r"\\boxed\s+(-?\w+)")  # TeX takes one token where there are no braces
_SUBSETS = (
    "algebra",
    "counting_and_probability",
    "geometry",
    "intermediate_algebra",
    "number_theory",
    "prealgebra",
    "precalculus",
)


@dataclass(frozen=True)
class MATH:
    r"""7,500 training problems with solutions, and MATH-500 held out.

    The folder holds `train.jsonl` and `math500.jsonl` (or `test.jsonl`) with the columns `problem`,
    `solution`, perhaps `level` and `answer`; without `answer` the gold is the last \boxed{} of the
    solution. Training problems that are also held-out ones are left out.

    Raises:
        ValueError: a setting out of range.
        ConfigError: (when read) no files, no hub, malformed rows, or unreadable golds.
    """

    path: str | None = None  # folder with train.jsonl and math500.jsonl; null: from the hub
    name: str = "EleutherAI/hendrycks_math"  # training problems on the hub
    test_name: str = "HuggingFaceH4/MATH-500"  # held-out problems on the hub
    gsm8k: str | None = None  # folder of GSM8K: its test split is the independent evaluation
    levels: tuple[int, ...] = (1, 2, 3, 4, 5)  # difficulty of the training problems
    instruction: str = INSTRUCTION  # added to every problem, after a blank line
    n_problems: int | None = None  # training problems, the first ones; null: all
    n_heldout: int | None = None  # of MATH-500, the first ones; null: all
    n_independent: int | None = None  # GSM8K problems, the first ones; null: all
    max_new_tokens: int = 1024  # a limit of new tokens that fits the solutions

    def __post_init__(self) -> None:
        check_counts(self, ("n_problems", "n_heldout", "n_independent"))
        if not self.levels or not set(self.levels) <= {1, 2, 3, 4, 5}:
            raise ValueError(
                f"data.levels must be some of 1 … 5, got {list(self.levels)}: these are the "
                "levels that MATH has. Try data.levels=[3,4,5]."
            )

    @property
    def offers(self) -> frozenset[str]:
        return frozenset({"prompts", "examples"})

    def prompts(self) -> list[Prompt]:
        train = list(self._split("train"))
        if set(self.levels) != {1, 2, 3, 4, 5}:
            # Two published rows have the level "?": they count only where all levels do.
            chosen = [prompt for prompt in train if prompt.columns.get("level") in self.levels]
            if train and not chosen:
                there = sorted({prompt.columns.get("level", 0) for prompt in train} - {0})
                way = f"have the levels {there}. Choose among those"
                raise ConfigError(
                    f"data.levels={list(self.levels)} leaves none of {len(train)} training "
                    f"problems: they {way if there else 'say no level. Leave data.levels out'}."
                )
            train = chosen
        kept = without_overlap(train, list(self._split("test")), "math/train")
        return kept[: self.n_problems]

    def examples(self) -> list[Example]:
        r"""Every training problem with its published solution, which has its answer in \boxed{}."""
        return [Example(prompt, prompt.columns["solution"]) for prompt in self.prompts()]

    def verifier(self) -> Reward:
        return Verifier()

    def evaluation_sets(self) -> list[EvaluationSet]:
        heldout = self._split("test")[: self.n_heldout]
        sets = [EvaluationSet("heldout", "accuracy", heldout, self.verifier())]
        if self.gsm8k is not None:
            problems = read_gsm8k(self.gsm8k, "", "test", self.instruction, "data.gsm8k")
            problems = problems[: self.n_independent]
            sets.append(EvaluationSet("independent", "accuracy", problems, self.verifier()))
        return [*sets, EvaluationSet("guard", "perplexity", texts=PLAIN_TEXTS)]

    def _split(self, split: str) -> tuple[Prompt, ...]:
        return _read(self.path, self.name, self.test_name, split, self.instruction)


@remembered
def _read(
    path: str | None, name: str, test_name: str, split: str, instruction: str
) -> tuple[Prompt, ...]:
    source = f"math/{split}"
    rows = _rows(path, name, test_name, split)
    malformed = Malformed(source)
    usable = []
    for line, row in rows:
        own = _row(f"{source}:{line}", row)
        fault = half_character(own["solution"])
        if own["answer"] == "":
            fault = "no answer, and no complete box in its solution"
        if fault:
            malformed.add(line, fault)
        else:
            usable.append((line, own))
    reader = Reader(Kind.prompts, {}, source, "math", instruction)
    prompts = []
    for prompt in reader.convert(usable, malformed):
        fault = check_gold(prompt.columns["answer"])
        if fault is None:
            prompts.append(prompt)
        else:
            malformed.add(int(prompt.id.rpartition(":")[2]), fault)
    # A handful of the published solutions have an empty box or an unreadable one. Problems to be
    # judged on are another matter: none may be missing.
    malformed.settle(len(rows), 0.001 if split == "train" else 0.0)
    return tuple(without_duplicates(prompts, content_of, source))


def _rows(path: str | None, name: str, test_name: str, split: str) -> list[Row]:
    if split == "test":
        return rows_of(path, test_name, None, "test", "math500.jsonl", "test.jsonl")
    if path is not None:
        return rows_of(path, name, None, "train", "train.jsonl")
    parts = [row for subset in _SUBSETS for _, row in rows_of(None, name, subset, "train")]
    return list(enumerate(parts, 1))


def _row(identity: str, row: dict[str, Any]) -> dict[str, Any]:
    """The row under the names of JSON-lines files, whose reader does the rest."""
    problem, solution = row.get("problem"), row.get("solution")
    if not isinstance(problem, str) or not isinstance(solution, str):
        raise ConfigError(
            f"{identity} needs the texts problem and solution, and has {', '.join(sorted(row))}. "
            "Give MATH as published, or use data=jsonl."
        )
    answer = row.get("answer")
    answer = _boxed(solution) if answer is None else answer
    answer = answer.strip() if isinstance(answer, str) else answer
    own = {"prompt": problem, "answer": answer, "solution": solution}
    level = str(row.get("level", "")).removeprefix("Level").strip()
    return {**own, "level": int(level)} if level.isdecimal() else own


def _boxed(solution: str) -> str:
    r"""What stands in the last box, `\boxed 2` included; "" where nothing does."""
    box = last_box(solution)
    if box is None:
        bare = _BARE_BOX.findall(solution)
        box = bare[-1] if bare else ""
    return box
