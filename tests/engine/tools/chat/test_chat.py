"""Chats with weights: conversations, what fits, a paused run that is asked and goes on to the bit,
and fixed prompts.
"""

from __future__ import annotations

import threading

import pytest
import torch

from engine.errors import DataError, FitError, ModelError, RunError
from engine.runs.record.events import ExactMatchMeasured, LogLine, PromptsAnswered, StateChanged
from engine.runs.summaries.evaluation_results import Wanted
from engine.runtime.sampling import generate
from engine.runtime.sampling.kv_cache import NoCache
from engine.tools.chat import chat_sources
from engine.tools.chat.chat_engines import borrow, load
from engine.tools.chat.chat_sources import (
    IN_TURN,
    TOGETHER,
    Size,
    folder_of,
    how_they_fit,
    size_of_source,
)
from engine.tools.chat.conversation import Sampling, Source, base_of, checkpoint_of, take_turns
from engine.tools.chat.prompt_builder import PromptBuilder
from engine.tools.evaluate.evaluate_run import AskedEvaluation, evaluate_run
from engine.training.export.export import export_run
from engine.training.loop import evaluation
from engine.training.loop.paused_calls import GOES_ON, PausedCalls
from engine.training.loop.run import resume_run, start_run
from tests.support.asking import ask_run
from tests.support.chats import GREEDY, QUESTION, answer_of, text_of
from tests.support.folders import WORDS, make_config, make_model, make_tokenizer
from tests.support.trained_runs import events_of, execute, planes_on_disk


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run that has learned something, with the checkpoints 20 and 30."""
    place = tmp_path_factory.mktemp("chat")
    run = start_run(
        make_config(
            place,
            **{
                "train.steps": 30,
                "output.checkpoint_every": 10,
                "output.eval_every": 0,
                "train.weight_decay": 0.0,
            },
        ),
        place / "runs",
    )
    assert execute(run).state == "finished"
    return run, place / "runs"


# ---------------------------------------------------------------------- which weights answer


def test_each_source_answers_with_its_own_weights(trained, tmp_path):
    run, runs = trained
    config = run.folder.config
    newest, older = (checkpoint_of(runs, run.id, config, step, str(step)) for step in (None, 10))
    with pytest.raises(RunError, match="no checkpoint of step 10"):
        load(older)
    expected = answer_of(newest).strip()
    assert expected
    exported = tmp_path / "home"
    export_run(runs, run.id, exported)
    assert answer_of(folder_of(str(exported))).strip() == expected
    assert (
        answer_of(base_of(config)) == answer_of(folder_of(config.model.source)) != answer_of(newest)
    )


def test_loading_counts_its_bytes_and_can_be_given_up(trained):
    run, runs = trained
    source = checkpoint_of(runs, run.id, run.folder.config, None, "newest")
    chat_engine = load(source)
    assert chat_engine.held_bytes == size_of_source(source).host > 0
    chat_engine.close()

    class Enough(Exception):
        pass

    def abort(done, total):
        raise Enough

    for given in (source, base_of(run.folder.config)):
        with pytest.raises(Enough):
            load(given, abort)


@pytest.mark.parametrize(
    "folder, part",
    [
        ("", "Nothing is not a folder"),
        ("/nowhere/at/all", "is not a folder"),
        ("tests", "no config.json"),
    ],
)
def test_what_is_no_model_folder_is_refused_in_a_sentence(folder, part):
    with pytest.raises(ModelError, match=part):
        folder_of(folder)


def test_two_answers_take_turns_and_stop_at_once(trained):
    run, runs = trained
    chat_engines = {
        "base": load(base_of(run.folder.config)),
        "tuned": load(checkpoint_of(runs, run.id, run.folder.config, None, "newest")),
    }
    alone = {
        name: list(chat_engine.answer(QUESTION, GREEDY))
        for name, chat_engine in chat_engines.items()
    }

    def together(stopped=lambda: False):
        order: list[tuple[str, int]] = []
        take_turns(
            {
                name: chat_engine.answer(QUESTION, GREEDY)
                for name, chat_engine in chat_engines.items()
            },
            lambda name, token: order.append((name, token)),
            lambda: stopped(order),
        )
        return order

    order = together(lambda order: False)
    assert {
        name: [token for found, token in order if found == name] for name in chat_engines
    } == alone
    assert [name for name, _ in order[:2]] == ["base", "tuned"]
    assert len(together(lambda order: len(order) >= 3)) == 3
    for chat_engine in chat_engines.values():
        chat_engine.close()


# ---------------------------------------------------------------------- what fits


@pytest.fixture
def source(monkeypatch):
    """Makes a source that takes so many GiB."""
    sizes: dict[str, Size] = {}
    monkeypatch.setattr(chat_sources, "size_of_source", lambda source: sizes[source.label])

    def make(host, loading=0, device=0):
        label = f"Weights of {host}"
        sizes[label] = Size(host << 30, loading << 30, device << 30)
        return Source("base", label, make_config_of_nothing())

    return make


def make_config_of_nothing():
    from engine.config.settings import TrainConfig

    return TrainConfig.from_dict({"model": {"source": "m"}, "data": {"source": "d"}})


@pytest.mark.parametrize(
    "free, found",
    [
        ((61, None), TOGETHER),
        ((60, None), IN_TURN),
        ((46, None), IN_TURN),
        ((99, 21), TOGETHER),
        ((99, 20), IN_TURN),
        ((99, 11), IN_TURN),
    ],
)
def test_weights_are_together_in_memory_where_both_fit(source, free, found):
    both = [source(15, device=10), source(30, loading=15, device=10)]
    host, device = free
    assert how_they_fit(both, (host << 30, device and device << 30)) == found


@pytest.mark.parametrize(
    "free, part",
    [
        ((45, None), "Weights of 30 needs 45.0 GiB of RAM to answer and 45.0 GiB is free"),
        ((99, 10), "10.0 GiB of GPU memory to answer and 10.0 GiB is free"),
    ],
)
def test_what_does_not_fit_alone_is_refused_in_a_sentence(source, free, part):
    with pytest.raises(FitError, match=part):
        how_they_fit(
            [source(30, loading=15, device=10)], (free[0] << 30, free[1] and free[1] << 30)
        )


# ---------------------------------------------------------------------- conversations


def test_several_turns_are_written_by_the_chat_template(tmp_path):
    make_model(tmp_path / "model")
    prompt_builder = PromptBuilder.of(base_of(make_config(tmp_path)).config)
    assert prompt_builder.has_template and prompt_builder.takes_system
    messages = [
        {"role": "system", "content": "say two"},
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "two"},
        {"role": "user", "content": "three"},
    ]
    written = (
        "<system> say two <end> <user> one <end> <assistant> two <end> <user> three <end> "
        "<assistant>"
    )
    assert make_tokenizer().decode(prompt_builder.prompt(messages)) == written
    # What a person types is text, though it looks like the template's own tokens.
    typed = prompt_builder.prompt([{"role": "user", "content": "one <assistant> two"}])
    assert typed.count(make_tokenizer().convert_tokens_to_ids("<assistant>")) == 1


def test_a_conversation_that_is_too_long_or_refused_says_so(tmp_path):
    make_model(tmp_path / "model")
    prompt_builder = PromptBuilder.of(base_of(make_config(tmp_path)).config)
    with pytest.raises(DataError, match="takes 64 at most; begin a new chat"):
        prompt_builder.prompt([{"role": "user", "content": "one " * 80}])
    prompt_builder.tokenizer.chat_template = "{{ raise_exception('No system messages here.') }}"
    with pytest.raises(DataError, match="refuses this conversation .No system messages here"):
        prompt_builder.prompt(QUESTION)
    assert not prompt_builder.takes_system


def test_without_a_template_the_text_goes_on(tmp_path):
    folder = make_model(tmp_path / "model")
    tokenizer = make_tokenizer()
    tokenizer.chat_template = None
    (folder / "chat_template.jinja").unlink()
    tokenizer.save_pretrained(folder)
    prompt_builder = PromptBuilder.of(base_of(make_config(tmp_path)).config)
    assert not prompt_builder.has_template and not prompt_builder.takes_system
    messages = [
        {"role": "user", "content": "one two"},
        {"role": "assistant", "content": " three"},
        {"role": "user", "content": " four"},
    ]
    assert tokenizer.decode(prompt_builder.prompt(messages)) == "one two three four"


# ---------------------------------------------------------------------- a run that is paused


def paused_run(config, runs, ask):
    """Run to the end, paused after step 3 until `ask(run)` has returned."""
    run = start_run(config, runs)
    paused = threading.Event()
    run.recorder.subscribe(
        lambda record: (
            paused.set()
            if isinstance(record.event, StateChanged) and record.event.state == "paused"
            else None
        )
    )
    failures = []

    def person():
        try:
            assert paused.wait(60)
            ask(run)
        except BaseException as error:
            failures.append(error)
        finally:
            run.request("resume")

    person_thread = threading.Thread(target=person)
    person_thread.start()
    assert execute(run, {3: "pause"}).state == "finished"
    person_thread.join()
    assert not failures, failures
    return run


def test_a_paused_run_that_was_asked_goes_on_with_the_same_bits(tmp_path):
    """Losses, weights and moments, with dropout, whose random numbers answers and an evaluation
    must not use up.
    """
    model = make_model(tmp_path / "model", "gpt2", resid_pdrop=0.2, attn_pdrop=0.1, embd_pdrop=0.1)
    config = make_config(tmp_path, **{"model.source": str(model)})
    whole = start_run(config, tmp_path / "runs")
    execute(whole)
    answers, states = {}, []

    def ask(run):
        states.append(run.paused.do(lambda p: torch.get_rng_state()))
        chat_engine = borrow(run.paused, config, "now")
        answers["drawn"] = list(chat_engine.answer(QUESTION, Sampling(5, temperature=0.8, seed=1)))
        answers["text"] = text_of(chat_engine)
        asked = AskedEvaluation(Wanted(answers=1))
        found = evaluate_run(run.folder.root, run.id, asked, lent=run.paused)
        assert found.is_over and (found.began.weights, found.began.step) == ("last", 3)
        assert found.losses["trained"].loss < found.losses["base"].loss
        states.append(run.paused.do(lambda p: torch.get_rng_state()))
        run.request("save")

    asked = paused_run(config, tmp_path / "runs", ask)
    assert answers["drawn"] and torch.equal(*states)
    assert planes_on_disk(asked) == planes_on_disk(whole)
    ours, theirs = asked.recorder.snapshot.steps, whole.recorder.snapshot.steps
    assert ours.step == theirs.step
    assert ours.loss == theirs.loss
    assert ours.grad_norm == theirs.grad_norm
    assert not asked.paused.is_open
    with pytest.raises(RunError, match="not paused any more"):
        borrow(asked.paused, config, "later")


def test_a_paused_run_answers_as_its_checkpoint_does(tmp_path):
    config = make_config(tmp_path, **{"output.keep_checkpoints": 9, "output.checkpoint_every": 0})
    shown = []

    def ask(run):
        step = run.recorder.snapshot.step
        shown.append((step, text_of(borrow(run.paused, config, "now"))))
        run.request("save")

    run = paused_run(config, tmp_path / "runs", ask)
    step, text = shown[0]
    assert answer_of(checkpoint_of(tmp_path / "runs", run.id, config, step, "saved")) == text


def test_answers_end_when_the_run_goes_on_and_leave_first(tmp_path):
    config, order = make_config(tmp_path), []

    def ask(run):
        answer = borrow(run.paused, config, "now").answer(QUESTION, Sampling(40, temperature=2.0))
        next(answer)
        run.paused.when_over("test", lambda: order.append(run.recorder.snapshot.state))
        run.request("resume")
        with pytest.raises(RunError, match="not paused any more"):
            for _ in range(1000):
                next(answer, None)
                run.paused.do(lambda p: None)

    paused_run(config, tmp_path / "runs", ask)
    assert order == ["paused"]


def test_a_failed_answer_is_the_askers(tmp_path):
    def fail(prepared):
        raise ZeroDivisionError

    def ask(run):
        with pytest.raises(ZeroDivisionError):
            run.paused.do(fail)

    paused_run(make_config(tmp_path), tmp_path / "runs", ask)


def test_calls_that_wait_are_refused_when_the_pause_is_over():
    paused = PausedCalls()
    with pytest.raises(RunError, match=GOES_ON):
        paused.do(lambda p: None)
    refused = []

    def wait():
        try:
            paused.do(lambda p: None)
        except RunError as error:
            refused.append(str(error))

    with paused.opened():
        thread = threading.Thread(target=wait)
        thread.start()
        while paused._calls.empty():
            pass
    thread.join()
    assert refused == [GOES_ON]


# ---------------------------------------------------------------------- prompts at each evaluation


def test_prompts_are_answered_at_each_evaluation_and_training_stays_the_same(tmp_path, monkeypatch):
    """Without a cache, which the log says once."""
    for name in ("try_rows_cache", "try_cache"):
        monkeypatch.setattr(generate, name, lambda _: NoCache("it is not to be used"))
    model = make_model(tmp_path / "model", "gpt2", resid_pdrop=0.2, attn_pdrop=0.1, embd_pdrop=0.1)
    config = make_config(tmp_path, **{"model.source": str(model)})
    without = start_run(config, tmp_path / "runs")
    execute(without)
    prompts = ("say after one", f"say after {WORDS[4]}")
    with_prompts = start_run(
        config.with_values({"output.sample_prompts": prompts, "output.sample_tokens": 5}),
        tmp_path / "runs",
    )
    execute(with_prompts)
    answered = events_of(with_prompts, PromptsAnswered)
    assert [event.step for event in answered] == [0, 4, 8]
    logged = [line.text for line in events_of(with_prompts, LogLine) if "slow" in line.text]
    (sentence,) = logged
    assert sentence.startswith("Answers of gpt2 models are slow, since ")
    assert all([pair["prompt"] for pair in event.answers] == list(prompts) for event in answered)
    assert with_prompts.recorder.snapshot.prompt_answers == answered
    for pair in answered[-1].answers:
        assert (
            ask_run(tmp_path / "runs", with_prompts.id, pair["prompt"], max_new_tokens=5)
            == pair["answer"]
        )
    assert not events_of(without, PromptsAnswered)
    assert planes_on_disk(with_prompts) == planes_on_disk(without)
    assert with_prompts.recorder.snapshot.steps.loss == without.recorder.snapshot.steps.loss


@pytest.mark.parametrize(("share", "steps"), [(10.0, [4]), (0.0, [])])
def test_few_validation_prompts_are_answered_in_their_share_of_the_time_and_training_stays_the_same(
    tmp_path, monkeypatch, share, steps
):
    monkeypatch.setattr(evaluation, "FEW_SHARE", share)
    model = make_model(tmp_path / "model", "gpt2", resid_pdrop=0.2, attn_pdrop=0.1, embd_pdrop=0.1)
    values = {"model.source": str(model), "output.exact_match_samples": 0}
    without = start_run(make_config(tmp_path, **values), tmp_path / "runs")
    execute(without)
    values["output.exact_match_samples"] = 4
    asked = start_run(make_config(tmp_path, **values), tmp_path / "runs")
    execute(asked)
    answered = events_of(asked, PromptsAnswered)
    assert [event.step for event in answered] == steps, "the end answers more of them"
    before = next(iter(events_of(asked, ExactMatchMeasured))).samples
    few = [each["prompt"] for each in before][: evaluation.FEW_PROMPTS]
    assert all([pair["prompt"] for pair in event.answers] == few for event in answered)
    assert asked.recorder.snapshot.steps.loss == without.recorder.snapshot.steps.loss
    assert asked.recorder.snapshot.evals.loss == without.recorder.snapshot.evals.loss
    assert planes_on_disk(asked) == planes_on_disk(without)


def test_prompts_of_steps_that_a_resume_repeats_are_answered_anew(tmp_path):
    config = make_config(
        tmp_path,
        **{
            "output.sample_prompts": ["say after one"],
            "output.sample_tokens": 2,
            "output.eval_every": 2,
            "output.checkpoint_every": 0,
        },
    )
    run = start_run(config, tmp_path / "runs")
    assert execute(run, {5: "stop"}).state == "stopped"
    again = resume_run(tmp_path / "runs", run.id)
    execute(again)
    assert [event.step for event in again.recorder.snapshot.prompt_answers] == [0, 2, 4, 6, 8]


def test_a_prompt_that_no_row_holds_ends_the_run_in_a_sentence(tmp_path):
    run = start_run(
        make_config(tmp_path, **{"output.sample_prompts": ["one " * 80]}), tmp_path / "runs"
    )
    ended = run.execute()
    assert ended.state == "failed"
    assert "output.sample_prompts[0]" in ended.reason
    assert "64 at most" in ended.reason
