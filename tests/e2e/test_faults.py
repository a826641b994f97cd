"""Numbers gone bad, rewards that fail, data at the edge: a clear end or a run that goes on."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import re
import signal
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

import zoo.train.session
from tests.e2e import faulty
from tests.e2e.faulty import Strange
from tests.e2e.small import SMALL, folder_of, run_small
from tests.models.tiny import ragged_batch
from zoo.algorithms.grpo import GRPO
from zoo.algorithms.ppo import PPO
from zoo.build import check
from zoo.cli import MAX_ERROR_LINES, main
from zoo.compose import compose
from zoo.config import ConfigError, StopAt
from zoo.instantiate import complete, structured
from zoo.measure.files import RecordError
from zoo.models.critic import Critic
from zoo.rewards.check import RewardError
from zoo.rollout.rows import NumbersError
from zoo.train.bad_batch import describe_rows
from zoo.train.run import run
from zoo.train.session import Session, TrainingError
from zoo.types import RewardOutput

QUICK = ["evaluate.first=false", "evaluate.last=false", "train.checkpoint_every=0"]
FUNCTION = ["reward=function"]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZOO_CACHE", str(tmp_path / "cache"))


def lines(output: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder_of(output) / name).read_text().splitlines()]


def spoil(monkeypatch: pytest.MonkeyPatch, bad_calls: set[int], row: int | None) -> None:
    """GRPO's advantages become NaN in these calls of `prepare`: of one row, or of all."""
    original, call = GRPO.prepare, 0

    def prepare(self: GRPO, batch: Any, models: Any) -> Any:
        nonlocal call
        call += 1
        batch = original(self, batch, models)
        if call in bad_calls:
            advantages = batch.advantages.clone()
            advantages[slice(None) if row is None else row] = float("nan")
            batch = batch.replace(advantages=advantages)
        return batch

    monkeypatch.setattr(GRPO, "prepare", prepare)


# numbers gone bad --------------------------------------------------------------------------------


def test_a_refused_update_is_recorded_with_its_batch_and_the_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoil(monkeypatch, {2}, row=5)
    summary = run_small(tmp_path, "algorithm=grpo", "train.steps=3", *QUICK)
    assert summary["status"] == "finished" and summary["skipped_updates"] == 1
    (warning,) = [w for w in lines(tmp_path, "warnings.jsonl") if w["kind"] == "refused_update"]
    kept = torch.load(folder_of(tmp_path) / "bad_batch_step_000002_update_2.pt", weights_only=True)
    # row 5 of groups of 4 belongs to the second prompt
    assert kept["bad_rows"] == [(5, "advantages")]
    assert f"row 5 (prompt {kept['prompt_ids'][1]}: advantages)" in warning["message"]
    assert torch.isnan(kept["advantages"][5]).all() and kept["reason"] in warning["message"]
    metrics = lines(tmp_path, "metrics.jsonl")
    assert [m["skipped_updates"] for m in metrics] == [0, 1, 1]
    assert [m["tokens/trained"] > 0 for m in metrics] == [True, False, True]


def test_past_the_limit_the_run_stops_and_names_rows_and_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoil(monkeypatch, {2, 3, 4, 5, 6}, row=0)
    with pytest.raises(TrainingError, match=r"2 updates in a row .* row 0 .*bad_batch_step_000003"):
        run_small(tmp_path, "algorithm=grpo", "train.max_bad_updates=2", *QUICK)
    folder = folder_of(tmp_path)
    assert "TrainingError" in (folder / "error.txt").read_text()
    assert not (folder / "summary.json").exists()


@pytest.mark.parametrize(
    ("every", "told"),
    [(1, "goes on from the last checkpoint."), (0, "begins anew, as there is no checkpoint yet.")],
)
def test_what_the_same_command_does_after_a_stop_depends_on_there_being_a_checkpoint(
    every: int,
    told: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    spoil(monkeypatch, {2, 3}, row=0)
    words = ["algorithm=grpo", "train.max_bad_updates=2", *QUICK, f"train.checkpoint_every={every}"]
    assert main([*SMALL, f"output={tmp_path}", *words]) == 1
    assert f"the same command {told}" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("rows", "told"),
    [
        ([], "all rows (each is finite by itself; prompts p0, p1, p2, p3, p4, p5, …)"),
        ([(3, "values")], "row 3 (prompt p1: values)"),
        ([(0, "rewards"), (2, "values")], "rows 0 (prompt p0: rewards), 2 (prompt p1: values)"),
        (
            [(row, "the policy's log-probs") for row in range(16)],
            "all rows (the policy's log-probs are not finite: its weights are broken)",
        ),
    ],
)
def test_the_rows_of_a_refused_update_are_named_by_a_noun(
    rows: list[tuple[int, str]], told: str
) -> None:
    """It stands after "Look at" and before "of" a file."""
    assert describe_rows(ragged_batch(8), rows) == told


def test_refused_updates_that_are_not_in_a_row_do_not_stop_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoil(monkeypatch, {1, 3, 5}, row=None)
    summary = run_small(tmp_path, "algorithm=grpo", "train.max_bad_updates=2", *QUICK)
    assert summary["skipped_updates"] == 3


