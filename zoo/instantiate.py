"""From configuration nodes to checked instances, and back to plain containers."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import enum
import hashlib
import importlib
import inspect
import json
import math
import os
import traceback
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from zoo.config import ConfigError, RunConfig, TrainConfig
from zoo.identity import findable, hidden_state, identity
from zoo.sources import source_of

CLASS_GROUPS = ("algorithm", "data", "reward", "rollout")
VALUE_GROUPS = ("model", "train", "evaluate", "measure")

# What may differ between two runs that compute the same thing: it never enters the hash.
UNHASHED = {
    "seed",
    "output",
    "experiment",
    "name",
    "resume",
    "measure.wandb",
    "measure.wandb_project",
    "measure.progress",
    "measure.memory",
    "train.device",
    # A run that a reward stopped goes on where it ended, with another answer to failures.
    "train.reward_timeout",
    "train.reward_on_error",
}

# What other libraries call our settings: the first words of many who come from there.
ELSEWHERE = {
    "num_generations": "rollout.group_size",
    "max_completion_length": "rollout.max_new_tokens",
    "max_tokens": "rollout.max_new_tokens",
    "learning_rate": "train.lr",
    "max_steps": "train.steps",
    "total_steps": "train.steps",
    "per_device_train_batch_size": "train.groups",
    "batch_size": "train.groups",
    "gradient_accumulation_steps": "train.micro_batch_tokens",
    "save_steps": "train.checkpoint_every",
    "eval_steps": "evaluate.every",
    "lr_scheduler_type": "train.schedule",
    "warmup_steps": "train.warmup_updates",
    "gradient_checkpointing": "model.activation_checkpointing",
    "torch_dtype": "model.dtype",
    "model_name_or_path": "model.path",
    "attn_implementation": "model.attention",
    "dataset_name": "data.name",
    "output_dir": "output",
    "run_name": "name",
    "report_to": "measure.wandb",
    # of reward=function once, now of any reward
    "timeout": "train.reward_timeout",
    "on_error": "train.reward_on_error",
}

LONGEST_NAME = 255  # bytes, on the usual file systems
MANY = 2**20  # more groups or samples than any machine holds at a time

# What a class must have to stand in a group; the full contract is zoo.testing's business.
_VERBS = {"algorithm": ("needs", "losses"), "data": ("offers",), "reward": ("__call__",)}

_NODE = "_zoo_node"  # where a class that is no dataclass keeps the mapping it was built from


# ---------------------------------------------------------------------------------- public


def build(node: Any, group: str) -> Any:
    """The instance that a mapping with `_target_` describes; an instance is returned as it is.

    Keys are compared with the fields of the class (a dataclass, or the keyword arguments of any
    other class or function), values are converted to the annotated types, and an annotation that
    is itself a class takes a nested mapping with `_target_`. Fields of type `dict` or `Any` get
    plain containers: what to do with them is the class's own affair.

    Args:
        node: a mapping with `_target_`, or an instance.
        group: dotted name of the node, for messages: "algorithm", "reward", ….
    Raises:
        ConfigError: no or an unknown `_target_`, unknown or missing keys, wrong types, or an
            error of the class itself, with the name of the group.
    """
    if isinstance(node, DictConfig):
        node = plain(node)
    if not isinstance(node, Mapping):
        if node is None or isinstance(node, str | int | float | bool | list):
            how = f"See `zoo --help` for the options of {group}."
            if group not in CLASS_GROUPS:  # a setting of one
                how = f"Write {{_target_: package.module.Class, …}} for {_show(node)}."
            raise ConfigError(
                f"{group} must be a mapping with _target_, or an instance, got {_show(node)}. {how}"
            )
        return node
    target = node.get("_target_")
    if not isinstance(target, str):
        raise ConfigError(
            f"{group} has no class: the mapping lacks _target_ (it holds "
            f"{', '.join(map(str, node)) or 'nothing'}). Choose an option, as in "
            f"{group}=NAME, or write {group}._target_=package.module.Class."
        )
    factory = locate(target, f"{group}._target_")
    _check_verbs(_made_by(factory, target, group), target, group)  # before anything is called
    given = {str(key): value for key, value in node.items() if key != "_target_"}
    parameters = _parameters(factory)
    arguments = _arguments(parameters, given, group, getattr(factory, "__name__", target))
    try:
        instance = factory(**arguments)
    except ConfigError:
        raise
    except (ValueError, TypeError, OSError, ImportError) as error:
        raise ConfigError(_prefixed(str(error) or type(error).__name__, group)) from error
    except (Exception, SystemExit) as error:  # a mistake in the class rather than in its settings
        place = traceback.extract_tb(error.__traceback__)[-1]
        raise ConfigError(
            f"{group}._target_={target}: building it failed with {type(error).__name__}: "
            f"{first_line(error)} ({place.filename}, line {place.lineno}). Correct the class."
        ) from error
    _check_verbs(type(instance), target, group)
    if not dataclasses.is_dataclass(instance):
        # A class with slots refuses: it is written from its attributes instead.
        with contextlib.suppress(AttributeError, TypeError):
            object.__setattr__(instance, _NODE, {"_target_": target, **given})
    return instance


def _made_by(factory: Any, target: str, group: str) -> type:
    """The class of what `factory` makes; a function must say it, or it may be made for anything."""
    if isinstance(factory, type):
        return factory
    owner = getattr(factory, "__self__", None)  # of a classmethod
    kind = owner if isinstance(owner, type) else _hints(factory).get("return")
    if not isinstance(kind, type):
        use = f" Or use reward=function reward.fn={target}." if group == "reward" else ""
        raise ConfigError(
            f"{group}._target_={target} is no class, and a function that does not say what it "
            f"makes. Name a class, or annotate the function with the class: -> Mine.{use}"
        )
    return kind


def _check_verbs(kind: type, target: str, group: str) -> None:
    for verb in _VERBS.get(group, ()):
        if not any(verb in vars(base) for base in kind.__mro__):  # hasattr: type has __call__
            raise ConfigError(
                f"{group}._target_={target} is not usable as {group}: "
                f"{kind.__name__} has no {verb!r}. Give the name of a class that has "
                f"{' and '.join(_VERBS[group])} (see zoo/types.py and zoo/algorithms/base.py)."
            )


def structured(cfg: DictConfig | Mapping[str, Any]) -> RunConfig:
    """The whole composed configuration, checked: unknown keys, types, enum values and ranges.

    The four groups of classes become instances, so every mistake in them shows here as well.

    Raises:
        ConfigError: the first mistake found, with the nearest known key.
    """
    try:
        values = plain(cfg)
    except OmegaConfBaseException as error:
        raise ConfigError(_omegaconf_message(error)) from error
    values.pop("hydra", None)
    for key in values:
        if key not in _parameters(RunConfig):
            known = [one for one in all_keys(values) if one.split(".")[0] != key]
            raise ConfigError(_unknown(key, values[key], "", "a run", known))
    parameters = _parameters(RunConfig)
    run = {
        name: convert(value, parameters[name].annotation, name, parameters[name].default)
        for name, value in values.items()
        if name not in CLASS_GROUPS
    }
    given = {name: values.get(name) for name in CLASS_GROUPS}
    check(RunConfig(**run, **given))  # first, because building a class may import torch
    for name in CLASS_GROUPS:
        if values.get(name) is not None:
            run[name] = build(values[name], name)
    return RunConfig(**run)


def complete(config: RunConfig) -> RunConfig:
    """The same run with its four groups built and its values checked; for Python users.

    Raises:
        ConfigError: see `build` and `check`.
    """
    groups = {
        name: None if getattr(config, name) is None else build(getattr(config, name), name)
        for name in CLASS_GROUPS
    }
    values = {}
    for name, parameter in _parameters(RunConfig).items():
        if name in CLASS_GROUPS:
            continue
        value, kind = getattr(config, name), parameter.annotation
        if name in VALUE_GROUPS and isinstance(value, kind):
            value, kind = _fields(value), type(value)
        values[name] = convert(value, kind, name, parameter.default)
    config = dataclasses.replace(config, **groups, **values)
    check(config)
    return config


def check(config: RunConfig) -> None:
    """The ranges of single values; what concerns two groups at once is `zoo.build.check`.

    Raises:
        ConfigError: the first value out of its range.
    """
    for name in ("algorithm", "data", "rollout"):
        if getattr(config, name) is None:
            raise ConfigError(
                f"{name} is not set (null): a run needs one. Choose {name}=NAME; "
                f"`zoo --help` lists the options."
            )
    _check_model(config)
    _check_train(config.train)
    _check_evaluate_and_measure(config)
    if not 0 <= config.seed < 2**32:
        raise ConfigError(_range("seed", config.seed, "between 0 and 2³² − 1", "seed=0"))
    for key in ("experiment", "name"):
        value = getattr(config, key)
        if value is not None and not _names_a_folder(value):
            raise ConfigError(
                f"{key} names a folder of the output and must be one plain word, got "
                f"{value!r}. Try {key}=trial; the folder above is output={config.output}."
            )
    if not config.output:
        raise ConfigError("output must name a folder, got ''. Try output=outputs.")
    for key in ("output", "experiment", "name"):
        value = getattr(config, key)
        if any(len(os.fsencode(part)) > LONGEST_NAME for part in Path(value or "").parts):
            expected = f"of folders whose names have at most {LONGEST_NAME} bytes"
            raise ConfigError(_range(key, value, expected, f"{key}=trial"))


def resolved(config: RunConfig) -> dict[str, Any]:
    """The run as plain containers: instances become {_target_, fields}, enums their names.

    `structured(resolved(config))` gives the same run again.
    """
    return _resolved(config)


def _resolved(config: RunConfig, states: bool = False) -> dict[str, Any]:
    return {
        item.name: _plain_value(getattr(config, item.name), states)
        for item in dataclasses.fields(RunConfig)
    }


def config_hash(config: RunConfig) -> str:
    """Eight hexadecimal digits of the resolved configuration, without what cannot move a result.

    Left out: seed, output, experiment, name, resume, measure.wandb*, measure.progress,
    measure.memory, train.device and train.reward_*. Two runs with one hash differ by their seeds
    alone. Of objects made in Python it has what they enclose and keep as well, as they are now.
    """
    values = _resolved(complete(config), states=True)
    for key in UNHASHED:
        _drop(values, key.split("."))
    text = json.dumps(values, sort_keys=True, ensure_ascii=False, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def run_name(config: RunConfig, identity: str = "") -> str:
    """`config.name`, or the algorithm's name and the hash of the configuration.

    Args:
        identity: that hash, as it was when the run began; default: of `config` as it is now.
    """
    if config.name is not None:
        return config.name
    algorithm = build(config.algorithm, "algorithm")
    label = getattr(algorithm, "name", "") or type(algorithm).__name__.lower()
    if not isinstance(label, str) or not _names_a_folder(label):
        raise ConfigError(
            f"the name of {type(algorithm).__name__} is part of a folder of the output and must be "
            f"one plain word, got {label!r}. Correct the attribute `name` of the class."
        )
    return f"{label}-{identity or config_hash(config)}"


def run_dir(config: RunConfig) -> Path:
    """output/experiment/name/seed_n: one folder a run, the same for the same configuration."""
    output = Path(os.path.expanduser(config.output))
    return output / config.experiment / run_name(config) / f"seed_{config.seed}"


def locate(path: str, where: str = "_target_") -> Any:
    """The class or function behind a dotted path.

    Raises:
        ConfigError: the module or the name does not exist, or the module fails to import.
    """
    parts = path.split(".")
    if len(parts) < 2 or not all(part.isidentifier() for part in parts):
        raise ConfigError(
            f"{where} must be a dotted path such as zoo.algorithms.grpo.GRPO, got {path!r}."
        )
    # The longest prefix that is a module; the rest are attributes (a nested class, a classmethod).
    for cut in range(len(parts) - 1, 0, -1):
        name = ".".join(parts[:cut])
        try:
            found: Any = importlib.import_module(name)
        except (Exception, SystemExit) as error:
            if stop := interrupt_behind(error):
                raise stop from error
            # transformers raises it without a name where its own part does not load
            missing = error.name if isinstance(error, ModuleNotFoundError) else None
            if missing and (name == missing or name.startswith(missing + ".")):
                continue  # not a module: try a shorter prefix
            if missing:
                raise ConfigError(
                    f"{where}={path}: the module {name} needs the package {missing!r}, which is "
                    f"not installed. Install it (pip install {missing.split('.')[0]})."
                ) from error
            how = f"Run `python -c 'import {name}'` to see where."
            if isinstance(error, SystemExit):
                how = "Put the call that ends the program under `if __name__ == '__main__':`."
            raise ConfigError(
                f"{where}={path}: importing {name} failed with {type(error).__name__}: "
                f"{first_line(error)}. {how}"
            ) from error
        if not name.startswith("zoo."):
            source_of(name)  # what was imported, whatever becomes of the file
        for index, part in enumerate(parts[cut:], cut):
            if not hasattr(found, part):
                names = [key for key in vars(found) if not key.startswith("_")]
                # an imported package whose submodule is missing reads better as a missing module
                raise ConfigError(
                    f"{where}={path}: {'.'.join(parts[:index])} has no {part!r}."
                    f"{did_you_mean(part, names, '.'.join(parts[:index]) + '.')}"
                )
            found = getattr(found, part)
        if not callable(found):
            raise ConfigError(
                f"{where}={path} is a {type(found).__name__}, not a class or function."
            )
        return found
    raise ConfigError(
        f"{where}={path}: there is no module {parts[0]!r}. The working directory and the "
        f"installed packages are searched: run from the folder that holds {parts[0]}.py, or "
        f"install the package it belongs to."
    )


def interrupt_behind(error: BaseException) -> KeyboardInterrupt | None:
    """The Ctrl-C that an error comes from: Python makes others of one that meets an import."""
    seen: set[int] = set()
    behind: BaseException | None = error
    while behind is not None and id(behind) not in seen:
        if isinstance(behind, KeyboardInterrupt):
            return KeyboardInterrupt(*behind.args)
        seen.add(id(behind))
        behind = behind.__cause__ or behind.__context__
    return None


def did_you_mean(word: str, candidates: Iterable[str], prefix: str = "") -> str:
    """' Did you mean …?' with the nearest candidates, or nothing."""
    near = nearest(word, candidates)
    if not near:
        return ""
    return " Did you mean " + " or ".join(prefix + one for one in near) + "?"


def nearest(word: str, candidates: Iterable[str]) -> list[str]:
    """The one or two candidates that a typing error turns into `word`, best first."""
    folded = {candidate.lower().replace("-", "_"): candidate for candidate in candidates}
    word = word.lower().replace("-", "_")
    found = difflib.get_close_matches(word, folded, 2, 0.6)
    if len(found) == 2:  # the second only where it is nearly as good
        best, second = (difflib.SequenceMatcher(None, one, word).ratio() for one in found)
        found = found if second > best - 0.06 else found[:1]
    return [folded[one] for one in found]


def suggest_keys(key: str, keys: Iterable[str]) -> list[str]:
    """Known dotted keys near a mistaken one: the same leaf elsewhere first, then near spellings."""
    keys = list(keys)
    leaf = key.rsplit(".", 1)[-1]
    if ELSEWHERE.get(leaf) in keys:
        return [ELSEWHERE[leaf]]
    parent = key.rsplit(".", 1)[0] if "." in key else ""
    siblings = [k for k in keys if "." in k and k.rsplit(".", 1)[0] == parent]
    if parent and (near := nearest(leaf, [k.rsplit(".", 1)[-1] for k in siblings])):
        return [f"{parent}.{one}" for one in near]
    if same := [k for k in keys if k.rsplit(".", 1)[-1] == leaf]:
        return same[:2]
    if siblings:  # the group is right, and nothing in it is near
        return []
    if near := nearest(key, keys):
        return near
    leaves: dict[str, list[str]] = {}
    for k in keys:
        leaves.setdefault(k.rsplit(".", 1)[-1], []).append(k)
    return [k for one in nearest(leaf, leaves) for k in leaves[one]][:2]


def all_keys(values: Mapping[str, Any]) -> list[str]:
    """Every dotted key of nested mappings, the run's own fields included."""
    known = dict.fromkeys(_nested_keys(values) + _nested_keys(resolved(RunConfig())))
    return list(known)


