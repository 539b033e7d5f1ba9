"""OpenAI's own client and plain sockets against the app, which serves a tiny run."""

from __future__ import annotations

import json
import math
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from engine.model.build.library import no_progress_bars
from engine.runs.record.run_folder import RunFolder
from engine.tools.chat.chat_engines import load
from engine.tools.chat.conversation import Sampling, base_of
from engine.training.loop.run import start_run
from tests.support.browser import Server, answer
from tests.support.folders import WORDS, make_config, make_model, make_tokenizer
from tests.support.ports import free_port
from tests.support.routes import wait_for
from tests.support.trained_runs import execute

pytestmark = pytest.mark.slow("it starts the app and a client of OpenAI, for ten seconds")

ASKED = [{"role": "user", "content": "say after three"}]
LONG = {"max_tokens": 100_000, "temperature": 0}


class ServingApp(Server):
    """The app, as `launch.py serve Tiny` starts it."""

    @property
    def command(self):
        python, launch, *options = super().command
        return [
            python,
            launch,
            "serve",
            "Tiny",
            *(each for each in options if "browser" not in each),
        ]


def make_talkative_model(folder):
    """A tiny model whose answers are words of different kinds, and hardly ever end."""
    make_model(folder, max_position_embeddings=1 << 17, tie_word_embeddings=False)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    words = make_tokenizer().convert_tokens_to_ids(WORDS)
    with torch.no_grad():
        weight = model.lm_head.weight
        of_words = weight[words]
        weight.zero_()
        weight[words] = 60 * of_words
    with no_progress_bars():
        model.save_pretrained(folder)


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """The app, which serves a run whose model takes long rows."""
    openai = pytest.importorskip("openai")
    folder = tmp_path_factory.mktemp("served")
    make_talkative_model(folder / "model")
    config = make_config(folder, **{"output.eval_every": 0, "output.checkpoint_every": 8})
    run = start_run(config, folder / "runs")
    assert execute(run).state == "finished"
    server = ServingApp(folder, free_port())
    server.start()
    try:
        wait_for(lambda: "Model     Tiny (base model: Tiny-base)" in server.log(), 60)
        # The log is a file, which others may read: it names where the key is.
        key = (server.runs / ".api.key").read_text()
        assert f"in {server.runs / '.api.key'}" in server.log() and key not in server.log()
        client = openai.OpenAI(api_key=key, base_url=f"{server.address}/v1", max_retries=0)
        yield SimpleNamespace(server=server, client=client, key=key, run=run, openai=openai)
    finally:
        if server.process.poll() is None:
            server.end()
    assert "Traceback" not in server.log()


@pytest.fixture
def chat(served):
    def chat(model="Tiny", messages=ASKED, **fields):
        return served.client.chat.completions.create(model=model, messages=messages, **fields)

    return chat


@pytest.fixture
def post(served):
    """Sends raw bytes with the key."""

    def post(content, path="/chat/completions", **headers):
        known = {"authorization": f"Bearer {served.key}", "content-type": "application/json"}
        address = f"{served.server.address}/v1{path}"
        return httpx.post(address, content=content, headers=known | headers, timeout=30)

    return post


def under_way(served):
    return answer(served.server, "/api/serve")["asked"]


def test_both_models_are_listed_and_answer_as_chat_does(served, chat):
    assert [model.id for model in served.client.models.list()] == ["Tiny", "Tiny-base"]
    assert served.client.models.retrieve("Tiny-base").object == "model"
    config = RunFolder(served.server.runs / served.run.id).config
    engine = load(base_of(config))
    expected = engine.prompt_builder.text(list(engine.answer(ASKED, Sampling(6))))
    engine.close()
    for name in ("Tiny-base", f"{served.run.id}-base"):
        whole = chat(name, temperature=0, max_tokens=6)
        assert whole.choices[0].message.content == expected
        assert whole.choices[0].finish_reason == "length"
        assert whole.usage.completion_tokens == 6 and whole.usage.prompt_tokens == 6
    trained, base = (
        chat(name, temperature=0, max_tokens=1, logprobs=True).choices[0].logprobs.content[0]
        for name in (served.run.id, "Tiny-base")
    )
    assert trained.logprob != base.logprob


