"""What only a GPU can show; never run so far, since none was at hand. `pytest -n 0 -m gpu`."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.e2e.small import folder_of, run_small
from tests.models.tiny import llama, ragged_batch, tokens
from zoo.models import flex, packing
from zoo.models.policy import Policy
from zoo.models.twin import Twin
from zoo.rollout.engine import Sampling
from zoo.rollout.graphs import GraphDecoding
from zoo.rollout.torch_engine import TorchEngine

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CUDA = torch.device("cuda")


def test_recorded_decoding_draws_the_tokens_of_the_plain_one() -> None:
    policy = Policy(llama()).to(CUDA)
    lengths = [3, 40, 1, 5, 31, 2, 70, 9]
    prompts = [tokens(torch.Generator().manual_seed(i), n) for i, n in enumerate(lengths)]
    keys = [f"k{i}" for i in range(len(prompts))]
    sampling = Sampling(1.0, 60, (7, 9), seed=(1,))
    found = []
    for settings in ({"max_rows": 12}, {"fast": False}):
        engine = TorchEngine(**settings).engine(lambda ids: "", pad_token_id=0)
        engine.sync(policy)
        found.append([c for g in engine.generate(prompts, keys, 3, sampling) for c in g])
        if "max_rows" in settings:
            assert list(engine._kinds.values()) == [GraphDecoding]
    same = [a.token_ids == b.token_ids for a, b in zip(*found, strict=True)]
    assert sum(same) >= len(same) - 1  # a draw may lie on the edge between two tokens


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_flex_attention_has_the_gradient_of_the_matrix_products(dtype: torch.dtype) -> None:
    assert flex.differentiates(CUDA)
    batch = ragged_batch().to(CUDA)
    layout = packing.Layout.of(batch, dtype)
    rows, columns = batch.completion_mask.nonzero(as_tuple=True)
    gradients = []
    for attention in (packing.ATTENTION, flex.ATTENTION):
        model = llama().to(CUDA, dtype)
        hidden = layout.hidden(Twin(model, attention)().base_model)
        packing.read(hidden, layout.place[rows, columns]).float().square().sum().backward()
        parts = [p.grad.float().flatten() for p in model.parameters() if p.grad is not None]
        gradients.append(torch.cat(parts))
    gap = (gradients[0] - gradients[1]).norm() / gradients[0].norm()
    assert gap < (1e-3 if dtype == torch.float32 else 0.05)


def test_packed_log_probs_are_the_padded_ones() -> None:
    torch.set_float32_matmul_precision("highest")
    model, batch = llama().to(CUDA), ragged_batch().to(CUDA)
    packed, padded = Policy(model, packed=True), Policy(model)
    torch.testing.assert_close(packed(batch).logprobs, padded(batch).logprobs, rtol=0, atol=1e-3)


@pytest.mark.parametrize("algorithm", ["sft", "dpo", "grpo", "ppo"])
def test_a_small_run_ends_on_the_gpu(algorithm: str, tmp_path: Path) -> None:
    run_small(tmp_path, f"algorithm={algorithm}", "train.device=cuda")
    assert (folder_of(tmp_path) / "summary.json").exists()