def _nested_keys(values: Mapping[str, Any], prefix: str = "") -> list[str]:
    found: list[str] = []
    for key, value in values.items():
        if str(key) == "_target_":
            continue
        found.append(f"{prefix}{key}")
        if isinstance(value, Mapping):
            found += _nested_keys(value, f"{prefix}{key}.")
    return found


def plain(cfg: Any) -> Any:
    """OmegaConf containers as dicts and lists, interpolations resolved."""
    if isinstance(cfg, DictConfig):
        return OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)
    return {str(key): value for key, value in cfg.items()} if isinstance(cfg, Mapping) else cfg


# ---------------------------------------------------------------------------------- conversion


def convert(value: Any, annotation: Any, where: str, default: Any = dataclasses.MISSING) -> Any:
    """`value` as the annotated type: enums by name, floats from integers, lists into tuples.

    Nothing is guessed: a string stays no number, and 2.5 no integer.

    Raises:
        ConfigError: the value is of another type, with the default as a way out.
    """
    try:
        return _convert(value, annotation, where)
    except _Mismatch as mismatch:
        hint = ""
        if default is not dataclasses.MISSING and not isinstance(default, Mapping):
            hint = f" Try {where}={_show(_plain_value(default), as_override=True)} (the default)."
        raise ConfigError(
            f"{mismatch.where or where} must be {mismatch.expected}, got {_show(mismatch.value)}."
            f"{mismatch.advice}{hint if not mismatch.advice else ''}"
        ) from None


