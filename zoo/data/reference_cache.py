"""Reference log-probs of fixed rows, computed once and kept by content and model hash."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from zoo.batch import Batch
from zoo.data.cache import locked, written_aside
from zoo.data.source import DatasetSource, Group

VERSION = "1"  # of the arithmetic; a change of it makes every file anew


def reference_logprobs(
    source: DatasetSource,
    steps: int,
    folder: Path,
    model_hash: str,
    temperature: float,
    compute: Callable[[Batch], Tensor],
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> dict[int, Tensor]:
    """row key → log-probs [completion length] under the reference, for the rows that a run reads.

    The file's name is a hash of the model's weights and of every row's content: one changed
    character is another file. It is written under a lock and by rename; a damaged one is made anew,
    and so is a file that was written under another name.

    Args:
        source: where the rows come from.
        steps: how many steps will be run; rows that they do not reach are not computed.
        model_hash: of the reference's weights.
        compute: [B, T] log-probs of a batch.
    """
    groups = source.visited(steps)
    keys = [key for group in groups for key in group.row_keys()]
    text = f"{VERSION}:{model_hash}:{temperature}:{sorted(set(keys))}"
    name = hashlib.blake2b(text.encode(), digest_size=10).hexdigest()
    file = folder / f"{name}.safetensors"
    with locked(file):
        found = _read(file, keys)
        if found is None:
            found = _compute(source, groups, compute, progress)
            tensors = {str(key): value for key, value in found.items()}
            with written_aside(file) as temporary:
                save_file(tensors, temporary, metadata={"digest": _digest(file.stem, found)})
    return found


def _read(file: Path, keys: Sequence[int]) -> dict[int, Tensor] | None:
    if not file.is_file():  # reading a pipe would wait for ever
        return None
    try:
        with safe_open(file, framework="pt") as opened:
            found = {int(key): opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118
            digest = (opened.metadata() or {}).get("digest")
    except (SafetensorError, ValueError, OSError):
        return None
    whole = digest == _digest(file.stem, found) and set(keys) <= set(found)
    return found if whole else None


def _digest(name: str, found: dict[int, Tensor]) -> str:
    """safetensors itself would not notice an altered number, nor a file of another model."""
    digest = hashlib.blake2b(name.encode(), digest_size=16)
    for key in sorted(found):
        digest.update(f"{key}:".encode() + found[key].numpy().tobytes())
    return digest.hexdigest()


def _compute(
    source: DatasetSource,
    groups: Sequence[Group],
    compute: Callable[[Batch], Tensor],
    progress: Callable[[int, int], None],
) -> dict[int, Tensor]:
    found: dict[int, Tensor] = {}
    # Those that are there again, as of a mixture's small parts, once.
    different = {tuple(group.row_keys()): group for group in groups}.values()
    # Rows of similar length side by side: little padding.
    ordered = sorted(different, key=lambda g: len(g.prompt.token_ids) + len(g.completions[0]))
    size = 32
    for start in range(0, len(ordered), size):
        batch = source.collate(ordered[start : start + size])
        values = compute(batch).float().cpu()
        for i, key in enumerate(batch.row_keys.tolist()):
            begin, end = int(batch.prompt_lengths[i]), int(batch.lengths[i])
            found[key] = torch.clone(values[i, begin:end])
        done = min(start + size, len(ordered))
        progress(done * len(groups) // len(ordered), len(groups))
    return found
