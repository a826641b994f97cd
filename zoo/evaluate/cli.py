"""`zoo evaluate model=PATH data=…`: score any saved policy, without training anything."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from zoo.config import ConfigError, RunConfig
from zoo.data.rows import expanded
from zoo.measure.progress import display

HELP = """zoo evaluate model=NAME_OR_FOLDER [data=…] [evaluate.problems=N] [out=FILE] [key=value …]
             [--config-dir DIR]

Scores a model on the evaluation sets of a data set: accuracy at T = 1, greedy, pass@k, perplexity.
model is an option of conf/model, a folder that transformers can load (a run's policy/), or a run's
folder. out=FILE keeps the full record, one JSON line for each set. Examples:

  zoo evaluate model=tiny
  zoo evaluate model=outputs/default/grpo-1a2b3c4d/seed_0/policy data=arithmetic
  zoo evaluate model=smollm2_135m data=digits evaluate.problems=50"""


def main(argv: Sequence[str]) -> int:
    """The command; prints a table and returns 0."""
    if not argv or {"-h", "--help"} & set(argv):
        print(HELP)
        return 0
    from zoo.cli import with_folders

    overrides, out = [], None
    for word in with_folders(argv):
        key, _, value = word.partition("=")
        if key == "out":
            out = _writable(value)
        elif key == "model":
            if not value:
                raise ConfigError(
                    f"{word} names no model. Write, for example, model=tiny, or model=FOLDER with "
                    "a run's folder."
                )
            overrides += model_overrides(value)
        else:
            overrides.append(word)
    from zoo.compose import compose
    from zoo.data.offered import sets_of
    from zoo.data.table import without_problems
    from zoo.instantiate import complete, structured

    config = complete(structured(compose(overrides)))
    if (told := _other_data(config, overrides)) is not None:
        print(told)
    records = evaluate(config)
    if os.environ.get("RANK", "0") != "0":
        return 0  # one process of several tells, and writes
    print_scores(records)
    if told := without_problems(config.data, sets_of(config.data)):
        print(told)
    if out is not None:
        with _told_of(out):
            out.write_text("".join(json.dumps(record) + "\n" for record in records))
        print(out)
    return 0


def _writable(value: str) -> Path:
    """The file to write, tried before anything is computed for it.

    Raises:
        ConfigError: it cannot be written.
    """
    if not value:
        raise ConfigError("out= names no file. Write, for example, out=scores.jsonl.")
    out = expanded(value, "out")
    with _told_of(out):
        out.parent.mkdir(parents=True, exist_ok=True)
        out.open("a").close()
    return out


@contextmanager
def _told_of(out: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"out={out} cannot be written: {error.strerror or error}. Give another file."
        ) from error


def model_overrides(value: str) -> list[str]:
    """A folder or hub name after `model=` as overrides; an option's name as it is.

    Raises:
        ConfigError: neither an option nor a folder.
    """
    from zoo.compose import hydra_session, options

    with hydra_session():
        names = [option.name for option in options("model")]
    if value in names:
        return [f"model={value}"]
    folder = Path(value).expanduser()
    if any((folder / "policy" / name).exists() for name in ("config.json", "adapter_config.json")):
        folder = folder / "policy"
    if folder.exists() or "/" in value:
        path = str(folder) if folder.exists() else value
        quoted = path.replace("\\", "\\\\").replace("'", "\\'")
        return ["model=hub", f"model.path='{quoted}'"]
    from zoo.instantiate import did_you_mean

    raise ConfigError(
        f"model={value} is neither an option of conf/model ({', '.join(names)}) nor a folder."
        f"{did_you_mean(value, names, 'model=')}"
    )


def _other_data(config: RunConfig, overrides: Sequence[str]) -> str | None:
    """A line where the model is of a run on other data, and nobody chose the data to judge on."""
    from omegaconf import OmegaConf

    from zoo.compose import option_of
    from zoo.instantiate import resolved

    keys = {word.partition("=")[0].lstrip("+~") for word in overrides}
    record = Path(config.model.path or "").expanduser().parent / "config.yaml"
    if keys & {"data", "experiment"} or not config.model.path or not record.is_file():
        return None
    try:
        read: Any = OmegaConf.to_container(OmegaConf.load(record))
        trained_on = dict(read["data"])
    except Exception:  # it is not needed for the scores, and may be of something else
        return None
    now = resolved(config)["data"]
    if all(now.get(k) == v or f"data.{k}" in keys for k, v in trained_on.items()):
        return None
    name, settings = option_of("data", trained_on)
    if name is None:
        return (
            f"the run was trained on data of the class {trained_on.get('_target_')}; add its "
            "data=NAME, and --config-dir where it lies in a folder of yours, to judge on that"
        )
    plain = {k: v for k, v in settings.items() if isinstance(v, str | int | float | None)}
    words = [f"data={name}"]
    words += [f"data.{k}={'null' if v is None else v}" for k, v in [*plain.items()][:4]]
    words += ["…"] * (len(words) <= len(settings))
    return f"the run was trained on {' '.join(words)}; add that to judge on it"


def evaluate(config: RunConfig, show: bool = True) -> list[dict[str, Any]]:
    """One record for each evaluation set of `config.data`, of the model as it is.

    Args:
        config: of a run; only model, data, rollout, evaluate and seed matter.
        show: progress on the terminal.
    """
    from zoo.build import check_judging, load_start, make_accelerator, make_evaluator
    from zoo.compose import option_of
    from zoo.instantiate import complete, resolved

    config = complete(config)
    check_judging(config)
    values = resolved(config)["data"]
    data = option_of("data", values)[0] or values.get("_target_")
    model = config.model.path or config.model.recipe
    shown = display(1, f"evaluating {model} on data={data}", enabled=show)
    try:
        start = load_start(config, make_accelerator(config).device, 1.0, shown.task)
        results = make_evaluator(config, start).evaluate(start.policy)
    finally:
        shown.close()
    return [{**result.record, "texts": result.samples} for result in results]


def print_scores(records: Sequence[dict[str, Any]]) -> None:
    """A table of the sets, with 95 % intervals over problems.

    They are those of a report: T = 1 by a bootstrap that resamples problems, since samples of one
    are not independent; Wilson for greedy, and where all or no answers are right.
    """
    from rich.console import Console
    from rich.table import Table

    from zoo.report.runs import Evaluation
    from zoo.report.tables import estimate

    def figure(record: dict[str, Any], measure: str) -> str:
        one = Evaluation(0, record["set"], record["kind"], 0, record)
        found = estimate([one], measure, between_seeds=False)
        if found.value is None:
            return ""
        low, high = found.problems or (found.value, found.value)
        return f"{found.value:.1%} [{low:.1%}, {high:.1%}]"

    table = Table(title=None)
    for column in ("set", "T = 1", "greedy", "pass@k", "perplexity", "length", "cut", "n"):
        side = "left" if column == "set" else "right"
        table.add_column(column, justify=side, overflow="fold")
    for record in records:
        if record["kind"] == "perplexity":
            figures = ["", "", "", f"{record['perplexity']:.3f}", "", "", str(record["n_texts"])]
        else:
            passes = ", ".join(f"{k}: {v:.1%}" for k, v in record["pass@k"].items())
            figures = [
                figure(record, "accuracy"),
                figure(record, "greedy"),
                passes,
                "",
                "" if record["length"] is None else f"{record['length']:.1f}",
                "" if record["truncated"] is None else f"{record['truncated']:.1%}",
                str(record["n_problems"]),
            ]
        table.add_row(record["set"], *figures)
    Console().print(table)
    for record in records:
        if record.get("unscored"):
            print(
                f"{record['set']}: the verifier could not score {record['unscored']:.1%} of the "
                "answers; they count as not right, and a set of them alone has no accuracy."
            )
