import json
import math
import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest

from tests.measure import wandb_file
from zoo.config import MeasureConfig
from zoo.measure.files import RecordError, read_lines
from zoo.measure.recorder import FILES, Recorder, check_offsets, flat_scores, offsets_problem


def recorder(path, offsets=None, *, wandb="disabled", total_steps=10, is_main=True, **settings):
    config = MeasureConfig(wandb=wandb, progress=False, **settings)
    return Recorder(
        path,
        config=config,
        meta={"commit": "abc", "started": str(offsets)},
        resume_offsets=offsets,
        is_main=is_main,
        total_steps=total_steps,
        title="grpo seed 0",
    )


def row(i):
    return {"prompt_id": f"p{i}", "prompt": "1+1?", "text": f"#### {i}", "reward": float(i)}


def without_time(path):
    return [{k: v for k, v in line.items() if k != "time"} for line in read_lines(path)]


def test_every_verb_writes_its_file(tmp_path):
    with recorder(tmp_path, rollouts_per_step=2) as record:
        record.evaluation(0, {"set": "heldout", "accuracy": 0.25})
        record.step(1, 4, {"reward/total": 0.5, "completions": 8})
        record.rollouts(1, [row(0), row(1), row(2)])
        record.eval_samples(1, [{"set": "heldout", "text": "4"}])
        record.memory({"rss_peak": 7})
        record.summary({"status": "finished"})
    assert without_time(tmp_path / "metrics.jsonl") == [
        {"step": 1, "updates": 4, "reward/total": 0.5, "completions": 8}
    ]
    assert [r["prompt_id"] for r in read_lines(tmp_path / "rollouts.jsonl")] == ["p0", "p1"]
    assert read_lines(tmp_path / "evals.jsonl") == [{"step": 0, "set": "heldout", "accuracy": 0.25}]
    assert read_lines(tmp_path / "eval_samples.jsonl")[0]["step"] == 1
    assert json.loads((tmp_path / "memory.json").read_text()) == {"rss_peak": 7}
    assert json.loads((tmp_path / "summary.json").read_text()) == {"status": "finished"}
    assert json.loads((tmp_path / "meta.json").read_text())["commit"] == "abc"


def test_nonfinite_metrics_are_null_and_counted(tmp_path):
    with recorder(tmp_path) as record:
        record.step(1, 1, {"kl_old": math.nan, "entropy": math.inf, "lr/policy": 0.1})
    text = (tmp_path / "metrics.jsonl").read_text()
    line = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert line["kl_old"] is None and line["entropy"] is None and line["nonfinite"] == 2


def test_rollouts_are_kept_on_their_schedule(tmp_path):
    with recorder(tmp_path, rollouts_per_step=1, rollouts_every=3) as record:
        assert [record.rollouts_wanted(s) for s in range(1, 7)] == [0, 0, 1, 0, 0, 1]
        for step in range(1, 7):
            record.rollouts(step, [row(step), row(step)])
    assert [r["step"] for r in read_lines(tmp_path / "rollouts.jsonl")] == [3, 6]


def test_resume_equals_the_uninterrupted_record(tmp_path):
    def steps(record, first, last):
        for step in range(first, last + 1):
            if step % 2 == 0:
                record.warning("truncated", f"step {step}: more than half")
            record.step(step, step, {"reward/total": step / 7})
            record.rollouts(step, [row(step)])
            record.evaluation(step, {"set": "heldout", "accuracy": step / 10})

    with recorder(tmp_path / "whole") as record:
        steps(record, 1, 5)
    record = recorder(tmp_path / "cut")
    steps(record, 1, 3)
    offsets = record.offsets()
    steps(record, 4, 4)  # lost: behind the checkpoint
    record.close()
    with recorder(tmp_path / "cut", offsets) as record:
        steps(record, 4, 5)
    for name in ("metrics", "rollouts", "evals", "eval_samples", "warnings"):
        file = f"{name}.jsonl"
        assert without_time(tmp_path / "cut" / file) == without_time(tmp_path / "whole" / file)
    assert read_lines(tmp_path / "cut" / "metrics.jsonl")[-1]["warnings/truncated"] == 2


