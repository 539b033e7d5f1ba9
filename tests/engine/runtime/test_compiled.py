"""Blocks, the loss and the optimizer compiled: the same bits by any plan, next to the results of
eager ones, and no more is kept than the planner counts on.
"""

from __future__ import annotations

import functools
import os
import threading

import pytest
import torch
from torch._inductor.runtime.cache_dir_utils import default_cache_dir

from engine.config.settings import ModelConfig
from engine.model.blocks.block_inputs import tensors_in
from engine.model.build import activations, attention
from engine.model.build.activations import count_activations
from engine.model.build.build import build_model
from engine.model.build.library import transformers
from engine.model.build.specimens import arguments_on_meta, on_meta
from engine.planning.schedule.prefetch_slots import slot_of
from engine.planning.shape.activation_sizes import DOCUMENTS
from engine.runtime.device import compiled
from engine.runtime.device.compiled import CompiledBlock, CompiledFunction, set_up_compiler
from engine.runtime.step import cross_entropy as loss
from engine.runtime.step.cross_entropy import LossChunks, LossTargets, TailGradients, chunked_loss
from tests.support.compiled import needs_compiler
from tests.support.device_updates import states_of, updated_on_device
from tests.support.packed_rows import packed_and_apart
from tests.support.same_bits import BASE, assert_same_bits, planes_after
from tests.support.tiny import plain_model, random_batches, streamed, tiny_config

pytestmark = pytest.mark.computing


COMPILED = BASE.changed(compiled=True)
SAME_BITS = {
    "all kept, one slot": dict(blocks_without_recompute=3, slots=1),
    "all resident, one kept": dict(blocks_kept_in_slots=3, blocks_without_recompute=1),
    "rounds, block inputs on the host": dict(
        rounds=2, main_grad="device", offloaded_block_inputs=True
    ),
    "rounds, all kept": dict(rounds=2, main_grad="device", blocks_without_recompute=3),
}


# ---------------------------------------------------------------------- results


@pytest.fixture
def one_shape_of_loss(monkeypatch):
    """The loss is compiled once, for whole chunks, and not for each number of positions."""
    monkeypatch.setattr(loss, "SHAPES", 1)


@pytest.mark.parametrize("named", ["", "by torch", "by the user"])
def test_compiled_code_is_kept_where_no_other_account_writes(monkeypatch, own_cache, named):
    """Unless the user names a folder. An import of transformers has named torch's own by then."""
    folders = {"by torch": default_cache_dir(), "by the user": "/asked/for"}
    if named:
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", folders[named])
    else:
        monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    monkeypatch.setattr(compiled, "_this_thread", threading.local())
    set_up_compiler()
    own = str(own_cache / "compiled")
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == (
        own if named != "by the user" else folders[named]
    )


@needs_compiler
@pytest.mark.slow("torch compiles the blocks of several plans, for half a minute")
@pytest.mark.parametrize("half", [0, 1])
@pytest.mark.usefixtures("quick_compiler", "one_shape_of_loss")
def test_compiled_plans_give_the_same_bits_and_nearly_those_of_eager_ones(half):
    expected = planes_after(COMPILED)
    for changes in [*SAME_BITS.values()][half::2]:
        assert_same_bits(planes_after(COMPILED.changed(**changes)), expected)
    for ours, theirs in zip(expected, planes_after(BASE)):
        assert (ours - theirs).abs().max() < 1e-4 * theirs.abs().max()


@pytest.mark.slow("torch compiles several blocks, for five seconds or more")
@needs_compiler
@pytest.mark.usefixtures("quick_compiler", "one_shape_of_loss")
def test_blocks_really_are_compiled():
    run = streamed(plain_model(tiny_config("qwen3")), COMPILED)
    run.engine.train_step(1, random_batches(2), 1e-3)
    run.engine.drain()
    blocks = run.engine.templates.compiled.values()
    assert all(block.problem == "" for block in blocks)
    assert any(block.seconds > 0 for block in blocks)
    run.close()


