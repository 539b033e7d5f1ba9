// The title of New, with the example that a newcomer starts with one click, and the way back to the
// form as it is at first.

import { send } from "../../shared/dom.js";
import { isSame } from "./replaced.js";

const FIRST = "starter.yaml"; // what the form is filled with at first: the example
const LOOK = 100; // ms between two looks whether the form is that of the example
const LOOKS = 300;

export class NewHead {
    // replace(draft, words): fills the form with a draft, and offers what was there before.
    // begins: returns the id of the button that begins these settings once they are checked, or an
    // empty text.
    constructor(element, replace, begins) {
        this.button = element.querySelector('[data-part="example"]');
        this.anew = element.querySelector('[data-part="anew"]');
        this.replace = replace;
        this.begins = begins;
        this.known = null; // the draft that the form has at first, once it is needed
        this.button.addEventListener("click", () => this.start());
        this.anew.addEventListener("click", () => this.startOver());
    }

    // Takes each form that is checked. isOwn: whether it has data or a model of a person's own, or
    // was changed since the page was opened.
    took({ preset, shown }, isOwn) {
        const isOther = this.known ? !isSame(this.known.shown, shown) : isOwn;
        this.anew.hidden = preset === FIRST && !isOther;
    }

    async first() {
        const answer = await send("/api/presets").catch(() => null);
        const preset = answer?.presets[FIRST];
        this.known = preset && { ...preset, preset: FIRST };
        return this.known;
    }

    async startOver() {
        const draft = await this.first();
        if (draft) this.replace(draft, "Started over.");
        this.button.focus(); // the other button goes
    }

    async start() {
        this.button.disabled = true;
        const draft = await this.first();
        if (draft) {
            const { shown } = draft;
            if (!this.begins(shown)) this.replace(draft, "The example replaced your settings.");
            for (let left = LOOKS; left > 0 && !this.begins(shown); left -= 1)
                await new Promise((resolve) => setTimeout(resolve, LOOK));
            const begin = this.begins(shown);
            if (begin) document.getElementById(begin).click();
        }
        this.button.disabled = false;
    }
}
