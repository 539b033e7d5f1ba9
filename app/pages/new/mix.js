// The files of the data as a list: an uploaded one, or those of a mix, each with its weight; and
// what adds another one.

import { inBytes } from "../../shared/bytes.js";
import { el } from "../../shared/dom.js";

const IS_UPLOAD = /\/\.uploads\/[0-9a-f]+\/[^/]+$/;

export class Mix {
    // choose: makes a text the data source of the form.
    constructor(root, choose) {
        this.list = root.querySelector('[data-part="mix"]');
        this.row = root.querySelector('[data-part="add"]');
        this.choose = choose;
        this.uploads = new Map(); // by path, their names and sizes as far as they are known
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
        this.show();
    }

    // Takes what is known of uploads: `path`, `name` and `bytes` of each.
    know(uploads) {
        for (const upload of uploads) this.uploads.set(upload.path, upload);
        this.show();
    }

    // The list stands for the box, which has a mix in a notation for files, and an upload by the
    // path that the server gave to it.
    show() {
        const { sources, text = "" } = this;
        const isListed = sources !== null && (text.trim().startsWith("[") || IS_UPLOAD.test(text));
        document.body.classList.toggle("rs-listed", isListed);
        this.list.replaceChildren(...(isListed ? sources.map((_, at) => this.part(at)) : []));
    }

    part(place) {
        const { source, weight = 1 } = this.sources[place];
        const upload = this.uploads.get(source);
        const name = upload?.name ?? source.slice(source.lastIndexOf("/") + 1);
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
            upload ? el("small", {}, inBytes(upload.bytes)) : null,
            this.sources.length > 1 || weight !== 1 ? el("label", {}, "weight ", box) : null,
            button,
        );
    }

    weigh(place, weight) {
        if (!(weight > 0)) {
            this.show(); // as before
            return;
        }
        const weighed = (each) => (weight === 1 ? without(each) : { ...each, weight });
        this.write(this.sources.map((each, other) => (other === place ? weighed(each) : each)));
    }

    add(paths) {
        const added = paths.map((source) => ({ source }));
        this.row.hidden = true;
        this.write([...(this.sources ?? []), ...added]);
    }

    write(sources) {
        if (!sources.length) {
            this.choose("");
            return;
        }
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
