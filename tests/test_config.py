"""Options and dataclasses agree; values are converted, refused and hashed as documented."""

import dataclasses
import enum
import functools
import importlib
import json
import os
import pkgutil
import subprocess
import sys
import textwrap
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import pytest
import yaml
from omegaconf import OmegaConf

import zoo
from zoo.algorithms.dpo import DPO
from zoo.algorithms.grpo import GRPO
from zoo.compose import GROUPS, compose, config_dir
from zoo.config import (
    ConfigError,
    EvaluateConfig,
    MeasureConfig,
    ModelConfig,
    Resume,
    RunConfig,
    Schedule,
    TrainConfig,
    Wandb,
)
from zoo.data.arithmetic import Arithmetic
from zoo.data.mixture import Until, interleave
from zoo.data.tokenize import Truncation, truncate_row
from zoo.functional import Average
from zoo.instantiate import (
    CLASS_GROUPS,
    _hints,  # pyright: ignore[reportPrivateUsage]
    build,
    complete,
    config_hash,
    convert,
    locate,
    resolved,
    run_dir,
    run_name,
    structured,
)
from zoo.rewards.shaping import Rule, keeps_format
from zoo.rollout.torch_engine import TorchEngine

CONF = config_dir()
CLASS_OPTIONS = [
    (group, path.stem) for group in CLASS_GROUPS for path in sorted(CONF.glob(f"{group}/*.yaml"))
]
EXPERIMENTS = sorted(path.stem for path in CONF.glob("experiment/*.yaml"))
MODELS = sorted(path.stem for path in CONF.glob("model/*.yaml"))

# An option that is a setting of a class under a name of its own says here what it sets.
VARIANTS = {
    ("reward", "gsm8k_shaped"): {"components"},
    ("reward", "verifier_overlong"): {"components"},
    ("algorithm", "dr_grpo"): {"scale_by_std", "average"},
    ("algorithm", "reinforce_pp_baseline"): {"group_baseline"},
    ("algorithm", "cdpo"): {"label_smoothing"},
    ("data", "mixture"): {"parts"},
}
# What an option leaves to the user: choosing the option alone is refused.
OPEN = {
    ("data", "hub"): {"name": "owner/set"},
    ("data", "jsonl"): {"path": "rows.jsonl"},
    ("reward", "function"): {"fn": "builtins.len"},
    ("reward", "learned"): {"path": "."},
}


@functools.cache
def default_hash() -> str:
    return config_hash(structured(compose([])))


def read(group: str, name: str) -> dict[str, Any]:
    return yaml.safe_load((CONF / group / f"{name}.yaml").read_text(encoding="utf-8"))


# ------------------------------------------------------------------------ options on disk


@pytest.mark.parametrize(("group", "name"), CLASS_OPTIONS)
def test_option_lists_every_field_with_the_default_of_its_class(group: str, name: str) -> None:
    values = OmegaConf.to_container(OmegaConf.load(CONF / group / f"{name}.yaml"))
    assert isinstance(values, dict)
    kind = locate(values.pop("_target_"))
    fields = {item.name: item for item in dataclasses.fields(kind) if item.init}
    assert list(map(str, sorted(values))) == sorted(fields)
    for key, value in values.items():
        item = fields[str(key)]
        if item.default is dataclasses.MISSING and item.default_factory is dataclasses.MISSING:
            continue
        if str(key) in VARIANTS.get((group, name), ()):
            continue
        default = item.default
        if item.default_factory is not dataclasses.MISSING:
            default = item.default_factory()
        if isinstance(default, enum.Enum):
            default = default.name
        if isinstance(default, tuple):
            default = list(default)
        assert value == default, f"{group}/{name}.yaml: {key}"


