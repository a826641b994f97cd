"""Models and tokenizers from a hub name, a folder, a GGUF file, or a description from scratch."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import logging
import os
import re
import socket
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch
import transformers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from zoo.config import ConfigError, ModelConfig
from zoo.models.lora import (
    adapted,
    adapter_base,
    add_adapter,
    check_lora,
    is_adapter,
    load_merged,
    need_peft,
    resume_adapter,
    save_adapter,
)
from zoo.models.saved import check_saved
from zoo.seeds import derive_seed


def cache_folder() -> Path:
    """Where zoo keeps what it can rebuild: $ZOO_CACHE, else ~/.cache/zoo."""
    return Path(os.environ.get("ZOO_CACHE") or "~/.cache/zoo").expanduser()


def check_model_config(config: ModelConfig) -> None:
    """Refuse a model section that cannot load, before anything does.

    Raises:
        ConfigError: no tokenizer or model_type for a model from scratch, a setting that its
            model_type has not, or a path that is absent.
    """
    if config.architecture is not None:
        if "model_type" not in config.architecture:
            raise ConfigError(
                "model.architecture has no model_type; say which transformers architecture to "
                "build, for example model.architecture.model_type=llama."
            )
        _check_architecture(config.architecture)
        if config.tokenizer is None:
            raise ConfigError(
                "model.architecture builds an untrained model, so model.tokenizer must name a "
                "tokenizer: a hub name, a folder, or arithmetic."
            )
    if config.compute_dtype not in (None, "float32", "bfloat16"):
        raise ConfigError(
            "model.compute_dtype must be float32, bfloat16 or null (that of the weights), got "
            f"{config.compute_dtype}. Use bfloat16 for speed."
        )
    if config.matmul_precision not in ("highest", "high", "medium"):
        raise ConfigError(
            "model.matmul_precision must be highest, high or medium, got "
            f"{config.matmul_precision}. highest is float32 as it is."
        )
    check_attention(config.attention, "model.attention")
    check_lora(config)
    for key in ("critic", "tokenizer"):
        path = getattr(config, key)
        if path is not None and looks_local(path) and not Path(path).expanduser().exists():
            raise ConfigError(
                f"model.{key}={path} does not exist. Give a folder, a hub name or null."
            )
    for key in ("path", "critic"):
        if is_adapter(path := getattr(config, key)):
            need_peft(f"the adapter model.{key}={path}")
            adapter_base(replace(config, path=path), f"model.{key}")
    if is_adapter(config.path):
        return
    if config.path is not None and looks_local(config.path):
        path = Path(config.path).expanduser()
        if not path.exists():
            raise ConfigError(
                f"model.path={config.path} does not exist. Give a folder with config.json, a "
                ".gguf file, or a hub name such as HuggingFaceTB/SmolLM2-135M-Instruct."
            )
        if path.is_dir() and not (path / "config.json").exists():
            if (path / "reward_model").is_dir():
                raise ConfigError(
                    f"model.path={config.path} is a run that trained a reward model, which gives "
                    "scores and no text. `zoo audit FILE reward=learned "
                    f"reward.path={config.path}/reward_model` scores with it, and so does a run "
                    "with these settings."
                )
            raise ConfigError(
                f"model.path={config.path} is a folder without config.json, so no transformers "
                "model. A finished run keeps its policy in the folder policy/ of the run."
            )


def _check_architecture(values: Mapping[str, Any]) -> None:
    """Refuse settings without an effect: transformers keeps what its model_type does not know."""
    from zoo.instantiate import did_you_mean  # here, not at the top: it imports every group

    def described(key: str, *value: Any) -> dict[str, Any]:
        """The configuration with another value of a key, or without the key, but for itself."""
        others = {k: v for k, v in values.items() if k != key}
        made = AutoConfig.for_model(**others, **({key: value[0]} if value else {})).to_dict()
        made.pop(key, None)
        return made

    def is_idle(key: str) -> bool:
        if hasattr(plain, key) or hasattr(usual, key):
            return False
        # Some have no field and turn into another, as rope_theta into rope_parameters; what was
        # given may be the default.
        tried = [values[key]]
        if isinstance(tried[0], int | float) and not isinstance(tried[0], bool):
            tried.append(2 * tried[0] + 1)
        return all(described(key, value) == described(key) for value in tried)

    kind = values["model_type"]
    try:
        plain = AutoConfig.for_model(kind)
        usual = AutoConfig.for_model("llama")  # the yaml's settings may stay with another kind
        idle = [key for key in values if is_idle(key)]
    except Exception:  # each architecture refuses in its own way, told of where it is made
        return
    for key in idle:
        near = did_you_mean(key, [*plain.to_dict(), *plain.attribute_map], "model.architecture.")
        raise ConfigError(
            f"model.architecture.{key}={values[key]} has no effect: model_type={kind} has no such "
            f"setting.{near} Take it out, with ~model.architecture.{key} where a yaml sets it."
        )


def check_attention(name: str, where: str) -> None:
    """Refuse a name that transformers has no attention for; hub kernels (owner/name) pass.

    Raises:
        ConfigError: names the known ones.
    """
    known = sorted({"eager", *ALL_ATTENTION_FUNCTIONS.keys()})
    plain = [one for one in known if "|" not in one and not one.startswith("zoo")]
    if name not in known and "/" not in name:
        raise ConfigError(
            f"{where} must be an attention of transformers ({', '.join(plain)}), got {name!r}. "
            f"Use {where}=sdpa."
        )


def reading(config: ModelConfig) -> dict[str, Any]:
    """How a model is read, as arguments of `Policy` and `Critic`."""
    dtype = None if config.compute_dtype is None else getattr(torch, config.compute_dtype)
    return {"packed": config.packed, "compute_dtype": dtype}


def looks_local(path: str) -> bool:
    """Whether a model path can only be a local one (a hub name is owner/name)."""
    return path.startswith((".", "/", "~")) or path.endswith(".gguf") or path.count("/") > 1


def with_fetched(config: ModelConfig) -> ModelConfig:
    """The model section with a hub name replaced by what `zoo fetch` converted, if it did."""
    from zoo.models.fetch import check_fetched, fetched_folder, is_fetched

    if config.fetch is not None and is_fetched(config.fetch):
        check_fetched(config.fetch)
        return replace(config, path=str(fetched_folder(config.fetch)), fetch=None, revision=None)
    return config


def load_tokenizer(config: ModelConfig, setting: str = "model.path") -> PreTrainedTokenizerBase:
    """The tokenizer that belongs to the model; `setting` is where that was given, for messages."""
    name = config.tokenizer or config.path
    if is_adapter(name) and not any(Path(str(name)).expanduser().glob("tokenizer*")):
        setting = setting if config.tokenizer is None else "model.tokenizer"
        adapter = replace(config, path=name, tokenizer=None)
        return load_tokenizer(adapter_base(adapter, setting), setting)  # peft itself saves none
    if name == "arithmetic":
        from zoo.data.tokenizer import arithmetic_tokenizer

        tokenizer: Any = arithmetic_tokenizer()
    elif name is not None and name.endswith(".gguf"):
        tokenizer = _from_gguf(AutoTokenizer, Path(name).expanduser())
    else:
        assert name is not None
        setting = setting if config.tokenizer is None else "model.tokenizer"
        check_saved(Path(name).expanduser(), setting, tokens=True)
        tokenizer = from_hub(AutoTokenizer, name, config, setting)
    if config.chat_template is not None:
        tokenizer.chat_template = config.chat_template
        _check_template(tokenizer, config.chat_template)
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token  # harmless: masks come from lengths
    return tokenizer


def _check_template(tokenizer: Any, template: str) -> None:
    turn = [{"role": "user", "content": "?"}]
    try:
        tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)
    except Exception as error:  # a template raises what it likes
        reason = f"{type(error).__name__}: {error}"[:200]
        raise ConfigError(
            f"model.chat_template cannot write a user's turn: {reason} (given: {template[:80]!r}). "
            "Correct it, or use null for the tokenizer's own."
        ) from error


def load_model(config: ModelConfig, seed: int = 0, setting: str = "model.path") -> PreTrainedModel:
    """The causal LM, on the CPU, in `config.dtype`, gradients on, dropout untouched.

    An adapter folder is merged into the model that it adapts.

    Args:
        setting: where the path was given, for messages.
    Raises:
        ConfigError: nothing at the path, no hub within reach, weights that are missing or not
            finite, or a classifier.
    """
    transformers.utils.logging.disable_progress_bar()  # the run has a display of its own
    dtype = getattr(torch, config.dtype)
    if config.architecture is not None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(derive_seed(seed, "initial weights"))
            model = _from_scratch(config, dtype)
    elif is_adapter(config.path):
        base = load_model(adapter_base(config, setting), seed, setting)
        return load_merged(config, base, setting)
    elif config.path is not None and config.path.endswith(".gguf"):
        model = load_gguf(Path(config.path).expanduser(), dtype, config.attention)
    else:
        assert config.path is not None
        _refuse_classifier(config.path, setting)
        model, facts = from_hub(
            AutoModelForCausalLM,
            config.path,
            config,
            setting,
            dtype=dtype,
            attn_implementation=config.attention,
            output_loading_info=True,
        )
        lost = sorted(facts["missing_keys"])  # transformers draws them at random
        if lost:
            raise ConfigError(
                f"{setting}={config.path} has no weights for {', '.join(lost[:3])}"
                f"{f' and {len(lost) - 3} more' if len(lost) > 3 else ''}, so they would be "
                "random. Is the folder whole, and its config.json that of its weights?"
            )
        _tell_of_surplus(model, facts["unexpected_keys"], f"{setting}={config.path}")
    if config.architecture is None:
        check_finite(model, f"{setting}={config.path}")
    if config.activation_checkpointing:
        _recompute_activations(model)
    return model


def _tell_of_surplus(model: torch.nn.Module, surplus: Iterable[str], owner: str) -> None:
    """Warn of layers that the weights have and config.json does not: it is another model."""
    stacks = {found[1] for name, _ in model.named_parameters() if (found := _LAYER.match(name))}
    layers = sorted(
        name for name in surplus if (found := _LAYER.match(name)) and found[1] in stacks
    )
    if layers:
        warnings.warn(
            f"{owner} has weights that its config.json has no layer for ({', '.join(layers[:2])}"
            f"{f' and {len(layers) - 2} more' if len(layers) > 2 else ''}): they are left out, so "
            "this is not the model that was saved. Is config.json that of the weights?",
            stacklevel=2,
        )


_LAYER = re.compile(r"(.*?)\.\d+\.")  # a weight of a stack of layers


def _from_scratch(config: ModelConfig, dtype: torch.dtype) -> PreTrainedModel:
    values = dict(config.architecture or {})
    kind = values.pop("model_type")
    try:
        described = AutoConfig.for_model(kind, **values)
        made = AutoModelForCausalLM.from_config(
            described, dtype=dtype, attn_implementation=config.attention
        )
        return made.eval()  # as `from_pretrained` gives it
    except Exception as error:  # each architecture refuses in its own way
        cause = error.__cause__ or error  # transformers' validation wraps what it found
        reason = " ".join(str(cause).split())[:240].rstrip(".") or type(cause).__name__
        raise ConfigError(
            f"model.architecture (model_type={kind}) makes no language model: {reason}. See its "
            "settings with `zoo --cfg job --package model`."
        ) from error


def _refuse_classifier(path: str, setting: str) -> None:
    """A classifier's folder loads as a language model when their embeddings are tied."""
    try:
        text = (Path(path).expanduser() / "config.json").read_text(encoding="utf-8")
        kinds = json.loads(text).get("architectures") or []
    except (OSError, ValueError, AttributeError):
        return  # a hub's, or one that transformers refuses
    if any("Classification" in str(kind) for kind in kinds):
        raise ConfigError(
            f"{setting}={path} holds a {kinds[0]}, which gives scores and no text. Give the folder "
            "of a language model (a reward model goes to reward=learned reward.path=…)."
        )


