"""The texts and drawings of the fit report beside Start: pure functions of the engine's report,
which the page gets by a route.
"""

from __future__ import annotations

import asyncio
import json
import re
from dataclasses import replace
from types import SimpleNamespace

import httpx
import pytest
from starlette.applications import Starlette

import app.pages.new.checker
from app.form.examples import example_of
from app.form.settings_form import as_labeled, read_config, shown_values
from app.labels import in_bytes
from app.pages.new.checker import AFTER_TOKENIZER, NO_TOKENIZER, Checker
from app.pages.new.draft import DRAFT_FILE, Drafts
from app.pages.new.fit_panel import LACKS, NO_MODEL, TO_DOWNLOAD
from app.pages.new.fixes import SHOWN
from app.pages.new.form_routes import form_routes
from app.pages.new.known_models import known_models
from app.server.guard import Guard, GuardPolicy
from app.session.engine_calls import EngineCalls
from engine.data.batches.preview import preview
from engine.errors import DataError, ModelError, RamstreamError
from engine.machine import offload_folder
from engine.machine.known_machines import named_machine
from engine.machine.offload_folder import Mount
from engine.model.build.find_shape import adapted_shape
from engine.model.build.pretrained_files import load_tokenizer
from engine.model.build.shape_of_run import shape_of_run
from engine.planning.fit.report import estimate
from engine.text import GIB
from tests.support.data_tokenizers import NO_END
from tests.support.folders import make_data
from tests.support.forms import shown


def _estimate(config):
    machine = app.pages.new.checker.read_machine(".")
    return estimate(config, machine, shape_of_run(config), adapted=adapted_shape)


def test_the_time_counts_in_how_the_last_runs_on_this_card_went(checker):
    before = checker.fit_panel(shown())["clock"]
    assert before["note"] == ""
    name = app.pages.new.checker.read_machine(".").gpus[0].name
    went = {"state": "finished", "created": float("inf"), "step_times": 1.4, "model": "other"}
    checker.runs = [SimpleNamespace(device=device, **went) for device in ("CPU", name)]
    after = checker.fit_panel(shown())["clock"]
    assert after["seconds"] == pytest.approx(1.4 * before["seconds"])
    assert after["note"].startswith("Adjusted: the last run here took 1.4× as long as predicted")


def test_bars_and_items_add_up_to_what_the_report_says(checker):
    verdict = checker.fit_panel(shown())
    report = _estimate(checker.calls[0])
    assert [bar["name"] for bar in verdict["bars"]] == ["gpu", "host", "disk"]
    for bar in verdict["bars"]:
        part = getattr(report, bar["name"])
        *items, free = bar["items"]
        assert [item["name"] for item in items] == [each.words for each in part.items if each.bytes]
        assert (free["name"], free["held"]) == ("Free", "free")
        # Each color of the bar is that of an item, and the other way round.
        drawn = {segment["held"] for segment in bar["pool"]["segments"]}
        assert drawn == {item["held"] for item in bar["items"]}


def test_gpu_memory_that_the_plan_fills_on_purpose_is_no_warning(checker):
    bar = next(
        bar
        for bar in checker.fit_panel(shown(train__batch_size=128))["bars"]
        if bar["name"] == "gpu"
    )
    assert bar["tone"] == "good" and "would do" in bar["note"]


def test_the_time_of_a_step_and_a_run_its_energy_and_cost(checker):
    rows = {row["name"]: row for row in checker.fit_panel(shown(output__price_per_kwh=0.5))["time"]}
    time = _estimate(checker.calls[0]).time
    assert rows["A step"]["text"].startswith("about ") and "tokens/s" in rows["A step"]["text"]
    assert rows["A step"]["note"] == "estimated from the card's specification"
    assert rows["The run"]["text"].startswith("500 steps · ≈ ")
    assert f"{time['energy_kwh']:.2g} kWh" in rows["Electricity"]["text"]
    assert rows["Electricity"]["text"].endswith(
        "which cost " + (f"about {time['cost']:.2f}" if time["cost"] >= 0.01 else "less than 0.01")
    )
    assert "price" in checker.fit_panel(shown())["time"][-1]["note"]


