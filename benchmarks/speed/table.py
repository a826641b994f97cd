"""The bars: from the records of contests to ratios, a table, a chart."""

from __future__ import annotations

import csv
import json
import re
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.speed.contests import BUSY
from benchmarks.speed.workloads import WORKLOADS

STEPS = 5  # fewer are not judged
Records = Mapping[str, dict[str, Any]]


@dataclass(frozen=True)
class Bar:
    """One ratio that is judged; `at_least` says which side of `must` is right."""

    bar: str
    workload: str
    contest: str
    must: float
    aim: float
    at_least: bool
    ratio: Callable[[dict[str, Any]], float]


@dataclass(frozen=True)
class Judged:
    """A bar with what was measured; the fields of a row in speed.json.

    `open` says why a bar is not judged, and is empty where it is: a side that did not take part
    (then there is no ratio), other work on the machine, too few steps, a slower setting of TRL, or
    sides that did not do the same, or whose records do not show it.
    """

    bar: str
    workload: str
    ratio: float | None
    must: float
    aim: float
    met: bool
    samples: int
    load: float
    at_least: bool
    open: str = ""


def median(record: dict[str, Any], name: str, key: str = "seconds") -> float:
    return statistics.median(step[key] for step in record["contenders"][name]["steps"])


def _faster(peer: str, key: str = "seconds") -> Callable[[dict[str, Any]], float]:
    return lambda record: median(record, peer, key) / median(record, "zoo", key)


def _tokens_a_second(record: dict[str, Any], name: str) -> float:
    steps = record["contenders"][name]["steps"]
    return statistics.median(s["tokens_generated"] / s["generate_seconds"] for s in steps)


def _more_tokens(record: dict[str, Any]) -> float:
    return _tokens_a_second(record, "zoo") / _tokens_a_second(record, "plain")


def _over_floor(part: str) -> Callable[[dict[str, Any]], float]:
    return lambda record: (
        median(record, "zoo", f"{part}_seconds") / median(record, "plain", f"{part}_floor")
    )


def _peak(record: dict[str, Any], name: str) -> float:
    return max(step["peak"] for step in record["contenders"][name]["steps"])


def _leaner(peer: str) -> Callable[[dict[str, Any]], float]:
    return lambda record: _peak(record, "zoo") / _peak(record, peer)


def _dpo(record: dict[str, Any]) -> float:
    """zoo's step with the reference's forward pass of its rows, which a run makes once."""
    steps = record["contenders"]["zoo"]["steps"]
    ours = statistics.median(s["seconds"] + s["reference_seconds"] for s in steps)
    return median(record, "TRL") / ours


def _among(one: str, other: str, rollouts: float = 1) -> Callable[[dict[str, Any]], float]:
    """The steps of two of zoo's own; `rollouts`: how many times as many the first makes."""
    return lambda record: median(record, one) / median(record, other) / rollouts


def _growth(record: dict[str, Any]) -> float:
    found = record["vocabulary"]
    return found["extra_bytes_of_twice_the_tokens"] / found["extra_bytes"]


def _gap(workload: str) -> Callable[[dict[str, Any]], float]:
    return lambda record: record["parity"][workload]["absolute"]


