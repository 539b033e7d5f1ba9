"""`launch.py bench` measures adapters, parts of a model and preferences, end to end on the CPU."""

from __future__ import annotations

import json

import pytest

import launch
from engine.config.preference_settings import Objective
from engine.config.settings import TrainConfig
from engine.model.build.shape_of_run import shape_of_run
from engine.tools.bench.random_pairs import AnswersOfSteps, random_answers
from tests.support.folders import make_config

pytestmark = pytest.mark.computing
LENGTH, ROWS = 32, 4


@pytest.fixture(autouse=True)
def short(monkeypatch):
    monkeypatch.setattr("engine.tools.cli.bench.CEILING_SECONDS", {"cpu": 0.01})
    monkeypatch.setattr("engine.runtime.measure.machine_rates.PARAMETERS", {"cpu": 1 << 16})


def command_of(tmp_path, settings: list[str]) -> list[str]:
    path = tmp_path / "preset.yaml"
    make_config(tmp_path).save(path)
    sets = [word for each in settings for word in ("--set", each)]
    return ["bench", str(path), "--seconds", "0.01", *sets]


LORA = ["train.method=lora", "train.lora_rank=4"]
JOBS = {
    "dpo of adapters": [*LORA, "train.objective=dpo"],
    "adapters": LORA,
    "the last block": ["train.method=parts", "train.last_blocks=1"],
    "orpo": ["train.objective=orpo"],
    "kto": ["train.objective=kto"],
}


@pytest.mark.parametrize("job", JOBS)
def test_what_a_run_trains_is_measured(tmp_path, capsys, job):
    command = command_of(tmp_path, JOBS[job])
    assert launch.main([*command, "--json"]) == 0
    (training,) = json.loads(capsys.readouterr().out)["trainings"]
    found, resident = training["streamed"], training["resident"]
    config = TrainConfig.load(command[1], tuple(JOBS[job]))
    form, shape = config.objective, shape_of_run(config)
    assert found["tokens_per_step"] == form.sequences * ROWS * LENGTH
    assert found["trained_parameters"] == shape.trained_count
    assert found["parameters"] == shape.parameter_count
    assert found["tflops"]["parameters"] == pytest.approx(
        6 * shape.counted_parameters * found["tokens_per_step"] / found["seconds"] / 1e12
    )
    assert found["tflops"]["hardware"] >= found["tflops"]["model"] > 0
    assert (found["reference_seconds"] is not None) == form.needs_reference
    assert found["predicted_seconds"] > 0 and found["utilization"] > 0
    # The program takes far more than a tiny model.
    assert found["host_peak_bytes"] >= found["host_rss_bytes"] > 0.5 * found["host_peak_bytes"]
    assert 100 << 20 < found["host_file_bytes"] < found["host_rss_bytes"]
    assert found["predicted_host_bytes"] == pytest.approx(found["host_peak_bytes"], rel=0.3)
    assert resident["ways"] == [] and "measured streamed alone" in resident["why_not"]


@pytest.mark.slow("torch compiles several blocks, for five seconds or more")
def test_the_table_tells_adapters_and_pairs(tmp_path, capsys):
    assert launch.main(command_of(tmp_path, JOBS["dpo of adapters"])) == 0
    shown = capsys.readouterr()
    for text in (
        "trained, lora)",
        "by DPO",
        "reference of the answers",
        "its peak",
        "not measured",
    ):
        assert text in shown.out, text
    assert f"{2 * ROWS} rows of {LENGTH} tokens, two of each pair" in shown.err


def test_another_model_is_not_trained_on_the_same_planes(tmp_path, capsys):
    command = command_of(tmp_path, LORA)
    assert launch.main([*command, "--then", "train.lora_rank=8"]) == 2
    assert "what of it is trained" in capsys.readouterr().err


@pytest.mark.parametrize("objective", ["dpo", "orpo", "kto"])
def test_random_answers_fill_their_lines(objective):
    form = Objective(name=objective)
    rows = random_answers(form, 6, 10, 97, seed=1)
    sizes = [batch.input_ids.shape for batch in AnswersOfSteps(rows, 4).batches()]
    assert len(rows) == 6 and sizes == [(3 * form.sequences, 10)] * 2
    for batch in AnswersOfSteps(rows, 6).batches():
        assert batch.loss_tokens == 6 * form.sequences * 9 == batch.pairs.answer.sum()
        assert (batch.labels[:, :-1] == batch.input_ids[:, 1:]).all()
        assert batch.input_ids.max() < 97
    assert rows.lacks_reference_logps == form.needs_reference
