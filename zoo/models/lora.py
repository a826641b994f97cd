"""Low-rank adapters (LoRA): little that is trained, on weights that are frozen and held once."""

from __future__ import annotations

import copy
import importlib.util
import json
import math
import pickle
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from zoo.config import ConfigError, LoraConfig, ModelConfig
from zoo.models.saved import check_saved
from zoo.models.twin import cast_frozen
from zoo.seeds import derive_seed

ADAPTER = "default"  # its name in peft
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"

# What an adapter that is trained further may say; anything else is no part of y = W·x + s·B·A·x
_PLAIN = {
    "peft_type", "peft_version", "task_type", "auto_mapping", "inference_mode", "revision",
    "base_model_name_or_path", "r", "lora_alpha", "lora_dropout", "fan_in_fan_out",
    "target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "eva_config",
}  # fmt: skip


def check_lora(config: ModelConfig) -> None:
    """Refuse an adapter that cannot be made, before anything loads.

    Raises:
        ConfigError: a setting out of range, no package peft, or no base that could be named.
    """
    lora = config.adapter
    if lora is None or lora.rank is None:
        return
    if lora.rank < 1:
        raise ConfigError(
            f"model.lora.rank must be at least 1, or null for no adapter, got {lora.rank}. "
            "Try model.lora.rank=8."
        )
    if not lora.alpha > 0:
        raise ConfigError(
            f"model.lora.alpha must be above 0, got {lora.alpha}: the adapter's output is scaled "
            "by alpha / rank. Try model.lora.alpha=16."
        )
    if not 0 <= lora.dropout < 1:
        raise ConfigError(
            f"model.lora.dropout must be at least 0 and below 1, got {lora.dropout}. "
            "Try model.lora.dropout=0."
        )
    if lora.targets is not None and not lora.targets:
        raise ConfigError(
            "model.lora.targets is an empty list, so nothing would be trained. Use "
            "model.lora.targets=null for all linear maps, or [q_proj,v_proj]."
        )
    if config.architecture is not None:
        raise ConfigError(
            "model.lora.rank adapts trained weights, and model.architecture makes untrained ones "
            "that no folder holds. Train them with model.lora.rank=null, or name a model with "
            "model=hub model.path=…."
        )
    need_peft("model.lora.rank")


def need_peft(setting: str) -> None:
    """Refuse `setting` where the extra `lora` is not installed.

    Raises:
        ConfigError: there is no package peft.
    """
    if importlib.util.find_spec("peft") is None:
        raise ConfigError(
            f"{setting} needs the package peft. Install it: pip install 'zoo-rl[lora]'."
        )


# adapter folders ---------------------------------------------------------------------------------


def is_adapter(path: str | Path | None) -> bool:
    """Whether a path is a folder that peft wrote."""
    return path is not None and (Path(path).expanduser() / CONFIG).is_file()


def adapter_base(config: ModelConfig, setting: str = "model.path") -> ModelConfig:
    """The model section of the model that an adapter folder adapts.

    Args:
        setting: where the folder was given, for messages.
    Raises:
        ConfigError: the folder does not say which, it is gone, or it is an adapter too; or a value
            beside it is none that peft can use.
    """
    path = Path(str(config.path)).expanduser()
    try:
        facts: Any = _facts(path)
        if not isinstance(facts, dict):
            raise ValueError(f"it holds {json.dumps(facts)}, no mapping")
        base = facts.get("base_model_name_or_path")
        if not isinstance(base, str) or not base:
            raise ValueError(f"base_model_name_or_path is {json.dumps(base)}")
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{setting}: {path / CONFIG} does not say which model it adapts: {_brief(error)}. "
            "Write base_model_name_or_path into it, or merge the adapter with peft."
        ) from None
    _check_values(facts, f"{setting}: {path / CONFIG}")
    if is_adapter(base):
        raise ConfigError(
            f"{setting}: {path / CONFIG} has base_model_name_or_path={base}, which is an adapter "
            "itself. Write the model below it there, or the folder that peft merged it into."
        )
    local = Path(base).expanduser()
    if local.is_absolute() and not local.exists():
        raise ConfigError(
            f"the adapter {setting}={config.path} adapts {base}, which does not exist. Restore "
            f"it, or write its new place into base_model_name_or_path of {path / CONFIG}."
        )
    return replace(config, path=base, revision=facts.get("revision"), fetch=None)


