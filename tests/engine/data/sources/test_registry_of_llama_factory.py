"""Each of the 103 entries that LLaMA-Factory's own registry has, and three that it had, is rebuilt
with a small data set. Its rows are trained on as expected, or refused for what they are.
"""

from __future__ import annotations

import json

import pytest

from engine.config.data_settings import DataConfig
from engine.data.batches.loader import prepare_data
from engine.data.batches.preview import preview
from engine.data.sources.registry import registered
from engine.errors import DataError
from tests.support import references as reference

TURNED = {"formatting": "sharegpt"}
CALLS = {**TURNED, "columns": {"messages": "conversations", "tools": "tools"}}
TAGS = {
    "role_tag": "role",
    "content_tag": "content",
    "user_tag": "user",
    "assistant_tag": "assistant",
}
RANKED = {"ranking": True}
RANKED_TURNS = {
    **RANKED,
    **TURNED,
    "columns": {"messages": "conversations", "chosen": "chosen", "rejected": "rejected"},
}


def pairs(prompt: str, response: str, **more: str) -> dict:
    return {"columns": {"prompt": prompt, "response": response, **more}}


def texts(column: str) -> dict:
    return {"columns": {"prompt": column}}


def roles(messages: str = "messages", **more: str) -> dict:
    return {**TURNED, "columns": {"messages": messages, **more}, "tags": TAGS}


