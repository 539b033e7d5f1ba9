// Carries Gradio's requests over a connection that may be lost. Without this, Gradio's page is dead
// from the first event that the server does not answer until it is loaded anew, which loses what
// was typed meanwhile. Here
//
// - events wait for the server,
// - events under way when the connection breaks are asked for anew, and
// - what starts something is refused with a sentence.
//
// No event of ours does harm when it comes twice.

const JOIN = "/queue/join";
const EVENTS = "/queue/data";
const ACT = "/run/";
const TRIES = 5;
const REFUSED =
    "The server does not answer, so nothing was started; look at the run bar, then try again.";

// Takes the place of `fetch` for the requests of Gradio's page.
export function carryGradio(connection) {
    const plain = window.fetch.bind(window);
    const asked = new Map(); // the requests of events whose answer has not come, by event id
    window.fetch = (input, init = {}) => {
        const { pathname } = new URL(input.url ?? input, location.href);
        if (!pathname.startsWith("/gradio_api/")) return plain(input, init);
        if (pathname.endsWith(JOIN)) return join(input, init);
        if (pathname.endsWith(EVENTS)) return events(input, init);
        if (pathname.includes(ACT)) return act(input, init);
        return plain(input, init);
    };

    // Waits for the server for as long as it takes.
    async function patiently(input, init) {
        for (let left = TRIES; ; left -= 1) {
            await connection.answering();
            try {
                return await plain(input, init);
            } catch (error) {
                if (isGivenUp(input, init) || left <= 1) throw error;
                connection.lose();
            }
        }
    }

    // Asks for an event, and remembers it until its answer has come.
    async function join(input, init) {
        const answer = await patiently(input, init);
        const id = await eventId(answer.clone());
        if (id) asked.set(id, { input, init });
        return answer;
    }

    // Starts something, which is not tried twice.
    function act(input, init) {
        return plain(input, init).catch(() => {
            connection.lose();
            return new Response(JSON.stringify({ error: REFUSED }), {
                status: 503,
                headers: { "content-type": "application/json" },
            });
        });
    }

    // The stream of answers. When it breaks, every event without its answer is asked for again. The
    // page knows it by its first id, so messages about it are passed on with that one.
    async function events(input, init) {
        const names = new Map(); // the first id of an event that was asked for again, by its new id
        const encoder = new TextEncoder();
        let lines = read(await patiently(input, init));
        let isClosed = false;

        async function again() {
            connection.lose();
            for (const [id, request] of [...asked]) {
                const next = await eventId(await patiently(request.input, request.init));
                if (next) names.set(next, id);
                else asked.delete(id);
            }
            lines = read(await patiently(input, init));
        }

        function passed(message) {
            const id = names.get(message.event_id) ?? message.event_id;
            if (message.msg === "process_completed") asked.delete(id);
            if (message.msg === "close_stream") isClosed = true;
            const known = id === undefined ? message : { ...message, event_id: id };
            return encoder.encode(`data: ${JSON.stringify(known)}\n\n`);
        }

        const body = new ReadableStream({
            async pull(stream) {
                for (let left = TRIES; ; left -= 1) {
                    try {
                        const message = await lines.next();
                        if (isBroken(message) && asked.size && left > 0) await again();
                        else if (message.done) {
                            // Without this message, Gradio would wait on this stream for ever.
                            if (!isClosed) stream.enqueue(passed({ msg: "close_stream" }));
                            stream.close();
                            return;
                        } else {
                            stream.enqueue(passed(message.value));
                            return;
                        }
                    } catch (error) {
                        // Gradio gives a stream up once it was told that the stream ends, which may
                        // be before it has ended.
                        if (isGivenUp(input, init) || left <= 0) {
                            stream.error(error);
                            return;
                        }
                        await again();
                    }
                }
            },
            cancel() {
                lines.return();
            },
        });
        return new Response(body, { headers: { "content-type": "text/event-stream" } });
    }
}

async function eventId(answer) {
    const said = await answer.json().catch(() => ({}));
    return said.event_id;
}

// A server that ends says so, or just stops: both are a broken stream to those who wait for an
// answer.
function isBroken({ done, value }) {
    return done || (value.msg === "unexpected_error" && !value.event_id);
}

const isGivenUp = (input, init) => Boolean((init.signal ?? input.signal)?.aborted);

// The messages of a stream of server-sent events.
async function* read(answer) {
    if (!answer.ok || !answer.body) throw new Error(`The server answered ${answer.status}.`);
    // Read here: a pipe drops what has come when the stream breaks behind it.
    const reader = answer.body.getReader();
    const decoder = new TextDecoder();
    let text = "";
    try {
        for (;;) {
            const { done, value } = await reader.read();
            if (done) return;
            text += decoder.decode(value, { stream: true });
            const pieces = text.split("\n\n");
            text = pieces.pop();
            for (const piece of pieces)
                if (piece.startsWith("data:")) yield JSON.parse(piece.slice("data:".length));
        }
    } finally {
        reader.cancel().catch(() => {});
    }
}
