"""Fewer processes or another device than was asked for, and processes that end, are told of."""

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


@pytest.mark.parametrize(
    ("error", "gone"),
    [
        (RuntimeError("[/x/third_party/gloo/gloo/transport/tcp/pair.cc:537] GLHF!"), True),
        (RuntimeError("Connection closed by peer [127.0.0.1]:4000"), True),
        (RuntimeError("shapes do not fit"), False),
        (OSError("Connection reset by peer"), False),  # a reward's or a hub's server
    ],
)
def test_an_error_of_the_connection_says_where_to_read_on(error: Exception, gone: bool) -> None:
    assert ("error.rankN.txt" in distributed.without_peer(error)) is gone


@pytest.mark.parametrize("device", ["cuda", "mps"])
def test_a_device_that_is_not_there_is_refused(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from zoo.build import make_accelerator
    from zoo.compose import compose
    from zoo.instantiate import structured

    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")  # as if there were none
    monkeypatch.setenv("WORLD_SIZE", "1")
    with pytest.raises(ConfigError, match=f"train.device={device}, but accelerate found cpu"):
        make_accelerator(structured(compose([f"train.device={device}"])))
