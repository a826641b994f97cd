"""From overrides to one configuration: hydra's search path, and its errors in one short block."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, Override
from hydra.core.plugins import Plugins
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from hydra.plugins.search_path_plugin import SearchPathPlugin
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from zoo.config import ConfigError
from zoo.instantiate import (
    ELSEWHERE,
    all_keys,
    did_you_mean,
    first_line,
    nearest,
    suggest_keys,
)

CONFIG_NAME = "config"
ENTRY_POINTS = "zoo.conf"  # group in which an installed package names its folder of options
FOLDERS = "ZOO_CONFIG_DIRS"  # more folders of options, as in PATH; what --config-dir adds to
GROUPS = (
    "algorithm",
    "data",
    "reward",
    "rollout",
    "model",
    "train",
    "evaluate",
    "measure",
    "experiment",
)

_OF_ONE = GROUPS[:-1]  # of recipes there may be several
_CHOICES = ("algorithm", "data", "model", "reward")  # what a job is about
_MODULES = ("pkg://", "structured://")  # on hydra's search path
_WORD_ONLY = "a plain word"  # who keeps an experiment that is no recipe, in hydra's store
_PLAIN_WORD = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")


@dataclass(frozen=True)
class Option:
    """One choice of a group, with the first comment of its file."""

    group: str
    name: str
    description: str


def config_dir() -> Path:
    """The folder of the options that come with zoo: beside the package, or inside it in a wheel.

    Raises:
        ConfigError: the installation has neither.
    """
    package = Path(__file__).resolve().parent
    for folder in (package / "conf", package.parent / "conf"):
        if (folder / f"{CONFIG_NAME}.yaml").is_file():
            return folder
    raise ConfigError(
        f"zoo's own options are missing: neither {package / 'conf'} nor {package.parent / 'conf'} "
        f"holds {CONFIG_NAME}.yaml. Install zoo again, or run from a complete checkout."
    )


def compose(
    overrides: Sequence[str], config_name: str = CONFIG_NAME, of_sweep: bool = False
) -> DictConfig:
    """The configuration that these overrides describe, values not yet checked.

    Args:
        of_sweep: they are a job of zoo's own launcher, which runs no sweep that a file describes.
    Raises:
        ConfigError: an unknown option or key, a value that cannot be read, or a missing folder.
    """
    with hydra_session():
        return compose_here(overrides, config_name, of_sweep)


def compose_here(
    overrides: Sequence[str], config_name: str = CONFIG_NAME, of_sweep: bool = False
) -> DictConfig:
    """`compose` inside an open `hydra_session`."""
    with translated(overrides):
        overrides = prepare(overrides, config_name)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module="hydra")
            try:
                cfg = hydra_compose(config_name, overrides=overrides, return_hydra_config=True)
            except HydraException:
                if (filled := fill_in(overrides)) == overrides:
                    raise
                cfg = hydra_compose(config_name, overrides=filled, return_hydra_config=True)
        _check_choices(cfg)
        _check_mode(cfg.hydra, of_sweep)
        with open_dict(cfg):
            del cfg["hydra"]
        return cfg


def _check_choices(cfg: DictConfig) -> None:
    """Refuse options of which another of the same name is hidden, and recipes that set nothing."""
    folders = _folders(cfg.hydra.searchpath)
    for group, names in cfg.hydra.runtime.choices.items():
        for name in names if OmegaConf.is_list(names) else [names]:
            homes = _homes(f"{group}/{name}", folders) if group in GROUPS else []
            if len({path.read_bytes() for path in homes}) > 1:
                raise ConfigError(
                    f"{group}={name} is the name of several options: "
                    f"{', '.join(map(str, homes))}. Give yours a name of its own."
                )
            if group == "experiment" and homes and OmegaConf.is_dict(cfg.get("experiment")):
                raise ConfigError(
                    f"{homes[0]} sets nothing of the run: a recipe begins with the line "
                    f"`# @package _global_`. Add it."
                )


def _check_mode(hydra: DictConfig, of_sweep: bool) -> None:
    """Refuse what asks hydra for a sweep and would be passed over in silence."""
    if hydra.mode == RunMode.MULTIRUN:
        raise ConfigError(
            "hydra.mode is MULTIRUN, and zoo runs a sweep only where -m asks for it. Take the key "
            "out of the recipe or the command, and write zoo -m …"
        )
    if not of_sweep:
        return
    for group in ("launcher", "sweeper"):
        if (name := hydra.runtime.choices.get(f"hydra/{group}")) != "basic":
            launcher = f"={name}" if group == "launcher" else "=joblib"
            raise ConfigError(
                f"hydra/{group} is {name}, and this sweep runs by zoo's own launcher, which has no "
                f"use for it. Write zoo -m hydra/launcher{launcher} … to run by hydra's, or take "
                f"hydra/{group} out of the recipe or the command."
            )
    for key, value in hydra.sweeper.items():
        if key == "_target_" or value is None or value == {}:
            continue
        instead = "--jobs N"
        if key == "params":
            instead = " ".join(f"{name}={values}" for name, values in value.items())
        raise ConfigError(
            f"hydra.sweeper.{key} is set (to {value}), which zoo's own launcher does not read. "
            f"Take it out, and write zoo -m {instead} …"
        )


@contextmanager
def hydra_session() -> Iterator[None]:
    """hydra on zoo's search path; a session of the caller's own is put back at the end."""
    register()
    state = GlobalHydra.instance()
    previous, state.hydra = state.hydra, None
    try:
        with initialize_config_dir(str(config_dir()), job_name="zoo", version_base="1.3"):
            yield
    finally:
        GlobalHydra.instance().hydra = previous


def register() -> None:
    """Put the folders of others on hydra's search path, in whatever way it starts."""
    plugins = Plugins.instance()
    if MoreOptions not in plugins.discover(SearchPathPlugin):
        plugins.register(MoreOptions)


