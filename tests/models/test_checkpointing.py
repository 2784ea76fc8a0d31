"""Activation checkpointing gives the very gradients of the plain backward, and chooses blocks once."""

from collections import Counter

import pytest
import torch

from tests.devices import needs_gpu
from tests.models.conftest import gpu_model, gpu_tokens
from trifocal.ops import reference


def gradients(model, tokens, cu_seqlens=None, autocast=False):
    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = model(tokens, tokens.roll(-1, 1), cu_seqlens=cu_seqlens)
    loss.backward()
    found = {}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        found[name] = parameter.grad.clone()
    return found


@pytest.mark.parametrize(
    ("num_layers", "layers", "options"),
    [
        *((5, layers, {}) for layers in ((0, 5), (4, 5), (2, 2))),
        (3, (1, 3), {"attention": "dense"}),
        (3, (1, 3), {"attention": "selected", "qk_norm": True}),
        (3, (1, 3), {"attention": "window", "norm_after": True, "qk_norm": True, "qk_norm_all_heads": True}),
        (3, (1, 3), {"selection": "random"}),
    ],
    ids=str,
)
def test_gradients_are_those_of_the_plain_backward(make_model, num_layers, layers, options):
    model = make_model(num_layers=num_layers, **options)
    ways = [(torch.randint(31, (2, 40)),)]
    if layers == (0, 5) and not options:
        # Packed documents, and under autocast.
        ways += [(torch.randint(31, (1, 40)), torch.tensor([0, 1, 4, 30, 37, 40])), (*ways[0], None, True)]
    for way in ways:
        model.to(torch.float32 if len(way) == 3 else torch.float64).set_activation_checkpointing(0, 0)
        plain = gradients(model, *way)
        model.set_activation_checkpointing(*layers)
        given = gradients(model, *way)
        assert not [name for name in plain if not torch.equal(given[name], plain[name])]


def test_blocks_are_chosen_once_and_all_else_again(make_model, monkeypatch):
    calls = Counter()

    def count(name):
        original = getattr(reference, name)

        def counted(*arguments):
            calls[name] += 1
            return original(*arguments)

        monkeypatch.setattr(reference, name, counted)

    count("select_blocks")
    count("compressed_attention")
    model = make_model(num_layers=5)
    model.set_activation_checkpointing(1, 5)
    gradients(model, torch.randint(31, (1, 40)))
    assert calls == {"select_blocks": 5, "compressed_attention": 5 + 4}


def test_activations_are_not_kept(make_model):
    model = make_model(num_layers=4)
    tokens = torch.randint(31, (1, 40))

    def kept_bytes():
        sizes = {}

        def pack(tensor):
            sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            model(tokens, tokens).backward()
        weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
        return sum(size for pointer, size in sizes.items() if pointer not in weights)

    plain = kept_bytes()
    model.set_activation_checkpointing(0, 4)
    assert kept_bytes() < plain / 4


def test_hooks_of_a_block_stay_outside(make_model):
    """FSDP's are such hooks: they run once a step, not again when backward recomputes the block."""
    model = make_model(num_layers=2)
    names, calls = list(model.state_dict()), []
    model.set_activation_checkpointing(0, 2)
    for block in model.blocks:
        block.register_forward_pre_hook(lambda block, inputs: calls.append(block))
    gradients(model, torch.randint(31, (1, 40)))
    assert calls == list(model.blocks)
    assert list(model.state_dict()) == names


@needs_gpu
@pytest.mark.parametrize("borders", [None, [0, 1, 40, 700, 731, 1100]], ids=["one document a row", "packed"])
def test_kernels_give_the_plain_gradients(borders):
    model = gpu_model()
    tokens = gpu_tokens(1 if borders else 2)
    cu_seqlens = None if borders is None else torch.tensor(borders, dtype=torch.int32)

    def found():
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(tokens, tokens, cu_seqlens=cu_seqlens)
        return [loss, *torch.autograd.grad(loss, list(model.parameters()))]

    plain = found()
    model.set_activation_checkpointing(0, 2)
    assert all(torch.equal(a, b) for a, b in zip(found(), plain, strict=True))
