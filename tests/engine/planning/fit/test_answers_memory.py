"""What the fit report says of answers, for models of the catalog on known machines."""

from __future__ import annotations

from engine.config.settings import TrainConfig
from engine.machine.known_machines import named_machine
from engine.planning.fit.report import estimate
from engine.planning.shape.catalog import catalog
from engine.text import in_gib


def told(model="Qwen/Qwen2.5-1.5B", machine="RTX 4090", **values):
    """The rows about answers, by name, and the sizes of the caches."""
    given = {"name": "a", "model": {"source": model}, "data": {"source": "b"}}
    config = TrainConfig.from_dict(given).with_values(values)
    entry = next(each for each in catalog() if each.id == model)
    shape = entry.shape(config.model.dtype)
    report = estimate(config, named_machine(machine, 256), shape)
    assert (report.answers is None) == (report.to_dict()["answers"] is None)
    if report.answers is None:
        return {}, []
    sizes = [kind.bytes for kind in report.answers.kinds]
    return {name: " ".join(rest) for name, *rest in report.answers.rows(in_gib)}, sizes


def test_the_report_says_what_answers_take_and_where_the_weights_are():
    asked = {"output.exact_match_samples": 200, "output.sample_prompts": ("Hello",)}
    rows, sizes = told(**asked)
    # A token has keys and values of 28 blocks with two heads of 128, in bf16; 200 rows are 256
    # places of 1,088 positions.
    assert sizes[0] == 256 * 1088 * 28 * 2 * 2 * 128 * 2
    assert rows["Validation answers"].startswith(
        "7.4 GiB of free GPU memory 200 at once, each up to 1,"
    )
    assert rows["Sample answers"].endswith("up to 69 tokens")
    assert "of 28 blocks come from RAM for every token" in rows["Weights for answers"]
    rows, _ = told(machine="H200", **asked)
    assert rows["Weights for answers"].strip() == "all stay on the GPU"
    rows, less = told(**asked | {"engine.gpu_memory_gib": 6, "data.max_seq_len": 2048})
    assert " 200 at once" not in rows["Validation answers"] and less[0] < 3 << 30


def test_nothing_is_said_where_it_does_not_apply():
    rows, _ = told()
    assert list(rows) == ["Chat while paused", "Weights for answers"]
    # This family keeps a state of its own; and what does not fit draws no answers.
    assert told("Qwen/Qwen3.5-0.8B") == told("meta-llama/Llama-3.1-405B") == ({}, [])
