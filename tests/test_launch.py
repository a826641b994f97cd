"""Launching jobs: sweeps, failures, interruptions, kills; the jobs are a small script."""

from __future__ import annotations

import io
import os
import pty
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from rich.console import Console

from zoo.config import ConfigError
from zoo.launch import LaunchResult, Status, clock, expand, launch, sweep, swept
from zoo.train.lock import FolderLock

REPOSITORY = Path(__file__).resolve().parents[1]

# A job in a few lines: `id=…` names its folder, `do=…` says what happens. It keeps the contract
# of a run: it tells its folder, returns at once when its summary is there, tells that it has begun
# there, and writes the summary last.
JOB = """
import json, os, signal, sys, time
from pathlib import Path
values = dict(text.split("=", 1) for text in sys.argv[1:])
folder = Path(os.environ["ROOT"]) / values["id"]
do = values.get("do", "finish")
if do == "refuse":
    print("zoo: error: algorithm=grop does not exist")
    Path(os.environ["ZOO_RUN_DIR_FILE"]).write_text(str(folder))
    sys.exit(2)
if do.startswith("beside"):  # another run begins in the folder while this one looks at it
    Path(os.environ["ZOO_RUN_DIR_FILE"]).write_text(str(folder) + "\\n")
    for name in values["files"].split(","):
        (folder / name).write_text("seed: 0")
    if do == "beside_killed":
        os.kill(os.getpid(), signal.SIGKILL)
    print("another process is running")
    sys.exit(int(values["status"]))
folder.mkdir(exist_ok=True)
Path(os.environ["ZOO_RUN_DIR_FILE"]).write_text(f"{folder}\\n")
if (folder / "summary.json").exists():
    sys.exit(0)
Path(os.environ["ZOO_RUN_DIR_FILE"]).write_text(f"{folder}\\nbegun\\n")
if do == "refuse_late":
    print("no pairs")
    sys.exit(2)
with (folder / "starts").open("a") as file:
    file.write(f"{os.getpid()} {os.environ.get('OMP_NUM_THREADS', '')}\\n")
if do == "fail":
    print("about to fail")
    raise RuntimeError("the job broke")
if do == "fail_with_record":
    (folder / "error.txt").write_text("Traceback of the run: broke")
    sys.exit(1)
if do == "kill":
    os.kill(os.getpid(), signal.SIGKILL)
if do == "wait":
    def stop(number, frame):
        (folder / "stopped").write_text(signal.Signals(number).name)
        sys.exit(130)
    signal.signal(signal.SIGINT, stop)
    signal.signal(signal.SIGTERM, stop)
    (folder / "waiting").touch()
    time.sleep(30)
if do == "meet":  # ends only while the other job runs, too
    deadline = time.time() + 20
    while not (folder.parent / values["other"] / "starts").exists():
        assert time.time() < deadline, "the other job never started"
        time.sleep(0.02)
if do == "loud":  # more than the 64 KiB that a pipe holds
    sys.stdout.buffer.write(("·" * 99 + "\\n").encode() * 1000)
if do == "terminal":
    (folder / "terminal").write_text(str(sys.stdout.isatty()))
part = folder / "part"
part.write_text(json.dumps({"final": {"heldout": {"accuracy": 0.475}}}))
part.rename(folder / "summary.json")
if do == "set_back":  # the clock, meanwhile
    os.utime(folder / "summary.json", (1, 1))
"""


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    script = tmp_path / "job.py"
    script.write_text(JOB)
    monkeypatch.setenv("ROOT", str(tmp_path))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    return [sys.executable, str(script)]


def run(command: list[str], *jobs: str, **options: object) -> tuple[LaunchResult, str]:
    out = io.StringIO()
    console = Console(file=out, width=200)
    result = launch([job.split() for job in jobs], command=command, console=console, **options)
    return result, out.getvalue()


def starts(folder: Path) -> list[str]:
    return (folder / "starts").read_text().splitlines()


# ---------------------------------------------------------------------------------------- expand