@pytest.mark.parametrize(("group", "name"), CLASS_OPTIONS)
def test_option_builds_an_instance_of_its_groups_package(group: str, name: str) -> None:
    node = read(group, name) | OPEN.get((group, name), {})
    package = {"algorithm": "algorithms", "reward": "rewards"}.get(group, group)
    assert node["_target_"].startswith(f"zoo.{package}.")
    try:
        instance = build(node, group)
    except ConfigError as error:
        # An option that names a file which is not here is refused for exactly that.
        assert any(str(value) in str(error) for value in OPEN[group, name].values())
    else:
        assert type(instance) is locate(node["_target_"])


@pytest.mark.parametrize(
    ("group", "kind"),
    [("train", TrainConfig), ("evaluate", EvaluateConfig), ("measure", MeasureConfig)],
)
def test_values_on_disk_are_the_defaults_of_the_dataclass(group: str, kind: Any) -> None:
    values = OmegaConf.to_container(OmegaConf.load(CONF / group / "default.yaml"))
    expected = json.loads(json.dumps(dataclasses.asdict(kind())))  # enums as their names
    assert values == expected


def test_top_level_values_on_disk_are_the_defaults_of_the_dataclass() -> None:
    values = read("", "config")
    del values["defaults"], values["hydra"]
    simple = {f.name for f in dataclasses.fields(RunConfig)} - set(GROUPS) | {"experiment"}
    assert values == {name: getattr(RunConfig(), name) for name in simple}


@pytest.mark.parametrize("name", MODELS)
def test_model_option_lists_every_field_and_recommends_learning_rates(name: str) -> None:
    values = OmegaConf.to_container(OmegaConf.load(CONF / "model" / f"{name}.yaml"))
    assert isinstance(values, dict) and set(values) == {"model", "train"}
    assert sorted(values["model"]) == sorted(f.name for f in dataclasses.fields(ModelConfig))
    assert sorted(values["train"]) == ["critic_lr", "lr"]
    chosen = [f"model={name}"] + (["model.path=some/model"] if name == "hub" else [])
    config = structured(compose(chosen))
    assert config.train.lr == values["train"]["lr"]
    unset = {k for k, v in values["model"].items() if v is None}
    assert unset == {k for k in values["model"] if getattr(config.model, k) is None}


def test_every_option_begins_with_a_line_that_describes_it() -> None:
    for path in sorted(CONF.glob("*/*.yaml")):
        lines = path.read_text(encoding="utf-8").splitlines()
        first = next(line for line in lines if not line.startswith("# @package"))
        assert first.startswith("# ") and len(first) > 20, path


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_experiment_is_a_run_in_a_folder_of_its_name(name: str) -> None:
    config = structured(compose([f"experiment={name}"]))
    assert config.experiment == name
    assert run_dir(config).parts[:2] == ("outputs", name)


def test_experiment_overrides_the_model_and_the_command_line_overrides_both() -> None:
    # tiny_random recommends 2e-3 with its own schedule untouched; the experiment sets constant.
    config = structured(compose(["experiment=tiny_sft", "train.groups=3"]))
    assert config.train.schedule is Schedule.constant and config.train.groups == 3
    assert config.model.tokenizer == "arithmetic"
    assert structured(compose(["experiment=tiny_sft", "algorithm=dpo"])).algorithm == DPO()


# ------------------------------------------------------------------------ structured, resolved


def test_defaults_composed_equal_the_defaults_made_in_python() -> None:

    by_hand = RunConfig(
        algorithm=GRPO(),
        data=Arithmetic(),
        reward=None,
        rollout=TorchEngine(),
        model=ModelConfig(recipe="tiny_sft"),
        train=TrainConfig(critic_lr=5e-4),  # what model=tiny recommends
    )
    composed = structured(compose([]))
    assert composed == by_hand
    assert config_hash(composed) == config_hash(by_hand)


@pytest.mark.parametrize("overrides", [[], ["algorithm=ppo"], ["experiment=smollm2_gsm8k"]])
def test_resolved_configuration_is_plain_and_gives_the_same_run_again(overrides: list[str]) -> None:
    config = structured(compose(overrides))
    values = resolved(config)
    again = yaml.safe_load(yaml.safe_dump(values))
    assert structured(again) == config
    assert config_hash(structured(again)) == config_hash(config)