LABEL = {"boxstyle": "round,pad=0.15", "facecolor": "white", "edgecolor": "none"}
VOCABULARY = "growth of the vocabulary's share of the peak with twice the tokens"
BARS = (
    Bar(
        "GRPO step against the best TRL",
        "W1 fixed",
        "grpo-W1-fixed",
        1.7,
        2.5,
        True,
        _faster("TRL"),
    ),
    Bar(
        "GRPO step against the best TRL",
        "W1 natural",
        "grpo-W1-natural",
        2.5,
        4.0,
        True,
        _faster("TRL"),
    ),
    Bar(
        "GRPO step against TRL pure bf16",
        "W2 fixed",
        "grpo-W2-fixed",
        2.7,
        4.0,
        True,
        _faster("TRL bf16"),
    ),
    Bar(
        "GRPO step against TRL amp", "W2 fixed", "grpo-W2-fixed", 3.3, 5.0, True, _faster("TRL amp")
    ),
    Bar(
        "GRPO training part against plain padded full logits",
        "W2 fixed",
        "grpo-W2-fixed",
        1.8,
        2.3,
        True,
        _faster("plain", "train_seconds"),
    ),
    Bar(
        "tokens a second against generate (bf16)",
        "W1 fixed",
        "grpo-W1-fixed",
        2.0,
        4.0,
        True,
        _more_tokens,
    ),
    Bar(
        "tokens a second against generate (bf16)",
        "W1 natural",
        "grpo-W1-natural",
        4.0,
        6.0,
        True,
        _more_tokens,
    ),
    Bar(
        "tokens a second against generate (bf16)",
        "W2 fixed",
        "grpo-W2-fixed",
        2.0,
        2.8,
        True,
        _more_tokens,
    ),
    Bar(
        "generation over the floor of matrix products",
        "W2 fixed",
        "grpo-W2-fixed",
        2.0,
        1.5,
        False,
        _over_floor("generate"),
    ),
    Bar(
        "training over the floor of matrix products",
        "W2 fixed",
        "grpo-W2-fixed",
        1.7,
        1.35,
        False,
        _over_floor("train"),
    ),
    Bar("PPO step against TRL 1.12", "W1 fixed", "ppo-W1-fixed", 1.8, 2.5, True, _faster("TRL")),
    Bar("PPO step against TRL 1.12", "W2 fixed", "ppo-W2-fixed", 2.0, 3.0, True, _faster("TRL")),
    Bar(
        "DPO step against TRL, both with the reference's pass",
        "W1 natural",
        "dpo-W1-natural",
        1.5,
        2.2,
        True,
        _dpo,
    ),
    Bar(
        "DPO step against TRL, both with the reference's pass",
        "W2 natural",
        "dpo-W2-natural",
        2.2,
        3.2,
        True,
        _dpo,
    ),
    Bar(
        "DPO step against TRL, both with a cached reference",
        "W1 natural",
        "dpo-W1-natural-cached",
        1.5,
        2.2,
        True,
        _faster("TRL"),
    ),
    Bar(
        "DPO step against TRL, both with a cached reference",
        "W2 natural",
        "dpo-W2-natural-cached",
        2.2,
        3.2,
        True,
        _faster("TRL"),
    ),
    Bar(
        "peak RSS of GRPO against TRL amp",
        "W2 fixed",
        "grpo-W2-fixed",
        0.65,
        0.5,
        False,
        _leaner("TRL amp"),
    ),
    Bar(
        "peak RSS of GRPO against TRL pure bf16",
        "W2 fixed",
        "grpo-W2-fixed",
        0.85,
        0.65,
        False,
        _leaner("TRL bf16"),
    ),
    Bar(
        "peak RSS of PPO against TRL 1.12",
        "W2 fixed",
        "ppo-W2-fixed",
        0.80,
        0.6,
        False,
        _leaner("TRL"),
    ),
    Bar(
        "step per rollout, 4 prompts with G = 16 against G = 4",
        "W2 fixed",
        "grpo-W2-fixed-sizes",
        0.85,
        0.8,
        False,
        _among("zoo G=16", "zoo G=4", rollouts=4),
    ),
    Bar(
        "step with 192 new tokens against 96",
        "W2 fixed",
        "grpo-W2-fixed-sizes",
        2.3,
        2.1,
        False,
        _among("zoo C=192", "zoo C=96"),
    ),
    Bar(VOCABULARY, "8k → 49k", "checks", 1.01, 1.01, False, _growth),
    Bar(
        "log-probs against transformers in float32, nats",
        "W1",
        "checks",
        1e-5,
        1e-5,
        False,
        _gap("W1"),
    ),
    Bar(
        "log-probs against transformers in float32, nats",
        "W2",
        "checks",
        5e-5,
        5e-5,
        False,
        _gap("W2"),
    ),
)