class _Mismatch(Exception):
    def __init__(self, expected: str, value: Any, where: str = "", advice: str = "") -> None:
        super().__init__(expected)
        self.expected, self.value, self.where, self.advice = expected, value, where, advice


def _convert(value: Any, annotation: Any, where: str) -> Any:
    value = _native(value)
    origin = typing.get_origin(annotation)
    if annotation is Any or annotation is inspect.Parameter.empty:
        return value
    if isinstance(annotation, typing.NewType):
        return _convert(value, annotation.__supertype__, where)
    if origin is typing.Annotated or origin is typing.Final or origin is typing.ClassVar:
        return _convert(value, typing.get_args(annotation)[0], where)
    if origin is typing.Union or isinstance(annotation, types.UnionType):
        return _convert_union(value, typing.get_args(annotation), where)
    if origin is typing.Literal:
        options = typing.get_args(annotation)
        for option in options:
            if type(value) is type(option) and value == option:
                return option
        raise _Mismatch(
            f"one of {', '.join(map(str, options))}",
            value,
            where,
            did_you_mean(str(value), map(str, options), f"{where}="),
        )
    if annotation is None or annotation is type(None):
        if value is None:
            return None
        raise _Mismatch("null", value, where)
    if isinstance(annotation, type) and issubclass(annotation, enum.Enum):
        return _convert_enum(value, annotation, where)
    if annotation in _SCALARS:
        return _SCALARS[annotation](value, where)
    container = origin if origin is not None else annotation
    if container in (list, tuple, set, frozenset) or container in _SEQUENCES:
        return _convert_sequence(value, container, typing.get_args(annotation), where)
    if (isinstance(container, type) and issubclass(container, Mapping)) or container is dict:
        return _convert_mapping(value, typing.get_args(annotation), where)
    return _convert_object(value, annotation, where)