@pytest.mark.parametrize(("bad", "said"), [({1, 2}, "(all 2 were refused)"), ({1}, "")])
def test_the_last_words_of_a_run_without_one_update_say_so(
    bad: set[int],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    spoil(monkeypatch, bad, row=None)
    run_small(tmp_path, "algorithm=grpo", "train.max_bad_updates=9", "train.steps=2", *QUICK)
    out = capsys.readouterr().out
    assert ("finished: without one update of the weights " + said in out) == bool(said)
    assert "finished: " in out


def test_values_that_are_not_finite_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, call = PPO.prepare, 0

    def prepare(self: PPO, batch: Any, models: Any) -> Any:
        nonlocal call
        call += 1
        if call == 2:
            monkeypatch.setattr(Critic, "forward", broken)
        prepared = original(self, batch, models)
        monkeypatch.setattr(Critic, "forward", sound)
        return prepared

    sound = Critic.forward

    def broken(self: Critic, batch: Any) -> Any:
        out = sound(self, batch)
        return replace(out, values=out.values / 0)

    monkeypatch.setattr(PPO, "prepare", prepare)
    summary = run_small(tmp_path, "algorithm=ppo", "train.steps=3", *QUICK)
    assert summary["skipped_updates"] == 1
    kept = torch.load(folder_of(tmp_path) / "bad_batch_step_000002_update_2.pt", weights_only=True)
    assert len(kept["bad_rows"]) == 16  # whitening spreads it over the batch


def test_each_refused_update_of_a_step_keeps_its_own_batch(tmp_path: Path) -> None:
    # A critic that explodes: the last three of the step's four updates are refused.
    words = ["algorithm=ppo", "algorithm.epochs=2", "algorithm.minibatches=2", "train.steps=1"]
    words += ["train.critic_lr=1e30", "train.lr=1e-4", "train.max_bad_updates=3", *QUICK]
    with pytest.raises(TrainingError) as stopped:
        run_small(tmp_path, *words)
    folder = folder_of(tmp_path)
    told = [w["message"] for w in lines(tmp_path, "warnings.jsonl")]
    told = [message for message in told if "update refused" in message]
    names = [re.search(r"bad_batch\w+\.pt", message)[0] for message in told]  # pyright: ignore
    assert len(set(names)) == 3 == len(list(folder.glob("bad_batch*")))
    for name, message in zip(names, told, strict=True):
        kept = torch.load(folder / name, weights_only=True)
        assert kept["reason"] in message
        assert all(prompt in message for prompt in kept["prompt_ids"])
    assert "loss/value is inf" in str(stopped.value)
    advice = "then start a new run with a lower train.critic_lr (now 1e+30) or train.max_grad_norm."
    assert advice in str(stopped.value)


@pytest.mark.parametrize(
    ("every", "kept"), [(2, {"bad_batch_step_000002_update_2.pt"}), (0, set())]
)
def test_batches_of_steps_that_are_done_again_go_with_their_warnings(
    every: int, kept: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["algorithm=grpo", "train.max_bad_updates=2", *QUICK, f"train.checkpoint_every={every}"]
    with monkeypatch.context() as patch:
        spoil(patch, {2, 3}, row=0)
        with pytest.raises(TrainingError):
            run_small(tmp_path, *words)
    folder = folder_of(tmp_path)
    assert len(list(folder.glob("bad_batch*"))) == 2
    run_small(tmp_path, *words)  # from step 2, or anew, and sound
    assert {path.name for path in folder.glob("bad_batch*")} == kept
    told = (folder / "warnings.jsonl").read_text()
    assert set(re.findall(r"bad_batch\w+\.pt", told)) == kept


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("PytorchStreamWriter failed writing file"),
        OSError(errno.ENOSPC, "No space left on device"),
    ],
)
def test_a_bad_batch_that_cannot_be_kept_costs_its_file_alone(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise error

    spoil(monkeypatch, {2}, row=0)
    monkeypatch.setattr(zoo.train.session, "save_bad_batch", full)
    summary = run_small(tmp_path, "algorithm=grpo", "train.steps=3", *QUICK)
    assert summary["status"] == "finished" and summary["skipped_updates"] == 1
    told = (folder_of(tmp_path) / "warnings.jsonl").read_text()
    assert "row 0" in told and f"could not be written: {error}" in told


def test_a_policy_that_cannot_be_saved_leaves_nothing_half_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(folder: Path, *_: Any, **__: Any) -> None:
        (folder / "more").write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(zoo.train.session, "record_hashes", full)
    words = ["algorithm=grpo", "train.steps=1", *QUICK]
    with pytest.raises(RecordError, match=r"policy cannot be written: .*No space left"):
        run_small(tmp_path, *words)
    left = {path.name for path in folder_of(tmp_path).iterdir()}
    assert not left & {".policy.tmp", "policy", "summary.json"}
    monkeypatch.undo()
    assert run_small(tmp_path, *words)["status"] == "finished"


def test_broken_weights_end_the_run_with_a_named_error_and_leave_the_good_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def record(self: Session, step: int, *arguments: Any) -> None:
        sound(self, step, *arguments)
        if step == 3:
            with torch.no_grad():
                next(self.run.policy.parameters())[0, 0] = float("nan")

    sound = Session.record
    monkeypatch.setattr(Session, "record", record)
    options = ["algorithm=grpo", "evaluate.first=false", "evaluate.every=0"]
    with pytest.raises(NumbersError, match="logits are not finite"):
        run_small(tmp_path / "a", *options)
    with pytest.raises(TrainingError, match=r"after step 3 the policy's weights .* not finite"):
        run_small(tmp_path / "b", *options, "train.checkpoint_every=1")
    names = [p.name for p in sorted((folder_of(tmp_path / "b") / "checkpoints").glob("step_*"))]
    assert names == ["step_000001", "step_000002"]
    monkeypatch.setattr(Session, "record", sound)
    summary = run_small(tmp_path / "b", *options, "train.checkpoint_every=1")
    assert summary["status"] == "finished"


# batches without signal --------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", ["ppo", "grpo", "rloo", "reinforce_pp", "gspo", "dapo"])
@pytest.mark.parametrize("reward", ["alike", "abstains"])
def test_a_run_of_dead_batches_ends_and_says_so(
    algorithm: str, reward: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    overrides = [f"algorithm={algorithm}", f"reward.fn=tests.e2e.faulty.{reward}", "train.steps=2"]
    summary = run_small(tmp_path, *FUNCTION, *overrides, *QUICK)
    assert summary["status"] == "finished" and summary["skipped_updates"] == 0
    assert all(m["groups/dead"] == 1 for m in lines(tmp_path, "metrics.jsonl"))
    kinds = [w["kind"] for w in lines(tmp_path, "warnings.jsonl")]
    assert kinds.count("abstained") == (2 if reward == "abstains" else 0)
    # A critic learns from equal rewards, too; everywhere else all gradients are 0.
    silent = (algorithm, reward) != ("ppo", "alike")
    assert kinds.count("empty_batch") == (2 if silent else 0)
    told = "without one update of the weights (no step carried a signal)" in capsys.readouterr().out
    assert told == silent and summary["updates"] == (0 if algorithm == "dapo" else 2)


@pytest.mark.parametrize("algorithm", ["ppo", "grpo", "dapo", "dpo", "kto"])
def test_completions_of_one_token_all_cut_train_and_warn(algorithm: str, tmp_path: Path) -> None:
    overrides = [f"algorithm={algorithm}", "rollout.max_new_tokens=1", "train.steps=2"]
    summary = run_small(tmp_path, *overrides, *QUICK)
    assert summary["skipped_updates"] == 0 and summary["updates"] == 2
    kinds = [w["kind"] for w in lines(tmp_path, "warnings.jsonl")]
    assert ("truncated" in kinds) == (algorithm in ("ppo", "grpo", "dapo"))


# data at the edge --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Words:
    """A data set of given texts."""

    texts: tuple[str, ...] = ()
    heldout: tuple[str, ...] = ("1 + 1 =",)
    max_new_tokens: int = 8

    @property
    def offers(self) -> frozenset[str]:
        return frozenset({"prompts"})

    def prompts(self) -> list[Any]:
        from zoo.types import Prompt

        return [Prompt(f"word/{i}", text=t) for i, t in enumerate(self.texts)]

    def verifier(self) -> Any:
        return None

    def evaluation_sets(self) -> list[Any]:
        from zoo.rewards.random_reward import Random
        from zoo.types import EvaluationSet, Prompt

        prompts = tuple(Prompt(f"held/{i}", text=t) for i, t in enumerate(self.heldout))
        return [EvaluationSet("heldout", "accuracy", prompts, Random())]


def run_words(output: Path, words: Words, *overrides: str) -> dict[str, Any]:
    from zoo.compose import compose
    from zoo.instantiate import structured
    from zoo.train.run import run

    config = structured(compose([*SMALL, f"output={output}", "train.steps=2", *overrides]))
    config.data = words
    return run(config)


@pytest.mark.parametrize("algorithm", ["ppo", "grpo", "dpo"])
def test_one_prompt_is_enough_for_more_groups_than_there_are_prompts(
    algorithm: str, tmp_path: Path
) -> None:
    summary = run_words(tmp_path, Words(("2 + 3 =",)), f"algorithm={algorithm}", *QUICK)
    assert summary["status"] == "finished" and summary["skipped_updates"] == 0


@pytest.mark.parametrize("algorithm", ["grpo", "dpo"])
def test_an_empty_data_set_is_refused_before_training(algorithm: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no training prompts"):
        run_words(tmp_path, Words(()), f"algorithm={algorithm}")


def test_evaluation_sets_may_be_empty(tmp_path: Path) -> None:
    summary = run_words(tmp_path, Words(("2 + 3 =",), heldout=()), "algorithm=grpo")
    assert summary["status"] == "finished"


LONG = "12 + 34 " * 200  # beyond the 256 positions of the model


@pytest.mark.parametrize("algorithm", ["grpo", "dpo"])
def test_a_prompt_beyond_the_context_is_refused_by_name_before_training(
    algorithm: str, tmp_path: Path
) -> None:
    words = Words(("2 + 3 =", "3 + 4 =", LONG))
    with pytest.raises(ConfigError, match=r"1 of 3 training prompts .* context of 256: word/2 \("):
        run_words(tmp_path, words, f"algorithm={algorithm}")


def test_one_long_prompt_in_two_hundred_is_left_out_and_counted(tmp_path: Path) -> None:
    words = Words((*(f"{i} + 1 =" for i in range(199)), LONG))
    run_words(tmp_path, words, "algorithm=grpo", *QUICK)
    (warning,) = [w for w in lines(tmp_path, "warnings.jsonl") if w["kind"] == "too_long"]
    assert re.search(r"1 of 200 training prompts .* word/199 \(.* left out", warning["message"])


def test_an_evaluation_problem_beyond_the_context_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"1 of 2 problems of the set heldout .* held/1"):
        run_words(tmp_path, Words(("2 + 3 =",), heldout=("1 + 1 =", LONG)), "algorithm=grpo")


# rewards that fail -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "says"),
    [
        (
            "hangs",
            r"reward hangs gave no answer after 0.2 s \(.* in hangs\) at row 0 \(prompt .*\), w",
        ),
        ("one_too_few", r"reward one_too_few returned 15 scores for 16 completions"),
        ("strings", r"reward strings gave '1' \(str\) to row 0, whose text is"),
        ("not_a_number", r"reward not_a_number gave nan \(float\) to row 0, whose text is"),
        ("beyond_float32", r"reward beyond_float32 gave 1e\+39 \(float\) to row 0"),
        ("nothing", r"reward nothing returned None \(NoneType\) for 16 completions"),
    ],
)
def test_a_reward_that_fails_stops_the_run_before_the_first_update(
    name: str, says: str, tmp_path: Path
) -> None:
    overrides = ["algorithm=grpo", f"reward.fn=tests.e2e.faulty.{name}", "train.reward_timeout=0.2"]
    with pytest.raises(RewardError, match=says):
        run_small(tmp_path, *FUNCTION, *overrides, *QUICK)
    assert lines(tmp_path, "metrics.jsonl") == []


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("raises", "raised KeyError: 'no such column' at row 0 (prompt "),
        ("leaves", "raised SystemExit: 0 at row 0 (prompt "),
        ("interrupts_itself", "raised KeyboardInterrupt: of its own at row 0 (prompt "),
        ("is_cancelled", "raised CancelledError at row 0 (prompt "),
        ("fails_a_test", "raised Failed: as a test would at row 0 (prompt "),
        ("has_a_page_to_say", "raised OSError: 502 Bad Gateway <p>line</p> <p>"),
        ("has_no_text_for_a_file", "raised ValueError: bad \\ud800 text at row 0 (prompt "),
        ("has_no_words", "raised Wordless at row 0 (prompt "),
    ],
)
def test_whatever_a_reward_raises_is_one_block_with_the_row_and_what_to_do(
    name: str, says: str, tmp_path: Path
) -> None:
    arguments = ["algorithm=grpo", *FUNCTION, f"reward.fn=tests.e2e.faulty.{name}"]
    errors = io.TextIOWrapper(io.BytesIO(), "utf-8", "backslashreplace")  # as sys.stderr is
    with contextlib.redirect_stderr(errors):
        assert main([*SMALL, f"output={tmp_path}", *arguments, *QUICK]) == 1
    errors.seek(0)
    block = errors.read()
    block = block[block.index("zoo: error") :]
    assert len(block.splitlines()) <= MAX_ERROR_LINES
    told = " ".join(block.split())
    assert f"reward {name} {says}" in told
    for words in (" at row 0 (prompt ", "whose text is '", "set train.reward_on_error=abstain."):
        assert words in told
    assert "RewardError: " in (folder_of(tmp_path) / "error.txt").read_text()