def _check_values(facts: dict[str, Any], where: str) -> None:
    """Refuse what peft compares before it looks at it."""
    if facts.get("peft_type") != "LORA":
        return
    facts = {"r": 8, "lora_alpha": 8, "target_modules": None, **facts}  # peft's own
    r, alpha, targets = (facts[key] for key in ("r", "lora_alpha", "target_modules"))
    number = isinstance(alpha, int | float) and not isinstance(alpha, bool)
    names = targets if isinstance(targets, list) else [targets or ""]
    wanted = {
        "r": ("a whole number from 1", type(r) is int and r >= 1),
        "lora_alpha": ("a finite number", number and math.isfinite(alpha)),
        "target_modules": ("names or a pattern", all(isinstance(one, str) for one in names)),
    }
    for key, (what, right) in wanted.items():
        if not right:
            raise ConfigError(
                f"{where} has {key}={json.dumps(facts[key]):.60}, which is not {what}. Restore "
                "what the training wrote."
            )


def load_merged(
    config: ModelConfig, base: PreTrainedModel, setting: str = "model.path"
) -> PreTrainedModel:
    """An adapter folder as an ordinary model: W + (alpha/rank)·B·A in the place of W.

    Args:
        setting: where the folder was given, for messages.
    Raises:
        ConfigError: the adapter is not whole, does not fit its base or is not finite, or merging
            gives another model than it.
    """
    need_peft(f"the adapter {setting}={config.path}")
    from peft import PeftModel

    from zoo.models.loading import check_finite

    path, name = Path(str(config.path)).expanduser(), base.config._name_or_path
    if not _merges(kind := _facts(path).get("peft_type")):
        raise ConfigError(
            f"the adapter {setting}={path} cannot be merged into its base: peft adds no "
            f"peft_type={kind} to weights. Start from the base ({setting}={name})."
        )
    _need_weights(path, setting, WEIGHTS, "adapter_model.bin")
    check_saved(path, setting)
    try:
        with warnings.catch_warnings():  # peft asks for an attribute that transformers renamed
            warnings.filterwarnings("ignore", ".*is_gradient_checkpointing", FutureWarning)
            adapter: Any = PeftModel.from_pretrained(base, str(path)).eval()  # pyright: ignore
        told = adapter.load_adapter(str(path), ADAPTER)  # the first time peft keeps it to itself
    except torch.OutOfMemoryError:
        raise
    except (*_UNREADABLE, ValueError, RuntimeError, KeyError, TypeError, AttributeError) as error:
        raise _unfit(path, setting, name, error) from error
    weights, missing = dict(adapter.named_parameters(remove_duplicate=False)), told.missing_keys
    read = {id(weight) for key, weight in weights.items() if key not in missing}
    missing = [key for key in missing if id(weights.get(key)) not in read]  # layers may share one
    _check_names(missing, told.unexpected_keys, path, setting, name)
    wanted = _some_logits(adapter)
    check_finite(adapter, f"the adapter {path}")
    way_out = (
        f"Start from the base ({setting}={name}), or merge it with what made it and give the "
        "merged folder."
    )
    try:
        merged: Any = adapter.merge_and_unload()
    except torch.OutOfMemoryError:
        raise
    except (ValueError, RuntimeError, AttributeError) as error:
        raise ConfigError(
            f"the adapter {path} cannot be merged into its base: {_brief(error)}.\n{way_out}"
        ) from error
    # Weights that layers share (a tied head, replicated layers) take what was meant for one
    gap = float((_some_logits(merged) - wanted).abs().max() / wanted.abs().max().clamp_min(1e-6))
    if not gap < (0.1 if merged.dtype in (torch.bfloat16, torch.float16) else 1e-3):
        raise ConfigError(
            f"the adapter {path} cannot be merged into its base: the merged model's logits differ "
            f"from its own by {gap:.2g} of the largest. Does it adapt weights that the model uses "
            f"in two places, such as a head tied to the embeddings? {way_out}"
        )
    merged.__dict__.pop("peft_config", None)
    return merged.requires_grad_(True)


