// A preset, the example and a start from the beginning take the place of all settings at once. What
// a person had chosen before can be taken back with one click.

import { el, field, send, setText } from "../../shared/dom.js";

const BEGINS = "#start, #add-to-queue";

export class Replaced {
    // place: that of Gradio with what a preset says of itself.
    constructor(place) {
        this.place = place;
        this.before = null; // the draft that is about to be replaced
        this.words = ""; // what is said of it then, unless a preset was chosen
        const undo = el("button", { type: "button", class: "rs-link" }, "Undo");
        undo.addEventListener("click", () => this.undo());
        this.root = place.element.querySelector('[data-part="replaced"]');
        this.root.append(" ", undo);
        // The example begins by itself; what it replaced can be taken back later.
        document.addEventListener("click", ({ target, isTrusted }) => {
            if (isTrusted && target.closest?.(BEGINS)) this.root.hidden = true;
        });
    }

    // Other settings are to come. form: as it was checked last.
    choosing(form, words = "") {
        this.root.hidden = true;
        this.before = form && { ...form, about: this.place.props.value?.about ?? "" };
        this.words = words;
    }

    // Fills the form with a draft.
    replace(draft, form, words) {
        this.choosing(form, words);
        this.give(draft);
    }

    give(draft) {
        window.ramstreamDraft = draft;
        this.place.trigger("input");
    }

    // The form has them.
    async filled({ shown }) {
        const { before } = this;
        this.before = null;
        if (!before || isSame(before.shown, shown)) return;
        const answer = await send("/api/presets").catch(() => null);
        const base = answer?.presets[before.preset]?.shown;
        if (base && isSame(base, before.shown)) return; // nothing of a person's own
        this.draft = before;
        const name = document.querySelector("#preset input").value;
        const words = this.words || `Preset ${name} replaced your settings.`;
        setText(field(this.root, "replaced"), words);
        this.root.hidden = false;
    }

    undo() {
        this.root.hidden = true;
        this.give(this.draft);
        document.querySelector("#field-name :is(input, textarea)").focus();
    }
}

// Whether two forms have the same settings.
export function isSame(one, other) {
    return Object.keys(one).every((name) => String(one[name] ?? "") === String(other[name] ?? ""));
}
