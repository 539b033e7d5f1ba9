"""A chat template that loops, recurses or fills the memory ends in one sentence, and the process
that ran it is replaced.
"""

from __future__ import annotations

import json
import re
import threading

import psutil
import pytest

from engine.config.data_settings import DataConfig
from engine.data.batches.loader import prepare_data
from engine.data.formats.example import Conversation
from engine.data.tokens import template_process
from engine.data.tokens.encode import Encoder
from engine.data.tokens.rendered import Handling, RejectedExample
from engine.data.tokens.template_process import Asked, Chat, Refusal, TemplateProcess
from engine.errors import DataError
from engine.paths import PROGRAM_ROOT
from tests.support import data_tokenizers as made
from tests.support.stuck import never_stuck

TURNS = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "an answer"}]
PLAIN = "{% for m in messages %}{{ m['role'] + ':' + m['content'] + '\n' }}{% endfor %}"
LOOPS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
FILLS = "{{ 'a' * 10**10 }}"
DOUBLES = (
    "{% set text = namespace(of='a') %}{% for i in range(60) %}"
    "{% set text.of = text.of + text.of %}{% endfor %}{{ text.of }}"
)
IMPATIENT = "import engine.data.tokens.template_process as p; p.MOST_SECONDS = 1.0; p.serve()"
"""It ends a template after a second, and tells it as after five."""
RECURSES = "{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}"


@pytest.fixture
def fresh():
    made_here = TemplateProcess()
    yield made_here
    made_here._end()


@pytest.fixture
def impatient(monkeypatch):
    """The one process of this program ends a template after a second."""
    process = template_process.template_process()
    process._end()
    monkeypatch.setattr(template_process, "_PROGRAM", IMPATIENT)
    yield
    process._end()


@pytest.fixture(scope="module")
def process():
    """It takes a second to start, so tests that change nothing about it share it."""
    made_here = TemplateProcess()
    yield made_here
    made_here._end()


def written(process, template, chats=(TURNS,), generation=False):
    asked = Asked(template, {}, [Chat(list(turns)) for turns in chats], generation)
    return process.write(asked)


def test_it_writes_what_the_library_writes(process):
    tokenizer = made.byte_level_tokenizer(made.CHATML)
    variables = dict(tokenizer.special_tokens_map)
    chats = [TURNS[:1], TURNS, TURNS * 2]
    for generation in (False, True):
        found = process.write(
            Asked(made.CHATML, variables, [Chat(turns) for turns in chats], generation)
        )
        assert found == [
            tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=generation)
            for turns in chats
        ]


@pytest.mark.slow("it starts processes and waits for them, for five seconds or more")
@pytest.mark.parametrize(
    ("template", "sentence"),
    [
        (LOOPS, r"^The chat template of this model computes for more than 5 s on one conversation"),
        (FILLS, r"^The chat template of this model takes more than 1 GiB of memory"),
        (DOUBLES, r"^The chat template of this model takes more than 1 GiB of memory"),
    ],
)
def test_a_limit_is_one_sentence_and_the_next_template_is_written(
    process, fresh, monkeypatch, template, sentence
):
    if template == LOOPS:
        process = fresh
        monkeypatch.setattr(template_process, "_PROGRAM", IMPATIENT)
    with never_stuck(computing=20), pytest.raises(DataError, match=sentence) as caught:
        written(process, template, [TURNS, TURNS])
    assert str(caught.value).count(". ") == 0 and str(caught.value).endswith(".")
    assert written(process, PLAIN) == ["user:hello\nassistant:an answer\n"]


@pytest.mark.slow("it starts processes and waits for them, for five seconds or more")
def test_memory_beside_a_template_that_fills_it_stays_bounded(process):
    written(process, PLAIN)
    child = psutil.Process(process._process._process.pid)
    before = child.memory_info().rss
    most, ended = before, threading.Event()

    def watch():
        nonlocal most
        while not ended.wait(0.005):
            try:
                most = max(most, child.memory_info().rss)
            except psutil.Error:
                return

    watcher = threading.Thread(target=watch)
    watcher.start()
    with pytest.raises(DataError, match="GiB of memory"):
        written(process, DOUBLES)
    ended.set()
    watcher.join()
    assert most - before <= template_process.MOST_BYTES
    assert psutil.Process().memory_info().rss < before + 4 * template_process.MOST_BYTES


def test_recursion_is_a_refusal_of_the_chat(process):
    (found,) = written(process, RECURSES)
    assert isinstance(found, Refusal) and "recursion" in found.message
    assert written(process, PLAIN) == ["user:hello\nassistant:an answer\n"]


def test_one_refused_chat_leaves_the_others(process):
    template = "{% if messages | length > 1 %}{{ raise_exception('only one') }}{% endif %}ok"
    assert written(process, template, [TURNS, TURNS[:1]]) == [Refusal("only one"), "ok"]


def test_text_that_is_not_valid_unicode_is_a_refusal(process):
    (found,) = written(process, "{{ '\\ud800' }}")
    assert isinstance(found, Refusal)


