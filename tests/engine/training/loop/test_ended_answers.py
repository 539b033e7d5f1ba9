"""What was trained to end an answer ends it: in the answers that a run draws, and in those of plain
transformers from the exported folder. The end token of the model is another one, as where a base
model is trained on conversations.
"""

from __future__ import annotations

import pytest

from engine.config.export_choice import ExportChoice
from engine.runs.record.events import PromptsAnswered
from engine.tools.chat.chat_engines import load
from engine.tools.chat.chat_sources import folder_of
from engine.tools.chat.conversation import Sampling, checkpoint_of
from engine.training.export.export import export_run
from engine.training.export.modelfile import MODELFILE, stops_in
from engine.training.export.serve_commands import adapter_to_type
from tests.support.ended_answers import (
    CAPITALS,
    OWN_END,
    Learned,
    config_of,
    learned,
    model_folder,
    question,
    tokenizer_for,
)
from tests.support.published import template
from tests.support.references.trl_pairs import PAIRS
from tests.support.trained_runs import events_of, resumed_to_the_end, trained

FEW = ("glm4moe", "qwen2_5")


def families() -> list:
    """Returns all templates; a plain run has two of them."""
    reason = "it trains a model for each of 29 chat templates; a plain run has two"
    later = pytest.mark.slow(reason)
    return [pytest.param(name, marks=() if name in FEW else later) for name in PAIRS]


PARTS = ("idefics3", "llava_next", "smolvlm")
"""These templates read contents in parts alone."""


def in_parts(turn: dict) -> dict:
    return turn | {"content": [{"type": "text", "text": turn["content"]}]}


def asked(found: Learned, country: str, capital: str, parts: bool = False):
    """Returns the tokens of a prompt: the template's own, or what it writes before the answer where
    it begins an answer otherwise than it asks for one (a block of reasoning, in some families).
    """
    turns = [{"role": "user", "content": question(country)}]
    turns.append({"role": "assistant", "content": capital})
    turns = list(map(in_parts, turns)) if parts else turns
    prompt = found.tokenizer.apply_chat_template(
        turns[:1], tokenize=False, add_generation_prompt=True
    )
    whole = found.tokenizer.apply_chat_template(turns, tokenize=False)
    if not whole.startswith(prompt):
        prompt = whole.rpartition(capital)[0]
    return found.tokenizer(prompt, add_special_tokens=False, return_tensors="pt")["input_ids"]


def assert_ends_by_itself(found: Learned, parts: bool = False) -> set[str]:
    """Asserts that a run and its export answer all questions rightly, and returns what ended the
    answers of the export.
    """
    correct, total = found.exact
    assert correct == total == 12
    ends = set()
    for country, capital in CAPITALS.items():
        answer, end = found.answer(asked(found, country, capital, parts))
        assert answer.endswith(capital) and end, (country, answer, end)
        ends.add(end)
    return ends


@pytest.mark.parametrize("name", families())
def test_answers_end_by_themselves_with_every_template(tmp_path, name):
    tokenizer = tokenizer_for(template(name))
    model_folder(tmp_path / "model", tokenizer)
    found = learned(config_of(tmp_path), tmp_path / "runs")
    (end,) = assert_ends_by_itself(found, name in PARTS)
    assert end != OWN_END or name.startswith("phi3")  # Phi's template ends with it what it writes
    assert found.ends[0] == OWN_END and end in found.ends


CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def base_model(folder, code=CHATML, **values):
    """Returns a run of a base model: its tokenizer has the tokens of a chat template, and its texts
    end with another one.
    """
    model_folder(folder / "model", tokenizer_for(code))
    return config_of(folder, **values)


def stops(folder) -> list[str]:
    return stops_in((folder / MODELFILE).read_text(encoding="utf-8"))


@pytest.mark.slow("a plain run has shorter tests of the same")
def test_turns_of_a_base_model_end_by_themselves_in_every_answer(tmp_path):
    """In conversations of several turns; samples, Chat and exports of the checkpoint stop there."""
    countries = list(CAPITALS)
    data: list[dict] = []
    for place, country in enumerate(countries):
        turns = []
        for asked in (country, countries[place - 1]):
            turns.append({"role": "user", "content": question(asked)})
            turns.append({"role": "assistant", "content": CAPITALS[asked]})
        data += [{"messages": turns}, {"messages": turns[:2]}] * 6
    values = {"output.sample_prompts": [question("Peru")], "output.sample_tokens": 20}
    values |= {"output.checkpoint_every": 90, "output.eval_every": 90}
    config = base_model(tmp_path, **values)
    found = learned(config_of(tmp_path, data, **values), tmp_path / "runs")
    assert assert_ends_by_itself(found) == {"<|im_end|>"}
    assert found.ends == [OWN_END, "<|im_end|>"] and stops(found.folder) == ["<|im_end|>"]
    (sample,) = events_of(found.run, PromptsAnswered)[-1].answers
    assert sample["answer"] == "Lima"
    card = (found.folder / "README.md").read_text(encoding="utf-8")
    assert "An answer ends with `<|im_end|>`, as `generation_config.json` says." in card
    again = tmp_path / "again"
    export_run(tmp_path / "runs", found.run.folder.id, again)
    settings = (again / "generation_config.json").read_text()
    assert settings == (found.folder / "generation_config.json").read_text()
    sources = [
        checkpoint_of(tmp_path / "runs", found.run.folder.id, config, None, "it"),
        folder_of(str(again)),
    ]
    for source in sources:
        chat_engine = load(source)
        try:
            asked = [{"role": "user", "content": question("Italy")}]
            ids = list(chat_engine.answer(asked, Sampling(max_new_tokens=20)))
            assert chat_engine.prompt_builder.text(ids) == "Rome"
        finally:
            chat_engine.close()