def test_a_ctrl_c_while_a_reward_works_is_not_the_reward_s(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = 0

    def scores(completions: list[str]) -> list[float]:
        nonlocal calls
        calls += 1
        if calls == 3:
            signal.raise_signal(signal.SIGINT)
        return [float(i % 2) for i in range(len(completions))]

    monkeypatch.setattr("tests.e2e.faulty.coins", scores)
    options = ["algorithm=grpo", "reward.fn=tests.e2e.faulty.coins"]
    with pytest.raises(KeyboardInterrupt, match="Step 2 of 6 is saved in"):
        run_small(tmp_path, *FUNCTION, *options, "train.reward_on_error=abstain", *QUICK)
    assert calls == 3


@pytest.mark.parametrize(
    "name", ["raises", "leaves", "interrupts_itself", "strings", "not_a_number", "nothing", "hangs"]
)
def test_where_the_config_says_so_a_reward_that_fails_abstains(name: str, tmp_path: Path) -> None:
    overrides = ["algorithm=grpo", f"reward.fn=tests.e2e.faulty.{name}", "train.reward_timeout=0.2"]
    run_small(
        tmp_path, *FUNCTION, *overrides, "train.reward_on_error=abstain", "train.steps=1", *QUICK
    )
    (metrics,) = lines(tmp_path, "metrics.jsonl")
    assert metrics["reward/abstained"] == 1 and "reward/total" not in metrics
    assert "abstained" in [w["kind"] for w in lines(tmp_path, "warnings.jsonl")]


def test_a_verifier_that_scores_nothing_stops_no_run_at_its_target(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither its accuracies nor its best are numbers; the quick check and each set are told of."""

    class Abstains:
        def __call__(self, prompts: Any, completions: Any) -> RewardOutput:
            return RewardOutput([None] * len(prompts))

    monkeypatch.setattr("zoo.data.arithmetic.Arithmetic.verifier", lambda self: Abstains())
    stop = [
        "train.stop_at.metric=heldout/greedy",
        "train.stop_at.value=0.1",
        "train.stop_at.every=1",
    ]
    more = ["train.steps=2", "evaluate.every=0", "evaluate.first=false", "measure.memory=false"]
    summary = run_small(tmp_path, "algorithm=grpo", *stop, *more)
    assert summary["steps"] == 2 and summary["best"] is None
    for name in ("heldout", "independent"):
        final = summary["final"][name]
        assert final["accuracy"] is final["greedy"] is None and final["unscored"] == 1
    told = [w["message"] for w in lines(tmp_path, "warnings.jsonl") if w["kind"] == "unscored"]
    assert len(told) == 4  # two quick checks of heldout, and both sets at the end
    # 6 problems, greedy; then 2 samples each as well; then those of 4 problems
    for message, count in zip(told, (6, 6, 18, 12), strict=True):
        assert f"could not score {count} of {count} answers" in message


@pytest.mark.parametrize(
    ("kind", "row", "more", "why"),
    [
        ("prompts", {"test_list": ["assert 1"]}, ["reward=unit_tests"], "no column answer, but"),
        ("prompts", {"answer": "1"}, ["data.heldout=0"], "JSONL holds out no prompts."),
        (
            "pairs",
            {"chosen": "a", "rejected": "b"},
            ["algorithm=dpo"],
            "pairs and no prompts whose",
        ),
    ],
)
def test_a_target_that_nothing_can_reach_is_refused(
    tmp_path: Path, kind: str, row: dict[str, Any], more: list[str], why: str
) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"{i}?", **row}) + "\n" for i in range(40)))
    data = ["data=jsonl", f"data.path={file}", f"data.kind={kind}"]
    stop = ["train.stop_at.metric=heldout/greedy", "train.stop_at.value=0.5"]
    config = structured(compose([*data, *more, *stop]))
    with pytest.raises(ConfigError, match="but no problem can be judged: data JSONL") as told:
        check(complete(config))
    assert why in str(told.value)
    config.train.stop_at = StopAt()
    check(complete(config))


def test_held_out_prompts_that_nothing_judges_are_told_of(tmp_path: Path) -> None:
    rows = [{"prompt": f"{i}?", "hint": "x"} for i in range(40)]
    for name in ("rows", "apart"):
        text = "".join(json.dumps({**row, "prompt": name + row["prompt"]}) + "\n" for row in rows)
        (tmp_path / f"{name}.jsonl").write_text(text)
    small = [one for one in SMALL if not one.startswith("data.")]
    data = ["data=jsonl", f"data.path={tmp_path}/rows.jsonl", "algorithm=grpo", "train.steps=1"]
    for more, told in (
        ("data.heldout=0.5", "data.heldout=0 trains on them."),
        (f"data.heldout_path={tmp_path}/apart.jsonl", "Leave data.heldout_path out."),
        ("data.heldout=0", ""),
    ):
        output = tmp_path / f"out{len(told)}"
        config = structured(compose([*small, *data, *QUICK, more, f"output={output}"]))
        run(config)
        found = [w["message"] for w in lines(output, "warnings.jsonl") if w["kind"] == "unjudged"]
        held = len(complete(config).data._split()[1])
        assert [m.startswith(f"{held} held-out prompts are judged by nothing") for m in found] == (
            [True] if told else []
        )
        assert all(m.endswith(told) for m in found) and bool(held) == bool(told)


def test_only_the_rows_that_hang_abstain(tmp_path: Path) -> None:
    overrides = ["algorithm=grpo", "reward.fn=tests.e2e.faulty.hangs_on_an_even_first_token"]
    more = [
        "train.reward_on_error=abstain",
        "train.reward_timeout=1",
        "train.steps=1",
        "train.groups=1",
    ]
    run_small(tmp_path, *FUNCTION, *overrides, *more, "measure.rollouts_per_step=4", *QUICK)
    for row in lines(tmp_path, "rollouts.jsonl"):
        hangs = row["token_ids"][0] % 2 == 0
        assert (row["reward"] is None) >= hangs  # after two timeouts the rest is left unscored
    assert any(row["reward"] is None for row in lines(tmp_path, "rollouts.jsonl"))


def run_stranger(output: Path, what: str, *overrides: str, weighted: bool = False) -> Any:
    from tests.e2e.faulty import Stranger
    from zoo.compose import compose
    from zoo.instantiate import structured
    from zoo.rewards.composite import Weighted
    from zoo.train.run import run

    more = [*QUICK, "algorithm=grpo", "train.steps=1", f"output={output}", *overrides]
    config = structured(compose([*SMALL, *more]))
    config.reward = Weighted({"mine": Stranger(what)}) if weighted else Stranger(what)
    return run(config)


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("raises on even", r"raised KeyError: 'no such column' at row \d+ \(prompt .*\), whose te"),
        ("leaves", r"raised SystemExit: 0 at row 0 \(prompt .*\), whose text is"),
        ("one too few", r"returned 15 scores for 16 completions"),
        ("strings", r"gave '1' \(str\) to row 15, whose text is"),
        ("not a number", r"gave nan \(float\) to row 15, whose text is"),
        ("infinite", r"gave inf \(float\) to row 15, whose text is"),
        ("nothing", r"returned None \(NoneType\), not a RewardOutput"),
        ("a list", r"returned \[.*\(list\), not a RewardOutput"),
        ("reasons", r"gave 1 reasons for 16 completions"),
        ("components", r"/mine returned 15 scores for 16 completions"),
    ],
)
@pytest.mark.parametrize("weighted", [False, True])
def test_a_reward_class_that_fails_is_named_with_the_row(
    what: str, says: str, weighted: bool, tmp_path: Path
) -> None:
    name = "mine" if weighted else "Stranger"
    with pytest.raises(RewardError, match=f"reward {name}.*{says}"):
        run_stranger(tmp_path, what, weighted=weighted)
    assert lines(tmp_path, "metrics.jsonl") == []


@pytest.mark.parametrize("weighted", [False, True])
def test_a_reward_class_that_hangs_is_named_with_place_row_and_text(
    weighted: bool, tmp_path: Path
) -> None:
    name = "Weighted" if weighted else "Stranger"
    says = rf"reward {name} gave no answer after 0.5 s \(at faulty.py:\d+ in hangs\) at row 0 \("
    with pytest.raises(RewardError, match=rf"{says}prompt .*whose text is .*train.reward_timeout"):
        run_stranger(tmp_path, "hangs", "train.reward_timeout=0.5", weighted=weighted)


@pytest.mark.parametrize("what", ["raises on even", "hangs on even", "not a number"])
def test_rows_of_a_reward_class_that_fails_abstain_where_the_config_says_so(
    what: str, tmp_path: Path
) -> None:
    options = ["train.reward_on_error=abstain", "train.reward_timeout=0.5"]
    run_stranger(tmp_path, what, *options, "measure.rollouts_per_step=16")
    rows = lines(tmp_path, "rollouts.jsonl")
    scored = [row for row in rows if row["reward"] is not None]
    failed = [row for row in rows if row["reward"] is None]
    assert failed and {row["reason"] for row in failed} == {"failed"}
    if what == "raises on even":
        assert [r for r in rows if r["token_ids"][0] % 2 == 0] == failed
        assert scored and all(r["reward"] == sum(r["token_ids"]) % 2 for r in scored)
    (warning,) = [w for w in lines(tmp_path, "warnings.jsonl") if w["kind"] == "reward_failed"]
    assert f"{len(failed) / 16:.1%} of the completions" in warning["message"]


@pytest.mark.parametrize("algorithm", ["dpo", "kto"])
def test_rows_on_which_a_reward_fails_while_pairs_are_sampled_are_counted(
    algorithm: str, tmp_path: Path
) -> None:
    told = []
    for output in (tmp_path / "sampled", tmp_path / "cached"):
        options = [f"algorithm={algorithm}", "train.reward_on_error=abstain"]
        run_stranger(output, "raises on even", *options)
        (warning,) = [w for w in lines(output, "warnings.jsonl") if w["kind"] == "reward_failed"]
        told.append(warning["message"])
    assert told[0] == told[1]
    failed = int(told[0].split("failed on ")[1].split()[0])
    rows = [
        json.loads(x) for x in next(tmp_path.glob("cache/pairs/*.jsonl")).read_text().splitlines()
    ]
    if algorithm == "kto":  # every scored completion is a row
        assert 0 < failed == 16 - len(rows[1:])
    assert 0 < failed < 16 and " of the 16 completions" in told[0]


@pytest.mark.parametrize("labels", [(True,), (False,), (True, False), "alike", "random"])
def test_labels_of_one_kind_are_warned_of(labels: Any, tmp_path: Path) -> None:
    from zoo.compose import compose
    from zoo.instantiate import structured
    from zoo.train.run import run

    options = [*SMALL, *QUICK, "algorithm=kto", "train.steps=1", f"output={tmp_path / 'out'}"]
    told = "all 16 completions.* undesirable and none"
    if not isinstance(labels, str):
        rows = [
            {"prompt": f"{i} + 1 =", "completion": str(i), "label": label}
            for i in range(8)
            for label in labels[i % len(labels) :][:1]
        ]
        file = tmp_path / "rows.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        options = [one for one in options if not one.startswith("data.")]
        options += ["data=jsonl", f"data.path={file}", "data.kind=labelled"]
        told = f"all 8 completions.* {'' if labels[0] else 'un'}desirable and none"
    elif labels == "alike":
        options += [*FUNCTION, "reward.fn=tests.e2e.faulty.alike"]
    run(structured(compose(options)))
    found = lines(tmp_path / "out", "warnings.jsonl")
    notes = [w["message"] for w in found if w["kind"] == "one_label"]
    assert len(notes) == (len(labels) == 1 or labels == "alike")
    assert all(re.search(told, note) for note in notes)


@pytest.mark.parametrize(
    ("name", "algorithm", "says"),
    [
        ("raises", "dpo", r"16 of 16 .* not scored \(the reward failed on 16, .* no pair could"),
        ("raises", "kto", r"16 of 16 .* not scored \(the reward failed on 16, .* labelled"),
        ("abstains", "reward_model", "16 of 16 sampled completions were not scored, so no pair"),
        ("half_alike", "dpo", "made a pair: 8 of 16 .* not scored; of the others, in every group"),
        ("alike", "dpo", "made a pair: in every group all scores were equal"),
    ],
)
def test_a_reward_that_leaves_no_pair_is_told_with_what_it_left_unscored(
    name: str, algorithm: str, says: str, tmp_path: Path
) -> None:
    options = [f"algorithm={algorithm}", f"reward.fn=tests.e2e.faulty.{name}", "train.steps=1"]
    with pytest.raises(ConfigError, match=says):
        run_small(tmp_path, *FUNCTION, *options, "train.reward_on_error=abstain", *QUICK)


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("nothing", "prepare must return the batch, got None. End it with"),
        ("a row's", r"prepare must return advantages of the shape of input_ids, \[\d+, \d+\], got"),
        ("integers", r"must return advantages of .*, got torch\.int64, which is no float"),
        ("a list", r"prepare must return values of the shape .*, got \[0\.0\]"),
        ("none", "say silent_without_advantage, and prepare returned no advantages"),
        ("no needs", "`needs` must be a property that returns Needs.* NotImplementedError"),
        ("needs that raise", "returns Needs.* AttributeError: .*no_such_setting"),
        ("reference", r"calls models\.reference .*`needs` load none.* reference=True"),
        ("critic", r"calls models\.critic .*`needs` load none.* critic=True"),
    ],
)
def test_an_algorithm_that_breaks_a_premise_is_told_once(
    what: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from zoo.testing import check_algorithm

    target = ["algorithm=grpo", "algorithm._target_=tests.e2e.faulty.Strange"]
    words = [*SMALL, *QUICK, *target, f'+algorithm.what="{what}"', f"output={tmp_path}"]
    assert main(words) == 2
    assert re.search(f"algorithm=strange: .*{says}", " ".join(capsys.readouterr().err.split()))
    report = check_algorithm(Strange(what=what))
    (detail,) = [clause.detail for clause in report.clauses if not clause.passed]
    assert re.search(f"algorithm=strange: .*{says}", detail)


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("log-probs", r"Return Needs\(reference=True\)"),
        ("values", r"Return Needs\(critic=True\)"),
        ("learns late", r"Ask whether models\.gradients is None"),
    ],
)
def test_a_pass_over_a_model_that_is_not_there_ends_the_run_with_what_to_write(
    what: str, says: str, tmp_path: Path
) -> None:
    target = ["algorithm=grpo", "algorithm._target_=tests.e2e.faulty.Strange"]
    with pytest.raises(ConfigError, match=says):
        run_small(tmp_path, *target, f'+algorithm.what="{what}"', "train.steps=1", *QUICK)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("OneArgument", r"losses must be a method losses\(self, batch, models\), and .* \(batch\)"),
        ("AsAProperty", r"losses must be a method .*, and is a property\. Take @property away"),
        ("Misspelt", r"has no method losses\(self, batch, models\).* It has loss: was that meant"),
    ],
)
def test_verbs_that_could_not_be_called_are_refused_before_anything_loads(
    name: str, says: str
) -> None:
    from zoo.testing import check_algorithm

    algorithm = getattr(faulty, name)()
    config = structured(compose([*SMALL, "algorithm=grpo"]))
    config.algorithm = algorithm
    with pytest.raises(ConfigError, match=says):
        check(config)
    (broken,) = [clause for clause in check_algorithm(algorithm).clauses if not clause.passed]
    assert broken.name == "needs are stated" and re.search(says, broken.detail)
    config.algorithm = faulty.OfAnyArguments()
    check(config)


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("enough that raises", r"loss/policy, .*\), and raised KeyError: 'nowhere'"),
        ("several answers", "raised RuntimeError: Boolean value of Tensor with more than one"),
    ],
)
def test_an_algorithm_that_cannot_say_whether_it_has_enough_is_named(
    what: str, says: str, tmp_path: Path
) -> None:
    target = ["algorithm=grpo", "algorithm._target_=tests.e2e.faulty.Strange"]
    with pytest.raises(RuntimeError, match=f"algorithm=strange: `enough` must .*{says}"):
        run_small(tmp_path, *target, f'+algorithm.what="{what}"', "train.steps=1", *QUICK)


def test_a_run_that_a_reward_stopped_goes_on_with_another_answer_to_failures(
    tmp_path: Path,
) -> None:
    with pytest.raises(RewardError):
        run_stranger(tmp_path, "leaves")
    run_stranger(tmp_path, "leaves", "train.reward_on_error=abstain", "train.reward_timeout=9")
    assert len(lines(tmp_path, "metrics.jsonl")) == 1  # in the same folder, the only one


def test_a_verifier_that_hangs_in_an_evaluation_is_named(tmp_path: Path) -> None:
    from tests.e2e.faulty import Stranger
    from zoo.compose import compose
    from zoo.instantiate import structured
    from zoo.train.run import run
    from zoo.types import EvaluationSet, Prompt

    @dataclass(frozen=True)
    class Hanging(Words):
        def evaluation_sets(self) -> list[Any]:
            prompts = (Prompt("held/0", text="1 + 1 ="),)
            return [EvaluationSet("heldout", "accuracy", prompts, Stranger("hangs"))]

    options = ["algorithm=grpo", "train.reward_timeout=0.5", "evaluate.kl_to_start=false"]
    config = structured(compose([*SMALL, f"output={tmp_path}", *options]))
    config.data = Hanging(("2 + 3 =",))
    with pytest.raises(RewardError, match=r"reward Stranger gave no answer .* \(prompt held/0\)"):
        run(config)


def test_pairs_are_not_made_with_a_reward_that_hangs(tmp_path: Path) -> None:
    with pytest.raises(RewardError, match=r"reward Stranger gave no answer after 0.5 s .* row 0"):
        run_stranger(tmp_path, "hangs", "algorithm=dpo", "train.reward_timeout=0.5")


POOLED = """
import time
from concurrent.futures import ThreadPoolExecutor
POOL = ThreadPoolExecutor(4)
def score(completions):
    return list(POOL.map(lambda text: time.sleep(3000), completions))
"""


@pytest.mark.parametrize(("on_error", "status"), [("stop", 1), ("abstain", 0)])
def test_a_reward_that_hangs_in_threads_of_its_own_does_not_keep_the_process(
    on_error: str, status: int, tmp_path: Path
) -> None:
    (tmp_path / "pooled.py").write_text(POOLED)
    brief = ["train.steps=1", "train.groups=1", "evaluate.first=false", "evaluate.last=false"]
    judged = ["reward=function", "reward.fn=pooled.score", "train.reward_timeout=0.2"]
    judged += [f"train.reward_on_error={on_error}", "rollout.group_size=2"]
    small = [one for one in SMALL if not one.startswith("reward=")]
    done = subprocess.run(
        [sys.executable, "-m", "zoo", *small, "algorithm=grpo", *brief, *judged, "output=out"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == status, done.stderr
    assert "zoo ends without ThreadPoolExecutor" in done.stderr
    assert ("finished: " in done.stdout) == (status == 0)


ENDING = """
import atexit, sys, time, types
from concurrent.futures import ThreadPoolExecutor
import zoo.rewards.deadline as deadline
import zoo.__main__ as program
program.GRACE_SECONDS, program.WORK_SECONDS = 0.5, {work}
def main():
    pool.submit(time.sleep, {seconds}).add_done_callback(lambda _: print("worked"))
    deadline.given_up += {late}
    return {status}
pool = ThreadPoolExecutor(1)
cli = sys.modules["zoo.cli"] = types.ModuleType("zoo.cli")
cli.main = main
atexit.register(print, "at exit")
sys.exit(program.start())
"""


@pytest.mark.parametrize(
    ("seconds", "late", "status", "work", "whole"),
    [
        (0, ["x"], 3, 60, True),  # an idle pool ends with Python
        (1.2, [], 0, 60, True),  # work of the user's that nothing gave up is waited for
        (3000, ["x"], 3, 3000, False),
        (3000, [], 130, 3000, False),
        (3000, [], 0, 0.2, False),  # but not for ever
        (3000, [], 2, 0.2, False),
    ],
)
def test_python_ends_as_ever_unless_a_thread_does_not_end(
    seconds: float, late: list[str], status: int, work: float, whole: bool
) -> None:
    code = ENDING.format(seconds=seconds, late=late, status=status, work=work)
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == status
    assert done.stdout.split("\n")[:-1] == (["worked", "at exit"] if whole else [])
    assert ("zoo ends without" in done.stderr) != whole


@pytest.mark.parametrize("heldout", [False, True])
def test_golds_that_a_verifier_would_stop_at_are_refused_before_a_model_loads(
    heldout: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def loads(*_: Any, **__: Any) -> None:
        raise AssertionError("a model was loaded")

    monkeypatch.setattr("zoo.build.load_start", loads)
    words = ["algorithm=grpo", "data._target_=tests.e2e.faulty.GoldsInLists"]
    words += [f"+data.heldout={heldout}", *QUICK]
    with pytest.raises(ConfigError, match=r"its gold .* must be a text or a number, got \['"):
        run_small(tmp_path, *words, "reward=verifier")
    if not heldout:  # a reward that reads no gold
        with pytest.raises(AssertionError, match="a model was loaded"):
            run_small(tmp_path, *words)
    with pytest.raises(AssertionError, match="a model was loaded"):
        run_small(tmp_path, *words, "reward=verifier", "train.reward_on_error=abstain")