def _convert_union(value: Any, members: tuple[Any, ...], where: str) -> Any:
    if value is None:
        if type(None) in members or Any in members:
            return None
        raise _Mismatch(_describe(members), value, where)
    inner = [member for member in members if member is not type(None)]
    for member in inner:  # the exact type first, so that 1 stays an int in `int | float`
        if isinstance(member, type) and type(value) is member:
            return value
    mismatch: _Mismatch | None = None
    for member in inner:
        try:
            return _convert(value, member, where)
        except _Mismatch as error:
            mismatch = error
    assert mismatch is not None
    expected = mismatch.expected if len(inner) == 1 else _describe(tuple(inner))
    if type(None) in members and not expected.endswith("null"):
        expected += " or null"
    raise _Mismatch(expected, mismatch.value, mismatch.where, mismatch.advice)


def _convert_enum(value: Any, annotation: type[enum.Enum], where: str) -> enum.Enum:
    if isinstance(value, annotation):
        return value
    for member in annotation:
        if value in (member.name, member.value) and not isinstance(value, bool):
            return member
    names = [member.name for member in annotation]
    off = "disabled" in names and str(value).lower() in ("none", "off", "no", "false")
    word = "disabled" if off else str(value)
    raise _Mismatch(
        f"one of {', '.join(names)}", value, where, did_you_mean(word, names, f"{where}=")
    )


