"""Which files of a saved policy have their hashes kept, and who compares them."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from zoo.config import ConfigError
from zoo.data.tokenizer import arithmetic_tokenizer
from zoo.models.saved import BEST, HASHES, check_saved, record_hashes
from zoo.train.session import _best_in

TOKENIZER = ("tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt")
SETTINGS = ("config.json", "adapter_config.json")  # lora_alpha decides as much as a weight
BEFORE = {"step": 2, "metric": "heldout/accuracy", "value": 0.5}


def saved(folder: Path) -> Path:
    save_file({"w": torch.zeros(2)}, folder / "model.safetensors")
    for name in (*TOKENIZER, *SETTINGS, "tokenizer_config.json", "chat_template.jinja"):
        (folder / name).write_text(name)
    return folder


def test_weights_settings_and_what_decides_the_tokens_are_recorded(tmp_path: Path) -> None:
    record_hashes(saved(tmp_path), BEST, **BEFORE)
    found = json.loads((tmp_path / BEST).read_text())
    hashes = found.pop("sha256")
    assert found == BEFORE
    assert hashes.pop("model.safetensors")
    names = (*SETTINGS, *TOKENIZER)
    assert hashes == {name: hashlib.sha256(name.encode()).hexdigest() for name in names}


@pytest.mark.parametrize("name", [*TOKENIZER, *SETTINGS, "model.safetensors"])
@pytest.mark.parametrize("kind", ["altered", "gone"])
def test_each_file_of_a_record_is_compared(name: str, kind: str, tmp_path: Path) -> None:
    record_hashes(saved(tmp_path))
    for tokens in (False, True):
        check_saved(tmp_path, "model.path", tokens)
    if kind == "gone":
        (tmp_path / name).unlink()
    else:
        (tmp_path / name).write_text("another")
    with pytest.raises(ConfigError, match=f"model.path=.*: {name} is "):
        check_saved(tmp_path, "model.path", name in TOKENIZER)
    # Either may be taken from where the other is gone, or another.
    check_saved(tmp_path, "model.path", name not in TOKENIZER)


def test_how_a_tokenizer_padded_its_last_batch_is_no_alteration(tmp_path: Path) -> None:
    tokenizer = arithmetic_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    before = (tmp_path / "tokenizer.json").read_bytes()
    record_hashes(tmp_path)
    tokenizer(["1 + 1", "2"], padding=True, truncation=True, max_length=2)
    tokenizer.save_pretrained(tmp_path)
    assert (tmp_path / "tokenizer.json").read_bytes() != before
    check_saved(tmp_path, "model.tokenizer", tokens=True)


def test_a_record_from_before_says_nothing_of_settings(tmp_path: Path) -> None:
    weights = saved(tmp_path) / "model.safetensors"
    hashes = {weights.name: hashlib.sha256(weights.read_bytes()).hexdigest()}
    (tmp_path / HASHES).write_text(json.dumps({"sha256": hashes}))
    (tmp_path / BEST).write_text(json.dumps(BEFORE | {"sha256": hashes}))
    for name in SETTINGS:
        (tmp_path / name).write_text("another")
    check_saved(tmp_path, "model.path")
    assert _best_in(tmp_path, unaltered=True) == BEFORE


@pytest.mark.parametrize("name", SETTINGS)
def test_a_best_policy_with_other_settings_is_dropped(name: str, tmp_path: Path) -> None:
    record_hashes(saved(tmp_path), BEST, **BEFORE)
    (tmp_path / name).write_text("another")
    assert _best_in(tmp_path, unaltered=True) is None
    assert _best_in(tmp_path) == BEFORE


@pytest.mark.parametrize("name", TOKENIZER)
def test_a_best_policy_is_kept_whatever_its_tokenizer_and_dropped_for_its_weights(
    name: str, tmp_path: Path
) -> None:
    record_hashes(saved(tmp_path), BEST, **BEFORE)
    assert _best_in(tmp_path, unaltered=True) == BEFORE
    (tmp_path / name).write_text("another")
    assert _best_in(tmp_path, unaltered=True) == BEFORE
    save_file({"w": torch.ones(2)}, tmp_path / "model.safetensors")
    assert _best_in(tmp_path, unaltered=True) is None
    assert _best_in(tmp_path) == BEFORE


@pytest.mark.parametrize("hashes", [1, "model.safetensors", [2]])
def test_a_best_policy_whose_hashes_are_none_is_damaged(hashes: object, tmp_path: Path) -> None:
    (saved(tmp_path) / BEST).write_text(json.dumps(BEFORE | {"sha256": hashes}))
    assert _best_in(tmp_path, unaltered=True) is None