@needs_compiler
@pytest.mark.slow("torch compiles the blocks and the loss of an evaluation, for half a minute")
@pytest.mark.usefixtures("quick_compiler", "one_shape_of_loss")
def test_an_evaluation_is_compiled_where_training_is():
    """Its kernels are its own: one that cannot be compiled leaves those of training alone."""
    batches = random_batches(3, seed=5)
    plain = plain_model(tiny_config("qwen3"))
    eager, run = streamed(plain, BASE), streamed(plain, COMPILED)
    expected = eager.engine.evaluate(batches)
    assert run.engine.evaluate(batches) == pytest.approx(expected, rel=1e-6)
    alone = run.engine.templates._compiled_alone.values()
    assert any(block.seconds > 0 for block in alone) and not any(block.problem for block in alone)
    assert "The loss of an evaluation" not in dict(run.engine.uncompiled)
    assert any(function.ran for function in compiled._functions)
    assert run.engine.evaluate(batches[:1]) == pytest.approx(
        eager.engine.evaluate(batches[:1]), rel=1e-6
    )
    for block in alone:
        block.abort(RuntimeError("no compiler"))
    assert run.engine.evaluate(batches) == pytest.approx(expected, rel=1e-6)
    assert not any(block.problem for block in run.engine.templates.compiled.values())
    assert any("no compiler" in problem for problem in run.engine.templates.compiling[1])
    eager.close()
    run.close()


@needs_compiler
@pytest.mark.slow("torch compiles the optimizer for several sizes, for 20 seconds")
@pytest.mark.usefixtures("quick_compiler", "one_shape_of_loss")
def test_a_compiled_optimizer_on_the_device_is_the_host_s_but_for_rounding(monkeypatch):
    """Over units whose decayed part ends inside a chunk, of several sizes. Blocks run as they are,
    since their kernels would be compiled for half a minute more.
    """
    monkeypatch.setattr(
        CompiledBlock, "__call__", lambda block, *given, **named: block._block(*given, **named)
    )
    expected = states_of(planes_after(COMPILED, dtype="bfloat16", steps=1), "bfloat16")
    first = states_of(planes_after(BASE, dtype="bfloat16", steps=0), "bfloat16")
    for device_updates in (("embed", "block 0"), ("block 0", "block 1", "block 2", "head")):
        found = states_of(
            planes_after(
                updated_on_device(device_updates, 2).changed(compiled=True),
                dtype="bfloat16",
                steps=1,
            ),
            "bfloat16",
        )
        for ours, theirs, before in zip(found, expected, first):
            for name, values in ours.items():
                assert (values - theirs[name]).abs().max() < 1e-5 * theirs[name].abs().max(), (
                    device_updates,
                    name,
                )
            assert not torch.equal(ours["master"], before["master"])


@pytest.mark.slow("torch compiles several blocks, for five seconds or more")
def test_a_block_is_compiled_once_for_rows_however_they_are_packed(monkeypatch):
    """Which documents share a row changes from step to step."""
    monkeypatch.setattr(
        compiled.torch, "compile", functools.partial(torch.compile, backend="eager")
    )
    monkeypatch.setattr("engine.runtime.step.cross_entropy.compiled_function", lambda_of)
    counted, graphs = torch._dynamo.utils.counters, []
    run = streamed(plain_model(tiny_config("llama")), COMPILED.changed(micro_batches=1), tokens=48)
    shared = [
        ((9, 4, 11), (1, 20, 3)),
        ((12, 12), (2, 2, 20)),
        ((24,), (1, 2, 3, 18)),
        ((1,) * 24, (23, 1)),
    ]
    for step, lengths in enumerate(shared):
        run.engine.train_step(step + 1, packed_and_apart(lengths)[0], 1e-3)
        run.engine.drain()
        graphs.append(counted["stats"]["unique_graphs"])
    assert all(block.problem == "" for block in run.engine.templates.compiled.values())
    run.close()
    assert graphs[0] > 0 and len(set(graphs)) == 1, graphs


def lambda_of(function, _what=""):
    """`function` as a compiled one, which is what it is."""
    call = CompiledFunction.__new__(CompiledFunction)
    call._function = call._compiled = function
    call.problem, call.ran = "", False
    return call


class _Breaks(torch.autograd.Function):
    """What stands for a backward that cannot be compiled."""

    @staticmethod
    def forward(ctx, out):
        return out.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise RuntimeError("no such kernel")