def test_mapping_and_instance_are_the_same_run() -> None:
    base = RunConfig(data=Arithmetic(), rollout=TorchEngine(), model=ModelConfig(recipe="tiny_sft"))
    node = {"_target_": "zoo.algorithms.grpo.GRPO", "clip_eps": 0.1}
    by_node = dataclasses.replace(base, algorithm=node)
    by_instance = dataclasses.replace(base, algorithm=GRPO(clip_eps=0.1))
    assert complete(by_node).algorithm == GRPO(clip_eps=0.1)
    assert config_hash(by_node) == config_hash(by_instance)


def test_python_users_get_the_same_checks() -> None:
    config = structured(compose([]))
    config.train.steps = -1
    with pytest.raises(ConfigError, match=r"train\.steps must be at least 0, got -1"):
        complete(config)
    config.train.steps = "many"  # pyright: ignore
    with pytest.raises(ConfigError, match=r"train\.steps must be a whole number, got 'many'"):
        complete(config)


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("resume", "must", Resume.must),
        ("seed", np.int64(3), 3),
        ("seed", 1.0, 1),
        ("experiment", 7, "7"),
        ("name", 5, "5"),
        ("output", Path("a/b"), "a/b"),
        ("train", {"steps": 2}, TrainConfig(steps=2)),
        ("train", {"lr": np.float32(0.5), "betas": [np.float64(0.5), 0]},
         TrainConfig(lr=0.5, betas=[0.5, 0.0])),
        ("measure", {"wandb": "disabled"}, MeasureConfig(wandb=Wandb.disabled)),
    ],
)  # fmt: skip
def test_what_python_sets_becomes_the_type_of_the_setting(
    key: str, value: Any, expected: Any
) -> None:
    base = structured(compose([]))
    config = complete(dataclasses.replace(base, **{key: value}))
    assert repr(getattr(config, key)) == repr(expected)
    if isinstance(value, dict):  # as an instance of the group's class
        made = type(expected)(**value)
        assert complete(dataclasses.replace(base, **{key: made})) == config
    assert structured(json.loads(json.dumps(resolved(config)))) == config


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("resume", "sometimes", "one of auto, never, must, got 'sometimes'"),
        ("seed", np.float64(3.5), "a whole number, got 3.5"),
        ("seed", True, "a whole number, got true"),
        ("seed", None, "a whole number, got null"),
        ("seed", "1", "a whole number, got '1'"),
        ("experiment", None, "a text, got null"),
        ("output", None, "a text, got null"),
        ("evaluate", None, "a EvaluateConfig, got null"),
        ("train", TrainConfig, "a TrainConfig, got <class"),
        ("train", EvaluateConfig(), "a TrainConfig, got EvaluateConfig("),
        ("model", "gpt2", "a ModelConfig, got 'gpt2'"),
    ],
)
def test_what_python_sets_wrongly_is_refused_by_name(key: str, value: Any, words: str) -> None:
    config = dataclasses.replace(structured(compose([])), **{key: value})
    for read_by in (complete, config_hash):
        with pytest.raises(ConfigError) as refusal:
            read_by(config)
        assert str(refusal.value).startswith(f"{key} must be {words}")


@pytest.mark.parametrize("number", [np.float64, np.float32, np.float16])
def test_a_number_of_numpy_in_a_component_is_written_as_pythons(number: Any) -> None:
    base = structured(compose([]))
    ours, theirs = (
        dataclasses.replace(base, algorithm=GRPO(clip_eps_high=value))
        for value in (0.5, number(0.5))
    )
    written = OmegaConf.create(resolved(theirs))
    assert type(written.algorithm.clip_eps_high) is float
    assert structured(written) == complete(ours) and config_hash(theirs) == config_hash(ours)


