// Explains above the form, to a new user, what this program is and what this machine can do; shows
// three steps, and the progress of each.

import { field, setText } from "../../shared/dom.js";

const KEPT = "ramstream-intro";
const CONTROLS = {
    "model-source": "#field-model-source :is(input, textarea)",
    "data-source": "#field-data-source :is(input, textarea)",
    start: "#start",
};

export class Intro {
    // starters: what the tiny models learn, by the file of the preset.
    constructor(element, { machine, starters }) {
        this.root = element;
        this.starters = starters;
        this.hasRuns = null; // not known yet
        this.fit = null;
        this.form = null;
        this.data = null;
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

    // A person who has a run needs no introduction.
    reportRuns(hasRuns) {
        if (hasRuns === this.hasRuns) return;
        this.hasRuns = hasRuns;
        this.show();
    }

    keep(what) {
        this.kept = what;
        try {
            localStorage.setItem(KEPT, what);
        } catch {
            // If the browser stores nothing, the choice is lost with the page.
        }
        this.show();
    }

    show() {
        let kept = this.kept;
        try {
            kept ??= localStorage.getItem(KEPT);
        } catch {
            // The same applies here.
        }
        const open = kept === "shown" || (kept !== "hidden" && this.hasRuns === false);
        this.part("card").hidden = !open;
        this.part("line").hidden = open;
    }

    // fit panel: the server's fit panel on the form; form: {preset, shown}.
    judged(fit, form) {
        this.fit = fit;
        this.form = form;
        this.draw();
    }

    // preview: the server's preview of the data.
    read(preview) {
        if (preview.pending) return;
        this.data = preview;
        this.draw();
    }

    draw() {
        if (!this.fit) return;
        const model = this.value("model.source");
        const data = this.value("data.source");
        const isModelGood = model && !this.isWrong("model");
        const isDataGood = data && !this.isWrong("data") && !this.isUnread();
        this.step("model", isModelGood, this.modelText(model));
        this.step("data", isDataGood, this.dataText(data));
        const isReady = this.fit.can_start && !this.isUnread();
        const whyNot = this.fit.why_not || "Once model and data are chosen.";
        this.step("start", isReady, isReady ? this.readyText() : whyNot);
    }

    value(name) {
        return String(this.form.shown[name] ?? "").trim();
    }

    isWrong(section) {
        return this.fit.field?.startsWith(`field-${section}-`);
    }

    isUnread() {
        return this.data?.error || this.data?.finding?.blocks;
    }

    modelText(model) {
        if (!model) return "Name a folder or a model of the hub, or take a preset.";
        if (this.isWrong("model")) return "Something about the model is to be put right below.";
        return `Chosen: ${model}`;
    }

    dataText(data) {
        if (!data) return "Name a file, a folder or a data set of the hub.";
        if (this.data?.error) return "The data cannot be read yet; the preview below says why.";
        if (this.data?.mapping?.refused) return "Say which column is what, in the preview below.";
        if (this.isUnread()) return "No row can be trained on; the preview below says why.";
        if (this.isWrong("data")) return "Something about the data is to be put right below.";
        return `Chosen: ${data}`;
    }

    readyText() {
        const learns = this.starters[this.form.preset];
        const task = learns ? `: a tiny model learns ${learns}` : "";
        const run = this.fit.time.find(({ name, note }) => name === "The run" && !note);
        const time = run ? ` ${capital(run.text.split(": ").pop())} on this machine.` : "";
        return `Ready${task}.${time}`;
    }

    step(name, good, text) {
        const node = this.root.querySelector(`[data-step="${name}"]`);
        const caption = field(this.root, name);
        node.dataset.done = Boolean(good);
        node.querySelector(".rs-intro-mark").textContent =
            good && name !== "start" ? "✓" : { model: 1, data: 2, start: 3 }[name];
        setText(caption, text);
    }
}

const capital = (text) => text.charAt(0).toUpperCase() + text.slice(1);

function point(name) {
    let control = document.querySelector(CONTROLS[name]);
    if (control?.disabled) {
        // The fit panel above the button says why.
        control = document.querySelector(".rs-fit-panel");
        control.tabIndex = -1;
    }
    const calm = matchMedia("(prefers-reduced-motion: reduce)").matches;
    control?.scrollIntoView({ block: "center", behavior: calm ? "auto" : "smooth" });
    control?.focus({ preventScroll: true });
}
