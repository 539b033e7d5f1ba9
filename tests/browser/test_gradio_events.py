"""Events of Gradio's: over a connection that breaks, and a stream that the server ends, they are
carried to their answers; a stream that Gradio itself ends is let go.
"""

from __future__ import annotations

import pytest

from tests.support.sets import BROWSER_FLOWS

pytestmark = pytest.mark.slow(BROWSER_FLOWS)


@pytest.fixture
def plain(context, server):
    """A page of the server's with nothing of ours in it."""
    page = context.new_page()
    page.goto(f"{server.address}/ramstream/pages/frame/gradio.js")
    return page


# The server goes while it answers, and the next one knows nothing of it.
BROKEN = """async () => {
  const {carryGradio} = await import('/ramstream/pages/frame/gradio.js');
  const {Connection} = await import('/ramstream/pages/frame/connection.js');
  const isBack = () => connection.answered('two', null);
  const connection = new Connection((isLost) => { if (isLost) setTimeout(isBack, 20); });
  const sent = [], encoder = new TextEncoder();
  const bytes = (message) => encoder.encode(`data: ${JSON.stringify(message)}\\n\\n`);
  const stream = (messages, breaks) => () => new Response(new ReadableStream({pull(pipe) {
    if (messages.length) pipe.enqueue(bytes(messages.shift()));
    else if (breaks) pipe.error(new TypeError('network error'));
    else pipe.close();
  }}));
  const away = () => { throw new TypeError('Failed to fetch'); };
  const named = (id) => () => new Response(JSON.stringify({event_id: id}));
  const answers = [
    named('a'), stream([{msg: 'process_starts', event_id: 'a'}], true), away,
    named('b'), away, stream([{msg: 'unexpected_error'}]),
    named('c'), stream([{msg: 'process_completed', event_id: 'c'}, {msg: 'close_stream'}]), away,
  ];
  window.fetch = async (address, init) => {
    const path = address.slice('/gradio_api/'.length);
    sent.push(`${init.method ?? 'GET'} ${path} ${init.body ?? ''}`.trim());
    return answers.shift()();
  };
  carryGradio(connection);
  const join = {method: 'POST', body: 'preview'};
  const joined = await (await fetch('/gradio_api/queue/join', join)).json();
  const seen = await (await fetch('/gradio_api/queue/data', {})).text();
  const refused = await fetch('/gradio_api/run/predict', {method: 'POST', body: 'start'});
  const lines = seen.split('\\n\\n').filter(Boolean);
  return {joined, sent, refused: [refused.status, (await refused.json()).error],
    seen: lines.map((line) => JSON.parse(line.slice('data:'.length)))};
}"""


def test_an_event_outlives_the_connection_that_it_came_over(plain):
    found = plain.evaluate(BROKEN)
    assert found["joined"] == {"event_id": "a"}
    assert found["seen"] == [
        {"msg": "process_starts", "event_id": "a"},
        {"msg": "process_completed", "event_id": "a"},
        {"msg": "close_stream"},
    ]
    join, data = "POST queue/join preview", "GET queue/data"
    assert found["sent"] == [
        join,
        data,
        join,
        join,
        data,
        data,
        join,
        data,
        "POST run/predict start",
    ]
    assert found["refused"][0] == 503 and "nothing was started" in found["refused"][1]


# The server has answered all events that it knows of and ends the stream, while the next event has
# just been taken, is on its way, or is answered before the page hears that it was taken.
ENDED = """async (next) => {
  const {carryGradio} = await import('/ramstream/pages/frame/gradio.js');
  const {Connection} = await import('/ramstream/pages/frame/connection.js');
  const encoder = new TextEncoder();
  const soon = () => new Promise((resolve) => setTimeout(resolve, 10));
  const streams = ['a', 'b'].map((id) => [
    {msg: 'process_completed', event_id: id}, {msg: 'close_stream'}]);
  let joins = 0, opened = 0, isKnown, isTold;
  const known = new Promise((resolve) => { isKnown = resolve; });
  const told = new Promise((resolve) => { isTold = resolve; });
  const taken = async () => {
    joins += 1;
    if (joins === 1) return 'a';
    if (next !== 'taken') await soon().then(soon).then(soon);
    isKnown();
    if (next === 'answered') await soon().then(soon).then(soon);
    isTold();
    return 'b';
  };
  const messages = (given, number) => new ReadableStream({async pull(pipe) {
    if (number === 2) await (given.length === 2 ? known : told);
    await soon();
    if (!given.length) pipe.close();
    else pipe.enqueue(encoder.encode(`data: ${JSON.stringify(given.shift())}\\n\\n`));
  }}, {highWaterMark: 0});
  window.fetch = async (address) => {
    if (address.endsWith('/queue/join'))
      return new Response(JSON.stringify({event_id: await taken()}));
    opened += 1;
    return new Response(messages(streams.shift() ?? [{msg: 'opened once too often'}], opened));
  };
  carryGradio(new Connection(() => {}));
  const join = () => fetch('/gradio_api/queue/join', {method: 'POST', body: 'preview'});
  await join();
  const reader = (await fetch('/gradio_api/queue/data', {})).body.getReader();
  const decoder = new TextDecoder();
  let seen = decoder.decode((await reader.read()).value);
  const second = join();
  if (next === 'taken') await second;
  for (;;) {
    const {done, value} = await reader.read();
    if (done) break;
    seen += decoder.decode(value);
  }
  return seen.split('\\n\\n').filter(Boolean)
    .map((line) => JSON.parse(line.slice('data:'.length)));
}"""


@pytest.mark.parametrize("next_event", ["taken", "on its way", "answered"])
def test_an_event_that_comes_as_its_stream_ends_is_answered(plain, next_event):
    assert plain.evaluate(ENDED, next_event) == [
        {"msg": "process_completed", "event_id": "a"},
        {"msg": "process_completed", "event_id": "b"},
        {"msg": "close_stream"},
    ]


# Told that the stream ends, Gradio gives it up, by the signal of its Request, though it has not
# ended yet.
GIVEN_UP = """async () => {
  const {carryGradio} = await import('/ramstream/pages/frame/gradio.js');
  const {Connection} = await import('/ramstream/pages/frame/connection.js');
  const changes = [], sent = [], given = new AbortController();
  window.fetch = async (request) => {
    sent.push(new URL(request.url).pathname);
    request.signal.throwIfAborted();
    return new Response(new ReadableStream({start(pipe) {
      pipe.enqueue(new TextEncoder().encode('data: {"msg": "close_stream"}\\n\\n'));
      request.signal.addEventListener('abort', () => pipe.error(request.signal.reason));
    }}));
  };
  carryGradio(new Connection((isLost) => changes.push(isLost)));
  const request = new Request('/gradio_api/queue/data', {signal: given.signal});
  const reader = (await fetch(request)).body.getReader();
  const first = new TextDecoder().decode((await reader.read()).value);
  given.abort();
  const end = await reader.read().then(() => 'an answer', (error) => error.name);
  return {first, end, sent, changes};
}"""


def test_a_stream_that_gradio_gives_up_is_not_asked_for_again(plain):
    found = plain.evaluate(GIVEN_UP)
    assert "close_stream" in found["first"] and found["end"] == "AbortError"
    assert found["sent"] == ["/gradio_api/queue/data"] and found["changes"] == []
