"""Two processes train as one, resume each other's runs, and fail together."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conftest import REPOSITORY
from tests.e2e.small import SMALL, folder_of, run_small

ONE_STEP = ["train.steps=1", "evaluate.first=false", "evaluate.last=false"]
SFT = ["algorithm=sft", "train.steps=4", "evaluate.every=0"]
ALGORITHMS = {
    "sft": ["algorithm=sft"],
    "dpo": ["algorithm=dpo"],
    "kto": ["algorithm=kto"],
    "grpo": ["algorithm=grpo", "algorithm.kl_coef=0.1"],
    "dapo": ["algorithm=dapo", "rollout.max_rounds=2"],
    "ppo": ["algorithm=ppo"],
    "enough": ["algorithm=grpo", "algorithm._target_=tests.e2e.faulty.EnoughOnProcessOne"],
}
ALGORITHMS["enough"] += ["algorithm.epochs=3"]
UNEVEN = ["rollout.max_rounds=2", "reward=function"]
UNEVEN += ["reward.fn=tests.e2e.faulty.signal_for_the_first_process"]
DROPPING = ("dapo", "online_dpo", "rejection_sampling")
ALGORITHMS |= {f"{name}_uneven": [f"algorithm={name}", *UNEVEN] for name in DROPPING}


def torchrun(*arguments: str, cache: Path, seconds: float = 240) -> subprocess.CompletedProcess:
    environment = {
        **os.environ,
        "CUDA_VISIBLE_DEVICES": "",  # nothing else says that they are to train on the CPU
        "OMP_NUM_THREADS": "1",
        "ZOO_CACHE": str(cache),
    }
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return subprocess.run(
        [*launcher, "--nproc_per_node", "2", "-m", *arguments],
        cwd=REPOSITORY,
        env=environment,
        capture_output=True,
        text=True,
        timeout=seconds,
    )


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every run of this file: `one/…` by this process, `two/…` by two."""
    base = tmp_path_factory.mktemp("two_processes")
    jobs: list[dict[str, Any]] = [
        {"output": str(base / "two" / name), "overrides": [*overrides, *ONE_STEP]}
        for name, overrides in ALGORITHMS.items()
    ]
    infinite = ["algorithm=grpo", "algorithm._target_=tests.e2e.faulty.InfiniteOnProcessOne"]
    jobs.append({"output": str(base / "infinite"), "overrides": [*infinite, *ONE_STEP]})
    nan = ["algorithm=grpo", "algorithm._target_=tests.e2e.faulty.NaNOnProcessOne"]
    nan += ["algorithm.epochs=2", "algorithm.minibatches=2"]
    jobs.append({"output": str(base / "nan"), "overrides": [*nan, *ONE_STEP]})
    jobs.append({"output": str(base / "one_then_two"), "overrides": SFT})
    jobs.append({"output": str(base / "two_then_one"), "overrides": SFT, "stop_after": 2})
    (base / "jobs.json").write_text(json.dumps(jobs))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ZOO_CACHE", str(base / "cache"))
        for name, overrides in ALGORITHMS.items():
            run_small(base / "one" / name, *overrides, *ONE_STEP)
        run_small(base / "one" / "resumed", *SFT)
        stop_after_two(patch)
        with pytest.raises(KeyboardInterrupt, match="Step 2 of 4"):
            run_small(base / "one_then_two", *SFT)
        patch.undo()
        patch.setenv("ZOO_CACHE", str(base / "cache"))
        done = torchrun("tests.e2e.two", str(base / "jobs.json"), cache=base / "cache_two")
        assert done.returncode == 0, done.stdout + done.stderr
        assert "FutureWarning" not in done.stderr  # once a process, of a library's own names
        run_small(base / "two_then_one", *SFT)
    return base


def stop_after_two(patch: pytest.MonkeyPatch) -> None:
    import signal

    from zoo.train.session import Session

    record = Session.record

    def interrupted(self: Session, step: int, *arguments: Any) -> None:
        record(self, step, *arguments)
        if step == 2:
            signal.raise_signal(signal.SIGINT)

    patch.setattr(Session, "record", interrupted)