def check_finite(model: torch.nn.Module, owner: str) -> None:
    """Refuse weights that are NaN or infinite.

    Args:
        owner: of the weights, for the message.
    Raises:
        ConfigError: names the first such weight.
    """
    for name, weight in model.named_parameters():
        if weight.is_floating_point() and not bool(torch.isfinite(weight).all()):
            raise ConfigError(
                f"{owner}: its weights {name} are not finite, so nothing can be computed from "
                "them. The training that made it went wrong, or the file is damaged."
            )


def load_trained(
    config: ModelConfig, seed: int = 0, setting: str = "model.path"
) -> tuple[PreTrainedModel, str]:
    """The causal LM as it is trained, with its adapter where there is one, and its start's hash.

    With `model.lora`, a folder that holds an adapter is trained further, and any other model gets
    a fresh one, whose hash is that of the model alone.

    Raises:
        ConfigError: see `load_model`, `add_adapter` and `resume_adapter`.
    """
    if config.adapter is not None and is_adapter(config.path):
        model = resume_adapter(load_base(config, seed, setting), config, setting)
        return model, weights_hash(model)
    model = load_model(config, seed, setting)
    if config.adapter is None and config.compute_dtype == "bfloat16":
        tell_of_ties(model, f"{setting}={config.path}")
    found = weights_hash(model)  # of a fresh adapter neither names nor dtypes are part
    return model if config.adapter is None else add_adapter(model, config, seed), found


