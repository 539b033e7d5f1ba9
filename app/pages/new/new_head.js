// The title of New, and the example that a newcomer starts with one click.

import { send } from "../../shared/dom.js";

const EXAMPLE = "starter.yaml";
const LOOK = 100; // ms between two looks whether the form is that of the example
const LOOKS = 300;

export class NewHead {
    // fill: changes settings. ready: returns whether these settings are checked and can start.
    constructor(element, fill, ready) {
        this.button = element.querySelector('[data-part="example"]');
        this.fill = fill;
        this.ready = ready;
        this.button.addEventListener("click", () => this.start());
    }

    // A person who has a run needs no example.
    reportRuns(hasRuns) {
        this.button.hidden = hasRuns;
    }

    async start() {
        this.button.disabled = true;
        const answer = await send("/api/presets").catch(() => null);
        const shown = answer?.presets[EXAMPLE]?.shown;
        if (shown) {
            if (!this.ready(shown)) this.fill(shown);
            for (let left = LOOKS; left > 0 && !this.ready(shown); left -= 1)
                await new Promise((resolve) => setTimeout(resolve, LOOK));
            if (this.ready(shown)) document.querySelector("#start").click();
        }
        this.button.disabled = false;
    }
}
