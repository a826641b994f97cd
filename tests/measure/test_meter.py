import gc

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import LlamaConfig, LlamaForCausalLM

from zoo.measure.memory import component_bytes
from zoo.measure.meter import TensorMeter, mark

# Two layers without biases: 8·16 + 16·4 = 192 weights, 768 bytes.
PARAMETERS = 768
# Adam: two moments, and a float32 step counter for each of the two matrices.
ADAM = 2 * PARAMETERS + 2 * 4
ROWS = 32


def mlp():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16, bias=False), nn.ReLU(), nn.Linear(16, 4, bias=False))


def transformer():
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=50,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            tie_word_embeddings=True,
        )
    )


def update(model, optimizer, inputs):
    out = model(inputs)
    (out if isinstance(out, torch.Tensor) else out.logits).pow(2).mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def test_forward_peak_equals_arithmetic():
    model, x = mlp(), torch.ones(ROWS, 8)
    meter = TensorMeter({"policy": model})
    with meter.phase("evaluate"), torch.no_grad():
        model(x)
    # The highest moment is the ReLU: its input and output, 32·16 floats each, are both alive.
    assert meter.peaks["evaluate"] == {
        "total": PARAMETERS + ROWS * 8 * 4 + 2 * ROWS * 16 * 4,
        "policy/parameters": PARAMETERS,
        "inputs": ROWS * 8 * 4,
        "activations": 2 * ROWS * 16 * 4,
    }


def test_backward_peak_equals_arithmetic():
    x, weight = torch.ones(1, 3), nn.Parameter(torch.ones(3, 8))
    module = nn.Module()
    module.weight = weight
    meter = TensorMeter({"policy": module})
    with meter.phase("update"):
        (x @ weight).sum().backward()
    # x 12 and the weight 96 bytes throughout. Forward adds the product, 32, and its sum, 4. The
    # product is freed at once; backward adds the loss's gradient, 4 (expanded as a view), and the
    # weight's, 96, which is the highest moment.
    assert meter.peaks["update"] == {
        "total": 12 + 96 + 4 + 4 + 96,
        "policy/parameters": 96,
        "inputs": 12,
        "policy/gradients": 96,
        "activations": 8,
    }


def test_optimizer_states_and_gradients_are_named_from_the_first_step_on():
    model, x = mlp(), torch.ones(ROWS, 8)
    optimizer = torch.optim.Adam(model.parameters())
    meter = TensorMeter({"policy": model}, {"policy": optimizer})
    out = model(x).pow(2).sum()
    out.backward()
    del out
    with meter.phase("step"):
        optimizer.step()
    peak = meter.peaks["step"]
    assert peak["policy/parameters"] == peak["policy/gradients"] == PARAMETERS
    assert peak["policy/optimizer"] == ADAM
    optimizer.zero_grad()
    with meter.phase("update"):
        update(model, optimizer, x)
    assert meter.peaks["update"]["policy/optimizer"] == ADAM


def test_resting_bytes_equal_component_bytes():
    model = transformer()
    optimizer = torch.optim.AdamW(model.parameters())
    ids = torch.arange(24).view(3, 8)
    update(model, optimizer, ids)
    meter = TensorMeter({"policy": model, "reference": None}, {"policy": optimizer})
    with meter.phase("nothing"):
        pass
    kinds = component_bytes({"policy": model}, {"policy": optimizer})["policy"]
    assert meter.peaks["nothing"] == {
        "total": sum(kinds.values()),
        "policy/parameters": kinds["parameters"],
        "policy/optimizer": kinds["optimizer"],
    }


def measured():
    model, reference = transformer(), transformer().requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters())
    meter = TensorMeter({"policy": model, "reference": reference}, {"policy": optimizer})
    ids = torch.arange(40).view(4, 10)
    for _ in range(2):
        with meter.phase("prepare"), torch.no_grad():
            reference(ids)
        with meter.phase("update"):
            update(model, optimizer, ids)
    return meter.peaks


def test_repeatable_to_the_byte():
    first = measured()
    assert measured() == first
    assert first["update"]["reference/parameters"] == first["update"]["policy/parameters"]


def test_the_garbage_collectors_moment_does_not_matter():
    threshold = gc.get_threshold()
    meter = TensorMeter({})
    try:
        gc.set_threshold(1)  # would collect at every allocation of a container
        with meter.phase("cycles"):
            for _ in range(5):
                cycle = [torch.zeros(1000)]
                cycle.append(cycle)
                del cycle
                _ = [[] for _ in range(100)]
    finally:
        gc.set_threshold(*threshold)
    assert meter.peaks["cycles"]["total"] == 5 * 4000


