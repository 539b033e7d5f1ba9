"""A Modelfile has a TEMPLATE only where it gives the tokens of the model's own chat template."""

from __future__ import annotations

import re

import pytest

from engine.model.build.pretrained_files import load_tokenizer
from engine.training.export.modelfile import modelfile
from engine.training.export.ollama_template import ChatShape, NoShape, shape_of

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
DEFAULT_SYSTEM = (
    "{% if messages[0].role != 'system' %}<|im_start|>system\nBe kind.<|im_end|>\n{% endif %}"
)
NO_SYSTEM = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + CHATML
)
NUMBERED = CHATML.replace("{{ m.role }}", "{{ m.role }} {{ loop.index }}")
CUT = CHATML.replace("{{ m.content }}", "{{ m.content[:20] }}")
SHORTENED = "{% set messages = messages[-1:] %}" + CHATML
DATED = "{{ strftime_now('%d %B') }}" + CHATML
MARKED = CHATML.replace("<|im_start|>", '"""')


@pytest.fixture
def tokenizer():
    found = load_tokenizer("assets/starter-model")
    found.chat_template = CHATML
    return found


def in_python(template: str, system: str, messages: list[dict[str, str]]) -> str:
    """Renders the little of Ollama's language that a Modelfile here uses, apart from the house."""
    before, _, rest = template.partition("{{ range .Messages }}")
    loop, _, generation = rest.rpartition("{{ end }}{{ end }}")
    found = re.fullmatch(
        r'\{\{ if eq .Role "user" \}\}(.*)\{\{ else if eq .Role "assistant" \}\}(.*)',
        loop,
        re.DOTALL,
    )
    choice = re.fullmatch(
        r"\{\{ if .System \}\}(.*?)(?:\{\{ else \}\}(.*))?\{\{ end \}\}", before, re.DOTALL
    )
    if choice is not None:
        before = choice[1].replace("{{ .System }}", system) if system else choice[2] or ""
    turns = {"user": found[1], "assistant": found[2]}
    text = [turns[each["role"]].replace("{{ .Content }}", each["content"]) for each in messages]
    return before + "".join(text) + generation


@pytest.mark.slow("a quicker test beside it shows most of what it shows")
@pytest.mark.parametrize("template", [CHATML, DEFAULT_SYSTEM + CHATML, NO_SYSTEM])
@pytest.mark.parametrize("system", ["", "Answer in Latin."])
def test_what_ollama_reads_is_what_the_template_writes(tokenizer, template, system):
    tokenizer.chat_template = template
    written = modelfile(tokenizer)
    (go,) = re.findall(r'TEMPLATE """(.*?)"""', written, re.DOTALL)
    messages = [
        {"role": "user", "content": "XIV?"},
        {"role": "assistant", "content": "14"},
        {"role": "user", "content": "And\n\nMCMXC?"},
    ]
    if system and template is NO_SYSTEM:
        assert ".System" not in go
        return
    first = [{"role": "system", "content": system}] if system else []
    own = tokenizer.apply_chat_template(
        [*first, *messages], tokenize=False, add_generation_prompt=True
    )
    assert in_python(go, system, messages) == own
    assert written.startswith("#") and "\nFROM .\n" in written


@pytest.mark.parametrize(
    ("template", "why"),
    [
        (None, "the tokenizer has no chat template"),
        (NUMBERED, "the tokens of a conversation are not those of the chat template"),
        (CUT, "the tokens of a conversation are not those of the chat template"),
        (SHORTENED, "the chat template leaves out a turn, or writes it twice"),
        (DATED, "the chat template writes the date of the day"),
        (MARKED, "the chat template has marks that Ollama's templates give a meaning"),
        ("{{ raise_exception('never') }}", "the chat template refuses a conversation"),
    ],
)
def test_a_template_that_differs_is_not_written_and_the_file_says_why(tokenizer, template, why):
    tokenizer.chat_template = template
    with pytest.raises(NoShape, match=re.escape(why)):
        shape_of(tokenizer)
    written = modelfile(tokenizer)
    assert f"# There is no TEMPLATE here: {why}" in written and "\nTEMPLATE" not in written


def test_the_starters_answers_end_with_its_own_token():
    written = modelfile(load_tokenizer("assets/starter-model"))
    assert 'PARAMETER stop "<|end|>"' in written and "<|assistant|>" in written


def test_a_start_that_the_tokenizer_adds_is_not_written_twice(tokenizer):
    """Ollama adds the first token as the tokenizer does."""

    class Starting:
        """Adds its first token, as those of Llama do."""

        bos_token, bos_token_id = "<|im_start|>", -1
        all_special_tokens = ()

        def __init__(self):
            self.chat_template = "<|im_start|>" + CHATML

        def __getattr__(self, name):
            return getattr(tokenizer, name)

        def __call__(self, text, add_special_tokens=True):
            ids = []
            while text.startswith(self.bos_token):
                ids.append(-1)
                text = text.removeprefix(self.bos_token)
            ids += tokenizer(text, add_special_tokens=False)["input_ids"]
            return {"input_ids": [-1, *ids] if add_special_tokens else ids}

    starting = Starting()
    tokenizer.chat_template = starting.chat_template
    shape = shape_of(starting)
    assert isinstance(shape, ChatShape)
    asked = [{"role": "user", "content": "Hi"}]
    assert shape.written(asked).count("<|im_start|>") == 2  # the turn and the answer alone