class MoreOptions(SearchPathPlugin):
    """Options that do not come with zoo: folders of `--config-dir` and of installed packages."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        for name, folder in more_folders():
            search_path.append(provider=name, path=f"file://{folder}")


def more_folders() -> list[tuple[str, Path]]:
    """(provider, folder) of the options on zoo's search path that are not zoo's own.

    The environment variable carries `--config-dir` to the processes that a run starts: the jobs
    of a sweep, and the recipe behind a model.

    Raises:
        ConfigError: a folder does not exist.
    """
    named = [folder for folder in os.environ.get(FOLDERS, "").split(os.pathsep) if folder]
    for folder in named:
        _check_folder(folder)
    return [(FOLDERS, Path(folder).absolute()) for folder in named] + installed_folders()


def installed_folders() -> list[tuple[str, Path]]:
    """(name, folder) of every entry point in `zoo.conf`: a package, or package:subfolder."""
    return [(name, found) for name, found in _installed() if isinstance(found, Path)]


def broken_packages() -> list[str]:
    """What is wrong with each entry point in `zoo.conf` behind which there is no folder."""
    return [found for _, found in _installed() if isinstance(found, str)]


def _installed() -> Iterator[tuple[str, Path | str]]:
    for point in importlib.metadata.entry_points(group=ENTRY_POINTS):
        package, _, inside = point.value.partition(":")
        reason, folders = "which is no folder of options", []
        try:
            folders = [place / inside.replace(".", "/") for place in _places(package)]
        except (Exception, SystemExit) as error:  # the package around it runs as it is imported
            reason = f"which cannot be imported ({type(error).__name__}: {first_line(error)})"
        yield (
            point.name,
            next((one for one in folders if one.is_dir()), None)
            or f"the installed package behind the entry point {point.name!r} ({ENTRY_POINTS}) "
            f"names {point.value!r}, {reason}. Correct its entry point, or uninstall it.",
        )


def _places(package: str) -> list[Path]:
    spec = importlib.util.find_spec(package)
    return [Path(place) for place in spec.submodule_search_locations or []] if spec else []


def _places_named(package: str) -> list[Path]:
    """Where the package of a `pkg://PACKAGE` is; a ConfigError where it is nowhere."""
    reason, (scheme, _, name) = "which is no package", package.partition("://")
    try:
        if scheme == "structured":  # a module, and no folders
            importlib.import_module(name)
            return []
        if name and (places := _places(name)):
            return places
    except (Exception, SystemExit) as error:  # the package around it runs as it is imported
        reason = f"which cannot be imported ({type(error).__name__}: {first_line(error)})"
    raise ConfigError(
        f"hydra.searchpath names {package!r}, {reason}. Give a package that holds algorithm/, "
        "data/, reward/, … and can be imported here, as in pkg://mine.conf, or a folder."
    )


def prepare(overrides: Sequence[str], config_name: str = CONFIG_NAME) -> list[str]:
    """The overrides as hydra takes them, once folders and names of experiments are settled.

    `experiment=NAME` takes a recipe of conf/experiment. A plain word that is no recipe, and no
    near miss of one, only names the folder of the output; a command that chooses nothing else is
    told so. `reward=null` leaves the group empty, which hydra writes `~reward`.

    Raises:
        ConfigError: a folder on hydra.searchpath does not exist.
        HydraException: an override that cannot be parsed.
    """
    parser = OverridesParser.create()
    given = parser.parse_overrides(list(overrides))
    overrides = [_as_text(text, one) for text, one in zip(overrides, given, strict=True)]
    parsed = parser.parse_overrides(overrides)
    extra: list[str] = []
    for override in parsed:
        if override.key_or_group == "hydra.job.chdir" and override.value() is True:
            raise ConfigError(
                "hydra.job.chdir=true would start the jobs in other folders, where relative paths "
                "(output, files of data) mean others. Leave it out; output=DIR says where runs go."
            )
        if override.key_or_group == "hydra.launcher.timeout_min":
            minutes = override.value()
            if isinstance(minutes, int | float) and minutes < 1:
                raise ConfigError(
                    f"{override.input_line} leaves a job no time: it is the minutes that each may "
                    "run. Give at least 1, or leave it out for 60."
                )
        if f"{override.key_or_group}.".startswith("hydra.sweeper.params."):
            raise ConfigError(
                f"{override.input_line}: values to run through stand on the command line by "
                "themselves. Write zoo -m seed=0,1 …"
            )
        group = override.key_or_group
        if group in _OF_ONE and isinstance(override.value(), list):  # hydra would mix them
            listed = ",".join(map(str, _as_list(override)))
            raise ConfigError(
                f"{override.input_line}: a run has one {group}. Write {group}=NAME, or zoo -m "
                f"{group}={listed} for a run of each."
            )
        if override.key_or_group == "hydra.searchpath":
            extra = [str(folder) for folder in _as_list(override)]
            for folder in extra:
                _check_folder(folder)
    wanted = [
        name
        for override in parsed
        if override.key_or_group == "experiment"
        for name in _as_list(override)
    ]
    recipes = _recipes(extra) if wanted else set()
    chooses = {*map(str, wanted)} & recipes or config_name != CONFIG_NAME
    chooses = chooses or {one.key_or_group.partition(".")[0] for one in parsed} & {*_CHOICES}
    store = ConfigStore.instance()
    for name in wanted:
        if (
            not isinstance(name, str)
            or name in recipes
            or not _PLAIN_WORD.fullmatch(str(name))
            or nearest(str(name), recipes)
        ):
            continue  # a recipe, or a mistake that hydra's message is about
        if _is_first(name, store):
            for problem in broken_packages():  # it might be a recipe of theirs
                warnings.warn(f"experiment={name} only names the output: {problem}", stacklevel=1)
            if not chooses:
                warnings.warn(
                    f"experiment={name} is no recipe: it only names the folder; "
                    f"{', '.join(_CHOICES[:-1])} and {_CHOICES[-1]} are the defaults",
                    stacklevel=1,
                )
        node = {"experiment": str(name)}
        store.store(str(name), node, "experiment", "_global_", _WORD_ONLY)
    return _emptied(overrides)


def _emptied(overrides: Sequence[str]) -> list[str]:
    """The overrides with `~reward` for `reward=null`."""
    empty = {f"{group}=null": [f"~{group}"] for group in GROUPS} | {"experiment=null": []}
    return [new for override in overrides for new in empty.get(override, [override])]


def _is_first(experiment: str, store: ConfigStore) -> bool:
    """Whether no job or process of this command has met the name before."""
    from zoo.claim import RUN_DIR_FILE

    alone = RUN_DIR_FILE not in os.environ and os.environ.get("RANK", "0") == "0"
    return alone and f"{experiment}.yaml" not in store.repo.get("experiment", {})


def _as_text(text: str, override: Override) -> str:
    """Names may look like numbers: experiment=2026 and name=1e5 are taken as they are written."""
    key, _, value = text.partition("=")
    plain = isinstance(override.value(), int | float) and _PLAIN_WORD.fullmatch(value)
    return f"{key}='{value}'" if plain and key in ("experiment", "name", "output") else text


def fill_in(overrides: Sequence[str]) -> list[str]:
    """The overrides, with hydra's + before keys of a mapping that is there to be filled in.

    `data.columns.prompt=question` and `data.columns={prompt: question}` are such: `columns` is
    `{}`, and its keys are the user's.
    """

    def may_fill(one: str) -> bool:
        key, _, value = one.partition("=")
        return one[:1] not in "+~" and (key.count(".") > 1 or value.lstrip().startswith("{"))

    deep = [one for one in overrides if may_fill(one)]
    if not deep:
        return list(overrides)
    values = _chosen(overrides)

    def is_open(key: str) -> bool:
        node: Any = values
        found = []
        for part in key.split("."):
            node = node.get(part) if isinstance(node, dict) else None
            found.append(node)
        return {} in found[-2:]

    opened = {one for one in deep if is_open(one.partition("=")[0])}
    return [f"+{one}" if one in opened else one for one in overrides]


def take_folders(overrides: Sequence[str]) -> tuple[list[str], list[str]]:
    """(the other overrides, the folders given as `hydra.searchpath=[…]`); pkg:// is left to hydra.

    Raises:
        ConfigError: a folder does not exist, or the list cannot be read.
    """
    rest: list[str] = []
    folders: list[str] = []
    for text in overrides:
        if text.lstrip("+").partition("=")[0] != "hydra.searchpath":
            rest.append(text)
            continue
        with translated(overrides):
            named = [str(one) for one in _as_list(OverridesParser.create().parse_override(text))]
        if any("://" in one and not one.startswith("file://") for one in named):
            rest.append(text)
            continue
        for folder in named:
            _check_folder(folder)
        folders += [folder.removeprefix("file://") for folder in named]
    return rest, folders


def check_recipe(name: str) -> None:
    """Refuse a `model.recipe` that is no recipe, of which `experiment=NAME` would make a plain run.

    The process that makes the start finds options as this one does: those of zoo, of installed
    packages, and of the folders in the environment variable.

    Raises:
        ConfigError: names the recipes that there are.
    """
    if _homes(f"experiment/{name}", _folders()):
        return
    names = sorted(_recipes([]))
    raise ConfigError(
        f"model.recipe={name}: there is no such recipe.{did_you_mean(name, names, 'model.recipe=')}"
        f" Options: {', '.join(names)}. One of yours is DIR/experiment/NAME.yaml, found by "
        f"--config-dir DIR or the environment variable {FOLDERS}."
        + "".join(f" But {problem}" for problem in broken_packages())
    )


def _recipes(searchpath: Sequence[str]) -> set[str]:
    folders = _folders(searchpath)
    return {path.stem for folder in folders for path in folder.glob("experiment/*.yaml")}


def _folders(searchpath: Sequence[str] = ()) -> list[Path]:
    """Where options lie, in the order of the search; `searchpath` is hydra's own setting."""
    folders = [config_dir(), *(folder for _, folder in more_folders())]
    for one in searchpath:
        if one.startswith(_MODULES):
            folders += _places_named(one)
        else:
            folders.append(Path(one.removeprefix("file://")))
    return folders