def test_commas_give_the_product_with_the_first_varying_slowest():
    assert expand(["algorithm=ppo,dpo", "seed=0,1", "model=tiny"]) == [
        ["algorithm=ppo", "seed=0", "model=tiny"],
        ["algorithm=ppo", "seed=1", "model=tiny"],
        ["algorithm=dpo", "seed=0", "model=tiny"],
        ["algorithm=dpo", "seed=1", "model=tiny"],
    ]


def test_choice_and_range_are_run_through():
    assert expand(["a=choice(x,y)"]) == [["a=x"], ["a=y"]]
    assert expand(["seed=range(1,7,2)"]) == [["seed=1"], ["seed=3"], ["seed=5"]]
    assert expand(["+lr=range(0.0,0.5,0.25)"]) == [["+lr=0.0"], ["+lr=0.25"]]


def test_a_comma_in_quotes_or_brackets_does_not_split():
    assert expand(["name='a,b'"]) == [["name='a,b'"]]
    assert expand(["betas=[0.9,0.95]"]) == [["betas=[0.9,0.95]"]]
    assert expand(["x={a:1,b:2}"]) == [["x={a:1,b:2}"]]
    assert expand(["name='a,b','c,d'"]) == [["name='a,b'"], ["name='c,d'"]]
    assert expand(["betas=[0.9,0.95],[0.8,0.9]"]) == [["betas=[0.9,0.95]"], ["betas=[0.8,0.9]"]]


def test_deletions_and_plain_values_stay_as_they_were_written():
    assert expand(["~reward", "++a.b=1e-4", "text="]) == [["~reward", "++a.b=1e-4", "text="]]


@pytest.mark.parametrize(
    "value", ["choice(0,1),2", "choice(choice(0,1),2)", "range(0,2),5", "[choice(0,1),2],3"]
)
def test_lists_of_values_inside_another_are_refused(value: str):
    with pytest.raises(ConfigError, match=r"has a list of values inside another\..* a,b,c"):
        expand([f"seed={value}"])


def test_equal_jobs_run_once():
    assert expand(["seed=0,1,0"]) == [["seed=0"], ["seed=1"]]


@pytest.mark.parametrize(
    ("words", "count"),
    [
        (["seed=range(0,1e9)"], "1,000,000,000"),
        (["seed=shuffle(range(0,20000))"], "20,000"),
        (["lr=range(0.0,1.0,1e-5)"], "100,000"),
        (["seed=range(0,2,0)"], "endlessly many"),
        (["lr=range(0.0,2.0,0)"], "endlessly many"),
        (["seed=range(0,101)", "lr=range(0,100)"], "10,100"),
    ],
)
def test_more_jobs_than_can_be_meant_are_refused_before_they_are_written_out(words, count):
    with pytest.raises(ConfigError, match=f"makes {count} jobs, more than 10,000"):
        expand(words)


def test_as_many_jobs_as_the_limit_are_expanded():
    assert len(expand(["seed=range(0,100)", "lr=range(100,0,-1)"])) == 10_000


@pytest.mark.parametrize("text", ["lr=interval(0,1)", "algorithm=glob(*)", "seed=range(3,1)"])
def test_a_sweep_without_a_list_of_values_is_refused(text: str):
    with pytest.raises(ConfigError, match=r"interval|glob|empty range"):
        expand([text])


def test_what_is_no_override_is_refused_with_its_text():
    with pytest.raises(ConfigError, match=r"seed=\(0") as caught:
        expand(["seed=(0"])
    assert "Traceback" not in str(caught.value) and len(str(caught.value)) < 400


# ---------------------------------------------------------------------------------------- launch


def test_jobs_run_one_after_the_other_and_report_their_folders(command, tmp_path):
    result, text = run(command, "id=a", "id=b")
    assert [job.status for job in result.jobs] == [Status.finished, Status.finished]
    assert result.folders == [tmp_path / "a", tmp_path / "b"]
    assert result.exit_status == 0
    # b began after a had written its summary
    written = (tmp_path / "a" / "summary.json").stat().st_mtime
    assert (tmp_path / "b" / "starts").stat().st_mtime >= written
    assert "[1/2] id=a" in text and "[2/2] id=b" in text and "left" in text
    assert "47.5 %" in text  # the held-out accuracy of the summary


