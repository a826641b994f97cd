"""GSM8K: grade-school word problems (Cobbe et al. 2021, arXiv:2110.14168)."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from zoo.config import ConfigError
from zoo.data.golds import check_golds
from zoo.data.hub import load_hub
from zoo.data.left_out import remembered
from zoo.data.plain_texts import PLAIN_TEXTS
from zoo.data.rows import (
    Kind,
    Malformed,
    Reader,
    Row,
    content_of,
    existing,
    expanded,
    half_character,
    read_jsonl,
    without_duplicates,
    without_overlap,
)
from zoo.rewards.verifiable import Verifier
from zoo.types import EvaluationSet, Example, Prompt, Reward

INSTRUCTION = (
    "Solve the problem step by step. End with a line that has #### in front of the final number."
)
_MARK = re.compile(r"<<[^<>\n]*>>")  # the calculator's marks inside the published solutions


@dataclass(frozen=True)
class GSM8K:
    """7,473 training and 1,319 test problems, from the hub or a folder.

    The folder holds `train.jsonl` and `test.jsonl` as published (`question`, `answer`). Held-out
    problems are the test split; the independent ones are SVAMP's, another collection, where its
    file is given. The guard is the perplexity of plain English.

    Raises:
        ValueError: a setting out of range.
        ConfigError: (when read) no files, no hub, malformed rows, or unreadable golds.
    """

    path: str | None = None  # folder with train.jsonl and test.jsonl; null: from the hub
    name: str = "openai/gsm8k"  # on the hub
    svamp: str | None = None  # file of SVAMP problems: the independent evaluation
    instruction: str = INSTRUCTION  # added to every question, after a blank line
    n_problems: int | None = None  # training problems, the first ones; null: all
    n_heldout: int | None = None  # test problems, the first ones; null: all
    n_independent: int | None = None  # SVAMP problems, the first ones; null: all
    pair_with_gold: bool = False  # preference pairs: gold solution against the model's own sample
    max_new_tokens: int = 256  # a limit of new tokens that fits the solutions

    def __post_init__(self) -> None:
        check_counts(self, ("n_problems", "n_heldout", "n_independent"))

    @property
    def offers(self) -> frozenset[str]:
        return frozenset({"prompts", "examples"})

    @property
    def chosen_is_gold(self) -> bool:
        """Whether pairs prefer the prompt's column `solution` to a sampled completion."""
        return self.pair_with_gold

    def prompts(self) -> list[Prompt]:
        train, judged = list(self._split("train")), list(self._split("test"))
        return without_overlap(train, judged, "gsm8k/train")[: self.n_problems]

    def examples(self) -> list[Example]:
        """Every training problem with its published solution, calculator marks removed."""
        return [Example(prompt, prompt.columns["solution"]) for prompt in self.prompts()]

    def verifier(self) -> Reward:
        return Verifier()

    def evaluation_sets(self) -> list[EvaluationSet]:
        heldout = self._split("test")[: self.n_heldout]
        sets = [EvaluationSet("heldout", "accuracy", heldout, self.verifier())]
        if self.svamp is not None:
            expanded(self.svamp, "data.svamp")
            problems = _svamp(self.svamp, self.instruction)[: self.n_independent]
            sets.append(EvaluationSet("independent", "accuracy", problems, self.verifier()))
        return [*sets, EvaluationSet("guard", "perplexity", texts=PLAIN_TEXTS)]

    def _split(self, split: str) -> tuple[Prompt, ...]:
        return read_gsm8k(self.path, self.name, split, self.instruction)


def check_counts(data: Any, names: tuple[str, ...]) -> None:
    for name in (*names, "max_new_tokens"):
        value = getattr(data, name)
        if value is not None and value < 1:
            raise ValueError(
                f"data.{name} must be at least 1, got {value}: nothing would be left. "
                f"Try data.{name}=100."
            )


@remembered
def read_gsm8k(
    path: str | None,
    name: str,
    split: str,
    instruction: str = INSTRUCTION,
    setting: str = "data.path",
) -> tuple[Prompt, ...]:
    """One split as prompts with the columns answer, style and solution.

    Raises:
        ConfigError: see `GSM8K`.
    """
    source = f"gsm8k/{split}"
    malformed = Malformed(source)
    usable = []
    rows = rows_of(path, name, "main", split, f"{split}.jsonl", setting=setting)
    for line, row in rows:
        question, solution = row.get("question"), row.get("answer")
        if not isinstance(question, str) or not isinstance(solution, str):
            raise ConfigError(
                f"{source}: row {line} needs the texts question and answer, and has "
                f"{', '.join(sorted(row))}. Give GSM8K as published, or use data=jsonl."
            )
        solution = _MARK.sub("", solution)
        _, marker, answer = solution.rpartition("####")
        if not marker:
            raise ConfigError(f"{source}: row {line} has no #### before its answer. Correct it.")
        if fault := half_character(solution):
            malformed.add(line, fault)
        else:
            own = {"prompt": question, "answer": answer.strip(), "solution": solution}
            usable.append((line, own))
    reader = Reader(Kind.prompts, {}, source, "gsm8k", instruction)
    prompts = reader.convert(usable, malformed)
    malformed.settle(len(rows), 0.0)
    check_golds(prompts, source)
    return tuple(without_duplicates(prompts, content_of, source))


def rows_of(
    path: str | None,
    name: str,
    subset: str | None,
    split: str,
    *files: str,
    setting: str = "data.path",
) -> list[Row]:
    """Rows of the first of `files` that lies in the folder `path`, else of the hub's data set."""
    if path is None:
        return load_hub(name, subset, split)
    folder = expanded(path, setting)
    if not folder.is_dir():
        raise ConfigError(
            f"{setting}={path} is no folder. Name the folder that holds {' or '.join(files)}, or "
            f"{setting}=null{' for the hub' if setting == 'data.path' else ''}."
        )
    file = next((folder / f for f in files if (folder / f).is_file()), folder / files[0])
    malformed = Malformed(str(existing(file)))
    rows, total = read_jsonl(file, malformed)
    malformed.settle(total, 0.0)
    return rows


@remembered
def _svamp(path: str, instruction: str) -> tuple[Prompt, ...]:
    malformed = Malformed(path)
    rows, total = read_jsonl(path, malformed)
    malformed.settle(total, 0.0)
    prompts = []
    for line, row in rows:
        try:
            question = f"{row['Body'].strip()} {row['Question'].strip()}"
            answer = float(row["Answer"])
        except (KeyError, AttributeError, TypeError, ValueError) as error:
            raise ConfigError(
                f"{path}: row {line} needs Body, Question and a number as Answer, and has "
                f"{', '.join(sorted(row))}. Give SVAMP as published, or data.svamp=null."
            ) from error
        gold = str(int(answer)) if answer.is_integer() else repr(answer)
        columns = {"answer": gold, "style": "gsm8k"}
        prompts.append(_ask(f"svamp:{line}", question, instruction, columns))
    check_golds(prompts, path)
    return tuple(prompts)


def _ask(identity: str, question: str, instruction: str, columns: dict[str, Any]) -> Prompt:
    text = f"{question}\n\n{instruction}" if instruction else question
    return Prompt(identity, ({"role": "user", "content": text},), columns=columns)
