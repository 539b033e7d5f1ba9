"""Tasks of lm-evaluation-harness that a streamed run answers give what plain transformers gives.

The package takes 40 seconds and 350 MB to install, so it is no part of the extra `test`.
"""

from __future__ import annotations

import io
import json
import random
import time
import types

import pytest
import torch

import launch
from engine.runs.summaries.benchmark_results import RESULTS_FILE, append_benchmarks, read_benchmarks
from engine.runs.summaries.evaluation_results import EVALUATIONS_FILE
from engine.training.loop.run import start_run
from tests.support.benchmark_tasks import TASKS, make_tasks
from tests.support.folders import WORDS, make_config, make_model
from tests.support.trained_runs import execute

pytest.importorskip("lm_eval", reason="lm_eval is not installed")

from engine.progress import no_progress
from engine.tools.chat.chat_engines import load
from engine.tools.chat.chat_sources import folder_of
from engine.tools.evaluate.streamed_lm import StreamedLM

LONGEST = 24
"""A row has so many tokens at most, so that long texts are cut and scored in windows."""


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run that has learned something, with an export, best weights and two checkpoints."""
    place = tmp_path_factory.mktemp("benchmarks")
    more = {"train.steps": 24, "output.checkpoint_every": 12, "output.export": True}
    run = start_run(make_config(place, **more), place / "runs")
    assert execute(run).state == "finished"
    return run.folder


@pytest.fixture
def evaluate(trained, tmp_path, capsys):
    """Returns a function that runs the command: its exit code, and what it prints."""
    tasks = make_tasks(tmp_path / "tasks")
    card = trained.export_path / "README.md"
    before = card.read_text()

    def call(*arguments, run=trained.id, names=TASKS, with_base=False):
        runs = ["--runs-dir", str(trained.path.parent), "--include", str(tasks)]
        capsys.readouterr()
        sides = () if with_base else ("--no-base",)
        code = launch.main(["eval", run, "--tasks", *names, *sides, *runs, *arguments])
        shown = capsys.readouterr()
        return code, shown.out if code == 0 else shown.err.splitlines()[-1]

    yield call
    card.write_text(before)
    for name in (RESULTS_FILE, EVALUATIONS_FILE):
        (trained.path / name).unlink(missing_ok=True)


def of_folder(folder):
    """Yields the streamed model and the harness's own, with plain transformers in float32."""
    from lm_eval.models.huggingface import HFLM

    plain = HFLM(
        pretrained=str(folder), dtype="float32", device="cpu", batch_size=4, max_length=LONGEST
    )
    chat_engine = load(folder_of(str(folder)))
    yield StreamedLM(lambda: chat_engine, no_progress, LONGEST), plain
    chat_engine.close()


@pytest.fixture(scope="module")
def both(trained):
    yield from of_folder(trained.export_path)


@pytest.fixture(scope="module")
def both_untrained(tmp_path_factory):
    """A model that seldom ends an answer."""
    yield from of_folder(make_model(tmp_path_factory.mktemp("untrained") / "model"))


def requests(*arguments: tuple) -> list:
    return [types.SimpleNamespace(args=one) for one in arguments]


def words(*numbers: int) -> str:
    return " ".join(WORDS[number % len(WORDS)] for number in numbers)


ASKED = [
    *(("<user> say after one <end> <assistant>", f" {word}") for word in WORDS),
    ("<user> say after one <end> <assistant>", " two <end>"),
    ("<user> say after two <end> <assistant>", " three <end>"),
    ("<user> say after", " one two three"),
    ("", "one two"),
    ("", "<s> one"),
    ("<s> say ", "after"),
    (words(*range(40)), " one two three"),
    *((words(*range(k)), f" {words(k, k + 1)}") for k in range(1, 20)),
]


def test_likelihoods_and_greedy_flags_are_those_of_transformers(both):
    streamed, plain = both
    found = streamed.loglikelihood(requests(*ASKED))
    expected = plain.loglikelihood(requests(*ASKED), disable_tqdm=True)
    assert [one[0] for one in found] == pytest.approx([one[0] for one in expected], abs=1e-4)
    assert [one[1] for one in found] == [one[1] for one in expected]
    assert {one[1] for one in found} == {True, False}


def test_texts_longer_than_a_row_are_scored_as_transformers_does(both):
    streamed, plain = both
    texts = [(words(*range(length)),) for length in (1, 2, LONGEST - 1, LONGEST, LONGEST + 1, 70)]
    found = streamed.loglikelihood_rolling(requests(*texts))
    expected = plain.loglikelihood_rolling(requests(*texts), disable_tqdm=True)
    assert found == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("until", [[], ["<end>"], ["three"], ["five", "two"], "seven eight"])