def _facts(path: Path) -> dict[str, Any]:
    return json.loads((path / CONFIG).read_text(encoding="utf-8"))


def _merges(kind: Any) -> bool:
    """Whether peft can add adapters of a kind to weights; it cannot add prompts."""
    from peft import PEFT_TYPE_TO_TUNER_MAPPING

    return hasattr(PEFT_TYPE_TO_TUNER_MAPPING.get(kind), "merge_and_unload")


_UNREADABLE = (OSError, SafetensorError, pickle.UnpicklingError, EOFError)


def _need_weights(path: Path, setting: str, *names: str) -> None:
    if not any((path / name).is_file() for name in names):
        raise ConfigError(
            f"the adapter {setting}={path} has no weights: {path / names[0]} is missing. Restore "
            "it from a copy, or give the folder that has it."
        )


def _unfit(path: Path, setting: str, base: str, error: Exception) -> ConfigError:
    if isinstance(error, _UNREADABLE):
        return ConfigError(
            f"the weights of the adapter {setting}={path} cannot be read: {_brief(error)}. "
            f"Restore {path / WEIGHTS} from a copy, or start from the base ({setting}={base})."
        )
    return ConfigError(
        f"the adapter {setting}={path} does not fit its base {base}: {_brief(error)}.\n"
        f"Check base_model_name_or_path in {path / CONFIG}."
    )


def _check_names(
    missing: list[str], surplus: list[str], path: Path, setting: str, base: str
) -> None:
    """Refuse weights that are not those the config asks for: peft draws and drops them silently."""
    for names, verb in ((missing, "lacks"), (surplus, "has, beyond what it asks for,")):
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise ConfigError(
                f"the adapter {setting}={path} does not fit its {CONFIG} and its base {base}: the "
                f"file of its weights {verb} {names[0]}{more}. Restore both files, or check "
                f"base_model_name_or_path in {path / CONFIG}."
            )


def _brief(error: Exception) -> str:
    lines = str(error).splitlines()
    fact = next((line for line in lines if "size mismatch" in line), str(error))
    return " ".join(fact.split())[:300].rstrip(".")


@torch.no_grad()
def _some_logits(model: Any) -> Tensor:
    """The logits of a few tokens, in float32."""
    vocabulary = int(model.config.get_text_config().vocab_size)
    ids = torch.tensor([[(i * 7 + 1) % vocabulary for i in range(8)]], device=model.device)
    return model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits.float()


def save_adapter(model: PreTrainedModel, folder: Path) -> None:
    """The folder that peft's `PeftModel.from_pretrained(base, folder)` reads."""
    from peft import get_peft_model_state_dict

    folder.mkdir(parents=True, exist_ok=True)
    state = get_peft_model_state_dict(model, save_embedding_layers=False)
    # As if the model sat in a PeftModel
    named = {f"base_model.model.{key}": value.contiguous() for key, value in state.items()}
    save_file(named, folder / WEIGHTS, metadata={"format": "pt"})
    facts: Any = copy.deepcopy(model.peft_config[ADAPTER])  # pyright: ignore
    facts.inference_mode = True
    facts.save_pretrained(str(folder))


# models with an adapter --------------------------------------------------------------------------