def test_finished_jobs_are_skipped_on_a_second_launch(command, tmp_path):
    run(command, "id=a", "id=b do=fail")
    time.sleep(0.02)
    result, text = run(command, "id=a", "id=b", "id=c")
    assert [job.status for job in result.jobs] == [
        Status.skipped,
        Status.finished,
        Status.finished,
    ]
    assert len(starts(tmp_path / "a")) == 1
    assert "1 skipped" in text


def test_a_clock_that_jumps_changes_neither_what_ran_nor_how_long(command, monkeypatch):
    clock = iter(range(2_000_000_000, 0, -100_000))
    monkeypatch.setattr("zoo.launch.time.time", lambda: next(clock))
    result, text = run(command, "id=a do=set_back")
    (job,) = result.jobs
    assert job.status is Status.finished and "1 finished" in text
    assert 0 < job.seconds < 1000


def test_a_failed_job_leaves_the_others_and_its_traceback(command, tmp_path):
    result, text = run(command, "id=a do=fail", "id=b")
    assert [job.status for job in result.jobs] == [Status.failed, Status.finished]
    assert result.exit_status == 1
    record = (tmp_path / "a" / "error.txt").read_text()
    assert "RuntimeError: the job broke" in record and "about to fail" in record
    assert "RuntimeError: the job broke" in text


def test_the_traceback_that_a_job_wrote_itself_is_kept(command, tmp_path):
    result, _ = run(command, "id=a do=fail_with_record")
    assert result.jobs[0].error == "Traceback of the run: broke"
    assert (tmp_path / "a" / "error.txt").read_text() == "Traceback of the run: broke"


def test_a_job_killed_by_the_system_is_failed_and_says_so(command, tmp_path):
    result, text = run(command, "id=a do=kill", "id=b")
    assert result.jobs[0].status is Status.failed and result.jobs[0].exit_status == -9
    assert "SIGKILL" in (tmp_path / "a" / "error.txt").read_text() and "SIGKILL" in text
    assert result.jobs[1].status is Status.finished


def test_a_refused_job_writes_nothing_and_its_message_is_shown_once(command, tmp_path):
    other = tmp_path / "a" / "summary.json"  # another run's folder, which the refused job named
    other.parent.mkdir()
    other.write_text("{}")
    result, text = run(command, "id=a do=refuse", "id=b do=refuse")
    assert result.exit_status == 1
    assert list((tmp_path / "a").iterdir()) == [other]
    assert result.folders == [tmp_path / "b"]  # what lies in a is no result of this launch
    assert text.count("algorithm=grop does not exist") == 1


def test_a_run_refused_after_it_began_keeps_the_reason_in_its_folder(command, tmp_path):
    run(command, "id=a do=refuse_late")
    assert "no pairs" in (tmp_path / "a" / "error.txt").read_text()


@pytest.mark.parametrize("files", ["config.yaml", "config.yaml,meta.json", "error.txt"])
@pytest.mark.parametrize("end", ["beside status=2", "beside status=1", "beside_killed"])
def test_a_job_that_did_not_begin_writes_nothing_beside_the_run_that_did(
    command, tmp_path, end, files
):
    (tmp_path / "a").mkdir()
    result, _ = run(command, f"id=a do={end} files={files}")
    reason = "SIGKILL" if end == "beside_killed" else "another process is running"
    assert reason in result.jobs[0].error
    written = {path.name: path.read_text() for path in (tmp_path / "a").iterdir()}
    assert written == dict.fromkeys(files.split(","), "seed: 0")


def test_the_folder_of_a_failed_job_that_another_run_has_by_now_is_left_alone(command, tmp_path):
    lock = FolderLock(tmp_path / "a")
    (tmp_path / "a").mkdir()
    lock.acquire()
    result, _ = run(command, "id=a do=kill")
    assert "SIGKILL" in result.jobs[0].error and not (tmp_path / "a" / "error.txt").exists()
    lock.release()
    run(command, "id=a do=kill")
    assert "SIGKILL" in (tmp_path / "a" / "error.txt").read_text()


