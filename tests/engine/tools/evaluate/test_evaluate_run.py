"""The trained model beside its base model: which weights are asked, what is found, where
the results go, and what is told where nothing can be asked.

A made harness stands for lm-evaluation-harness, which need not be installed.
"""

from __future__ import annotations

import json
import re

import pytest

import launch
from engine.errors import RunError
from engine.runs.record.events import StateChanged
from engine.runs.record.following import replay
from engine.runs.record.recorder import RunRecorder
from engine.runs.summaries.benchmark_results import RESULTS_FILE, read_benchmarks
from engine.runs.summaries.evaluation_results import EVALUATIONS_FILE, Wanted, read_evaluations
from engine.runtime.sampling import generate
from engine.runtime.sampling.kv_cache import NoCache
from engine.tools.evaluate import evaluate_run as evaluating
from engine.tools.evaluate import harness
from engine.tools.evaluate.evaluate_run import AskedEvaluation
from engine.tools.evaluate.scoring import Continuation, score
from engine.tools.evaluate.validation import ValidationRows
from engine.training.loop.run import start_run
from tests.support.folded import fold
from tests.support.folders import make_config
from tests.support.made_pairs import marked_config, pair_config
from tests.support.trained_runs import execute

FOUND = {
    "results": {
        "made": {
            "alias": "made",
            "sample_len": 8,
            "acc,none": 0.5,
            "acc_stderr,none": 0.25,
            "perplexity,none": float("inf"),
            "perplexity_stderr,none": "N/A",
            "exact_match,strict": 1,
        },
    },
    "groups": {"all": {"acc,none": 0.5, "alias": "all"}},
    "n-samples": {"made": {"original": 9, "effective": 8}},
    "n-shot": {"made": 3},
    "versions": {"made": 1.5},
    "samples": {
        "made": [
            *({"filter": "none", "acc": float(number % 2)} for number in range(8)),
            *({"filter": "strict", "exact_match": 0.5} for _ in range(8)),
        ]
    },
    "higher_is_better": {"made": {"acc": True, "perplexity": False}, "all": {"acc": None}},
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run with an export, best weights, a checkpoint and 16 validation rows."""
    place = tmp_path_factory.mktemp("evaluate")
    more = {"output.export": True, "data.eval_fraction": 0.4, "output.exact_match_samples": 16}
    run = start_run(make_config(place, **more), place / "runs")
    assert execute(run).state == "finished"
    return run.folder


@pytest.fixture
def command(trained, monkeypatch, capsys):
    """Returns a function that runs the command: its exit code, and what it prints. The made harness
    loads the weights and scores one token with them.
    """

    def ask(_tasks, _asked, load, progress, _before_answers):
        chat_engine = load()
        score(chat_engine.sampler().engine, [Continuation([1], [2])], progress=progress)
        return FOUND

    monkeypatch.setattr(evaluating, "refuse_without_harness", lambda: None)
    monkeypatch.setattr(evaluating, "open_tasks", lambda asked: asked)
    monkeypatch.setattr(evaluating, "ask", ask)
    monkeypatch.setattr(harness, "PACKAGE", "pytest")  # whose version is told

    def call(*arguments, run=trained.id, parts=("--tasks", "made", "--no-base")):
        runs = ["--runs-dir", str(trained.path.parent)]
        code = launch.main(["eval", run, *parts, *runs, *arguments])
        shown = capsys.readouterr()
        return code, shown.out if code == 0 else shown.err.splitlines()[-1]

    yield call
    for name in (RESULTS_FILE, EVALUATIONS_FILE):
        (trained.path / name).unlink(missing_ok=True)


def test_validation_rows_give_the_figures_of_the_run_itself(command, trained, monkeypatch):
    """Both sides on the rows of the record, with the difference and its interval."""
    # Its answers are the same without a cache, which is told, once.
    for name in ("try_rows_cache", "try_cache"):
        monkeypatch.setattr(generate, name, lambda _: NoCache("it is not to be used"))
    parts = ("--validation", "--answers", "2")
    code, out = command("--of", "last", "--json", parts=parts)
    assert code == 0
    found = json.loads(out)
    loss, right = found["figures"]
    run = fold(replay(trained.events_path))
    losses = dict(zip(run.evals.step, run.evals.loss))
    assert (loss["base"], loss["trained"]) == pytest.approx((losses[0], losses[8]), rel=1e-5)
    low, high = loss["interval"]["low"], loss["interval"]["high"]
    assert low < loss["difference"] < high < 0
    matched = {match.step: match.correct / match.total for match in run.exact_matches}
    assert (right["base"], right["trained"], right["count"]) == (matched[0], matched[8], 16)
    samples = [match.samples[:2] for match in run.exact_matches]
    for side, of_run in zip(("base", "trained"), (samples[0], samples[-1])):
        for answer, sample in zip(found["answers"][side], of_run):
            assert (answer["prompt"], answer["expected"]) == (sample["prompt"], sample["expected"])
            assert answer["answer"].startswith(sample["answer"])  # it may be longer

    code, out = command(parts=("--validation",))
    assert code == 0 and "The exported weights of step" in out
    assert out.count("models are slow, since") == 1
    card = (trained.export_path / "README.md").read_text()
    assert card.count("## Evaluation") == card.count("\n| Validation loss | ") == 1
    line = r"^Validation loss +\d\.\d{4} +\d\.\d{4} +-\d\.\d{4} +-.+ to -.+ 16 rows$"
    assert re.search(line, out, re.MULTILINE)


def test_an_evaluation_that_was_killed_goes_on_behind_its_last_part(command, trained, monkeypatch):
    """The parts that are done are not computed again, by either side."""
    parts = ("--validation", "--answers", "1", "--tasks", "made")
    tasks = evaluating.ask
    asked = []

    def killed_at_the_second(*given):
        asked.append(given)
        if len(asked) == 2:
            raise KeyboardInterrupt
        return tasks(*given)

    monkeypatch.setattr(evaluating, "ask", killed_at_the_second)
    command(parts=parts)
    (broken,) = read_evaluations(trained.path).found
    assert set(broken.losses) == set(broken.answered) == {"base", "trained"}
    assert broken.tasks == {("base", "made")} and not broken.is_over
    with (trained.path / EVALUATIONS_FILE).open("ab") as file:
        file.write(b'{"type": "loss", "id"')  # a torn line

    def again(*_):
        raise AssertionError("it is done")

    for name in ("loss", "matched", "answered"):
        monkeypatch.setattr(ValidationRows, name, again)
    code, out = command("--json", parts=parts)
    assert code == 0 and len(asked) == 3
    (whole,) = read_evaluations(trained.path).found
    assert whole.is_over and whole.began == broken.began and whole.losses == broken.losses
    acc = json.loads(out)["figures"][2]
    assert (acc["name"], acc["base"], acc["trained"]) == ("made: acc", 0.5, 0.5)
    assert acc["interval"]["low"] < 0 < acc["interval"]["high"]

    # One that is complete is done anew, and so is one of something else.
    with pytest.raises(AssertionError, match="it is done"):
        command(parts=parts)


@pytest.mark.parametrize("objective", ["dpo", "kto"])
def test_pairs_have_the_share_of_chosen_answers_that_are_likelier(command, tmp_path, objective):
    """Answers with marks have no such figure."""
    make = pair_config if objective == "dpo" else marked_config
    own = {"data.eval_fraction": 0.3, "train.objective": objective, "train.steps": 4}
    run = start_run(make(tmp_path, **own), tmp_path / "runs")
    assert execute(run).state == "finished"
    asked = AskedEvaluation(Wanted(prompts=3))
    found = evaluating.evaluate_run(tmp_path / "runs", run.id, asked)
    assert not found.losses and set(found.matched) == {"base", "trained"}
    if objective == "dpo":
        ahead = {side: compared.ahead for side, compared in found.pairs.items()}
        pairs = run.recorder.snapshot.data["eval_examples"]
        assert len(ahead["base"]) == len(ahead["trained"]) == pairs
        assert set(ahead["base"]) | set(ahead["trained"]) == {True, False}
    else:
        assert not found.pairs


def test_a_run_that_goes_on_is_evaluated_once_it_is_paused(command, tmp_path):
    run = start_run(make_config(tmp_path, **{"data.eval_fraction": 0.4}), tmp_path / "runs")
    assert execute(run, {4: "stop"}).state == "stopped"
    with run.folder.lock():
        recorder, asked = RunRecorder(run.folder.path, run.id), AskedEvaluation(Wanted())
        recorder.emit(StateChanged("running"))
        with pytest.raises(RunError, match="goes on; evaluate it when it is paused or over"):
            evaluating.evaluate_run(tmp_path / "runs", run.id, asked)
        recorder.emit(StateChanged("paused"))
        assert evaluating.evaluate_run(tmp_path / "runs", run.id, asked).began.step == 4
        recorder.close()


def test_a_run_without_validation_rows_says_so(command, trained, tmp_path):
    run = start_run(
        make_config(tmp_path, **{"data.eval_fraction": 0.0, "output.eval_every": 0}),
        trained.path.parent,
    )
    assert execute(run).state == "finished"
    code, shown = command(run=run.id, parts=("--validation",))
    assert code == 2 and "This run has no validation rows" in shown


@pytest.mark.slow("a quicker test beside it shows most of what it shows")
def test_every_metric_becomes_a_result(command, trained):
    code, out = command("--json", "--limit", "7", "--chat")
    assert code == 0
    acc, perplexity, match, group = read_benchmarks(trained.path).results
    kept = [vars(one) | {"values": list(one.values)} for one in (acc, perplexity, match, group)]
    assert kept == json.loads(out)["benchmarks"]
    assert (acc.task, acc.metric, acc.value, acc.error) == ("made", "acc", 0.5, 0.25)
    assert (acc.samples, acc.shots, acc.limit, acc.chat) == (8, 3, 7, True)
    assert (acc.values, match.values) == ((0.0, 1.0) * 4, ())  # whose mean is not the value
    assert (acc.task_version, acc.harness) == ("1.5", pytest.__version__)
    assert (acc.higher_is_better, perplexity.higher_is_better) == (True, False)
    assert (perplexity.value, perplexity.error) == (None, None)
    assert (match.metric, match.value) == ("exact_match (strict)", 1.0)
    assert (group.task, group.samples, group.shots) == ("all", None, None)


@pytest.mark.parametrize("of", [None, "last", "best"])
def test_the_weights_are_those_that_are_asked_for(command, trained, of):
    code, out = command(*(["--of", of] if of else []))
    assert code == 0
    one = read_benchmarks(trained.path).results[0]
    steps = {"best": max(int(path.name[5:]) for path in trained.best_path.glob("step-*"))}
    assert (one.weights, one.step) == (of or "export", steps.get(of, 8))
    assert out.startswith(f"The {of or 'exported'} weights of step {one.step}, computed in float32")
    line = r"^made: exact_match \(strict\) +– +1\.0000 +8 samples, 3-shot, step \d, float32$"
    assert re.search(line, out, re.MULTILINE)


def test_without_an_export_the_weights_are_those_of_an_export(command, trained):
    away = trained.export_path.rename(trained.path / "away")
    assert command()[0] == 0
    away.rename(trained.export_path)
    assert read_benchmarks(trained.path).results[0].weights in ("best", "last")


def test_a_missing_harness_is_told_with_what_installs_it(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(harness, "PACKAGE", "no_such_package")
    assert launch.main(["eval", "x", "--tasks", "a", "--runs-dir", str(tmp_path)]) == 2
    shown = capsys.readouterr().err
    assert shown.startswith("ramstream: lm-evaluation-harness")
    assert 'pip install "lm_eval>=0.4.10"' in shown


def test_a_run_without_such_weights_is_refused(command, trained, tmp_path):
    more = {"output.keep_best": "none"}
    run = start_run(make_config(tmp_path, **more), trained.path.parent)
    assert execute(run).state == "finished"
    code, shown = command("--of", "best", run=run.id)
    assert code == 2
    assert shown.endswith(f"The best weights of run {run.id} are not kept; it has the last ones.")
    run.folder.delete_weights()
    code, shown = command(run=run.id)
    assert code == 2 and shown.endswith("it has no export and no checkpoint.")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--limit", "0"], "'0' is no number of samples; give 1 or more"),
        (["--shots", "-1"], "'-1' is no number of examples; give 0 or more"),
        (["--max-tokens", "1"], "'1' is no number of tokens; give 2 or more"),
        (["--of", "worst"], "invalid choice: 'worst'"),
    ],
)
def test_wrong_arguments_are_told_in_a_sentence(capsys, arguments, words):
    with pytest.raises(SystemExit) as ended:
        launch.main(["eval", "x", "--tasks", "a", *arguments])
    assert ended.value.code == 2 and words in capsys.readouterr().err


def test_a_folder_of_tasks_must_be_there(command, trained, tmp_path, monkeypatch):
    monkeypatch.setattr(evaluating, "open_tasks", harness.open_tasks)
    code, shown = command("--include", str(tmp_path / "nowhere"))
    assert code == 2 and shown.endswith("nowhere is not a folder of task files.")