def tell_of_ties(model: torch.nn.Module, owner: str) -> None:
    """Warn where many weights lie halfway between two bfloat16 numbers.

    A float16 number has three bits of precision more than a bfloat16 one, so an eighth of them are
    ties. The smallest update of the float32 master turns the rounding of every other tie, which
    moves the weight that computes by 2⁻⁸ of itself: hundreds of times a step of 1e-6.
    """
    ties = seen = 0
    for weight in model.parameters():
        if weight.dtype == torch.float32:
            some = weight.detach().flatten()[:65536].view(torch.int32)
            ties += int((some & 0xFFFF == 0x8000).sum())
            seen += some.numel()
    if ties > 0.01 * seen:
        warnings.warn(
            f"{ties / seen:.0%} of the weights of {owner} lie halfway between two bfloat16 numbers "
            "(they were kept in float16). With model.compute_dtype=bfloat16 half of them move by "
            "a whole bfloat16 step at the first update, however small train.lr is, so that update "
            "is larger than the later ones. model.compute_dtype=null trains without the jump.",
            stacklevel=2,
        )


def load_base(config: ModelConfig, seed: int = 0, setting: str = "model.path") -> PreTrainedModel:
    """The model that an adapter is trained on: that of an adapter folder, or the start itself."""
    if is_adapter(config.path):
        config = adapter_base(config, setting)
    return load_model(config, seed, setting)