def test_what_answers_take_is_said_beside_the_time(checker):
    rows = {row["name"]: row for row in checker.fit_panel(shown())["answers"]}
    assert "of free GPU memory" in rows["Chat while paused"]["text"]
    assert rows["Weights for answers"]["text"]


def test_without_steps_or_a_card_the_time_is_said_to_be_unknown(checker):
    epochs = checker.fit_panel(shown(train__steps=None, train__epochs=1.0))
    assert [row["name"] for row in epochs["time"]] == ["A step", "The run"]
    cpu = checker.fit_panel(shown(engine__device="cpu"))
    assert [row["text"] for row in cpu["time"]] == ["not known yet"]


def test_a_suggestion_says_what_it_does_in_the_words_of_the_form_and_does_it(checker):
    too_much = shown(train__steps=20_000, output__checkpoint_every=10, output__keep_checkpoints=100)
    verdict = checker.fit_panel(too_much)
    assert verdict["tone"] == "bad"
    assert verdict["help"]
    assert 1 <= len(verdict["suggestions"]) <= SHOWN
    for suggestion in verdict["suggestions"]:
        assert not any(name in suggestion["title"] for name in too_much)
        (bar,) = suggestion["bars"]
        assert bar["after"] <= bar["limit"] < bar["before"] == 1
        after = checker.fit_panel(too_much | suggestion["changes"])
        assert after["can_start"] and after["tone"] != "bad"


def test_adapters_are_recommended_with_the_rate_that_they_take(checker):
    verdict = checker.fit_panel(shown(model__source="Qwen/Qwen2.5-14B", train__learning_rate=1e-5))
    first, *_ = verdict["suggestions"]
    assert first["changes"] == {"train.method": "lora"}
    assert "Sets the learning rate to 0.0001." in first["note"]


def test_every_warning_has_a_button_that_ends_it(checker):
    given = shown(
        train__steps=10,
        train__warmup_steps=50,
        train__learning_rate=5,
        train__lora_rank=3,
        preference__beta=0.4,
        output__eval_every=70,
        output__export_form="adapter",
    )
    verdict = checker.fit_panel(given)
    assert len(verdict["fixes"]) == 6 and verdict["tone"] == "warn"
    for fix in verdict["fixes"].values():
        given |= fix["changes"]
    assert not checker.fit_panel(given)["fixes"]


def test_what_does_not_fit_names_by_how_much_and_cannot_start(checker):
    verdict = checker.fit_panel(shown(model__source="Qwen/Qwen2.5-14B"))
    host = verdict["bars"][1]
    assert (verdict["tone"], verdict["can_start"], host["tone"]) == ("bad", False, "bad")
    assert " · only " in host["text"] and host["share"] == 1 and verdict["time"] == []
    assert host["pool"]["limit"] < 1 and host["items"][-1]["name"] != "Free"


@pytest.mark.parametrize("kind, text", [("tmpfs", "in RAM"), ("nfs4", "of the network")])
def test_a_folder_that_cannot_take_moments_is_refused_at_its_field(
    checker, tmp_path, monkeypatch, kind, text
):
    folder = tmp_path / "moments"
    wanted = shown(engine__disk=str(folder))
    elsewhere = checker.fit_panel(wanted)
    assert elsewhere["field"] is None, "another machine has folders of its own"
    machine = replace(app.pages.new.checker.read_machine("."), here=True)
    monkeypatch.setattr(app.pages.new.checker, "read_machine", lambda folder: replace(machine))
    checker._read = (0.0, None)
    missing = checker.fit_panel(wanted)
    assert (missing["field"], missing["can_start"]) == ("field-engine-disk", False)
    assert f"there is no folder {folder}" in missing["why_not"]
    folder.mkdir()
    monkeypatch.setattr(offload_folder, "mount_of", lambda folder: Mount("/", kind, "some"))
    refused = checker.fit_panel(wanted)
    assert (refused["field"], refused["can_start"]) == ("field-engine-disk", False)
    assert text in refused["why_not"] and f"is on {kind}" in refused["why_not"]
    monkeypatch.setattr(offload_folder, "mount_of", lambda folder: Mount("/", "ext4", "some"))
    assert checker.fit_panel(wanted)["field"] is None