def _homes(config: str, folders: Sequence[Path]) -> list[Path]:
    """The files that hold this option, the one that hydra takes first."""
    paths = [folder / f"{config}.yaml" for folder in folders]
    return [path for path in paths if path.is_file()]


def check_config_dir(folder: str) -> None:
    """Refuse what hydra's own setting takes and `--config-dir` does not.

    Raises:
        ConfigError: a package.
    """
    if folder.startswith(_MODULES):
        raise ConfigError(
            f"--config-dir takes folders, and {folder} is a package. A run takes it as "
            f"hydra.searchpath=[{folder}]."
        )


def _check_folder(folder: str) -> None:
    if folder.startswith(_MODULES):
        _places_named(folder)
        return
    path = Path(folder.removeprefix("file://"))
    if not path.is_dir():
        if path.exists():
            raise ConfigError(
                f"{str(path)!r} is a file, and options lie in a folder. Give one that holds "
                "algorithm/, data/, reward/, …"
            )
        near = did_you_mean(path.name, _names(path.parent), f"{path.parent}/")
        raise ConfigError(
            f"the folder of options {str(path)!r} does not exist (working directory: "
            f"{Path.cwd()}).{near} Give a folder that holds algorithm/, data/, reward/, …"
        )


def _names(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()] if folder.is_dir() else []


