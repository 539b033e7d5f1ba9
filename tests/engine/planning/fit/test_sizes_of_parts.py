"""Where parts of a model are trained, what a plan takes is the engine's own, to the byte, and what
is chosen is a plan that the engine takes.
"""

from __future__ import annotations

import dataclasses

import pytest

from engine.config.settings import ModelConfig, TrainConfig
from engine.config.trained_parts import Parts
from engine.errors import ConfigError
from engine.machine.read_machine import Machine
from engine.model.build.activations import count_activations
from engine.model.build.build import build_model
from engine.model.build.find_shape import shape_from_source
from engine.model.build.measure_shape import shape_of
from engine.model.build.pretrained_files import load_config
from engine.model.build.shape_of_run import shape_of_run
from engine.planning.fit.buffer_sizes import offloaded_input_bytes
from engine.planning.fit.choose import choose
from engine.planning.fit.cost_model import MicroBatch
from engine.planning.fit.job import Job, Target
from engine.planning.fit.memory_items import PartName, items_of
from engine.planning.fit.report import estimate
from engine.planning.fit.simulate_step import predicted_step
from engine.planning.schedule.choices import PlanChoices
from engine.planning.schedule.verify_plan import verify_plan
from engine.planning.shape.active_parameters import parameter_flops
from engine.planning.shape.model_shape import ModelShape
from engine.planning.shape.serialize import pack, unpack
from engine.text import GIB
from engine.tools.bench.step_flops import step_flops
from tests.support.chosen import FAST_RATES, big_shape, config
from tests.support.device_bytes import agreeing_plans, filled_states
from tests.support.folders import make_model
from tests.support.size_grid import BUFFER_GRID, DEVICE_UPDATE_GRID
from tests.support.tiny import plain_model, streamed, tiny_config

pytestmark = pytest.mark.computing

MODULES = {"gpt2": ("c_fc", "wte", "ln_f"), "mixtral": ("gate", "embed_tokens", "norm")}
"""By family, the names of a module in the blocks, of the embedding, and of the final norm."""
PARTS = ("last block", "inside of blocks", "outside")


def parts_of(name: str, family: str) -> Parts:
    inside, *outside = MODULES.get(family, ("up_proj", "embed_tokens", "norm"))
    if name == "last block":
        return Parts(last_blocks=1)
    names = [inside] if name == "inside of blocks" else outside
    return Parts(tuple(f"*.{each}.*" for each in names))


LARGE = Machine("cpu", 8, 64 * GIB, 64 * GIB, 60 * GIB, (), "", 0)


@pytest.mark.parametrize(
    "family,tied,dtype",
    [
        ("llama", False, "bfloat16"),
        ("qwen2", True, "float32"),
        ("gpt2", True, "bfloat16"),
        ("mixtral", False, "bfloat16"),
    ],
)
@pytest.mark.parametrize("name", PARTS)
def test_fixed_buffers_are_the_device_state_to_the_byte(name, family, tied, dtype):
    configuration = tiny_config(family, tie_word_embeddings=tied)
    how = ModelConfig(source="tiny", dtype=dtype)
    model = build_model(configuration, how, parts_of(name, family))
    shape = shape_of(model)
    assert shape.frozen_units == model.frozen_units
    states = filled_states(model)
    assert states.ram.nbytes == shape.states.host_bytes
    plans = [*BUFFER_GRID[::3], *DEVICE_UPDATE_GRID[::2]]
    assert (
        agreeing_plans(
            model, states, (one for one in plans if one.activations.blocks_per_saved_input == 1)
        )
        > 20
    )


@pytest.mark.parametrize("offloaded_block_inputs", [False, True])
def test_host_block_inputs_are_the_engine_s_to_the_byte(offloaded_block_inputs):
    choices = PlanChoices().changed(micro_batches=2, offloaded_block_inputs=offloaded_block_inputs)
    plain = plain_model(tiny_config("llama"))
    run = streamed(plain, choices, tokens=24, parts=Parts(last_blocks=1))
    expected = offloaded_input_bytes(shape_of(run.model), choices, 24)
    assert expected == run.engine.block_input_bytes
    assert expected == (2 * 24 * 32 * 4 if offloaded_block_inputs else 0)
    run.close()


def test_a_frozen_parameter_takes_two_bytes_of_ram_and_nothing_else():
    configuration = tiny_config("llama", hidden_size=64, intermediate_size=192)
    whole = build_model(configuration, ModelConfig(source="tiny"))
    model = build_model(configuration, ModelConfig(source="tiny"), Parts(last_blocks=1))
    *frozen, last, head = model.layouts
    for layout in (*frozen, head):
        assert layout.numel == 0 and layout.is_frozen
        assert layout.plane_bytes("bfloat16") == {
            "weight_high": 2 * layout.parameter_count,
            "weight_low": 0,
            "exp_avg": 0,
            "exp_avg_sq": 0,
            "grad": 0,
        }
    assert last == whole.layouts[-2]
    assert model.trained_count == last.parameter_count == last.trained_count


# ------------------------------------------------------------------ activations and FLOPs


def test_a_product_whose_weight_is_frozen_keeps_no_input():
    """Of a block of which the projection into the MLP alone is trained, autograd keeps less."""
    configuration = tiny_config("llama", num_hidden_layers=4)
    how = ModelConfig(source="tiny", dtype="float32")
    whole = count_activations(build_model(configuration, how))
    parts = count_activations(
        build_model(configuration, how, Parts(("model.layers.1.mlp.up_proj.weight",), 1))
    )
    assert whole is not None and parts is not None
    sizes = [each.plain.per_token for each in parts]
    full = whole[0].plain.per_token
    assert sizes[0] == full, "it has no backward, and is counted as if it had one"
    assert sizes[1] < sizes[2] < full, "the first trained block has no gradient of its input"
    assert sizes[3] == full