def _native(value: Any) -> Any:
    """A number of numpy as Python's, which nothing is lost by; anything else as it is."""
    if type(value).__module__ == "numpy" and getattr(value, "shape", None) == ():
        return value.item()
    return value


def _to_bool(value: Any, where: str) -> bool:
    if isinstance(value, bool):
        return value
    raise _Mismatch("true or false", value, where)


def _to_int(value: Any, where: str) -> int:
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if isinstance(value, float) and value.is_integer():  # 1e3 reads as a float
        return int(value)
    raise _Mismatch("a whole number", value, where, _if_text(value, int))


def _to_float(value: Any, where: str) -> float:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    raise _Mismatch("a number", value, where, _if_text(value, float))


def _if_text(value: Any, kind: type[int] | type[float]) -> str:
    """What to do with a number in quotes, or from the environment."""
    with contextlib.suppress(TypeError, ValueError):
        kind(value if isinstance(value, str) else "")
        return " It is a text: leave out the quotes, or write ${oc.decode:${oc.env:NAME}}."
    return ""


def _to_str(value: Any, where: str) -> str:
    if isinstance(value, str):
        return str(value)
    if isinstance(value, int | Path) and not isinstance(value, bool):  # name=3
        return str(value)
    raise _Mismatch(
        "a text", value, where, "" if value is None else f""" Quote it: {where}="'{value}'"."""
    )


def _to_path(value: Any, where: str) -> Path:
    if isinstance(value, str | Path):
        return Path(value)
    raise _Mismatch("a path", value, where)


_SCALARS: dict[Any, Callable[[Any, str], Any]] = {
    bool: _to_bool,
    int: _to_int,
    float: _to_float,
    str: _to_str,
    Path: _to_path,
}
_SEQUENCES = (
    typing.get_origin(Sequence[int]),
    typing.get_origin(Iterable[int]),
    typing.get_origin(typing.Collection[int]),
)


def _convert_sequence(value: Any, container: Any, args: tuple[Any, ...], where: str) -> Any:
    if isinstance(value, str | bytes | Mapping) or not isinstance(
        value, Sequence | set | frozenset
    ):
        raise _Mismatch("a list, as in [1,4]", value, where)
    build_as = container if container in (list, tuple, set, frozenset) else list
    if container is tuple and args and args[-1] is not Ellipsis:
        if len(value) != len(args):
            raise _Mismatch(f"a list of {len(args)} values", value, where)
        kinds = list(args)
    else:
        kinds = [args[0] if args else Any] * len(value)
    pairs = zip(value, kinds, strict=True)
    return build_as(_convert(v, kind, f"{where}[{i}]") for i, (v, kind) in enumerate(pairs))


def _convert_mapping(value: Any, args: tuple[Any, ...], where: str) -> dict[Any, Any]:
    if not isinstance(value, Mapping):
        raise _Mismatch("a mapping, as in {a:1}", value, where)
    kind = args[1] if len(args) == 2 else Any
    return {key: _convert(item, kind, f"{where}.{key}") for key, item in value.items()}