def test_a_resumed_run_keeps_its_first_meta_and_lists_its_own(tmp_path):
    record = recorder(tmp_path)
    offsets = record.offsets()
    record.close()
    recorder(tmp_path, offsets).close()
    recorder(tmp_path, offsets).close()
    meta = json.loads((tmp_path / "meta.json").read_text())
    assert meta["started"] == "None"
    assert [m["started"] for m in meta["resumed"]] == [str(offsets), str(offsets)]


def test_a_damaged_file_is_refused_before_any_other_is_cut(tmp_path):
    record = recorder(tmp_path)
    record.step(1, 1, {"a": 1})
    record.evaluation(1, {"set": "heldout", "accuracy": 1})
    offsets = record.offsets()
    record.step(2, 2, {"a": 2})
    record.close()
    before = (tmp_path / "metrics.jsonl").read_bytes()
    (tmp_path / "evals.jsonl").write_bytes(b"")
    with pytest.raises(RecordError, match=r"evals\.jsonl"):
        check_offsets(tmp_path, offsets)
    with pytest.raises(RecordError, match=r"evals\.jsonl"):
        recorder(tmp_path, offsets)
    assert (tmp_path / "metrics.jsonl").read_bytes() == before


@pytest.mark.parametrize("name", FILES)
def test_a_byte_altered_in_any_file_is_a_checkpoints_problem(name, tmp_path):
    record = recorder(tmp_path, rollouts_per_step=1)
    record.warning("slow", "at 1")
    record.step(1, 1, {"a": 1})
    record.rollouts(1, [row(1)])
    record.evaluation(1, {"set": "heldout", "accuracy": 1})
    record.eval_samples(1, [row(1)])
    manifest = {"offsets": record.offsets(), "hashes": record.hashes()}
    record.step(2, 2, {"a": 2})
    record.close()
    assert min(manifest["offsets"].values()) > 0
    assert offsets_problem(tmp_path, manifest) == ""
    data = bytearray((tmp_path / name).read_bytes())
    data[5] ^= 1
    (tmp_path / name).write_bytes(data)
    assert f"{name} was altered" in offsets_problem(tmp_path, manifest)
    assert offsets_problem(tmp_path, {"offsets": manifest["offsets"]}) == ""  # an older version's


def test_other_processes_write_nothing(tmp_path, capsys):
    with recorder(tmp_path / "run", is_main=False) as record:
        record.step(1, 1, {"a": 1})
        record.rollouts(1, [row(1)])
        record.evaluation(1, {"set": "heldout"})
        record.eval_samples(1, [row(1)])
        record.warning("kind", "text")
        record.memory({})
        record.summary({})
        assert record.offsets() == {} and record.rollouts_wanted(1) == 0
        record.display.message("text")
        with record.display.task("evaluating heldout", 2) as advance:
            advance(1)
    assert capsys.readouterr().out == ""
    assert not (tmp_path / "run").exists()


def test_a_warning_is_shown_once_and_counted_always(tmp_path, capsys):
    with recorder(tmp_path) as record:
        for step in (1, 2, 3):
            record.warning("slow", f"at {step}")
            record.step(step, step, {})
    assert capsys.readouterr().out == "warning (slow): at 1\n"
    lines = read_lines(tmp_path / "metrics.jsonl")
    assert [line["warnings/slow"] for line in lines] == [1, 2, 3]
    assert [w["message"] for w in read_lines(tmp_path / "warnings.jsonl")] == [
        "at 1",
        "at 2",
        "at 3",
    ]


