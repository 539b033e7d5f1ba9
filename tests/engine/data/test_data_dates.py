"""Chat templates may insert today's date, but the tokens of a data set are the same every day."""

from __future__ import annotations

import json
from datetime import datetime

import pytest
from transformers.utils import chat_template_utils

from engine.config.data_settings import DataConfig
from engine.data.batches.loader import prepare_data
from engine.data.tokens.chat_template import fixed_date
from tests.support import data_tokenizers as made

TURNS = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "an"}]
GIVEN = "{{ date_string if date_string is defined else strftime_now('%d %b %Y') }}\n"
ASKED = (
    "\n{% if strftime_now is defined %}{% for m in messages %}"
    '{{ strftime_now("%A, %-d %B %Y, %Y-%m-%d %H:%M") }}'
    "{% endfor %}{% endif %}\n\n"
)
WITHIN = (
    "{%- macro day(format) %}{{ strftime_now(format) }}{% endmacro %}"
    "{% set f = '%B' %}{{ day(f + ' %Y') }} "
)


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        (GIVEN, "26 Jul 2024\n"),
        (WITHIN, "July 2024 "),
        (ASKED, "\n" + "Friday, 26 July 2024, 2024-07-26 00:00" * 2 + "\n"),
    ],
)
def test_a_template_that_writes_the_date_writes_the_same_one_on_every_day(
    tmp_path, own_cache, monkeypatch, written, expected
):
    tokenizer = made.byte_level_tokenizer(written + made.CHATML_GENERATION)
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": TURNS}) + "\n")
    config = DataConfig(source=str(tmp_path / "a.jsonl"), packing=False, eval_fraction=0.0)
    found = []
    for year in (2026, 2027):

        class Day(datetime):
            now = classmethod(lambda cls, tz=None, year=year: datetime(year, 3, 4))

        monkeypatch.setattr(chat_template_utils, "datetime", Day)
        monkeypatch.setenv("RAMSTREAM_CACHE", str(tmp_path / str(year)))
        found.append(prepare_data(config, tokenizer, 1))
    assert found[0].fingerprint == found[1].fingerprint
    whole = tokenizer.apply_chat_template(TURNS, tokenize=False, **fixed_date(tokenizer))
    assert tokenizer.decode(found[0].train.ids.tolist()) == whole
    assert whole == expected + "".join(
        f"<|im_start|>{t['role']}\n{t['content']}<|im_end|>\n" for t in TURNS
    )
    asked = tokenizer.apply_chat_template(
        TURNS[:1], add_generation_prompt=True, tokenize=False, **fixed_date(tokenizer)
    )
    assert written == ASKED or whole.startswith(asked)


def test_a_tokenizer_with_a_template_for_tools_keeps_it():
    tokenizer = made.byte_level_tokenizer()
    tokenizer.chat_template = {
        "default": "plain {{ strftime_now('%Y') }}",
        "tool_use": "tools {{ strftime_now('%y') }}",
    }
    for tools, expected in (
        (None, "plain 2024"),
        ([{"type": "function", "function": {"name": "add"}}], "tools 24"),
    ):
        written = tokenizer.apply_chat_template(
            TURNS, tools=tools, tokenize=False, **fixed_date(tokenizer, tools)
        )
        assert written == expected
