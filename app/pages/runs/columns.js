// The columns of the list of runs: which are shown, and by which the list is sorted. The browser
// keeps both.

import { el } from "../../shared/dom.js";
import { placeAt } from "../../shared/menu.js";

const KEPT = "ramstream-run-columns";

// sort: whether the list can be sorted by the column; falls: with the greatest first; isShown: at
// first.
export const COLUMNS = [
    { name: "name", label: "Name", sort: true, isShown: true, isFixed: true },
    { name: "state", label: "State", sort: true, isShown: true, isFixed: true },
    { name: "curve", label: "Loss curve", isShown: true },
    { name: "validation", label: "Validation loss", sort: true, isShown: true },
    { name: "accuracy", falls: true, label: "Answers right", sort: true, isShown: true },
    { name: "loss", label: "Training loss", sort: true },
    { name: "evaluated_loss", label: "Evaluated loss", sort: true },
    { name: "evaluated_right", falls: true, label: "Evaluated answers", sort: true },
    { name: "tasks", label: "Benchmarks" },
    { name: "steps", falls: true, label: "Steps", sort: true },
    { name: "model", label: "Model", sort: true, isShown: true },
    { name: "data", label: "Data", sort: true, isShown: true },
    { name: "time", falls: true, label: "Time", sort: true },
    { name: "size", falls: true, label: "Disk", sort: true },
    { name: "note", label: "Note" },
    { name: "started", falls: true, label: "Started", sort: true, isShown: true },
];

export class Columns {
    // changed(isSorted) is called when other columns are shown, or the list is sorted otherwise.
    constructor(root, changed) {
        this.changed = changed;
        this.head = root.querySelector("[data-part=heads]");
        this.box = root.querySelector("[data-part=columns]");
        this.select = root.querySelector("[data-part=filters]").elements.sort;
        const kept = read();
        const atFirst = COLUMNS.filter(({ isShown }) => isShown).map(({ name }) => name);
        this.names = new Set(kept.names ?? atFirst);
        this.sort = COLUMNS.some(({ name }) => name === kept.sort) ? kept.sort : "started";
        this.turned = kept.turned === true;
        this.box.replaceChildren(
            ...COLUMNS.filter(({ isFixed }) => !isFixed).map((column) => this.choice(column)),
        );
        const button = root.querySelector("[data-part=columns-open]");
        this.box.addEventListener("toggle", ({ newState }) => {
            if (newState === "open") placeAt(button, this.box);
        });
        const sorted = COLUMNS.filter(({ sort }) => sort);
        this.select.replaceChildren(
            ...sorted.map(({ name, label }) => el("option", { value: name }, `Sort: ${label}`)),
        );
        this.select.addEventListener("change", () => this.sortBy(this.select.value));
        this.drawHeads();
    }

    shown() {
        return COLUMNS.filter(({ name, isFixed }) => isFixed || this.names.has(name));
    }

    choice({ name, label }) {
        const box = el("input", {
            type: "checkbox",
            change: () => {
                if (box.checked) this.names.add(name);
                else this.names.delete(name);
                this.keep(false);
            },
        });
        box.checked = this.names.has(name);
        return el("label", {}, box, label);
    }

    sortBy(name) {
        this.turned = this.sort === name && !this.turned;
        this.sort = name;
        this.keep(true);
        this.head.querySelector(`button[data-sort="${name}"]`)?.focus();
    }

    keep(isSorted) {
        const kept = { names: [...this.names], sort: this.sort, turned: this.turned };
        localStorage.setItem(KEPT, JSON.stringify(kept));
        this.drawHeads();
        this.changed(isSorted);
    }

    drawHeads() {
        this.select.value = this.sort;
        const heads = this.shown().map((column) => this.headOf(column));
        const hidden = (text) => el("th", {}, el("span", { class: "rs-hidden" }, text));
        this.head.replaceChildren(hidden("Select"), ...heads, hidden("Actions"));
    }

    headOf({ name, label, sort, falls = false }) {
        const isSorted = this.sort === name;
        const isFalling = falls !== this.turned;
        const order = isFalling ? "descending" : "ascending";
        const attributes = { scope: "col", "data-column": name };
        if (!sort) return el("th", attributes, label);
        const arrow = el("span", { "aria-hidden": "true" }, isFalling ? " ↓" : " ↑");
        const button = el(
            "button",
            { type: "button", "data-sort": name, click: () => this.sortBy(name) },
            label,
            isSorted ? arrow : "",
        );
        return el("th", { ...attributes, "aria-sort": isSorted ? order : "none" }, button);
    }
}

function read() {
    try {
        const kept = JSON.parse(localStorage.getItem(KEPT) ?? "{}");
        return Array.isArray(kept?.names) ? kept : {};
    } catch {
        return {};
    }
}