def test_a_reason_that_cannot_be_written_leaves_the_other_jobs_alone(command, tmp_path):
    (tmp_path / "a" / "error.txt").mkdir(parents=True)
    result, _ = run(command, "id=a do=kill", "id=b")
    assert "SIGKILL" in result.jobs[0].error and result.jobs[1].status is Status.finished


def test_a_command_that_does_not_exist_is_a_failed_job():
    result, text = run(["/nowhere/zoo"], "id=a", "id=b")
    assert [job.status for job in result.jobs] == [Status.failed] * 2
    assert result.exit_status == 1 and "2 failed" in text


def test_a_check_refuses_before_anything_starts(command, tmp_path):
    def check(job: list[str]) -> None:
        if "id=b" in job:
            raise ConfigError("no b")

    with pytest.raises(ConfigError, match="no b"):
        run(command, "id=a", "id=b", check=check)
    assert not (tmp_path / "a").exists()


def test_a_job_that_the_check_knows_as_finished_is_not_started(command, tmp_path):
    def check(job: list[str]) -> Path | None:
        return tmp_path / "a" if "id=a" in job else None

    run(command, "id=a")
    before = starts(tmp_path / "a")
    result, text = run(command, "id=a", "id=b", check=check)
    assert [job.status for job in result.jobs] == [Status.skipped, Status.finished]
    assert result.folders == [tmp_path / "a", tmp_path / "b"] and result.exit_status == 0
    assert starts(tmp_path / "a") == before
    assert "47.5 %" in text and "[1/2]" not in text


def test_jobs_at_once_run_together_and_share_the_cores(command, tmp_path):
    jobs = ["id=a do=meet other=b", "id=b do=meet other=a"]
    result, _ = run(command, *jobs, jobs_at_once=2)
    assert result.exit_status == 0
    threads = max(1, (os.cpu_count() or 1) // 2)
    assert starts(tmp_path / "a")[0].split()[1] == str(threads)


def test_an_empty_list_and_no_jobs_at_once_are_refused():
    with pytest.raises(ConfigError, match="nothing to run"):
        launch([])
    with pytest.raises(ConfigError, match="at least 1"):
        launch([["a=1"]], jobs_at_once=0)


def test_a_damaged_run_does_not_end_the_sweep_with_a_traceback(command, tmp_path, capsys):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "config.yaml").write_text("a: [1")
    assert sweep(["id=a"], command=command) == 0
    # The line is broken where the window ends
    assert "a/config.yamlisnotyaml" in "".join(capsys.readouterr().out.split())


def test_a_table_that_cannot_be_made_does_not_end_the_sweep(command, monkeypatch, capsys):
    def broken(*_: object) -> None:
        raise AttributeError("no table")

    monkeypatch.setattr("zoo.report.runs.read_runs", broken)
    assert sweep(["id=a"], command=command) == 0
    assert "The runs cannot be compared: AttributeError: no table" in capsys.readouterr().out


def test_a_sweep_says_what_it_does_not_count_as_one(command, tmp_path, capsys):
    for seed, value in enumerate(("1a", "2b")):
        (tmp_path / f"s{seed}").mkdir()
        (tmp_path / f"s{seed}" / "config.yaml").write_text(f"seed: {seed}\nexperiment: exp")
        (tmp_path / f"s{seed}" / "meta.json").write_text(f'{{"config_hash": "{value}"}}')
        (tmp_path / f"s{seed}" / "evals.jsonl").write_text('{"step": 0, "set": "guard"}')
    assert sweep(["id=s0,s1"], command=command) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert f"Note: {tmp_path.name} is the name of runs of 2 configurations" in out


def test_sweep_refuses_a_number_of_jobs_that_is_none():
    with pytest.raises(ConfigError, match="--jobs"):
        sweep(["--jobs", "many", "seed=0,1"])


