// Several files as one data set: each with its weight, and what adds another one.

import { el } from "../../shared/dom.js";

export class Mix {
    // choose: makes a text the data source of the form.
    constructor(root, choose) {
        this.list = root.querySelector('[data-part="mix"]');
        this.row = root.querySelector('[data-part="add"]');
        this.choose = choose;
        this.sources = null; // null where the form's text is no list that can be read here
        const [box, button] = this.row.children;
        root.querySelector('[data-part="another"]').addEventListener("click", () => {
            this.row.hidden = !this.row.hidden;
            if (!this.row.hidden) box.focus();
        });
        const take = () => {
            if (box.value.trim()) this.add([box.value.trim()]);
            box.value = "";
        };
        button.addEventListener("click", take);
        box.addEventListener("keydown", (event) => {
            if (event.key === "Enter") take();
        });
    }

    // Whether files that arrive now are added to those that are there.
    get isAdding() {
        return !this.row.hidden;
    }

    // Takes the data source of each form that is checked.
    took(text) {
        if (text === this.text) return;
        this.text = text;
        this.sources = sourcesIn(text);
        const isMix = this.sources !== null && text.trim().startsWith("[");
        this.list.replaceChildren(
            ...(isMix ? this.sources.map((_, place) => this.part(place)) : []),
        );
    }

    part(place) {
        const { source, weight = 1 } = this.sources[place];
        const name = source.slice(source.lastIndexOf("/") + 1);
        const box = el("input", {
            type: "number",
            min: 0,
            step: "any",
            value: weight,
            "aria-label": `Weight of ${name}`,
            change: ({ target }) => this.weigh(place, Number(target.value)),
        });
        const remove = () => this.write(this.sources.filter((_, other) => other !== place));
        const button = el("button", { type: "button", "aria-label": `Leave out ${name}` }, "✕");
        button.addEventListener("click", remove);
        return el(
            "li",
            { title: source },
            el("span", { class: "rs-data-files-name" }, name),
            el("label", {}, "weight ", box),
            button,
        );
    }

    weigh(place, weight) {
        const weighed = (each) => (weight === 1 ? without(each) : { ...each, weight });
        this.write(this.sources.map((each, other) => (other === place ? weighed(each) : each)));
    }

    add(paths) {
        const added = paths.map((source) => ({ source }));
        this.row.hidden = true;
        this.write([...(this.sources ?? []), ...added]);
    }

    write(sources) {
        const isPlain = sources.length === 1 && Object.keys(sources[0]).length === 1;
        this.choose(isPlain ? sources[0].source : JSON.stringify(sources));
    }
}

function without({ weight: _weight, ...rest }) {
    return rest;
}

// The data sets that a text of the form names, or null for a list in another notation.
function sourcesIn(text) {
    if (!text.trim()) return [];
    if (!text.trim().startsWith("[")) return [{ source: text.trim() }];
    try {
        const found = JSON.parse(text);
        return found.map((each) => (typeof each === "string" ? { source: each } : each));
    } catch {
        return null;
    }
}
