"""`zoo audit LABELLED.jsonl`: how often a reward pays for wrong answers and misses right ones."""

from __future__ import annotations

import html
import inspect
import json
import math
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from zoo.config import ConfigError
from zoo.data.left_out import LeftOut, heard
from zoo.rewards.check import RewardError
from zoo.rewards.composite import Weighted
from zoo.rewards.score import Patience, name_of, score
from zoo.types import Completion, Prompt, Reward

HELP = """zoo audit LABELLED.jsonl [reward=NAME] [against=NAME] [style=gsm8k] [out=FOLDER] [limit=N]
          [prompt=FIELD] [completion=FIELD] [gold=FIELD] [label=FIELD] [truncated=FIELD]
          [threshold=0.5] [tokenizer=FOLDER_OR_HUB_NAME] [reward.KEY=VALUE …] [--config-dir DIR]

Asks a reward about answers whose verdict is known, and says how often it is wrong: the share of
wrong answers that it pays (false positives), of right answers that it does not (false negatives),
with 95 % intervals, by reason, the slowest rows, and the rows to read. Each line of the file is one
labelled answer, or holds several as objects with a completion and a label of their own.
A worked gold is read as the reward reads answers: in its own style, or that of style=. Rewards that
judge by no gold need none.
A score of at least threshold is paid (by reward=; 0.5 for against=). Of scores other than 0 and 1
it tells the range and the area under the ROC curve (AUC: 1 where every right answer scores above
every wrong one, 0.5 by chance).
A reward that counts or reads tokens needs a tokenizer: each text then has the ids that a policy
with it would have written, the stop token last. A text is whole, unless the row's field truncated
(true or false) says that the length limit cut it; then it has no stop token.
Log-probs, and a prompt's tokens, no labelled text has: a reward that reads them is refused.
against=NAME asks a second reward and lists where the two differ. out=FOLDER keeps a page to read
(audit.html) and every row with its verdict (audit.jsonl). Exit status 0, whatever the rates are.

  zoo audit solutions.jsonl reward=verifier style=gsm8k out=audit"""

FIELDS = {
    "prompt": ("question", "problem", "prompt", "instruction", "input", "query", "prompts"),
    "completion": ("completion", "solution", "response", "output", "text", "pred"),
    "gold": ("gold", "answer", "ground_truth", "target", "final_answer"),
    "label": ("label", "is_correct", "correct", "expected"),
    "truncated": ("truncated",),
}
READS_PROMPTS = {"Function", "Learned"}  # classes of zoo's, by name: importing them is slow
READS_GOLDS = {"Verifier", "LastNumber"}  # likewise
DRAWS = {"Random"}  # likewise: ids only tell its draws apart
STYLE_OF = {"gsm8k_shaped": "gsm8k"}  # of rows without a style, by the option's name
RIGHT = {"1", "1.0", "true", "pass", "right", "correct", "yes"}
WRONG = {"0", "0.0", "false", "fail", "wrong", "incorrect", "no"}
SHOWN = 8  # rows of each kind on the terminal; the page has up to 200


@dataclass(frozen=True)
class Labelled:
    """One answer whose verdict is known."""

    name: str  # line number, and the field of the line where it holds several
    prompt: Prompt
    completion: str
    right: bool
    truncated: bool = False  # by the length limit
    token_ids: tuple[int, ...] | None = None  # of the completion; None: nobody tokenized it


@dataclass(frozen=True)
class Judged:
    """What a reward said about a labelled answer; `paid` is None where it abstained."""

    row: Labelled
    score: float | None
    reason: str
    seconds: float
    threshold: float = 0.5

    @property
    def paid(self) -> bool | None:
        return None if self.score is None else self.score >= self.threshold

    @property
    def kind(self) -> str:
        if self.paid is None:
            return "abstained"
        if self.paid == self.row.right:
            return "agrees"
        return "false positive" if self.paid else "false negative"