@pytest.mark.slow("it plans hundreds of jobs, for five seconds or more")
def test_the_verdict_tells_how_a_drive_of_moments_wears(checker):
    job = {"model__source": "Qwen/Qwen2.5-7B", "output__checkpoint": "none"}
    assert not checker.fit_panel(shown(**job))["can_start"]
    reported = checker.fit_panel(shown(engine__disk="/disk", **job), timed=True)
    report = _estimate(checker.calls[-1])
    sentences = report.disk_offload.sentences()
    assert reported["can_start"] and len(sentences) == 3
    assert [found for found in reported["reasons"] if found in sentences] == list(sentences)
    assert any("what a drive rated for" in found for found in reported["reasons"])
    costs = {bar["name"]: bar["cost"] for bar in reported["bars"]}
    assert costs["disk"].startswith("A step, beside computing: reads and writes ")
    # This disk is that of the runs. It is another drive, so its limit says nothing of moments.
    assert "Moments on the disk" not in json.dumps(reported["bars"][-1]["items"])
    small = checker.fit_panel(shown(engine__disk="/disk"), timed=True)
    assert not any("drive" in found for found in small["reasons"]), "nothing goes to the disk"
    assert small["bars"][-1]["cost"] == ""


def test_what_a_preset_says_is_not_said_of_other_data_or_another_model(checker):
    preset = next(iter(checker.presets.listed().values()))
    own = shown_values(preset.config)
    assert checker.trains_as_preset(preset.file, own)
    assert checker.trains_as_preset(preset.file, own | {"name": "Mine", "train.steps": "9"})
    assert not checker.trains_as_preset(preset.file, own | {"data.source": "mine.csv"})
    assert not checker.trains_as_preset(preset.file, own | {"model.source": "Qwen/Qwen3-0.6B"})
    assert checker.trains_as_preset(None, own)


def test_the_same_draft_is_estimated_once(checker):
    for _ in range(3):
        checker.fit_panel(shown())
    checker.fit_panel(shown(train__batch_size=16))
    assert len(checker.calls) == 2


def test_data_that_a_run_would_refuse_are_read_again_when_they_are_asked_for_again(tmp_path):
    engine = SimpleNamespace(preview=preview, load_tokenizer=load_tokenizer)
    checker = Checker(SimpleNamespace(runs_dir=tmp_path, engine=engine))
    rows = tmp_path / "rows.jsonl"
    given = shown(model__source="assets/starter-model", data__source=str(rows))
    rows.write_text('{"Frage": "a", "Wohin": "b"}\n' * 3, encoding="utf-8")
    assert checker.preview(given)["mapping"]["refused"]
    checker.fitting(given)  # reads the same rows
    rows.write_text('{"prompt": "a", "completion": "b"}\n' * 3, encoding="utf-8")
    found = checker.preview(given)
    assert not found["mapping"]["refused"]
    assert found["given"]["data.source"] == str(rows) and "train.steps" not in found["given"]


