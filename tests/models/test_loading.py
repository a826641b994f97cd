"""Models from a description, a folder, a GGUF file; and clear, quick errors for the rest."""

from __future__ import annotations

import contextlib
import json
import logging
import re
import time
import warnings
from pathlib import Path
from typing import Any

import huggingface_hub.constants as hub_constants
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    OpenAIGPTConfig,
)

from tests.models.tiny import MODELS, llama, ragged_batch
from zoo.config import ConfigError, ModelConfig
from zoo.data.tokenizer import arithmetic_tokenizer
from zoo.models import loading
from zoo.models.loading import (
    check_model_config,
    load_gguf,
    load_model,
    load_tokenizer,
    load_trained,
    reading,
    save_policy,
    weights_hash,
)
from zoo.models.policy import Policy
from zoo.models.reference import load_reference
from zoo.models.reward_model import from_policy

ARCHITECTURE: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 512,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
}


def scratch(**changes: Any) -> ModelConfig:
    return ModelConfig(architecture=dict(ARCHITECTURE), tokenizer="arithmetic", **changes)


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    loading.hub_reachable.cache_clear()


# --- from a description ---------------------------------------------------------------------------


def test_a_model_from_a_description_depends_on_the_seed_alone() -> None:
    torch.manual_seed(1)
    made = load_model(scratch(), seed=3)
    assert not any(module.training for module in made.modules())  # as one that is loaded
    first = weights_hash(made)
    torch.manual_seed(2)
    state = torch.get_rng_state()
    assert weights_hash(load_model(scratch(), seed=3)) == first
    assert weights_hash(load_model(scratch(), seed=4)) != first
    assert torch.equal(torch.get_rng_state(), state), "the global generator was touched"


def test_the_description_is_not_changed_by_loading() -> None:
    config = scratch()
    load_model(config)
    assert config.architecture == ARCHITECTURE


def test_the_reference_is_the_start_frozen() -> None:
    start = Policy(load_model(scratch(), seed=5), 0.7, **reading(scratch()))
    reference = load_reference(scratch(), 5, 0.7, "cpu")
    assert not any(p.requires_grad for p in reference.parameters())
    assert not reference.with_entropy and reference.temperature == 0.7
    batch = ragged_batch()
    with torch.no_grad():
        assert torch.equal(start(batch).logprobs, reference(batch).logprobs)  # step-0 KL is 0


# --- hashes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_weights_hash_changes_with_any_single_weight(name: str) -> None:
    model = MODELS[name]()
    seen = {weights_hash(model)}
    parameters = list(model.parameters())
    with torch.no_grad():
        for parameter in parameters:
            parameter.view(-1)[-1] += 1e-3
            seen.add(weights_hash(model))
    assert len(seen) == len(parameters) + 1


def test_weights_hash_is_that_of_the_weights_and_not_of_the_object(tmp_path: Path) -> None:
    model = llama()
    save_policy(model, arithmetic_tokenizer(), tmp_path)
    assert weights_hash(load_model(ModelConfig(path=str(tmp_path)))) == weights_hash(model)
    assert weights_hash(llama(dtype=torch.bfloat16)) != weights_hash(model)


# --- folders --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_a_saved_policy_is_an_ordinary_transformers_folder(name: str, tmp_path: Path) -> None:
    policy = Policy(MODELS[name](vocab_size=512))
    save_policy(policy.model, arithmetic_tokenizer(), tmp_path / "policy")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "policy")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "policy")
    ids = tokenizer("What is 12 + 7?", return_tensors="pt").input_ids
    with torch.no_grad():
        assert torch.equal(loaded.eval()(ids).logits, policy.model.eval()(ids).logits)
    assert tokenizer.decode(ids[0], skip_special_tokens=True) == "What is 12 + 7?"
    assert tokenizer.chat_template == arithmetic_tokenizer().chat_template


def test_a_tokenizer_without_padding_pads_with_eos(tmp_path: Path) -> None:
    tokenizer = arithmetic_tokenizer()
    tokenizer.pad_token = None
    save_policy(llama(vocab_size=512), tokenizer, tmp_path)
    loaded = load_tokenizer(ModelConfig(path=str(tmp_path)))
    assert loaded.pad_token_id == loaded.eos_token_id is not None


def test_a_chat_template_of_the_configuration_replaces_the_tokenizers() -> None:
    found = load_tokenizer(scratch(chat_template="{{ messages[0]['content'] }}!"))
    rendered = found.apply_chat_template([{"role": "user", "content": "a"}], tokenize=False)
    assert rendered == "a!"