def main(argv: Sequence[str]) -> int:
    """The command; see HELP."""
    from zoo.cli import with_folders

    words = with_folders(argv)
    files = [word for word in words if "=" not in word]
    if not files or {"-h", "--help"} & set(files):
        print(HELP)
        return 0 if files or not argv else 2
    if len(files) > 1:
        raise ConfigError(
            f"zoo audit takes one file and settings as name=value, got {' '.join(files)}. "
            "See `zoo audit --help`."
        )
    settings: dict[str, str] = {}
    overrides: list[str] = []
    packages: list[str] = []
    own = {"reward", "against", "style", "out", "limit", "threshold", "tokenizer", *FIELDS}
    for word in words:
        key, sign, value = word.partition("=")
        if not sign:
            continue
        if key in own:
            settings[key] = value
        elif key.startswith("reward."):
            overrides.append(word)
        elif key == "hydra.searchpath":
            packages.append(word)
        else:
            from zoo.instantiate import did_you_mean

            raise ConfigError(
                f"zoo audit has no setting {key!r}.{did_you_mean(key, own)} "
                f"It knows {', '.join(sorted(own))} and reward.KEY."
            )
    _check(settings)
    limit = int(settings["limit"]) if "limit" in settings else None
    name = settings.get("reward", "verifier")
    rewards = [named_reward(name, [*packages, *overrides])]
    if "against" in settings:
        rewards.append(named_reward(settings["against"], packages))
    style, golds = _style(settings, rewards), any(map(_reads_golds, rewards))
    with heard() as said:
        rows = list(read_labelled(Path(files[0]), settings, limit, golds=golds, style=style))
    for message in said:
        print(f"{message}\n")
    if not rows:
        raise ConfigError(
            f"{files[0]} holds no labelled answers: no line has a label "
            f"({', '.join(FIELDS['label'])}). Name its field, as in label=FIELD."
        )
    silent = [row.name for row in rows if not row.prompt.text]
    if silent and any(map(_reads_prompts, rewards)):
        print(
            f"{len(silent)} of {len(rows)} answers have no prompt ({', '.join(FIELDS['prompt'])}; "
            f"row {silent[0]} first): the reward is asked with an empty one. Name its field, as in "
            "prompt=FIELD.\n"
        )
    if "tokenizer" in settings:
        rows = tokenized(rows, settings["tokenizer"])
    judged = judge(rewards[0], rows, float(settings.get("threshold", 0.5)), name)
    against = settings.get("against")
    other = judge(rewards[1], rows, name=against) if against is not None else None
    print_audit(name, judged, against, other)
    if "out" in settings:
        folder = Path(settings["out"])
        write_audit(folder, name, judged, against, other, list(argv))
        print(f"\n{folder / 'audit.html'}")
    return 0


def _check(settings: Mapping[str, str]) -> None:
    from zoo.rewards.math import STYLES

    if settings.get("style", STYLES[0]) not in STYLES:
        raise ConfigError(f"style must be one of {', '.join(STYLES)}, got {settings['style']!r}.")
    if "limit" in settings and not (settings["limit"].isdecimal() and int(settings["limit"]) > 0):
        raise ConfigError(f"limit must be a number of rows above 0, got {settings['limit']!r}.")
    threshold = math.nan
    with suppress(ValueError):
        threshold = float(settings.get("threshold", 0.5))
    if not math.isfinite(threshold):
        raise ConfigError(f"threshold must be a finite number, got {settings['threshold']!r}.")
    if "out" in settings:
        try:
            Path(settings["out"]).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"out={settings['out']} cannot be made a folder: {error}.") from None


def named_reward(name: str, overrides: Sequence[str]) -> Reward:
    """The reward that an option of conf/reward names."""
    from zoo.compose import compose
    from zoo.instantiate import build, plain

    return build(plain(compose([f"reward={name}", *overrides]).reward), "reward")