def test_scores_have_flat_names():
    record = {
        "set": "heldout",
        "step": 4,
        "accuracy": 0.5,
        "pass@k": {"1": 0.5, "4": 0.75},
        "reasons": {"wrong": 0.5},
        "outcomes": [[0, 1]],
        "kl_to_start": None,
        "kind": "accuracy",
    }
    assert flat_scores(record) == {
        "heldout/accuracy": 0.5,
        "heldout/pass@1": 0.5,
        "heldout/pass@4": 0.75,
        "heldout/reason/wrong": 0.5,
    }


KILLED = """
    import os, signal, sys
    from pathlib import Path
    from zoo.config import MeasureConfig
    from zoo.measure.recorder import Recorder
    record = Recorder(Path(sys.argv[1]), config=MeasureConfig(wandb=sys.argv[2], progress=False),
                      meta={}, resume_offsets=None, total_steps=40, title="killed")
    for step in range(1, 31):
        record.step(step, step, {"reward/total": step / 10})
        record.rollouts(step, [{"prompt": "p", "text": "t"}])
        if step == 20:
            print(record.offsets())
            sys.stdout.flush()
    os.kill(os.getpid(), signal.SIGKILL)
"""


def run_killed(path, mode):
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(KILLED), str(path), mode],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    return eval(done.stdout, {})  # a dict of ints, printed above


def test_metrics_are_complete_after_sigkill_and_wandb_after_resume(tmp_path):
    offsets = run_killed(tmp_path, "offline")
    assert [m["step"] for m in read_lines(tmp_path / "metrics.jsonl")] == list(range(1, 31))
    run_id = (tmp_path / "wandb_id.txt").read_text()
    with recorder(tmp_path, offsets, wandb="offline", total_steps=40) as record:
        for step in range(21, 41):
            record.step(step, step, {"reward/total": step / 10})
            record.rollouts(step, [{"prompt": "p", "text": "t"}])
    assert (tmp_path / "wandb_id.txt").read_text() == run_id
    curve = [(h["step"], h["reward/total"]) for h in wandb_file.history(tmp_path) if "updates" in h]
    assert curve == [(step, step / 10) for step in range(1, 41)]  # each step once, none missing
    own = [(m["step"], m["reward/total"]) for m in read_lines(tmp_path / "metrics.jsonl")]
    assert curve == own


def test_half_a_character_in_a_name_does_not_end_wandb(tmp_path, capfd):
    with recorder(tmp_path, wandb="offline") as record:
        record.step(1, 1, {"reason/half \ud83d": 0.5})
    assert read_lines(tmp_path / "warnings.jsonl") == []


def test_wandb_has_the_curves_late_evaluations_and_a_bounded_table(tmp_path, capfd):
    total = 200
    with recorder(tmp_path, wandb="offline", total_steps=total, rollouts_per_step=20) as record:
        for step in range(1, total + 1):
            record.step(step, step, {"reward/total": step / 100, "bad": math.nan})
            record.rollouts(step, [row(i) for i in range(20)])
        # late: wandb would drop it if the step were its own counter
        record.evaluation(4, {"set": "heldout", "accuracy": 0.5, "pass@k": {"4": 0.75}})
        for _ in range(60):
            record.eval_samples(4, [{"set": "heldout", "text": "x" * 5000}])
    rows = wandb_file.history(tmp_path)
    rewards = {r["step"]: r["reward/total"] for r in rows if "reward/total" in r}
    assert rewards == {step: step / 100 for step in range(1, total + 1)}
    assert not any("bad" in r for r in rows)
    (late,) = [r for r in rows if "heldout/accuracy" in r]
    assert (late["step"], late["heldout/accuracy"], late["heldout/pass@4"]) == (4, 0.5, 0.75)
    logged = [r for r in rows if any(name.split("/")[0] == "completions" for name in r)]
    assert len(logged) == 25  # every 8th of 200 steps
    tables = wandb_file.tables(tmp_path)
    assert len(tables) <= 50
    assert max(len(t["data"]) for t in tables) == 16
    completions = next(t for t in tables if "reward" in t["columns"])
    assert completions["data"][3][completions["columns"].index("text")] == "#### 3"
    longest = max(len(str(c)) for t in tables for r in t["data"] for c in r)
    assert longest == 2000
    shown = capfd.readouterr()
    assert shown.out == "" and shown.err == ""