IMAGES, VIDEOS, AUDIOS = ({name: name} for name in ("images", "videos", "audios"))
WITH_SYSTEM = {**roles(), "tags": TAGS | {"system_tag": "system"}}
FILES: dict[str, dict] = {
    "identity": {},
    "alpaca_en_demo": {},
    "alpaca_zh_demo": {},
    "glaive_toolcall_en_demo": CALLS,
    "glaive_toolcall_zh_demo": CALLS,
    "mllm_demo": roles(**IMAGES),
    "mllm_audio_demo": roles(**AUDIOS),
    "mllm_video_demo": roles(**VIDEOS),
    "mllm_video_audio_demo": roles(**VIDEOS, **AUDIOS),
    "dpo_en_demo": RANKED_TURNS,
    "dpo_zh_demo": RANKED_TURNS,
    "kto_en_demo": roles(kto_tag="label"),
    "wiki_demo": {"file_name": "wiki_demo.txt", **texts("text")},
    "c4_demo": {"file_name": "c4_demo.jsonl", **texts("text")},
}
PLAIN = """
alpaca_en alpaca_zh alpaca_gpt4_en alpaca_gpt4_zh guanaco belle_2m belle_1m belle_0.5m
belle_dialog belle_math open_platypus codealpaca alpaca_cot webnovel nectar_sft stem_zh
ruozhiba_gpt4 chinese_r1_distill oasst_de dolly_15k_de alpaca-gpt4_de openschnabeltier_de
evol_instruct_de dolphin_de booksum_de airoboros_de ultrachat_de
"""
PLAIN_TURNS = """
lima slimorca sharegpt_hyper sharegpt4 infinity_instruct agent_instruct evol_instruct neo_sft
magpie_pro_300k
"""
PLAIN_TEXTS = """
wikipedia_en pile skypile fineweb fineweb_edu cci3_hq cci3_data cci4_base cci4_cot cci4_extra
"""
HUB: dict[str, dict] = {
    **{name: {} for name in PLAIN.split()},
    **dict.fromkeys(PLAIN_TURNS.split(), TURNED),
    **{name: texts("text") for name in PLAIN_TEXTS.split()},
    "glaive_toolcall_en": CALLS,
    "glaive_toolcall_zh": CALLS,
    "glaive_toolcall_100k": CALLS,
    "openorca": pairs("question", "response", system="system_prompt"),
    "mathinstruct": pairs("instruction", "output"),
    "firefly": pairs("input", "target"),
    "wikiqa": {"hf_hub_url": "wiki_qa", **pairs("question", "answer")},
    "webqa": pairs("input", "output"),
    "adgen_train": {"split": "train", **pairs("content", "summary")},
    "adgen_eval": {"split": "validation", **pairs("content", "summary")},
    "ultrachat_200k": {"split": "train_sft", **roles()},
    "lmsys_chat": roles("conversation"),
    "cosmopedia": pairs("prompt", "text"),
    "magpie_ultra": pairs("instruction", "response"),
    "web_instruct": pairs("question", "answer"),
    "openo1_sft": pairs("prompt", "response"),
    "open_thoughts": WITH_SYSTEM,
    "open_r1_math": WITH_SYSTEM,
    "llava_1k_en": {"subset": "en", **roles(**IMAGES)},
    "llava_1k_zh": {"subset": "zh", **roles(**IMAGES)},
    "llava_150k_en": {"subset": "en", **roles(**IMAGES)},
    "llava_150k_zh": {"subset": "zh", **roles(**IMAGES)},
    "pokemon_cap": {**TURNED, "columns": {"messages": "conversations", **IMAGES}},
    "mllm_pt_demo": roles(**IMAGES),
    "dlr_web": {"split": "full", **pairs("question", "response")},
    "dpo_mix_en": {"subset": "en", **RANKED_TURNS},
    "dpo_mix_zh": {"subset": "zh", **RANKED_TURNS},
    "ultrafeedback": {
        **RANKED,
        "columns": {"prompt": "instruction", "chosen": "chosen", "rejected": "rejected"},
    },
    "coig_p": RANKED_TURNS,
    "rlhf_v": {**RANKED_TURNS, "columns": {**RANKED_TURNS["columns"], **IMAGES}},
    "vlfeedback": {**RANKED_TURNS, "columns": {**RANKED_TURNS["columns"], **IMAGES}},
    "rlaif_v": {
        **RANKED,
        "columns": {
            "prompt": "question",
            "chosen": "chosen",
            "rejected": "rejected",
            "images": "image",
        },
    },
    "orca_pairs": {
        **RANKED,
        "columns": {
            "prompt": "question",
            "chosen": "chosen",
            "rejected": "rejected",
            "system": "system",
        },
    },
    "nectar_rm": RANKED,
    "orca_dpo_de": RANKED,
    "kto_mix_en": roles("completion", kto_tag="label"),
    "ultrafeedback_kto": pairs("prompt", "completion", kto_tag="label"),
    "refinedweb": texts("content"),
    "redpajama_v2": {"subset": "default", **texts("raw_content")},
    "wikipedia_zh": texts("completion"),
    "the_stack": texts("content"),
    "starcoder_python": {"folder": "python", **texts("content")},
}
ELSEWHERE: dict[str, dict] = {
    "deepctrl": {"ms_hub_url": "deepctrl/deepctrl-sft-data"},
    "belle_multiturn": {"script_url": "belle_multiturn", **TURNED},
    "ultra_chat": {"script_url": "ultra_chat", **TURNED},
    "hh_rlhf_en": {"script_url": "hh_rlhf_en", **RANKED},
}
"""The scripts stand in earlier versions."""
ENTRIES = (
    {name: {"file_name": f"{name}.json"} | entry for name, entry in FILES.items()}
    | {
        name: {"hf_hub_url": f"owner/{name}", "ms_hub_url": f"other/{name}"} | entry
        for name, entry in HUB.items()
    }
    | ELSEWHERE
)
REFUSED = {
    "images": "it holds images, but only text is trained on",
    "videos": "it holds videos, but only text is trained on",
    "audios": "it holds sounds, but only text is trained on",
    "kto_tag": r"it marks answers as good or bad \(KTO\)",
}
TOOLS = [
    {
        "type": "function",
        "function": {"name": "add", "parameters": {"type": "object", "properties": {}}},
    }
]
SYSTEM, ASKED, ANSWER = (
    {"role": "system", "content": "be"},
    {"role": "user", "content": "hello"},
    {"role": "assistant", "content": "an he"},
)
NOTE = "Only the chosen answers (column chosen) are trained; the rejected ones are not used."


def refusal(entry: dict) -> str | None:
    return next((column for column in REFUSED if column in entry.get("columns", {})), None)


READ = [name for name in ENTRIES if name not in ELSEWHERE and refusal(ENTRIES[name]) is None]


def turn(entry: dict, speaker: str, said: str) -> dict:
    if "tags" not in entry:
        return {"from": {"user": "human", "assistant": "gpt"}[speaker], "value": said}
    tags = entry["tags"]
    return {tags["role_tag"]: speaker, tags["content_tag"]: said}


def row_of(entry: dict) -> dict:
    """A row as the entry says that its file has them, and a column that it does not name."""
    columns = entry.get("columns", {})
    asked, answer = turn(entry, "user", "hello"), turn(entry, "assistant", "an he")
    if "ranking" in entry and "formatting" in entry:
        return {"conversations": [asked], "chosen": answer, "rejected": asked | {"from": "gpt"}}
    if "formatting" in entry:
        row = {columns.get("messages", "conversations"): [asked, answer]}
        return row | ({"tools": json.dumps(TOOLS)} if "tools" in columns else {})
    row = {"a_score": 5, columns.get("prompt", "instruction"): "hello"}
    if "ranking" in entry:
        row |= {"chosen": "an he", "rejected": "no"}
    elif list(columns) != ["prompt"]:
        row[columns.get("response", "output")] = "an he"
    if "system" in columns:
        row[columns["system"]] = "be"
    return row


