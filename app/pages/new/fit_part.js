// One part of the pool of memory: GPU memory, RAM or disk. A bar shows what the part holds and
// which units live there; below it stand what that costs a step, and every item with its color.

import { el } from "../../shared/dom.js";

export class FitPart {
    constructor({ name, label }) {
        this.pool = el("span", { class: "rs-pool-bar", role: "img", "data-pool": name });
        this.cost = el("span", { class: "rs-pool-caption", "data-caption": "cost" });
        this.rows = el("tbody");
        this.note = el("p", { class: "rs-hint" });
        this.root = el(
            "section",
            { class: "rs-fit", "aria-label": label },
            el("h4", {}, label),
            this.pool,
            this.cost,
            this.note,
            el("table", {}, this.rows),
        );
    }

    show(bar) {
        this.note.textContent = bar.note;
        this.rows.replaceChildren(...bar.items.map(itemRow));
        this.pool.ariaLabel = bar.held;
        this.pool.replaceChildren(...bar.pool.segments.map(segment), ...limit(bar.pool));
        setNote(this.cost, bar.cost);
    }
}

// The sentence before stays until the new one is known, so that nothing jumps.
function setNote(place, text) {
    place.toggleAttribute("data-old", text === null);
    if (text !== null) place.textContent = text;
}

function segment({ held, share, label, text }) {
    const node = el("i", { "data-held": held, title: text }, label && el("span", {}, label));
    node.style.flexGrow = share;
    return node;
}

// The end of the memory that there is, where more is needed.
function limit({ limit }) {
    if (limit === null) return [];
    const node = el("b");
    node.style.left = `${100 * limit}%`;
    return [node];
}

function itemRow({ name, text, note, held }) {
    const key = el("i", { "data-held": held });
    const small = note ? el("small", {}, note) : null;
    return el("tr", {}, el("th", { scope: "row" }, key, name, small), el("td", {}, text));
}

// A part in one line: how much of it is needed, and how much is free.
export function needRow({ name, short, text, share, tone }) {
    const fill = el("i");
    fill.style.width = `${100 * share}%`;
    return el(
        "p",
        { "data-need": name, "data-tone": tone },
        el("span", {}, short),
        el("span", { class: "rs-need-bar", "aria-hidden": "true" }, fill),
        el("span", {}, text),
    );
}
