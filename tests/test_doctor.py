"""`zoo doctor`: the exit status, what it names, and a stranger's algorithm on the search path."""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from zoo import contract, doctor
from zoo.cli import main
from zoo.config import ConfigError
from zoo.doctor import Finding, Mark, installation, installed_algorithms

QUICK = ("needs are stated", "micro-batches", "bandit learnt")


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three clauses, and one thread count for the rest of the session."""
    clauses = {name: contract.CLAUSES[name] for name in QUICK}
    monkeypatch.setattr(contract, "CLAUSES", clauses)


@pytest.fixture
def stranger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with an algorithm and its option, as the README tells one to write them."""
    (tmp_path / "strange.py").write_text(
        textwrap.dedent(
            """
            from collections.abc import Iterator
            from dataclasses import dataclass

            from zoo.algorithms.base import Algorithm, DataKind, LossTerm, Needs
            from zoo.batch import Batch
            from zoo.models.models import Models


            @dataclass(frozen=True)
            class Strange(Algorithm):
                sign: float = 1.0

                @property
                def needs(self) -> Needs:
                    return Needs(data=DataKind.examples)

                def losses(self, batch: Batch, models: Models) -> Iterator[LossTerm]:
                    logprobs = models.policy(batch).logprobs
                    kept = logprobs.masked_fill(~batch.completion_mask, 0.0).sum()
                    yield LossTerm("policy", -self.sign * kept / batch.scale.tokens)
            """
        )
    )
    folder = tmp_path / "conf" / "algorithm"
    folder.mkdir(parents=True)
    (folder / "strange.yaml").write_text("_target_: strange.Strange\nsign: 1.0\n")
    (folder / "upside_down.yaml").write_text("_target_: strange.Strange\nsign: -1.0\n")
    (folder / "misspelt.yaml").write_text("_target_: strange.Strange\nsing: 1.0\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "strange", raising=False)
    return tmp_path


def test_strangers_algorithm_is_found_and_passes(
    stranger: Path, quick: None, capsys: pytest.CaptureFixture[str]
) -> None:
    status = main(["doctor", "--algorithms-only", "--config-dir", "conf", "strange", "sft"])
    shown = capsys.readouterr().out
    assert status == 0, shown
    assert "2 of 2 algorithms keep the contract" in shown


def test_broken_algorithm_turns_the_status_red_and_is_named(
    stranger: Path, quick: None, capsys: pytest.CaptureFixture[str]
) -> None:
    status = main(["doctor", "--algorithms-only", "--config-dir", "conf", "upside_down", "sft"])
    shown = capsys.readouterr().out
    assert status == 1
    assert "broken: bandit learnt" in shown and "1 of 2 algorithms keep the contract" in shown
    assert "upside_down, bandit learnt: π(1) is 0.1" in shown


@pytest.mark.parametrize(
    ("line", "word"),
    [
        ("sing: 1.0", "sing"),
        ("sign: ${train.nope}", "'train.nope' not found"),
        ("sign: ???", "sign"),
    ],
)
def test_option_that_cannot_be_built_is_a_finding_beside_the_others(
    line: str, word: str, stranger: Path, quick: None, capsys: pytest.CaptureFixture[str]
) -> None:
    file = stranger / "conf" / "algorithm" / "misspelt.yaml"
    file.write_text(f"_target_: strange.Strange\n{line}\n")
    status = main(["doctor", "--algorithms-only", "--config-dir", "conf", "misspelt", "sft"])
    shown = capsys.readouterr().out
    assert status == 1 and "1 of 2 algorithms keep the contract" in shown
    assert "cannot be built" in shown and word in shown


@pytest.mark.parametrize(
    ("line", "instead", "words"),
    [
        (
            "from zoo.batch import Batch",
            "import sys; sys.exit(0)",
            ["cannot be built", "SystemExit"],
        ),
        ("sign: float = 1.0", "__post_init__ = lambda self: {}['a']", ["cannot be built", "'a'"]),
        ("logprobs = models", "raise SystemExit(0)  # ", ["broken: ", "SystemExit: 0"]),
    ],
)
def test_whatever_a_strangers_code_does_is_a_finding_beside_the_others(
    line: str,
    instead: str,
    words: list[str],
    stranger: Path,
    quick: None,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = stranger / "strange.py"
    file.write_text(file.read_text().replace(line, instead))
    (stranger / "conf" / "algorithm" / "strange.yaml").write_text("_target_: strange.Strange\n")
    assert line not in file.read_text()
    status = main(["doctor", "--algorithms-only", "--config-dir", "conf", "strange", "sft"])
    shown = capsys.readouterr().out
    assert status == 1 and "1 of 2 algorithms keep the contract" in shown
    assert all(word in shown for word in words), shown


def test_unknown_algorithm_is_a_mistake_in_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--algorithms-only", "grop"]) == 2
    shown = capsys.readouterr().err
    assert "there is no algorithm 'grop'" in shown and "grpo" in shown


def test_every_option_of_the_group_is_checked() -> None:
    found = installed_algorithms()
    assert {"sft", "ppo", "dpo", "grpo"} <= set(found)
    assert not any(isinstance(each, ConfigError) for each in found.values())


def test_installation_says_what_is_there() -> None:
    found = list(installation())
    assert {"versions", "device", "threads", "bfloat16", "cache", "model hub", "wandb"} <= {
        finding.what for finding in found
    }
    assert all(finding.detail for finding in found)
    (hub,) = [finding for finding in found if finding.what == "model hub"]
    assert hub.mark is Mark.note and "HF_HUB_OFFLINE" in hub.detail  # set for all tests


def test_folder_that_cannot_be_written_is_bad(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setenv("ZOO_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(doctor.tempfile, "TemporaryFile", refuse)
    cache, outputs = doctor._folders()
    assert cache.mark is outputs.mark is Mark.bad
    assert str(tmp_path) in cache.detail and "ZOO_CACHE" in cache.detail


def test_check_that_fails_does_not_hide_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise RuntimeError("no such device")

    monkeypatch.setattr(doctor, "_device", broken)
    found = list(installation())
    assert any("no such device" in finding.detail for finding in found)
    assert any(finding.what == "versions" for finding in found)


def test_bad_installation_alone_turns_the_status_red(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "installation", lambda: [Finding("disk", Mark.bad, "full")])
    assert main(["doctor", "--installation-only"]) == 1
    assert "full" in capsys.readouterr().out
    monkeypatch.setattr(doctor, "installation", lambda: [Finding("disk", Mark.note, "slow")])
    assert main(["doctor", "--installation-only"]) == 0
