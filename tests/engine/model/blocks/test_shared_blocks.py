"""Blocks that share weights, as those of Zamba do, train as plain transformers does."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaForCausalLM

from engine.config.adapters import Adapters
from engine.config.settings import ModelConfig
from engine.config.trained_parts import Parts
from engine.errors import ConfigError, ModelError
from engine.model.build.build import build_model
from engine.model.build.library import empty_model
from engine.model.build.measure_shape import shape_of
from engine.planning.schedule.choices import PlanChoices
from engine.planning.shape.serialize import pack, unpack
from engine.runtime.host.host_states import HostStates
from engine.runtime.sampling.answers import AnswerLimits
from engine.training.export.export import export_run
from engine.training.loop.run import resume_run, start_run
from engine.training.weights.weights import initialize
from tests.support.bf16_parity import Rows, compare_in_bf16
from tests.support.checkpoints_of_families import load_plain
from tests.support.families import tiny_family_config
from tests.support.family_parity import law_one
from tests.support.folders import make_config, make_tokenizer
from tests.support.plain_answers import PROMPTS, plain_answer
from tests.support.rank_parity import assert_near
from tests.support.same_bits import assert_same_bits
from tests.support.tiny import plain_loss, plain_model, random_batches, streamed, tiny_config
from tests.support.trained_ranks import Job, train
from tests.support.trained_runs import execute, planes_on_disk

pytestmark = pytest.mark.computing

BASE = PlanChoices().changed(micro_batches=2)
PLANS = {
    "all kept, one slot": dict(blocks_without_recompute=4, slots=1),
    "block inputs on the host": dict(offloaded_block_inputs=True),
    "pairs": dict(blocks_per_saved_input=2),
    "all live on the device": dict(gpu_resident_units=6),
    "gradients on the GPU": dict(
        gradients_on_gpu=True, device_updated_units=("embed",), update_buffers=1
    ),
}


def two_shared():
    """Returns a Zamba2 with two blocks that are called in turn, each with factors for each call."""
    return tiny_family_config(
        "zamba2",
        layers_block_type=["hybrid"] * 4,
        num_mem_blocks=2,
        use_shared_attention_adapter=True,
        use_mem_rope=True,
    )


@pytest.fixture
def llama(monkeypatch):
    """Returns the configuration of a Llama whose first and last block share two matrices."""
    shared = ("self_attn.q_proj", "mlp.down_proj")
    keys = {f"model.layers.2.{each}.weight": f"model.layers.0.{each}.weight" for each in shared}
    own = LlamaForCausalLM._tied_weights_keys
    monkeypatch.setattr(LlamaForCausalLM, "_tied_weights_keys", own | keys)
    return tiny_config("llama", tie_word_embeddings=True)


def build(config, parts: Parts | Adapters | None = None):
    return build_model(config, ModelConfig(source="tiny", dtype="float32"), parts)


def test_blocks_of_any_family_may_share(llama):
    assert [len(unit.shared) for unit in build(llama).blocks] == [2, 0, 2]
    law_one(llama, steps=3)


@pytest.mark.slow("a plain run trains Llama")
def test_ten_steps_are_those_of_plain_training():
    law_one(two_shared(), steps=10)


@pytest.mark.slow("it trains plain bf16 and float32 beside")
def test_training_in_bf16_is_as_near_to_float32_as_plain_training():
    compare_in_bf16(two_shared(), Rows(2, 12, 7), BASE, steps=2)


def planes_after(config, choices: PlanChoices, **how) -> list[torch.Tensor]:
    run = streamed(plain_model(config), choices, dtype="bfloat16", **how)
    return run.planes_after(choices.batching.micro_batches)


@pytest.mark.slow("it trains by six plans")
def test_any_plan_gives_the_same_bits():
    config = two_shared()
    expected = planes_after(config, BASE)
    for changes in PLANS.values():
        assert_same_bits(planes_after(config, BASE.changed(**changes)), expected)


@pytest.mark.slow("tests of other families say as much of sampling")
def test_greedy_answers_and_evaluations_are_those_of_the_plain_model():
    plain = plain_model(tiny_family_config("zamba")).eval()
    run = streamed(plain, BASE)
    limits = AnswerLimits(6, {2})
    assert run.sampler.generate(PROMPTS[:2], limits) == [
        plain_answer(plain, prompt, 6, use_cache=False) for prompt in PROMPTS[:2]
    ]
    batches = random_batches(3, seed=5)
    with torch.no_grad():
        assert run.engine.evaluate(batches) == pytest.approx(plain_loss(plain, batches).item())
    run.close()


@pytest.mark.slow("it trains by three ranks")
def test_ranks_train_what_one_rank_trains():
    job = Job("zamba2", steps=3, exact=True)
    assert_near(train(2, job), train(1, job))


@pytest.mark.slow("it has three runs")
def test_a_run_resumes_bit_by_bit_and_exports_the_names_of_its_source(tmp_path):
    config = two_shared()
    config.vocab_size = 128
    plain_model(config).save_pretrained(tmp_path / "model")
    make_tokenizer().save_pretrained(tmp_path / "model")
    settings = make_config(tmp_path, **{"train.steps": 3, "output.eval_every": 0})
    whole, part = (start_run(settings, tmp_path / "runs") for _ in range(2))
    assert execute(whole).state == "finished", whole.recorder.snapshot.reason
    assert execute(part, {1: "stop"}).state == "stopped"
    again = resume_run(tmp_path / "runs", part.id)
    assert execute(again).state == "finished"
    assert planes_on_disk(again) == planes_on_disk(whole)
    export_run(tmp_path / "runs", again.id, tmp_path / "home")
    source, home = (load_file(tmp_path / at / "model.safetensors") for at in ("model", "home"))
    assert home.keys() == source.keys()
    assert all(home[name].shape == source[name].shape for name in source)
    loaded = load_plain(tmp_path / "home", torch.float32)
    first, third = (loaded.model.layers[at].shared_transformer for at in (0, 2))
    assert first.feed_forward.down_proj.weight is third.feed_forward.down_proj.weight


def test_random_weights_are_drawn_for_what_blocks_share(llama):
    model = build(llama)
    states = HostStates(model.layouts, "float32", threads=1)
    states.allocate_weights()
    initialize(model, states, 1, torch.device("cpu"))
    for unit in model.blocks:
        for spec in model.shared_by(unit):
            assert states.parameters.master("embed", spec.name).std() > 0.01
    states.close()


def test_blocks_take_only_what_they_compute_from():
    """All blocks of Zamba are given the embedded tokens, and those with attention use them."""
    cross_layer_flow = build(tiny_family_config("zamba")).cross_layer_flow
    assert [len(block.cross_layer_inputs) for block in cross_layer_flow.blocks] == [0, 1, 0, 1]


@pytest.mark.slow("it measures a shape")
def test_what_blocks_share_is_counted_once_in_memory_and_at_each_use_in_work():
    model = build_model(two_shared(), ModelConfig(source="tiny", dtype="bfloat16"))
    shape = shape_of(model)
    shared = {spec.name: spec.numel for unit in model.blocks for spec in model.shared_by(unit)}
    own = shape.parameter_count - sum(shared.values())
    assert shape.embed.shared_count == sum(shared.values())
    assert sum(unit.shared_count for unit in shape.blocks) == 2 * sum(shared.values())
    assert shape.active_parameters == own + 2 * sum(shared.values())
    assert shape.block_share == 1.0 and not shape.learned_positions
    names = {name for name, _ in empty_model(two_shared(), torch.bfloat16).named_parameters()}
    assert {spec.full_name for layout in model.layouts for spec in layout.parameters} == names
    assert unpack(pack({"bfloat16": shape}), "bfloat16", "") == shape


@pytest.mark.parametrize("parts", [Adapters(rank=4), Parts(last_blocks=1)], ids=["lora", "parts"])
def test_parts_of_such_a_model_are_refused_by_name(llama, parts):
    with pytest.raises(ConfigError, match="blocks of llama share weights.* set it to full"):
        build(llama, parts)


@pytest.mark.slow("its small model is tried for packing first")
def test_blocks_that_follow_each_other_may_not_share():
    config = tiny_family_config("zamba", layers_block_type=["hybrid"] * 4)
    with pytest.raises(ModelError, match="between block 0 and block 1, which follow each other"):
        build(config)