def test_every_curve_of_wandb_has_the_step_as_its_axis(tmp_path):
    with recorder(tmp_path, wandb="offline") as record:
        record.step(1, 1, {"reward/total": 1.0})
    axes = {
        r.metric.glob_name or r.metric.name: r.metric.step_metric
        for r in wandb_file.finished(tmp_path)
        if r.WhichOneof("record_type") == "metric"
    }
    assert axes["*"] == "step"


ONLINE = """
    import sys, time
    from pathlib import Path
    import zoo.measure.wandb_sink as sink
    from zoo.config import MeasureConfig
    from zoo.measure.recorder import Recorder
    sink.SECONDS_TO_CONNECT = 2.0
    record = Recorder(Path(sys.argv[1]), config=MeasureConfig(wandb="online", progress=False),
                      meta={}, resume_offsets=None, total_steps=1, title="online")
    record.step(1, 1, {"reward/total": 0.5})
    record.close()
"""


def run_online(path, **environment):
    """The terminal's two streams of a run that wants wandb online; nothing listens on port 9."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("WANDB_")}
    own = {"WANDB_BASE_URL": "http://127.0.0.1:9", "NETRC": str(path / "none")}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(ONLINE), str(path)],
        env={**kept, **own, **environment},
        capture_output=True,
        text=True,
        timeout=120,  # a question on the terminal, or a server waited for, would end here
        check=True,
    )
    return done.stdout, done.stderr


def test_two_runs_of_one_process_do_not_share_a_wandb_run(tmp_path):
    """A run that builds its start first, or two runs side by side."""
    with recorder(tmp_path / "outer", wandb="offline") as outer:
        outer.step(1, 1, {"a": 1.0})
        with recorder(tmp_path / "inner", wandb="offline") as inner:
            inner.step(1, 1, {"b": 2.0})
        outer.step(2, 2, {"a": 3.0})
    assert [h["a"] for h in wandb_file.history(tmp_path / "outer")] == [1.0, 3.0]
    assert [h["b"] for h in wandb_file.history(tmp_path / "inner")] == [2.0]


def test_wandb_online_without_a_server_falls_back_offline_with_one_warning(tmp_path):
    out, err = run_online(tmp_path, WANDB_API_KEY="0" * 40)
    assert out.count("warning (wandb)") == 1 and len(out.splitlines()) == 1
    assert "did not connect within 2 s" in out and "CommError" in out
    assert err == "" and not list(tmp_path.glob("wandb/run-*"))
    assert [h["reward/total"] for h in wandb_file.history(tmp_path) if "updates" in h] == [0.5]
    (line,) = read_lines(tmp_path / "metrics.jsonl")
    assert not any(name.startswith("warnings/") for name in line)  # of the surroundings


def test_wandb_online_with_a_server_that_never_answers_falls_back_in_time(tmp_path):
    import socket

    with socket.create_server(("127.0.0.1", 0), backlog=64) as silent:  # takes calls, says nothing
        address = f"http://127.0.0.1:{silent.getsockname()[1]}"
        began = time.monotonic()
        out, err = run_online(tmp_path, WANDB_API_KEY="0" * 40, WANDB_BASE_URL=address)
    assert out.count("warning (wandb)") == 1 and len(out.splitlines()) == 1
    assert "did not connect within 2 s" in out and err == ""
    assert time.monotonic() - began < 12  # wandb's own waits at the end are 10 s and more
    assert not list(tmp_path.glob("wandb/run-*"))  # what could not connect left nothing
    assert [h["reward/total"] for h in wandb_file.history(tmp_path) if "updates" in h] == [0.5]


@pytest.mark.parametrize(
    "setting",
    [{"WANDB_BASE_URL": "notaurl"}, {"WANDB_MODE": "nonsense"}, {"WANDB_SERVICE": "bad"}],
)
def test_wandb_logs_offline_where_it_refuses_its_environment(tmp_path, setting):
    out, err = run_online(tmp_path, WANDB_API_KEY="0" * 40, **setting)
    assert out.count("warning (wandb)") == 1 and err == ""
    assert "within" not in out and next(iter(setting.values())) in out  # the reason
    assert "Logging offline" in out
    assert [h["reward/total"] for h in wandb_file.history(tmp_path) if "updates" in h] == [0.5]


def test_wandb_online_without_a_key_says_so_and_never_asks(tmp_path):
    out, err = run_online(tmp_path)
    assert "no API key" in out and len(out.splitlines()) == 1
    assert err == ""
    assert len(wandb_file.history(tmp_path)) == 1


def test_a_failing_wandb_does_not_end_the_run(tmp_path, monkeypatch, capsys):
    import wandb

    class Broken:
        def define_metric(self, *_, **__):
            pass

        def log(self, *_, **__):
            raise RuntimeError("the service died")

    monkeypatch.setattr(wandb, "init", lambda **_: Broken())
    with recorder(tmp_path, wandb="offline") as record:
        record.step(1, 1, {"a": 1.0})
        record.step(2, 2, {"a": 2.0})
    assert capsys.readouterr().out.count("the service died") == 1
    assert len(read_lines(tmp_path / "metrics.jsonl")) == 2


def test_disabled_wandb_is_not_imported(tmp_path):
    code = f"""
        import sys
        from pathlib import Path
        from zoo.config import MeasureConfig
        from zoo.measure.recorder import Recorder
        Recorder(Path({str(tmp_path)!r}), config=MeasureConfig(wandb="disabled"), meta={{}},
                 resume_offsets=None, total_steps=1, title="t").close()
        assert "wandb" not in sys.modules
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True, timeout=60)
    assert not (tmp_path / "wandb").exists()