def _convert_object(value: Any, annotation: Any, where: str) -> Any:
    if isinstance(value, Mapping) and "_target_" in value:
        value = build(value, where)
    elif isinstance(value, Mapping) and dataclasses.is_dataclass(annotation):
        return _fill(annotation, value, where)
    if isinstance(annotation, type):
        try:
            fits = isinstance(value, annotation)
        except TypeError:  # a protocol that is not runtime-checkable
            fits = True
        if not fits:
            kind = annotation.__name__
            way_out = f" Give a mapping with _target_, as in {{_target_: mine.{kind}}}."
            if annotation.__module__ == "zoo.config":
                first = dataclasses.fields(annotation)[0].name
                way_out = f" Leave it out, or set what it holds, as in {where}.{first}=…."
            raise _Mismatch(f"a {kind}", value, where, way_out)
    return value


def _fill(kind: Any, given: Mapping[str, Any], where: str) -> Any:
    """A dataclass of values (no `_target_`) from a mapping, checked key by key."""
    given = {str(key): value for key, value in given.items()}
    arguments = _arguments(_parameters(kind), given, where, where)
    try:
        return kind(**arguments)
    except ConfigError:
        raise
    except (ValueError, TypeError) as error:
        raise ConfigError(_prefixed(str(error), where)) from error


def _arguments(
    parameters: Mapping[str, inspect.Parameter], given: Mapping[str, Any], group: str, owner: str
) -> dict[str, Any]:
    open_ended = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    named = {
        name: p for name, p in parameters.items() if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)
    }
    arguments = {}
    for key, value in given.items():
        if key not in named and not open_ended:
            known = [f"{group}.{name}" for name in named]
            raise ConfigError(_unknown(f"{group}.{key}", value, group, owner, known))
        if key in named:
            parameter = named[key]
            value = convert(value, parameter.annotation, f"{group}.{key}", parameter.default)
        arguments[key] = value
    for name, parameter in named.items():
        if name not in arguments and parameter.default is inspect.Parameter.empty:
            raise ConfigError(
                f"{group}.{name} is not set, and {owner} has no default for it. "
                f"Add {group}.{name}=…"
            )
    return arguments


def _parameters(factory: Any) -> dict[str, inspect.Parameter]:
    """Name → parameter with a resolved annotation and the default of a fresh instance."""
    keyword = inspect.Parameter.KEYWORD_ONLY
    empty = inspect.Parameter.empty
    if dataclasses.is_dataclass(factory):
        hints = _hints(factory)
        found = {}
        for item in dataclasses.fields(factory):
            if not item.init:
                continue
            default: Any = empty
            if item.default is not dataclasses.MISSING:
                default = item.default
            elif item.default_factory is not dataclasses.MISSING:
                default = item.default_factory()
            annotation = hints.get(item.name, Any)
            found[item.name] = inspect.Parameter(
                item.name, keyword, default=default, annotation=annotation
            )
        return found
    try:
        signature = inspect.signature(factory)
    except (ValueError, TypeError):  # a class written in C: whatever it says itself
        return {"arguments": inspect.Parameter("arguments", inspect.Parameter.VAR_KEYWORD)}
    hints = _hints(factory.__init__ if isinstance(factory, type) else factory)
    return {
        name: p.replace(annotation=hints.get(name, Any)) for name, p in signature.parameters.items()
    }


def _hints(owner: Any) -> dict[str, Any]:
    try:
        return typing.get_type_hints(owner, include_extras=True)
    except (Exception, SystemExit):
        # A name that exists for type checkers only: the other annotations are still good.
        hints: dict[str, Any] = {}
        chain = owner.__mro__[::-1] if isinstance(owner, type) else (owner,)
        for link in chain:
            scope = vars(importlib.import_module(link.__module__))
            for name, text in getattr(link, "__annotations__", {}).items():
                try:
                    hints[name] = eval(text, scope) if isinstance(text, str) else text
                except (Exception, SystemExit):
                    hints[name] = Any
        return hints


# ---------------------------------------------------------------------------------- ranges


def _check_model(config: RunConfig) -> None:
    model = config.model
    sources = {
        key: getattr(model, key)
        for key in ("path", "architecture", "recipe")
        if getattr(model, key) is not None
    }
    if len(sources) != 1:
        found = " and ".join(f"model.{key}" for key in sources) or "none of them"
        raise ConfigError(
            f"exactly one of model.path, model.architecture and model.recipe must be set, got "
            f"{found}: it says where the policy starts. For any model of a hub or a folder use "
            f"model=hub model.path=NAME; else set the others to null, as in model.recipe=null."
        )
    if model.path is not None and not model.path.strip():
        raise ConfigError(
            f"model.path names no model, got {model.path!r}. Give a folder, such as the policy/ of "
            "a run, or a name of a hub; model=tiny needs neither."
        )
    if model.recipe is not None:
        from zoo.compose import check_recipe  # here, not at the top: it needs this module

        check_recipe(model.recipe)
    for key, value in (model.architecture or {}).items():
        count = isinstance(value, int) and not isinstance(value, bool) and key.startswith("num_")
        if count and value < 1:
            raise ConfigError(
                f"model.architecture.{key} must be at least 1, got {value}: a model without them "
                f"computes nothing. Try model.architecture.{key}=2."
            )
    if model.dtype == "float16":
        raise ConfigError(
            "model.dtype=float16 cannot be trained: squared gradients and train.adam_eps are 0 in "
            "it, so the first update ruins the weights. Use model.dtype=float32 with "
            "model.compute_dtype=bfloat16; rollout.dtype=float16 decodes in it."
        )
    dtypes = ("float32", "bfloat16", "float64")
    if model.dtype not in dtypes:
        raise ConfigError(
            f"model.dtype must be one of {', '.join(dtypes)}, got {model.dtype!r}."
            f"{did_you_mean(model.dtype, dtypes, 'model.dtype=')}"
        )


