import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig, LlamaForCausalLM, LlamaModel

from zoo.batch import collate
from zoo.measure.cost import ModelCost, backward_flops, causal_context, forward_flops, n_parameters
from zoo.models.critic import Critic
from zoo.models.policy import Policy


def config(tied=True):
    return LlamaConfig(
        vocab_size=50,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        tie_word_embeddings=tied,
        attn_implementation="eager",
    )


# A layer: q 16·32, k and v 16·16 each, o 32·16, three matrices 16·24 of the MLP.
BODY = 3 * (16 * 32 + 2 * 16 * 16 + 32 * 16 + 3 * 16 * 24)
HEAD = 16 * 50


@pytest.mark.parametrize("tied", [True, False])
def test_shape_figures_of_a_model(tied):
    model = LlamaForCausalLM(config(tied))
    expected = ModelCost(body=BODY, head=HEAD, layers=3, attention_width=4 * 8)
    assert ModelCost.of(model) == expected
    assert ModelCost.of(Policy(model)) == expected
    norms = 7 * 16  # two a layer and the last
    assert n_parameters(model) == BODY + HEAD * (1 if tied else 2) + norms
    assert n_parameters(model.requires_grad_(False), trainable=True) == 0


def test_a_critics_head_is_one_column():
    critic = Critic(LlamaModel(config()), 16)
    assert ModelCost.of(critic) == ModelCost(body=BODY, head=16, layers=3, attention_width=32)


def test_a_module_without_a_transformers_config_has_no_attention():
    module = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 5))
    assert ModelCost.of(module) == ModelCost(body=20, head=0, layers=0, attention_width=0)


def test_forward_and_backward_agree_with_torchs_counter():
    model = LlamaForCausalLM(config())
    rows, length = 2, 11
    ids = torch.arange(rows * length).view(rows, length)
    # torch counts full attention matrices, so each token attends to all 11 positions here.
    cost = ModelCost.of(model)
    forward = forward_flops(
        cost.body,
        cost.head,
        rows * length,
        layers=cost.layers,
        attention_width=cost.attention_width,
        context=rows * length * length,
    )
    with FlopCounterMode(display=False) as counter:
        logits = model(ids).logits
    assert counter.get_total_flops() == forward
    with FlopCounterMode(display=False) as counter:
        logits.sum().backward()
    assert counter.get_total_flops() == backward_flops(forward)


def test_causal_context_counts_what_a_loop_counts():
    lengths, cached = [3, 1, 5], [0, 4, 2]
    slow = sum(m + t for n, m in zip(lengths, cached, strict=True) for t in range(1, n + 1))
    assert causal_context(lengths, cached) == slow
    assert causal_context([3]) == 1 + 2 + 3


def test_generation_equals_a_token_by_token_loop():
    cost = ModelCost(body=100, head=30, layers=2, attention_width=8)
    prompts, completions = [4, 6], [3, 1, 5, 0]

    def one_token(context, read):
        return 2 * 100 + (2 * 30 if read else 0) + 4 * 2 * 8 * context

    slow = 0
    for prompt in prompts:  # once for each group; only the last position reaches the head
        slow += sum(one_token(t, read=t == prompt) for t in range(1, prompt + 1))
    for row, new in enumerate(completions):
        prompt = prompts[row // 2]
        slow += sum(one_token(prompt + t, read=True) for t in range(1, new))
    assert cost.generate(prompts, completions, group_size=2) == slow


def test_the_policys_real_forward_agrees_where_the_head_sees_completions_only():
    policy = Policy(LlamaForCausalLM(config()))
    batch = collate([[1, 2, 3]], [[4, 5, 6, 7]], group_size=1, prompt_ids=["a"])
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        policy(batch)
    cost = ModelCost.of(policy)
    full = 7 * 7 - causal_context([7])  # torch counts the masked half of attention too
    extra = 4 * cost.layers * cost.attention_width * full
    assert counter.get_total_flops() == cost.forward([7], head_tokens=4) + extra
