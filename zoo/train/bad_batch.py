"""What a refused update leaves behind: its batch, and the rows that a person should look at."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path
from typing import Any

import torch

from zoo.batch import Batch
from zoo.measure.files import remove

INPUTS = ("rewards", "advantages", "returns", "values", "old_logprobs", "ref_logprobs")
NAMED = 6  # rows in a message


def bad_rows(batch: Batch, policy: Any) -> list[tuple[int, str]]:
    """(row, what is not finite in it) for each row that can be blamed; [] where none can.

    First the numbers that the batch brings, on its trained tokens; if those are sound, the
    policy's log-probs of each row by itself.

    Args:
        policy: Policy(Batch) or None; not wrapped: the processes of a run need not have bad rows
            together.
    """
    found = []
    for row in range(batch.n_rows):
        mask = batch.completion_mask[row]
        for name in INPUTS:
            values = getattr(batch, name)
            if values is None or (name == "rewards" and not _scored(batch, row)):
                continue
            value = values[row] if values.dim() == 1 else values[row][mask]
            if not bool(torch.isfinite(value).all()):
                found.append((row, name))
                break
    if found or policy is None:
        return found
    with torch.no_grad():
        for row in range(batch.n_rows):
            alone = batch.select_rows(torch.tensor([row], device=batch.device), 1).trim()
            logprobs = policy(alone).logprobs[alone.completion_mask]
            if not bool(torch.isfinite(logprobs).all()):
                found.append((row, "the policy's log-probs"))
    return found


def describe_rows(batch: Batch, rows: list[tuple[int, str]]) -> str:
    """A noun phrase that names the rows; all of them where none can be blamed."""
    if not rows:
        prompts = ", ".join(batch.prompt_ids[:NAMED])
        more = ", …" if len(batch.prompt_ids) > NAMED else ""
        return f"all rows (each is finite by itself; prompts {prompts}{more})"
    if len(rows) == batch.n_rows and rows[0][1] == "the policy's log-probs":
        return "all rows (the policy's log-probs are not finite: its weights are broken)"
    named = [
        f"{row} (prompt {batch.prompt_ids[row // batch.group_size]}: {what})"
        for row, what in rows[:NAMED]
    ]
    more = f" and {len(rows) - NAMED} more" if len(rows) > NAMED else ""
    return f"row{'s' if len(rows) > 1 else ''} {', '.join(named)}{more}"


def bad_batch_name(step: int, update: int, rank: int) -> str:
    """The file of one process's part of a refused batch.

    Args:
        update: the run's count; a step has as many updates as epochs × minibatches.
    """
    return f"bad_batch_step_{step:06d}_update_{update}{f'.rank{rank}' if rank else ''}.pt"


def forget_bad_batches(folder: Path, step: int) -> None:
    """Remove those of later steps, which a resumed run does again: their warnings are gone too."""
    for file in folder.glob("bad_batch_step_*.pt"):
        found = re.match(r"bad_batch_step_(\d+)", file.name)
        if found and int(found[1]) > step:
            with contextlib.suppress(OSError):  # what may not be removed harms nobody
                remove(file)


def save_bad_batch(path: Path, batch: Batch, reason: str, rows: list[tuple[int, str]]) -> None:
    """The batch with its reason, for `torch.load`."""
    names = ("input_ids", "completion_mask", "row_keys", *INPUTS)
    held = {n: getattr(batch, n).cpu() for n in names if getattr(batch, n) is not None}
    facts = {"prompt_ids": list(batch.prompt_ids), "group_size": batch.group_size}
    torch.save({**held, **facts, "reason": reason, "bad_rows": rows}, path)


def _scored(batch: Batch, row: int) -> bool:
    return batch.scored is None or bool(batch.scored[row])
