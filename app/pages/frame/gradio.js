// Carries Gradio's requests over a connection that may be lost. Without this, the first event that
// the server does not answer breaks Gradio's page until it is reloaded, which loses what was typed
// meanwhile. With this,
//
// - events wait for the server,
// - events in progress when the connection breaks are requested again,
// - a stream that the server ends just when another event is requested is opened again, and
// - requests that start something are refused with a sentence.
//
// All our events can safely be repeated.

const JOIN = "/queue/join";
const EVENTS = "/queue/data";
const ACT = "/run/";
const TRIES = 5;
const REFUSED =
    "The server does not answer, so nothing was started; look at the run bar, then try again.";

// Replaces `fetch` for the requests of Gradio's page.
export function carryGradio(connection) {
    const carrier = new Carrier(connection, window.fetch.bind(window));
    window.fetch = (input, init = {}) => carrier.fetch(input, init);
}

class Carrier {
    // plain: the browser's own `fetch`.
    constructor(connection, plain) {
        this.connection = connection;
        this.plain = plain;
        this.asked = new Map(); // the requests of unanswered events, by event id
        this.answered = new Set(); // ids that were answered before they were known here
        this.joining = 0; // requests of events on their way
    }

    // Whether an event waits for its answer.
    get isWaiting() {
        return this.joining > 0 || this.asked.size > 0;
    }

    fetch(input, init) {
        const { pathname } = new URL(input.url ?? input, location.href);
        if (!pathname.startsWith("/gradio_api/")) return this.plain(input, init);
        if (pathname.endsWith(JOIN)) return this.join(input, init);
        if (pathname.endsWith(EVENTS)) return this.events(input, init);
        if (pathname.includes(ACT)) return this.act(input, init);
        return this.plain(input, init);
    }

    // Waits for the server without a time limit.
    async patiently(input, init) {
        for (let left = TRIES; ; left -= 1) {
            await this.connection.answering();
            try {
                return await this.plain(input, init);
            } catch (error) {
                if (isGivenUp(input, init) || left <= 1) throw error;
                this.connection.lose();
            }
        }
    }

    // Requests an event, and remembers it until it is answered.
    async join(input, init) {
        this.joining += 1;
        try {
            const answer = await this.patiently(input, init);
            const id = await eventId(answer.clone());
            if (id && !this.answered.delete(id)) this.asked.set(id, { input, init });
            return answer;
        } finally {
            this.joining -= 1;
        }
    }

    // Starts something, without repeating the request.
    async act(input, init) {
        try {
            return await this.plain(input, init);
        } catch {
            this.connection.lose();
            return new Response(JSON.stringify({ error: REFUSED }), {
                status: 503,
                headers: { "content-type": "application/json" },
            });
        }
    }

    completed(id) {
        if (!this.asked.delete(id)) this.answered.add(id);
    }

    async events(input, init) {
        const answers = new Answers(this, input, init);
        await answers.open();
        const body = new ReadableStream({
            pull: (stream) => answers.pull(stream),
            cancel: () => answers.cancel(),
        });
        return new Response(body, { headers: { "content-type": "text/event-stream" } });
    }
}

// The stream of answers. When it breaks, every unanswered event is requested again. The page knows
// an event by its first id, so messages about it are passed on with that id.
class Answers {
    constructor(carrier, input, init) {
        this.carrier = carrier;
        this.input = input;
        this.init = init;
        this.names = new Map(); // the first id of a repeated event, by its new id
        this.encoder = new TextEncoder();
        this.isClosed = false;
    }

    async open() {
        this.messages = read(await this.carrier.patiently(this.input, this.init));
    }

    async again() {
        const { asked, connection } = this.carrier;
        connection.lose();
        for (const [id, request] of [...asked]) {
            const next = await eventId(await this.carrier.patiently(request.input, request.init));
            if (next) this.names.set(next, id);
            else asked.delete(id);
        }
        await this.open();
    }

    // Passes the next message on to Gradio, after as many attempts as necessary.
    async pull(stream) {
        for (let left = TRIES; ; left -= 1) {
            try {
                const message = await this.messages.next();
                if (isBroken(message) && this.carrier.asked.size && left > 0) await this.again();
                // The server did not know of the event yet; Gradio would open no other stream.
                else if (isLast(message) && this.carrier.isWaiting) await this.open();
                else {
                    this.pass(stream, message);
                    return;
                }
            } catch (error) {
                // Gradio abandons a stream once the end of the stream was announced, which may be
                // before the stream has ended.
                if (isGivenUp(this.input, this.init) || left <= 0) {
                    stream.error(error);
                    return;
                }
                await this.again();
            }
        }
    }

    pass(stream, { done, value }) {
        if (!done) {
            stream.enqueue(this.encoded(value));
            return;
        }
        // Without this message, Gradio would wait for this stream for ever.
        if (!this.isClosed) stream.enqueue(this.encoded({ msg: "close_stream" }));
        stream.close();
    }

    encoded(message) {
        const id = this.names.get(message.event_id) ?? message.event_id;
        if (message.msg === "process_completed") this.carrier.completed(id);
        if (message.msg === "close_stream") this.isClosed = true;
        const known = id === undefined ? message : { ...message, event_id: id };
        return this.encoder.encode(`data: ${JSON.stringify(known)}\n\n`);
    }

    cancel() {
        this.messages.return();
    }
}

async function eventId(answer) {
    const body = await answer.json().catch(() => ({}));
    return body.event_id;
}

// A server that ends may announce it or just stop: both break the stream for requests that wait for
// an answer.
function isBroken({ done, value }) {
    return done || (value.msg === "unexpected_error" && !value.event_id);
}

// The server ends a stream once it has answered every event that it knows of.
const isLast = ({ done, value }) => !done && value.msg === "close_stream";

const isGivenUp = (input, init) => Boolean((init.signal ?? input.signal)?.aborted);

// Yields the messages of a stream of server-sent events.
async function* read(answer) {
    if (!answer.ok || !answer.body) throw new Error(`The server answered ${answer.status}.`);
    // The stream is read here because a pipe would drop received data when the stream breaks.
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