def add_adapter(
    model: PreTrainedModel, config: ModelConfig, seed: int, role: str = "policy"
) -> PreTrainedModel:
    """Put a fresh adapter on the model's linear maps and freeze everything else, in place.

        y = W·x + (alpha/rank)·B·A·x,   B = 0,   A uniform as peft draws it, from (seed, role)

    What is frozen is held in `compute_dtype` alone; the adapter is in float32.

    Raises:
        ConfigError: a target that the model has not got, or that takes no adapter.
    """
    from peft import LoraConfig as Described

    lora = config.adapter
    assert lora is not None and lora.rank is not None
    described = Described(
        r=lora.rank,
        lora_alpha=lora.alpha,  # pyright: ignore  # a float is as good
        target_modules=_targets(model, lora),
        fan_in_fan_out=any(isinstance(m, Conv1D) for m in model.modules()),
        bias="none",
        task_type="CAUSAL_LM",
        base_model_name_or_path=_name_of(config),
        revision=config.revision,
    )
    known = sorted({name.rpartition(".")[2] for name in _linear_maps(model)})
    others = f"Name others with model.lora.targets=[…]: it has {', '.join(known)}."
    _inject(model, described, config, others, derive_seed(seed, "adapter", role))
    shared = _shared(model)
    for name, layer in adapted(model).items():
        if not _own(layer.base_layer, shared):  # peft takes experts for the maps they once were
            raise ConfigError(
                f"{name} of {type(model).__name__} is no linear map with weights of its own, so an "
                "adapter on it could not be merged into them. Name others with "
                "model.lora.targets=[…], such as [q_proj,v_proj]."
            )
    return model


def resume_adapter(
    model: PreTrainedModel, config: ModelConfig, setting: str = "model.path"
) -> PreTrainedModel:
    """Put the adapter of the folder `config.path` on its base, to be trained further.

    Args:
        setting: where the folder was given, for messages.
    Raises:
        ConfigError: the settings are not those of the folder, or its weights do not fit.
    """
    from peft import PeftConfig, set_peft_model_state_dict

    from zoo.models.loading import check_finite

    lora, path = config.adapter, Path(str(config.path)).expanduser()
    assert lora is not None and lora.rank is not None
    facts = _facts(path)
    name = facts["base_model_name_or_path"]
    merging = f"Start from its base ({setting}={name})."
    if _merges(facts.get("peft_type")):
        merging = (
            "With model.lora.rank=null it is merged into its base, if that gives the same model, "
            "and all weights train."
        )
    if odd := _beyond_plain(facts):
        raise ConfigError(
            f"the adapter {setting}={config.path} is no plain LoRA ({odd}), so it cannot be "
            f"trained further. {merging}"
        )
    described: Any = PeftConfig.from_pretrained(str(path))
    wanted = (lora.rank, float(lora.alpha))
    found = (described.r, float(described.lora_alpha))
    targets = described.target_modules  # names, or a pattern
    names = {targets} if isinstance(targets, str) else set(targets or ())
    same = lora.targets is None or names in (set(lora.targets), set(_targets(model, lora)))
    if wanted != found or not same:
        raise ConfigError(
            f"the adapter {setting}={config.path} has rank {found[0]}, alpha {found[1]:g} and "
            f"targets {sorted(names)}, the run another. Set model.lora.rank="
            f"{found[0]} model.lora.alpha={found[1]:g} model.lora.targets=null to go on with it, "
            "or model.lora.rank=null to merge it and train all weights."
        )
    described.inference_mode = False
    # Those of the folder take the place of what is drawn
    described.init_lora_weights, described.eva_config = True, None
    head = model.get_output_embeddings()
    way_out = f"Check base_model_name_or_path in {path / CONFIG}."
    _inject(model, described, config, way_out, 0)
    shared = _shared(model)
    for layer_name, layer in model.named_modules():
        base: Any = getattr(layer, "base_layer", None)
        if base is not None and (base is head or not _own(base, shared)):
            raise ConfigError(
                f"the adapter {setting}={config.path} adapts {layer_name}, and only linear maps "
                f"below the head with weights of their own are trained by adapters here. {merging}"
            )
    _need_weights(path, setting, WEIGHTS)
    check_saved(path, setting)
    try:
        saved = load_file(path / WEIGHTS).items()
        state = {key.removeprefix("base_model.model."): value for key, value in saved}
        done = set_peft_model_state_dict(model, state)
    except (*_UNREADABLE, RuntimeError, KeyError) as error:
        raise _unfit(path, setting, name, error) from error
    missing = [key for key in done.missing_keys if "lora_" in key]
    surplus = done.unexpected_keys + [key for key in state if "lora_" not in key]
    _check_names(missing, surplus, path, setting, name)
    check_finite(model, f"the adapter {setting}={config.path}")
    return model


