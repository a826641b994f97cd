"""The command line: forty mistakes and more, help, extension, and what happens when a run fails."""

import importlib
import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import warnings
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml
from hydra.core.config_store import ConfigStore

from zoo.claim import announce, claim, claimed
from zoo.cli import MAX_ERROR_LINES, SUBCOMMANDS, _record_failure, main
from zoo.compose import FOLDERS, GROUPS, compose, config_dir
from zoo.config import ConfigError, RunConfig
from zoo.instantiate import complete, config_hash, run_dir, structured
from zoo.launch import expand
from zoo.measure.files import RecordError
from zoo.rewards.random_reward import Random
from zoo.train.lock import FolderLock

REPOSITORY = Path(__file__).resolve().parents[1]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Every test starts in an empty folder that no module path knows."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delenv(FOLDERS, raising=False)
    return tmp_path


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[RunConfig]:
    """The configurations that would have been trained."""
    import zoo.train.run

    seen: list[RunConfig] = []

    def record(config: RunConfig) -> dict[str, Any]:
        seen.append(config)
        return {}

    monkeypatch.setattr(zoo.train.run, "run", record)
    return seen


# ------------------------------------------------------------------------ a tour of mistakes

RANDOM_PART = (
    "write '+data.parts.math.reward={_target_: zoo.rewards.random_reward.Random, …}' with its "
    "settings, behind ~data.parts.math.reward where"
)
# (arguments, what the block must say: the value, and what to do)
MISTAKES: list[tuple[str, list[str]]] = [
    # groups and options
    (
        "algorithm=grppo",
        ["algorithm=grppo", "Did you mean algorithm=grpo?", "Options: cdpo, cispo"],
    ),
    ("model=tinny", ["model=tinny", "Did you mean model=tiny?"]),
    ("data=arithmatic", ["data=arithmatic", "Did you mean data=arithmetic?"]),
    ("experiment=tiny_sfd", ["Did you mean experiment=tiny_sft?"]),
    ("-m evaluate model=tiny", ["flag of runs (-m)", "Write the subcommand first, as in zoo eval"]),
    ("experiment=a/b", ["experiment=a/b", "Options:"]),
    ("train=fast", ["train=fast", "Options: default"]),
    ("train=3", ["train=3", "Write train=NAME", "default"]),
    ("algorithm=[grpo,ppo]", ["a run has one algorithm", "zoo -m algorithm=grpo,ppo"]),
    ("--cfg job data=['digits']", ["a run has one data", "zoo -m data=digits"]),
    ("algorithm=grpo,ppo", ["several values", "zoo -m algorithm=grpo,ppo …."]),
    ("algoritm=grpo", ["algoritm=grpo", "Did you mean algorithm=grpo?"]),
    ("foo/bar=3", ["foo/bar=3", "zoo --help"]),
    ("+algorithm=ppo", ["+algorithm=ppo", "without the +"]),
    ("algorithm=dpo +algorithm=ppo", ["+algorithm=ppo: ", "Write it without the +"]),
    ("train.steps=3 +train.steps=1", ["+train.steps=1: ", "without the +: train.steps=1"]),
    ("++algorithm=ppo", ["++algorithm=ppo", "Write algorithm=ppo"]),
    ("algorithm=null", ["algorithm is not set", "Choose algorithm=NAME"]),
    ("~data", ["data is not set", "Choose data=NAME"]),
    ("~nothing", ["~nothing", "no nothing to take away"]),
    ("~trian", ["Did you mean ~train?"]),
    ("~algorithm.clip_eps_high", ["algorithm.clip_eps_high is null", "Leave"]),
    ("hydra/launcher=nobody -m seed=0,1", ["hydra/launcher=nobody", "Options:"]),
    # keys
    ("rollout.top_p=0.9", ["rollout.top_p=0.9", "rollout has: ", "temperature"]),
    ("train.stepz=3", ["train.stepz=3", "Did you mean train.steps=3?"]),
    ("steps=3", ["steps=3", "Did you mean train.steps=3?"]),
    ("train.stop_at=null", ["a StopAt, got null", "train.stop_at.metric=…"]),
    (
        "model=tiny_random model.architecture.initializer_range=0.3",
        ["there is no setting", "Write +model.architecture.initializer_range=0.3"],
    ),
    (
        "model=tiny_random model.architecture={model_type:mixtral,num_local_experts:2}",
        ["has a setting", "Write +model.architecture={model_type:mixtral,num_local_experts:2}"],
    ),
    (
        "model=tiny_random model.architecture.hiden_size=32",
        ["Did you mean model.architecture.hidden_size=32?"],
    ),
    ("lr=1e-4", ["lr=1e-4", "Did you mean train.lr=1e-4?"]),
    ("+lr=1e-4", ["lr", "0.0001", "Did you mean train.lr?"]),
    ("algorithm.clip_epz=0.3", ["0.3", "Did you mean algorithm.clip_eps=0.3?"]),
    ("+algorithm.clip_epz=0.3", ["0.3", "Did you mean algorithm.clip_eps?"]),
    ("++algorithm.foo=3", ["algorithm.foo", "3", "algorithm has: epochs"]),
    ("+algorithm.foo=3", ["algorithm.foo", "3", "algorithm has: epochs"]),
    ("algorithm.gae_lambda=0.9", ["algorithm.gae_lambda=0.9", "belongs to algorithm=ppo"]),
    ("+train.stop_at.evry=3", ["train.stop_at.evry", "3", "Did you mean train.stop_at.every?"]),
    ("+seed=3", ["+seed=3", "without the +: seed=3"]),
    ("train.lr.foo=3", ["train.lr.foo=3", "train.lr=3"]),
    ("train.betas.0=x", ["train.betas", "x"]),
    # values
    ("train.steps=abc", ["train.steps", "'abc'", "a whole number", "Try train.steps=45"]),
    ("train.steps=2.5", ["train.steps", "2.5", "a whole number"]),
    ("train.steps=-3", ["train.steps", "-3", "at least 0", "Try train.steps=45"]),
    ("train.steps=", ["train.steps", "''", "a whole number"]),
    ("train.steps=null", ["train.steps", "null", "a whole number"]),
    ("train.lr=-1", ["train.lr", "-1", "above 0"]),
    ("train.lr=nan", ["train.lr", "nan", "finite"]),
    ("train.lr_end=2", ["train.lr_end", "2", "between 0 and 1"]),
    ("train.betas=[0.9]", ["train.betas", "[0.9]", "Try train.betas=[0.9,0.95]"]),
    ("train.schedule=linea", ["'linea'", "Did you mean train.schedule=linear?"]),
    ("train.device=gpu", ["'gpu'", "auto, cpu, cuda, mps"]),
    ("train.stop_at.every=0", ["train.stop_at.every", "0", "at least 1"]),
    ("seed=a", ["seed", "'a'", "a whole number"]),
    ("seed=-1", ["seed", "-1", "seed=0"]),
    ("name=a/b", ["name", "a/b", "one plain word"]),
    ("resume=yes", ["resume", "'yes'", "auto, never, must"]),
    ("measure.progress=maybe", ["measure.progress", "'maybe'", "true or false"]),
    ("train.lr='1e-3'", ["train.lr", "'1e-3'", "a number", "It is a text: leave out the quotes"]),
    ("train.steps='1.5'", ["train.steps", "'1.5'", "a whole number", "Try train.steps="]),
    (
        "data=mixture data.parts={a:{weight:1,_target_:zoo.data.digits.Digits}}",
        [
            "names a part that the mixture has not",
            "+data.parts.NAME={…}",
            "~data.parts +data.parts",
        ],
    ),
    *(
        (f"data=mixture reward=null {sign}data.parts.math.{given}", [told, RANDOM_PART])
        for sign, given, told in (
            ("", "rewrad=random", "there is no setting data.parts.math.rewrad"),
            ("", "reward=random", "there is no setting data.parts.math.reward "),
            ("+", "reward=random", "data.parts.math.reward is 'random', the name of an option"),
        )
    ),
    (
        "data=mixture reward=null data.parts.math.reward._target_=a.B",
        ["there is no setting data.parts.math.reward._target_", "write '+data.parts.math.reward={"],
    ),
    (
        "data=mixture reward=null +data.parts.math.reward=3",
        ["data.parts.math.reward must be a mapping", "Write {_target_: package.module.Class, …}"],
    ),
    (
        "model=hub model.path=x model.architecture.hidden_size=32",
        ["there is no setting model.architecture.hidden_size", "Write +model.architecture.hidden_"],
    ),
    ("measure.wandb=none", ["'none'", "Did you mean measure.wandb=disabled?"]),
    ("measure.wandb=onlin", ["'onlin'", "Did you mean measure.wandb=online?"]),
    ("evaluate.pass_k=8", ["evaluate.pass_k", "8", "a list"]),
    ("evaluate.pass_k=[0]", ["evaluate.pass_k must be at least 1, got 0", "evaluate.pass_k=[1]"]),
    ("evaluate.pass_k=[8]", ["8", "evaluate.samples=4", "Try evaluate.samples=8"]),
    ("evaluate.best_metric=accuracy", ["'accuracy'", "heldout/accuracy"]),
    ("model.dtype=float8", ["'float8'", "float32, bfloat16"]),
    ("model.path=some/model", ["model.path and model.recipe", "model=hub"]),
    ("model.recipe=my_start", ["model.recipe=my_start", "no such recipe", "Options: dapo, "]),
    ("model.recipe=tiny_sfd", ["model.recipe=tiny_sfd", "Did you mean model.recipe=tiny_sft?"]),
    ("-m model.recipe=tiny_sft,none", ["model.recipe=none", "In the job: model.recipe=none"]),
    ("evaluate model=tiny model.recipe=no/such", ["model.recipe=no/such", "--config-dir DIR"]),
    ("model=hub", ["model.path is not set", "Add model.path="]),
    ("train.steps=${nowhere}", ["train.steps", "nowhere"]),
    ("algorithm.average=seqence", ["'seqence'", "Did you mean algorithm.average=sequence?"]),
    ("algorithm.clip_eps=2", ["algorithm.clip_eps", "2", "Try 0.2"]),
    ("algorithm.epochs=0", ["algorithm.epochs", "0", "Try algorithm.epochs=1"]),
    ("rollout.temperature=0", ["rollout.temperature", "0", "above 0"]),
    ("algorithm._target_=zoo.algorithms.grpo.GPRO", ["GPRO", "zoo.algorithms.grpo.GRPO"]),
    ("algorithm._target_=mine.Mine", ["mine.Mine", "mine.py", "working directory"]),
    # combinations
    ("rollout.group_size=1", ["rollout.group_size", "1", "Try rollout.group_size=8"]),
    ("algorithm.minibatches=99", ["algorithm.minibatches=99", "train.groups"]),
    ("algorithm=sft data=digits", ["sft", "examples", "prompts"]),
    ("model=hub model.path=./nowhere", ["./nowhere", "does not exist"]),
    # syntax
    ("train.lr = 3", ["train.lr = 3", "without spaces"]),
    ("name='a", ["name='a", "key=value"]),
    ("algorithm=[grpo", ["algorithm=[grpo", "key=value"]),
    ("=3", ["=3", "key=value"]),
    ("algorithm=grpo seed", ["'seed'", "seed=…"]),
    ("algorithm=grpo,", ["'algorithm=grpo,' cannot be read", "it ends with a comma"]),
    ("algorithm=grpo ppo", ["'ppo'", "Did you mean algorithm=ppo?"]),
    ("seed=0,1", ["seed=0,1", "zoo -m seed=0,1"]),
    ("seed=range(3)", ["seed=range(3)", "-m"]),
    # subcommands and flags
    ("repor", ["'repor'", "Did you mean `zoo report`?"]),
    ("grpo", ["'grpo'", "Did you mean algorithm=grpo?"]),
    ("algorithm grpo", ["Write algorithm=NAME", "grpo"]),
    ("xyzzy", ["'xyzzy'", "Subcommands: evaluate"]),
    ("--conifg-dir=x", ["--conifg-dir", "Did you mean --config-dir?"]),
    ("--cfg jop", ["'jop'", "job"]),
    ("--cfg job --package trian", ["trian", "Did you mean --package train?"]),
    ("--resolve", ["--resolve", "--cfg job --resolve"]),
    ("--jobs 3", ["3", "Add -m"]),
    ("--config-name nobody", ["'nobody'", "'config'"]),
    ("--config-name ../nobody", ["'../nobody'", "'config'"]),
    ("--config-name no/body", ["'no/body'", "'config'"]),
    ("--config-dir nowhere algorithm=grpo", ["nowhere", "does not exist"]),
    ("--config-dir pkg://no.conf", ["takes folders", "hydra.searchpath=[pkg://no.conf]"]),
    ("hydra.searchpath=[/nowhere]", ["/nowhere", "does not exist"]),
    ("hydra.searchpath=[pkg://nowhere]", ["'pkg://nowhere'", "is no package"]),
    ("hydra.searchpath=[pkg://nowhere.conf]", ["'pkg://nowhere.conf'", "ModuleNotFoundError"]),
    ("hydra.searchpath=[pkg://json.tool]", ["'pkg://json.tool'", "is no package"]),
    ("hydra.searchpath=[pkg://json.tool.conf]", ["'pkg://json.tool.conf'", "ModuleNotFoundError"]),
    ("hydra.searchpath=[pkg://.x]", ["'pkg://.x'", "ImportError"]),
    ("hydra.searchpath=[pkg://]", ["'pkg://'", "is no package"]),
    ("hydra.searchpath=[structured://nowhere]", ["'structured://nowhere'", "ModuleNotFoundError"]),
    ("evaluate model=tiny_random hydra.searchpath=[pkg://nowhere]", ["'pkg://nowhere'"]),
    # words of other libraries
    ("num_generations=8", ["num_generations=8", "Did you mean rollout.group_size=8?"]),
    ("rollout.max_completion_length=9", ["Did you mean rollout.max_new_tokens=9?"]),
    ("learning_rate=1e-4", ["learning_rate=1e-4", "Did you mean train.lr=1e-4?"]),
    ("report_to=none", ["report_to=none", "Did you mean measure.wandb=none?"]),
    ("train.max_steps=9", ["train.max_steps=9", "Did you mean train.steps=9?"]),
    # a newcomer's
    ("measure.wandb=true", ["true", "one of offline, online, disabled"]),
    ("algorithm={a:1}", ["algorithm={a:1}", "Write algorithm=NAME"]),
    ("rollout.group_size=-4", ["rollout.group_size", "-4", "at least 1"]),
    ("rollout.max_new_tokens=0", ["rollout.max_new_tokens", "0", "at least 1"]),
    ("train.groups=0", ["train.groups", "0", "Try train.groups=16"]),
    ("train.reward_timeout=0", ["train.reward_timeout", "0", "Try train.reward_timeout=1800"]),
    ("train.reward_on_error=skip", ["'skip'", "one of stop, abstain"]),
    ("algorithm.kl_coef=-1", ["algorithm.kl_coef", "-1", "Use 0"]),
    ("model.compute_dtype=fp8", ["fp8", "Use bfloat16"]),
    ("model.attention=flash", ["model.attention", "'flash'", "sdpa"]),
    ("model.critic=./nope algorithm=ppo", ["model.critic=./nope", "does not exist"]),
    ("algorithm=dpo reward=learned", ["reward.path is not set", "algorithm=reward_model"]),
    ("reward=learned reward.path=./nope", ["reward.path=./nope", "does not exist"]),
    ("reward=function", ["reward.fn is not set", "Try reward.fn=mine.score"]),
    ("reward=function reward.fn=mine.score", ["reward.fn=mine.score", "mine.py"]),
    ("reward=function reward.fn=math.pi", ["math.pi", "float", "function"]),
    ("data=jsonl", ["data.path is not set", "Try data.path=my.jsonl"]),
    ("data=jsonl data.path=.", ["is a folder, not a file"]),
    ("data=jsonl data.path=q.jsonl", ["there is no file q.jsonl", "Check data.path"]),
    ("data=jsonl data.path=q data.columns.prompt.x=1", ["data.columns.prompt.x=1"]),
    ("data=gsm8k data.columns={prompt:q}", ["there is no setting data.columns", "data=jsonl"]),
    ("data=gsm8k data.path=nowhere", ["data.path=nowhere", "train.jsonl"]),
    ("data=hub", ["data.name is not set", "Try data.name=openai/gsm8k"]),
    ("output=", ["output", "''", "Try output=outputs"]),
    # subcommands
    ("fetch nobody", ["'nobody'", "It can fetch smollm2_135m"]),
    ("fetch --all", ["--all", "takes names and no flags"]),
    ("runs nowhere", ["nowhere", "outputs/"]),
    ("runs --foo", ["--foo", "`zoo runs --help`"]),
    ("report", ["required: folder", "`zoo report --help`"]),
    ("report nowhere", ["no folder nowhere", "outputs/"]),
    ("report x --ot y", ["--ot", "Did you mean --out?"]),
    ("doctor grppo", ["'grppo'", "Did you mean grpo?"]),
    ("doctor --fulll", ["--fulll", "Did you mean --full?"]),
    ("doctor --config-dir pkg://no.conf", ["takes folders", "hydra.searchpath=[pkg://no.conf]"]),
    ("doctor --config-dir nowhere", ["nowhere", "does not exist"]),
    ("evaluate grpo", ["'grpo'", "Did you mean algorithm=grpo?"]),
    ("evaluate model=tinny", ["model=tinny", "Did you mean model=tiny?"]),
    ("evaluate model", ["model names no model", "model=tiny, or model=FOLDER"]),
    ("evaluate data=digits model=", ["model= names no model", "model=tiny, or model=FOLDER"]),
    ("model=hub model.path=", ["model.path names no model, got ''", "Give a folder"]),
    ("evaluate model=tiny out=", ["out=", "no file", "out=scores.jsonl"]),
    ("evaluate model=tiny out=/dev", ["out=/dev", "Is a directory", "another file"]),
    (
        "evaluate model=tiny out=/dev/null/x",
        ["out=/dev/null/x", "cannot be written", "another file"],
    ),
    ("fetch smollm2_135m nope", ["'nope'", "smollm2_135m"]),
    ("algorithms foo", ["'foo' is no key=value"]),
    ("algorithms algorithm=grpo", ["algorithm=grpo", "--package algorithm algorithm=NAME"]),
    ("algorithms -m", ["--multirun", "lists them all"]),
    ("algorithms seed=1", ["takes no seed=1"]),
    ("algorithms ~seed", ["takes no ~seed"]),
    ("algorithms --jobs 2", ["takes no --jobs"]),
    ("algorithms --config-name mine", ["takes no --config-name"]),
    ("-m ~seed seed=0,1", ["~seed takes seed out", "leave one of them out"]),
    ("evaluate model=./nope", ["model.path=./nope", "does not exist"]),
    ("audit nowhere.jsonl", ["nowhere.jsonl", "Give a JSONL file"]),
    ("audit a.jsonl limit=many", ["limit", "'many'"]),
    ("algorithms --foo", ["--foo", "zoo --help"]),
    # sweeps are refused before a job starts
    ("-m", ["values given by commas", "zoo -m algorithm=ppo,grpo seed=0,1,2"]),
    (
        "-m algorithm=ppo,grpo rollout.group_size=1",
        ["rollout.group_size", "In the job: algorithm=grpo rollout.group_size=1"],
    ),
    (
        "-m hydra/launcher=joblib algorithm=ppo,sft data=digits",
        ["sft", "examples", "In the job: algorithm=sft data=digits"],
    ),
    (  # hydra's own, by its name
        "-m hydra/launcher=joblib hydra/sweeper=basic algorithm=ppo,sft data=digits",
        ["sft", "examples", "In the job: algorithm=sft data=digits"],
    ),
    (  # quoted, as hydra takes it too
        "-m hydra/launcher='joblib' hydra/sweeper='basic' algorithm=ppo,sft data=digits",
        ["sft", "examples", "In the job: algorithm=sft data=digits"],
    ),
    (
        "-m hydra/launcher='basic' --jobs 2 algorithm=ppo,sft data=digits",
        ["sft", "examples", "In the job: algorithm=sft data=digits"],
    ),
    (
        "-m hydra/launcher=submitit_local hydra.launcher.timeout_min=0 seed=0,1",
        ["hydra.launcher.timeout_min=0 leaves a job no time", "Give at least 1"],
    ),
    ("-m seed=0,1 algorithm=ppo,grppo", ["grppo", "In the job: seed=0 algorithm=grppo"]),
    ("-m seed=0,1 train.steps=1,-1", ["train.steps", "-1", "In the job: seed=0 train.steps=-1"]),
    ("-m seed=interval(0,1)", ["seed=interval(0,1)", "range(start,stop,step)"]),
    ("-m seed=0,1 --jobs none", ["none", "--jobs 2"]),
    ("-m seed=0,1 --jobs ²", ["'²'", "--jobs 2"]),
    ("-m --cfg job seed=0,1", ["-m runs several", "zoo --cfg job seed=0"]),
    ("-m seed=range(0,2,0)", ["seed=range(0,2,0)", "endlessly many", "Give fewer"]),
    ("-m seed=range(0,1e9)", ["seed=range(0,1e9)", "1,000,000,000 jobs", "Give fewer"]),
    ("-m --config-name nobody seed=0,1", ["'nobody'", "In the job: seed=0"]),
    ("-m name=a train.lr=1e-4,2e-4", ["(train.lr=0.0001 and train.lr=0.0002)", "Leave name=a out"]),
    (
        "-m measure.wandb=offline,disabled seed=0,1",
        ["(measure.wandb=offline and measure.wandb=disabled) are one and the same", "In the job"],
    ),
    ("-m resume=auto,never train.lr=1e-4", ["(resume=auto and resume=never)", "Give it one value"]),
    # hydra's own
    ("hydra=null", ["hydra=null", "leave it out"]),
    ("hydra/launcher=null", ["hydra/launcher=null", "leave it out"]),
    ("--cfg job hydra.nope=3", ["hydra.nope=3", "zoo --cfg hydra"]),
    ("--cfg hydra hydra.nope=3", ["hydra.nope=3", "zoo --cfg hydra"]),
    ("--cfg hydra -p trainn", ["--package trainn", "`zoo --cfg hydra` has no such part"]),
    ("--cfg all --package trainn", ["--package trainn", "`zoo --cfg all` has no such part"]),
    ("hydra.job.chdir=true", ["hydra.job.chdir=true", "output=DIR"]),
    ("-m hydra/launcher=joblib seed=0,1 hydra.job.chdir=true", ["relative paths", "Leave it out"]),
    ("hydra.sweeper.params.seed=0 --cfg job -p seed", ["params.seed=0", "zoo -m seed=0,1"]),
    ("-m hydra.sweeper.params.seed=[0,1]", ["hydra.sweeper.params.seed=[0,1]", "zoo -m seed=0,1"]),
    ("-m +hydra.sweeper.params={seed:1}", ["+hydra.sweeper.params={seed:1}", "zoo -m seed=0,1"]),
    ("-m hydra.sweeper.max_batch_size=2", ["hydra.sweeper.max_batch_size", "2", "--jobs N"]),
    ("hydra.mode=MULTIRUN", ["hydra.mode is MULTIRUN", "write zoo -m"]),
    ("--cfg hydra hydra.sweep.dir={a:1}", ["hydra.sweep.dir", "zoo --cfg hydra --package"]),
    ("-p train", ["--package train belongs to --cfg", "zoo --cfg job --package train"]),
    ("--config-name= seed=1", ["--config-name is empty", "leave it out"]),
    ("--info foo", ["'foo'", "'searchpath'", "zoo --help"]),
    ("--cfg job --resolve name=${nowhere}", ["name=${nowhere}", "'nowhere' not found"]),
    ("--shell-completion", ["got nothing", "install=bash"]),
    ("--cfg job --info", ["--cfg and --info", "Give one"]),
    ("-r -m seed=0,1", ["--run and --multirun", "Give one"]),
    ("-sc install=bash -m", ["--shell-completion and --multirun", "Give one"]),
    ("-sc query=bash", ["got query=bash", "install=bash"]),
    ("-sc install=tcsh", ["got install=tcsh", "install=bash"]),
    ("report x --out=", ["--out", "''"]),
    # what moved
    ("reward=function reward.fn=a.b reward.timeout=5", ["reward.timeout", "train.reward_timeout"]),
    ("reward=function reward.on_error=abstain", ["reward.on_error", "train.reward_on_error"]),
]