@pytest.mark.parametrize("kept", [0, 3], ids=["recomputed", "kept"])
def test_a_backward_that_cannot_be_compiled_runs_as_it_is(monkeypatch, kept):
    """The first micro-batch finds out, and what others have kept is computed again."""
    made = []

    class Broken(CompiledBlock):
        def __init__(self, block):
            made.append(self)
            self._block, self.problem, self.seconds = block, "", 0.0
            self._compiled = lambda hidden, *args, **kwargs: _Breaks.apply(
                block(hidden, *args, **kwargs)
            )

    monkeypatch.setattr("engine.runtime.step.templates.CompiledBlock", Broken)
    monkeypatch.setattr("engine.runtime.step.cross_entropy.compiled_function", lambda_of)
    choices = BASE.changed(compiled=True, blocks_without_recompute=kept)
    for ours, theirs in zip(
        planes_after(choices), planes_after(BASE)
    ):  # positions are padded, so sums differ in their bits
        assert (ours - theirs).abs().max() < 1e-5 * theirs.abs().max()
    assert made and all(block.problem == "no such kernel" for block in made)


def test_a_block_that_cannot_be_compiled_runs_as_it_is(monkeypatch):
    calls = []

    def refuse(block):
        def call(*args):
            calls.append(1)
            raise RuntimeError("no such operator\nand a long story")

        return call

    monkeypatch.setattr(compiled.torch, "compile", refuse)
    block = torch.nn.Linear(3, 3)
    tried, given = CompiledBlock(block), torch.randn(2, 3)
    for _ in range(2):
        assert torch.equal(tried(given), block(given))
    assert tried.problem == "no such operator"
    assert len(calls) == 1
    assert tried.seconds == 0

    def full(block):
        def call(*args):
            raise torch.OutOfMemoryError("full")

        return call

    monkeypatch.setattr(compiled.torch, "compile", full)
    with pytest.raises(
        torch.OutOfMemoryError
    ):  # which is no reason to try again with what takes more
        CompiledBlock(block)(given)


# ---------------------------------------------------------------------- the loss


@pytest.fixture
def tail():
    """A skeleton whose head is filled, and its parameters."""
    run = streamed(plain_model(tiny_config("qwen3", max_position_embeddings=1024)), BASE)
    for unit in ("embed", "head"):
        plane = run.host_states.tensor(unit, "weight_high")
        run.engine.state.slots[slot_of(unit)][: plane.numel()].copy_(plane)
    yield run.model.skeleton, run.engine.templates.embed_and_head_parameters["head"]
    run.close()