@pytest.mark.slow("its model learns calls of 60 tokens, for some eight seconds")
def test_calls_end_with_the_token_that_begins_their_results(tmp_path):
    """A model of GLM's template ends a call with <|observation|> and an answer with <|user|>."""
    calls, data = {}, []
    for country, capital in CAPITALS.items():
        function = {"name": "capital", "arguments": {"of": country}}
        calls[country] = [
            {"role": "user", "content": question(country)},
            {"role": "assistant", "content": "", "tool_calls": [{"function": function}]},
        ]
        reported = [{"role": "tool", "content": capital}, {"role": "assistant", "content": capital}]
        data += [{"messages": calls[country] + reported}] * 12
    model_folder(tmp_path / "model", tokenizer_for(template("glm4moe")))
    found = learned(config_of(tmp_path, data, **{"train.steps": 150}), tmp_path / "runs")
    assert found.exact == (12, 12)
    for country in CAPITALS:
        ids = found.ids_of_prompt(calls[country][:1])
        call, end = found.answer(ids, most=120)
        assert end == "<|observation|>" and f"<arg_value>{country}</arg_value>" in call
    assert found.ends == [OWN_END, "<|user|>", "<|observation|>"]
    assert stops(found.folder) == ["<|user|>", "<|observation|>"]


PROMPTED = [
    {"prompt": question(country) + "\n", "completion": capital}
    for country, capital in CAPITALS.items()
]


@pytest.mark.slow("a plain run has shorter tests of the same")
def test_answers_without_a_template_end_with_the_tokenizers_token(tmp_path):
    """It is not the token of the model's settings, and it also pads."""
    tokenizer = tokenizer_for("", eos="<|endoftext|>")
    tokenizer.pad_token = "<|endoftext|>"
    tokenizer.chat_template = None
    model_folder(tmp_path / "model", tokenizer, end=OWN_END)
    found = learned(config_of(tmp_path, PROMPTED * 12), tmp_path / "runs")
    assert found.exact == (12, 12) and found.ends == [OWN_END, "<|endoftext|>"]
    for row in PROMPTED:
        ids = found.tokenizer(row["prompt"], return_tensors="pt")["input_ids"]
        assert found.answer(ids) == (row["completion"], "<|endoftext|>")
    assert stops(found.folder) == ["<|endoftext|>"]


@pytest.mark.slow("a plain run has shorter tests of the same")
def test_a_token_that_a_run_adds_ends_its_answers(tmp_path):
    tokenizer = tokenizer_for("<|im_start|>")
    tokenizer.chat_template = CHATML
    model_folder(tmp_path / "model", tokenizer)
    values = {"data.add_tokens": ["<|im_end|>"]}
    found = learned(config_of(tmp_path, **values), tmp_path / "runs")
    assert assert_ends_by_itself(found) == {"<|im_end|>"}
    assert found.ends == [OWN_END, "<|im_end|>"] and stops(found.folder) == ["<|im_end|>"]


def test_an_adapter_brings_what_ends_its_answers(tmp_path):
    peft = pytest.importorskip("peft")
    values = {
        "train.method": "lora",
        "train.lora_save_modules": ["embed_tokens", "lm_head"],
        "output.export_form": "adapter",
    }
    found = learned(base_model(tmp_path, **values), tmp_path / "runs")
    assert found.exact == (12, 12)
    folder = found.folder
    assert found.ends == [OWN_END, "<|im_end|>"]
    adapted = peft.AutoPeftModelForCausalLM.from_pretrained(folder)
    ids = asked(found, "Peru", "Lima")
    assert adapted.generate(input_ids=ids, max_new_tokens=40).shape[1] == ids.shape[1] + 40
    typed = dict(adapter_to_type(folder, "it", "base"))
    assert "Export the whole model" in typed["Serve it with vLLM"], "it has saved modules"
    names: dict = {}
    exec(typed["Load it in Python (PEFT)"], names)
    out = names["model"].generate(input_ids=ids, max_new_tokens=40, do_sample=False)
    assert found.tokenizer.decode(out[0, ids.shape[1] :]) == "Lima<|im_end|>"
    assert typed["Load it in Python (PEFT)"].splitlines()[-1].split("  #")[0] in (
        folder / "README.md"
    ).read_text(encoding="utf-8")
    merged = tmp_path / "merged"
    export_run(tmp_path / "runs", found.run.folder.id, merged, ExportChoice(form="model"))
    assert assert_ends_by_itself(Learned(found.run, merged)) == {"<|im_end|>"}


def test_a_run_that_was_resumed_and_one_without_ends_in_its_record_end_answers_too(tmp_path):
    """A damaged record does not say what ends an answer; the chat template does."""
    values = {"train.steps": 4, "output.checkpoint_every": 2, "output.exact_match_samples": 0}
    config = base_model(tmp_path, **values)
    stopped = trained(config, tmp_path / "runs", {2: "stop"})
    run = resumed_to_the_end(stopped)
    assert Learned(run, run.folder.export_path).ends == [OWN_END, "<|im_end|>"]
    path = run.folder.events_path
    lines = path.read_text(encoding="utf-8")
    assert '"answers_end_with":["<|im_end|>"]' in lines
    path.write_text(lines.replace('"answers_end_with":["<|im_end|>"],', ""), encoding="utf-8")
    export_run(tmp_path / "runs", run.folder.id, tmp_path / "home")
    assert Learned(run, tmp_path / "home").ends == [OWN_END, "<|im_end|>"]