def judge(records: Records) -> list[Judged]:
    """Every bar whose contest was held."""
    found = []
    for bar in BARS:
        record = records.get(bar.contest)
        if record is None:
            continue
        why = _open(bar.contest, record)
        try:
            ratio = bar.ratio(record)
        except (KeyError, TypeError, ZeroDivisionError):  # left out, null or 0
            ratio, why = None, "not measured: a side or a figure of it is missing"
        met = ratio is not None and not why and _reaches(bar, ratio, bar.must)
        sides = record.get("contenders", {}).values()
        samples = min((len(side["steps"]) for side in sides), default=1)
        found.append(
            Judged(
                bar.bar, bar.workload, ratio, bar.must, bar.aim, met, samples,
                record.get("load", 0.0), bar.at_least, why,
            )
        )  # fmt: skip
    return found


def _open(contest: str, record: dict[str, Any]) -> str:
    """Why a contest is not judged; empty where it is."""
    if disturbed(record):
        return "not judged: other work on the machine"
    if found := lacking(contest, record, STEPS):
        return found
    same = all(same for _, _, same in agreement({contest: record}))
    return "" if same else "not judged: the sides differ"


def lacking(contest: str, record: dict[str, Any], least: int, peers: bool = True) -> str:
    """What keeps a record from being judged until it is held again; empty where nothing does.

    Args:
        contest: its name.
        record: of the contest.
        least: fewer timed steps do not count.
        peers: whether TRL's sides are looked at too.
    """
    if found := uneven(record, least) or (peers and not_best(record)):
        return f"not judged: {found}"
    compared = agreement({contest: record}) if peers else ()
    missing = [what for _, what, same in compared if same is None]
    return f"the same work was not shown: {'; '.join(missing)}" if missing else ""


def disturbed(record: Mapping[str, Any]) -> bool:
    """Whether others used the machine meanwhile."""
    return not record["judged"] or record.get("others", 0) > BUSY


def uneven(record: Mapping[str, Any], least: int) -> str:
    """What is wrong with the numbers of timed steps; empty for as many on all sides, and enough."""
    counts = {name: len(side["steps"]) for name, side in record.get("contenders", {}).items()}
    if len(set(counts.values())) > 1:
        return ", ".join(f"{name} {count} steps" for name, count in counts.items())
    fewest = min(counts.values(), default=least)
    return f"{fewest} step{'s' * (fewest > 1)}" if fewest < least else ""


def not_best(record: Mapping[str, Any]) -> str:
    """The side of TRL's that did not run at the best setting of its search; empty if none."""
    for name, side in record.get("contenders", {}).items():
        peer, _, wanted = name.partition(" ")
        if peer != "TRL":
            continue
        tried = [
            one
            for one in record["search"]
            if one["seconds"] is not None and wanted in ("", one["precision"])
        ]
        setting = (side["precision"], side["micro_batch"])
        if not tried:
            return f"no search of settings for {name}"
        best = min(tried, key=lambda one: one["seconds"])
        if setting != (best["precision"], best["micro_batch"]):
            return f"{name} ran at {setting[0]} mb={setting[1]}, the best tried is {best['name']}"
    return ""


def _reaches(bar: Bar | Judged, ratio: float, wanted: float) -> bool:
    return ratio >= wanted if bar.at_least else ratio <= wanted


def agreement(records: Records) -> Iterator[tuple[str, str, bool | None]]:
    """Whether both sides did the same work: (contest, what was compared, same).

    `same` is None where a record lacks what was to be compared.
    """
    for name, record in records.items():
        sides = record.get("contenders", {})
        peers = [side for side in sides if side.startswith("TRL")]
        for peer in peers if "zoo" in sides else ():
            yield from _same(name, peer, sides["zoo"], sides[peer])


# Shares of the larger. TRL's gradients are of bfloat16 weights. Its cached reference is a pass over
# batches in the file's order and the policy's over shuffled ones: other neighbours, other padding,
# other rounding. Six orders of W2's pairs in bfloat16 gave 0.6–2.3 % above ln 2 (one order: 0 %).
NEAR = {"loss": 0.02, "cached loss": 0.04, "grad_norm": 0.05}