def test_answers_are_those_of_transformers(both_untrained, until):
    streamed, plain = both_untrained
    asked = [
        (question, {"until": until, "max_gen_toks": length})
        for length in (3, 8)
        for question in (words(k, 3 * k, k * k) for k in range(10))
    ]
    # Plain transformers pads rows on the left; a batch of one has no padding.
    expected = [plain.generate_until(requests(one), disable_tqdm=True)[0] for one in asked]
    assert streamed.generate_until(requests(*asked)) == expected
    assert len(set(expected)) > 2


def test_the_metrics_of_the_command_are_those_of_transformers(evaluate, trained, tmp_path):
    """Of the trained model and of the one before training, asked in one job."""
    from lm_eval.evaluator import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    state = random.getstate(), torch.get_rng_state()
    code, out = evaluate("--json", with_base=True)
    assert code == 0
    assert random.getstate() == state[0] and torch.equal(torch.get_rng_state(), state[1])
    found = json.loads(out)
    assert {one["task"] for one in found["benchmarks"]} == set(TASKS)
    for weights, folder in (
        ("export", trained.export_path),
        ("base", trained.path.parents[1] / "model"),
    ):
        plain = simple_evaluate(
            model=HFLM(pretrained=str(folder), dtype="float32", device="cpu"),
            tasks=list(TASKS),
            task_manager=TaskManager(include_path=str(tmp_path / "tasks")),
            log_samples=False,
        )
        of_side = [one for one in found["benchmarks"] if one["weights"] == weights]
        assert len(of_side) == 4
        for one in of_side:
            metrics = plain["results"][one["task"]]
            assert one["value"] == pytest.approx(metrics[f"{one['metric']},none"], rel=1e-5)
            assert (one["samples"], one["shots"], one["task_version"]) == (12, 0, "2.0")
            assert (one["step"], one["dtype"]) == (24 if weights == "export" else None, "float32")
    figures = {figure["name"]: figure for figure in found["figures"]}
    acc = figures["tiny_choice: acc"]
    assert acc["base"] is not None and acc["interval"]["low"] <= acc["difference"]
    kept = [
        vars(one) | {"values": list(one.values)} for one in read_benchmarks(trained.path).results
    ]
    assert kept == found["benchmarks"]


def test_other_weights_fewer_samples_and_examples_are_asked_for(evaluate, trained):
    code, _ = evaluate(
        "--of", "last", "--limit", "3", "--shots", "2", "--chat", names=("tiny_choice,",)
    )
    assert code == 0
    code, out = evaluate("--of", "best", names=("tiny_choice",))
    assert code == 0 and out.startswith("The best weights of step ")
    last, _, best, _ = read_benchmarks(trained.path).results
    assert (last.weights, last.step, last.chat) == ("last", 24, True)
    assert (last.limit, last.samples, last.shots) == (3, 3, 2)
    assert (best.weights, best.limit, best.samples, best.chat) == ("best", None, 12, False)


def test_the_card_of_the_export_has_the_results_in_the_place_of_earlier_ones(evaluate, trained):
    card = trained.export_path / "README.md"
    before = card.read_text()
    assert evaluate(names=("tiny_choice",))[0] == evaluate(names=("tiny_answer",))[0] == 0
    after = card.read_text()
    table = after.split("## Benchmarks")[1].split("\n## ")[0]
    assert table.count("| tiny_choice | acc |") == table.count("| tiny_answer |") == 1
    assert after.replace("## Benchmarks" + table + "\n", "") == before


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"names": ("tiny_choise",)}, "There is no task tiny_choise; like it are tiny_choice"),
        ({"names": ("xqzv#",)}, "There is no task xqzv#; --include adds tasks of your own."),
        ({"names": (",",)}, "--tasks: no task is named."),
        ({"run": "nobody"}, "There is no run nobody"),
    ],
)
def test_what_cannot_be_asked_is_told_in_a_sentence(evaluate, trained, arguments, words):
    code, shown = evaluate(**arguments)
    assert code == 2 and words in shown
    assert not (trained.path / RESULTS_FILE).exists()


def test_rows_that_are_nowhere_are_told_in_a_sentence(evaluate, tmp_path, monkeypatch):
    task = (tmp_path / "tasks" / "choice.yaml").read_text()
    for name, source in (("far", "acme/nowhere"), ("lost", "json")):
        changed = task.replace("dataset_path: json", f"dataset_path: {source}")
        changed = changed.replace("task: tiny_choice", f"task: {name}").replace("rows.jsonl", "no")
        (tmp_path / "tasks" / f"{name}.yaml").write_text(changed)
    monkeypatch.setattr("engine.data.sources.hub_connection.why_cut_off", lambda: "no network here")
    code, shown = evaluate(names=("far",))
    assert code == 2
    assert "far" in shown
    assert "no network here" in shown
    code, shown = evaluate(names=("lost",))
    assert code == 2 and shown.startswith("ramstream: lost cannot be asked (")