@pytest.mark.parametrize(
    "rows, text, blocks",
    [
        ("", "is empty", True),
        ('{"messages": [', "is cut off in line 1", True),
        ('{"prompt": "a", "completion": ""}\n' * 3, "None of the 3 rows", True),
        ('{"prompt": "a", "completion": ""}\n', "The row that was read has no token", True),
        ('{"prompt": "a", "completion": ""}\n' * 300, "None of the 200 rows", False),
        ('{"Frage": "a", "Wohin": "b"}\n' * 3, "the answer?", True),
        ('{"prompt": "a", "completion": "b"}\n', None, None),
    ],
)
def test_a_preview_says_whether_its_data_can_be_trained_on(tmp_path, rows, text, blocks):
    engine = SimpleNamespace(preview=preview, load_tokenizer=load_tokenizer)
    checker = Checker(SimpleNamespace(runs_dir=tmp_path, engine=engine))
    path = tmp_path / "rows.jsonl"
    path.write_text(rows, encoding="utf-8")
    finding = checker.preview(shown(model__source="assets/starter-model", data__source=str(path)))[
        "finding"
    ]
    if text is None:
        assert finding is None
    else:
        assert text in finding["text"] and finding["blocks"] is blocks


def test_answers_that_end_with_no_token_are_a_finding_that_blocks_nothing(tmp_path):
    def without_end(source: str):
        tokenizer = load_tokenizer(source)
        tokenizer.chat_template = NO_END
        return tokenizer

    engine = SimpleNamespace(preview=preview, load_tokenizer=without_end)
    checker = Checker(SimpleNamespace(runs_dir=tmp_path, engine=engine))
    path = make_data(tmp_path / "rows.jsonl")
    found = checker.preview(shown(model__source="assets/starter-model", data__source=str(path)))
    reported = (
        "The chat template ends an answer with no token, so the model cannot learn where to stop "
        "(40 answers); use a model whose chat template ends an answer with a token."
    )
    assert found["finding"] == {
        "text": reported,
        "blocks": False,
        "headline": "Answers will not end by themselves.",
    }
    assert found["endless"] == reported and found["ends"] == []


def test_data_that_a_run_would_refuse_at_once_start_none(tmp_path):
    checker = Checker(SimpleNamespace(runs_dir=tmp_path, engine=EngineCalls()))
    path = tmp_path / "rows.jsonl"
    given = shown(model__source="assets/starter-model", data__source=str(path))
    path.write_text("", encoding="utf-8")
    with pytest.raises(DataError, match="is empty"):
        checker.read_trainable(given)
    with pytest.raises(DataError, match="There is no file"):
        checker.read_trainable(given | {"data.source": str(tmp_path / "missing.jsonl")})
    path.write_text('{"prompt": "a", "completion": ""}\n' * 3, encoding="utf-8")
    found = checker.preview(given)["finding"]["text"]
    with pytest.raises(DataError) as refused:
        checker.read_trainable(given)
    assert as_labeled(str(refused.value)) == found
    make_data(path)
    assert checker.read_trainable(given).train.steps == 500
    with pytest.raises(DataError, match="This computer cannot reach Hugging Face"):
        checker.read_trainable(given | {"data.source": "someone/on-the-hub"})


