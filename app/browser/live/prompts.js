// The answers to a run's sample prompts in the Live tab: those before the first step beside those
// at a step of choice.

import { el, field } from "../common/dom.js";

export class SamplePrompts {
    constructor(card) {
        this.card = card;
        this.value = { steps: [], rows: [] };
        this.follows = true;
        this.at = card.querySelector("input");
        this.at.addEventListener("input", () => {
            this.follows = Number(this.at.value) === this.value.steps.length - 1;
            this.draw();
        });
    }

    show(value) {
        this.value = value;
        const last = value.steps.length - 1;
        this.card.hidden = last < 0;
        if (last < 0) return;
        this.at.max = last;
        if (this.follows || Number(this.at.value) > last) this.at.value = last;
        this.draw();
    }

    draw() {
        const { steps, rows } = this.value;
        const at = Number(this.at.value);
        const only = steps.length === 1;
        field(this.card, "first").textContent = title(steps[0]);
        field(this.card, "chosen").textContent = title(steps[at]);
        this.at.setAttribute("aria-valuetext", title(steps[at]));
        field(this.card, "said").textContent = only
            ? title(steps[0])
            : `${title(steps[at])}, ${at + 1} of ${steps.length}`;
        this.at.disabled = only;
        this.card.querySelector("table").classList.toggle("rs-only-first", only);
        this.card
            .querySelector("tbody")
            .replaceChildren(
                ...rows.map(({ prompt, answers }) =>
                    el(
                        "tr",
                        {},
                        el("td", {}, prompt),
                        el("td", { class: "rs-off" }, answers[0] || "(nothing)"),
                        el("td", {}, answers[at] || "(nothing)"),
                    ),
                ),
            );
    }
}

function title(step) {
    return step === 0 ? "Before training" : `Step ${step.toLocaleString("en")}`;
}
