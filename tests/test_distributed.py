"""A launcher that starts fewer processes than it was asked for is told of."""

from __future__ import annotations

import pytest

from zoo import distributed
from zoo.config import ConfigError


class Parent:
    def __init__(self, *words: str) -> None:
        self.words = list(words)

    def parent(self) -> Parent:
        return self

    def cmdline(self) -> list[str]:
        return self.words


@pytest.fixture(autouse=True)
def launched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    monkeypatch.delenv("WORLD_SIZE", raising=False)


@pytest.mark.parametrize(
    "words", [("--num_processes", "2"), ("--num_processes=2",), ("--num-processes", "2")]
)
def test_one_process_where_two_were_asked_for(
    words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    parent = Parent("python", "accelerate", "launch", "--cpu", *words, "-m", "zoo")
    monkeypatch.setattr(distributed.psutil, "Process", lambda: parent)
    with pytest.raises(ConfigError, match=r"asked for 2 .* torchrun --nproc_per_node 2 -m zoo"):
        distributed.check_launcher()
    monkeypatch.setenv("WORLD_SIZE", "2")  # as it is where two were started
    distributed.check_launcher()


@pytest.mark.parametrize(
    "words",
    [("accelerate", "launch", "--num_processes", "1", "zoo"), ("bash",), ("accelerate", "launch")],
)
def test_one_process_is_fine_where_one_was_asked_for(
    words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(distributed.psutil, "Process", lambda: Parent("python", *words))
    distributed.check_launcher()