# ------------------------------------------------------------------------ choices given by name


RESULTS = {"Finding", "JobResult", "Verdict"}  # zoo alone makes them, from members
REQUIRED: dict[str, dict[str, Any]] = {  # what a class refuses to be made without
    "JSONL": {"path": "rows.jsonl"},
    "Hub": {"name": "owner/set"},
    "Mixture": {"parts": {"sums": {"weight": 1, "data": Arithmetic()}}},
    "Reader": {"columns": {}, "source": ""},
}


def choice_fields() -> list[Any]:
    found = []
    for module in pkgutil.walk_packages(zoo.__path__, "zoo."):
        if module.name.endswith("__main__"):
            continue
        for name, kind in vars(importlib.import_module(module.name)).items():
            ours = isinstance(kind, type) and kind.__module__ == module.name
            if not ours or not dataclasses.is_dataclass(kind) or name in RESULTS:
                continue
            hints = _hints(kind)
            for item in dataclasses.fields(kind):
                choice = hints[item.name]
                if isinstance(choice, type) and issubclass(choice, enum.Enum):
                    found.append((kind, item.name, choice))
    return found


def made(kind: Any, name: str, value: str) -> Any:
    """An instance with this setting; the groups of a run are read when the run starts."""
    if kind is RunConfig:
        return complete(dataclasses.replace(structured(compose([])), **{name: value}))
    if kind.__module__ == "zoo.config":
        group = next(f.name for f in dataclasses.fields(RunConfig) if f.default_factory is kind)
        return getattr(made(RunConfig, group, kind(**{name: value})), group)
    return kind(**REQUIRED.get(kind.__name__, {}), **{name: value})


def test_a_choice_given_by_name_is_its_member_in_every_class_of_settings() -> None:
    found = choice_fields()
    names = {kind.__name__ for kind, _, _ in found}
    assert {"Format", "JSONL", "Mixture", "Patience", "PPO", "Needs", "RunConfig"} <= names
    kind: Any
    for kind, name, choice in found:
        fields = {item.name: item.default for item in dataclasses.fields(kind)}
        default = fields[name] if isinstance(fields[name], choice) else next(iter(choice))
        assert getattr(made(kind, name, str(default.value)), name) is default, (kind, name)
        with pytest.raises(ValueError, match=rf"{name} must be one of .*'nonsense'") as refusal:
            made(kind, name, "nonsense")
        assert all(str(each.value) in str(refusal.value) for each in choice), (kind, name)


@pytest.mark.parametrize(
    ("function", "member", "expected"),
    [
        (lambda rule: keeps_format(r"\boxed{3}", rule), Rule.boxed, True),
        (lambda until: interleave({"a": "x", "b": "pqr"}, {"a": 1, "b": 1}, until), Until.shortest,
         ["x", "p"]),
        (lambda how: truncate_row([1, 2], [3, 4], 3, how), Truncation.keep_start, ([1, 2], [3])),
    ],
)  # fmt: skip
def test_a_function_takes_a_choice_by_name_or_refuses_it(
    function: Any, member: Any, expected: Any
) -> None:
    assert function(member) == function(str(member)) == expected
    with pytest.raises(ValueError, match=f"must be one of .*{member}.*'nonsense'"):
        function("nonsense")


# ------------------------------------------------------------------------ hash and folder


@pytest.mark.parametrize(
    "override",
    [
        "seed=7",
        "output=elsewhere",
        "experiment=another_word",
        "name=mine",
        "resume=must",
        "measure.wandb=disabled",
        "measure.wandb_project=other",
        "measure.progress=false",
        "measure.memory=false",
        "train.device=cpu",
    ],
)
def test_hash_leaves_out_what_cannot_move_a_result(override: str) -> None:
    assert config_hash(structured(compose([override]))) == default_hash()