# Overrides with spaces of their own, which the shell would have kept together.
WHOLE = {"train.lr = 3"}


@pytest.mark.parametrize(("line", "words"), MISTAKES, ids=[line for line, _ in MISTAKES])
def test_mistake_gives_one_short_block(
    line: str, words: list[str], capsys: pytest.CaptureFixture[str], elsewhere: Path
) -> None:
    status = main([line] if line in WHOLE else line.split())
    out, err = capsys.readouterr()
    assert status == 2
    assert err.startswith("zoo: error\n")
    assert len(err.splitlines()) <= MAX_ERROR_LINES
    assert "Traceback" not in out + err and "hydra.cc" not in err
    for word in words:
        # lines are wrapped between words
        assert word in " ".join(err.split()), err
    assert not [path for path in elsewhere.rglob("*") if path.is_file()]  # nothing was started


def test_a_part_gets_a_reward_as_the_refusal_of_an_options_name_says(
    elsewhere: Path, runs: list[RunConfig], capsys: pytest.CaptureFixture[str]
) -> None:
    (elsewhere / "data").mkdir()
    part = "{weight: 1, _target_: zoo.data.digits.Digits"
    own = "reward: {_target_: zoo.rewards.function.Function, fn: tests.e2e.faulty.coins}"
    (elsewhere / "data" / "mine.yaml").write_text(
        f"_target_: zoo.data.mixture.Mixture\nparts:\n  a: {part}, {own}}}\n  b: {part}}}\n"
    )
    command = ["--config-dir", ".", "data=mine", "reward=null"]
    for name in ("rewrad", "reward"):
        assert main([*command, f"data.parts.a.{name}=random"]) == 2
        (new,) = re.findall(r"'(\+.*)'", " ".join(capsys.readouterr().err.split()))
        assert new.endswith("random_reward.Random, …}")
    new = new.replace(", …", "")
    for words in ([new.replace(".a.", ".b.")], ["~data.parts.a.reward", new]):
        assert main([*command, *words]) == 0
    b, a = (run.data.verifier().rewards for run in runs)
    assert b["b"] == a["a"] == Random() != b["a"]
    assert main([*command, "data.parts.a.reward.fnn=x"]) == 2  # of the reward that the part has
    assert "Did you mean data.parts.a.reward.fn=x?" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("wrong", ["lab/a", "tiny_sfd"])
