// A list below the box of the model: the bundled models that contain all typed words, in any order.
// Those with a word that begins so come first: "7B" means Qwen2.5 7B before Gemma 2 27B.

import { el } from "../../shared/dom.js";

export const MODEL = '#field-model-source [data-testid="textbox"]';
const HUB_NAME = /^[\w.-]+\/[\w.-]+$/;

// Whether the box for the model holds the name of a bundled one.
export function isKnown(models, box) {
    const typed = box.value.trim().toLowerCase();
    return box.matches(MODEL) && models.some(([id]) => id.toLowerCase() === typed);
}

export class Suggestions {
    // models: pairs of a hub id and a title.
    constructor(models) {
        this.models = models;
        this.chosen = -1;
        this.list = el("ul", {
            class: "rs-suggestions",
            id: "rs-models",
            role: "listbox",
            "aria-label": "Known models",
        });
        this.list.hidden = true;
        // The document listens, since Gradio may create the box later, or replace it.
        const onBox = (name, act, options) => {
            const listener = (event) => {
                if (event.target.matches?.(MODEL)) act(event);
            };
            document.addEventListener(name, listener, options);
        };
        onBox("input", ({ target, isTrusted }) => {
            if (isTrusted) this.open(target);
        });
        onBox("focusout", () => this.close());
        onBox("keydown", (event) => this.key(event), { capture: true });
        // The box must keep the focus: when it loses it, its unfinished text is checked.
        this.list.addEventListener("mousedown", (event) => event.preventDefault());
        this.list.addEventListener("click", ({ target }) =>
            this.take(target.closest('[role="option"]')?.dataset.model),
        );
    }

    open(box) {
        const found = this.found(box.value);
        if (!found.length || isKnown(this.models, box)) {
            this.close();
            return;
        }
        this.box = box;
        this.list.replaceChildren(...found.map(suggestion));
        if (!this.list.isConnected) box.closest("#field-model-source").append(this.list);
        const combobox = {
            role: "combobox",
            autocomplete: "off",
            "aria-autocomplete": "list",
            "aria-controls": this.list.id,
            "aria-expanded": "true",
        };
        for (const [name, value] of Object.entries(combobox)) box.setAttribute(name, value);
        this.list.hidden = false;
        this.list.scrollTop = 0;
        this.choose(-1);
    }

    found(typed) {
        const words = typed.toLowerCase().split(/\s+/).filter(Boolean);
        if (!words.length) return [];
        const textOf = ([id, title]) => `${id} ${title}`.toLowerCase();
        const found = this.models.filter((model) =>
            words.every((word) => textOf(model).includes(word)),
        );
        const isWhole = (model) => words.every((word) => begins(textOf(model), word));
        return found.toSorted((one, other) => isWhole(other) - isWhole(one));
    }

    close() {
        this.list.hidden = true;
        this.box?.setAttribute("aria-expanded", "false");
        this.box?.removeAttribute("aria-activedescendant");
    }

    choose(index) {
        this.chosen = index;
        const nodes = [...this.list.children];
        for (const [place, each] of nodes.entries())
            each.setAttribute("aria-selected", String(place === index));
        const node = nodes[index];
        if (node) this.box.setAttribute("aria-activedescendant", node.id);
        else this.box.removeAttribute("aria-activedescendant");
        node?.scrollIntoView({ block: "nearest" });
    }

    key(event) {
        if (this.list.hidden) return;
        const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
        if (step) this.choose(this.next(step));
        else if (event.key === "Enter" && this.entered())
            this.take(this.list.children[this.entered() - 1].dataset.model);
        else if (event.key === "Escape") this.close();
        else return;
        event.preventDefault();
        event.stopPropagation();
    }

    // The place, from 1, of the suggestion that Enter takes; 0 for none. Words that are no name of
    // a model, such as "qwen 7b", take the first one.
    entered() {
        if (this.chosen >= 0) return this.chosen + 1;
        const typed = this.box.value.trim();
        return HUB_NAME.test(typed) || /^[./~]/.test(typed) ? 0 : 1;
    }

    // The next or the previous suggestion; the list wraps around.
    next(step) {
        const count = this.list.children.length;
        if (this.chosen < 0 && step < 0) return count - 1;
        return (this.chosen + step + count) % count;
    }

    take(model) {
        if (!model) return;
        this.close();
        this.box.value = model;
        this.box.dispatchEvent(
            new InputEvent("input", { bubbles: true, inputType: "insertReplacementText" }),
        );
    }
}

// Whether a word of the text begins so. A number such as 1.7 is one word.
function begins(text, typed) {
    const before = text.split(typed).slice(0, -1);
    return before.some((part) => !/[a-z0-9.]$/.test(part));
}

function suggestion([id, title], index) {
    const attributes = { role: "option", id: `rs-model-${index}`, "data-model": id };
    return el("li", attributes, el("b", {}, title), el("span", {}, id));
}
