"""The shape of a record, checked where records are read: what follows may rely on it."""

from __future__ import annotations

import math
from typing import Any

TOLD = ("command", "commit", "machine", "versions")  # texts of every record
POSITIVE = ("train_seconds", "reference_seconds", "generate_floor", "train_floor")
COUNTS = ("generate_seconds", "tokens_generated", "tokens_decoded", "tokens_trained")
RESULTS = ("reward", "loss", "grad_norm")


def check(name: str, record: Any) -> None:
    """Whether this is a record of the contest of that name.

    Raises:
        ValueError: it is not; names the field, its value and what it should be.
    """
    _is(record, dict, "the whole")
    if record.get("contest") != name:
        raise ValueError(f"contest is {record.get('contest')!r:.60}, not {name!r}")
    for key in ("judged", "dirty"):
        _is(record.get(key), bool, key)
    for key in TOLD:
        _is(record.get(key), str, key)
    for key in ("load", "others"):
        if key in record:
            _number(record[key], key)
    if name == "checks":
        _checks(record)
        return
    check_search(record.get("search"))
    _is(record.get("contenders"), dict, "contenders")
    if not record["contenders"]:
        raise ValueError("contenders is empty")
    for side, found in record["contenders"].items():
        _side(f"contenders.{side}", side, found)


def check_search(tried: Any) -> None:
    """Whether this is what was tried of TRL's settings.

    Raises:
        ValueError: it is not; names the field, its value and what it should be.
    """
    _is(tried, list, "search")
    for index, one in enumerate(tried):
        where = f"search[{index}]"
        _is(one, dict, where)
        _is(one.get("name"), str, f"{where}.name")
        _setting(one, where)
        if "seconds" not in one:
            raise ValueError(f"{where}.seconds is missing; null says that the setting failed")
        if one["seconds"] is not None:
            _number(one["seconds"], f"{where}.seconds", above=True)


def _side(where: str, side: str, found: Any) -> None:
    _is(found, dict, where)
    if side.startswith("TRL") or "precision" in found:
        _setting(found, where)
    _is(found.get("steps"), list, f"{where}.steps")
    if not found["steps"]:
        raise ValueError(f"{where}.steps is empty")
    for index, step in enumerate(found["steps"]):
        at = f"{where}.steps[{index}]"
        _is(step, dict, at)
        for key in ("seconds", "peak"):
            _number(step.get(key), f"{at}.{key}", above=True)
        for key in (*POSITIVE, *COUNTS):
            if step.get(key) is not None:
                _number(step[key], f"{at}.{key}", above=key in POSITIVE)
        _results(step, at)
    if "first" in found:
        _is(found["first"], dict, f"{where}.first")
        _results(found["first"], f"{where}.first")


def _checks(record: dict[str, Any]) -> None:
    if "contenders" in record:
        raise ValueError("contenders is there, and checks have none")
    for key in ("parity", "vocabulary"):
        _is(record.get(key), dict, key)
    for workload in ("W1", "W2"):
        _is(record["parity"].get(workload), dict, f"parity.{workload}")
        for key in ("absolute", "relative"):
            _number(record["parity"][workload].get(key), f"parity.{workload}.{key}")
    for key in ("extra_bytes", "extra_bytes_of_twice_the_tokens"):
        _number(record["vocabulary"].get(key), f"vocabulary.{key}", above=True)


def _setting(found: dict[str, Any], where: str) -> None:
    _is(found.get("precision"), str, f"{where}.precision")
    _number(found.get("micro_batch"), f"{where}.micro_batch", above=True)


def _results(step: dict[str, Any], where: str) -> None:
    for key in RESULTS:  # a loss that is not a number is a result too, and agrees with none
        if step.get(key) is not None:
            _is(step[key], (int, float), f"{where}.{key}")


def _is(value: Any, kind: Any, where: str) -> None:
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        names = {dict: "an object", list: "a list", str: "a text", bool: "true or false"}
        raise ValueError(f"{where} is {value!r:.60}, not {names.get(kind, 'a number')}")


def _number(value: Any, where: str, above: bool = False) -> None:
    _is(value, (int, float), where)
    if not math.isfinite(value) or value < 0 or (above and value == 0):
        least = "above 0" if above else "of at least 0"
        raise ValueError(f"{where} is {value!r:.60}, not a finite number {least}")