def test_an_unknown_wandb_mode_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"measure\.wandb must be one of.*'onlin'"):
        recorder(tmp_path, wandb="onlin")


def test_wandb_leaves_the_random_state_alone(tmp_path):
    import random

    import numpy as np
    import torch

    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    before = (torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist())
    with recorder(tmp_path, wandb="offline") as record:
        record.step(1, 1, {"a": 1.0})
        record.rollouts(1, [row(1)])
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1] == random.getstate()
    assert before[2] == np.random.get_state()[1].tolist()


def test_B95_evaluation_of_an_earlier_step_is_lost_nowhere(tmp_path):
    with recorder(tmp_path, wandb="offline") as record:
        record.step(5, 5, {"reward/total": 0.5})
        record.evaluation(4, {"set": "heldout", "accuracy": 0.25})
        record.step(6, 6, {"reward/total": 0.75})
        record.evaluation(5, {"set": "heldout", "accuracy": 0.5})
    own = read_lines(tmp_path / "metrics.jsonl"), read_lines(tmp_path / "evals.jsonl")
    assert [(m["step"], m["reward/total"]) for m in own[0]] == [(5, 0.5), (6, 0.75)]
    assert [(e["step"], e["accuracy"]) for e in own[1]] == [(4, 0.25), (5, 0.5)]
    rows = wandb_file.history(tmp_path)
    curve = [(r["step"], r["reward/total"]) for r in rows if "reward/total" in r]
    scores = [(r["step"], r["heldout/accuracy"]) for r in rows if "heldout/accuracy" in r]
    assert curve == [(5, 0.5), (6, 0.75)] and scores == [(4, 0.25), (5, 0.5)]