def test_an_input_counts_from_the_start_of_the_phase():
    x = torch.ones(1000)
    meter = TensorMeter({})
    with meter.phase("late"):
        torch.zeros(2000)  # the highest moment: x is alive, though nothing has read it yet
        x.sum()
    assert meter.peaks["late"] == {"total": 12000, "inputs": 4000, "activations": 8000}


def test_what_is_made_after_the_peak_is_not_in_it():
    meter = TensorMeter({})
    with meter.phase("late"):
        torch.zeros(1000)
        cache = torch.zeros(8)
        meter.label("cache", [cache])
    assert meter.peaks["late"] == {"total": 4000, "activations": 4000}


def test_peak_total_equals_the_sum_of_its_parts():
    for peak in measured().values():
        assert peak["total"] == sum(n for label, n in peak.items() if label != "total")


def test_agrees_with_torchs_memory_tracker():
    tracker = pytest.importorskip("torch.distributed._tools.mem_tracker")
    ids = torch.arange(40).view(4, 10)
    model = transformer()
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    update(model, optimizer, ids)
    theirs = tracker.MemTracker()
    theirs.track_external(model, optimizer, ids)
    with theirs:
        update(model, optimizer, ids)
    meter = TensorMeter({"policy": model}, {"policy": optimizer})
    with meter.phase("update"):
        update(model, optimizer, ids)
    snapshot = theirs.get_tracker_snapshot("peak")[torch.device("cpu")]
    assert meter.peaks["update"]["total"] == snapshot["Total"]


def test_fake_tensors_predict_the_same_bytes():
    def peaks():
        model = mlp()
        optimizer = torch.optim.Adam(model.parameters())
        meter = TensorMeter({"policy": model}, {"policy": optimizer})
        x = torch.ones(ROWS, 8)
        with meter.phase("update"):
            update(model, optimizer, x)
        return meter.peaks

    real = peaks()
    with FakeTensorMode():
        assert peaks() == real


def test_freed_memory_is_not_counted_again():
    meter = TensorMeter({})
    with meter.phase("loop"):
        for _ in range(50):
            torch.zeros(256)
    # A new one is made before the name of the old one lets go; here there is no name.
    assert meter.peaks["loop"] == {"total": 1024, "activations": 1024}


def test_views_and_resizes_count_their_storage():
    meter = TensorMeter({})
    with meter.phase("views"):
        x = torch.zeros(100)
        views = [x[:10], x.view(10, 10), x.expand(7, 100)]
    assert meter.peaks["views"]["total"] == 400
    with meter.phase("resize"):
        y = torch.zeros(10)
        y.resize_(300)
    assert meter.peaks["resize"]["total"] == 1200
    del views


def test_labels_of_the_caller():
    meter = TensorMeter({})
    with meter.phase("generate"):
        cache = [torch.zeros(64), torch.zeros(64)]
        meter.label("cache", cache)
        scores = torch.zeros(8)
    assert meter.peaks["generate"] == {"total": 544, "cache": 512, "activations": 32}
    meter.label("cache", [scores])  # outside a phase: nothing


def test_metering_changes_no_gradient():
    ids = torch.arange(24).view(3, 8)
    plain, metered = transformer(), transformer()
    plain(ids).logits.pow(2).mean().backward()
    with TensorMeter({"policy": metered}).phase("update"):
        metered(ids).logits.pow(2).mean().backward()
    for a, b in zip(plain.parameters(), metered.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)


def test_a_phase_cleans_up_after_an_error():
    model = mlp()
    meter = TensorMeter({"policy": model})
    with pytest.raises(KeyError), meter.phase("a"):
        raise KeyError
    assert gc.isenabled()
    weight = model[0].weight
    assert not weight._post_accumulate_grad_hooks
    with (
        pytest.raises(RuntimeError, match=r"phase\('inner'\) inside another"),
        meter.phase("outer"),
        meter.phase("inner"),
    ):
        pass
    assert gc.isenabled()


def test_marks_reach_every_open_phase_and_nothing_else():
    asked = []

    def cache():
        asked.append(True)
        return [keys]

    keys = torch.zeros(16)
    mark("cache", cache)
    assert not asked  # no phase is open, so nothing is even listed
    meter = TensorMeter({})
    with meter.phase("generate"):
        keys = torch.zeros(32)
        mark("cache", cache)
    assert meter.peaks["generate"] == {"total": 128, "cache": 128}
    mark("cache", cache)
    assert len(asked) == 1


def test_what_becomes_a_components_in_the_phase_is_its_own_from_birth():
    module = nn.Module()
    meter = TensorMeter({"policy": module})
    with meter.phase("load"):
        module.register_buffer("late", torch.zeros(25))
    assert meter.peaks["load"] == {"total": 100, "policy/parameters": 100}