def _as_list(override: Override) -> list[Any]:
    value = override.value()
    if isinstance(value, ChoiceSweep):
        value = value.list
    values = value if isinstance(value, list) else [] if value is None else [value]
    return [str(one) if type(one).__name__ == "QuotedString" else one for one in values]


# ---------------------------------------------------------------------------------- what there is


def option_of(group: str, values: Mapping[str, Any]) -> tuple[str | None, dict[str, Any]]:
    """(the option that is nearest to these values, key → value of those that it has otherwise).

    The option is None where none has their `_target_`.
    """
    target, given = str(values.get("_target_")), dict(_leaves(values))
    found = []
    with hydra_session():
        for option in options(group):
            text = b"".join(
                file.read_bytes() for file in _homes(f"{group}/{option.name}", _folders())[:1]
            )
            if text and target.encode() not in text and b"defaults" not in text:
                continue
            with suppress(ConfigError):  # a broken one
                own = OmegaConf.to_container(compose_here([f"{group}={option.name}"])[group])
                if isinstance(own, dict) and own.get("_target_") == target:
                    leaves = dict(_leaves(own))
                    # What an option leaves out is as its class has it.
                    said = {k: v for k, v in given.items() if k.partition(".")[0] in own}
                    other = {k: v for k, v in said.items() if k not in leaves or leaves[k] != v}
                    denied = sum(k not in given or given[k] != v for k, v in leaves.items())
                    # Fewest settings that are otherwise; of those, most that are alike.
                    found.append(((denied, denied - len(leaves)), option.name, other))
    if not found:
        return None, {}
    _, name, other = min(found, key=lambda one: one[0])
    return name, other