def metrics(output: Path) -> list[dict[str, Any]]:
    return [json.loads(x) for x in (folder_of(output) / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_first_update_is_that_of_one_process(name: str, outputs: Path) -> None:
    one, two = (folder_of(outputs / n / name) / "checkpoints/step_000001" for n in ("one", "two"))
    files = sorted(path.name for path in one.glob("optimizer_*.pt"))
    assert files
    for file in files:
        a, b = (torch.load(folder / file, weights_only=True)["state"] for folder in (one, two))
        for index, state in a.items():
            # Adam's first moment after one update is 0.1 of the gradient; it is not all 0
            gap = (state["exp_avg"] - b[index]["exp_avg"]).abs().max()
            assert gap < 1e-6, (file, index)
        assert any(state["exp_avg"].abs().max() > 1e-5 for state in a.values())
    (first,), (second,) = metrics(outputs / "one" / name), metrics(outputs / "two" / name)
    assert second["skipped_updates"] == 0
    for key in ("completions", "tokens/generated", "tokens/trained", "reward/total"):
        assert first.get(key) == pytest.approx(second.get(key)), key
    found = json.loads((folder_of(outputs / "two" / name) / "meta.json").read_text())
    assert found["n_processes"] == 2


@pytest.mark.parametrize("name", DROPPING)
def test_no_signal_is_lost_where_another_process_has_less(name: str, outputs: Path) -> None:
    (one,), (two,) = (metrics(outputs / n / f"{name}_uneven") for n in ("one", "two"))
    assert one["groups/dead"] == two["groups/dead"] == 0.5  # three of six, all on one process
    assert one["empty_batch"] == two["empty_batch"] == 0
    for key in {"loss/policy", "entropy", "margin", "kl_ref", "ratio"} & one.keys():
        assert one[key] == pytest.approx(two[key], rel=1e-5, abs=1e-6), key
    # of all that was sampled, not of the rows that a process happens to read
    assert one["entropy/sampled"] == pytest.approx(two["entropy/sampled"], rel=1e-6)
    if name == "dapo":  # the other process was filled up with three groups, and reads one of them
        assert (one["skipped/groups"], two["skipped/groups"]) == (0, pytest.approx(2 / 6))


def test_the_infinite_loss_of_one_process_is_refused_by_both(outputs: Path) -> None:
    folder = folder_of(outputs / "infinite")
    (only,) = metrics(outputs / "infinite")
    assert only["skipped_updates"] == 1 and "grad_norm/policy" not in only
    assert "step 1: update refused, loss/policy is inf; " in (folder / "warnings.jsonl").read_text()
    kept = {path.name for path in folder.glob("bad_batch*")}
    assert kept == {f"bad_batch_step_000001_update_1{rank}.pt" for rank in ("", ".rank1")}
    for file in (folder / "checkpoints/step_000001").glob("optimizer_*.pt"):
        assert not torch.load(file, weights_only=True)["state"]  # that of no update


def test_each_refused_update_of_a_step_is_kept_by_both_for_the_loss_of_one(outputs: Path) -> None:
    folder = folder_of(outputs / "nan")
    (only,) = metrics(outputs / "nan")
    assert only["skipped_updates"] == 4
    kept = {path.name for path in folder.glob("bad_batch*")}
    ranks = ("", ".rank1")
    assert kept == {f"bad_batch_step_000001_update_{n}{r}.pt" for n in range(1, 5) for r in ranks}
    for file in folder.glob("bad_batch*"):  # not that of the gradient, which all have
        assert torch.load(file, weights_only=True)["reason"] == "loss/policy is nan"
    told = (folder / "warnings.jsonl").read_text()
    assert "loss/policy is nan; row 1 (" in told and "update_1.rank1.pt" in told
    assert "all rows" not in told  # those of the other process are sound


@pytest.mark.parametrize("name", ["one_then_two", "two_then_one"])
def test_a_checkpoint_is_resumed_by_another_number_of_processes(name: str, outputs: Path) -> None:
    whole, resumed = metrics(outputs / "one" / "resumed"), metrics(outputs / name)
    assert [m["step"] for m in resumed] == [1, 2, 3, 4]
    for a, b in zip(whole, resumed, strict=True):
        for key in ("loss/policy", "length/mean", "tokens/trained_total", "lr/policy"):
            # sums in another order: a few parts in a million of the loss after four updates
            assert a[key] == pytest.approx(b[key], rel=1e-4), (key, a["step"])
    facts = json.loads((folder_of(outputs / name) / "meta.json").read_text())
    numbers = [facts["n_processes"], *(again["n_processes"] for again in facts["resumed"])]
    assert numbers == ([1, 2] if name == "one_then_two" else [2, 1])


REWARD_FAILS = ["reward=function", "reward.fn=tests.e2e.faulty.fails_on_process_one"]
LOSS_MISSING = ["algorithm._target_=tests.e2e.faulty.SilentOnProcessOne"]


@pytest.mark.parametrize(
    ("overrides", "message", "recorded"),
    [
        (
            ["algorithm=grpo", *REWARD_FAILS],
            "reward fails_on_process_one raised ZeroDivisionError: a fault of process 1 alone",
            "process 1 alone",
        ),
        (
            ["algorithm=grpo", *LOSS_MISSING],
            "algorithm=silent_on_one: the processes' losses yielded different terms (rank 0 "
            "policy, rank 1 none)",
            "rank 1 none",
        ),
    ],
)
def test_the_failure_of_one_process_ends_all_with_its_message(
    overrides: list[str], message: str, recorded: str, tmp_path: Path
) -> None:
    began = time.monotonic()
    done = torchrun(
        "zoo", *SMALL, f"output={tmp_path}", *overrides, *ONE_STEP, cache=tmp_path / "cache"
    )
    assert done.returncode != 0
    assert message in " ".join(done.stderr.split())  # wrapped into a block
    assert time.monotonic() - began < 90  # not the half hour that a collective waits
    errors = [path.read_text() for path in folder_of(tmp_path).glob("error*.txt")]
    assert any(recorded in error for error in errors)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("seed", "seed is 1 there and 0 on process 0"),
        ("algorithm.kl_coef", "algorithm.kl_coef is 1.0 there and 0.0 on process 0"),
    ],
)
def test_processes_that_were_started_for_different_runs_are_refused(
    setting: str, message: str, tmp_path: Path
) -> None:
    job = {"output": str(tmp_path / "out"), "overrides": [f"{setting}=<rank>", *ONE_STEP]}
    (tmp_path / "jobs.json").write_text(json.dumps([job]))
    done = torchrun("tests.e2e.two", str(tmp_path / "jobs.json"), cache=tmp_path / "cache")
    assert done.returncode != 0
    assert f"process 1 was started for another run than process 0: {message}" in " ".join(
        done.stderr.split()
    )
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("InAnotherOrderOnProcessOne", "training rows"),
        ("OtherProblemsOnProcessOne", "problems of an evaluation"),
    ],
)
def test_processes_whose_data_come_in_another_order_are_refused_before_the_first_step(
    name: str, what: str, tmp_path: Path
) -> None:
    data = f"data._target_=tests.e2e.faulty.{name}"
    job = {"output": str(tmp_path / "out"), "overrides": ["algorithm=grpo", data, *ONE_STEP]}
    (tmp_path / "jobs.json").write_text(json.dumps([job]))
    done = torchrun("tests.e2e.two", str(tmp_path / "jobs.json"), cache=tmp_path / "cache")
    assert done.returncode != 0
    assert f"process 1 made other {what} than process 0, or in another order" in done.stderr
    assert metrics(tmp_path / "out") == []