@pytest.mark.parametrize(
    "override",
    [
        "algorithm.clip_eps=0.1",
        "algorithm=ppo",
        "data.n_problems=10",
        "reward=random",
        "reward=verifier",
        "rollout.temperature=0.9",
        "model=tiny_random",
        "train.lr=1e-5",
        "evaluate.problems=10",
    ],
)
def test_hash_changes_with_what_can(override: str) -> None:
    assert config_hash(structured(compose([override]))) != default_hash()


def test_hash_is_the_same_in_another_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Classes of a stranger, so that the process need not import torch; a set has no order of
    # its own from one process to the next, strings being hashed with a seed.
    source = """
        class Part:
            needs = losses = offers = None
            def __init__(self, names: set[str]): pass
    """
    (tmp_path / "light_mine.py").write_text(textwrap.dedent(source))
    part = "{'_target_': 'light_mine.Part', 'names': list('abcdefgh')}"
    code = (
        "from zoo.config import *; from zoo.instantiate import config_hash\n"
        f"part = {part}\n"
        "run = RunConfig(part, part, None, part, ModelConfig(path='a/b'))\n"
        "print(config_hash(run))"
    )
    printed = set()
    for seed in ("1", "2", "3"):
        done = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            check=True,
            env=os.environ
            | {"PYTHONHASHSEED": seed, "PYTHONPATH": f"{CONF.parent}{os.pathsep}{tmp_path}"},
        )
        printed.add(done.stdout.strip())
    assert len(printed) == 1 and len(printed.pop()) == 8


def test_run_folder_is_named_by_experiment_algorithm_hash_and_seed() -> None:
    config = structured(compose(["seed=3", "experiment=trial", "output=/data"]))
    assert run_dir(config) == Path(f"/data/trial/grpo-{config_hash(config)}/seed_3")
    named = structured(compose(["name=mine"]))
    assert run_name(named) == "mine"
    assert run_dir(named) == Path("outputs/default/mine/seed_0")
    at_home = structured(compose(["name=mine", "output='~/runs'"]))
    assert run_dir(at_home) == Path.home() / "runs/default/mine/seed_0"


# ------------------------------------------------------------------------ conversion


class Colour(enum.Enum):
    red = 1
    green = 2


@dataclass(frozen=True)
class Point:
    x: float = 0.0
    y: float = 0.0


@dataclass(frozen=True)
class Everything:
    offers: ClassVar[frozenset[str]] = frozenset()
    flag: bool = False
    count: int = 1
    rate: float = 0.5
    label: str = "a"
    maybe: float | None = None
    colour: Colour = Colour.red
    numbers: list[int] = field(default_factory=list)
    pair: tuple[float, float] = (0.0, 1.0)
    shares: dict[str, float] = field(default_factory=dict)
    folder: Path = Path(".")
    mode: Literal["fast", "slow"] = "fast"
    size: int | str = 1
    point: Point = field(default_factory=Point)
    inner: Any = None

    def __post_init__(self) -> None:
        if self.rate > 1:
            raise ValueError(f"rate is a share, got {self.rate}. Try 0.5.")
        if self.count < 0:
            raise ValueError(f"data.count must be at least 0, got {self.count}. Try 1.")


class Plain:
    """A stranger's class that is no dataclass."""

    def __init__(self, path: str, n: int = 3, *, scale: float = 1.0) -> None:
        self.path, self.n, self.scale = path, n, scale


class Open:
    def __init__(self, first: int = 0, **rest: Any) -> None:
        self.first, self.rest = first, rest


class Slotted:
    __slots__ = ("n",)

    def __init__(self, n: int = 1) -> None:
        self.n = n


def leaves_a_trace(path: str):
    Path(path).touch()


class Trace:
    def __init__(self, path: str) -> None:
        Path(path).touch()


def make_point(x: float = 2) -> Point:
    return Point(x, x)


def here(name: str) -> str:
    return f"{__name__}.{name}"


