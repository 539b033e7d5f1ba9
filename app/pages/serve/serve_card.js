// Serves the run that is shown to other programs, and gives what they need: address, key and names,
// with examples to copy.

import { field, isShown, send, setText } from "../../shared/dom.js";
import { JobView, noticeJobs } from "../../shared/jobs.js";
import { shellWord } from "../../shared/shell.js";
import { commandRow } from "../run/settings_view.js";

const POLL_WAIT = 2000;

export class ServeCard {
    // changed() is called when another run is served, or none.
    constructor(root, changed) {
        this.changed = changed;
        this.root = root.querySelector('[data-part="serve"]');
        this.button = this.root.querySelector("[data-part=serve-toggle]");
        this.lines = this.root.querySelector("[data-part=serve-lines]");
        this.view = new JobView(this.root.querySelector("[data-part=serve-loading]"));
        this.button.addEventListener("click", () => this.toggle());
        document.addEventListener("visibilitychange", () => this.poll());
        this.clear();
    }

    clear() {
        this.run = null;
        this.question = "";
        this.state = null;
        this.shown = "";
        this.root.hidden = true;
        this.lines.replaceChildren();
        this.report("");
    }

    // canServe: the run has weights that can answer. question: what the examples ask.
    setRun(run, canServe, question) {
        this.run = run;
        this.question = question;
        this.root.hidden = !canServe;
        this.poll();
    }

    async poll() {
        clearTimeout(this.timer);
        if (this.run === null || this.root.hidden) return;
        if (!document.hidden && isShown(this.root)) {
            try {
                this.show(await send("/api/serve"));
            } catch {
                // The run bar reports that the server does not answer.
            }
        }
        clearTimeout(this.timer);
        this.timer = setTimeout(() => this.poll(), POLL_WAIT);
    }

    show(state) {
        this.state = state;
        const isOurs = state.run_id === this.run;
        const { loading } = state;
        if (this.served !== undefined && this.served !== state.run_id) this.changed();
        this.served = state.run_id;
        this.view.show(loading?.about === this.run ? loading : null);
        setText(this.button, isOurs ? "Stop serving" : "Start serving");
        const isRefused = !isOurs && Boolean(state.refused);
        this.button.disabled = this.isBusy || Boolean(loading) || isRefused;
        setText(field(this.root, "serve-about"), about(state, isOurs));
        const version = JSON.stringify(isOurs ? [state.models, state.key, this.question] : []);
        if (version === this.shown) return; // what a person has selected stays
        this.shown = version;
        const lines = isOurs ? linesOf(state, this.question) : [];
        this.lines.replaceChildren(...lines.map(commandRow));
    }

    async toggle() {
        if (this.isBusy || this.state === null) return;
        const { run } = this;
        const isOurs = this.state.run_id === run;
        this.isBusy = true;
        this.button.disabled = true;
        this.report("");
        try {
            if (isOurs) await send("/api/serve/stop", {});
            else await this.start(run);
        } catch (error) {
            if (run === this.run) this.report(error.message);
        }
        this.isBusy = false;
        await this.poll();
        // A disabled button loses the focus. A person who went on elsewhere keeps it there.
        if (run === this.run && document.activeElement === document.body) this.button.focus();
    }

    async start(run) {
        const job = await send("/api/serve/start", { run_id: run });
        noticeJobs();
        const over = await this.view.follow(job);
        this.view.show(null);
        if (over.state === "failed") throw new Error(over.error);
    }

    report(error) {
        setText(field(this.root, "serve-error"), error);
    }
}

function about({ run_id, name, asked, note, refused, slow }, isOurs) {
    if (!isOurs && refused) return refused;
    if (!isOurs && run_id) return `${name} is being served. This run would take its place.`;
    if (!isOurs)
        return note || "Any program that speaks OpenAI's API can use this run, without an export.";
    const answers = asked === 1 ? "1 answer" : `${asked} answers`;
    const now = asked ? `Serving · writing ${answers}` : "Serving";
    return slow ? `${now}. ${slow}` : now;
}

function linesOf({ models, key }, question) {
    const base = `${location.origin}/v1`;
    const [trained, before] = models;
    return [
        { label: "Base URL", text: base },
        { label: "API key", text: key },
        { label: "Model", text: trained },
        { label: "Base model", text: before },
        { label: "Python (openai)", text: python(base, key, trained, question) },
        { label: "curl", text: curl(base, key, trained, question) },
    ];
}

function python(base, key, model, question) {
    const [url, secret, name] = [base, key, model].map((text) => JSON.stringify(text));
    return [
        "from openai import OpenAI",
        "",
        "client = OpenAI(",
        `    base_url=${url},`,
        `    api_key=${secret},`,
        ")",
        "answer = client.chat.completions.create(",
        `    model=${name},`,
        `    messages=[{"role": "user", "content": ${JSON.stringify(question)}}],`,
        ")",
        "print(answer.choices[0].message.content)",
    ].join("\n");
}

function curl(base, key, model, question) {
    const body = { model, messages: [{ role: "user", content: question }] };
    return [
        `curl ${base}/chat/completions \\`,
        `  -H "Authorization: Bearer ${key}" \\`,
        '  -H "Content-Type: application/json" \\',
        `  -d ${shellWord(JSON.stringify(body))}`,
    ].join("\n");
}