@pytest.mark.parametrize("why", ["another process is running", "another configuration"])
def test_a_folder_that_process_zero_may_not_have_is_refused_by_all(
    why: str, tmp_path: Path
) -> None:
    """Without torchrun, which would end the second where the first has ended."""
    from zoo.compose import compose
    from zoo.instantiate import run_dir, structured
    from zoo.train.lock import FolderLock

    job = [*SMALL, *SFT, "name=mine", "train.device=cpu", f"output={tmp_path / 'out'}"]
    folder = run_dir(structured(compose(job)))
    folder.mkdir(parents=True)
    lock = FolderLock(folder)
    program = "import sys; from zoo.cli import main; sys.exit(main(sys.argv[1:]))"
    if why == "another configuration":  # of a run that came, and ended, before the lock was taken
        (tmp_path / "late.py").write_text(LATE)
        program = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import late; {program}"
    else:
        lock.acquire()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    place |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", program, *job],
            cwd=REPOSITORY,
            env=os.environ | place | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        said = [process.communicate(timeout=120)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
        lock.release()
    assert [process.returncode for process in processes] == [2, 2], said
    assert all(why in " ".join(text.split()) for text in said), said
    assert not any(word in text for text in said for word in ("Traceback", "ended first"))
    assert not list(folder.glob("error*"))


LATE = """
from pathlib import Path
from zoo.train.lock import FolderLock

take = FolderLock.acquire

def late(self):
    take(self)
    folder = Path(self._path).parent
    (folder / "meta.json").write_text('{"config_hash": "0123"}')
    (folder / "metrics.jsonl").write_text('{"step": 1}')

FolderLock.acquire = late
"""


@pytest.mark.parametrize(
    ("rank", "size", "address", "number"),
    [
        (0, 2, "127.0.0.1", signal.SIGINT),
        (1, 2, "127.0.0.1", signal.SIGTERM),
        (0, 1, "nohost.invalid", signal.SIGTERM),
    ],
)
def test_a_process_that_waits_for_others_says_so_and_ends_by_a_signal(
    rank: int, size: int, address: str, number: signal.Signals, tmp_path: Path
) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    told = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "MASTER_PORT": port}
    process = subprocess.Popen(
        [sys.executable, "-m", "zoo", *SMALL, *SFT, "train.device=cpu", f"output={tmp_path}"],
        cwd=REPOSITORY,
        env=os.environ
        | {name: str(value) for name, value in told.items()}
        | {"MASTER_ADDR": address},
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stderr is not None
        said = next((line for line in process.stderr if line.startswith("waiting until")), "")
        assert f"at {address}:{port} (WORLD_SIZE={size}, MASTER_ADDR" in said
        process.send_signal(number)
        assert process.wait(60) == -number
    finally:
        process.kill()
        process.communicate()
    assert not any(tmp_path.iterdir())
