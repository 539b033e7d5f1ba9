// Asks for another name of a run, and keeps it.

import { el, send } from "./dom.js";

export class RenameDialog {
    // place: the element that the dialog belongs to. renamed() is called when a name was kept.
    constructor(place, renamed) {
        this.place = place;
        this.renamed = renamed;
        this.name = el("input", { name: "name", type: "text", autocomplete: "off" });
        this.problem = el("p", { class: "rs-error", role: "alert" });
        const cancel = el("button", { type: "button", click: () => this.dialog.close() }, "Cancel");
        const form = el(
            "form",
            { submit: (event) => this.send(event) },
            el("label", {}, "Name", this.name),
            this.problem,
            el(
                "div",
                { class: "rs-dialog-row" },
                cancel,
                el("button", { class: "rs-primary" }, "Rename"),
            ),
        );
        this.dialog = el(
            "dialog",
            {
                class: "rs-dialog rs-dialog-fields",
                "data-part": "rename",
                "aria-label": "Rename this run",
            },
            el("h2", {}, "Rename this run"),
            form,
        );
        // It is on the page only while it is open.
        this.dialog.addEventListener("close", () => this.dialog.remove());
    }

    open({ id, name }) {
        this.id = id;
        this.name.value = name;
        this.problem.textContent = "";
        this.place.append(this.dialog);
        this.dialog.showModal();
        this.name.select();
    }

    async send(event) {
        event.preventDefault();
        try {
            const path = `/api/runs/${encodeURIComponent(this.id)}/describe`;
            await send(path, { name: this.name.value });
            this.dialog.close();
            this.renamed();
        } catch (error) {
            this.problem.textContent = error.message;
        }
    }
}
