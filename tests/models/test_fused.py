"""Norms and gated networks that keep less: values and gradients of transformers' own layers."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers.models.llama.configuration_llama import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

from zoo.models.fused import keep_less


def layers() -> dict[str, Any]:
    torch.manual_seed(0)
    norm = LlamaRMSNorm(12, eps=1e-5)
    torch.nn.init.normal_(norm.weight)
    config = LlamaConfig(
        hidden_size=12, intermediate_size=20, num_attention_heads=2, mlp_bias=False
    )
    return {"norm": norm, "network": LlamaMLP(config)}


def gradients(layer: Any, x: torch.Tensor, upstream: torch.Tensor) -> list[torch.Tensor]:
    x = x.clone().requires_grad_()
    out = layer(x)
    return [out.detach(), *torch.autograd.grad(out, [x, *layer.parameters()], upstream)]


@pytest.mark.parametrize("name", ["norm", "network"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 0.02)])
def test_values_and_gradients_are_those_of_the_layer(
    name: str, dtype: torch.dtype, tolerance: float
) -> None:
    layer = layers()[name]
    fused = copy.deepcopy(layer)
    keep_less(fused)
    assert fused.forward.__func__ is not type(layer).forward
    draw = torch.Generator().manual_seed(1)
    x, upstream = (torch.randn(2, 7, 12, generator=draw) * 3 for _ in range(2))
    found = gradients(fused.to(dtype), x.to(dtype), upstream.to(dtype))
    wanted = gradients(layer.to(dtype), x.to(dtype), upstream.to(dtype))
    for one, two in zip(found, wanted, strict=True):
        assert one.dtype == two.dtype == dtype
        assert (one - two).float().norm() <= tolerance * two.float().norm()


def test_gradients_of_a_network_are_those_of_finite_differences() -> None:
    layer = layers()["network"].double()  # a norm is float32 inside
    keep_less(layer)
    x = torch.randn(3, 12, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(layer, (x,))
    parameters = list(layer.parameters())

    def of_weights(*weights: torch.Tensor) -> torch.Tensor:
        names = [n for n, _ in layer.named_parameters()]
        return torch.func.functional_call(layer, dict(zip(names, weights, strict=True)), (x,))

    assert torch.autograd.gradcheck(of_weights, parameters)


@pytest.mark.parametrize("name", ["norm", "network"])
def test_less_is_kept_for_the_backward_pass(name: str) -> None:
    kept = []
    for fuse in (False, True):
        layer = layers()[name].to(torch.bfloat16)
        if fuse:
            keep_less(layer)
        storages: dict[int, torch.UntypedStorage] = {}

        def hold(t: torch.Tensor, into: Any = storages) -> torch.Tensor:
            into[t.untyped_storage().data_ptr()] = t.untyped_storage()
            return t

        with torch.autograd.graph.saved_tensors_hooks(hold, lambda t: t):
            out = layer(torch.randn(4096, 12, dtype=torch.bfloat16, requires_grad=True))
        kept.append(sum(s.nbytes() for s in storages.values()))
        del out
    assert kept[1] < 0.6 * kept[0]


def test_layers_of_another_make_are_left_alone() -> None:
    biased, hooked = layers()["network"], layers()["network"]
    biased.down_proj = torch.nn.Linear(20, 12, bias=True)
    hooked.gate_proj.register_forward_hook(lambda *_: None)
    other = layers()["network"]
    other.act_fn = torch.nn.GELU()
    for layer in (biased, hooked, other):
        keep_less(layer)
        assert layer.forward.__func__ is LlamaMLP.forward