def _shared(model: nn.Module) -> set[int]:
    """The identities of the weights that lie in several places."""
    places = Counter(id(p) for _, p in model.named_parameters(remove_duplicate=False))
    return {key for key, count in places.items() if count > 1}


def _own(layer: Any, shared: set[int]) -> bool:
    return isinstance(layer, nn.Linear | Conv1D) and id(layer.weight) not in shared


def _beyond_plain(facts: dict[str, Any]) -> str:
    """What an adapter's config says that y = W·x + (alpha/rank)·B·A·x does not; empty for none."""
    from peft import LoraConfig as Described

    if facts.get("peft_type") != "LORA":
        return f"peft_type={facts.get('peft_type')}"
    usual = Described().to_dict()
    # Others begin with weights of the base that are not those of its folder
    if facts.get("init_lora_weights", True) in (True, False, "gaussian", "orthogonal", "eva"):
        usual["init_lora_weights"] = facts.get("init_lora_weights")
    return ", ".join(
        f"{key}={value}"
        for key, value in facts.items()
        if key not in _PLAIN and value and value != usual.get(key)
    )


def _inject(
    model: PreTrainedModel, described: Any, config: ModelConfig, way_out: str, seed: int
) -> PreTrainedModel:
    from peft import inject_adapter_in_model

    lora = config.adapter
    assert lora is not None
    described.lora_dropout = 0.0
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            inject_adapter_in_model(described, model, ADAPTER)
        except ValueError as error:
            raise ConfigError(
                f"{type(model).__name__} takes no such adapter: {_brief(error)}.\n{way_out}"
            ) from error
    described.lora_dropout = lora.dropout
    for name, weight in model.named_parameters():
        weight.requires_grad_("lora_" in name)
        if weight.requires_grad:
            weight.data = weight.data.float()
    if lora.dropout:
        for module in adapted(model).values():
            module.lora_dropout[ADAPTER] = TrainingDropout(lora.dropout)
    dtype = None if config.compute_dtype is None else getattr(torch, config.compute_dtype)
    cast_frozen(model, dtype)
    return model


class TrainingDropout(nn.Module):
    """Dropout where gradients are made; none in sampling, old log-probs and evaluation."""

    paused = False  # of all, while gradients are compared

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def forward(self, x: Tensor) -> Tensor:
        if not torch.is_grad_enabled() or TrainingDropout.paused:
            return x
        return nn.functional.dropout(x, self.rate, training=True)


def _linear_maps(model: PreTrainedModel) -> list[str]:
    """The names of the linear maps below the head."""
    head = model.get_output_embeddings()
    return [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | Conv1D) and module is not head
    ]


def _targets(model: PreTrainedModel, lora: LoraConfig) -> list[str]:
    """The last names of the linear maps to adapt; whole ones where others end alike.

    Raises:
        ConfigError: a name that no linear map of the body has.
    """
    from zoo.instantiate import did_you_mean

    maps = _linear_maps(model)
    known = {name.rpartition(".")[2] for name in maps}
    for name in lora.targets or ():
        if name not in known:
            raise ConfigError(
                f"model.lora.targets names {name!r}, which is no linear map of "
                f"{type(model).__name__}.{did_you_mean(name, known)} It has "
                f"{', '.join(sorted(known))}."
            )
    wanted = known if lora.targets is None else set(lora.targets)
    others = {name for name, _ in model.named_modules()} - set(maps)
    shared = wanted & {name.rpartition(".")[2] for name in others}  # "0" of a list of layers
    return sorted(wanted - shared) + [n for n in maps if n.rpartition(".")[2] in shared]