def sleeps(child: psutil.Process) -> bool:
    try:
        return "sleep(600)" in " ".join(child.cmdline())
    except psutil.Error:  # it has ended, such as one of a test before
        return False


@pytest.mark.slow("it starts processes and waits for them, for five seconds or more")
def test_a_process_that_is_silent_is_ended(fresh, monkeypatch):
    program = (
        "import time, engine.data.tokens.template_process as p; "
        "p._text = lambda *_: time.sleep(600); p.serve()"
    )
    with monkeypatch.context() as patch:
        patch.setattr(template_process, "_PROGRAM", program)
        patch.setattr(template_process, "_SILENT_SECONDS", 0.5)
        with pytest.raises(DataError, match="computes for more than"):
            written(fresh, PLAIN)
    assert fresh._process is None
    assert not any(map(sleeps, psutil.Process().children()))
    assert written(fresh, PLAIN) == ["user:hello\nassistant:an answer\n"]


@pytest.mark.slow("it starts processes and waits for them, for five seconds or more")
def test_a_killed_process_is_one_sentence_and_an_idle_one_is_replaced(process):
    written(process, PLAIN)
    process._process.kill()
    process._process.wait()
    assert written(process, PLAIN) == ["user:hello\nassistant:an answer\n"]


@pytest.mark.slow("it starts processes and waits for them, for five seconds or more")
def test_it_ends_when_nothing_is_asked_of_it(fresh, monkeypatch):
    monkeypatch.setattr(
        template_process,
        "_PROGRAM",
        "import engine.data.tokens.template_process as p; p._IDLE_SECONDS = 0.2; p.serve()",
    )
    written(fresh, PLAIN)
    assert fresh._process.wait() == 0
    assert written(fresh, PLAIN) == ["user:hello\nassistant:an answer\n"]


def test_threads_get_their_own_answers(process):
    found = {}

    def ask(number):
        turns = [{"role": "user", "content": str(number)}]
        found[number] = [written(process, PLAIN, [turns] * 5) for _ in range(10)]

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {number: [[f"user:{number}\n"] * 5] * 10 for number in range(4)}


@pytest.mark.slow("it starts processes and waits for them, for five seconds or more")
def test_a_data_set_with_a_template_that_loops_is_refused_in_a_sentence(impatient):
    encoder = Encoder(made.byte_level_tokenizer(LOOPS), Handling(), 64)
    with pytest.raises(DataError, match="computes for more than 5 s"):
        encoder.encode([Conversation(TURNS)])


def test_a_template_that_recurses_skips_the_row():
    encoder = Encoder(made.byte_level_tokenizer(RECURSES), Handling(), 64)
    (found,) = encoder.encode([Conversation(TURNS)])
    assert isinstance(found, RejectedExample) and "recursion" in found.detail


@pytest.mark.slow("it starts processes and waits for them, for five seconds or more")
@pytest.mark.parametrize(("free", "ends"), [(3 << 30, True), (5 << 30, False)])
def test_it_ends_before_a_run_is_judged_where_memory_is_short(process, monkeypatch, free, ends):
    monkeypatch.setattr(template_process, "sample_host_memory", lambda: (0, free))
    written(process, PLAIN)
    process.end_if_memory_is_short()
    assert (process._process is None) is ends


def test_nothing_is_started_for_tokens_from_the_cache(tmp_path, monkeypatch):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"messages": TURNS}) + "\n")
    tokenizer = made.byte_level_tokenizer(made.CHATML)
    config = DataConfig(str(path), eval_fraction=0.0)
    before = prepare_data(config, tokenizer, 1)

    def fail(*_):
        raise AssertionError("a template was asked for")

    monkeypatch.setattr(TemplateProcess, "write", fail)
    again = prepare_data(config, tokenizer, 1)
    assert again.summary["cached"] and again.fingerprint == before.fingerprint


def test_templates_are_rendered_nowhere_else():
    """Every other place asks the process that has limits."""
    renders = re.compile(r"apply_chat_template\(|render_jinja_template|from_string\(|\.Template\(")
    found = {
        str(file.relative_to(PROGRAM_ROOT))
        for wing in ("engine", "app")
        for file in (PROGRAM_ROOT / wing).rglob("*.py")
        if renders.search(file.read_text(encoding="utf-8"))
    }
    # The harness calls the method of this name, which asks the process; an export's commands have
    # its name in lines for a person's own program.
    assert found == {
        "engine/data/tokens/template_process.py",
        "engine/tools/evaluate/streamed_lm.py",
        "engine/training/export/serve_commands.py",
    }


def test_no_yaml_is_read_by_a_loader_that_makes_objects():
    found = {
        match[0]
        for wing in ("engine", "app")
        for file in (PROGRAM_ROOT / wing).rglob("*.py")
        for match in re.finditer(
            r"yaml\.(?:(?:full|unsafe)_load\w*|load\w*)\(.*", file.read_text(encoding="utf-8")
        )
    }
    assert all("_UniqueKeys)" in each or "_Loader)" in each for each in found), found