def _recompute_activations(model: Any) -> None:
    older = getattr(model, "gradient_checkpointing_enable", None)  # its former name
    enable = getattr(model, "activation_checkpointing_enable", older)
    assert enable is not None
    try:
        enable({"use_reentrant": False})
    except ValueError as error:
        raise ConfigError(
            f"model.activation_checkpointing: {type(model).__name__} cannot recompute its "
            f"activations ({error}). Use model.activation_checkpointing=false and a smaller "
            "train.micro_batch_tokens."
        ) from error


def load_gguf(file: Path, dtype: torch.dtype, attention: str) -> PreTrainedModel:
    """A GGUF file as an ordinary model that `save_pretrained` can write.

    transformers marks a model read from GGUF as quantized and then refuses to save it, so its
    weights are copied into a model built from the same configuration without the mark.
    """
    read = _from_gguf(AutoModelForCausalLM, file, dtype=dtype)
    values = read.config.to_dict()
    values.pop("quantization_config", None)
    clean = type(read.config).from_dict(values)
    model = AutoModelForCausalLM.from_config(clean, dtype=dtype, attn_implementation=attention)
    model.load_state_dict(read.state_dict())
    model.generation_config = read.generation_config
    model.tie_weights()
    return model.eval()  # as `from_pretrained` gives it


def _from_gguf(factory: Any, file: Path, **options: Any) -> Any:
    if not file.exists():
        raise ConfigError(f"there is no GGUF file {file}. Check model.path.")
    try:
        return factory.from_pretrained(file.parent, gguf_file=file.name, **options)
    except ImportError as error:
        raise ConfigError(
            f"reading {file} needs the package gguf. Install it: pip install 'zoo-rl[gguf]'."
        ) from error
    except Exception as error:  # the parser lets whatever it trips over through
        raise ConfigError(
            f"{file} could not be read as GGUF: {type(error).__name__}: {error}\n"
            "Check that the download is whole and its architecture one that transformers reads "
            "from GGUF, or give a transformers folder."
        ) from error


