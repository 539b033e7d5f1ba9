// The log of a run: everything that its record has on evaluations, checkpoints, changes, states
// and messages, searchable.

import { el, field, send, setText } from "../../shared/dom.js";
import { momentText } from "../../shared/moments.js";

const KINDS = {
    "": "What matters",
    all: "Everything",
    message: "Messages",
    warning: "Warnings and errors",
    evaluation: "Evaluations",
    checkpoint: "Checkpoints and exports",
    change: "Requests and changes",
    state: "States",
};
const AT_ONCE = 500; // entries that are drawn before a person asks for earlier ones
const READ_AGAIN = 2000; // ms

export class LogView {
    constructor(root) {
        this.root = root;
        this.list = root.querySelector('[data-part="log"]');
        this.more = root.querySelector('[data-part="log-more"]');
        this.form = root.querySelector('[data-part="log-search"]');
        const { kind } = this.form.elements;
        kind.append(...Object.entries(KINDS).map(([value, text]) => el("option", { value }, text)));
        this.form.addEventListener("submit", (event) => event.preventDefault());
        this.form.addEventListener("input", () => {
            this.most = AT_ONCE;
            this.draw();
        });
        this.more.addEventListener("click", () => {
            this.most += AT_ONCE;
            this.draw();
        });
        this.clear();
    }

    clear() {
        this.run = null;
        this.entries = [];
        this.damage = []; // what could not be read of the record
        this.most = AT_ONCE;
        this.readAt = Number.NEGATIVE_INFINITY;
        this.list.replaceChildren();
        setText(field(this.root, "log-problem"), "");
        setText(field(this.root, "log-count"), "");
    }

    // Reads the entries that are new.
    async refresh({ run_id }) {
        if (run_id === this.run && performance.now() - this.readAt < READ_AGAIN) return;
        if (run_id !== this.run) this.clear();
        this.run = run_id;
        this.readAt = performance.now();
        const after = this.entries.length;
        const address = `/api/runs/${encodeURIComponent(run_id)}/log?after=${after}`;
        try {
            const { count, entries, damage } = await send(address);
            if (this.run !== run_id || this.entries.length !== after) return;
            setText(field(this.root, "log-problem"), "");
            // A record that became shorter is another one.
            if (count < after) this.clear();
            else if (entries.length || !after || damage.length !== this.damage.length) {
                this.entries.push(...entries);
                this.damage = damage;
                this.draw();
            }
        } catch (error) {
            if (!error.unreachable) setText(field(this.root, "log-problem"), error.message);
        }
    }

    // The newest entry comes first. Without a wish, evaluations that follow each other are one.
    draw() {
        const { text, kind } = this.form.elements;
        const found = text.value.trim() || kind.value ? this.found() : grouped(this.found());
        const shown = found.slice(-this.most).reverse();
        this.list.replaceChildren(...shown.map(entryNode));
        if (!shown.length) this.list.replaceChildren(el("li", {}, "No entry matches."));
        this.more.hidden = shown.length === found.length;
        const all = (this.entries.length + this.damage.length).toLocaleString("en");
        const count = found.length.toLocaleString("en");
        setText(
            field(this.root, "log-count"),
            count === all ? `${all} entries` : `${count} of ${all} entries`,
        );
    }

    found() {
        const { text, kind } = this.form.elements;
        const words = text.value.toLowerCase().split(/\s+/).filter(Boolean);
        return [...this.entries, ...this.damage].filter((entry) => {
            if (!isOfKind(entry, kind.value)) return false;
            if (!kind.value && !words.length && entry.is_minor) return false;
            const searched = `step ${entry.step} ${entry.text}`.toLowerCase();
            return words.every((word) => searched.includes(word));
        });
    }
}

function isOfKind({ kind, level }, wanted) {
    if (wanted === "warning") return level !== "info";
    if (wanted === "checkpoint") return ["checkpoint", "best", "saved"].includes(kind);
    return !wanted || wanted === "all" || kind === wanted;
}

// Evaluations, the best weights that they find, and checkpoints may come every few steps: of those
// that follow each other, the latest of each are shown, with how many evaluations there were. That
// before training is kept.
function grouped(entries) {
    const shown = [];
    let stretch = [];
    const close = () => {
        shown.push(...condensed(stretch));
        stretch = [];
    };
    for (const entry of entries) {
        const isOften = ["evaluation", "best", "saved"].includes(entry.kind) && entry.step > 0;
        if (isOften) {
            stretch.push(entry);
            continue;
        }
        close();
        shown.push(entry);
    }
    close();
    return shown;
}

function condensed(stretch) {
    const evaluations = stretch.filter(({ kind }) => kind === "evaluation");
    const kept = ["saved", "best"].map((kind) => stretch.findLast((entry) => entry.kind === kind));
    const steps = evaluations.map(({ step }) => step);
    // The answers in the end may be those of the best step, an earlier one.
    const ends = new Set([Math.max(...steps), steps.at(-1)]);
    const lines = [...ends].filter(Number.isFinite).map((step) => {
        const own = evaluations.filter((entry) => entry.step === step);
        return { ...own.at(-1), text: own.map(({ text }) => text).join(" ") };
    });
    const earlier = new Set(steps).size - lines.length;
    if (earlier > 0)
        lines[0].text += ` ${earlier} earlier ${earlier === 1 ? "one is" : "ones are"} not shown.`;
    return [...lines, ...kept.filter(Boolean)].sort((a, b) => a.time - b.time);
}

function entryNode({ time, step, text, level }) {
    const date = new Date(1000 * time);
    const when = el("time", { datetime: date.toISOString() }, momentText(time, true));
    const at = el(
        "span",
        { class: "rs-log-step" },
        step ? `step ${step.toLocaleString("en")}` : "",
    );
    return el("li", { "data-level": level }, when, at, el("span", {}, text));
}