def test_flops_are_those_of_what_is_computed():
    configuration = tiny_config("llama")
    how = ModelConfig(source="tiny", dtype="float32")
    whole = shape_of(build_model(configuration, how))
    shape = shape_of(build_model(configuration, how, Parts(last_blocks=1)))
    every, block, head = (
        whole.parameter_count,
        whole.blocks[0].parameter_count,
        whole.head.parameter_count,
    )
    expected = 2 * (every + (block + head) + block)
    assert parameter_flops(shape.counted_parameters, 1) == pytest.approx(expected, rel=1e-4)
    counted = step_flops(shape, 4, 16, recomputed=1)
    tokens, attention = 64, whole.attention.flops(4, 16)
    outside = whole.embed.parameter_count
    model = 2 * tokens * (every - outside + block + head + block) + (3 + 2) * attention
    assert counted["model"] == pytest.approx(model, rel=1e-3)
    assert counted["hardware"] - counted["model"] == pytest.approx(2 * tokens * block + attention)
    same = shape_of(build_model(configuration, how, Parts(("*",))))
    assert parameter_flops(same.counted_parameters, 7) == parameter_flops(
        whole.active_parameters, 7
    )


# ------------------------------------------------------------------ choosing


def with_last(shape: ModelShape, blocks: int) -> ModelShape:
    """The shape of the same model of which the last blocks are trained."""
    first = len(shape.units) - 1 - blocks
    units = [
        unit
        if first <= at < len(shape.units) - 1
        else dataclasses.replace(
            unit, numel=0, frozen_numel=unit.numel, frozen_count=unit.parameter_count
        )
        for at, unit in enumerate(shape.units)
    ]
    return dataclasses.replace(
        shape, units=tuple(units), work_parameters=shape.parameter_count // 2
    )


JOBS = {
    "24 GiB, 64 of RAM": (24, 60, {}),
    "80 GiB, little RAM": (80, 24, {}),
    "141 GiB": (141, 200, {}),
    "gradients on the GPU": (24, 60, {"engine__gradients": "gpu"}),
    "all activations": (80, 60, {"engine__activation_checkpointing": "none"}),
    "no unit on the GPU": (80, 60, {"engine__states": "host", "engine__rounds": 2}),
}


@pytest.mark.parametrize("blocks", [1, 4, 27])
@pytest.mark.parametrize("name", JOBS)
def test_what_is_chosen_is_sound_and_fits(name, blocks, compiler):
    gib, ram, changes = JOBS[name]
    shape = with_last(big_shape(), blocks)
    job = Job(shape, config(train__batch_size=32, **changes), 1024)
    chosen = choose(job, Target("cuda", round(gib * GIB), ram * GIB, FAST_RATES))
    choices = chosen.choices
    assert chosen.gpu_bytes <= gib * GIB
    assert choices.activations.blocks_without_recompute <= blocks and not choices.kernels.graphs
    assert not set(choices.updates.device_updated_units) & set(shape.frozen_units)
    plan, timing = predicted_step(
        shape, choices, FAST_RATES, MicroBatch(chosen.micro_batch_size, 1024), "cuda"
    )
    verify_plan(plan)
    assert timing.seconds > 0


def test_a_step_of_few_blocks_is_predicted_shorter(compiler):
    def seconds(shape: ModelShape) -> float:
        job = Job(shape, config(train__batch_size=32), 1024)
        chosen = choose(job, Target("cuda", 80 * GIB, 200 * GIB, FAST_RATES))
        micro_batch = MicroBatch(chosen.micro_batch_size, 1024)
        return predicted_step(shape, chosen.choices, FAST_RATES, micro_batch, "cuda")[1].seconds

    whole = seconds(big_shape())
    few, more = (seconds(with_last(big_shape(), blocks)) for blocks in (2, 14))
    assert few < more < whole
    assert few < whole / 2, "nearly a forward pass alone"


def test_pairs_of_blocks_are_refused():
    job = Job(
        with_last(big_shape(), 2), config(engine__activation_checkpointing="offload_pairs"), 1024
    )
    with pytest.raises(ConfigError, match="offload_pairs is for models that are trained whole"):
        choose(job, Target("cuda", 80 * GIB, 200 * GIB, FAST_RATES))


# ------------------------------------------------------------------ reports


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_report_itemises_what_the_host_states_allocate(tmp_path, dtype):
    folder = make_model(tmp_path / "model")
    job = TrainConfig.from_dict(
        {
            "model": {"source": str(folder), "dtype": dtype},
            "data": {"source": "rows.jsonl", "max_seq_len": 32},
            "train": {"steps": 1, "batch_size": 2, "method": "parts", "last_blocks": 1},
        }
    )
    report = estimate(job, LARGE, shape_of_run(job))
    shape = shape_from_source(job.model, job.train.parts)
    assert shape is shape_from_source(job.model, job.train.parts)
    assert shape != shape_from_source(job.model)
    assert report.model["trained_parameters"] == shape.trained_count < shape.parameter_count
    planes = [item for item in items_of(report.to_dict(), PartName.HOST) if item.kind.is_plane]
    model = build_model(load_config(str(folder)), job.model, job.train.parts)
    states = filled_states(model)
    assert sum(item.bytes for item in planes) == states.ram.nbytes


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_shape_with_parts_is_kept_as_it_is(dtype):
    how = ModelConfig(source="tiny", dtype=dtype)
    for name in PARTS:
        model = build_model(tiny_config("llama"), how, parts_of(name, "llama"))
        shape = shape_of(model, "tiny")
        assert unpack(pack({dtype: shape}), dtype, "tiny") == shape