def _single(reward: Reward) -> list[Reward]:
    """The reward, or those that it is the sum of."""
    if isinstance(reward, Weighted):
        return [one for _, part in reward.parts.values() for one in _single(part)]
    return [reward]


def _reads_prompts(reward: Reward) -> bool:
    """Whether a reward may read the text of a prompt; zoo's verifiers read columns."""
    kinds = [type(one) for one in _single(reward)]
    return any(k.__name__ in READS_PROMPTS or not k.__module__.startswith("zoo.") for k in kinds)


def _reads_golds(reward: Reward) -> bool:
    """Whether a reward may read the gold answer: of functions those that name it or take all."""
    for one in _single(reward):
        kind = type(one)
        if kind.__module__ == "zoo.rewards.function":
            if _takes_answers(getattr(one, "fn", None)):
                return True
        elif kind.__name__ in READS_GOLDS or not kind.__module__.startswith("zoo."):
            return True
    return False


def _takes_answers(fn: Any) -> bool:
    from zoo.instantiate import locate

    try:
        taken = inspect.signature(locate(fn, "reward.fn") if isinstance(fn, str) else fn).parameters
    except (TypeError, ValueError):  # a builtin that does not say
        return True
    return "answer" in taken or any(p.kind is p.VAR_KEYWORD for p in taken.values())


def _style(settings: Mapping[str, str], rewards: Sequence[Reward]) -> str | None:
    """The style of the file's golds where the rewards say it, so that both are read alike.

    Raises:
        ConfigError: the rewards have styles, and not that of the settings; or several.
    """
    from zoo.rewards.math import STYLES

    found = [getattr(one, "style", None) for reward in rewards for one in _single(reward)]
    own = [style for style in STYLES if style in found]
    given = settings.get("style")
    if given is not None and own and given not in own:
        raise ConfigError(
            f"style={given}, but the reward's own style is {own[0]}: golds and answers would be "
            f"read in different ways. Leave style= out, or give style={own[0]}."
        )
    if given is None and len(own) > 1:
        raise ConfigError(
            f"the rewards read answers in styles {' and '.join(own)}. Say in which one the file's "
            f"golds are, as in style={own[0]}."
        )
    return own[0] if own and given is None else given


def read_labelled(
    path: Path,
    settings: Mapping[str, str],
    limit: int | None = None,
    *,
    golds: bool = True,
    style: str | None = None,
) -> Iterator[Labelled]:
    """The labelled answers of a JSONL file.

    Args:
        golds: whether each row must have a gold answer, as the reward judges by it.
        style: of the golds; None: each row's own.
    Raises:
        ConfigError: no such file, a line that is no JSON object, or one without the fields.
    """
    if not path.is_file():
        raise ConfigError(f"{path} is not a file. Give a JSONL file of labelled answers.")
    made = total = 0
    bare: list[str] = []
    # What is no UTF-8 becomes a mark that is no JSON either, outside a text.
    with path.open(encoding="utf-8-sig", errors="replace") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError as error:
                raise ConfigError(f"{path}, line {number}: no JSON ({error}).") from None
            if not isinstance(row, dict):
                raise ConfigError(f"{path}, line {number}: not an object.")
            total += 1
            before = made
            for name, part in _parts(row, settings):
                yield _labelled(f"{number}{name}", row, part, settings, path, golds, style)
                made += 1
                if limit is not None and made >= limit:
                    break
            if made == before:
                bare.append(str(number))
            if limit is not None and made >= limit:
                break
    if bare and made:
        more = f" and {len(bare) - SHOWN} more" if len(bare) > SHOWN else ""
        warnings.warn(
            f"{path}: {len(bare)} of {total} rows have no label and are not audited (lines "
            f"{', '.join(bare[:SHOWN])}{more}).",
            LeftOut,
            stacklevel=2,
        )