def test_on_end_is_called_as_each_job_ends(command):
    seen: list[tuple[str, Status]] = []
    run(
        command,
        "id=a",
        "id=b do=fail",
        on_end=lambda job: seen.append((job.label, job.status)),
        labels=["first", "second"],
    )
    assert seen == [("first", Status.finished), ("second", Status.failed)]


def test_jobs_of_a_sweep_are_called_by_what_varies():
    assert swept(expand(["model=tiny", "seed=0,1", "+x=1"])) == ["seed=0", "seed=1"]
    assert swept(expand(["model=tiny", "seed=0"])) == ["model=tiny seed=0"]


@pytest.mark.parametrize(
    ("overrides", "labels"),
    [
        (["k=[1,2]", "a=1", "k=[1],[1,2]"], ["k=[1]", "k=[1,2]"]),
        (["k=x", "k=y,x", "seed=0,1"], ["k=y seed=0", "k=y seed=1", "k=x seed=0", "k=x seed=1"]),
        (["+k=x", "++k=y,x"], ["++k=y", "++k=x"]),
        (["k=x,y", "k=z"], ["k=x k=z", "k=y k=z"]),  # two jobs that are one: no empty name
    ],
)
def test_of_a_key_that_is_given_twice_a_job_is_called_by_the_last(overrides, labels):
    assert swept(expand(overrides)) == labels


def test_clock():
    assert clock(0.4) == "0:00"
    assert clock(83) == "1:23"
    assert clock(3723) == "1:02:03"  # 3600 + 2·60 + 3


# ------------------------------------------------------------- interruptions, in another process


def launcher(command: list[str], *jobs: str) -> subprocess.Popen[str]:
    program = textwrap.dedent(
        f"""
        import sys
        from zoo.launch import launch
        jobs = [job.split() for job in {list(jobs)!r}]
        result = launch(jobs, command={command!r}, again="the same again")
        sys.exit(result.exit_status)
        """
    )
    return subprocess.Popen(
        [sys.executable, "-c", program],
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.parametrize("at_once", [1, 2])
@pytest.mark.parametrize("how", ["left", "full", "ascii", "closed"])
def test_jobs_end_whoever_reads_what_they_print(
    how: str, at_once: int, command: list[str], tmp_path: Path
) -> None:
    words = [f"--jobs={at_once}", "id=0,1", "do=loud"]
    program = f"import sys, zoo.launch as l; sys.exit(l.sweep({words}, command={command}))"
    if how == "full" and not Path("/dev/full").exists():
        pytest.skip("no /dev/full")
    shell = {"full": ">/dev/full", "closed": ">&-"}.get(how, "")
    process = subprocess.Popen(
        ["bash", "-c", f'exec "$0" -c "$1" {shell}', sys.executable, program],
        cwd=REPOSITORY,
        stdout=subprocess.PIPE if how == "left" else subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | ({"PYTHONIOENCODING": "ascii"} if how == "ascii" else {}),
    )
    if process.stdout is not None:  # `zoo -m … | head -1`
        process.stdout.readline()
        process.stdout.close()
        process.stdout = None
    try:
        _, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 0 and not err, err
    assert all((tmp_path / name / "summary.json").exists() for name in "01")


def wait_for(path: Path, seconds: float = 20) -> None:
    deadline = time.time() + seconds
    while not path.exists():
        assert time.time() < deadline, f"{path} did not appear"
        time.sleep(0.02)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interruption_is_passed_on_waited_for_and_explained(command, tmp_path, number):
    process = launcher(command, "id=a", "id=b do=wait", "id=c")
    wait_for(tmp_path / "b" / "waiting")
    process.send_signal(number)
    text, _ = process.communicate(timeout=20)
    assert (tmp_path / "b" / "stopped").read_text() == number.name
    assert process.returncode == 130
    assert not (tmp_path / "c").exists()
    assert "1 finished, 1 interrupted, 1 not started" in text
    assert "the same again" in text


def test_a_second_interruption_kills(command, tmp_path):
    script = tmp_path / "stubborn.py"
    script.write_text(
        "import os, signal, time\n"
        "from pathlib import Path\n"
        "signal.signal(signal.SIGINT, lambda *_: Path(os.environ['ROOT'], 'heard').touch())\n"
        "Path(os.environ['ROOT'], 'ready').write_text(str(os.getpid()))\n"
        "deadline = time.time() + 60\n"
        "while time.time() < deadline: time.sleep(0.1)\n"
    )
    process = launcher([sys.executable, str(script)], "id=a")
    wait_for(tmp_path / "ready")
    process.send_signal(signal.SIGINT)
    wait_for(tmp_path / "heard")
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=20)
    assert process.returncode == 130
    assert not alive(int((tmp_path / "ready").read_text()))


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs Linux's death signal")
def test_after_sigkill_nothing_is_left_and_the_same_command_finishes(command, tmp_path):
    process = launcher(command, "id=a", "id=b do=wait", "id=c")
    wait_for(tmp_path / "b" / "waiting")
    job = int(starts(tmp_path / "b")[0].split()[0])
    process.kill()
    process.wait()
    deadline = time.time() + 5
    while alive(job) and time.time() < deadline:
        time.sleep(0.02)
    assert not alive(job)
    result, _ = run(command, "id=a", "id=b", "id=c")
    assert [job.status for job in result.jobs] == [
        Status.skipped,
        Status.finished,
        Status.finished,
    ]
    assert len(starts(tmp_path / "a")) == 1 and len(starts(tmp_path / "b")) == 2


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs Linux's death signal")
def test_a_launcher_s_worker_dies_with_the_sweep(tmp_path):
    program = (
        "import os, pathlib, sys, time\n"
        "from zoo.cli import _die_with\n"
        "parent = os.getpid()\n"
        "if os.fork() == 0:\n"
        "    if sys.argv[1] == 'tied': _die_with(parent)\n"
        "    path = pathlib.Path(sys.argv[2])\n"
        "    path.with_suffix('.part').write_text(str(os.getpid()))\n"
        "    path.with_suffix('.part').rename(path)\n"
        "time.sleep(20)\n"
    )
    for how in ("tied", "loose"):
        file = tmp_path / how
        process = subprocess.Popen([sys.executable, "-c", program, how, str(file)], cwd=REPOSITORY)
        wait_for(file)
        process.kill()
        process.wait()
        child = int(file.read_text())
        deadline = time.time() + (5 if how == "tied" else 0.5)
        while alive(child) and time.time() < deadline:
            time.sleep(0.02)
        assert alive(child) is (how == "loose")
    os.kill(child, signal.SIGKILL)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs Linux's death signal")
