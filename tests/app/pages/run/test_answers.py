"""What the model answers is shown beside the loss, before training and now."""

from app.pages.run.answers import answers, answers_by_step
from app.pages.run.facts import NOT_TESTED
from app.pages.run.facts import answers as answers_right
from app.pages.run.head import head
from app.verdict.findings import Finding, Verdict
from engine.runs.record.events import EvalFinished, ExactMatchMeasured, PromptsAnswered
from engine.runs.record.snapshot import RunSnapshot
from engine.training.checkpoints.saved_on_disk import NOTHING_SAVED
from tests.support.folded import fold
from tests.support.synthetic_run import records, step_finished

EXPECTED = {f"{n} + {n}?": str(2 * n) for n in range(6)}


def samples(answer):
    return [{"prompt": p, "expected": e, "answer": answer(e)} for p, e in EXPECTED.items()]


BEFORE = ExactMatchMeasured(0, "before", 0, 6, samples(lambda _: "?"))
AFTER = ExactMatchMeasured(30, "after", 6, 6, samples(str))


def few(step, *texts):
    return PromptsAnswered(step, [{"prompt": p, "answer": t} for p, t in zip(EXPECTED, texts)])


def run(*events) -> RunSnapshot:
    return fold(records(list(events)))


def trained(until, *events):
    return [*(step_finished(step, 30) for step in range(1, until + 1)), *events]


def test_before_the_first_evaluation_the_answers_before_training_are_there():
    found = answers(run(BEFORE, *trained(3)), is_over=False)
    assert (found["title"], found["caption"]) == (
        "What it answers now",
        "Asked again at an evaluation",
    )
    assert len(found["rows"]) == 3
    assert found["rows"][1] == {
        "prompt": "1 + 1?",
        "expected": "2",
        "before": "?",
        "is_right": None,
    }


def test_the_first_answers_have_their_place_while_they_are_awaited():
    found = answers(RunSnapshot(), is_over=False, is_awaited=True)
    assert (found["caption"], found["rows"]) == ("Asked first before training", [])
    assert not found["is_absent"] and answers(RunSnapshot(), is_over=False)["is_absent"]


def test_an_evaluation_answers_three_of_them_anew_and_says_which_is_right():
    evaluated = [EvalFinished(10, 1.0, 9), few(10, "0", "3", "4")]
    found = answers(run(BEFORE, *trained(10, *evaluated)), is_over=False)
    assert [(row["now"], row["is_right"]) for row in found["rows"]] == [
        ("0", True),
        ("3", False),
        ("4", True),
    ]
    assert found["caption"] == "Step 10 · asked at every evaluation"
    stopped = answers(run(BEFORE, *trained(10, *evaluated)), is_over=True)
    assert len(stopped["rows"]) == 3, "nobody asked the others again"
    later = [*trained(20)[:10], *evaluated, *trained(20)[10:], EvalFinished(20, 1.0, 9)]
    assert answers(run(BEFORE, *later), is_over=False)["caption"] == (
        "Step 10 · asked at 1 of 2 evaluations"
    )


def test_the_number_beside_the_verdict_agrees_with_the_answers_below_it():
    asked = run(BEFORE, *trained(3))
    assert answers_right(asked, None, None)["to"] == NOT_TESTED
    answered = run(BEFORE, *trained(10, EvalFinished(10, 1.0, 9), few(10, "0", "3", "4")))
    right = answers_right(answered, None, None)
    assert (right["to"], right["at"]) == ("2 of 3", "step 10")
    # Whoever gets the weights of a step is told the answers of that step.
    assert answers_right(answered, 10, None)["to"] == "2 of 3"
    assert answers_right(answered, 5, None)["to"] == NOT_TESTED
    tested = run(BEFORE, *trained(30, few(20, "1", "1", "1"), AFTER))
    assert answers_right(tested, None, None)["to"] == "100 %"


def test_a_run_without_a_right_answer_is_not_said_to_learn_well():
    judged = Verdict(Finding("doing well", "good", "Learning well. Training loss 6 → 5."), ())
    evaluated = EvalFinished(10, 1.0, 9)
    for texts, title, tone in (
        (("x", "y", "z"), "The loss falls, no answer is right yet", "calm"),
        (("0", "y", "z"), "Learning well", "good"),
    ):
        answered = run(BEFORE, *trained(10, evaluated, few(10, *texts)))
        shown = head(answered, "running", NOTHING_SAVED, judged)
        assert (shown["title"], shown["tone"]) == (title, tone)


def test_in_the_end_more_are_shown_with_the_score():
    found = answers(run(BEFORE, *trained(30, few(20, "1", "1", "1"), AFTER)), is_over=True)
    assert found["title"] == "Before and after training"
    assert found["caption"] == "6 of 6 right (100 %) · step 30"
    assert [(row["before"], row["now"]) for row in found["rows"]][:2] == [("?", "0"), ("?", "2")]
    assert len(found["rows"]) == 4 and all(row["is_right"] for row in found["rows"])


def test_prompts_of_a_person_have_no_right_answer_and_without_any_there_is_nothing():
    own = [PromptsAnswered(0, [{"prompt": "Hi", "answer": "a"}])]
    own.append(PromptsAnswered(10, [{"prompt": "Hi", "answer": "b"}]))
    (row,) = answers(run(*own), is_over=False)["rows"]
    assert row == {"prompt": "Hi", "is_right": None, "before": "a", "now": "b"}
    assert answers(run(*trained(3)), is_over=False)["is_absent"]


def test_learning_has_each_answer_by_step_whoever_asked_for_it():
    own = PromptsAnswered(0, [{"prompt": "Hi", "answer": ""}])
    found = answers_by_step(run(own, BEFORE, *trained(30, few(10, "0", "3"), AFTER)))
    assert found["steps"] == [0, 10, 30]
    rows = {row.pop("prompt"): row for row in found["rows"]}
    assert rows["1 + 1?"] == {"expected": "2", "answers": ["?", "3", "2"]}
    assert rows["5 + 5?"] == {"expected": "10", "answers": ["?", None, "10"]}
    assert rows["Hi"] == {"expected": None, "answers": ["", None, None]}
    assert answers_by_step(run()) == {"steps": [], "rows": []}
