// Shows the answers to a run's sample prompts in Learning: those before the first step next to
// those at a chosen step.

import { answerNodes } from "../../shared/answer_text.js";
import { el, field } from "../../shared/dom.js";

export class SamplePrompts {
    constructor(card) {
        this.card = card;
        this.value = { steps: [], rows: [] };
        this.follows = true; // the newest step is shown until another one is chosen
        this.heading = card.querySelector("h3");
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

    // Brings the answers into sight: they are below the curves.
    lead() {
        this.heading.focus({ preventScroll: true });
        this.heading.scrollIntoView({ block: "start" });
    }

    draw() {
        const { steps, rows } = this.value;
        const at = Number(this.at.value);
        const isOnly = steps.length === 1;
        const chosen = title(steps[at]);
        field(this.card, "first").textContent = title(steps[0]);
        field(this.card, "chosen").textContent = chosen;
        this.at.setAttribute("aria-valuetext", chosen);
        field(this.card, "caption").textContent = isOnly
            ? chosen
            : `${chosen}, ${at + 1} of ${steps.length}`;
        this.at.disabled = isOnly;
        this.card.querySelector("table").classList.toggle("rs-only-first", isOnly);
        const body = this.card.querySelector("tbody");
        const titles = [title(steps[0]), chosen];
        body.replaceChildren(...rows.map((row) => answersRow(row, at, titles)));
    }
}

function answersRow({ prompt, expected, answers }, at, [first, chosen]) {
    const latest = el("td", { "data-label": chosen }, ...answerNodes(answers[at]));
    if (expected !== null && answers[at] !== null) {
        latest.dataset.right = answers[at] === expected;
        if (answers[at] !== expected) latest.append(el("small", {}, `expected: ${expected}`));
    }
    return el(
        "tr",
        {},
        el("td", { class: "rs-asked" }, prompt),
        el("td", { class: "rs-off", "data-label": first }, ...answerNodes(answers[0])),
        latest,
    );
}

function title(step) {
    return step === 0 ? "Before training" : `Step ${step.toLocaleString("en")}`;
}
