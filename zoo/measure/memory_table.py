"""The bytes of a metered step as a table: a row for each owner, a column for each phase."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from zoo.measure.memory import COPIES, KINDS
from zoo.measure.meter import ACTIVATIONS, CACHE, INPUTS

Peaks = Mapping[str, Mapping[str, int]]  # phase → label → bytes

_KINDS = (KINDS[0], COPIES, *KINDS[1:])
_LAST = (CACHE, INPUTS, ACTIVATIONS, "total")
MB = 1e6


def labels(peaks: Sequence[Peaks]) -> list[str]:
    """The labels that occur: components with their kinds, then what is nobody's, then the total."""
    found = {label for steps in peaks for split in steps.values() for label in split}
    owned = [label for label in found if "/" in label]
    components = ("policy", "critic", "reward_model", "reference", "scorer", "sampler")

    def place(label: str) -> tuple[int, str, int]:
        component, _, kind = label.partition("/")
        first = components.index(component) if component in components else len(components)
        return first, component, _KINDS.index(kind) if kind in _KINDS else len(_KINDS)

    others = sorted(found - set(owned) - set(_LAST))
    return [*sorted(owned, key=place), *others, *(name for name in _LAST if name in found)]


def sizes(components: Mapping[str, Mapping[str, int]]) -> dict[str, int]:
    """component → kind → bytes as a column beside the phases: what there is, peak or not."""
    flat = {f"{name}/{kind}": n for name, kinds in components.items() for kind, n in kinds.items()}
    flat = {label: n for label, n in flat.items() if n}
    return {"total": sum(flat.values()), **flat}


def words(label: str) -> str:
    """A label as it is read: «policy gradients»."""
    return label.replace("_", " ").replace("/", " ")


def text(peaks: Peaks) -> str:
    """The table in plain characters, in megabytes (10⁶); what a phase has not got stays empty."""
    rows = labels([peaks])
    width = max(len(words(label)) for label in rows)
    numbers = {
        (label, phase): f"{split[label] / MB:,.1f}" if label in split else ""
        for phase, split in peaks.items()
        for label in rows
    }
    columns = {
        phase: max(len(phase), *(len(numbers[label, phase]) for label in rows)) for phase in peaks
    }
    head = "memory, MB".ljust(width)
    lines = ["  ".join([head, *(phase.rjust(columns[phase]) for phase in peaks)])]
    for label in rows:
        cells = [numbers[label, phase].rjust(columns[phase]) for phase in peaks]
        lines.append("  ".join([words(label).ljust(width), *cells]))
    return "\n".join(line.rstrip() for line in lines)
