"""The thread that draws all answers: rows share steps, and end when nobody waits for them."""

from __future__ import annotations

import contextlib
import threading
from queue import SimpleQueue
from types import SimpleNamespace

import pytest

from engine.errors import FitError, GpuMemoryError, RunError
from engine.runtime.sampling.answers import AnswerLimits, SampledToken
from engine.runtime.sampling.drawing import Drawing
from engine.tools.serve import answer_worker
from engine.tools.serve.answer_worker import AnswerWorker, AskedAnswer
from tests.support.routes import wait_for


class CountingDecoding:
    """Each row counts from its prompt's token up to its limit; `gate` lets a step pass."""

    def __init__(self):
        self.rows, self.sizes, self.cancelled, self.number = {}, [], [], 0
        self.gate, self.fault = threading.Semaphore(0), None

    def add(self, prompt, limits, drawing, top_logprobs=0):
        if prompt == [13]:
            raise FitError("There is no room for it.")
        self.number += 1
        self.rows[self.number] = [prompt[0], limits.max_new_tokens]
        return self.number

    def cancel(self, row):
        self.cancelled.append(row)
        del self.rows[row]

    def step(self):
        assert self.gate.acquire(timeout=30)
        if self.fault is not None:
            raise self.fault
        self.sizes.append(len(self.rows))
        drawn = []
        for row, left in list(self.rows.items()):
            left[0] += 1
            left[1] -= 1
            finish = None if left[1] else "length"
            drawn.append(SampledToken(row, left[0], -1.0, (), finish))
            if finish:
                del self.rows[row]
        return drawn


@pytest.fixture
def made():
    """A worker over decodings that count, which are noted as they are opened and closed."""
    decoding, opened = CountingDecoding(), []

    @contextlib.contextmanager
    def decoding_once():
        opened.append(True)
        yield decoding
        opened.append(False)

    sampler = SimpleNamespace(decoding=decoding_once)
    engine = SimpleNamespace(
        label="Tiny", is_borrowed=False, call=lambda work: work(), sampler=lambda: sampler
    )
    worker = AnswerWorker(engine)
    yield SimpleNamespace(worker=worker, decoding=decoding, opened=opened, engine=engine)
    decoding.gate.release(1000)
    worker.close()


def asked(first, tokens):
    taken = SimpleQueue()
    answer = AskedAnswer([first], AnswerLimits(tokens, set()), Drawing(), taken.put)
    return answer, taken


def test_answers_that_come_later_share_the_steps(made):
    one, of_one = asked(0, 3)
    two, of_two = asked(10, 1)
    made.worker.ask(one)
    made.decoding.gate.release()
    assert of_one.get(timeout=30).token == 1
    made.worker.ask(two)
    wait_for(lambda: made.worker.asked == 2)
    made.decoding.gate.release(9)
    assert [of_one.get(timeout=30).token for _ in range(2)] == [2, 3]
    assert of_two.get(timeout=30).finish == "length"
    wait_for(lambda: made.worker.asked == 0)
    assert max(made.decoding.sizes) == 2 and made.opened == [True]


def test_an_answer_that_nobody_waits_for_leaves_its_place(made):
    one, of_one = asked(0, 100)
    made.worker.ask(one)
    made.decoding.gate.release()
    of_one.get(timeout=30)
    made.worker.cancel(one)
    made.worker.cancel(one)
    made.decoding.gate.release()
    wait_for(lambda: made.worker.asked == 0)
    assert made.decoding.cancelled == [1]


def test_what_has_no_room_fails_alone(made):
    (wrong, of_wrong), (right, of_right) = asked(13, 1), asked(1, 1)
    made.worker.ask(wrong)
    made.worker.ask(right)
    made.decoding.gate.release(9)
    assert str(of_wrong.get(timeout=30)) == "There is no room for it."
    assert of_right.get(timeout=30).token == 2


@pytest.mark.parametrize(
    "fault, text",
    [
        (GpuMemoryError(), "The GPU ran out of memory while Tiny answered"),
        (RunError("The run is not paused any more."), "not paused any more"),
        (ZeroDivisionError("secret"), "a fault of its own"),
    ],
)
def test_a_failing_step_ends_all_answers_in_a_sentence_and_the_next_begins_anew(
    made, fault, text, capsys
):
    one, of_one = asked(0, 5)
    made.decoding.fault = fault
    made.worker.ask(one)
    made.decoding.gate.release()
    problem = str(of_one.get(timeout=30))
    assert text in problem and "secret" not in problem
    made.decoding.fault = None
    made.decoding.rows.clear()
    two, of_two = asked(5, 1)
    made.worker.ask(two)
    made.decoding.gate.release()
    assert of_two.get(timeout=30).token == 6
    assert made.opened == [True, False, True]


def test_closing_tells_who_waits_and_frees_the_device(made):
    one, of_one = asked(0, 100)
    made.worker.ask(one)
    made.decoding.gate.release()
    of_one.get(timeout=30)
    closing = threading.Thread(target=made.worker.close)
    closing.start()
    made.decoding.gate.release(200)
    closing.join(30)
    last = None
    while not isinstance(last, RunError) and getattr(last, "finish", None) is None:
        last = of_one.get(timeout=30)
    assert made.opened == [True, False]
    with pytest.raises(RunError, match="no longer served"):
        made.worker.ask(one)


def test_a_paused_run_has_its_device_back_while_nobody_asks(made, monkeypatch):
    monkeypatch.setattr(answer_worker, "BORROWED_IDLE_SECONDS", 0.01)
    made.engine.is_borrowed = True
    worker = AnswerWorker(made.engine)
    one, of_one = asked(0, 1)
    worker.ask(one)
    made.decoding.gate.release()
    of_one.get(timeout=30)
    wait_for(lambda: made.opened == [True, False])
    worker.close()