def _same(
    contest: str, peer: str, zoo: Mapping[str, Any], trl: Mapping[str, Any]
) -> Iterator[tuple[str, str, bool | None]]:
    algorithm, workload, lengths, *extra = contest.split("-")
    ours, theirs = zoo["steps"], trl["steps"]
    if algorithm in ("dpo", "sft"):
        # Before any update: afterwards float32 masters have moved where bfloat16 weights have not.
        # TRL logs a step after it is told of, so the record after the first holds the first's loss.
        before = zoo.get("first", ours[0])
        for key in ("loss", "grad_norm"):
            a, b = before.get(key), theirs[0].get(key)
            if a is None or b is None:
                yield contest, f"no {key} of zoo or {peer}", None
                continue
            near = NEAR[f"cached {key}" if key == "loss" and "cached" in extra else key]
            close = abs(a - b) <= near * max(abs(a), abs(b))
            yield contest, f"{peer}: {key} {a:.4f} and {b:.4f}", close
        return
    for key in ("reward", "tokens_generated"):
        if any(s.get(key) is None for s in (*ours, *theirs)):
            yield contest, f"no {key} of zoo or {peer}", None
            continue
        a, b = (statistics.mean(s[key] for s in side) for side in (ours, theirs))
        if key == "reward":
            # eighths, uniform on a text of any length: σ ≈ 0.29 a completion
            rows = WORKLOADS[workload].rows
            close = abs(a - b) <= 4 * 0.29 * ((1 / len(ours) + 1 / len(theirs)) / rows) ** 0.5
            yield contest, f"{peer}: mean reward {a:.3f} and {b:.3f}", close
            continue
        decoded = [s["tokens_decoded"] for s in theirs if s.get("tokens_decoded")]
        sampled = f", TRL decoded {statistics.mean(decoded):.0f}" if decoded else ""
        near = 0.01 if lengths == "fixed" else 0.15
        close = abs(a - b) <= near * max(a, b)
        yield contest, f"{peer}: {a:.0f} and {b:.0f} tokens a step{sampled}", close