def from_hub(
    factory: Any, name: str, config: ModelConfig, setting: str = "model.path", **options: Any
) -> Any:
    """`factory.from_pretrained` of a folder or a hub name; nothing is asked of an absent hub.

    Raises:
        ConfigError: it could not be loaded, its weights have other shapes than its config.json
            says, or are not those that a run saved; `setting` is what to change.
    """
    path = Path(name).expanduser()
    local = path.exists()
    absent = not local and not hub_reachable()
    if "output_loading_info" in options:
        check_saved(path, setting)
        options["ignore_mismatched_sizes"] = True  # refused below, in one sentence
    try:
        with _no_table_of_refused_weights(), _offline(absent):
            made = factory.from_pretrained(
                path if local else name,
                revision=config.revision or "main",
                trust_remote_code=config.trust_remote_code,
                local_files_only=local or absent,
                **options,
            )
    except Exception as error:  # parsers let whatever they trip over through
        wanted = options.get("attn_implementation", "eager")
        if wanted != "eager" and "attention implementation" in str(error):
            warnings.warn(
                f"{setting}={name} has no attention of the kind model.attention={wanted}, so its "
                "own is used. model.attention=eager says the same without trying.",
                stacklevel=2,
            )
            return from_hub(
                factory, name, config, setting, **{**options, "attn_implementation": "eager"}
            )
        hint = f" or run `zoo fetch {config.fetch}`" if config.fetch else ""
        known = isinstance(error, OSError | ValueError | RuntimeError) and str(error).strip()
        reason = " ".join((str(error) if known else repr(error)).split())
        what = "the tokenizer of model" if factory is AutoTokenizer else "model"
        advice = f"Check the name and the network, give a local folder with {setting}=FOLDER{hint}"
        if local:
            files = [file for kind in ("*token*", "vocab*", "*.model") for file in path.glob(kind)]
            if factory is AutoTokenizer and not files:
                reason = "there are no files of one, such as tokenizer.json"
            advice = f"Check that the folder is whole, or give another one with {setting}=FOLDER"
        raise ConfigError(
            f"{what} {name!r} could not be loaded: "
            f"{reason if len(reason) <= 240 else reason[:239] + '…'}\n{advice}."
        ) from error
    if "output_loading_info" in options and (unfit := sorted(made[1]["mismatched_keys"])):
        weight, found, wanted = unfit[0]
        more = f", and {len(unfit) - 1} more do not fit either" if len(unfit) > 1 else ""
        raise ConfigError(
            f"{setting}={name}: its weights do not fit its config.json, by which {weight} has the "
            f"shape {list(wanted)} and not {list(found)}{more}. Give a folder whose config.json is "
            "that of its weights."
        )
    return made


@contextlib.contextmanager
def _offline(absent: bool) -> Iterator[None]:
    """transformers looks for an adapter on the hub even with local_files_only, for half a minute.

    Only the state of the hub's own client keeps it from asking.
    """
    import huggingface_hub.constants as hub_constants

    before = hub_constants.HF_HUB_OFFLINE
    hub_constants.HF_HUB_OFFLINE = before or absent
    try:
        yield
    finally:
        hub_constants.HF_HUB_OFFLINE = before


@contextlib.contextmanager
def _no_table_of_refused_weights() -> Iterator[None]:
    """transformers prints one of weights that are missing or do not fit, which zoo refuses."""

    def other(record: logging.LogRecord) -> bool:
        text = record.getMessage()
        return "LOAD REPORT" not in text or ("MISSING" not in text and "MISMATCH" not in text)

    logger = logging.getLogger("transformers.modeling_utils")
    logger.addFilter(other)
    try:
        yield
    finally:
        logger.removeFilter(other)


@functools.cache
def hub_reachable(seconds: float = 3.0) -> bool:
    """Whether the model hub answers; asked once, because an absent one costs a minute a try."""
    if os.environ.get("HF_HUB_OFFLINE", "") in ("1", "true", "True"):
        return False
    if any(os.environ.get(name) for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY")):
        return True  # behind a proxy only a real request could tell
    endpoint = urlsplit(os.environ.get("HF_ENDPOINT", "https://huggingface.co"))
    port = endpoint.port or (443 if endpoint.scheme == "https" else 80)
    try:
        socket.create_connection((endpoint.hostname or "", port), timeout=seconds).close()
    except OSError:
        return False
    return True


def weights_hash(model: torch.nn.Module) -> str:
    """Short hash of all parameters and buffers: two models with one hash give one log-prob."""
    digest = hashlib.blake2b(digest_size=8)
    config = getattr(model, "config", None)
    if config is not None:  # rope, soft cap and the like change log-probs as weights do
        facts = config.to_dict()
        for name in ("_name_or_path", "transformers_version", "architectures"):
            facts.pop(name, None)
        digest.update(json.dumps(facts, sort_keys=True, default=str).encode())
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(name.encode())
        data = tensor.detach().cpu().contiguous()
        digest.update(data.reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


def save_policy(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """An ordinary transformers folder: model, tokenizer, generation settings.

    Of a model with an adapter, the adapter alone, as a folder of peft.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if adapted(model):
        save_adapter(model, folder)
    else:
        model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