def _check_train(train: TrainConfig) -> None:
    at_least: dict[str, float] = {
        "steps": 0,  # evaluate the start and train nothing
        "groups": 1,
        "warmup_updates": 0,
        "weight_decay": 0,
        "micro_batch_tokens": 1,
        "checkpoint_every": 0,
        "keep_checkpoints": 1,
        "max_bad_updates": 0,
    }
    defaults = TrainConfig()
    _at_least("train", train, at_least, defaults)
    if train.max_row_tokens is not None and train.max_row_tokens < 2:
        raise ConfigError(
            _range(
                "train.max_row_tokens",
                train.max_row_tokens,
                "at least 2 (a prompt's token and a completion's) or null",
                "train.max_row_tokens=null",
            )
        )
    for key in ("lr", "critic_lr", "adam_eps", "max_grad_norm", "reward_timeout"):
        value = getattr(train, key)
        if value is not None and not (value > 0 and math.isfinite(value)):
            fallback = getattr(defaults, key)
            shown = "null" if fallback is None else f"{fallback:g}"
            raise ConfigError(
                _range(f"train.{key}", value, "a finite number above 0", f"train.{key}={shown}")
            )
    if not 0 <= train.lr_end <= 1:
        raise ConfigError(
            _range("train.lr_end", train.lr_end, "a share between 0 and 1", "train.lr_end=0.1")
        )
    if len(train.betas) != 2 or not all(0 <= beta < 1 for beta in train.betas):
        raise ConfigError(
            _range("train.betas", train.betas, "two numbers in [0, 1)", "train.betas=[0.9,0.95]")
        )
    if train.groups > MANY:
        raise ConfigError(
            _range("train.groups", train.groups, f"at most {MANY}", "train.groups=16")
        )
    for key in ("lr", "critic_lr"):
        if (getattr(train, key) or 0) * train.weight_decay >= 1:
            raise ConfigError(
                f"train.weight_decay={train.weight_decay:g} times train.{key}="
                f"{getattr(train, key):g} must be below 1: it is the share of a weight that an "
                "update takes away. Try train.weight_decay=0.01."
            )
    value = train.stop_at.value
    if not 0 <= value <= 1:
        raise ConfigError(
            _range(
                "train.stop_at.value", value, "a share between 0 and 1", "train.stop_at.value=0.5"
            )
        )
    if train.stop_at.metric is None and value != defaults.stop_at.value:
        raise ConfigError(
            f"train.stop_at.value={value:g} has no effect without train.stop_at.metric. Set "
            "train.stop_at.metric=heldout/greedy, or train.stop_at.value=0."
        )
    if train.stop_at.metric is not None and value == 0:
        raise ConfigError(
            f"train.stop_at.value is 0, which train.stop_at.metric={train.stop_at.metric} has "
            "reached at the first check. Try train.stop_at.value=0.5."
        )
    stop = {"problems": 1, "every": 1, "decay_steps": 0}
    _at_least("train.stop_at", train.stop_at, stop, defaults.stop_at)


def _check_evaluate_and_measure(config: RunConfig) -> None:
    evaluate, measure = config.evaluate, config.measure
    fresh = RunConfig()
    lows = {"every": 0, "problems": 1, "samples": 0, "texts_written": 0}
    _at_least("evaluate", evaluate, lows, fresh.evaluate)
    if evaluate.samples > MANY:
        raise ConfigError(
            _range("evaluate.samples", evaluate.samples, f"at most {MANY}", "evaluate.samples=4")
        )
    for k in evaluate.pass_k:
        if k < 1:
            raise ConfigError(_range("evaluate.pass_k", k, "at least 1", "evaluate.pass_k=[1]"))
        if k > evaluate.samples > 0:
            raise ConfigError(
                f"evaluate.pass_k must hold numbers from 1 to evaluate.samples="
                f"{evaluate.samples}, got {k}: pass@k needs k samples of a problem. Try "
                f"evaluate.samples={k} or evaluate.pass_k=[1]."
            )
    if "/" not in evaluate.best_metric:
        raise ConfigError(
            f"evaluate.best_metric must read SET/MEASURE, got {evaluate.best_metric!r}. "
            f"Try evaluate.best_metric=heldout/accuracy or heldout/greedy."
        )
    stop = config.train.stop_at.metric
    if stop is not None and "/" not in stop:
        raise ConfigError(
            f"train.stop_at.metric must read SET/MEASURE or be null, got {stop!r}. "
            f"Try train.stop_at.metric=heldout/greedy."
        )
    _at_least("measure", measure, {"rollouts_per_step": 0, "rollouts_every": 1}, fresh.measure)