def everything(**values: Any) -> Everything:
    return build({"_target_": here("Everything"), **values}, "data_like")


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("rate", 1, 1.0),
        ("count", 1e3, 1000),
        ("maybe", None, None),
        ("maybe", 2, 2.0),
        ("colour", "green", Colour.green),
        ("colour", 2, Colour.green),
        ("numbers", [1, 2.0], [1, 2]),
        ("pair", [1, 2], (1.0, 2.0)),
        ("shares", {"a": 1}, {"a": 1.0}),
        ("folder", "a/b", Path("a/b")),
        ("mode", "slow", "slow"),
        ("size", "big", "big"),
        ("label", 3, "3"),
        ("point", {"x": 1}, Point(1.0, 0.0)),
        ("point", {"_target_": here("make_point")}, Point(2.0, 2.0)),
        ("inner", {"_target_": "left.alone", "weight": 1}, {"_target_": "left.alone", "weight": 1}),
    ],
)
def test_value_becomes_the_annotated_type(key: str, value: Any, expected: Any) -> None:
    found = getattr(everything(**{key: value}), key)
    assert found == expected and type(found) is type(expected)


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("flag", "yes", "true or false"),
        ("flag", 1, "true or false"),
        ("count", 1.5, "a whole number"),
        ("count", True, "a whole number"),
        ("rate", "0.5", "a number"),
        ("rate", None, "a number"),
        ("maybe", "x", "a number or null"),
        ("label", None, "a text"),
        ("label", 1e3, "Quote it"),
        ("colour", "gren", "Did you mean data_like.colour=green?"),
        ("numbers", "1,2", "a list"),
        ("numbers", [1, "b"], "data_like.numbers[1]"),
        ("pair", [1], "a list of 2 values"),
        ("shares", [1], "a mapping"),
        ("shares", {"a": "b"}, "data_like.shares.a"),
        ("mode", "slwo", "Did you mean data_like.mode=slow?"),
        ("size", None, "a whole number or a text"),
        ("point", {"z": 1}, "data_like.point.z"),
        ("point", 3, "_target_"),
        ("cuont", 3, "Did you mean data_like.count?"),
        ("rate", 2, "data_like: rate is a share, got 2.0"),
    ],
)
def test_wrong_value_is_refused_with_key_value_and_way_out(
    key: str, value: Any, words: str
) -> None:
    with pytest.raises(ConfigError) as refusal:
        everything(**{key: value})
    assert words in str(refusal.value)
    assert "data_like" in str(refusal.value)


def test_message_that_names_its_group_is_not_prefixed_again() -> None:
    with pytest.raises(ConfigError, match=r"^data\.count must be at least 0, got -1"):
        build({"_target_": here("Everything"), "count": -1}, "data")


def test_class_that_is_no_dataclass_takes_the_arguments_of_its_signature() -> None:
    node = {"_target_": here("Plain"), "path": "x", "scale": 2}
    made = build(node, "thing")
    assert (made.path, made.n, made.scale) == ("x", 3, 2.0)
    with pytest.raises(ConfigError, match=r"thing\.path is not set"):
        build({"_target_": here("Plain")}, "thing")
    with pytest.raises(ConfigError, match=r"no setting thing\.pth .*Did you mean thing\.path"):
        build(node | {"pth": 1}, "thing")
    assert build({"_target_": here("Open"), "first": 1, "other": 2}, "thing").rest == {"other": 2}


def test_written_configuration_keeps_the_arguments_of_a_plain_class() -> None:
    config = structured(compose([]))
    node = {"_target_": here("Plain"), "path": "x", "scale": 2.0}
    config.reward = build(node, "thing")
    assert resolved(config)["reward"] == node
    made_in_python = Plain("x", scale=2.0)
    config.reward = made_in_python
    assert resolved(config)["reward"] == node | {"n": 3}
    config.reward = build({"_target_": here("Slotted"), "n": 2}, "thing")  # refuses attributes
    assert resolved(config)["reward"]["_target_"] == here("Slotted")


