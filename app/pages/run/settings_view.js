// The settings of a run: those that matter most and those that were changed, its name, note and
// tags, all settings as YAML, command lines, and a new run with the same settings.

import { copyText, el, field, send } from "../../shared/dom.js";
import { draftOf } from "./head.js";

export class SettingsView {
    // changed() is called when the name, the note or the tags have changed; edit() opens the form
    // with what can be changed while the run is under way.
    constructor(root, changed, edit) {
        this.root = root;
        this.changed = changed;
        this.run = null;
        this.form = root.querySelector('[data-part="describe"]');
        this.form.addEventListener("submit", (event) => {
            event.preventDefault();
            this.describe();
        });
        this.typed = new Set(); // the boxes with a text that is not saved
        this.form.addEventListener("input", ({ target }) => {
            this.typed.add(target.name);
            this.report("");
        });
        const copy = root.querySelector('[data-copy="config"]');
        copy.addEventListener("click", () => copyText(copy, field(root, "config")));
        this.editing = root.querySelector('[data-part="edit"]');
        this.editing.addEventListener("click", edit);
        root.querySelector('[data-part="draft"]').addEventListener("click", ({ target }) =>
            draftOf(this.run, {}, target, field(root, "config-problem")),
        );
    }

    // Reads the settings once; a change of the run, or of its state, may change them.
    async refresh({ run_id, bar }) {
        // While a request is under way nothing else can be asked for, for a moment.
        this.editing.hidden = !bar.pending && !bar.actions.includes("change");
        const { learning_rate: rate, steps } = bar.settings;
        const version = JSON.stringify([run_id, bar.state, rate, steps, bar.name]);
        if (version === this.version) return;
        this.version = version;
        this.run = run_id;
        try {
            const details = await send(`/api/runs/${encodeURIComponent(run_id)}/details`);
            if (this.run === run_id) this.show(details);
        } catch (error) {
            this.version = null;
            field(this.root, "config-problem").textContent = error.message;
        }
    }

    clear() {
        this.editing.hidden = true;
        this.version = null;
        this.run = null;
        for (const name of ["details-path", "config", "config-problem", "printed"])
            field(this.root, name).textContent = "";
        for (const name of ["command-rows", "settings-main"])
            this.root.querySelector(`[data-part="${name}"]`).replaceChildren();
        this.root.querySelector('[data-part="settings-changed"]').hidden = true;
        this.form.reset();
        this.typed.clear();
        this.report("");
    }

    show(details) {
        this.showSettings(details.settings);
        const values = { name: details.name || details.config_name, note: details.note };
        for (const [box, value] of Object.entries({ ...values, tags: details.tags })) {
            // What was typed is not replaced.
            if (!this.typed.has(box)) this.form.elements.namedItem(box).value = value;
        }
        this.boxes().note.maxLength = details.note_limit;
        field(this.root, "details-path").textContent = details.path;
        field(this.root, "config").textContent = details.config;
        field(this.root, "config-problem").textContent = details.config_problem;
        this.root.querySelector('[data-part="commands"]').hidden = !details.commands.length;
        const rows = this.root.querySelector('[data-part="command-rows"]');
        rows.replaceChildren(...details.commands.map(commandRow));
        this.root.querySelector('[data-part="printed"]').hidden = !details.printed.length;
        field(this.root, "printed").textContent = details.printed.join("\n");
    }

    showSettings({ main, changed }) {
        const facts = main.flatMap(([name, text]) => [el("dt", {}, name), el("dd", {}, text)]);
        this.root.querySelector('[data-part="settings-main"]').replaceChildren(...facts);
        const card = this.root.querySelector('[data-part="settings-changed"]');
        card.hidden = !changed.length;
        card.querySelector("tbody").replaceChildren(...changed.map(changedRow));
    }

    boxes() {
        return {
            name: this.form.elements.namedItem("name"),
            note: this.form.elements.namedItem("note"),
            tags: this.form.elements.namedItem("tags"),
        };
    }

    async describe() {
        const { name, note, tags } = this.boxes();
        try {
            await send(`/api/runs/${encodeURIComponent(this.run)}/describe`, {
                name: name.value,
                note: note.value,
                tags: tags.value.split(","),
            });
            this.typed.clear();
            this.report("Saved.");
            this.changed();
        } catch (error) {
            this.report(error.message, true);
        }
    }

    report(text, isError = false) {
        const caption = field(this.root, "describe-caption");
        caption.textContent = text;
        caption.classList.toggle("rs-error", isError);
    }
}

function changedRow({ label, title, value, default: usual }) {
    const name = el("th", { scope: "row", title }, label);
    return el("tr", {}, name, el("td", {}, value), el("td", { class: "rs-default" }, usual));
}

export function commandRow({ label, text }) {
    const code = el("pre", { tabindex: "0", "aria-label": label }, text);
    const button = el(
        "button",
        {
            type: "button",
            class: "rs-small",
            "aria-label": `Copy: ${label}`,
            click: () => copyText(button, code),
        },
        "Copy",
    );
    const head = el("div", { class: "rs-copied" }, el("span", {}, label), button);
    return el("div", {}, head, code);
}