def write(records: Records, origin: dict[str, Any], out: Path) -> list[Judged]:
    """speed.csv, speed.md, speed.png and speed.json; returns the bars."""
    bars = judge(records)
    out.mkdir(parents=True, exist_ok=True)
    rows = [asdict(bar) for bar in bars]
    same = [{"contest": c, "compared": what, "same": ok} for c, what, ok in agreement(records)]
    document = {"bars": rows, "agreement": same, **origin}
    (out / "speed.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    with open(out / "speed.csv", "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(
            ["contest", "contender", "precision", "micro_batch", "step", "seconds",
             "generate_seconds", "train_seconds", "tokens_generated", "peak_bytes", "loss"]
        )  # fmt: skip
        for name, record in records.items():
            for side, found in record.get("contenders", {}).items():
                for index, s in enumerate(found["steps"]):
                    setting = [found.get("precision", ""), found.get("micro_batch", "")]
                    values = [s.get(k, "") for k in (
                        "seconds", "generate_seconds", "train_seconds", "tokens_generated",
                        "peak", "loss",
                    )]  # fmt: skip
                    writer.writerow([name, side, *setting, index, *values])
    (out / "speed.md").write_text(_page(records, bars, same, origin), encoding="utf-8")
    _chart(bars, out / "speed.png")
    return bars


def table(bars: Sequence[Judged]) -> str:
    """The bars as markdown."""
    lines = ["| bar | workload | measured | must | aim | |", "|---|---|--:|--:|--:|---|"]
    for bar in bars:
        sign = "≥" if bar.at_least else "≤"
        verdict = bar.open or ("met" if bar.met else "missed")
        if bar.met and bar.ratio is not None and _reaches(bar, bar.ratio, bar.aim):
            verdict = "aim met"
        lines.append(
            f"| {bar.bar} | {bar.workload} | {_number(bar.ratio)} | {sign} {_number(bar.must)} | "
            f"{sign} {_number(bar.aim)} | {verdict} |"
        )
    return "\n".join(lines)


def _number(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:.1e}" if abs(value) < 0.01 else f"{value:.2f}"


def _page(
    records: Records,
    bars: Sequence[Judged],
    same: Sequence[dict[str, Any]],
    origin: dict[str, Any],
) -> str:
    parts = [
        "# Speed and memory beside TRL and transformers\n",
        "Both sides make the same steps in turns, each in a process of its own; a figure is the "
        "median of the steps after one to warm up. zoo always trains float32 weights with "
        "bfloat16 arithmetic; TRL runs at its fastest setting of a search over precision and "
        "micro-batch, made for each algorithm and workload. Ratios above 1 mean that zoo is "
        "faster; those of memory and of floors are better when small. zoo's training and TRL's are "
        "whole updates, with clipping and AdamW.\n",
        table(bars),
        "\n## Seconds and memory of a step\n",
        _seconds_table(records),
        *_inside(records),
        "\n## The same work\n",
        COMPARED,
        *[f"- {s['contest']}, {s['compared']}{VERDICTS[s['same']]}" for s in same],
        "\n## TRL's settings that were tried\n",
        *[
            f"- {name}: " + ", ".join(f"{o['name'][4:]} {_tried(o)}" for o in record["search"])
            for name, record in records.items()
            if record.get("search") and "search_of" not in record
        ],
        *[
            f"- {name}: as {record['search_of']}"
            for name, record in records.items()
            if "search_of" in record
        ],
        *_mixed(records),
        f"\nCommands: {_commands(records)}. Commit: {origin['commit']}"
        f"{' with uncommitted changes' if origin['dirty'] else ''}. Machine: "
        f"{'; '.join(origin['machines'])}. Versions: {'; '.join(origin['versions'])}, TRL "
        f"{origin['peers']}.",
    ]
    return "\n".join(parts) + "\n"


COMPARED = (
    "Of GRPO and PPO, where each side samples its own: mean rewards (within four standard "
    "deviations of means of as many uniform eighths) and tokens up to the ends of the texts "
    "(within 1 % at fixed lengths, 15 % at natural ones). The reward is a checksum of the text, "
    "one function for all. Of DPO and SFT, which read the same rows: loss and gradient norm before "
    "any update, within 2 % and 5 % of the larger. DPO's loss is then ln 2 whatever the rows are, "
    "so it shows that policy and reference agree; that the rows do, the norm shows. With a cached "
    "reference TRL makes the reference's pass over batches in the file's order and the policy's "
    "over shuffled ones, and in bfloat16 other neighbours and padding round other ways: up to 1.4 "
    "nats a pair of W2, so its loss lies 0.6–2.3 % above ln 2, and may differ by 4 %.\n\n"
    "At fixed lengths zoo and TRL's PPO sample on past an end (their reward is of the text before "
    "it) and TRL's GRPO and transformers are kept from sampling one: the same number of tokens "
    "either way. At natural lengths TRL's PPO samples until all rows have ended, which is as good "
    "as always to the limit, and cuts the texts afterwards; its seconds hold all it decoded.\n"
)
VERDICTS = {True: "", False: " (**differs**)", None: " (**not shown**)"}


def _mixed(records: Records) -> Iterator[str]:
    machines = {record["machine"] for record in records.values()}
    threads = {str(re.findall(r"--threads[ =](\d+)", r["command"])) for r in records.values()}
    if len(machines) > 1 or len(threads) > 1:
        yield (
            "\n**These records are of different machines or numbers of threads**: compare within a "
            "contest alone."
        )


def _commands(records: Records) -> str:
    """The command of most contests, then those of the others with their names."""
    by: dict[str, list[str]] = {}
    for name, record in records.items():
        by.setdefault(record["command"], []).append(name)
    most = max(by, key=lambda command: len(by[command]))
    rest = [f"`{command}` ({', '.join(by[command])})" for command in by if command != most]
    return "; ".join([f"`{most}`", *rest])


def _tried(one: dict[str, Any]) -> str:
    return f"{one['seconds']:.2f} s" if one["seconds"] is not None else "failed"


def _seconds_table(records: Records) -> str:
    lines = [
        "| contest | contender | step s | generation s | training s | tokens a step | peak MB |",
        "|---|---|--:|--:|--:|--:|--:|",
    ]
    for name, record in records.items():
        for side, found in record.get("contenders", {}).items():
            setting = (
                f" {found['precision']}, mb {found['micro_batch']}" if "precision" in found else ""
            )
            if name.startswith("ppo") and "natural" in name and side == "TRL":
                setting += ", samples to the limit"
            cells = [f"{median(record, side):.2f}"]
            for key in ("generate_seconds", "train_seconds", "tokens_generated"):
                values = [s[key] for s in found["steps"] if s.get(key)]
                form = ".0f" if key.startswith("tokens") else ".2f"
                cells.append(f"{statistics.median(values):{form}}" if values else "")
            peaks = [s["peak"] for s in found["steps"] if s.get("peak")]
            cells.append(f"{max(peaks) / 1e6:.0f}" if peaks else "")
            lines.append(f"| {name} | {side}{setting} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _inside(records: Records) -> Iterator[str]:
    """zoo beside itself: told, not judged. A fat PPO would flatter GRPO."""
    if checks := records.get("checks"):
        relative = max(gap["relative"] for gap in checks["parity"].values())
        yield f"\nLog-probs against transformers in float32: relative gap {relative:.1e} at most."
    equal = records.get("grpo-W2-fixed-rollouts")
    if equal and {"zoo 2 × 16", "zoo 8 × 4"} <= set(equal["contenders"]):
        time = _among("zoo 2 × 16", "zoo 8 × 4")(equal)
        yield (
            f"\nInside zoo, W2: of 32 rollouts, 2 groups of 16 take {time:.2f} of the time of 8 "
            "groups of 4. Only the passes over prompts fall; decoding, the head and the optimizer "
            "do not."
        )
    for workload in ("W1", "W2"):
        grpo, ppo = (records.get(f"{a}-{workload}-fixed") for a in ("grpo", "ppo"))
        if grpo and ppo and all("zoo" in one["contenders"] for one in (grpo, ppo)):
            time = median(grpo, "zoo") / median(ppo, "zoo")
            memory = _peak(grpo, "zoo") / _peak(ppo, "zoo")
            yield (
                f"\nInside zoo, {workload}: a GRPO step takes {time:.2f} of a PPO step's time and "
                f"{memory:.2f} of its peak memory (process included)."
            )


def _chart(bars: Sequence[Judged], path: Path) -> None:
    """How far each bar is past what it must be."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    shown = [bar for bar in bars if bar.must >= 0.01 and bar.ratio]
    ratios = [bar.ratio or 0.0 for bar in shown]
    values = [r / b.must if b.at_least else b.must / r for r, b in zip(ratios, shown, strict=True)]
    aims = [b.aim / b.must if b.at_least else b.must / b.aim for b in shown]
    names = [f"{b.bar}, {b.workload}" for b in shown]
    figure, axes = plt.subplots(figsize=(10, 0.38 * len(shown) + 1.2))
    colors = ["#2a7f62" if b.met else "#b5482a" for b in shown]
    axes.barh(range(len(shown)), values, color=colors)
    axes.plot(aims, range(len(shown)), "k|", markersize=12, label="aim")
    axes.axvline(1, color="black", linewidth=1)
    for index, bar in enumerate(shown):
        axes.text(0.02, index, _number(bar.ratio), va="center", fontsize=8, bbox=LABEL)
    axes.set_yticks(range(len(shown)), names, fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("how far past what it must be (1: just met); in the bar what was measured")
    axes.legend(loc="lower right")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)
