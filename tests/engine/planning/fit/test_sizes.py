"""What a plan takes on the device, and what a model's shape says, are the engine's own, to the byte
where it can be.
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys

import pytest
import torch

from engine.config.settings import ModelConfig
from engine.errors import ModelError
from engine.machine.read_machine import Machine
from engine.model.blocks.block_inputs import tensors_in
from engine.model.build.activations import count_activations
from engine.model.build.attention_documents import Documents, Pattern
from engine.model.build.build import build_model
from engine.model.build.find_shape import shape_from_source
from engine.model.build.measure_shape import shape_of
from engine.model.build.pretrained_files import load_config
from engine.paths import PROGRAM_ROOT
from engine.planning.fit.buffer_sizes import fixed_items, offloaded_input_bytes, update_buffer
from engine.planning.fit.memory_items import PartName, items_of
from engine.planning.fit.report import estimate
from engine.planning.schedule.build import build_step_plan
from engine.planning.schedule.choices import EmbedAndHead, PlanChoices, PlaneSizes
from engine.planning.shape.activation_sizes import DOCUMENTS
from engine.runtime.device.cpu_backend import CpuBackend
from engine.runtime.host.host_states import HostStates
from engine.runtime.step.device_state import DeviceState, update_buffer_of
from engine.text import GIB
from tests.support.chosen import big_shape
from tests.support.folders import make_config, make_model
from tests.support.optimizers import ALL
from tests.support.size_grid import BUFFER_GRID, DEVICE_UPDATE_GRID
from tests.support.tiny import plain_model, streamed, tiny_config

pytestmark = pytest.mark.computing

QWEN_7B = dict(
    model_type="qwen2",
    architectures=["Qwen2ForCausalLM"],
    hidden_size=3584,
    intermediate_size=18944,
    num_hidden_layers=28,
    num_attention_heads=28,
    num_key_value_heads=4,
    vocab_size=152064,
    max_position_embeddings=32768,
    tie_word_embeddings=False,
    use_sliding_window=False,
)

ON_GPU = dict(gradients_on_gpu=True)
EMBED_AND_HEAD = ON_GPU | dict(embed_and_head=EmbedAndHead.IN_KEPT_GRADIENTS)
PLAN_FAMILIES = [
    choices.changed(**changes)
    for choices in DEVICE_UPDATE_GRID[::7] + BUFFER_GRID[::11]
    for changes in (
        ON_GPU,
        dict(update_chunks=3),
        dict(
            blocks_per_saved_input=2,
            slots=2,
            blocks_without_recompute=min(1, choices.activations.blocks_without_recompute),
        ),
        EMBED_AND_HEAD,
        EMBED_AND_HEAD
        | dict(
            blocks_per_saved_input=2,
            slots=2,
            blocks_without_recompute=min(1, choices.activations.blocks_without_recompute),
        ),
        *(
            plan_family
            | dict(
                gpu_resident_units=gpu_resident,
                blocks_kept_in_slots=0,
                device_updated_units=device_updates,
                update_buffers=2,
            )
            for plan_family in ({}, ON_GPU)
            for gpu_resident, device_updates in ((1, ("block 2",)), (3, ("head",)))
        ),
    )
    if choices.gradients.main_grad != "host"
    or not changes.keys() & {"gradients_on_gpu", "gpu_resident_units"}
    if choices.gradients.main_grad == "vertical" or "embed_and_head" not in changes
]


@pytest.mark.parametrize(
    "family,tied,dtype",
    [
        ("llama", False, "bfloat16"),
        ("qwen2", True, "float32"),
        ("mixtral", False, "bfloat16"),
        ("gpt2", True, "bfloat16"),
    ],
)
@pytest.mark.parametrize("optimizer", ALL)
def test_fixed_buffers_are_the_device_state_to_the_byte(family, tied, dtype, optimizer):
    model = build_model(
        tiny_config(family, tie_word_embeddings=tied), ModelConfig(source="tiny", dtype=dtype)
    )
    shape = shape_of(model).with_optimizer(optimizer)
    names = [unit.name for unit in model.blocks]
    states = HostStates(model.layouts, dtype, threads=1)
    states.allocate_weights()
    states.allocate_states(optimizer=optimizer)
    backend = CpuBackend()
    numel = {unit.name: unit.numel for unit in shape.units}
    # Moments in other kinds change update buffers alone.
    grid = BUFFER_GRID if optimizer == "adamw" else BUFFER_GRID[::20]
    for choices in grid + DEVICE_UPDATE_GRID[::2] + PLAN_FAMILIES[::2]:
        if choices.streaming.embed_and_head_in_kept_gradients and (tied or not shape.embed_chunk):
            continue
        buffer = update_buffer(shape, choices)
        of_states = update_buffer_of(states, choices.updates.update_chunks)
        assert buffer == (
            of_states.without_gradients if choices.gradients.gradients_on_gpu else of_states
        )
        sizes = PlaneSizes(
            numel=numel,
            chunk_numel=buffer.numel,
            buffer_bytes=buffer.bytes,
            embed_chunk=shape.embed_chunk,
            item_bytes=shape.item_bytes,
        )
        plan = build_step_plan(names, model.tied, choices, sizes)
        states.placement.arrange(choices.placement.gpu_resident(names), backend)
        state = DeviceState(model, plan, torch.device("cpu"), 24 * 32, states, buffer)
        assert (
            sum(item.bytes for item in fixed_items(shape, choices, 24 * 32)) == state.fixed_bytes()
        ), choices


@pytest.mark.parametrize(
    "choices",
    [
        PlanChoices().changed(micro_batches=2),
        PlanChoices().changed(micro_batches=2, offloaded_block_inputs=True),
        PlanChoices().changed(
            micro_batches=2, offloaded_block_inputs=True, blocks_per_saved_input=2
        ),
        PlanChoices().changed(
            micro_batches=4,
            rounds=2,
            main_grad="host",
            offloaded_block_inputs=True,
            blocks_kept_in_slots=2,
            blocks_without_recompute=1,
        ),
    ],
)
def test_host_block_inputs_are_the_engine_s_to_the_byte(choices):
    run = streamed(plain_model(tiny_config("llama")), choices, tokens=24)
    expected = offloaded_input_bytes(shape_of(run.model), choices, 24)
    assert expected == run.engine.block_input_bytes
    assert (expected > 0) == choices.activations.offloaded_block_inputs
    run.close()


LARGE = Machine("cpu", 8, 64 * GIB, 64 * GIB, 60 * GIB, (), "", 0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family, tied", [("llama", False), ("gpt2", True)])
def test_the_host_states_allocate_what_the_report_itemises(tmp_path, family, tied, dtype):
    """Plane by plane, from what a person reads before a run to what the kernel maps in it."""
    folder = make_model(tmp_path / "model", family, tie_word_embeddings=tied)
    config = make_config(tmp_path, **{"model.source": str(folder), "model.dtype": dtype})
    report = estimate(config, LARGE, shape_from_source(config.model)).to_dict()
    itemised = {i.name: i.bytes for i in items_of(report, PartName.HOST) if i.kind.is_plane}
    model = build_model(load_config(str(folder)), config.model)
    states = HostStates(model.layouts, dtype, threads=1)
    states.allocate_weights()
    states.allocate_states()
    allocated = {
        plane: sum(states.array(unit, plane).nbytes for unit in states.layouts)
        for plane in states.planes
    }
    assert allocated == itemised
    assert states.ram.nbytes == sum(itemised.values())
    states.close()


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "olmo2", "mixtral", "qwen3_moe"])
def test_counted_activations_are_what_autograd_keeps(family):
    """Counted on the meta device, against the tensors that a real block really keeps, masked and
    not.
    """
    wide = dict(hidden_size=128, intermediate_size=192, head_dim=32) | (
        {"sliding_window": 512} if family == "gemma2" else {}
    )
    model = build_model(
        tiny_config(family, max_position_embeddings=512, **wide),
        ModelConfig(source="x", dtype="bfloat16"),
    )
    plain = plain_model(tiny_config(family, max_position_embeddings=512, **wide), torch.bfloat16)
    plain.set_attn_implementation(DOCUMENTS)
    block, counted = plain.model.layers[0], count_activations(model)
    for masked in (False, True):
        length = 128
        captured = model.skeleton.capture(torch.zeros(1, length, dtype=torch.long), None)
        given = captured.arguments[0]
        if masked:
            given.kwargs["attention_mask"] = Pattern(
                Documents.whole_rows(1, length, torch.from_numpy), window=50
            )
        own = {t.data_ptr() for t in block.parameters()} | {
            t.data_ptr() for _, t in tensors_in(given.args) + tensors_in(given.kwargs)
        }
        kept = {}

        def keep(tensor):
            if tensor.untyped_storage().data_ptr() not in own:
                kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        hidden = captured.hidden.detach().clone().normal_().requires_grad_()
        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
            out = given.call(block, hidden)
        assert (counted[0].masked if masked else counted[0].plain).of(1, length) == pytest.approx(
            sum(kept.values()), rel=0.06
        )
        del out


@pytest.mark.parametrize(
    "family, kinds", [("gpt2", 0), ("qwen2", 1), ("mixtral", 1), ("gemma3_text", 2)]
)
def test_rotary_embeddings_are_counted_by_the_token(family, kinds):
    """A cosine and a sine for each feature of a head, of each kind of layer; none where positions
    come from a table.
    """
    layers = (
        {"layer_types": ["sliding_attention", "full_attention"], "num_hidden_layers": 2}
        if kinds == 2
        else {}
    )
    model = build_model(tiny_config(family, **layers), ModelConfig(source="tiny", dtype="float32"))
    shape, text = shape_of(model), model.config.get_text_config()
    width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    assert shape.argument_numel == 2 * width * kinds
    assert (shape.attention.heads, shape.attention.width) == (
        text.num_attention_heads,
        text.num_attention_heads * width,
    )


def test_a_shape_from_a_config_file_alone(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(QWEN_7B), encoding="utf-8")
    shape = shape_from_source(ModelConfig(source=str(tmp_path)))
    assert shape.parameter_count == shape.active_parameters == 7_615_616_512
    alignment = 14 * sum(unit.numel - unit.parameter_count for unit in shape.units)
    assert shape.states.host_bytes == 14 * shape.parameter_count + alignment
    assert alignment < 1e-4 * shape.states.host_bytes
    assert shape.states.checkpoint_bytes() == 12 * shape.gradient_numel
    assert shape.export_bytes("bfloat16") == 2 * shape.parameter_count
    # design.md section 4: measured on the GPU.
    assert shape.blocks[0].activations.of(1, 1024) / 1024 == pytest.approx(220 * 1024, rel=0.02)
    assert shape == dataclasses.replace(
        big_shape(),
        source=str(tmp_path),
        units=shape.units,
        attention=dataclasses.replace(big_shape().attention, implementation=DOCUMENTS),
        cache_numel=28 * 2 * 4 * 128,  # keys and values of 4 heads
    )
    assert shape_from_source(ModelConfig(source=str(tmp_path))) is shape


def test_a_shape_follows_its_file_and_a_failure_is_not_final(tmp_path):
    model = ModelConfig(source=str(tmp_path))
    with pytest.raises(ModelError, match="no config.json"):
        shape_from_source(model)
    tiny_config("llama").save_pretrained(tmp_path)
    three = shape_from_source(model)
    assert len(three.blocks) == 3 and three.hidden_size == 32
    tiny_config("llama", num_hidden_layers=4).save_pretrained(tmp_path)
    assert len(shape_from_source(model).blocks) == 4


def test_planning_needs_no_torch():
    code = (
        "import sys\n"
        "import engine.planning.shape.model_shape, engine.model.build.find_shape\n"
        "import engine.machine.known_machines\n"
        "import engine.planning.fit.choose, engine.planning.fit.report, engine.tools.cli.check\n"
        "sys.exit('torch' in sys.modules)\n"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=PROGRAM_ROOT).returncode == 0
