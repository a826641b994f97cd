"""Every option of conf/data and conf/reward: builds, lists every field, and holds its defaults."""

import dataclasses
import enum
from pathlib import Path

import pytest
import yaml

from zoo.instantiate import build, locate
from zoo.types import Reward

CONF = Path(__file__).resolve().parents[2] / "conf"
FILES = sorted([*(CONF / "data").glob("*.yaml"), *(CONF / "reward").glob("*.yaml")])
# What has no default of its own: the option is a recipe, or a user's name or path is awaited.
AWAITED = {"jsonl": "path", "hub": "name", "function": "fn", "learned": "path"}
OURS = (
    "arithmetic digits gsm8k hub jsonl math "
    "format_only function gsm8k_shaped last_number random verifier"
)


def plain(value):
    if isinstance(value, enum.Enum):
        return value.name
    return list(value) if isinstance(value, tuple) else value


@pytest.mark.parametrize("file", FILES, ids=lambda file: f"{file.parent.name}/{file.stem}")
def test_option_lists_every_field_with_its_default(file):
    node = yaml.safe_load(file.read_text())
    target = node.pop("_target_")
    kind = locate(target)
    assert target.startswith(f"zoo.{file.parent.name.replace('reward', 'rewards')}.")
    assert file.read_text().startswith("# ")  # the option's line in the help
    fields = {f.name: f for f in dataclasses.fields(kind) if f.init}
    assert list(node) == list(fields)
    if file.stem in ("gsm8k_shaped", "verifier_overlong", "mixture"):
        return
    for name, field in fields.items():
        default = field.default
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        assert node[name] == plain(default), name


@pytest.mark.parametrize("file", FILES, ids=lambda file: f"{file.parent.name}/{file.stem}")
def test_option_builds(file):
    node = yaml.safe_load(file.read_text())
    group = file.parent.name
    if file.stem in AWAITED:
        with pytest.raises(ValueError, match=f"{group}.{AWAITED[file.stem]} is not set"):
            build(node, group)
        value = {"fn": "tests.rewards.test_rewards.by_length"}.get(AWAITED[file.stem], "some/name")
        node[AWAITED[file.stem]] = value
    made = build(node, group)
    if group == "reward":
        assert isinstance(made, Reward)
    else:
        assert made.offers <= {"prompts", "examples", "pairs", "rankings", "labelled"}
        assert made.max_new_tokens > 0


def test_the_options_are_there():
    assert set(OURS.split()) <= {file.stem for file in FILES}