def test_a_stream_is_the_whole_answer_in_pieces(chat):
    fields = {"temperature": 1, "seed": 5, "max_tokens": 12, "n": 2}
    whole = [choice.message.content for choice in chat("Tiny-base", **fields).choices]
    again = chat("Tiny-base", stream=True, stream_options={"include_usage": True}, **fields)
    *chunks, last = list(again)
    pieces = [[], []]
    for chunk in chunks:
        for choice in chunk.choices:
            pieces[choice.index].append(choice.delta.content or "")
    assert ["".join(each) for each in pieces] == whole and whole[0] != whole[1]
    assert max(map(len, pieces)) > 5
    assert last.choices == [] and last.usage.completion_tokens == 24
    assert chat("Tiny-base", **(fields | {"seed": 6})).choices[0].message.content != whole[0]


def test_an_answer_ends_before_a_stop_text(served, chat):
    fields = {"temperature": 1, "seed": 5, "max_tokens": 40}
    free = chat("Tiny-base", **fields).choices[0].message.content.split()
    stop = free[3]
    (stopped,) = chat("Tiny-base", stop=["never said", stop], **fields).choices
    assert stopped.finish_reason == "stop"
    assert stopped.message.content.split() == free[: free.index(stop)]
    wait_for(lambda: under_way(served) == 0)


def test_log_probabilities_are_those_of_a_forward_pass(served):
    prompt = "say after three"
    completion = served.client.completions.create(
        model="Tiny-base", prompt=prompt, temperature=0, max_tokens=5, logprobs=3
    ).choices[0]
    folder = served.server.folder / "model"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    asked = tokenizer(prompt)["input_ids"]
    ids = asked + tokenizer.convert_tokens_to_ids(completion.logprobs.tokens)
    with torch.no_grad():
        truth = model(torch.tensor([ids])).logits[0].log_softmax(-1)
    for place, (token, logprob) in enumerate(
        zip(completion.logprobs.tokens, completion.logprobs.token_logprobs, strict=True)
    ):
        before = truth[len(asked) + place - 1]
        assert math.isclose(logprob, before[ids[len(asked) + place]], abs_tol=1e-4)
        top = completion.logprobs.top_logprobs[place]
        assert token in top and sorted(top.values(), reverse=True) == list(top.values())
        assert list(top.values()) == pytest.approx(before.topk(3).values.tolist(), abs=1e-4)


def test_sixteen_clients_get_the_answers_that_each_gets_alone(chat):
    def content(seed):
        asked = chat("Tiny-base", temperature=1, seed=seed, max_tokens=20)
        return asked.choices[0].message.content

    alone = [content(seed) for seed in range(16)]
    with ThreadPoolExecutor(16) as clients:
        assert list(clients.map(content, range(16))) == alone


def test_a_client_that_leaves_ends_its_answer(served, chat):
    stream = chat("Tiny-base", stream=True, **LONG)
    for _ in range(4):
        next(iter(stream))
    assert under_way(served) == 1
    stream.close()
    wait_for(lambda: under_way(served) == 0)
    with pytest.raises(served.openai.APITimeoutError):
        chat("Tiny-base", timeout=0.3, **LONG)
    wait_for(lambda: under_way(served) == 0)


def test_nothing_but_the_key_opens_these_paths(served):
    address = f"{served.server.address}/v1/models"
    for headers in (
        {},  # the owner's own program
        {"authorization": "Bearer"},
        {"authorization": served.key},
        {"authorization": f"Bearer {served.key}x"},
        {"authorization": f"Basic {served.key}"},
        {"authorization": "Bearer \xe4".encode("latin-1")},
    ):
        refused = httpx.get(address, headers=headers)
        assert refused.status_code == 401, headers
        assert refused.json()["error"]["code"] == "invalid_api_key"
    key = {"authorization": f"bearer {served.key}"}
    assert httpx.get(address, headers=key).status_code == 200
    rebound = httpx.get(address, headers=key | {"host": "evil.example"})
    assert rebound.status_code == 400 and "message" in rebound.json()["error"]
    assert httpx.get(address, headers=key | {"origin": "http://evil.example"}).status_code == 403
    assert (served.server.runs / ".api.key").stat().st_mode & 0o077 == 0


