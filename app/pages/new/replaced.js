// A preset takes the place of all settings at once. What a person had chosen before can be taken
// back with one click.

import { el, field, send, setText } from "../../shared/dom.js";

const BEGINS = "#start, #add-to-queue";

export class Replaced {
    // place: that of Gradio with what a preset says of itself.
    constructor(place) {
        this.place = place;
        this.before = null; // the draft that a preset is about to replace
        const undo = el("button", { type: "button", class: "rs-link" }, "Undo");
        undo.addEventListener("click", () => this.undo());
        this.root = place.element.querySelector('[data-part="replaced"]');
        this.root.append(" ", undo);
        document.addEventListener("click", ({ target }) => {
            if (target.closest?.(BEGINS)) this.root.hidden = true;
        });
    }

    // A preset was chosen, whose settings are to come. form: as it was checked last.
    choosing(form) {
        this.root.hidden = true;
        this.before = form && { ...form, about: this.place.props.value?.about ?? "" };
    }

    // The form has the settings of the preset.
    async filled({ shown }) {
        const { before } = this;
        this.before = null;
        if (!before || isSame(before.shown, shown)) return;
        const answer = await send("/api/presets").catch(() => null);
        const base = answer?.presets[before.preset]?.shown;
        if (base && isSame(base, before.shown)) return; // nothing of a person's own
        this.draft = before;
        const name = document.querySelector("#preset input").value;
        setText(field(this.root, "replaced"), `Preset ${name} replaced your settings.`);
        this.root.hidden = false;
    }

    undo() {
        window.ramstreamUndone = this.draft;
        this.root.hidden = true;
        this.place.trigger("input");
        document.querySelector("#field-name :is(input, textarea)").focus();
    }
}

function isSame(one, other) {
    return Object.keys(one).every((name) => String(one[name] ?? "") === String(other[name] ?? ""));
}