# --- errors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("load", [load_model, load_tokenizer])
def test_a_hub_name_without_a_hub_is_refused_at_once(load: Any) -> None:
    started = time.perf_counter()
    with pytest.raises(ConfigError, match="nobody/nothing-at-all") as caught:
        load(ModelConfig(path="nobody/nothing-at-all", fetch="smollm2_135m"))
    assert time.perf_counter() - started < 5
    assert "zoo fetch smollm2_135m" in str(caught.value)
    assert "model.path=FOLDER" in str(caught.value)


def test_hub_reachable_is_false_offline_without_asking(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a connection was tried")

    monkeypatch.setattr(loading.socket, "create_connection", refuse)
    assert not loading.hub_reachable()


def test_hub_reachable_tries_the_configured_endpoint_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def refused(address: tuple[str, int], timeout: float) -> None:
        asked.append((address, timeout))
        raise OSError("refused")

    for name in ("HF_HUB_OFFLINE", "HTTPS_PROXY", "https_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_ENDPOINT", "http://hub.example:8080")
    monkeypatch.setattr(loading.socket, "create_connection", refused)
    assert not loading.hub_reachable() and not loading.hub_reachable()
    assert asked == [(("hub.example", 8080), 3.0)]


@pytest.mark.parametrize(
    "factory", [AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer]
)
def test_an_absent_hub_is_asked_for_nothing(factory: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def refuse(*args: Any, **kwargs: Any) -> None:
        asked.append(args)
        raise OSError("no network")

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr(loading, "hub_reachable", lambda: False)
    monkeypatch.setattr("socket.getaddrinfo", refuse)
    with pytest.raises(ConfigError, match=r"could not be loaded.*\n.*reward\.path=FOLDER"):
        loading.from_hub(factory, "no-such/model", ModelConfig(path="x"), "reward.path")
    assert asked == [] and not hub_constants.HF_HUB_OFFLINE


def test_a_reason_that_ends_with_a_full_stop_gets_no_second_one() -> None:
    odd = ModelConfig(architecture={**ARCHITECTURE, "num_attention_heads": 5}, tokenizer="x")
    with pytest.raises(ConfigError, match=r"no language model: .*\(5\)\. See its settings"):
        load_model(odd, 0)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (ModelConfig(path="/no/such/folder"), "does not exist"),
        (ModelConfig(path="./missing.gguf"), "does not exist"),
        (ModelConfig(architecture={"hidden_size": 8}, tokenizer="x"), "no model_type"),
        (ModelConfig(architecture={"model_type": "llama"}), "model.tokenizer"),
    ],
)
def test_what_cannot_load_is_refused_before_anything_does(
    config: ModelConfig, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        check_model_config(config)


@pytest.mark.parametrize(
    ("kind", "setting", "message"),
    [
        (
            "llama",
            {"num_atention_heads": 2},
            "=2 has no effect.*Did you mean .*num_attention_heads",
        ),
        ("llama", {"n_layer": 2}, "has no effect: model_type=llama has no such setting"),
        ("gpt2", {"num_experts": 8}, "model_type=gpt2 .* ~model.architecture.num_experts"),
        ("llama", {"max_length": 8, "rope_theta": 5.0}, "max_length=8 has no effect"),
        # of another's fields, by another name, and one that turns into another
        ("mixtral", {"num_local_experts": 2}, None),
        ("mixtral", {"num_experts": 2}, None),
        ("gpt2", {"intermediate_size": 8}, None),  # of the yaml that another kind is chosen in
        ("gpt2", {"hidden_size": 8, "n_layer": 1, "_attn_implementation": "eager"}, None),
        ("llama", {"rope_theta": 5.0, "torch_dtype": "float32"}, None),
        ("llama", {"rope_theta": 10000.0}, None),  # the default
        ("gpt_neox", {"rotary_pct": 0.25, "rotary_emb_base": 10000}, None),
        ("llama", {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, None),
        ("no_such_kind", {"hidden_sise": 2}, None),  # told of by transformers
    ],
)
def test_a_setting_that_the_architecture_does_not_know_is_refused(
    kind: str, setting: dict[str, Any], message: str | None
) -> None:
    config = ModelConfig(architecture={"model_type": kind, **setting}, tokenizer="arithmetic")
    refused = pytest.raises(ConfigError, match=message) if message else contextlib.nullcontext()
    with refused:
        check_model_config(config)


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"folder without config\.json"):
        check_model_config(ModelConfig(path=str(tmp_path)))


def test_a_folder_whose_weights_are_missing_is_refused(tmp_path: Path) -> None:
    llama().config.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="could not be loaded"):
        load_model(ModelConfig(path=str(tmp_path)))


def without(folder: Path, lost: str) -> None:
    weights = load_file(folder / "model.safetensors")
    del weights[lost]
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize("setting", ["model.path", "model.critic"])
def test_weights_that_a_folder_lacks_are_not_drawn(setting: str, tmp_path: Path) -> None:
    llama().save_pretrained(tmp_path)
    without(tmp_path, "model.layers.0.mlp.up_proj.weight")
    message = rf"{setting}=.* has no weights for model\.layers\.0\.mlp\.up_proj\.weight, so"
    with pytest.raises(ConfigError, match=message):
        load_trained(ModelConfig(path=str(tmp_path)), 0, setting)