def test_instance_is_returned_as_it_is() -> None:
    algorithm = GRPO(average=Average.token)
    assert build(algorithm, "algorithm") is algorithm


@pytest.mark.parametrize(
    ("node", "words"),
    [
        (None, "must be a mapping with _target_"),
        ("grpo", "got 'grpo'"),
        ({"clip_eps": 1}, "lacks _target_"),
        ({"_target_": "GRPO"}, "dotted path"),
        ({"_target_": "zoo.algorithms.gpro.GRPO"}, "zoo.algorithms has no 'gpro'"),
        ({"_target_": "zoo.algorithms.grpo.Grpo"}, "Did you mean zoo.algorithms.grpo.GRPO?"),
        ({"_target_": "no_such_package.A"}, "no module 'no_such_package'"),
        ({"_target_": "math.pi"}, "not a class"),
        ({"_target_": "collections.OrderedDict"}, "has no 'needs'"),
    ],
)
def test_node_without_a_usable_class_is_refused(node: Any, words: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        build(node, "algorithm")
    assert words in str(refusal.value)


@pytest.mark.parametrize("group", ["algorithm", "data", "reward", "rollout", "thing"])
@pytest.mark.parametrize("name", ["leaves_a_trace", "Trace", "os.mkdir"])
def test_what_makes_nothing_of_use_is_refused_before_it_is_called(
    group: str, name: str, tmp_path: Path
) -> None:
    if name == "Trace" and group in ("rollout", "thing"):
        pytest.skip("any class may be one")
    target = name if "." in name else here(name)
    with pytest.raises(ConfigError, match=r"is no class, and a function|is not usable as"):
        build({"_target_": target, "path": str(tmp_path / "trace")}, group)
    assert not (tmp_path / "trace").exists()


def test_broken_module_of_a_stranger_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_mine.py").write_text("def f(:\n")
    (tmp_path / "needy_mine.py").write_text("import no_such_dependency\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError, match="importing broken_mine failed with SyntaxError"):
        locate("broken_mine.Mine")
    with pytest.raises(ConfigError, match="needs the package 'no_such_dependency'"):
        locate("needy_mine.Mine")


def test_nested_class_and_type_checking_names_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = """
        from __future__ import annotations
        from dataclasses import dataclass
        from typing import TYPE_CHECKING
        if TYPE_CHECKING:
            from somewhere import Thing

        class Outer:
            @dataclass
            class Inner:
                rate: float = 1.0
                thing: Thing | None = None
    """
    (tmp_path / "nested_mine.py").write_text(textwrap.dedent(source))
    monkeypatch.syspath_prepend(str(tmp_path))
    made = build({"_target_": "nested_mine.Outer.Inner", "rate": 2}, "thing")
    assert type(made.rate) is float  # the annotation that can be read is still enforced
    with pytest.raises(ConfigError, match=r"thing\.rate must be a number"):
        build({"_target_": "nested_mine.Outer.Inner", "rate": "fast"}, "thing")


def test_convert_offers_the_default_as_a_way_out() -> None:
    with pytest.raises(ConfigError, match=r"a\.b must be a number, got 'x'\. Try a\.b=0\.5"):
        convert("x", float, "a.b", 0.5)


# ------------------------------------------------------------------------ weight of an import


@pytest.mark.parametrize(
    "module", ["zoo", "zoo.config", "zoo.instantiate", "zoo.compose", "zoo.cli", "zoo.rewards.math"]
)
def test_import_loads_no_torch(module: str) -> None:
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=CONF.parent).returncode == 0


def test_conf_is_no_package_folder_in_the_source_tree() -> None:
    assert not (Path(structured.__code__.co_filename).parent / "conf").exists()


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("rollout.temperature=inf", "rollout.temperature must be above 0 (0.001 to 1000), got inf"),
        ("rollout.temperature=1e-300", "rollout.temperature must be above 0 (0.001 to 1000)"),
        ("rollout.group_size=999999999999", "rollout.group_size must be at most 65536"),
        ("train.groups=999999999999", "train.groups must be at most 1048576"),
        ("evaluate.samples=999999999999", "evaluate.samples must be at most 1048576"),
        ("train.stop_at.value=nan", "train.stop_at.value must be a share between 0 and 1, got nan"),
        ("train.stop_at.value=0.5", "train.stop_at.value=0.5 has no effect without"),
        ("train.stop_at.metric=heldout/greedy", "train.stop_at.value is 0, which"),
        ("train.stop_at.value=1.5", "train.stop_at.value must be a share between 0 and 1"),
        ("train.weight_decay=1e308", "train.weight_decay=1e+308 times train.lr=0.002 must be"),
        ("model.architecture.num_hidden_layers=0", "model.architecture.num_hidden_layers must be"),
        ("model.dtype=float16", "model.dtype=float16 cannot be trained"),
        ("name=' '", "name names a folder of the output and must be one plain word, got ' '"),
        (f"name={'n' * 256}", "name must be of folders whose names have at most 255 bytes"),
        (f"name='{'ä' * 128}'", "name must be of folders whose names have at most 255 bytes"),
        (f"output=a/{'n' * 256}/b", "output must be of folders whose names have at most 255 bytes"),
    ],
)
def test_number_that_no_run_could_have_is_refused_with_its_key(override: str, words: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        structured(compose(["model=tiny_random", override]))
    assert words in str(refusal.value)


@pytest.mark.parametrize(
    ("overrides", "wanted"),
    [
        ("train.schedule=constant train.lr_end=0.2", ["lr_end"]),
        ("train.schedule=constant", []),
        ("train.schedule=cosine train.lr_end=0.2", []),
        # 3 steps of 2 epochs are 6 updates
        ("algorithm=ppo algorithm.epochs=2 train.steps=3 train.warmup_updates=6", ["warmup"]),
        ("algorithm=ppo algorithm.epochs=2 train.steps=3 train.warmup_updates=5", []),
        ("experiment=tiny_sft train.steps=39", ["stop_at"]),
        ("experiment=tiny_sft train.steps=40", []),
        ("experiment=tiny_sft train.steps=0", []),
        ("algorithm=ppo algorithm.epochs=3 algorithm.kl_stop=0.1", ["kl_stop"]),
        ("algorithm=ppo algorithm.epochs=3 algorithm.kl_stop=0.1 train.schedule=constant", []),
        ("algorithm=grpo train.max_row_tokens=9", ["max_row_tokens"]),
        ("algorithm=dpo train.max_row_tokens=9", []),
    ],
)
def test_setting_that_does_nothing_in_a_run_is_a_note(overrides: str, wanted: list[str]) -> None:
    from zoo.build import without_effect

    found = dict(without_effect(structured(compose(overrides.split()))))
    assert list(found) == wanted
    assert all(f"train.{key}" in text or f"algorithm.{key}" in text for key, text in found.items())


def test_weight_decay_is_held_against_the_critics_learning_rate_too() -> None:
    with pytest.raises(ConfigError, match=r"times train\.critic_lr=0\.5 must be below 1"):
        structured(compose(["train.critic_lr=0.5", "train.weight_decay=2"]))


def test_a_ctrl_c_while_a_module_is_imported_is_no_mistake_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python 3.11 makes a RuntimeError of it, and transformers a ModuleNotFoundError of that."""
    (tmp_path / "stopped_late.py").write_text(
        "class Field:\n"
        "    def __set_name__(self, owner, name):\n"
        "        raise KeyboardInterrupt('(SIGTERM)')\n"
        "try:\n"
        "    class Model:\n"
        "        name = Field()\n"
        "except RuntimeError as error:\n"
        "    raise ModuleNotFoundError('Could not import module') from error\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(KeyboardInterrupt, match="SIGTERM"):
        locate("stopped_late.score")
