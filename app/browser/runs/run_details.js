// Shows the details of one run in a dialog: its name and note, the command lines, and the settings
// that it used.

import { copyText, el, field, send } from "../common/dom.js";

export class RunDetails {
    // changed() is called when the name or the note has changed. closed(id) is called when the
    // dialog was closed and cannot return the focus, since the row was redrawn meanwhile.
    constructor(dialog, changed, closed) {
        this.dialog = dialog;
        this.changed = changed;
        this.form = dialog.querySelector('[data-part="describe"]');
        this.form.addEventListener("submit", (event) => {
            event.preventDefault();
            this.describe();
        });
        this.form.addEventListener("input", () => this.say(""));
        dialog
            .querySelector('[data-part="details-close"]')
            .addEventListener("click", () => dialog.close());
        // A click outside the dialog has the dialog element itself as its target.
        dialog.addEventListener("click", (event) => {
            if (event.target === dialog) dialog.close();
        });
        dialog.addEventListener("close", () => {
            if (document.activeElement === document.body) closed(this.run);
        });
        const copy = dialog.querySelector('[data-copy="config"]');
        copy.addEventListener("click", () => copyText(copy, field(dialog, "config")));
    }

    async open(run) {
        this.run = run.id;
        field(this.dialog, "details-name").textContent = run.name;
        for (const name of ["details-path", "config", "config-problem", "printed"])
            field(this.dialog, name).textContent = "";
        this.dialog.querySelector('[data-part="command-rows"]').replaceChildren();
        this.form.reset();
        this.say("");
        this.dialog.showModal();
        let details;
        try {
            details = await send(`/api/runs/${encodeURIComponent(run.id)}/details`);
        } catch (error) {
            this.say(error.message, true);
            return;
        }
        if (this.run === run.id) this.show(details);
    }

    show(details) {
        const { name, note } = this.boxes();
        name.value = details.name || details.config_name;
        name.maxLength = details.name_limit;
        note.value = details.note;
        note.maxLength = details.note_limit;
        field(this.dialog, "details-path").textContent = details.path;
        field(this.dialog, "config").textContent = details.config;
        field(this.dialog, "config-problem").textContent = details.config_problem;
        this.dialog.querySelector('[data-part="commands"]').hidden = !details.commands.length;
        const rows = this.dialog.querySelector('[data-part="command-rows"]');
        rows.replaceChildren(...details.commands.map(commandRow));
        this.dialog.querySelector('[data-part="printed"]').hidden = !details.printed.length;
        field(this.dialog, "printed").textContent = details.printed.join("\n");
    }

    boxes() {
        return {
            name: this.form.elements.namedItem("name"),
            note: this.form.elements.namedItem("note"),
        };
    }

    async describe() {
        const { name, note } = this.boxes();
        try {
            const kept = await send(`/api/runs/${encodeURIComponent(this.run)}/describe`, {
                name: name.value,
                note: note.value,
            });
            if (kept.name) field(this.dialog, "details-name").textContent = kept.name;
            this.say("Saved.");
            await this.changed();
        } catch (error) {
            this.say(error.message, true);
        }
    }

    say(text, isError = false) {
        const said = field(this.dialog, "describe-said");
        said.textContent = text;
        said.classList.toggle("rs-error", isError);
    }
}

function commandRow({ label, text }) {
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
