// The commands that use an export of the run, and which export they are for.

import { el, field } from "../../shared/dom.js";
import { commandRow } from "./settings_view.js";

export class ExportUses {
    constructor(root) {
        this.root = root.querySelector('[data-part="uses"]');
        this.select = this.root.querySelector("select");
        this.list = this.root.querySelector('[data-part="use-rows"]');
        this.select.addEventListener("change", () => this.draw());
        this.clear();
    }

    clear() {
        this.exports = [];
        this.show([]);
    }

    // exports: the newest first. A new one is shown at once; else the chosen one stays.
    show(exports) {
        const known = new Set(this.exports.map(({ path }) => path));
        const isNew = exports.length && !known.has(exports[0].path);
        const chosen = isNew ? exports[0].path : this.select.value;
        this.exports = exports;
        this.root.hidden = !exports.length;
        this.select.parentElement.hidden = exports.length < 2;
        this.select.replaceChildren(...exports.map(exportOption));
        const isThere = exports.some(({ path }) => path === chosen);
        this.select.value = isThere ? chosen : (exports[0]?.path ?? "");
        this.draw();
    }

    draw() {
        const shown = this.exports.find(({ path }) => path === this.select.value);
        field(this.root, "export-template").textContent = shown?.template ?? "";
        this.list.replaceChildren(...(shown?.uses ?? []).map(commandRow));
    }
}

// The last part of the path tells apart what has one label.
export function exportOption({ path, label }) {
    return el("option", { value: path }, `${label} · ${path.split("/").at(-1)}`);
}
