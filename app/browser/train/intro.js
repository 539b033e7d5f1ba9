// What a newcomer sees above the form: what this is, this machine, and three steps with how far
// each of them is.

import { field, setText } from "../common/dom.js";

const KEPT = "ramstream-intro";
const CONTROLS = {
    "model-source": "#field-model-source :is(input, textarea)",
    "data-source": "#field-data-source :is(input, textarea)",
    start: "#start",
};

export class Intro {
    // starter: the file of the preset that is chosen at first.
    constructor(element, { machine, starter }) {
        Object.assign(this, {
            root: element,
            starter,
            hasRuns: null,
            verdict: null,
            form: null,
            data: null,
        });
        field(element, "machine").textContent = machine;
        this.part("hide").addEventListener("click", () => {
            this.keep("hidden");
            this.part("show").focus();
        });
        this.part("show").addEventListener("click", () => {
            this.keep("shown");
            element.querySelector("h2").focus();
        });
        for (const button of element.querySelectorAll("[data-to]")) {
            button.addEventListener("click", () => point(button.dataset.to));
        }
    }

    part(name) {
        return this.root.querySelector(`[data-part="${name}"]`);
    }

    // Whoever has a run knows what this is.
    tellRuns(hasRuns) {
        if (hasRuns === this.hasRuns) return;
        this.hasRuns = hasRuns;
        this.show();
    }

    keep(what) {
        this.kept = what;
        try {
            localStorage.setItem(KEPT, what);
        } catch {
            /* a browser that keeps nothing forgets it with the page */
        }
        this.show();
    }

    show() {
        let kept = this.kept;
        try {
            kept ??= localStorage.getItem(KEPT);
        } catch {
            /* as above */
        }
        const open = kept === "shown" || (kept !== "hidden" && this.hasRuns === false);
        this.part("card").hidden = !open;
        this.part("line").hidden = open;
    }

    // verdict: what the server says of the form; form: {preset, shown}.
    judged(verdict, form) {
        Object.assign(this, { verdict, form });
        this.draw();
    }

    // preview: the server's preview of the data.
    read(preview) {
        if (preview.pending) return;
        this.data = preview;
        this.draw();
    }

    draw() {
        if (!this.verdict) return;
        const { verdict, form } = this;
        const wrong = (section) => verdict.field?.startsWith(`field-${section}-`);
        const isStarter = form.preset === this.starter;
        const model = String(form.shown["model.source"] ?? "").trim();
        const data = String(form.shown["data.source"] ?? "").trim();
        const unread = this.data?.error || this.data?.mapping?.refused;
        this.step(
            "model",
            model && !wrong("model"),
            !model
                ? "Name a folder or a model of the hub, or take a preset."
                : wrong("model")
                  ? "Something about the model is to be put right below."
                  : `Chosen: ${model}`,
        );
        this.step(
            "data",
            data && !wrong("data") && !unread,
            !data
                ? "Name a file, a folder or a data set of the hub."
                : this.data?.error
                  ? "The data cannot be read yet; the preview below says why."
                  : unread
                    ? "Say which column is what, in the preview below."
                    : wrong("data")
                      ? "Something about the data is to be put right below."
                      : `Chosen: ${data}`,
        );
        const run = verdict.time.find(({ name, note }) => name === "The run" && !note);
        const time = run ? ` ${capital(run.text.split(": ").pop())} on this machine.` : "";
        const ready = verdict.can_start && !unread;
        this.step(
            "start",
            ready,
            ready
                ? `Ready${isStarter ? ": a tiny model learns to write Roman numerals" : ""}.${time}`
                : verdict.why_not || "Once model and data are chosen.",
        );
    }

    step(name, good, words) {
        const node = this.root.querySelector(`[data-step="${name}"]`);
        const said = field(this.root, name);
        node.dataset.done = Boolean(good);
        node.querySelector(".rs-intro-mark").textContent =
            good && name !== "start" ? "✓" : { model: 1, data: 2, start: 3 }[name];
        setText(said, words);
    }
}

const capital = (text) => text.charAt(0).toUpperCase() + text.slice(1);

function point(name) {
    let control = document.querySelector(CONTROLS[name]);
    if (control?.disabled) {
        // the verdict above it says why
        control = document.querySelector(".rs-verdict");
        control.tabIndex = -1;
    }
    const calm = matchMedia("(prefers-reduced-motion: reduce)").matches;
    control?.scrollIntoView({ block: "center", behavior: calm ? "auto" : "smooth" });
    control?.focus({ preventScroll: true });
}
