// Above the advanced settings: finds one by its words, shows what differs from the preset, takes
// that back, and keeps the settings as a preset.

import { el, field, send } from "../../shared/dom.js";
import { countChanges } from "./folded.js";

const ROWS = ".rs-rest .rs-settings";
const SETTINGS = ".rs-rest [id^='field-']";
const nameOf = (node) => node.id.slice("field-".length).replaceAll("-", ".");
const isSame = (one, other) => {
    const [a, b] = [one, other].map((value) => String(value ?? "").trim());
    return a === b || (a !== "" && b !== "" && Number(a) === Number(b));
};

const METHODS = ["parts", "lora", "preferences"];
// Whether a setting means something alone with a method of training, or an objective, that is not
// chosen. chosen: those that are.
const isOfOther = (column, chosen) =>
    METHODS.some((each) => !chosen.includes(each) && column.querySelector(`.rs-with-${each}`));
// What is trained and from what, as far as it shows or hides settings.
const chosenIn = (shown) => [
    shown?.["train.method"] ?? "full",
    (shown?.["train.objective"] ?? "sft") === "sft" ? "answers" : "preferences",
];

export class SettingsTools {
    // place: that of Gradio. fill: changes settings.
    constructor(place, fill) {
        this.place = place;
        this.root = place.element;
        this.fill = fill;
        this.form = null;
        this.presets = null; // by file, once they are needed
        this.part("find").addEventListener("input", () => this.filter());
        this.part("differs").addEventListener("change", () => this.filter());
        this.part("take-back").addEventListener("click", () => this.fill(this.changesBack()));
        this.part("save").addEventListener("click", () => this.ask());
        this.part("cancel").addEventListener("click", () => this.part("dialog").close());
        this.part("remove-preset").addEventListener("click", () => this.remove());
        this.root.querySelector("form").addEventListener("submit", (event) => {
            event.preventDefault();
            this.keep();
        });
        this.load();
    }

    part(name) {
        return this.root.querySelector(`[data-part="${name}"]`);
    }

    async load() {
        const answer = await send("/api/presets").catch(() => null);
        if (answer) this.presets = answer.presets;
        this.mark();
    }

    // Takes each form that is checked.
    took(form) {
        this.form = form;
        // Settings of other methods are hidden by form.css, also those that Gradio makes later.
        document.body.dataset.method = chosenIn(form.shown).join(" ");
        // A request that a busy server did not answer in time is repeated.
        if (this.presets) this.mark();
        else this.load();
    }

    get base() {
        return this.presets?.[this.form?.preset]?.shown ?? null;
    }

    // What would give these settings the values of the preset. The name, the data, the model and
    // the length stand above: a person came to change them.
    changesBack() {
        const { base, form } = this;
        if (!base) return {};
        const nodes = [...document.querySelectorAll(SETTINGS)];
        const names = nodes.map(nameOf).filter((name) => !isSame(base[name], form.shown[name]));
        return Object.fromEntries(names.map((name) => [name, base[name]]));
    }

    // Marks the settings that differ from the preset. Each offers the preset's value.
    mark() {
        const back = this.changesBack();
        const count = Object.keys(back).length;
        for (const node of document.querySelectorAll(SETTINGS)) {
            const name = nameOf(node);
            node.classList.toggle("rs-differs", name in back);
            this.offer(node, name, back);
        }
        countChanges();
        const reset = this.part("take-back");
        reset.hidden = !count;
        reset.textContent = `Undo ${count} ${count === 1 ? "change" : "changes"}`;
        field(this.root, "differs").textContent = this.base
            ? `Only what differs from the preset (${count})`
            : "Only what differs from the preset";
        this.part("differs").disabled = !this.base;
        this.part("remove-preset").hidden = !this.presets?.[this.form?.preset]?.is_own;
        this.filter();
    }

    offer(node, name, back) {
        let button = node.querySelector(":scope > .rs-back");
        if (!(name in back)) {
            button?.remove();
            return;
        }
        button ??= el("button", {
            type: "button",
            class: "rs-back rs-link",
            click: () => this.fill({ [name]: this.changesBack()[name] }),
        });
        const value = back[name];
        const caption = value === true ? "on" : value === false ? "off" : value || "empty";
        const text = `Back to ${String(caption).length > 30 ? "the preset’s" : caption}`;
        if (button.textContent !== text) button.textContent = text;
        if (!button.isConnected) node.append(button);
    }

    filter() {
        const words = this.part("find").value.toLowerCase().split(/\s+/).filter(Boolean);
        const only = this.part("differs").checked;
        const chosen = chosenIn(this.form?.shown);
        const isSought = words.length > 0 || only;
        let shown = 0;
        for (const row of document.querySelectorAll(ROWS)) {
            let inRow = 0;
            for (const column of row.children) {
                const text = column.textContent.toLowerCase();
                const fits = words.every((word) => text.includes(word));
                const meant = fits && (!only || column.querySelector(".rs-differs"));
                const isWanted = meant && !isOfOther(column, chosen);
                column.classList.toggle("rs-left-out", !isWanted);
                inRow += Boolean(isWanted);
            }
            row.classList.toggle("rs-left-out", !inRow);
            row.classList.toggle("rs-sought", isSought);
            row.previousElementSibling?.classList.toggle("rs-left-out", !inRow);
            shown += inRow;
        }
        field(this.root, "found").textContent =
            isSought && !shown ? "No setting below has these words." : "";
    }

    // ------------------------------------------------------------ keeping a preset

    ask() {
        field(this.root, "problem").textContent = "";
        this.part("name").value = this.form?.shown.name ?? "";
        this.part("dialog").showModal();
        this.part("name").select();
    }

    async keep() {
        const body = { name: this.part("name").value, shown: this.form.shown };
        try {
            const { file } = await send("/api/presets", body);
            this.part("dialog").close();
            await this.changed(file);
        } catch (error) {
            field(this.root, "problem").textContent = error.message;
        }
    }

    async remove() {
        try {
            await send("/api/presets/remove", { file: this.form.preset });
            await this.changed("");
        } catch (error) {
            field(this.root, "found").textContent = error.message;
        }
    }

    // Gradio owns the list of presets, and fills it anew. file: the one to choose; empty for none.
    async changed(file) {
        await this.load();
        this.place.props.value = file;
        this.place.trigger("submit");
    }
}
