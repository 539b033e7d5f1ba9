"""The card of an exported model says what the record says of the run."""

from __future__ import annotations

from dataclasses import replace

import pytest
import yaml

from engine.config.export_choice import ExportChoice
from engine.config.settings import TrainConfig
from engine.runs.record.events import (
    BestKept,
    EvalFinished,
    ExactMatchMeasured,
    Record,
    RunStarted,
    StepFinished,
)
from engine.runs.record.snapshot import RunSnapshot
from engine.runs.summaries.benchmark_results import append_benchmarks
from engine.runs.summaries.evaluation_figures import Figure, Interval
from engine.training.export.export import export_run
from engine.training.export.model_card import Exported, model_card, with_results
from engine.training.loop.run import start_run
from tests.support.folders import make_config
from tests.support.measured import SEVERAL, measured


def snapshot_of(*events) -> RunSnapshot:
    snapshot = RunSnapshot()
    for seq, event in enumerate(events, 1):
        snapshot.apply(Record("r", seq, float(seq), event, float(seq)))
    return snapshot


def config_with(**sources) -> TrainConfig:
    tree = {"name": "Poet", "model": {"source": "acme/base"}, "data": {"source": "acme/poems"}}
    return TrainConfig.from_dict(tree | sources)


TRAINED = snapshot_of(
    RunStarted(name="Poet", total_steps=8, parameters=1_234_567, device_name="H200"),
    EvalFinished(0, 3.5),
    ExactMatchMeasured(0, "before", 1, 40),
    *(StepFinished(step, 3.0 - step / 10) for step in range(1, 5)),
    EvalFinished(4, 1.25),
    BestKept(4, 1.25),
    *(StepFinished(step, 3.0 - step / 10) for step in range(5, 9)),
    EvalFinished(8, 1.5),
    ExactMatchMeasured(4, "after", 30, 40),
)


def front_of(card: str) -> dict:
    return yaml.safe_load(card.split("---")[1])


def test_the_card_has_the_figures_of_the_weights_that_were_exported():
    card = model_card(config_with(), TRAINED, Exported(4, "bfloat16"))
    assert front_of(card) == {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "base_model": "acme/base",
        "datasets": ["acme/poems"],
        "tags": ["ramstream"],
    }
    assert "after step 4 of 8: 1,234,567 parameters, written in bfloat16" in card
    for row in (
        "| Validation loss before training | 3.5000 |",
        "| Validation loss of these weights | 1.2500 |",
        "| Lowest validation loss | 1.2500, at step 4 |",
        "| Answers right, before training | 1 of 40 |",
        "| Answers right, of these weights | 30 of 40 |",
        "| `train.learning_rate` | 1e-05 |",
        "| Device | H200 |",
    ):
        assert row in card, row
    assert "AutoModelForCausalLM.from_pretrained" in card


def test_a_card_has_the_benchmarks_of_its_weights_and_takes_new_ones():
    exported = Exported(4, "bfloat16", SEVERAL[:2])
    card = model_card(config_with(), TRAINED, exported)
    assert "| arc_easy | acc_norm | 0.7012 | 0.0094 | 0 | 2,376 | bfloat16 |" in card
    assert card.index("## Results") < card.index("## Benchmarks") < card.index("## Data")
    plain = model_card(config_with(), TRAINED, Exported(4, "bfloat16"))
    assert "## Benchmarks" not in plain
    assert with_results(plain, SEVERAL[:2]) == card
    assert with_results(card, ()) == plain
    more = with_results(card, SEVERAL)
    assert more.count("## Benchmarks") == 1 and more.count("| arc_easy | acc |") == 1
    assert more.replace(more.split("## Benchmarks")[1].split("## Data")[0], "") == card.replace(
        card.split("## Benchmarks")[1].split("## Data")[0], ""
    )


def test_a_card_has_the_model_before_training_beside_the_trained_one():
    figures = [
        Figure("Validation loss", "loss", 3.5, 1.25, Interval(-2.5, -2.0), False, 40, "rows"),
        Figure("Answers right", "share", None, 0.75, None, True, 1200, "prompts"),
    ]
    results = [SEVERAL[0], replace(SEVERAL[0], weights="base", step=None, value=0.5)]
    card = model_card(config_with(), TRAINED, Exported(4, "bfloat16", results, figures=figures))
    assert (
        "| Validation loss | 3.5000 | 1.2500 | -2.2500 | -2.5000 to -2.0000 | 40 rows |\n"
        "| Answers right |  | 0.7500 |  |  | 1,200 prompts |\n"
    ) in card
    assert "| arc_easy | acc | 0.7321 | 0.0091 | 0 | 2,376 | bfloat16 | 0.5000 |" in card
    plain = model_card(config_with(), TRAINED, Exported(4, "bfloat16", results[1:]))
    assert "## Benchmarks" not in plain and "## Evaluation" not in plain
    assert with_results(plain, results, figures) == card == with_results(card, results, figures)


def test_a_card_that_a_person_wrote_keeps_their_words():
    mine = "# Mine\n\n## Benchmarks\n\nold\n\n## Words\n\nof mine\n"
    found = with_results(mine, [measured("a|b\nc", chat=True, value=None, error=None)])
    assert found.startswith("# Mine\n\n## Words\n\nof mine\n\n## Benchmarks\n\n")
    assert "| a\\|b c | acc, chat template | not finite |  | 0 | 2,376 | bfloat16 |" in found
    assert "old" not in found