def expected(entry: dict, tokenizer) -> list[int]:
    columns = entry.get("columns", {})
    if list(columns) == ["prompt"] and "ranking" not in entry:
        return [*tokenizer("hello")["input_ids"], tokenizer.eos_token_id]
    system = [SYSTEM] if "system" in columns else []
    tools = TOOLS if "tools" in columns else None
    return tokenizer.apply_chat_template([*system, ASKED, ANSWER], tools=tools)["input_ids"]


@pytest.fixture(scope="module")
def tokenizer():
    return reference.tokenizer("qwen")


@pytest.fixture
def registry(tmp_path):
    for entry in ENTRIES.values():
        path = tmp_path / entry.get("file_name", "")
        if path.suffix == ".txt":
            path.write_text("hello")
        elif path.suffix:
            text = json.dumps(row_of(entry))
            path.write_text(text if path.suffix == ".jsonl" else f"[{text}]")
    path = tmp_path / "dataset_info.json"
    path.write_text(json.dumps(ENTRIES))
    return path


def test_every_entry_is_here():
    assert len(ENTRIES) == 103 + 3


@pytest.mark.parametrize("name", READ)
def test_an_entry_of_texts_or_choices_is_trained_as_it_says(registry, tokenizer, name, monkeypatch):
    import datasets

    entry = ENTRIES[name]
    asked = []

    def load(source, subset=None, **named):
        asked.append((source, subset, named["split"], named.get("data_dir")))
        return datasets.Dataset.from_list([row_of(entry)])

    monkeypatch.setattr(datasets, "load_dataset", load)
    config = DataConfig(source=f"{registry}:{name}", packing=False, eval_fraction=0.0)
    data = prepare_data(config, tokenizer, 1)
    assert data.train.ids.tolist() == expected(entry, tokenizer)
    is_ranked = "ranking" in entry
    assert (data.summary["format"] == "preference") == is_ranked
    assert (NOTE in data.summary["warnings"]) == is_ranked
    unused = ["a_score"] if "formatting" not in entry else []
    if not entry.get("file_name", "").endswith(".txt"):
        assert data.summary["unused_columns"] == unused
    shown = preview(config, tokenizer)
    assert shown["rows_measured"] == 1 and not shown["mapping"]["refused"]
    assert shown["mapping"]["state"] == "found"
    if "hf_hub_url" in entry:
        place = (entry["hf_hub_url"], entry.get("subset"), entry.get("split", "train"))
        assert set(asked) == {(*place, entry.get("folder"))}


@pytest.mark.parametrize("name", [name for name in ENTRIES if refusal(ENTRIES[name])])
def test_an_entry_of_images_sounds_or_marks_is_refused_for_that(registry, name):
    column = refusal(ENTRIES[name])
    said = rf"^The entry {name} of dataset_info\.json has columns\.{column}: {REFUSED[column]}.*\.$"
    with pytest.raises(DataError, match=said):
        registered(DataConfig(source=f"{registry}:{name}"))


@pytest.mark.parametrize("name", ELSEWHERE)
def test_an_entry_of_a_script_or_another_hub_says_where_its_rows_are(registry, name):
    said = (
        r"has its rows at ModelScope \(ms_hub_url\), |makes its rows with a script \(script_url\)"
    )
    with pytest.raises(DataError, match=said):
        registered(DataConfig(source=f"{registry}:{name}"))


FAULTS = {
    "a mark": ({"label": False}, r"^The column label of q\.json marks answers as good or bad"),
    "a weight": ({"weight": 0.5}, r"^The column weight in item 1 of q\.json is 0\.5, but rows"),
    "no text": ({"q": 5}, r"^The column q in item 1 of q\.json is a number, not text"),
    "an image": ({"image": "a.png"}, r"^The column image in item 1 of q\.json holds an image"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_columns_have_the_files_own_names_in_errors(tmp_path, tokenizer, name):
    more, said = FAULTS[name]
    (tmp_path / "q.json").write_text(json.dumps([{"q": "hello", "a": "an he"} | more]))
    path = tmp_path / "dataset_info.json"
    path.write_text(json.dumps({"x": {"file_name": "q.json", **pairs("q", "a")}}))
    with pytest.raises(DataError, match=said):
        prepare_data(DataConfig(source=f"{path}:x", eval_fraction=0.0), tokenizer, 1)