def test_layers_that_only_the_weights_have_are_told(tmp_path: Path) -> None:
    llama().save_pretrained(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_model(ModelConfig(path=str(tmp_path)))
    described = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**described, "num_hidden_layers": 1}))
    with pytest.warns(UserWarning, match=r"no layer for \(model\.layers\.1\.input_layernorm"):
        load_model(ModelConfig(path=str(tmp_path)))


def test_a_head_tied_to_the_embeddings_is_no_missing_weight(tmp_path: Path) -> None:
    model = llama(tie_word_embeddings=True)
    model.save_pretrained(tmp_path)
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    assert weights_hash(load_model(ModelConfig(path=str(tmp_path)))) == weights_hash(model)


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_weights_that_are_not_finite_are_named(value: float, tmp_path: Path) -> None:
    model = llama()
    with torch.no_grad():
        model.model.norm.weight[3] = value
    model.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"model\.path=.*model\.norm\.weight are not finite"):
        load_model(ModelConfig(path=str(tmp_path)))


def test_a_model_without_that_attention_is_read_with_its_own(tmp_path: Path) -> None:
    config = OpenAIGPTConfig(vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=64)
    made = AutoModelForCausalLM.from_config(config)
    made.save_pretrained(tmp_path)
    with pytest.warns(UserWarning, match="no attention of the kind model.attention=sdpa"):
        model = load_model(ModelConfig(path=str(tmp_path)))
    assert weights_hash(model) == weights_hash(made)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_model(ModelConfig(path=str(tmp_path), attention="eager"))


def test_logits_that_are_not_finite_are_not_laid_to_the_head() -> None:
    with pytest.raises(ValueError, match=r"log-probs that are not finite at temperature 1e-45"):
        Policy(llama(), temperature=1e-45).check_head()


def test_a_classifier_is_no_policy(tmp_path: Path) -> None:
    from_policy(llama(tie_word_embeddings=True), 0).save(tmp_path, arithmetic_tokenizer())
    with pytest.raises(ConfigError, match=r"holds a LlamaForSequenceClassification, which gives"):
        load_model(ModelConfig(path=str(tmp_path)))


@pytest.mark.parametrize("template", ["{{ foo", "{{ raise_exception('no') }}", "{{ 1 / 0 }}"])
def test_a_chat_template_that_cannot_be_used_is_refused(template: str) -> None:
    with pytest.raises(ConfigError, match=r"model\.chat_template cannot write a user's turn"):
        load_tokenizer(scratch(chat_template=template))


@pytest.mark.parametrize("content", ["{}", "[", "null"])
def test_a_tokenizer_that_cannot_be_read_is_named(content: str, tmp_path: Path) -> None:
    arithmetic_tokenizer().save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ConfigError, match=rf"model '{tmp_path}' could not be loaded"):
        load_tokenizer(ModelConfig(path=str(tmp_path)))


@pytest.mark.parametrize("setting", ["model.path", "reward.path"])
def test_a_folder_without_a_tokenizer_is_named_with_its_setting(
    setting: str, tmp_path: Path
) -> None:
    llama().save_pretrained(tmp_path)
    with pytest.raises(ConfigError) as caught:
        load_tokenizer(ModelConfig(path=str(tmp_path)), setting)
    assert str(caught.value) == (
        f"the tokenizer of model '{tmp_path}' could not be loaded: there are no files of one, such "
        "as tokenizer.json\nCheck that the folder is whole, or give another one with "
        f"{setting}=FOLDER."
    )


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"hidden_size": 128}, r"by which model\.\S+ has the shape \[.*and \d+ more do not fit"),
        ({"intermediate_size": 80}, r"mlp\.down_proj\.weight has the shape \[\d+, 80\] and not"),
        ({"num_hidden_layers": 9}, r"has no weights for model\.layers\.\d.*and \d+ more, so"),
    ],
)
def test_a_config_that_does_not_fit_its_weights_is_one_sentence(
    change: dict[str, int], says: str, tmp_path: Path
) -> None:
    llama().save_pretrained(tmp_path)
    described = json.loads((tmp_path / "config.json").read_text())
    assert all(described[key] != value for key, value in change.items())
    (tmp_path / "config.json").write_text(json.dumps({**described, **change}))
    told: list[logging.LogRecord] = []
    listener = logging.Handler()
    listener.emit = told.append
    logger = logging.getLogger("transformers.modeling_utils")
    logger.addHandler(listener)
    try:
        with pytest.raises(ConfigError, match=says) as caught:
            load_model(ModelConfig(path=str(tmp_path)))
    finally:
        logger.removeHandler(listener)
    assert "\n" not in str(caught.value) and not told