@pytest.mark.parametrize("positions", [1, 127, 128, 129, 300, 384, 385, 641])
@pytest.mark.parametrize("chunk", [7, 128, 256, 8192])
def test_a_loss_in_chunks_of_few_shapes_is_the_same_loss(monkeypatch, tail, positions, chunk):
    skeleton, parameters = tail
    generator = torch.Generator().manual_seed(positions)
    hidden = torch.randn(2, 350, 32, generator=generator)
    index = torch.randperm(700, generator=generator)[:positions].sort().values
    labels = torch.randint(0, 97, (positions,), generator=generator)
    shapes = []

    def watched(function, _what):
        def call(logits, targets):
            shapes.append(len(logits))
            assert len(logits) == len(targets)
            return function(logits, targets)

        call.problem = ""
        return call

    monkeypatch.setattr(loss, "compiled_function", watched)

    def run(compile_it: bool):
        sums = [torch.zeros_like(p) for p in parameters]

        def accumulate(gradients):
            for total, gradient in zip(sums, gradients):
                total.add_(gradient)

        found, gradient = chunked_loss(
            skeleton,
            hidden,
            LossTargets(index, labels, 0.01),
            LossChunks(chunk, compile_it),
            TailGradients(parameters, accumulate),
        )
        return [found, gradient, *sums]

    plain = run(False)
    assert not shapes
    for ours, theirs in zip(run(True), plain):
        torch.testing.assert_close(ours, theirs, rtol=2e-5, atol=2e-6)
    step = -(-chunk // loss.SHAPES)
    *full, last = shapes
    assert set(full) <= {chunk} and (last == chunk or (last % step == 0 and last < chunk))
    assert len(shapes) == -(-positions // chunk) and sum(shapes) - positions < step
    nowhere = torch.ones(700, dtype=torch.bool)
    nowhere[index] = False
    assert not plain[1].view(700, 32)[nowhere].any()


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_loss_that_cannot_be_compiled_is_the_plain_one_in_smaller_chunks(
    monkeypatch, tail, where
):
    skeleton, parameters = tail
    hidden, index, labels = torch.randn(1, 64, 32), torch.arange(64), torch.randint(0, 97, (64,))
    sizes = []

    def refused(logits, targets):
        if where == "forward":
            raise RuntimeError("no such kernel")
        return _Breaks.apply(loss.cross_entropy(logits, targets))

    function = lambda_of(loss.cross_entropy)
    function._compiled = refused
    monkeypatch.setattr(loss, "compiled_function", lambda *_: function)
    logits_of = skeleton.logits
    monkeypatch.setattr(
        skeleton, "logits", lambda chunk: (sizes.append(len(chunk)), logits_of(chunk))[1]
    )

    def run(compile_it: bool):
        return chunked_loss(
            skeleton,
            hidden,
            LossTargets(index, labels, 0.01),
            LossChunks(32, compile_it),
            TailGradients(parameters, lambda gradients: None),
        )

    plain = run(False)
    for _ in range(2):
        sizes.clear()
        for ours, theirs in zip(run(True), plain):
            torch.testing.assert_close(ours, theirs, rtol=2e-5, atol=2e-6)
    assert function.problem == "no such kernel" and max(sizes) == 32 // loss.UNCOMPILED


def test_a_micro_batch_without_loss_has_none(monkeypatch, tail):
    skeleton, parameters = tail
    nothing = torch.zeros(0, dtype=torch.long)
    for compile_it in (False, True):
        total, gradient = chunked_loss(
            skeleton,
            torch.randn(1, 5, 32),
            LossTargets(nothing, nothing, 1.0),
            LossChunks(4, compile_it),
            TailGradients(parameters, lambda gradients: pytest.fail("there are none")),
        )
        assert total == 0 and not gradient.any()


# ---------------------------------------------------------------------- what is kept


def kept_of_compiled(model, length: int) -> int:
    """Returns the bytes that autograd keeps of a first block that torch really partitions, on the
    meta device.
    """
    with torch.no_grad():
        captured = model.skeleton.capture(torch.zeros(1, length, dtype=torch.long), None)
    block = on_meta(model, model.blocks[0])
    given = arguments_on_meta(captured.arguments[0])
    own = {
        activations._storage(t)
        for t in [
            *block.parameters(),
            *block.buffers(),
            *(t for _, t in tensors_in(given.args) + tensors_in(given.kwargs)),
        ]
    }
    kept = {}

    def keep(tensor):
        if activations._storage(tensor) not in own:
            kept[activations._storage(tensor)] = tensor.untyped_storage().nbytes()
        return tensor

    torch._dynamo.reset()
    run = torch.compile(block, backend="aot_eager_decomp_partition", dynamic=False)
    entering = captured.hidden.to("meta").requires_grad_()
    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        out = given.call(run, entering)
    assert out.requires_grad
    return sum(kept.values())


@pytest.fixture
def attention_of_a_gpu():
    """On the meta device, and left out of what is compiled."""
    set_up_compiler()
    interface = transformers().AttentionInterface

    def attend(module, query, key, value, mask, **given):
        out = activations._KeepsInputs.apply(query, key, value, None, activations._Origins())
        return out.transpose(1, 2).contiguous(), None

    interface.register(DOCUMENTS, torch.compiler.disable(attend))
    yield
    interface.register(DOCUMENTS, torch.compiler.disable(attention.attention))
    torch._dynamo.reset()


@pytest.mark.slow("torch compiles several blocks, for five seconds or more")
@pytest.mark.parametrize("family", ["qwen2", "llama", "qwen3"])
def test_compiled_activations_are_what_a_compiled_block_keeps(family, request):
    changes = dict(hidden_size=128, intermediate_size=704, num_attention_heads=4) | (
        {"head_dim": 32} if family == "qwen3" else {}
    )
    model = build_model(tiny_config(family, **changes), ModelConfig(source="x", dtype="bfloat16"))
    counted = count_activations(model)
    assert len(counted) == 3 and all(c.compiled == counted[0].compiled for c in counted)
    request.getfixturevalue("attention_of_a_gpu")
    short, long = kept_of_compiled(model, 32), kept_of_compiled(model, 64)
    per_token = (long - short) / 32
    assert counted[0].compiled.per_token == pytest.approx(per_token)
    assert counted[0].compiled.per_pair == 0
    assert counted[0].compiled.per_token < 0.6 * counted[0].plain.per_token