def test_a_run_that_goes_on_and_one_without_weights_are_refused(evaluate, trained, tmp_path):
    with trained.lock():
        code, shown = evaluate()
    assert code == 2 and shown.endswith(
        f"Run {trained.id} goes on; evaluate it when it is paused or over."
    )
    nothing = {"output.checkpoint": "none", "output.keep_best": "none"}
    run = start_run(make_config(tmp_path, **nothing), trained.path.parent)
    assert execute(run).state == "finished"
    code, shown = evaluate(run=run.id)
    assert code == 2 and shown.endswith("has no weights: it has no export and no checkpoint.")


def test_a_question_too_long_for_its_answer_is_refused(evaluate):
    code, shown = evaluate("--max-tokens", "7", names=("tiny_answer",))
    assert code == 2 and "A task wants answers of 7 tokens and a row has 7 at most" in shown


def test_results_of_two_evaluations_follow_each_other(evaluate, trained):
    assert evaluate(names=("tiny_text",))[0] == 0
    (first,) = read_benchmarks(trained.path).results
    append_benchmarks(trained.path, [first])
    assert read_benchmarks(trained.path).results == [first, first]


# ---------------------------------------------------------------------- what tasks may run

OPTION = "--confirm-run-unsafe-code"


def changed_task(tmp_path, name, **values):
    """Adds a task like tiny_answer with these lines of YAML in place of its own."""
    lines = (tmp_path / "tasks" / "answer.yaml").read_text().splitlines()
    kept = [line for line in lines if line.partition(":")[0] not in {"task", *values}]
    more = [f"{key}: {value}" for key, value in {"task": name, **values}.items()]
    (tmp_path / "tasks" / f"{name}.yaml").write_text("\n".join([*more, *kept]) + "\n")


@pytest.fixture
def ran(tmp_path):
    """A file that only a program of a task writes."""
    return tmp_path / "ran"


def test_programs_of_tasks_run_only_when_they_are_allowed(evaluate, trained, tmp_path, ran):
    (tmp_path / "tasks" / "words.py").write_text(
        f"open({str(ran)!r}, 'w').close()\ndef all_of(rows):\n    return rows\n"
    )
    changed_task(tmp_path, "odd", process_docs="!function words.all_of")
    code, shown = evaluate(names=("odd",))
    assert code == 2 and not ran.exists()
    assert shown == (
        f"ramstream: --include: the tasks in {tmp_path / 'tasks'} run programs of their own: "
        f"words.all_of (odd.yaml); read them, then add {OPTION} to run them."
    )
    assert evaluate(names=("tiny_choice",))[0] == 0, "another task asks for nothing"
    assert not ran.exists()
    assert evaluate(OPTION, names=("odd",))[0] == 0 and ran.exists()


@pytest.mark.parametrize(("answer", "code"), [("y", 0), ("", 2), ("no", 2)])
def test_a_person_at_the_terminal_is_asked(
    evaluate, trained, tmp_path, monkeypatch, ran, answer, code
):
    (tmp_path / "tasks" / f"words_{answer}.py").write_text(
        f"open({str(ran)!r}, 'w').close()\ndef all_of(rows):\n    return rows\n"
    )
    changed_task(tmp_path, "odd", process_docs=f"!function words_{answer}.all_of")
    terminal = io.StringIO(f"{answer}\n")
    terminal.isatty = lambda: True
    monkeypatch.setattr("sys.stdin", terminal)
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    assert evaluate(names=("odd",))[0] == code
    assert ran.exists() == (code == 0)


def test_texts_of_tasks_are_rendered_in_a_sandbox(evaluate, trained, tmp_path, ran):
    """Plain Jinja reaches any module by way of its own names."""
    escape = "{{ self.__init__.__globals__.__builtins__.open('%s', 'w') }}" % ran  # noqa: UP031
    changed_task(tmp_path, "odd", doc_to_text=json.dumps(escape))
    code, shown = evaluate(names=("odd",))
    assert code == 2
    assert "odd cannot be asked" in shown
    assert not ran.exists()


def test_chat_templates_are_rendered_under_the_limits_of_training(evaluate, trained, tmp_path):
    template = trained.export_path / "chat_template.jinja"
    before = template.read_text()
    loop = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    # It computes for hours on the questions alone.
    template.write_text(
        before + "{% if 'after' in messages[-1]['content'] %}" + loop + "{% endif %}"
    )
    try:
        began = time.monotonic()
        code, shown = evaluate("--chat", names=("tiny_answer",))
        assert code == 2 and "computes for more than 5 s on one conversation" in shown
        assert time.monotonic() - began < 60
    finally:
        template.write_text(before)