def test_only_recipes_are_offered_where_another_job_has_a_plain_word(
    wrong: str, runs: list[RunConfig], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["-m", f"experiment=lab,{wrong}", "algorithm=grpo"]) == 2
    err = " ".join(capsys.readouterr().err.split())
    offered = err.partition("Options: ")[2].partition(".")[0].split(", ")
    folder = config_dir() / "experiment"
    assert offered == sorted(path.stem for path in folder.glob("*.yaml"))
    assert main(["lab"]) == 2  # no option, though hydra has it by that name now
    assert "experiment=lab" not in capsys.readouterr().err
    assert main(["experiment=lab", "algorithm=grpo"]) == 0 and runs[-1].experiment == "lab"


@pytest.mark.parametrize("way", [["--cfg", "job"], [], ["-m", "seed=0,1"]])
def test_a_configuration_without_the_groups_of_zoo_is_told_how_to_have_them(
    way: list[str], elsewhere: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = elsewhere / "own.yaml"
    command = ["--config-dir", ".", "--config-name", "own", *way, "algorithm=grpo"]
    own.write_text("train: {steps: 3}\n")
    assert main(command) == 2
    assert "`defaults: [config, _self_]`" in " ".join(capsys.readouterr().err.split())
    own.write_text("defaults: [config, _self_]\ntrain: {steps: 7}\n")
    assert main([*command[:4], "--cfg", "job", "-p", "train.steps", "algorithm=grpo"]) == 0
    assert capsys.readouterr().out.strip() == "7"


def test_a_search_path_of_null_is_an_empty_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--cfg", "job", "-p", "seed", "hydra.searchpath=null", "seed=5"]) == 0
    assert capsys.readouterr().out.strip() == "5"


def test_a_package_of_options_that_does_not_load_is_named(
    elsewhere: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(elsewhere)
    (elsewhere / "unloadable" / "conf").mkdir(parents=True)
    (elsewhere / "unloadable" / "__init__.py").write_text("raise RuntimeError('too old')")
    assert main(["hydra.searchpath=[pkg://unloadable.conf]"]) == 2
    err = " ".join(capsys.readouterr().err.split())
    assert "'pkg://unloadable.conf', which cannot be imported (RuntimeError: too old)" in err


def test_a_setting_of_a_group_that_a_recipe_made_a_value_is_told_of_it(
    elsewhere: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (elsewhere / "o" / "experiment").mkdir(parents=True)
    recipe = "# @package _global_\ntrain: 3\n"
    (elsewhere / "o" / "experiment" / "three.yaml").write_text(recipe)
    assert main(["--config-dir", "o", "experiment=three", "train.groups=2"]) == 2
    err = " ".join(capsys.readouterr().err.split())
    assert "train.groups=2: train is 3 here and holds no settings. Take `train: 3` out" in err


def test_a_file_in_the_place_of_a_folder_of_options_is_named(
    elsewhere: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (elsewhere / "options").write_text("")
    assert main(["--config-dir", "options", "algorithm=grpo"]) == 2
    assert "is a file, and options lie in a folder" in " ".join(capsys.readouterr().err.split())


@pytest.mark.skipif(os.pathsep != ":", reason="a name may not hold it there")
def test_a_folder_of_options_whose_name_cannot_be_listed_is_refused(
    elsewhere: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (elsewhere / "a:b" / "algorithm").mkdir(parents=True)
    assert main(["--config-dir", "a:b", "algorithm=grpo"]) == 2
    assert "a:b' has ':' in its name" in " ".join(capsys.readouterr().err.split())


def test_an_option_with_another_ending_is_told_to_be_renamed(
    elsewhere: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (elsewhere / "a" / "algorithm").mkdir(parents=True)
    (elsewhere / "a" / "algorithm" / "mine.yml").write_text("a: 1")
    assert main(["--config-dir", "a", "algorithm=mine"]) == 2
    err = " ".join(capsys.readouterr().err.split())
    assert "mine.yml is passed over: options end in .yaml. Rename it." in err


def test_a_module_that_something_without_a_name_is_missing_for_is_told_with_its_error(
    elsewhere: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As transformers says that a part of its own does not load."""
    (elsewhere / "lazily.py").write_text("raise ModuleNotFoundError('no such part')")
    assert main(["reward=function", "reward.fn=lazily.score"]) == 2
    err = " ".join(capsys.readouterr().err.split())
    assert "importing lazily failed with ModuleNotFoundError: no such part. Run" in err


# (shell around `zoo …`, exit status, what standard error says)
OUTPUTS = [
    ("zoo --help >/dev/full", 1, "zoo: error standard output cannot be written: [Errno 28]"),
    ("zoo --version >/dev/full", 1, "zoo: error standard output cannot be written: [Errno 28]"),
    ("zoo report --help >/dev/full", 1, "zoo: error standard output cannot be written: [Errno"),
    ("zoo --help >&-", 0, ""),
    ("zoo nonsense 2>&-", 2, ""),
    ("zoo nonsense 2>/dev/full", 2, ""),
    ("export PYTHONIOENCODING=ascii; zoo --help >/dev/null", 0, ""),
    ("zoo --help | (exec <&-; sleep 3); exit ${PIPESTATUS[0]}", 1, ""),
    ("mkdir gone; cd gone; rmdir ../gone; zoo --help", 2, "zoo: error the working directory"),
]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
@pytest.mark.parametrize(("line", "status", "says"), OUTPUTS)
def test_streams_that_take_nothing_end_in_a_word_at_most(line: str, status: int, says: str) -> None:
    zoo = f'zoo() {{ "{sys.executable}" -m zoo "$@"; }}\n'
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(
        ["bash", "-c", zoo + line], capture_output=True, text=True, env=environment
    )
    err = " ".join(done.stderr.split())
    assert done.returncode == status and err.startswith(says) and bool(err) == bool(says), err


def test_an_error_of_zoo_in_a_subcommand_is_a_block_and_any_other_shows_its_traceback(
    monkeypatch: pytest.MonkeyPatch, elsewhere: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = """
        from zoo.rewards.check import RewardError
        def ours(argv): raise RewardError("reward mine gave nan")
        def other(argv): raise KeyError("k")
    """
    (elsewhere / "sub_fails.py").write_text(textwrap.dedent(text))
    monkeypatch.setitem(SUBCOMMANDS, "report", ("sub_fails", "ours", ""))
    assert main(["report"]) == 1
    assert capsys.readouterr().err == "zoo: error\n  reward mine gave nan\n"
    monkeypatch.setitem(SUBCOMMANDS, "report", ("sub_fails", "other", ""))
    with pytest.raises(KeyError):
        main(["report"])


def test_keys_of_a_mapping_that_is_there_to_be_filled_need_no_plus(
    runs: list[RunConfig], elsewhere: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (elsewhere / "a.jsonl").write_text('{"question": "1+1", "gold": "2"}\n' * 2)
    line = "data=jsonl data.path=a.jsonl data.columns.prompt=question data.columns.answer=gold"
    assert main(line.split()) == 0
    assert main(["+data.columns.prompt=question", *line.split()[:2]]) == 0
    assert main(["data.columns={prompt: question}", *line.split()[:2]]) == 0
    assert [dict(config.data.columns) for config in runs] == [
        {"prompt": "question", "answer": "gold"},
        {"prompt": "question"},
        {"prompt": "question"},
    ]
    assert main(["--cfg", "job", "--package", "data", *line.split()]) == 0
    assert "prompt: question" in capsys.readouterr().out


def test_warning_before_a_mistake_is_a_line_without_a_place_in_the_code(tmp_path: Path) -> None:
    rows = [json.dumps({"prompt": f"{i} + 1 =", "answer": str(i + 1)}) for i in range(200)]
    (tmp_path / "q.jsonl").write_text("\n".join([*rows, "{"]))
    line = "model=tiny_random data=jsonl data.path=q.jsonl evaluate.best_metric=heldout/nothing"
    done = subprocess.run(
        [sys.executable, "-m", "zoo", *line.split()],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
        cwd=tmp_path,
    )
    first, _, rest = done.stderr.partition("\n")
    assert first.startswith("warning: q.jsonl: left out 1 of 201 rows (line 201: not JSON")
    assert rest.startswith("zoo: error\n  evaluate.best_metric=heldout/nothing")


@pytest.mark.parametrize("word", ["2026", "1e5", "0x10", "true", "0010"])
@pytest.mark.parametrize("key", ["experiment", "name"])
def test_a_name_that_looks_like_a_number_is_taken_as_written(
    key: str, word: str, runs: list[RunConfig], elsewhere: Path
) -> None:
    assert main([f"{key}={word}"]) == 0
    assert getattr(runs[0], key) == word


def test_tour_is_as_long_as_promised() -> None:
    assert len({line for line, _ in MISTAKES}) == len(MISTAKES) >= 40


def test_mistake_in_a_process_of_its_own_is_the_same_block() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "zoo", "algorithm=grppo"],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
    )
    assert done.returncode == 2
    assert done.stdout == "" and done.stderr.startswith("zoo: error\n  there is no option")
    assert len(done.stderr.splitlines()) <= MAX_ERROR_LINES


def test_other_processes_leave_a_common_mistake_to_the_first_and_tell_their_own(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    waited: list[tuple[float, str]] = []
    # Where the first process fails too, the launcher ends this one while it waits.
    monkeypatch.setattr(
        "zoo.cli.time.sleep", lambda seconds: waited.append((seconds, capsys.readouterr().err))
    )
    assert main(["algorithm=grppo"]) == 2
    assert "algorithm=grppo" in capsys.readouterr().err and waited == []
    monkeypatch.setenv("RANK", "1")
    assert main(["algorithm=grppo"]) == 2
    assert "algorithm=grppo" in capsys.readouterr().err and waited == [(2, "")]


def test_long_message_is_cut_to_the_promised_length(capsys: pytest.CaptureFixture[str]) -> None:
    from zoo.cli import print_error

    print_error("\n".join(f"line {i}" for i in range(50)))
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == MAX_ERROR_LINES and lines[-1].strip() == "…"


def test_broken_yaml_of_a_user_is_named_with_its_line(
    elsewhere: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (elsewhere / "conf" / "algorithm").mkdir(parents=True)
    (elsewhere / "conf" / "algorithm" / "bad.yaml").write_text("a: 1\nb: [1,\nc: }\n")
    assert main(["--config-dir", "conf", "algorithm=bad"]) == 2
    err = capsys.readouterr().err
    assert "bad.yaml, line 3" in " ".join(err.split()) and len(err.splitlines()) <= MAX_ERROR_LINES


# (a file of options, what is in it, what the block must say besides its name)
BAD_FILES = [
    ("algorithm/bad.yaml", "# café\na: 1\n".encode("latin-1"), ["not UTF-8"]),
    ("algorithm/bad.yaml", "a: 1".encode("utf-16"), ["not UTF-8"]),
    ("algorithm/bad.yaml", b"a: \x00", ["not valid yaml"]),
    ("algorithm/bad.yaml", b"3\n", ["holds no settings", "int"]),
    ("algorithm/bad.yaml", b"defaults: grpo\n", ["defaults must be a list", "- NAME"]),
    ("algorithm/bad.yaml", b"defaults: [bad]\na: 1\n", ["goes round in circles"]),
    ("algorithm/bad.yaml", b"defaults: [grpoo]\n", ["Did you mean algorithm=grpo?", "cdpo"]),
    ("algorithm/bad.yaml", b"x: &a [*a]\n", ["goes round in circles"]),
    ("experiment/bad.yaml", b"train:\n  steps: 1\n", ["`# @package _global_`"]),
]


@pytest.mark.parametrize(("name", "content", "words"), BAD_FILES)
def test_bad_file_of_a_user_is_named_and_hides_no_other(
    name: str,
    content: bytes,
    words: list[str],
    elsewhere: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    file = elsewhere / "conf" / name
    file.parent.mkdir(parents=True)
    file.write_bytes(content)
    group = file.parent.name
    for flags in ([], ["--cfg", "job"], ["-m"]):
        assert main([*flags, "--config-dir", "conf", f"{group}=bad", "seed=1"]) == 2
        err = " ".join(capsys.readouterr().err.split())
        assert f"{group}/bad" in err and all(word in err for word in words), err
        assert len(err) < 1000 and "train.lr" not in err
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["--config-dir", "conf", "--help"]) == 0
    assert main(["algorithms", "--config-dir", "conf"]) == int(group == "algorithm")
    assert capsys.readouterr().out.count("gae_lambda") >= 1


# ------------------------------------------------------------------------ help and display


@pytest.mark.parametrize("arguments", [[], ["--help"], ["-h"], ["--help", "report"]])
def test_help_shows_groups_options_subcommands_and_examples(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 0
    out, err = capsys.readouterr()
    assert err == ""
    for word in (*GROUPS, "grpo*", "tiny*", "zoo -m", "outputs/", "summary.json"):
        assert word in out
    for word, (module, _, what) in SUBCOMMANDS.items():
        assert (what in " ".join(out.split())) == (find_spec(module) is not None), word
    for algorithm in ("ppo", "dpo", "grpo", "sft"):
        assert f"zoo algorithm={algorithm}" in out
    assert max(map(len, out.splitlines())) <= 100


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    import zoo

    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"zoo {zoo.__version__}\n"


def test_cfg_job_prints_the_configuration_as_yaml(capsys: pytest.CaptureFixture[str]) -> None:
    from omegaconf import OmegaConf

    arguments = ["algorithm=ppo", "seed=3"]
    assert main(["--cfg", "job", *arguments]) == 0
    printed = yaml.safe_load(capsys.readouterr().out)
    assert printed["seed"] == 3 and printed["algorithm"]["_target_"].endswith(".PPO")
    assert printed == yaml.safe_load(OmegaConf.to_yaml(compose(arguments)))


def test_cfg_package_prints_a_part(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--cfg", "job", "--package", "train", "train.steps=7"]) == 0
    assert yaml.safe_load(capsys.readouterr().out)["steps"] == 7


def test_shell_completion_completes_options_and_settings(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COMP_LINE", "zoo algorithm=")
    assert main(["--shell-completion", "query=bash"]) == 0
    assert "algorithm=grpo" in capsys.readouterr().out.split()
    monkeypatch.setenv("COMP_LINE", "zoo algorithm=ppo algorithm.gae")
    assert main(["-sc", "query=bash"]) == 0
    assert capsys.readouterr().out.split() == ["algorithm.gae_lambda="]
    assert main(["--shell-completion", "install=bash"]) == 0
    assert "complete -o nospace" in capsys.readouterr().out


# what is typed so far → what follows, of which some lines have nothing to offer
COMPLETIONS = [
    ("zoo train.steps=1 -m train.max_b", "train.max_bad_updates="),
    ("zoo -m --jobs 2 algorithm=ppo_", "algorithm=ppo_shared"),
    ("zoo seed=0,1 algorithm=ppo algorithm.gae", "algorithm.gae_lambda="),
    ("zoo output='a b' experiment=my_study reward=null algorithm=ppo_", "algorithm=ppo_shared"),
    ("zoo --config-dir options algorithm=min", "algorithm=mine"),
    ("zoo -cd=options algorithm=min", "algorithm=mine"),
    ("zoo hydra.searchpath=[options] algorithm=mine algorithm.cou", "algorithm.courage="),
    *((line, "") for line in ("zoo runs ", "zoo report ", "zoo fetch ", "zoo evaluate model=")),
    ("zoo --vers", ""),
    ("zoo -m --jobs ", ""),
    ("zoo --config-dir nowhere algorithm=ppo_", ""),
    ("zoo output='a b", ""),
    ("zoo train.stepz=1 train.max_b", ""),
]


@pytest.mark.parametrize(("line", "words"), COMPLETIONS)
def test_shell_completion_knows_zoo_s_flags_and_keeps_silent_about_mistakes(
    line: str,
    words: str,
    stranger: str,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("COMP_LINE", line)
    assert main(["-sc", "query=bash"]) == 0
    out, err = capfd.readouterr()
    assert (out.strip(), err) == (words, "") and os.environ["COMP_LINE"] == line


def test_algorithms_lists_every_option_with_its_settings(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["algorithms"]) == 0
    out = capsys.readouterr().out
    for name in ("sft", "ppo", "dpo", "grpo", "gae_lambda", "label_smoothing"):
        assert name in out


def test_subcommand_gets_the_rest_of_the_line_and_gives_the_exit_status(
    monkeypatch: pytest.MonkeyPatch, elsewhere: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (elsewhere / "sub_mine.py").write_text("def main(argv):\n    print(argv)\n    return 5\n")
    monkeypatch.setitem(SUBCOMMANDS, "report", ("sub_mine", "main", ""))
    assert main(["report", "a=1", "--flag"]) == 5
    assert capsys.readouterr().out == "['a=1', '--flag']\n"
    monkeypatch.setitem(SUBCOMMANDS, "report", ("sub_mine", "absent", ""))
    assert main(["report"]) == 2
    assert "not part of this version" in capsys.readouterr().err


# ------------------------------------------------------------------------ runs


def test_run_gets_the_checked_configuration(runs: list[RunConfig]) -> None:
    assert main(["algorithm=dpo", "algorithm.beta=1", "seed=2", "reward=null"]) == 0
    (config,) = runs
    assert type(config.algorithm).__name__ == "DPO" and config.algorithm.beta == 1.0
    assert config.seed == 2 and config.reward is None


def test_flags_may_stand_between_overrides(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import zoo.launch

    seen: list[Any] = []

    def sweep(arguments: list[str], check: Callable[[list[str]], None], **_: object) -> int:
        seen.extend(arguments)
        check(["algorithm=ppo", "seed=0"])
        with pytest.raises(ConfigError, match=r"In the job: train\.steps=-1"):
            check(["train.steps=-1"])
        return 1

    monkeypatch.setattr(zoo.launch, "sweep", sweep)
    assert main(["algorithm=ppo,dpo", "-m", "seed=0,1", "--jobs", "2"]) == 1
    assert seen == ["--jobs=2", "algorithm=ppo,dpo", "seed=0,1"]


# what a recipe asks of hydra, what the block must say
OF_HYDRA = [
    ("hydra: {sweeper: {params: {seed: '0,1'}}}", ["hydra.sweeper.params", "zoo -m seed=0,1"]),
    ("defaults: [override /hydra/launcher: joblib]", ["zoo -m hydra/launcher=joblib"]),
    ("hydra: {mode: MULTIRUN}", ["hydra.mode is MULTIRUN", "write zoo -m"]),
]


@pytest.mark.parametrize(("text", "words"), OF_HYDRA)
def test_sweep_that_a_recipe_describes_is_refused_and_not_passed_over(
    text: str, words: list[str], elsewhere: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if "joblib" in text:
        pytest.importorskip("hydra_plugins.hydra_joblib_launcher", reason="needs the extra `sweep`")
    (elsewhere / "conf" / "experiment").mkdir(parents=True)
    recipe = elsewhere / "conf" / "experiment" / "mine.yaml"
    recipe.write_text(f"# @package _global_\n{text}\n")
    assert main(["-m", "--config-dir", "conf", "experiment=mine"]) == 2
    err = " ".join(capsys.readouterr().err.split())
    assert all(word in err for word in words) and "In the job: experiment=mine" in err, err


@pytest.mark.parametrize("launcher", [[], ["hydra/launcher=joblib"]])
def test_sweep_under_torchrun_is_refused(
    launcher: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["-m", *launcher, "--jobs", "2", "seed=0,1"]) == 2
    err = " ".join(capsys.readouterr().err.split())
    assert "2 processes are here already" in err and "torchrun --nproc_per_node 2 -m zoo" in err


def test_experiment_that_is_no_recipe_names_the_folder(runs: list[RunConfig]) -> None:
    assert main(["experiment=my_study", "algorithm=ppo"]) == 0
    assert main(["experiment=tiny_sft"]) == 0
    assert main(["experiment=[tiny_sft,my_study]"]) == 0
    assert [config.experiment for config in runs] == ["my_study", "tiny_sft", "my_study"]
    assert config_hash(runs[1]) == config_hash(runs[2]) != config_hash(runs[0])


@pytest.mark.parametrize(
    ("command", "told"),
    [
        ("experiment=labexp", True),
        ("experiment=labexp train.lr=1e-4", True),
        ("--cfg job experiment=labexp", True),
        ("-m experiment=labexp seed=0,1", True),
        ("RANK=1 experiment=labexp", False),
        ("ZOO_RUN_DIR_FILE=f experiment=labexp", False),  # a job of a sweep
        ("experiment=labexp algorithm=ppo", False),
        ("experiment=labexp data.n_problems=50", False),  # chosen in part
        ("experiment=labexp reward=null", False),
        ("-m experiment=labexp data=digits,arithmetic", False),
        ("experiment=[tiny_sft,labexp]", False),
        ("--help experiment=labexp", False),
    ],
)
def test_a_word_that_starts_the_default_job_is_told_once(
    command: str,
    told: bool,
    runs: list[RunConfig],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def sweep(overrides: list[str], check: Callable[[list[str]], object], **_: object) -> int:
        return sum(check(job) is not None for job in expand(overrides))

    monkeypatch.setattr("zoo.launch.sweep", sweep)
    store = ConfigStore.instance()
    monkeypatch.setattr(store, "repo", deepcopy(store.repo))
    store.repo.get("experiment", {}).pop("labexp.yaml", None)
    words = command.split()
    if words[0].partition("=")[0].isupper():
        monkeypatch.setenv(*words.pop(0).split("="))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert main(words) == 0
    line = "experiment=labexp is no recipe: it only names the folder; algorithm, data, model and "
    assert sum(line in str(one.message) for one in caught) == told
    assert "is no recipe" not in capsys.readouterr().out


@pytest.mark.parametrize("way", ["flag", "variable", "python"])
def test_recipe_of_a_stranger_is_a_start(
    way: str, runs: list[RunConfig], elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = elsewhere / "options" / "experiment" / "mine.yaml"
    file.parent.mkdir(parents=True)
    file.write_bytes((REPOSITORY / "conf" / "experiment" / "tiny_sft.yaml").read_bytes())
    if way != "flag":
        monkeypatch.setenv(FOLDERS, "options")
    if way == "python":
        known = structured(compose([]))
        runs.append(complete(replace(known, model=replace(known.model, recipe="mine"))))
        with pytest.raises(ConfigError, match=r"recipe=yours: there is no such .* mine, smollm2"):
            complete(replace(known, model=replace(known.model, recipe="yours")))
    else:
        flags = ["--config-dir", "options"] if way == "flag" else []
        assert main([*flags, "model.recipe=mine"]) == 0
    assert [config.model.recipe for config in runs] == ["mine"]


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ("evaluate", "begins anew"),
        ("audit", "begins anew"),
        ("report", "begins anew"),
        ("seed=0", "goes on where this one ended"),
        ("-m seed=0,1", "goes on where this one ended"),
    ],
)
def test_ctrl_c_promises_to_go_on_only_where_something_is_kept(
    command: str, says: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    for module in ("zoo.evaluate.cli", "zoo.rewards.audit", "zoo.report"):
        monkeypatch.setattr(f"{module}.main", interrupted)
    monkeypatch.setattr("zoo.train.run.run", interrupted)
    monkeypatch.setattr("zoo.launch.sweep", interrupted)
    assert main(command.split()) == 130
    assert capsys.readouterr().err == f"\nInterrupted. The same command {says}.\n"


def test_unexpected_error_leaves_its_traceback_in_the_folder_of_the_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import zoo.train.run

    folders = []

    def fail(config: RunConfig) -> None:
        folders.append(run_dir(config))
        raise RuntimeError("the sky fell\nand more")

    monkeypatch.setattr(zoo.train.run, "run", fail)
    assert main(["seed=4"]) == 1
    err = capsys.readouterr().err
    (folder,) = folders
    assert "RuntimeError: the sky fell" in err and "Traceback" not in err
    assert len(err.splitlines()) <= MAX_ERROR_LINES
    assert str(folder / "error.txt") in " ".join(err.split())
    text = (folder / "error.txt").read_text()
    assert text.startswith("Traceback") and 'raise RuntimeError("the sky fell' in text
    assert claimed(folder)  # so that a sweep reads it there


@pytest.mark.parametrize("rank", ["0", "1"])
def test_an_error_before_a_run_begins_is_not_written_into_the_folder_of_one_that_runs(
    rank: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import zoo.train.run

    folder = tmp_path / "default" / "mine" / "seed_0"
    folder.mkdir(parents=True)

    def fail(config: RunConfig) -> None:
        announce(folder)
        if began:
            claim(folder)
        raise RuntimeError("the sky fell")

    monkeypatch.setattr(zoo.train.run, "run", fail)
    monkeypatch.setenv("RANK", rank)
    began, lock = False, FolderLock(folder)
    lock.acquire()  # of another run
    assert main([f"output={tmp_path}", "name=mine"]) == 1
    err = capsys.readouterr().err
    assert err.startswith("Traceback") and "The traceback is above" in err
    assert not list(folder.glob("error*"))
    lock.release()
    (folder / "meta.json").write_text("{}")  # of another run, which has ended
    assert main([f"output={tmp_path}", "name=mine"]) == 1
    err = capsys.readouterr().err
    assert "The traceback is above" in err and "same command" not in err
    assert not list(folder.glob("error*"))
    began = True
    assert main([f"output={tmp_path}", "name=mine"]) == 1
    assert "Traceback" not in capsys.readouterr().err
    (error,) = folder.glob("error*")
    assert error.name == ("error.txt" if rank == "0" else "error.rank1.txt")


@pytest.mark.parametrize(
    ("how", "says", "flags"),
    [
        ("on import", "importing leaves failed with SystemExit: 0. Put the call that ends", []),
        ("on import", "importing leaves failed with SystemExit: 0.", ["-m", "seed=0,1"]),
        ("when built", "SystemExit", []),
        ("when built", "SystemExit", ["-m", "seed=0,1"]),
        ("when checked", "ended the program with exit(0)", ["-m", "seed=0,1"]),
    ],
)
def test_code_that_exits_before_a_run_begins_is_a_mistake_and_never_success(
    how: str,
    says: str,
    flags: list[str],
    runs: list[RunConfig],
    elsewhere: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    last = "sys.exit(0)" if how == "on import" else ""
    text = f"""
        import sys
        def score(prompts, completions): return [1.0] * len(prompts)
        class Leaves:
            def __init__(self, a: "sys.exit(0)" = 0): sys.exit(a)
            def __call__(self, prompts, completions): ...
        {last}
    """
    (elsewhere / "leaves.py").write_text(textwrap.dedent(text))
    if how == "when checked":
        module = importlib.import_module("zoo.build")  # zoo.build is the function as well
        monkeypatch.setattr(module, "check", lambda config: sys.exit(0))
    reward = ["reward=function", "reward.fn=leaves.score"]
    if how == "when built":
        reward = ["reward=random", "reward._target_=leaves.Leaves", "~reward.seed", "~reward.p"]
    assert main([*flags, *reward]) == 2
    assert says in " ".join(capsys.readouterr().err.split())
    assert runs == []


def test_run_that_ends_by_exit_has_failed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("zoo.train.run.run", lambda config: sys.exit(0))
    assert main(["seed=4"]) == 1
    assert "the run stopped: SystemExit: 0" in " ".join(capsys.readouterr().err.split())


def test_traceback_is_printed_where_it_cannot_be_written(
    monkeypatch: pytest.MonkeyPatch, elsewhere: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import zoo.train.run

    def fail(config: RunConfig) -> None:
        raise RuntimeError("the sky fell")

    (elsewhere / "file").write_text("")
    monkeypatch.setattr(zoo.train.run, "run", fail)
    assert main(["output=file"]) == 1
    err = capsys.readouterr().err
    assert "Traceback (most recent call last)" in err and "cannot be written" in err


@pytest.mark.parametrize("rank", ["0", "1"])
def test_a_folder_that_was_moved_away_is_not_made_anew_for_a_traceback(
    rank: str,
    monkeypatch: pytest.MonkeyPatch,
    elsewhere: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def lose(config: RunConfig) -> None:
        raise RecordError("metrics.jsonl was moved")

    monkeypatch.setattr("zoo.train.run.run", lose)
    monkeypatch.setenv("RANK", rank)
    assert main(["name=gone"]) == 1
    err = " ".join(capsys.readouterr().err.split())
    assert "metrics.jsonl was moved" in err and "The traceback is above" in err
    assert not (elsewhere / "outputs").exists()


@pytest.mark.parametrize("how", ["Ctrl-C", "SIGTERM"])
def test_interruption_ends_with_130_and_a_word(
    how: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import zoo.train.run

    before = signal.getsignal(signal.SIGTERM)

    def interrupt(config: RunConfig) -> None:
        if how == "Ctrl-C":
            raise KeyboardInterrupt
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(zoo.train.run, "run", interrupt)
    assert main(["seed=0"]) == 130
    assert "Interrupted." in capsys.readouterr().err
    assert signal.getsignal(signal.SIGTERM) is before


def test_hydra_writes_nothing_of_its_own(runs: list[RunConfig], elsewhere: Path) -> None:
    assert main(["seed=1"]) == 0
    assert main(["--cfg", "job"]) == 0
    assert list(elsewhere.iterdir()) == []


def test_hydra_launcher_runs_every_job_in_zoo_s_way(runs: list[RunConfig], elsewhere: Path) -> None:
    pytest.importorskip("hydra_plugins.hydra_joblib_launcher", reason="needs the extra `sweep`")
    # joblib's sequential backend keeps the jobs in this process, where they can be recorded.
    line = "-m hydra/launcher=joblib hydra.launcher.n_jobs=1 algorithm=ppo,dpo seed=0,1"
    assert main(line.split()) == 0
    labels = [(type(config.algorithm).__name__, config.seed) for config in runs]
    assert labels == [("PPO", 0), ("PPO", 1), ("DPO", 0), ("DPO", 1)]
    assert {path.name for path in elsewhere.iterdir()} == {"outputs"}
    assert [path.name for path in (elsewhere / "outputs").iterdir()] == [".hydra"]


def test_hydra_launcher_whose_jobs_fail_lists_them_all(
    elsewhere: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("hydra_plugins.hydra_joblib_launcher", reason="needs the extra `sweep`")
    import zoo.train.run

    def fails_unless_first(config: RunConfig) -> dict[str, Any]:
        if config.seed == 0:
            return {}
        raise ArithmeticError(f"of seed {config.seed}")

    def finished(folder: Path, *_: Any) -> dict[str, Any] | None:
        return (
            {} if (elsewhere / "outputs" / ".hydra").exists() and "seed_0" in str(folder) else None
        )

    monkeypatch.setattr(zoo.train.run, "run", fails_unless_first)
    monkeypatch.setattr(zoo.train.run, "finished", finished)
    line = "-m hydra/launcher=joblib hydra.launcher.n_jobs=1 algorithm=ppo seed=0,1,2"
    assert main(line.split()) == 1
    err = " ".join(capsys.readouterr().err.split())
    assert "Without a summary: 2 of 3 jobs (seed=1; seed=2). The first one: the run stopped" in err
    assert "ArithmeticError: of seed 1" in err


def lose_a_process(
    monkeypatch: pytest.MonkeyPatch, launcher: str, failed: Path | None = None
) -> None:
    """hydra ends as where a launcher's worker died, and a job fails before that."""
    lost = type("LostError", (Exception,), {"__module__": f"{launcher}.executor"})

    def dies(_: list[str]) -> int:
        if failed is not None:
            (failed / "error.txt").write_text("KeyError: 'no such column'")
        raise lost("a worker died")

    monkeypatch.setattr("zoo.cli._through_hydra", dies)


@pytest.mark.parametrize("launcher", ["joblib", "submitit_local"])
def test_where_a_launcher_lost_a_process_the_errors_of_other_jobs_are_named(
    launcher: str,
    elsewhere: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    lose_a_process(monkeypatch, launcher.partition("_")[0])
    line = f"-m hydra/launcher={launcher} algorithm=ppo output=out seed=0,1,2".split()
    assert main(line) == 1
    err = " ".join(capsys.readouterr().err.split())
    assert "3 of 3 jobs (seed=0; seed=1; seed=2)" in err and "error.txt" not in err
    assert ("timeout_min" in err) == (launcher == "submitit_local")
    folder = run_dir(structured(compose(["algorithm=ppo", "output=out", "seed=1"])))
    folder.mkdir(parents=True)
    (folder / "error.txt").write_text("of another sweep")
    os.utime(folder / "error.txt", (1e9, 1e9))
    assert main(line) == 1
    assert "error.txt" not in capsys.readouterr().err
    lose_a_process(monkeypatch, launcher.partition("_")[0], folder)
    assert main(line) == 1
    err = capsys.readouterr().err
    assert len(err.splitlines()) <= MAX_ERROR_LINES
    said = f"Jobs that failed by themselves: {folder.resolve() / 'error.txt'} "
    assert said in " ".join(err.split())


def test_of_a_sweeper_that_chooses_as_it_goes_no_jobs_are_counted(
    elsewhere: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lose_a_process(monkeypatch, "joblib")
    assert main(["-m", "hydra/launcher=joblib", "hydra/sweeper=optuna", "seed=range(0,3)"]) == 1
    err = " ".join(capsys.readouterr().err.split())
    assert "lost a process" in err and "0 of 0" not in err and "()" not in err


def test_a_job_that_submitit_ended_is_told_of_its_time(tmp_path: Path) -> None:
    config = structured(compose([f"output={tmp_path}"]))
    for module, said in (("submitit.local.local", "timeout_min"), ("mine", "SystemExit: 144")):
        with pytest.raises(SystemExit) as ended:  # as a handler of signals does in a job's midst
            exec("import sys; sys.exit(144)", {"__name__": module})
        told = _record_failure(ended.value, config, tmp_path / module)
        assert said in told


def test_hydra_launcher_that_can_start_no_job_is_told(
    elsewhere: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher", reason="needs the extra `sweep`")
    monkeypatch.setenv("PATH", str(elsewhere))  # without slurm's programs
    assert main(["-m", "hydra/launcher=submitit_slurm", "algorithm=ppo", "seed=0,1"]) == 2
    err = " ".join(capsys.readouterr().err.split())
    assert 'submitit_slurm started no job: RuntimeError: Could not detect "srun"' in err
    assert "hydra/launcher=submitit_local" in err and "Traceback" not in err


# ------------------------------------------------------------------------ a stranger's code

STRANGER = """
    from dataclasses import dataclass
    from typing import ClassVar

    from zoo.algorithms.grpo import GRPO


    @dataclass(frozen=True)
    class Mine(GRPO):
        courage: float = 1.0
        name: ClassVar[str] = "mine"

        def __post_init__(self):
            super().__post_init__()
            if self.courage < 0:
                raise ValueError(f"courage must be at least 0, got {self.courage}. Try 1.")
"""


@pytest.fixture
def stranger(elsewhere: Path) -> str:
    """A module and an option of somebody else in the working directory; the module's name."""
    module = f"stranger_{elsewhere.name}"  # a name of its own: modules stay imported
    (elsewhere / f"{module}.py").write_text(textwrap.dedent(STRANGER))
    folder = elsewhere / "options" / "algorithm"
    folder.mkdir(parents=True)
    text = f"# An algorithm of a stranger.\n_target_: {module}.Mine\ncourage: 2\n"
    (folder / "mine.yaml").write_text(text)
    return module


@pytest.mark.parametrize("way", ["--config-dir options", "hydra.searchpath=[options]", "variable"])
def test_stranger_s_algorithm_is_found(
    way: str,
    stranger: str,
    runs: list[RunConfig],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if way == "variable":
        monkeypatch.setenv(FOLDERS, "options")
    before = os.environ.get(FOLDERS)
    arguments = [] if way == "variable" else way.split()
    assert main([*arguments, "algorithm=mine", "algorithm.courage=3"]) == 0
    (config,) = runs
    assert type(config.algorithm).__module__ == stranger
    assert config.algorithm.courage == 3.0
    assert run_dir(config).parts[2].startswith("mine-")
    assert main([*arguments, "--help"]) == 0
    assert "kto, mine, online_dpo" in " ".join(capsys.readouterr().out.split())
    assert os.environ.get(FOLDERS) == before
    # Mistakes in a stranger's settings are told as in our own.
    assert main([*arguments, "algorithm=mine", "algorithm.courage=-1"]) == 2
    assert "algorithm: courage must be at least 0, got -1.0. Try 1." in capsys.readouterr().err
    assert main([*arguments, "algorithm=mine", "algorithm.corage=1"]) == 2
    assert "Did you mean algorithm.courage=1?" in " ".join(capsys.readouterr().err.split())


def test_target_in_the_working_directory_needs_no_option(
    stranger: str, runs: list[RunConfig]
) -> None:
    line = f"algorithm._target_={stranger}.Mine +algorithm.courage=5"
    assert main(line.split()) == 0
    assert runs[0].algorithm.courage == 5.0


def test_config_dir_reaches_the_processes_that_a_run_starts(
    stranger: str, monkeypatch: pytest.MonkeyPatch, elsewhere: Path
) -> None:
    import zoo.launch

    def sweep(arguments: list[str], check: Callable[[list[str]], None], **_: object) -> int:
        assert os.environ[FOLDERS] == str(elsewhere / "options")
        check(["algorithm=mine"])
        return 0

    monkeypatch.setattr(zoo.launch, "sweep", sweep)
    assert main(["-m", "--config-dir", "options", "algorithm=mine,grpo"]) == 0


@pytest.mark.parametrize("error", ["KeyError('a')", "RuntimeError('b')", "SystemExit(0)"])
def test_class_that_cannot_be_built_is_named_with_its_line(
    error: str, elsewhere: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    module = f"raises_{elsewhere.name}"
    text = f"class Mine:\n    def __init__(self):\n        raise {error}\n"
    text += "    def __call__(self, prompts, completions): ...\n"
    (elsewhere / f"{module}.py").write_text(text)
    line = f"reward=random reward._target_={module}.Mine ~reward.seed ~reward.p"
    assert main(line.split()) == 2
    err = " ".join(capsys.readouterr().err.split())
    assert f"{module}.Mine" in err and error.split("(")[0] in err
    assert f"{module}.py, line 3" in err


@pytest.mark.parametrize("name", ["../../esc", "a/b", "..", 3])
def test_name_of_a_class_stays_inside_the_output(
    name: object,
    stranger: str,
    runs: list[RunConfig],
    elsewhere: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = elsewhere / f"{stranger}.py"
    file.write_text(file.read_text().replace('ClassVar[str] = "mine"', f"ClassVar = {name!r}"))
    assert main(["--config-dir", "options", "algorithm=mine"]) == 2
    assert f"one plain word, got {name!r}" in " ".join(capsys.readouterr().err.split())
    assert main(["--config-dir", "options", "algorithm=mine", "name=good"]) == 0
    assert run_dir(runs[0]) == Path("outputs/default/good/seed_0")


def test_installed_package_adds_its_options(
    elsewhere: Path,
    stranger: str,
    runs: list[RunConfig],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    site = elsewhere / "site"
    package = site / f"package_{stranger}"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (elsewhere / "options").rename(package / "conf")
    info = site / f"package_{stranger}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package.name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[zoo.conf]\nmine = {package.name}:conf\n")
    monkeypatch.syspath_prepend(str(site))
    assert main(["algorithm=mine"]) == 0
    assert runs[0].algorithm.courage == 2.0
    (info / "entry_points.txt").write_text(f"[zoo.conf]\nmine = {package.name}:absent\n")
    assert main(["algorithm=mine"]) == 2
    assert "'mine'" in capsys.readouterr().err


def test_package_that_raises_breaks_only_what_needs_it(
    elsewhere: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from zoo import doctor

    (elsewhere / "pk" / "sub" / "conf").mkdir(parents=True)
    (elsewhere / "pk" / "__init__.py").write_text("raise RuntimeError('no luck')\n")
    info = elsewhere / "pk-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: pk\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[zoo.conf]\nlucky = pk.sub:conf\n")
    monkeypatch.syspath_prepend(str(elsewhere))
    assert main(["--help"]) == 0
    assert main(["--cfg", "job"]) == 0
    assert capsys.readouterr().err == ""
    assert main(["algorithm=theirs"]) == 2
    err = " ".join(capsys.readouterr().err.split())
    assert "'lucky'" in err and "RuntimeError: no luck" in err and "pk.sub:conf" in err
    with pytest.warns(UserWarning, match="experiment=theirs only names the output.*'lucky'"):
        assert main(["--cfg", "job", "experiment=theirs"]) == 0
    (found,) = doctor._packages()
    assert found.mark is doctor.Mark.bad and "'lucky'" in found.detail


@pytest.mark.parametrize("flags", [[], ["--cfg", "job"], ["-m"]])
def test_option_of_a_name_that_is_taken_is_refused_where_it_is_chosen(
    flags: list[str],
    stranger: str,
    runs: list[RunConfig],
    elsewhere: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = elsewhere / "options" / "algorithm"
    (folder / "mine.yaml").rename(folder / "grpo.yaml")
    assert main([*flags, "--config-dir", "options", "algorithm=grpo", "seed=0"]) == 2
    err = " ".join(capsys.readouterr().err.split())
    for file in (REPOSITORY / "conf" / "algorithm" / "grpo.yaml", folder / "grpo.yaml"):
        assert str(file) in err
    assert runs == []
    # One that is not chosen, or says the same, is in nobody's way.
    assert main(["--config-dir", "options", "algorithm=dpo"]) == 0
    (folder / "grpo.yaml").write_bytes((REPOSITORY / "conf/algorithm/grpo.yaml").read_bytes())
    assert main(["--config-dir", "options", "algorithm=grpo"]) == 0
    assert [type(config.algorithm).__name__ for config in runs] == ["DPO", "GRPO"]


def test_session_of_a_host_program_is_left_as_it_was(tmp_path: Path) -> None:
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir

    (tmp_path / "host.yaml").write_text("a: 1\n")
    with initialize_config_dir(str(tmp_path), version_base="1.3"):
        assert compose(["seed=9"]).seed == 9
        assert hydra_compose("host").a == 1