def _parts(
    row: dict[str, Any], settings: Mapping[str, str]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """The row itself, or each object in it with a label, or in its lists with a text too."""
    field = _field(row, "label", settings)
    if field is not None:
        if row[field] is not None:  # null: nobody said whether it is right
            yield "", row
        return
    for key, value in row.items():
        items = [(f"/{key}", value)]
        if isinstance(value, list):
            answers = [(f"/{key}/{place}", item) for place, item in enumerate(value)]
            items = [(name, item) for name, item in answers if _is_answer(item, settings)]
        for name, item in items:
            if isinstance(item, dict) and _field(item, "label", settings) is not None:
                yield name, item


def _is_answer(item: Any, settings: Mapping[str, str]) -> bool:
    """Whether an item of a list has a completion of its own, as no unit test has."""
    return isinstance(item, dict) and _field(item, "completion", settings) is not None


def _field(row: Mapping[str, Any], role: str, settings: Mapping[str, str]) -> str | None:
    names = (settings[role],) if role in settings else FIELDS[role]
    return next((name for name in names if name in row), None)


def _labelled(
    name: str,
    row: dict[str, Any],
    part: dict[str, Any],
    settings: Mapping[str, str],
    path: Path,
    golds: bool,
    style: str | None,
) -> Labelled:
    values = {**row, **part}
    given = {role: _field(values, role, settings) for role in FIELDS}
    found = {role: field for role, field in given.items() if field is not None}
    excused = {"prompt", "truncated", *([] if golds else ["gold"])} - settings.keys()
    missing = [role for role in FIELDS if role not in found.keys() | excused]
    if missing:
        raise ConfigError(
            f"{path}, row {name}: no field for {' and '.join(missing)}; it has "
            f"{', '.join(map(repr, values))}. Name it, as in {missing[0]}=FIELD."
        )
    text = values[found["completion"]]
    if not isinstance(text, str):
        raise ConfigError(
            f"{path}, row {name}: {found['completion']} must be a text, got {text!r:.60}."
        )
    label = str(values[found["label"]]).lower()
    if label not in RIGHT | WRONG:
        raise ConfigError(
            f"{path}, row {name}: the label {label!r} is neither right "
            f"({', '.join(sorted(RIGHT))}) nor wrong ({', '.join(sorted(WRONG))})."
        )
    columns = dict(values)
    # Rewards have it from the completion; a column would seem to be the data's.
    truncated = columns.pop(found["truncated"]) if "truncated" in found else None
    if truncated not in (None, True, False):
        raise ConfigError(
            f"{path}, row {name}: {found['truncated']} must be true or false (whether the length "
            f"limit cut the text), got {truncated!r:.60}. Rename it, or name another field, as in "
            "truncated=FIELD."
        )
    # What one reward implies holds for no other.
    implied = {STYLE_OF.get(settings[role]) for role in ("reward", "against") if role in settings}
    implied = implied.pop() if len(implied) == 1 else None
    if own := settings.get("style") or columns.get("style") or implied:
        columns["style"] = own
    if "gold" in found:
        gold = columns["answer"] = values[found["gold"]]
        if isinstance(gold, str | int | float) and not isinstance(gold, bool):  # else no text
            columns["answer"] = _final(str(gold), style or own or "math")
    question = values[found["prompt"]] if "prompt" in found else None
    if isinstance(question, list) and question and isinstance(question[-1], dict):  # turns
        question = question[-1].get("content", "")
    prompt = Prompt(id=name, text="" if question is None else str(question), columns=columns)
    return Labelled(name, prompt, text, label in RIGHT, bool(truncated))


def _final(gold: str, style: Any) -> str:
    """A gold that is a worked solution is replaced by the answer that it marks."""
    from zoo.rewards.extract import extract

    found = extract(gold, str(style)) if "\n" in gold or "####" in gold else None
    return found.text if found is not None else gold


class Absent(tuple[Any, ...]):
    """Stands for what a labelled text does not have, and remembers that somebody read it.

    To be printed, hashed or copied is not to be read; `dataclasses.asdict` goes through it, and
    reads. A copy in another process raises instead.
    """

    read = away = False

    def __getattr__(self, name: str) -> Any:  # the ways of a list, such as append
        if not name.startswith("__"):
            self._tell()
        raise AttributeError(name)

    def __radd__(self, other: Any) -> Any:  # (1, 2) + ids
        self._tell()
        return (*other,)

    def __copy__(self) -> Absent:
        return self

    def __deepcopy__(self, memo: Any) -> Absent:
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        return Absent, (), {"away": True}

    def _tell(self) -> None:
        self.read = True
        if self.away:
            raise RewardError("a labelled text has no log-probs, and ids only with a tokenizer.")


def _telling(name: str) -> Callable[..., Any]:
    own = getattr(tuple, name)

    def method(self: Absent, *arguments: Any) -> Any:
        self._tell()
        return own(self, *arguments)

    return method


for _name in (
    *("__len__", "__iter__", "__getitem__", "__contains__", "count", "index", "__add__", "__mul__"),
    *("__rmul__", "__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__"),
):
    setattr(Absent, _name, _telling(_name))


def tokenized(rows: Sequence[Labelled], name: str) -> list[Labelled]:
    """The rows with the ids of each completion, as this tokenizer's policy would have written it.

    Raises:
        ConfigError: no such tokenizer, or a text that goes on after a token that ends it.
    """
    from zoo.config import ModelConfig
    from zoo.data.tokenize import encode_completions, stop_token_ids
    from zoo.models.loading import load_tokenizer

    tokenizer = load_tokenizer(ModelConfig(path=name), "tokenizer")
    stops = stop_token_ids(tokenizer, None)
    # A text without a prompt begins a line.
    prompts = [r.prompt if r.prompt.text else replace(r.prompt, text="\n") for r in rows]
    encoded = encode_completions(tokenizer, prompts, [row.completion for row in rows], stops)
    result = []
    for row, ids in zip(rows, encoded, strict=True):
        if not ids:
            raise ConfigError(
                f"row {row.name}: the text goes on after a token that ends a completion, which no "
                f"policy with the tokenizer {name} writes. Cut it there, or leave the row out."
            )
        result.append(replace(row, token_ids=tuple(ids[:-1] if row.truncated else ids)))
    return result


def judge(
    reward: Reward, rows: Sequence[Labelled], threshold: float = 0.5, name: str | None = None
) -> list[Judged]:
    """The reward's word on each row, one at a time so that each is timed.

    Args:
        name: of the reward in messages; default: its own.
    Raises:
        ConfigError: the reward reads tokens that a row does not have.
    """
    from rich.progress import track

    judged = []
    name = name or name_of(reward)
    draws = type(reward).__name__ in DRAWS
    for row in track(rows, "asking", transient=True, disable=len(rows) < 500):
        ids, logprobs, before = Absent(), Absent(), Absent()
        own = row.token_ids
        if own is None:
            own = () if draws else ids
        completion = Completion(row.completion, own, logprobs, row.truncated)
        prompt = replace(row.prompt, token_ids=before)
        started = time.perf_counter()
        try:
            output = score(reward, [prompt], [completion], Patience(of_run=False))
        except RewardError:  # an empty text may be what it failed on
            _refuse_absent(name, row, ids, logprobs, before)
            raise
        seconds = time.perf_counter() - started
        _refuse_absent(name, row, ids, logprobs, before)
        reason = output.reasons[0] if output.reasons else ""
        judged.append(Judged(row, output.total[0], reason, seconds, threshold))
    return judged


def _refuse_absent(name: str, row: Labelled, ids: Absent, logprobs: Absent, prompt: Absent) -> None:
    """Refuses the verdict of a reward that read what is not there, as if it were empty."""
    if ids.read:
        raise ConfigError(
            f"reward {name} reads token ids (row {row.name} first), and labelled texts have none: "
            "what it makes of them would be of empty answers. Name the tokenizer of the policy "
            "that it is to judge, as in tokenizer=FOLDER (a run's policy/, a model's folder or hub "
            "name)."
        )
    if logprobs.read or prompt.read:
        what = "log-probs" if logprobs.read else "the token ids of a prompt"
        raise ConfigError(
            f"reward {name} reads {what} (row {row.name} first), which labelled texts do not have, "
            "with a tokenizer or without. Only a run shows how it judges: see its rollouts.jsonl."
        )


def rates(judged: Sequence[Judged]) -> dict[str, dict[str, Any]]:
    """False-positive, false-negative and agreement rates over decided rows, with intervals."""
    from zoo.functional.statistics import wilson

    decided = [j for j in judged if j.paid is not None]
    wrong = [j for j in decided if not j.row.right]
    right = [j for j in decided if j.row.right]
    counts = {
        "agreement": (sum(j.paid == j.row.right for j in decided), len(decided)),
        "false positives (of wrong answers)": (sum(bool(j.paid) for j in wrong), len(wrong)),
        "false negatives (of right answers)": (sum(not j.paid for j in right), len(right)),
        "abstained": (len(judged) - len(decided), len(judged)),
    }
    return {
        name: {"count": k, "of": n, "rate": k / n, "interval": wilson(k, n)}
        for name, (k, n) in counts.items()
        if n
    }


def auc(judged: Sequence[Judged]) -> float | None:
    """The area under the ROC curve: how often a right answer scores above a wrong one, ties half.

    None where no right or no wrong answer has a score.
    """
    from scipy.stats import rankdata

    decided = [j for j in judged if j.score is not None]
    ranks = rankdata([j.score for j in decided])  # ties share their mean rank
    right = [rank for rank, j in zip(ranks, decided, strict=True) if j.row.right]
    pairs = len(right) * (len(decided) - len(right))
    return float(sum(right) - len(right) * (len(right) + 1) / 2) / pairs if pairs else None


def scale(judged: Sequence[Judged]) -> str | None:
    """A line on what was taken for paid, where scores are other than 0 and 1."""
    scores = [j.score for j in judged if j.score is not None]
    if not set(scores) - {0.0, 1.0}:
        return None
    area = auc(judged)
    line = f"scores from {min(scores):.4g} to {max(scores):.4g}; >= {judged[0].threshold:g} counts"
    return f"{line} as paid" + (f"; AUC = {area:.3f}" if area is not None else "")


def print_audit(
    name: str, judged: Sequence[Judged], other_name: str | None, other: Sequence[Judged] | None
) -> None:
    """Rates, reasons, the slowest rows and the rows to read, on the terminal."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console(highlight=False)
    table = Table(title=f"reward={name}, {len(judged):,} labelled answers", title_justify="left")
    for column in ("", "rate", "95 % interval", "count"):
        table.add_column(column, justify="left" if not column else "right")
    for label, figures in rates(judged).items():
        low, high = figures["interval"]
        table.add_row(
            label,
            f"{figures['rate']:.2%}",
            f"{low:.2%} – {high:.2%}",
            f"{figures['count']:,} of {figures['of']:,}",
        )
    console.print(table)
    if (line := scale(judged)) is not None:
        console.print(line)
    reasons = Counter(j.reason or "–" for j in judged)
    console.print("reasons: " + ", ".join(f"{r} {n:,}" for r, n in reasons.most_common()))
    times = sorted(j.seconds for j in judged)
    p99 = times[min(int(0.99 * len(times)), len(times) - 1)]
    console.print(
        f"time: median {times[len(times) // 2] * 1e6:.0f} µs, 99 % below {p99 * 1e3:.2f} ms, "
        f"slowest {times[-1] * 1e3:.1f} ms"
    )
    for kind in ("false positive", "false negative"):
        found = [j for j in judged if j.kind == kind]
        if found:
            console.print(f"\n{kind}s to read ({min(len(found), SHOWN)} of {len(found)})")
        for j in found[:SHOWN]:
            gold = j.row.prompt.columns.get("answer")
            said = [] if gold is None else [f"gold {_short(str(gold), 40)!r}"]
            said.append(j.reason or f"score {j.score:.4g}")
            tail = " ".join(j.row.completion.split())[-60:]
            console.print(f"  row {j.row.name}: {', '.join(said)}: …{escape(tail)}")
    if other is not None:
        differing = [(a, b) for a, b in zip(judged, other, strict=True) if a.paid != b.paid]
        console.print(f"\n{name} and {other_name} differ on {len(differing):,} rows")
        for a, b in differing[:SHOWN]:
            word = "right" if a.row.right else "wrong"
            console.print(f"  row {a.row.name} (labelled {word}): {a.score} and {b.score}")


def write_audit(
    folder: Path,
    name: str,
    judged: Sequence[Judged],
    other_name: str | None,
    other: Sequence[Judged] | None,
    argv: list[str],
) -> None:
    """audit.html to read, audit.jsonl with every row, audit.json with the rates."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "audit.jsonl").open("w", encoding="utf-8") as file:
        for index, j in enumerate(judged):
            line = {
                "row": j.row.name,
                "right": j.row.right,
                "score": j.score,
                "reason": j.reason,
                "seconds": j.seconds,
                "kind": j.kind,
            }
            if other is not None:
                line[f"score/{other_name}"] = other[index].score
            file.write(json.dumps(line) + "\n")
    record = {
        "reward": name,
        "rates": rates(judged),
        "scale": scale(judged),
        "command": ["zoo", "audit", *argv],
    }
    (folder / "audit.json").write_text(json.dumps(record, indent=1), encoding="utf-8")
    (folder / "audit.html").write_text(_page(name, judged), encoding="utf-8")


def _page(name: str, judged: Sequence[Judged]) -> str:
    head = "".join(
        f"<tr><td>{html.escape(label)}</td><td>{f['rate']:.2%}</td>"
        f"<td>{f['interval'][0]:.2%} – {f['interval'][1]:.2%}</td>"
        f"<td>{f['count']:,} of {f['of']:,}</td></tr>"
        for label, f in rates(judged).items()
    )
    sections = []
    slow = sorted(judged, key=lambda j: -j.seconds)[:20]
    kinds = {
        kind + "s": [j for j in judged if j.kind == kind][:200]
        for kind in ("false positive", "false negative")
    }
    for title, found in {**kinds, "slowest rows": slow}.items():
        rows = "".join(
            f"<details{' open' if i < 5 else ''}><summary>row {html.escape(j.row.name)} · gold "
            f"<b>{html.escape(_short(j.row.prompt.columns.get('answer'), 80))}</b> · "
            f"{html.escape(j.reason)} · {j.seconds * 1e3:.2f} ms</summary>"
            f"<p>{html.escape(_short(j.row.prompt.text or '', 2000))}</p>"
            f"<pre>{html.escape(_short(j.row.completion, 6000))}</pre></details>"
            for i, j in enumerate(found)
        )
        sections.append(f"<h2>{title} ({len(found)})</h2>{rows or '<p>none</p>'}")
    return (
        "<!doctype html><meta charset=utf-8><title>zoo audit</title><style>"
        "body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}"
        "td{padding:.2rem 1rem .2rem 0}pre{white-space:pre-wrap;background:#f5f5f5;padding:.7rem}"
        "summary{cursor:pointer}</style>"
        f"<h1>reward={html.escape(name)}: {len(judged):,} labelled answers</h1>"
        f"<table>{head}</table><p>{html.escape(scale(judged) or '')}</p>{''.join(sections)}"
    )


def _short(text: Any, length: int) -> str:
    text = str(text)
    return text if len(text) <= length else text[: length - 1] + "…"
