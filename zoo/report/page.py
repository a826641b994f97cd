"""One HTML file that holds a whole comparison: it can be mailed, archived and opened offline."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

import yaml

from zoo.measure.memory_table import MB, labels, words
from zoo.report.figures import colours
from zoo.report.runs import READING, Arm, Run, different_settings
from zoo.report.tables import (
    CAPTION,
    DIFFERENCES_CAPTION,
    Column,
    Comparison,
    Estimate,
    block_title,
    blocks,
    p_values,
    points,
    seeds_text,
)

EXAMPLES = 6  # problems shown for each arm


def page(
    title: str,
    arms: Sequence[Arm],
    comparison: Comparison,
    concerns: Sequence[str],
    pictures: dict[str, bytes],
    record: dict[str, Any],
) -> str:
    """The page as text, without a reference to anything outside it.

    Args:
        pictures: PNG by title; the first stands above the tables.
    """
    images = [_image(name, data) for name, data in pictures.items()]
    sections = [
        f"<h1>{escape(title)}</h1>",
        _provenance_line(record),
        _concerns(concerns),
        "<h2>Results</h2>",
        *images[:1],
        *(_block(comparison, block) for block in blocks(comparison)),
        f"<p class=note>{escape(CAPTION)}</p>",
        _differences(comparison),
        _memory(arms),
        "<h2>More figures</h2>" if images[1:] else "",
        *images[1:],
        "<h2>Completions to read</h2>",
        "<p class=note>The same held-out problems before training and after it, sampled at T = 1 "
        "from the first seed.</p>",
        *(_examples(arm, colours(arms)[arm.label]) for arm in arms if not arm.untrained),
        "<h2>Configuration</h2>",
        _settings(arms),
        *(_config(arm) for arm in arms),
        "<h2>Where this comes from</h2>",
        _provenance(arms, record),
    ]
    body = "\n".join(section for section in sections if section)
    return (
        "<!doctype html>\n<html lang=en>\n<head>\n<meta charset=utf-8>\n"
        '<meta name=viewport content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{STYLE}</style>\n</head>\n"
        f"<body>\n<main>\n{body}\n</main>\n</body>\n</html>\n"
    )


STYLE = """
:root { color-scheme: light; }
body { margin: 0; background: #fafafa; color: #222;
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", sans-serif; }
main { max-width: 1120px; margin: 0 auto; padding: 24px 28px 64px; background: #fff; }
h1 { font-size: 26px; margin: 8px 0; } h2 { font-size: 20px; margin: 40px 0 8px; }
h3 { font-size: 16px; margin: 24px 0 6px; }
.note { color: #666; font-size: 13px; max-width: 80ch; }
.concerns { border-left: 4px solid #D55E00; background: #fff4ec; padding: 8px 16px; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: 14px; font-variant-numeric: tabular-nums; }
caption { text-align: left; font-weight: 600; padding: 16px 0 4px; }
th, td { padding: 5px 12px 5px 0; text-align: right; vertical-align: top;
  border-bottom: 1px solid #eee; }
th { font-weight: 600; color: #555; border-bottom-color: #bbb; }
th:first-child, td:first-child, td.left, th.left { text-align: left; }
td small { display: block; color: #777; font-size: 12px; }
tr.same td { color: #999; }
img { max-width: 100%; height: auto; display: block; margin: 16px 0; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; margin: 2px 0; font-size: 13px;
  font-family: ui-monospace, Menlo, Consolas, monospace; }
.example { border-top: 1px solid #eee; padding: 8px 0; }
.example .two { display: grid; grid-template-columns: 1fr 1fr; gap: 16px; }
.right { color: #00704f; } .wrong { color: #b34700; }
details { margin: 6px 0; } summary { cursor: pointer; }
"""


def _provenance_line(record: dict[str, Any]) -> str:
    commits = _all(record.get("commit"))
    commit = ", ".join(str(one)[:10] for one in commits) or "unknown"
    dirty = " with uncommitted changes" if record.get("dirty") else ""
    where = "; ".join(
        f"{machine.get('gpu') or machine.get('cpu')}, {machine.get('cores')} cores"
        for machine in _all(record.get("machine"))
    )
    return (
        f"<p class=note><code>{escape(str(record.get('command', '')))}</code><br>"
        f"commit {escape(commit)}{dirty} · {escape(where)}</p>"
    )


def _all(value: Any) -> list[Any]:
    """What the runs agree on, or the list of what they say."""
    if value is None:
        return []
    return value if isinstance(value, list) else [value]


def _concerns(concerns: Sequence[str]) -> str:
    if not concerns:
        return ""
    items = "".join(f"<li>{escape(text)}</li>" for text in concerns)
    return f"<div class=concerns><strong>Read this first</strong><ul>{items}</ul></div>"


def _image(title: str, png: bytes) -> str:
    data = base64.b64encode(png).decode()
    return f'<img alt="{escape(title)}" src="data:image/png;base64,{data}">'


def _block(comparison: Comparison, block: str) -> str:
    columns = [column for column in comparison.columns if column.block == block]
    head = "".join(f"<th>{escape(column.title)}</th>" for column in columns)
    rows = []
    for row in comparison.rows:
        cells = "".join(_cell(column, row.estimates[column.key]) for column in columns)
        label = f"{escape(row.label)}<small>{escape(seeds_text(row, block))}</small>"
        rows.append(f"<tr><td>{label}</td>{cells}</tr>")
    return (
        f"<div class=scroll><table><caption>{escape(block_title(block))}</caption>"
        f"<tr><th></th>{head}</tr>{''.join(rows)}</table></div>"
    )


def _cell(column: Column, e: Estimate) -> str:
    if e.value is None:
        return "<td>–</td>"
    text = escape(column.show(e.value))
    if e.problems is not None:
        text += f"<small>[{column.show(e.problems[0])}, {column.show(e.problems[1])}]</small>"
    if e.seeds is not None and e.seeds[0] != e.seeds[1]:
        text += f"<small>({column.show(e.seeds[0])}, {column.show(e.seeds[1])})</small>"
    return f"<td>{text}</td>"


def _differences(comparison: Comparison) -> str:
    if not comparison.differences:
        return ""
    rows = "".join(
        f"<tr{' class=same' if d.verdict == 'no difference' else ''}>"
        f"<td>{escape(d.first)} − {escape(d.second)}</td><td class=left>{escape(d.set)}</td>"
        f"<td>{escape(points(d))}</td><td class=left>{escape(d.verdict)}</td>"
        f"<td>{escape(p_values(d))}</td></tr>"
        for d in comparison.differences
    )
    return (
        "<div class=scroll><table><caption>Differences</caption><tr><th></th><th class=left>set"
        "</th><th>points</th><th class=left>verdict</th><th>McNemar p</th></tr>"
        f"{rows}</table></div><p class=note>{escape(DIFFERENCES_CAPTION)}</p>"
    )


def _memory(arms: Sequence[Arm]) -> str:
    """Whose bytes are alive at the peak of each phase, in the metered step of each arm."""
    probes = {arm.label: arm.finished[0].probe for arm in arms if arm.finished}
    probes = {label: peaks for label, peaks in probes.items() if peaks}
    if not probes:
        return ""
    columns = labels(list(probes.values()))
    head = "".join(f"<th>{escape(words(name))}</th>" for name in columns)
    rows = []
    for arm, peaks in probes.items():
        for phase, split in peaks.items():
            cells = "".join(
                f"<td>{split[name] / MB:,.1f}</td>" if name in split else "<td></td>"
                for name in columns
            )
            rows.append(f"<tr><td>{escape(arm)}<small>{escape(phase)}</small></td>{cells}</tr>")
    return (
        "<h2>Memory</h2><div class=scroll><table><caption>Live tensors at the peak of each phase, "
        f"MB</caption><tr><th></th>{head}</tr>{''.join(rows)}</table></div><p class=note>Exact "
        "bytes, from a step after the last one whose prompts and completions are as long as they "
        "may be; it trains nothing. Memory inside kernels and the process itself come on top.</p>"
    )


def _examples(arm: Arm, colour: str) -> str:
    head = f'<h3 style="color:{colour}">{escape(arm.label)}</h3>'
    if not arm.finished:
        return head + "<p class=note>No finished run.</p>"
    try:
        samples = [row for row in arm.finished[0].samples() if row.get("set") == "heldout"]
        last_step = max((int(row["step"]) for row in samples), default=0)
    except READING as error:
        what = f"{arm.finished[0].folder / 'eval_samples.jsonl'} is damaged: {error!r}"
        return f"{head}<p class=note>{escape(what)}</p>"
    first = _by_problem(row for row in samples if row["step"] == 0)
    last = _by_problem(row for row in samples if row["step"] == last_step)
    common = [name for name in last if name in first][:EXAMPLES]
    if last_step == 0 or not common:
        return head + "<p class=note>No completions of one problem before and after.</p>"
    return head + "".join(_example(first[name], last[name]) for name in common)


def _by_problem(rows: Iterable[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for row in rows:
        found.setdefault(str(row.get("prompt_id")), row)
    return found


def _example(first: dict[str, Any], last: dict[str, Any]) -> str:
    sides = "".join(
        f"<div><span class={'right' if row.get('score') else 'wrong'}>{when}: "
        f"{escape(str(row.get('reason') or ('right' if row.get('score') else 'wrong')))}</span>"
        f"<pre>{escape(str(row.get('text', '')))}</pre></div>"
        for when, row in (("before", first), (f"step {last['step']}", last))
    )
    answer = f" <small>(answer: {escape(str(last['answer']))})</small>" if "answer" in last else ""
    return (
        f"<div class=example><pre>{escape(str(last.get('prompt', '')))}</pre>{answer}"
        f"<div class=two>{sides}</div></div>"
    )


def _settings(arms: Sequence[Arm]) -> str:
    """The settings in which the arms differ."""
    different = different_settings(arms)
    if not different:
        return ""
    head = "".join(f"<th class=left>{escape(arm.label)}</th>" for arm in arms)
    rows = "".join(
        f"<tr><td>{escape(key)}</td>"
        + "".join(f"<td class=left>{escape(value)}</td>" for value in values)
        + "</tr>"
        for key, values in different.items()
    )
    return (
        "<div class=scroll><table><caption>Settings in which the arms differ</caption>"
        f"<tr><th></th>{head}</tr>{rows}</table></div>"
    )


def _config(arm: Arm) -> str:
    text = yaml.safe_dump(arm.runs[0].config, sort_keys=False, allow_unicode=True)
    return (
        f"<details><summary>{escape(arm.label)}: all settings</summary>"
        f"<pre>{escape(text)}</pre></details>"
    )


def _provenance(arms: Sequence[Arm], record: dict[str, Any]) -> str:
    text = yaml.safe_dump(record, sort_keys=False, allow_unicode=True)
    runs = "".join(
        f"<tr><td>{escape(arm.label)}</td><td>{run.seed}</td><td class=left>{run.progress()}</td>"
        f"<td class=left><code>{escape(_command(run))}</code></td></tr>"
        for arm in arms
        for run in arm.runs
    )
    return (
        f"<pre>{escape(text)}</pre><div class=scroll><table><tr><th>arm</th><th>seed</th>"
        f"<th class=left>status</th><th class=left>command</th></tr>{runs}</table></div>"
    )


def _command(run: Run) -> str:
    arguments = [str(a) for a in run.meta.get("argv") or []]
    return " ".join(["zoo", *arguments[1:]])