# --- GGUF -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("load", [load_model, load_tokenizer])
def test_a_file_that_is_no_gguf_is_refused_by_name(load: Any, tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF" + bytes(16))
    with pytest.raises(ConfigError, match=r"model\.gguf"):
        load(ModelConfig(path=str(file)))


def test_a_missing_gguf_file_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no GGUF file .*absent\.gguf"):
        load_gguf(tmp_path / "absent.gguf", torch.float32, "sdpa")


def test_without_the_package_gguf_the_extra_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF")

    def absent(*args: Any, **kwargs: Any) -> None:
        raise ImportError("no gguf")

    monkeypatch.setattr(loading.AutoModelForCausalLM, "from_pretrained", absent)
    with pytest.raises(ConfigError, match=r"zoo-rl\[gguf\]"):
        load_gguf(file, torch.float32, "sdpa")


def test_a_gguf_file_gives_the_model_it_was_made_from_and_can_be_saved(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    model: Any = llama(num_key_value_heads=4, max_position_embeddings=64, rms_norm_eps=1e-5)
    file = tmp_path / "tiny.gguf"
    _write_gguf(gguf, model, file)
    loaded: Any = load_model(ModelConfig(path=str(file)))
    ids = torch.tensor([[1, 5, 9, 30, 44]])
    with torch.no_grad():
        torch.testing.assert_close(loaded(ids).logits, model(ids).logits, rtol=1e-5, atol=1e-5)
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    save_policy(loaded, arithmetic_tokenizer(), tmp_path / "saved")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    with torch.no_grad():
        assert torch.equal(again(ids).logits, loaded(ids).logits)
    assert getattr(again.config, "quantization_config", None) is None


def _write_gguf(gguf: Any, model: Any, file: Path) -> None:
    """The Llama `model` in llama.cpp's layout (whose rotary halves are interleaved)."""
    config = model.config
    heads, layers = config.num_attention_heads, config.num_hidden_layers
    writer = gguf.GGUFWriter(str(file), "llama")
    writer.add_block_count(layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(heads)
    writer.add_head_count_kv(heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(config.vocab_size)

    def interleaved(weight: np.ndarray) -> np.ndarray:
        rows, columns = weight.shape
        halves = weight.reshape(heads, 2, rows // heads // 2, columns)
        return halves.swapaxes(1, 2).reshape(rows, columns)

    state = {name: value.numpy() for name, value in model.state_dict().items()}
    writer.add_tensor("token_embd.weight", state["model.embed_tokens.weight"])
    writer.add_tensor("output_norm.weight", state["model.norm.weight"])
    parts = {
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
        "attn_norm": "input_layernorm",
        "ffn_norm": "post_attention_layernorm",
    }
    for layer in range(layers):
        for theirs, ours in parts.items():
            value = state[f"model.layers.{layer}.{ours}.weight"]
            if theirs in ("attn_q", "attn_k"):
                value = interleaved(value)
            writer.add_tensor(f"blk.{layer}.{theirs}.weight", np.ascontiguousarray(value))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


# --- halfway between two numbers of the arithmetic ------------------------------------------------


def test_weights_from_float16_are_told_to_jump_in_bfloat16(tmp_path: Path) -> None:
    def trained(dtype: torch.dtype, **changes: Any) -> list[str]:
        model = load_model(scratch(), 0)
        model.to(dtype).float().save_pretrained(tmp_path / str(dtype))
        start = ModelConfig(path=str(tmp_path / str(dtype)), tokenizer="arithmetic", **changes)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            load_trained(start)
        return [str(one.message) for one in told if "halfway" in str(one.message)]

    # 11 bits of precision against 8: of the three lost ones, 100 is a tie, one of eight
    (message,) = trained(torch.float16, compute_dtype="bfloat16")
    assert re.match("1[23]% of the weights of model.path=", message)
    assert trained(torch.float16) == []
    for dtype in (torch.float32, torch.bfloat16):  # ties in 2¹⁶, and none
        assert trained(dtype, compute_dtype="bfloat16") == []


def test_half_the_ties_move_by_a_whole_step_of_bfloat16() -> None:
    weights = torch.randn(4096, generator=torch.Generator().manual_seed(0)).half().float()
    ties = weights.view(torch.int32) & 0xFFFF == 0x8000
    raised = weights + 1e-6 * weights.abs().clamp_min(1e-3)
    moved = (raised.bfloat16().float() - weights.bfloat16().float()) / weights.abs()
    share = (moved[ties] > 2**-9).float().mean()
    assert 0.4 < share < 0.6 and float(moved[~ties].abs().max()) == 0
