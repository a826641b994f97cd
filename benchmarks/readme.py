"""Fill README's generated block from committed results: python -m benchmarks.readme [--check].

The block stands between `<!-- results:quickstart begin -->` and `<!-- results:quickstart end -->`.
With --check nothing is written and the exit status says whether it is up to date.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


def render(results: Path, link: str) -> str:
    """The block's text from a results folder.

    Args:
        results: the folder with record.json, table.md and the figures.
        link: its path as README links to it.
    """
    record = json.loads((results / "record.json").read_text(encoding="utf-8"))
    table = (results / "table.md").read_text(encoding="utf-8").strip()
    parts = [
        f"![Accuracy on held-out problems against training steps, generated tokens and seconds]"
        f"({link}/figure.png)",
        table,
        f"![Memory by component and by phase]({link}/memory.png)",
        _origin(record, link),
    ]
    if record.get("concerns"):
        parts.insert(2, "\n".join(f"- Note: {text}" for text in record["concerns"]))
    return "\n\n".join(parts)


def fill(text: str, suite: str, block: str) -> str:
    """`text` with the block of a suite replaced.

    Raises:
        ValueError: the two marks are not there once each, in order.
    """
    begin, end = f"<!-- results:{suite} begin -->", f"<!-- results:{suite} end -->"
    if text.count(begin) != 1 or text.count(end) != 1 or text.index(begin) > text.index(end):
        raise ValueError(f"README must hold {begin} and, after it, {end}, once each.")
    head, rest = text.split(begin)
    _, tail = rest.split(end)
    return f"{head}{begin}\n{block}\n{end}{tail}"


def main(arguments: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    path = ROOT / "README.md"
    text = path.read_text(encoding="utf-8")
    new = fill(text, "quickstart", render(ROOT / "results" / "quickstart", "results/quickstart"))
    if new == text:
        print("README.md is up to date.")
        return 0
    if "--check" in arguments:
        print("README.md differs from results/quickstart. Run python -m benchmarks.readme.")
        return 1
    path.write_text(new, encoding="utf-8")
    print("README.md was filled from results/quickstart.")
    return 0


def _origin(record: dict[str, Any], link: str) -> str:
    commits, machines = _all(record.get("commit")), _all(record.get("machine"))
    commit = ", ".join(str(one)[:10] for one in commits) or "unknown"
    where = "; ".join(
        f"{machine.get('cores')} cores ({machine.get('gpu') or machine.get('cpu')})"
        for machine in machines
    )
    dirty = " with uncommitted changes" if record.get("dirty") else ""
    seeds = "; ".join(
        f"{label}: {', '.join(map(str, values))}" for label, values in record["seeds"].items()
    )
    return (
        f"Made by `{record['command']}` at commit {commit}{dirty} in {record['minutes']} minutes "
        f"on {where}; seeds {seeds}. "
        f"[Page with completions to read]({link}/page.html) · [csv]({link}/table.csv) · "
        f"[record]({link}/record.json)"
    )


def _all(value: Any) -> list[Any]:
    if value is None:
        return []
    return value if isinstance(value, list) else [value]


if __name__ == "__main__":
    sys.exit(main())