def test_hostile_bodies_get_a_sentence(served, post):
    def body(**fields):
        return json.dumps({"model": "Tiny", "messages": ASKED, "max_tokens": 2} | fields).encode()

    deep = b'{"model": "Tiny", "messages": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    for content, status in (
        (b"", 400),
        (b"[]", 400),
        (b"\xff\xfe", 400),
        (deep, 400),
        (body()[:-1] + b', "temperature": NaN}', 400),
        (body(temperature=math.inf), 400),
        (body(messages=[{"role": "user", "content": "\ud800"}]), 400),
        (body(n=10**9), 400),
        (body(max_tokens=-1), 400),
        (body(stop=[["x"]]), 400),
        (body(model={"a": 1}), 400),
        (body(model="x" * 100_000), 404),
        (body(messages=[{"role": "user", "content": "one " * 200_000}]), 400),
        (body(messages=[{"role": "user", "content": "x" * 10_000_000}]), 413),
    ):
        refused = post(content)
        assert refused.status_code == status, (content[:80], refused.text[:200])
        assert 0 < len(refused.json()["error"]["message"]) < 500
    for prompt in ("", [10**9], [-1], [[1], [10**6]]):
        content = json.dumps({"model": "Tiny", "prompt": prompt}).encode()
        assert post(content, "/completions").status_code == 400
    assert post(body(), **{"content-type": "text/plain"}).status_code == 415
    assert post(body(), "/embeddings").status_code == 404
    assert post(body(tools=[{"type": "function"}])).json()["error"]["param"] == "tools"
    for cold in ({"temperature": 1e-300}, {"temperature": 1e-9, "top_p": 1e-300, "top_k": 10**5}):
        assert post(body(**cold)).status_code == 200


def test_chat_answers_from_the_weights_that_are_served(served):
    def chat():
        return answer(served.server, "/api/chat")

    choice = {"run_id": served.run.id, "weights": "newest"}
    asked = {"choice": choice, "message": "say after three", "compare": True, "system": ""}
    answer(served.server, "/api/chat/send", asked | {"max_new_tokens": 4})
    wait_for(lambda: not chat()["working"])
    state = chat()
    assert state["error"] == "" and state["held"] == "" and state["lent"]
    sides = state["turns"][-1]["answers"]
    assert {each["state"] for each in sides.values()} == {"done"}


def test_stopping_tells_who_waits_and_frees_the_weights(served, chat):
    told = waiting(served, chat)
    answer(served.server, "/api/serve/stop", {})
    assert "no longer served" in told()
    assert served.client.models.list().data == []
    with pytest.raises(served.openai.NotFoundError, match="No model is served here"):
        chat()


def test_an_app_that_ends_tells_who_waits_and_waits_for_nobody(served, chat):
    job = answer(served.server, "/api/serve/start", {"run_id": served.run.id})
    wait_for(lambda: answer(served.server, f"/api/jobs/{job['id']}")["state"] != "working")
    told = waiting(served, chat)
    assert served.server.end(signal.SIGINT) == 0
    assert "no longer served" in told()


def waiting(served, chat):
    """Begins an answer that would take minutes; returns a function that says why it ended."""
    failed = []

    def ask():
        try:
            chat("Tiny-base", **LONG)
        except served.openai.InternalServerError as error:
            failed.append(str(error))

    asking = threading.Thread(target=ask)
    asking.start()
    wait_for(lambda: under_way(served) == 1)

    def told():
        asking.join(30)
        return failed[0]

    return told