def test_a_card_names_no_folder_of_this_machine(tmp_path):
    (tmp_path / "secret").mkdir()
    own = {
        "model": {"source": str(tmp_path / "secret"), "init": "random"},
        "data": {"source": [{"source": str(tmp_path / "mine.jsonl")}, {"source": "acme/poems"}]},
        "output": {"webhook": "https://hooks.example/key"},
    }
    card = model_card(config_with(**own), TRAINED, Exported(8, "float32"))
    assert str(tmp_path) not in card and "hooks.example" not in card
    assert "from random weights, with the architecture of `secret`" in card
    assert "`mine.jsonl`, `acme/poems`" in card
    assert "base_model" not in front_of(card) and front_of(card)["datasets"] == ["acme/poems"]


def test_a_run_without_evaluations_has_a_card_without_them():
    card = model_card(config_with(), snapshot_of(RunStarted(name="Poet")), Exported(3, "float32"))
    assert "Validation loss" not in card
    assert "## Results" not in card
    assert "## Training" in card


PREFERRED = snapshot_of(
    RunStarted(name="Poet", total_steps=8, trained_parameters=4_000),
    EvalFinished(0, 0.6931, preference={"rewards/margins": 0.0, "rewards/accuracies": 0.0}),
    *(StepFinished(step, 0.5) for step in range(1, 9)),
    EvalFinished(8, 0.25, preference={"rewards/margins": 1.5, "rewards/accuracies": 0.875}),
)


def test_a_card_tells_how_preferences_were_learned():
    own = {"train": {"objective": "dpo"}, "preference": {"beta": 0.2, "loss": "ipo"}}
    card = model_card(config_with(**own), PREFERRED, Exported(8, "float32"))
    for text in (
        "They learned from pairs of a chosen and a rejected answer (DPO).",
        "| Validation loss (DPO) before training | 0.6931 |",
        "| Validation loss (DPO) of these weights | 0.2500 |",
        "| Mean margin of the rewards, validation, of these weights | 1.5000 |",
        "| Pairs with the chosen answer ahead, validation, of these weights | 87.5% |",
        "| Training loss (DPO) of the last step | 0.5000 |",
        "| `preference.beta` | 0.2 |",
        "| `preference.loss` | ipo |",
    ):
        assert text in card, text
    assert "desirable" not in card
    marks = {"train": {"objective": "kto"}, "preference": {"desirable_weight": 1.5}}
    card = model_card(config_with(**marks), snapshot_of(), Exported(8, "float32"))
    assert "marked as good or bad (KTO)" in card
    assert "| `preference.desirable_weight` | 1.5 |" in card
    plain = model_card(config_with(), TRAINED, Exported(8, "float32"))
    assert "preference" not in plain and "They learned" not in plain


def test_a_card_tells_of_adapters_and_where_they_began(tmp_path):
    adapters = {"method": "lora", "lora_rslora": True, "lora_save_modules": ["lm_head", "norm"]}
    (tmp_path / "adapter_config.json").write_text("{}")
    model = {"source": "acme/base", "start_from": str(tmp_path)}
    config = config_with(train=adapters, model=model)
    card = model_card(config, PREFERRED, Exported(8, "float32", is_adapter=True))
    assert "| `train.lora_rslora` | True |" in card
    assert "| `train.lora_save_modules` | lm_head, norm |" in card
    assert "| `train.lora_targets` | all-linear |" in card
    assert (
        "Adapters of 4,000 weights, which began as those of an earlier adapter, were trained from "
        "`acme/base`, which is not part of this folder"
    ) in card
    (tmp_path / "adapter_config.json").unlink()
    card = model_card(config, PREFERRED, Exported(8, "float32"))
    assert "Adapters of 4,000 weights were trained from the weights of an earlier run on" in card


@pytest.mark.parametrize("dtype", ["auto", "float32"])
def test_both_ways_to_export_write_the_card_and_the_modelfile(tmp_path, dtype):
    changes = {"train.steps": 2, "train.warmup_steps": 1, "data.eval_fraction": 0.25}
    changes |= {"output.export_dtype": dtype, "output.export": True}
    run = start_run(make_config(tmp_path, **changes), tmp_path / "runs")
    assert run.execute().state == "finished"
    choice = ExportChoice(dtype=dtype)
    export_run(tmp_path / "runs", run.id, tmp_path / "by-hand", choice)
    folders = (run.folder.export_path, tmp_path / "by-hand")
    cards = [(folder / "README.md").read_text() for folder in folders]
    assert cards[0] == cards[1]
    append_benchmarks(run.folder.path, [measured(step=2), measured("hellaswag", step=1)])
    export_run(tmp_path / "runs", run.id, tmp_path / "measured", choice)
    card = (tmp_path / "measured" / "README.md").read_text()
    assert "| arc_easy | acc | 0.7321 |" in card and "hellaswag" not in card
    data = run.recorder.snapshot.data
    assert f"| Rows to train on | {data['train_rows']:,} |" in cards[0]
    assert f"| Examples to train on | {data['train_examples']:,} |" in cards[0]
    assert f"| Tokens to train on | {data['train_tokens']:,} |" in cards[0]
    loss = run.recorder.snapshot.evals.loss[-1]
    assert f"{loss:.4f}" in cards[0] and "after step 2 of 2" in cards[0]
    assert (tmp_path / "by-hand" / "Modelfile").read_text().count("\nFROM .\n") == 1