def _at_least(group: str, values: Any, lows: Mapping[str, float], defaults: Any) -> None:
    for key, low in lows.items():
        value = getattr(values, key)
        if not (value >= low and math.isfinite(value)):
            raise ConfigError(
                _range(
                    f"{group}.{key}",
                    value,
                    f"at least {low}",
                    f"{group}.{key}={getattr(defaults, key)}",
                )
            )


# ---------------------------------------------------------------------------------- words


def _range(key: str, value: Any, expected: str, way_out: str) -> str:
    return f"{key} must be {expected}, got {_show(value)}. Try {way_out}."


def _unknown(key: str, value: Any, group: str, owner: str, known: list[str]) -> str:
    near = suggest_keys(key, known)
    text = f"there is no setting {key} (given: {_show(value)})"
    if group and owner != group:
        text += f" for {owner}"
    text += "."
    if near:
        text += f" Did you mean {' or '.join(near)}?"
    elif group:
        names = [one.removeprefix(f"{group}.") for one in known]
        text += f" {group} has: {', '.join(names) or 'no settings'}."
    else:
        text += f" A run has: {', '.join(_parameters(RunConfig))}."
    return text


def _names_a_folder(word: str) -> bool:
    plain_word = word not in ("", ".", "..") and word == word.strip()
    return plain_word and not set(word) & set("/\\\0\n")


def _prefixed(message: str, group: str) -> str:
    return message if message.startswith(f"{group}.") else f"{group}: {message}"


def _omegaconf_message(error: OmegaConfBaseException) -> str:
    key = getattr(error, "full_key", None) or "the configuration"
    text = first_line(error)
    if "Missing mandatory value" in text:
        return f"{key} is not set: it has no default (???). Add {key}=…"
    return f"{key}: {text}. Correct the value of {key}, or the interpolation ${{…}} in it."


def first_line(error: BaseException) -> str:
    """What an error says first, or its class where it says nothing."""
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")


def _show(value: Any, as_override: bool = False) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if as_override and isinstance(value, list):
        return "[" + ",".join(_show(item, True) for item in value) + "]"
    text = str(value) if as_override else repr(value)
    text = text if isinstance(value, str) else " ".join(text.split())  # a module's has lines
    return text if len(text) <= 80 else text[:77] + "…"


def _describe(members: tuple[Any, ...]) -> str:
    words = {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}
    named = [words.get(m) or getattr(m, "__name__", str(m)) for m in members if m is not type(None)]
    return " or ".join(named) + (" or null" if type(None) in members else "")


# ---------------------------------------------------------------------------------- plain values


def _fields(value: Any) -> dict[str, Any]:
    return {item.name: getattr(value, item.name) for item in dataclasses.fields(value)}


def _plain_value(value: Any, states: bool = False) -> Any:
    """`states` adds hashes of what no setting could tell: closures, and attributes of objects."""
    value = _native(value)
    if isinstance(value, enum.Enum):
        return value.name
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, DictConfig):
        return plain(value)
    if isinstance(value, Mapping):
        return {str(key): _plain_value(item, states) for key, item in value.items()}
    if isinstance(value, set | frozenset):
        return sorted((_plain_value(item, states) for item in value), key=str)
    if isinstance(value, list | tuple):
        return [_plain_value(item, states) for item in value]
    if isinstance(value, type) or inspect.isroutine(value):
        path = f"{value.__module__}.{value.__qualname__}"
        return f"{path}#{identity(value)}" if states and not findable(value) else path
    return _plain_instance(value, states)


def _plain_instance(value: Any, states: bool) -> dict[str, Any]:
    kind = type(value)
    target = {"_target_": _plain_value(kind, states)}
    if dataclasses.is_dataclass(kind):
        items = {f.name: getattr(value, f.name) for f in dataclasses.fields(kind) if f.init}
        values = {name: _plain_value(item, states) for name, item in items.items()}
        return values if kind.__module__ == "zoo.config" else target | values
    if isinstance(node := getattr(value, _NODE, None), Mapping):
        return {str(key): _plain_value(item, states) for key, item in node.items()}
    # A stranger's class made in Python: what it keeps under the names of its arguments.
    kept = {n: getattr(value, n) for n in _parameters(kind) if n in getattr(value, "__dict__", {})}
    told = {name: _plain_value(item, states) for name, item in kept.items()}
    state = hidden_state(value, kept) if states else ""
    return target | told | ({"#": state} if state else {})


def _drop(values: dict[str, Any], parts: list[str]) -> None:
    for part in parts[:-1]:
        values = values[part]
    values.pop(parts[-1], None)