def target_of(group: str, name: str) -> str | None:
    """The `_target_` of an option, or None where there is no such option or it has none."""
    with suppress(OmegaConfBaseException, yaml.YAMLError, ValueError, OSError, RecursionError):
        for file in _homes(f"{group}/{name}", _folders())[:1]:
            values = OmegaConf.to_container(OmegaConf.load(file))
            target = values.get("_target_") if isinstance(values, dict) else None
            return target if isinstance(target, str) else None
    return None


def _leaves(values: Mapping[Any, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{before}{key}.")
        else:
            yield f"{before}{key}", value


def options(group: str) -> list[Option]:
    """All choices of a group, in an open `hydra_session`; the folders on the path are searched."""
    loader = GlobalHydra.instance().config_loader()
    found, folders = [], _folders()
    for name in _offered(group, loader.get_group_options(group, ObjectType.CONFIG)):
        files = _homes(f"{group}/{name}", folders)
        found.append(Option(group, name, _description(files[0]) if files else ""))
    return found


def _offered(group: str, names: Sequence[str]) -> list[str]:
    """The options among hydra's, without the words that this command calls its experiments by."""
    kept = ConfigStore.instance().repo.get(group, {})
    words = {one.removesuffix(".yaml") for one, node in kept.items() if _is_word_only(node)}
    return [name for name in names if name not in words]


def _is_word_only(node: Any) -> bool:
    return getattr(node, "provider", None) == _WORD_ONLY


def _description(path: Path) -> str:
    # A file that is no text is told of where it is chosen: the others can be listed all the same.
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        if not line.startswith("#"):
            break
        text = line.lstrip("# ").strip()
        if text and not text.startswith("@package"):
            return text
    return ""


# ---------------------------------------------------------------------------------- errors


@contextmanager
def translated(overrides: Sequence[str]) -> Iterator[None]:
    """Errors of hydra and omegaconf inside become ConfigErrors of a few lines."""
    try:
        yield
    except ConfigError:
        raise
    except (HydraException, OmegaConfBaseException, yaml.YAMLError) as error:
        raise ConfigError(_explain(error, overrides)) from error
    except (ValueError, OSError) as error:
        # Of hydra's own: a group override that is no text, a file that cannot be read.
        raise ConfigError(_explain_other(error, overrides)) from error
    except RecursionError as error:
        file = _first_bad(overrides, _is_endless)
        raise ConfigError(
            f"{file or 'an option'} goes round in circles: its `defaults` name the file itself, or "
            "a yaml anchor (&a) holds itself (*a). Take that line out."
        ) from error


def _explain(error: Exception, overrides: Sequence[str]) -> str:
    text = str(error).strip()
    if isinstance(error, OverrideParseException):
        return _explain_syntax(error)
    if isinstance(error, MissingConfigException):
        return _explain_missing(error)
    if isinstance(error, yaml.YAMLError):
        return _explain_yaml(error)
    if match := re.match(r"Could not override '([^']+)'", text):
        return _explain_unknown_key(match[1], overrides)
    if match := re.match(r"Could not append to config. An item is already at '([^']+)'", text):
        given = _find(match[1], overrides, "+")
        return f"{given}: {match[1]} exists already. Write it without the +: {given.lstrip('+')}"
    if match := re.match(r"Multiple values for (\S+)\.|(\S+) appears more than once", text):
        key = match[1] or match[2]
        given = _find(key, overrides, "+")
        return f"{given}: {key} has a choice already. Write it without the +, as in " + (
            f"{given.lstrip('+')}."
        )
    if match := re.match(r"Could not delete (?:from config. )?'([^']+)'", text):
        key, known = match[1].split("=")[0], _known_keys(overrides)
        if key in known:
            return f"~{key}: {key} is null, so there is nothing to take away. Leave ~{key} out."
        near = suggest_keys(key, known)
        hint = f" Did you mean ~{near[0]}?" if near else ""
        return f"~{key}: there is no {key} to take away.{hint} See `zoo --cfg job`."
    if match := re.match(r"Ambiguous value for argument '(.+?)'\n", text):
        key, _, value = match[1].partition("=")
        as_list = "" if key in _OF_ONE else f"; for a list write {key}=[{value}]"
        return (
            f"{match[1]} gives several values to a single run. To run them all add -m: "
            f"zoo -m {match[1]} …{as_list}."
        )
    if match := re.match(r"Sweep parameters '(.+?)' requires", text):
        return f"{match[1]} is a sweep. Add -m: zoo -m {match[1]} …"
    if match := re.search(r"Override (\S+) looks like a config group .* '([^']+)' does not", text):
        return _explain_unknown_key(match[2], overrides)
    if match := re.match(r"force-add of config groups is not supported: '(.+)'", text):
        return f"{match[1]}: a group takes no +. Write {match[1].lstrip('+')}."
    if match := re.match(r"Error merging override (.+)", text):
        cause = first_line(error.__cause__ or error)
        key = match[1].lstrip("+~").split("=")[0]
        parent = key.rsplit(".", 1)[0]
        if key.startswith("hydra."):
            return (
                f"{match[1]} cannot be applied: {cause}. Correct the value; hydra's own settings "
                f"are shown by `zoo --cfg hydra --package {parent} …`."
            )
        return (
            f"{match[1]} cannot be applied: {cause}. {parent} holds one value and no keys below "
            f"it, or another kind; see it with `zoo --cfg job --package {parent.split('.')[0]}`."
        )
    if isinstance(error, OmegaConfBaseException):
        key = getattr(error, "full_key", "")
        if not key:  # of the whole: the override that asks for it is known by its ${…}
            asked = re.search(r"'([^']+)'", text)
            wanted = "${" + (asked[1] if asked else "")
            key = next((one for one in overrides if wanted in one), "the configuration")
        return f"{key}: {first_line(error)}. Correct the value of {key.split('=')[0]}."
    lines = [line.strip() for line in text.splitlines() if line.strip()][:4]
    cause = f" ({first_line(error.__cause__)})" if error.__cause__ else ""
    return (
        "the configuration cannot be composed: " + " ".join(lines) + cause + ". "
        "See `zoo --help` for the groups and their options."
    )


def _explain_other(error: Exception, overrides: Sequence[str]) -> str:
    text = first_line(error)
    if nameless := [one for one in overrides if one.lstrip("+~").startswith("=")]:
        return f"{nameless[0]} has no key in front of the =. Write key=value, as in seed=3."
    if text.startswith("Config group override"):
        for given in overrides:
            group = given.split("=")[0].lstrip("+~")
            if group in GROUPS and _option_of(given) is None:
                return f"{given}: {group} is chosen by the name of an option. {_choices(group)}"
            if group.split("/")[0] == "hydra":
                return f"{given}: leave it out. Single settings are hydra.NAME=VALUE."
    if isinstance(error, UnicodeDecodeError):
        file = _first_bad(overrides, _is_no_text)
        return f"{file or 'an option'} is not UTF-8: {text}. Save it as UTF-8."
    if text.startswith("Invalid loaded object type"):
        file = _first_bad(overrides, _is_no_mapping)
        return f"{file or 'an option'} holds no settings (KEY: VALUE, one a line). {text}."
    if text.startswith("Invalid defaults list"):
        return f"{text}. Write `defaults:` and below it one `- NAME` a line."
    if text.startswith("n_jobs"):
        return f"hydra.launcher.n_jobs: {text}. Try hydra.launcher.n_jobs=2; -1 takes all cores."
    return f"{text}. Given: {' '.join(overrides)}"


def _first_bad(overrides: Sequence[str], is_bad: Callable[[Path], bool]) -> Path | None:
    """The first file of options that do not come with zoo that is bad; chosen ones come first."""
    paths = [
        path
        for _, folder in more_folders()
        for group in GROUPS
        for path in folder.glob(f"{group}/**/*.yaml")
    ]
    paths.sort(key=lambda path: f"{path.parent.name}={path.stem}" not in overrides)
    return next((path for path in paths if path.is_file() and is_bad(path)), None)


def _is_no_text(path: Path) -> bool:
    try:
        path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return True
    return False


def _is_no_mapping(path: Path) -> bool:
    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError):
        return False
    return found is not None and not isinstance(found, dict)


def _is_endless(path: Path) -> bool:
    try:
        values = OmegaConf.to_container(OmegaConf.load(path))
    except RecursionError:
        return True
    except (OmegaConfBaseException, yaml.YAMLError, ValueError, OSError):
        return False
    listed = values.get("defaults") if isinstance(values, dict) else None
    return isinstance(listed, list) and path.stem in listed


def _option_of(override: str) -> str | None:
    value = override.partition("=")[2]
    return value if _PLAIN_WORD.fullmatch(value) and not value[0].isdigit() else None


def _explain_syntax(error: OverrideParseException) -> str:
    given = error.override
    if "=" not in given and not given.startswith("~"):
        return explain_bare_word(given)
    reason = error.message.splitlines()[0].partition(" expecting ")[0].strip().rstrip(".")
    if reason.startswith("Lexer"):  # the class of the exception, with the override repeated
        reason = "a character, a space or a quote without its pair that has no meaning there"
    elif given.rstrip().endswith(","):
        reason = "it ends with a comma, behind which a value is missing"
    key = given.split("=")[0]
    return (
        f"{given!r} cannot be read: {reason}. Write key=value without spaces around the =; "
        f"lists as {key.strip()}=[1,2]; a text with special characters in two pairs of quotes, as "
        f"""in {key.strip()}="'a b'"."""
    )


def explain_bare_word(word: str) -> str:
    """What to do about an argument that is neither key=value nor a subcommand."""
    group = next((g for g in GROUPS if word in {o.name for o in _options_quietly(g)}), None)
    if group is not None:
        return f"{word!r} is no key=value. Did you mean {group}={word}?"
    if word in GROUPS:
        return f"{word!r} is no key=value. {_choices(word)}"
    homes = {option.name: g for g in GROUPS for option in _options_quietly(g)}
    if near := nearest(word, homes):
        hint = f" Did you mean {homes[near[0]]}={near[0]}?"
    else:
        keys = suggest_keys(word, _known_keys([]))
        hint = f" Did you mean {keys[0]}=…?" if keys else ""
    return f"{word!r} is no key=value.{hint} `zoo --help` shows what there is."


def is_option_or_group(word: str) -> bool:
    """Whether a bare word names a group, or an option of one."""
    return word in GROUPS or any(word == o.name for g in GROUPS for o in _options_quietly(g))


def _explain_missing(error: MissingConfigException) -> str:
    missing = error.missing_cfg_file or ""
    group, _, name = missing.rpartition("/")
    if (first := missing.partition("/"))[0] in GROUPS:
        group, _, name = first
    if not group or "Cannot find primary config" in str(error):
        return (
            f"there is no configuration {missing!r} (--config-name). The one of zoo is called "
            f"{CONFIG_NAME!r}; leave the option out for it."
        )
    first = str(error).strip().splitlines()[0]
    where = re.match(r"In '([^']+)'", first)
    inside = f" (asked for in {where[1]}.yaml)" if where and where[1] != CONFIG_NAME else ""
    names = error.options
    if names is None:  # asked for by a file: hydra lists them for the command line alone
        names = [option.name for option in _options_quietly(group)]
    names = _offered(group, names)
    near = did_you_mean(name, names, f"{group}=")
    for file in (folder / f"{missing}.yml" for folder in _folders()):
        if file.is_file():
            near = f" {file} is passed over: options end in .yaml. Rename it."
    listed = f" Options: {', '.join(names)}." if names else f" The group {group} has no options."
    if group in GROUPS:
        listed += "".join(f" But {problem}" for problem in broken_packages())
    if group == "hydra/launcher" and name in ("joblib", "submitit_local", "submitit_slurm"):
        near, inside = " It comes with an extra: pip install 'zoo-rl[sweep]'.", ""
    return f"there is no option {group}={name}{inside}.{near}{listed}"


def _explain_yaml(error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None)
    place = f"{mark.name}, line {mark.line + 1}" if mark else getattr(error, "name", "a yaml file")
    problem = getattr(error, "problem", None) or getattr(error, "reason", first_line(error))
    return f"{place} is not valid yaml: {problem}. Correct that line."


def _explain_unknown_key(key: str, overrides: Sequence[str]) -> str:
    given = _find(key, overrides)
    sign, value = "", given.partition("=")[2]
    group, _, leaf = key.partition(".")
    taken = [one for one in overrides if one.split("=")[0] == f"~{key}"]
    if taken and any(one.split("=")[0] == key for one in overrides):
        return f"{taken[0]} takes {key} out, and {key}= gives it a value: leave one of them out."
    if group == "hydra":
        return f"there is no setting {key} of hydra (given: {given}). See `zoo --cfg hydra`."
    if key in GROUPS and value in {option.name for option in _options_quietly(key)}:
        return (
            f"{given}: the configuration of --config-name has no choice of {key}. Let its file "
            f"begin with the line `defaults: [{CONFIG_NAME}, _self_]`, which takes zoo's own."
        )
    if key in GROUPS:  # hydra takes a value that is no word for one of a setting
        return f"{given}: {key} is chosen by the name of an option. {_choices(key)}"
    chosen = _chosen(overrides).get(group)
    if leaf and group in GROUPS and chosen is not None and not isinstance(chosen, dict):
        return (
            f"{given}: {group} is {chosen!r} here and holds no settings. Take `{group}: {chosen}` "
            "out of the recipe or the option that says so."
        )
    if key == "model.architecture":
        return (
            f"{given} has a setting that the model's yaml has not. Write +{given} where the "
            "transformers config of that model_type has it."
        )
    keys = [one for one in _known_keys(overrides) if one != key]
    if key == "data.parts" and isinstance(chosen, dict) and "parts" in chosen:
        return (
            f"{given} names a part that the mixture has not. Add it with +data.parts.NAME={{…}}, "
            "and leave others out with ~data.parts.NAME; ~data.parts +data.parts={…} has yours "
            "alone."
        )
    part = re.match(r"(data\.parts\.[^.]+)\.([^.]+)(\.)?", key)
    of_reward = part and f"{part[1]}.weight" in keys and nearest(part[2], ["reward"])
    if part and of_reward and not (part[3] and f"{part[1]}.reward" in keys):
        from zoo.data.mixture import how_to_reward

        return f"there is no setting {key} (given: {given}). {how_to_reward(part[1], value)}"
    near = suggest_keys(key, keys)
    if "." not in key and (group_near := nearest(key, GROUPS)):
        near = group_near
    text = f"there is no setting {key} (given: {given})."
    owners = [o.name for o in _options_quietly(group) if leaf and _has(o, leaf)]
    if owners and ELSEWHERE.get(leaf) not in near:
        return f"{text} It belongs to {' and '.join(f'{group}={one}' for one in owners[:4])}." + (
            f" Here {group} has: {_settings(group, keys)}." if _settings(group, keys) else ""
        )
    near = [one for one in near if one != "model.architecture"]  # that holds settings itself
    if near:
        return f"{text} Did you mean {' or '.join(f'{sign}{one}={value}' for one in near)}?"
    known = _settings(group, keys) if leaf else ""
    if key.startswith("model.architecture."):
        return f"{text} Write +{given} where the transformers config of that model_type has it."
    if known:
        return f"{text} {group} has: {known}."
    return f"{text} `zoo --help` shows the groups, `zoo --cfg job` every setting."


def _settings(group: str, keys: Sequence[str]) -> str:
    return ", ".join(one[len(group) + 1 :] for one in keys if one.startswith(f"{group}."))


def _has(option: Option, leaf: str) -> bool:
    files = _homes(f"{option.group}/{option.name}", _folders())
    if not files:
        return False
    try:
        values = OmegaConf.to_container(OmegaConf.load(files[0]))
    except (OmegaConfBaseException, yaml.YAMLError, ValueError, OSError, RecursionError):
        return False
    return isinstance(values, dict) and leaf in values


def _options_quietly(group: str) -> list[Option]:
    """Options for a suggestion: a message about one mistake must not die of a second one."""
    try:
        if GlobalHydra.instance().is_initialized():
            return options(group)
        with hydra_session():
            return options(group)
    except (HydraException, OSError, ConfigError):
        return []


def _choices(group: str) -> str:
    names = ", ".join(option.name for option in _options_quietly(group))
    return f"Write {group}=NAME with one of: {names}."


def _known_keys(overrides: Sequence[str]) -> list[str]:
    """Every key of the configuration with the choices of groups in `overrides` made."""
    return all_keys(_chosen(overrides))


def _chosen(overrides: Sequence[str]) -> dict[str, Any]:
    """The configuration with the choices of groups in `overrides` made, and nothing else."""
    chosen = [
        one for one in overrides if one.lstrip("+").split("=")[0] in (*GROUPS, "hydra.searchpath")
    ]
    for attempt in (_emptied(chosen), []):
        try:
            if GlobalHydra.instance().is_initialized():
                cfg = hydra_compose(CONFIG_NAME, overrides=attempt)
            else:
                with hydra_session():
                    cfg = hydra_compose(CONFIG_NAME, overrides=attempt)
            values = OmegaConf.to_container(cfg, resolve=False)
            if isinstance(values, dict):
                return {str(key): value for key, value in values.items()}
        except (HydraException, OmegaConfBaseException, ValueError, OSError, RecursionError):
            continue
    return {}


def _find(key: str, overrides: Sequence[str], sign: str = "") -> str:
    """The override of this key, one that begins with the sign if any does; else the key."""
    for one in sorted(overrides, key=lambda one: not one.startswith(sign)):
        if one.lstrip("+~").split("=")[0].split("@")[0] == key:
            return one
    return key


def put_working_directory_on_path() -> None:
    """So that `_target_: mine.Mine` finds mine.py in the folder where zoo is started.

    Raises:
        ConfigError: that folder is gone.
    """
    try:
        here = os.getcwd()
    except OSError as error:
        raise ConfigError(
            f"the working directory cannot be found ({error.strerror}): was it deleted? Change to "
            "one that is there (cd FOLDER)."
        ) from None
    if here not in sys.path and "" not in sys.path:
        sys.path.insert(0, here)