def _name_of(config: ModelConfig) -> str:
    """What the adapter's folder calls its base: a hub's name, or a path from the root."""
    path = Path(str(config.path)).expanduser()
    return str(path.resolve()) if path.exists() else str(config.path)


def adapted(model: nn.Module) -> dict[str, Any]:
    """The layers that carry an adapter, by name."""
    return {n: m for n, m in model.named_modules() if hasattr(m, "lora_A") and m.lora_A}


def branch(model: PreTrainedModel, with_adapter: bool) -> Any:
    """A second body over the frozen weights of the first: they are shared, not copied.

    Args:
        with_adapter: with a copy of the adapter as it is now; without, the base alone.
    """
    memo = {id(p): p for p in model.parameters() if not p.requires_grad}
    body: Any = copy.deepcopy(model, memo)
    if not with_adapter:
        for name, layer in adapted(body).items():
            parent, _, leaf = name.rpartition(".")
            setattr(body.get_submodule(parent), leaf, layer.base_layer)
        body.__dict__.pop("peft_config", None)
    return body


@torch.no_grad()
def merge_into(fresh: PreTrainedModel, trained: nn.Module, prefix: str = "") -> PreTrainedModel:
    """Add the adapter of `trained` to the weights of its base, in their own dtype, in place.

    Args:
        fresh: the base, without an adapter.
        trained: the same architecture with one, perhaps as a part of another module.
        prefix: of the names in `trained` that `fresh` has not got.
    """
    for name, layer in adapted(trained).items():
        weight: Any = fresh.get_submodule(name.removeprefix(prefix)).weight
        # In float32: in the weights' dtype a small product would vanish before it is added
        delta = layer.get_delta_weight(ADAPTER).float().to(weight.device)
        weight.copy_(weight.float() + delta)
    return fresh


# one layer, for those who compute it by hand -----------------------------------------------------


@dataclass(frozen=True)
class LowRank:
    """y = base(x) + scale · up · down · x."""

    base: nn.Linear
    down: Tensor  # A [rank, in]
    up: Tensor  # B [out, rank]
    scale: float


def low_rank(module: nn.Module) -> LowRank | None:
    """The parts of an adapted linear map; None for any other module."""
    layer: Any = module
    if not hasattr(layer, "lora_A") or type(layer.base_layer) is not nn.Linear:
        return None
    odd = layer.merged or layer.disable_adapters or list(layer.lora_A) != [ADAPTER]
    odd = odd or getattr(layer, "lora_variant", None) or layer.active_adapters != [ADAPTER]
    if odd or layer.lora_B[ADAPTER].bias is not None:
        return None
    return LowRank(
        layer.base_layer,
        layer.lora_A[ADAPTER].weight,
        layer.lora_B[ADAPTER].weight,
        float(layer.scaling[ADAPTER]),
    )


# what is trained ---------------------------------------------------------------------------------


def trained_state(module: nn.Module) -> dict[str, Any]:
    """The state of a module without its frozen weights, which its start brings back."""
    frozen = set(_frozen(module))
    return {name: value for name, value in module.state_dict().items() if name not in frozen}


def load_trained_state(module: nn.Module, state: dict[str, Any]) -> None:
    """Put back what `trained_state` gave.

    Raises:
        RuntimeError: a trained weight is missing, or one is unknown.
    """
    told = module.load_state_dict(state, strict=False)
    missing = sorted(set(told.missing_keys) - set(_frozen(module)))
    if missing or told.unexpected_keys:
        raise RuntimeError(
            f"the state lacks {missing[:3]} and has too many of {told.unexpected_keys[:3]}"
        )


def _frozen(module: nn.Module) -> Iterator[str]:
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if not parameter.requires_grad:
            yield name