def test_a_download_takes_disk_in_the_summary_and_on_the_card(checker, monkeypatch):
    given = shown(model__source="Qwen/Qwen2.5-1.5B-Instruct")
    machine = app.pages.new.checker.read_machine(".")
    needed = _estimate(read_config(given)).disk.total
    small = replace(machine, disk_free=needed + GIB // 2)
    monkeypatch.setattr(app.pages.new.checker, "read_machine", lambda folder: small)
    for downloads in (False, True):
        checker._session.engine.downloads_weights = lambda config, now=downloads: now
        panel, cards = checker.fit_panel(given), checker.models(None, given)["models"]
        card = next(card for card in cards if card["id"] == given["model.source"])
        assert (panel["can_start"], card["fits"]) == (not downloads, not downloads)
        assert ("more disk" in card["text"]) == downloads == (cards[0] is not card)
        # The disk that is free is told as it is, and the download counts among what is needed.
        disk = panel["bars"][-1]
        assert disk["text"].endswith(f" {in_bytes(small.disk_free)} free")
        assert ("download) · only " in disk["text"]) == downloads
        assert any(item["name"] == "Download" for item in disk["items"]) == downloads


def test_a_model_that_cannot_be_had_closes_start_and_says_why_beside_it(tmp_path, monkeypatch):
    """A model of the catalog, which nobody has downloaded, fits and cannot be begun offline."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    queue = SimpleNamespace(listed=lambda: ["one"])
    session = SimpleNamespace(
        runs_dir=tmp_path,
        runs=list,
        why_not_start=lambda: None,
        served_id=None,
        engine=EngineCalls(),
        queue=queue,
    )
    checker = Checker(session)
    given = shown(
        model__source="HuggingFaceTB/SmolLM2-135M",
        data__source=str(make_data(tmp_path / "d.jsonl")),
    )
    found = checker.fit_panel(given)
    assert (found["tone"], found["headline"]) == ("warn", LACKS.format(NO_MODEL))
    assert not found["can_start"] and not found["can_queue"]
    session.engine = EngineCalls(refuse_out_of_reach=lambda *_, **__: None)  # the hub answers
    online = checker.fit_panel(given)
    assert (online["tone"], online["headline"]) == ("warn", TO_DOWNLOAD.format("269 MB"))
    assert online["can_start"]
    session.engine = EngineCalls()
    assert "this computer cannot reach Hugging Face" in found["why_not"]
    assert found["reasons"][0] == found["why_not"]
    assert found["fixes"][found["why_not"]]["label"] == "Try again"
    session.why_not_start = lambda: "One run at a time."
    busy = checker.fit_panel(given)
    assert busy["queue_text"] == "Add to queue (2nd)" and busy["clock"]["begins"] is None
    queue.listed, session.free_at = list, lambda: 1e9
    assert checker.fit_panel(given)["clock"]["begins"] == 1e9
    assert not busy["can_queue"] and busy["why_not"] == found["why_not"]
    with pytest.raises(ModelError) as refused:
        checker.read_trainable(given)
    assert as_labeled(str(refused.value)) == found["why_not"]
    # The preview says the same of its tokenizer.
    preview = checker.preview(given)
    finding = preview["finding"]
    assert finding["blocks"] and finding["headline"] == NO_TOKENIZER
    assert preview["unread"] == AFTER_TOKENIZER and "error" not in preview
    # The rows are seen all the same, and their columns can be chosen.
    assert preview["texts"][0]["text"].startswith("messages: [{")
    assert preview["mapping"]["state"] and "rows" not in preview
    (tmp_path / "d.jsonl").write_text("{", encoding="utf-8")
    assert "cut off in line 1" in checker.preview(given)["error"]
    assert f"hf download {given['model.source']} --local-dir" in found["reasons"][1]
    cards = checker.models(None, given)
    assert cards["is_cut_off"]
    for card in cards["models"]:
        assert card["is_to_be_had"] != card["is_download"]
        assert (card["note"] == "not on this machine") == card["is_download"]
    assert finding["text"] == found["why_not"]  # the page shows one sentence once


def test_smaller_models_that_fit_have_the_names_of_their_cards(checker):
    given = shown(model__source="Qwen/Qwen3-32B")
    titles = dict(known_models())
    smaller = checker.fit_panel(given, timed=True)["smaller"]
    assert smaller and all(titles[each["id"]].startswith(each["title"]) for each in smaller)
    assert len(set(titles.values())) == len(titles), "no two of the list have one name"
    assert all("/" not in each["title"] and each["title"] not in each["id"] for each in smaller)


def test_the_model_of_the_example_is_told_where_it_is_to_learn_other_data(checker):
    preset = checker.presets.get("starter.yaml")
    own = shown_values(preset.config)
    assert not any("example" in text for text in checker.fit_panel(own)["reasons"])
    given = own | {"data.source": "my.jsonl"}
    found = checker.fit_panel(given)
    (text,) = (text for text in found["reasons"] if "example" in text)
    assert found["can_start"] and found["to_be_timed"] and found["fixes"][text] is None
    fix = checker.fit_panel(given, timed=True, preset=preset.file)["fixes"][text]
    card = [
        card
        for card in checker.models(preset.file, given)["models"]
        if card["fits"] and not card["is_example"]
    ][-1]
    assert fix == {"label": f"Use {card['title']}", "changes": {"model.source": card["id"]}}
    other = checker.fit_panel(given | fix["changes"])
    assert text not in other["reasons"]
    engine = checker._session.engine
    cards = [
        each for each in checker.models(preset.file, given)["models"] if not each["is_example"]
    ]
    engine.downloads_weights = lambda config: config.model.source != cards[2]["id"]

    def offered():
        fixes = checker.fit_panel(given, timed=True, preset=preset.file)["fixes"]
        return next((sentence, fix) for sentence, fix in fixes.items() if "example" in sentence)

    assert offered()[1]["changes"] == {"model.source": cards[2]["id"]}, "what is here comes first"

    def refuse(config, waits):
        if example_of(config.model.source) is None:
            raise ModelError("offline")

    engine.refuse_out_of_reach = refuse
    sentence, fix = offered()
    assert "cannot reach Hugging Face" in sentence and fix["label"] == "Try again"


@pytest.mark.parametrize("gpu", [True, False])
@pytest.mark.parametrize("method", ["full", "lora"])
def test_a_card_says_the_memory_that_the_summary_says_once_it_is_chosen(
    checker, monkeypatch, method, gpu
):
    if not gpu:
        machine = replace(named_machine("RTX 4090", 52), gpus=(), ram_available=int(22.7 * GIB))
        monkeypatch.setattr(app.pages.new.checker, "read_machine", lambda folder: machine)
    preset = checker.presets.get("starter.yaml")
    before = shown_values(preset.config) | {"train.method": method}
    cards = checker.models(preset.file, before)["models"]
    cards = [card for card in cards if card["fits"] and not card["is_example"]]
    assert len(cards) >= 3
    for card in cards:
        after = before | {"model.source": card["id"]}
        after |= checker.derived(preset.file, before, after)["changes"]
        host = next(bar for bar in checker.fit_panel(after)["bars"] if bar["name"] == "host")
        said, needed = (
            float(re.search(r"[\d.]+(?= GiB)", text)[0]) for text in (card["text"], host["text"])
        )
        assert said == pytest.approx(needed, rel=0.02), card["title"]


@pytest.mark.parametrize("lacking", ["folder", "start_from"])
def test_what_else_a_run_needs_closes_start_too(tmp_path, lacking):
    runs = tmp_path / "runs"
    session = SimpleNamespace(
        runs_dir=runs, runs=list, why_not_start=lambda: None, served_id=None, engine=EngineCalls()
    )
    given = shown(
        model__source="assets/starter-model", data__source=str(make_data(tmp_path / "d.jsonl"))
    )
    assert Checker(session).fit_panel(given)["can_start"]
    if lacking == "folder":
        runs.write_text("a file", encoding="utf-8")
        text = "not a folder; name another one"
    else:
        given |= {"model.start_from": str(tmp_path / "nothing")}
        text = "nothing"
    checker = Checker(session)
    found = checker.fit_panel(given)
    assert not found["can_start"] and text in found["why_not"]
    with pytest.raises(RamstreamError) as refused:
        checker.read_trainable(given)
    assert as_labeled(str(refused.value)) == found["why_not"]


@pytest.mark.slow("it plans hundreds of jobs, for five seconds or more")
def test_every_known_model_has_a_verdict_without_the_hub(checker):
    names = [name for name, _ in known_models()]
    assert len(names) == len(set(names)) > 50
    assert read_config(shown(model__source=names[-1])).model.source == names[-1]
    assert checker.fit_panel(shown(model__source=names[-1]))["size"]


# ------------------------------------------------------------------ the route


def post(checker, body, **headers):
    """Calls the route behind the guard as the page does; `body` is JSON, or bytes that are not
    JSON.
    """

    async def go():
        app = Guard(Starlette(routes=form_routes(checker)), GuardPolicy.for_bind("127.0.0.1", None))
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(app), base_url="http://127.0.0.1:7860"
        ) as client:
            return await client.post(
                "/api/check",
                content=content,
                headers={"content-type": "application/json"} | headers,
            )

    return asyncio.run(go())


def test_the_page_is_sent_the_verdict_and_what_it_showed_is_kept(checker, tmp_path):
    draft = shown(train__batch_size=16)
    answer = post(checker, {"preset": "starter.yaml", "shown": draft})
    assert answer.status_code == 200
    panel = checker.fit_panel(draft)
    assert answer.json() == panel | {"as_preset": False, "continues": ""}
    assert answer.json()["can_start"]
    assert answer.headers["cache-control"] == "no-store"
    assert Drafts(tmp_path).recall() == checker.drafts.recall() == ("starter.yaml", draft)
    assert post(checker, {"shown": draft}).json() == panel | {"as_preset": True, "continues": ""}
    assert checker.drafts.recall() == (None, draft)
    assert len(checker.calls) == 1, "what was worked out for one is there for the other"
    other = shown(train__batch_size=8)  # from a page that was opened but not edited
    assert post(checker, {"shown": other, "keep": False}).status_code == 200
    assert checker.drafts.recall() == (None, draft)


def test_what_was_typed_wrongly_is_a_verdict_not_an_error(checker):
    found = post(
        checker, {"shown": shown() | {"train.batch_size": "-3", "model.dtype": None}}
    ).json()
    assert (found["tone"], found["can_start"], bool(found["field"]), bool(found["why_not"])) == (
        "bad",
        False,
        True,
        True,
    )


@pytest.mark.parametrize(
    "body, text",
    [
        (b"{", "not a JSON object"),
        ([], "not a JSON object"),
        ({}, "shown: name is missing"),
        ({"shown": 3}, "not an object"),
        ({"shown": {**shown(), "train.stps": "3"}}, "'train.stps' is not a setting"),
        ({"shown": {**shown(), "train.steps": 3}}, "train.steps is not a text"),
        ({"shown": {**shown(), "data.shuffle": "yes"}}, "data.shuffle is not true or false"),
        (
            {"shown": {name: value for name, value in shown().items() if name != "data.source"}},
            "data.source is missing",
        ),
        ({"shown": shown(), "preset": ["starter.yaml"]}, "preset is missing; it is a text"),
    ],
)
def test_a_wrong_request_is_refused_in_a_sentence_and_nothing_is_kept(
    checker, tmp_path, body, text
):
    answer = post(checker, body)
    error = answer.json()["error"]
    assert answer.status_code == 409
    assert text in error
    assert "\n" not in error
    assert not checker.calls and not (tmp_path / DRAFT_FILE).exists()


class Panic(BaseException):
    """Stands for the panic of a library in Rust, which is no Exception."""


@pytest.mark.parametrize(
    "error, reported, is_fault",
    [
        (RuntimeError("boom"), "a fault of its own (RuntimeError: boom)", True),
        (Panic("index out of range"), "a fault of its own (Panic: index out of range)", True),
        (FileNotFoundError(2, "No such file", "/proc/7"), "(No such file: /proc/7)", False),
        (MemoryError(), "Memory ran out", False),
    ],
)
def test_any_error_of_a_preview_ends_in_a_sentence(checker, capsys, error, reported, is_fault):
    def failing(*_, **__):
        raise error

    checker._session.engine.load_tokenizer = lambda model: None
    checker._session.engine.preview = failing
    found = checker.preview(shown())
    assert reported in found["error"]
    assert "\n" not in found["error"]
    assert "rows" not in found
    assert found["finding"] == {"text": found["error"], "blocks": True}
    assert found["given"]["data.source"] == "assets/starter.jsonl"
    assert ("Traceback" in capsys.readouterr().err) is is_fault


def test_a_verdict_that_cannot_be_computed_says_so(checker, capsys):
    def failing(*_):
        raise ZeroDivisionError("division by zero")

    checker._session.engine.estimate = failing
    assert "ZeroDivisionError: division by zero" in json.dumps(checker.fit_panel(shown()))
    assert "Traceback" in capsys.readouterr().err


def test_who_ends_the_program_is_not_held_up(checker):
    def ending(*_, **__):
        raise KeyboardInterrupt

    checker._session.engine.load_tokenizer = lambda model: None
    checker._session.engine.preview = ending
    with pytest.raises(KeyboardInterrupt):
        checker.preview(shown())


def test_the_verdict_names_where_curves_go_before_start(checker, monkeypatch):
    plain = checker.fit_panel(shown())
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name == "wandb" or None)
    monkeypatch.setenv("WANDB_MODE", "online")
    found = checker.fit_panel(shown(output__trackers=["wandb", "trackio"]))
    reported = found["reasons"][len(plain["reasons"]) :]
    assert reported[0].startswith("Curves also go to Weights & Biases: api.wandb.ai")
    assert reported[0].endswith("These data leave this machine.")
    assert reported[1].startswith("Trackio is not installed") and "pip install" in reported[1]
    assert found["can_start"] is plain["can_start"] is True
    wrong = shown() | {"output.trackers": "wandbb"}
    assert checker.fit_panel(wrong)["field"] == "field-output-trackers"


def test_what_is_wrong_with_other_settings_says_nothing_about_the_data(checker):
    checker._session.engine.preview = preview
    checker._session.engine.load_tokenizer = load_tokenizer
    wrong = {**shown(), "model.source": "assets/starter-model", "train.batch_size": "-3"}
    found = checker.preview(wrong)
    assert "error" not in found
    assert found["finding"] is None
    assert found["rows"]
    assert "-3 is too small" in checker.fit_panel(wrong)["reasons"][0]


@pytest.mark.parametrize("name", ["tiny.gguf", "tiny", "sharded"])
def test_a_model_without_weights_that_load_is_refused_before_anything_is_estimated(
    checker, tmp_path, name
):
    """The verdict has one sentence, and Start ends in the same one."""
    model = tmp_path / name
    if model.suffix:
        model.write_bytes(b"GGUF")
        reported = "is a file in GGUF, the format of llama.cpp, which cannot be trained"
    else:
        model.mkdir()
        (model / "config.json").write_text('{"model_type": "qwen2"}')
        reported = "has no weights (model.safetensors)"
    if name == "sharded":
        index = {"weight_map": {"a": "model-00001-of-00002.safetensors"}}
        (model / "model.safetensors.index.json").write_text(json.dumps(index))
        reported = "lacks model-00001-of-00002.safetensors of the 1 file that"
    values = shown(model__source=str(model))
    found = checker.fit_panel(values)
    assert not found["can_start"] and checker.calls == []
    assert len(found["reasons"]) == 1 and reported in found["reasons"][0]
    with pytest.raises(ModelError, match=re.escape(reported)):
        checker.read_trainable(values)
    # Random weights need none.
    with_config = model.is_dir()
    values = shown(model__source=str(model), model__init="random")
    assert (reported in " ".join(checker.fit_panel(values)["reasons"])) is not with_config


def test_a_start_that_ends_serving_says_so_before(checker):
    checker._session.name_of_run = {"20261130-090000-tiny": "Tiny"}.get
    assert "served" not in str(checker.fit_panel(shown()))
    checker._session.served_id = "20261130-090000-tiny"
    panel = checker.fit_panel(shown())
    assert panel["can_start"]
    assert "Tiny is served to other programs; serving ends when this training" in str(panel)