def test_a_command_whose_parent_is_gone_does_nothing():
    for parent, status in ((os.getpid(), 0), (os.getppid(), 1), ("nobody", 0)):
        environment = {**os.environ, "ZOO_PARENT": str(parent)}
        command = [sys.executable, "-m", "zoo", "--version"]
        done = subprocess.run(
            command, cwd=REPOSITORY, env=environment, capture_output=True, text=True
        )
        assert (done.returncode, bool(done.stdout)) == (status, status == 0)


def alive(process: int) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"  # a zombie waits for whoever adopted it


def test_a_single_job_has_the_terminal_to_itself(command, tmp_path):
    for name, jobs_at_once in (("a", 1), ("b", 2)):
        ours, theirs = pty.openpty()
        program = (
            "from zoo.launch import launch\n"
            f"launch([['id={name}', 'do=terminal']], command={command!r},"
            f" jobs_at_once={jobs_at_once})"
        )
        subprocess.run(
            [sys.executable, "-c", program], cwd=REPOSITORY, stdout=theirs, timeout=30, check=True
        )
        os.close(theirs)
        os.close(ours)
    assert (tmp_path / "a" / "terminal").read_text() == "True"
    assert (tmp_path / "b" / "terminal").read_text() == "False"


def test_a_summary_of_the_job_that_is_no_json_does_not_end_the_launch(command, tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "summary.json").write_text("{")
    result, _ = run(command, "id=a", "id=b")
    assert result.exit_status == 0


def test_the_jobs_output_passes_through(command, capfd):
    run(command, "id=a do=fail")
    assert "about to fail" in capfd.readouterr().out
