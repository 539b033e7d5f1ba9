// Gradio's requests over a connection that may be lost. By itself, its page is dead from the first
// event that the server does not answer until it reloads, which loses what was typed meanwhile.
// Here events wait for the server, those under way are asked for anew, and what starts something is
// refused with a sentence. No event of ours does harm when it comes twice.

const JOIN = "/queue/join";
const EVENTS = "/queue/data";
const ACT = "/run/";
const TRIES = 5;
const REFUSED =
    "The server does not answer, so nothing was started; look at the run bar, then try again.";

export function carryGradio(connection) {
    const plain = window.fetch.bind(window);
    const asked = new Map();
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

    async function join(input, init) {
        const answer = await patiently(input, init);
        const { event_id: id } = await answer
            .clone()
            .json()
            .catch(() => ({}));
        if (id) asked.set(id, { input, init });
        return answer;
    }

    function act(input, init) {
        return plain(input, init).catch(() => {
            connection.lose();
            return new Response(JSON.stringify({ error: REFUSED }), {
                status: 503,
                headers: { "content-type": "application/json" },
            });
        });
    }

    // The stream of answers. When it breaks, every event without its answer is asked for again and
    // goes by its first name.
    async function events(input, init) {
        const names = new Map();
        const encoder = new TextEncoder();
        let lines = read(await patiently(input, init));
        let isClosed = false;

        async function again() {
            connection.lose();
            for (const [id, request] of [...asked]) {
                const { event_id: next } = await (await patiently(request.input, request.init))
                    .json()
                    .catch(() => ({}));
                if (next) names.set(next, id);
                else asked.delete(id);
            }
            lines = read(await patiently(input, init));
        }

        function passed(message) {
            const id = names.get(message.event_id) ?? message.event_id;
            if (message.msg === "process_completed") asked.delete(id);
            isClosed ||= message.msg === "close_stream";
            return encoder.encode(
                `data: ${JSON.stringify(id === undefined ? message : { ...message, event_id: id })}\n\n`,
            );
        }

        const body = new ReadableStream({
            async pull(stream) {
                for (let left = TRIES; ; left -= 1) {
                    try {
                        const message = await lines.next();
                        // A server that ends says so, or just stops: both are a broken stream to
                        // those who wait for an answer.
                        const isBroken =
                            message.done ||
                            (message.value.msg === "unexpected_error" && !message.value.event_id);
                        if (isBroken && asked.size && left > 0) await again();
                        else if (message.done) {
                            if (!isClosed) stream.enqueue(passed({ msg: "close_stream" })); // or Gradio would wait on this stream for ever
                            stream.close();
                            return;
                        } else {
                            stream.enqueue(passed(message.value));
                            return;
                        }
                    } catch (error) {
                        // Gradio gives a stream up once it was told that it ends, which it may be
                        // before it has ended.
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
