"""Fewer processes or another device than was asked for, and processes that end, are told of."""

from __future__ import annotations

import os
import re
import runpy
import signal
import socket
import subprocess
import sys
import time
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from zoo import distributed
from zoo.config import ConfigError
from zoo.models.models import Models


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


LAUNCH = (
    ("/x/bin/python", "/x/bin/accelerate", "launch"),
    ("/x/bin/python", "/x/bin/accelerate-launch"),
    ("python", "-m", "accelerate.commands.launch"),
    ("python", "-m", "accelerate.commands.accelerate_cli", "launch"),
)
TWO = (("--num_processes", "2"), ("--num_processes=2",), ("--num-processes", "2"))


@pytest.mark.parametrize(
    "words",
    [
        *((*launch, "--cpu", "--num_processes", "2") for launch in LAUNCH),
        *((*LAUNCH[0], *words) for words in TWO),
        (*LAUNCH[0], "--config_file", "FILE"),
        (*LAUNCH[1], "--config_file=FILE", "--cpu"),
        (*LAUNCH[0], "--config_file", "FILE", "--num_processes=2"),
    ],
)
def test_one_process_where_two_were_asked_for(
    words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "accelerate.yaml"
    count = 3 if words[-1] == "--num_processes=2" else 2  # the command line comes first
    file.write_text(f"distributed_type: 'NO'\nuse_cpu: true\nnum_processes: {count}\n")
    words = tuple(word.replace("FILE", str(file)) for word in words)
    parent = Parent(*words, "-m", "zoo", "--cfg", "job", "seed=1")
    monkeypatch.setattr(distributed.psutil, "Process", lambda: parent)
    with pytest.raises(ConfigError, match=r"asked for 2 .* torchrun --nproc_per_node 2 -m zoo"):
        distributed.check_launcher()
    monkeypatch.setenv("WORLD_SIZE", "2")  # as it is where two were started
    distributed.check_launcher()


@pytest.mark.parametrize(
    "words",
    [
        (*LAUNCH[0], "--num_processes", "1", "zoo"),
        ("bash",),
        LAUNCH[0],
        (*LAUNCH[1], "--num_processes", "²", "zoo"),
        (*LAUNCH[1], "--config_file", "gone.yaml", "zoo"),
        (*LAUNCH[1], "--cpu", "zoo", "--num_processes", "2"),  # its own argument
    ],
)
def test_one_process_is_fine_where_one_was_asked_for(
    words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(distributed.psutil, "Process", lambda: Parent(*words))
    distributed.check_launcher()


def test_processes_that_would_train_apart_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    build = import_module("zoo.build")
    from zoo.compose import compose
    from zoo.instantiate import structured

    config = structured(compose(["algorithm=grpo", "model=tiny_random"]))
    monkeypatch.setenv("WORLD_SIZE", "2")
    alone = SimpleNamespace(num_processes=1, device="mps")
    monkeypatch.setattr(build, "Accelerator", lambda **settings: alone)
    with pytest.raises(ConfigError, match=r"2 processes .* counts 1 on mps: .* train.device=cpu"):
        build.make_accelerator(config)
    # whatever accelerate counts, each module under training shares its gradients
    monkeypatch.setattr(build, "world_size", lambda: 2)
    models = Models(policy=torch.nn.Linear(1, 1))  # pyright: ignore
    unwrapped = SimpleNamespace(
        device=torch.device("cpu"), prepare=lambda module, optimizer: (module, optimizer)
    )
    with pytest.raises(ConfigError, match="gradients of the policy: accelerate made it a Linear"):
        build._trainables(config, models, unwrapped)  # pyright: ignore


@pytest.mark.parametrize(("groups", "near"), [(5, 4), (7, 8), (1, 2)])
def test_groups_that_cannot_be_dealt_are_told_the_nearest_number(
    groups: int, near: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from zoo.compose import compose
    from zoo.instantiate import structured

    build = import_module("zoo.build")
    monkeypatch.setattr(build, "world_size", lambda: 2)
    config = structured(compose(["model=tiny_random", f"train.groups={groups}"]))
    with pytest.raises(ConfigError, match=rf"={groups} is not .* Try train\.groups={near}\."):
        build.check(config)


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


@pytest.mark.parametrize(
    ("variable", "says"),
    [
        ("LOCAL_RANK=3", "LOCAL_RANK=3. ValueError: .*RANK expected, but not set"),
        ("ACCELERATE_USE_CPU=maybe", "ACCELERATE_USE_CPU=maybe. ValueError: invalid truth value"),
        ("ACCELERATE_USE_MEGATRON_LM=true", "ACCELERATE_USE_MEGATRON_LM=true. ImportError: Mega"),
        ("ACCELERATE_TORCH_DEVICE=meta", "accelerate found meta: .* ACCELERATE_TORCH_DEVICE is"),
    ],
)
def test_variables_of_a_launcher_that_ask_for_what_cannot_be_are_named(
    variable: str, says: str
) -> None:
    program = (  # its own process: accelerate and torch keep what they once read
        "from zoo.build import make_accelerator as m; from zoo.compose import compose\n"
        "from zoo.instantiate import structured\nm(structured(compose([])))"
    )
    kept = {k: v for k, v in os.environ.items() if not k.startswith("ACCELERATE_")}
    name, _, value = variable.partition("=")
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        env=kept | {"CUDA_VISIBLE_DEVICES": "", name: value},
    )
    assert re.search(f"ConfigError: .*{says}", done.stderr), done.stderr


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


@pytest.mark.parametrize(("rank", "size"), [("2", "2"), ("-1", "2"), ("one", "2"), ("1", "1")])
def test_a_process_beyond_those_of_the_launcher_is_refused(
    rank: str, size: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("WORLD_SIZE", size)
    with pytest.raises(ConfigError, match=f"RANK={rank} is none of WORLD_SIZE={size} processes"):
        import_module("zoo.build").make_accelerator(None)


@pytest.mark.parametrize("size", ["abc", "0", "-1", "1.5"])
@pytest.mark.parametrize("rank", ["0", None])
def test_a_number_of_processes_that_is_none_is_refused(
    rank: str | None, size: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", size)
    monkeypatch.delenv("RANK", raising=False)
    if rank is not None:
        monkeypatch.setenv("RANK", rank)
    with pytest.raises(ConfigError, match=rf"WORLD_SIZE={size} is no .* --nproc_per_node 2"):
        import_module("zoo.build").make_accelerator(None)


@pytest.mark.parametrize(
    "before", [signal.SIG_IGN, signal.SIG_DFL, signal.default_int_handler, None]
)
def test_while_processes_are_waited_for_an_ignored_signal_stays_ignored(
    before: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = signal.getsignal(signal.SIGINT)
    try:
        if before is None:  # a handler that is none of Python's, which it cannot put back
            monkeypatch.setattr(signal, "getsignal", lambda number: None)
            monkeypatch.setattr(signal, "signal", lambda *_: pytest.fail("replaced"))
        else:
            signal.signal(signal.SIGINT, before)
        with distributed.waiting_told():
            ends = signal.SIG_DFL if before is signal.default_int_handler else before
            assert signal.getsignal(signal.SIGINT) is ends
        assert signal.getsignal(signal.SIGINT) is before
    finally:
        monkeypatch.undo()
        signal.signal(signal.SIGINT, mine)


@pytest.mark.parametrize(
    ("variable", "waits"), [("FSDP_VERSION", False), ("LOCAL_RANK", True), ("WORLD_SIZE", True)]
)
def test_only_where_processes_meet_they_are_said_to_be_waited_for(
    variable: str, waits: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from zoo.compose import compose
    from zoo.instantiate import structured

    class Slow(Exception):
        pass

    def slow(**_: Any) -> None:
        time.sleep(0.3)
        raise Slow

    build = import_module("zoo.build")
    monkeypatch.delenv("ACCELERATE_MIXED_PRECISION")
    monkeypatch.setenv(variable, "2")
    monkeypatch.setattr(build, "Accelerator", slow)
    monkeypatch.setattr(distributed, "TOLD_AFTER_SECONDS", 0.01)
    with pytest.raises(ConfigError, match=f"{variable}=2. Slow"):
        build.make_accelerator(structured(compose(["train.device=cpu"])))
    assert capsys.readouterr().err.startswith("waiting until all") is waits


def test_a_torch_without_distributed_trains_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in distributed._PLACE:
        monkeypatch.setenv(name, "1")
    monkeypatch.setattr(torch.distributed, "is_available", lambda: False)
    monkeypatch.delattr(torch.distributed, "is_initialized")
    monkeypatch.setitem(sys.modules, "torch.distributed.rendezvous", None)  # importing it fails
    fresh = runpy.run_path(str(distributed.__file__))
    assert fresh["meet"]() is None
    assert fresh["expected_processes"]() == 1 and fresh["gathered"](3) == [3]


@pytest.mark.parametrize("rank", ["0", "1"])
def test_processes_that_do_not_come_are_waited_for_in_vain(
    rank: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from zoo.compose import compose
    from zoo.instantiate import structured

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    told = {"RANK": rank, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    for name, value in told.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(distributed, "PATIENCE", timedelta(seconds=1))
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with pytest.raises(ConfigError, match=rf"(?s)RANK={rank}, WORLD_SIZE=2\. Dist.*Unset those"):
        import_module("zoo.build").make_accelerator(structured(compose(["train.device=cpu"])))
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before
