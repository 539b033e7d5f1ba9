// What the model answers, before training and now.

import { addressOf } from "../../shared/address.js";
import { answerNodes } from "../../shared/answer_text.js";
import { el, field, setText } from "../../shared/dom.js";

const LONGEST = 90; // characters of an answer that are shown at first

export class Answers {
    constructor(root) {
        this.root = root;
    }

    // about: a tooltip of the caption.
    show({ title, caption, about, began_with: beganWith, rows, is_absent }, run) {
        const { root } = this;
        root.hidden = is_absent;
        const over = root.querySelector('[data-part="answers-over-time"]');
        over.hidden = !rows.length;
        over.href = addressOf({ page: "run", view: "learning", run, step: null });
        setText(field(root, "answers-title"), title);
        const under = field(root, "answers-caption");
        setText(under, caption.replaceAll(" %", "\u00a0%"));
        under.title = about;
        setText(field(root, "began-with"), beganWith);
        const label = title.startsWith("Before") ? "After" : "Now";
        setText(field(root, "answers-now"), label);
        const shown = rows.map((row) => answerRow(row, label));
        root.querySelector("tbody").replaceChildren(...shown);
    }
}

function answerRow({ prompt, expected, rejected, before, now, is_right: isRight }, label) {
    const asked = el("td", { class: "rs-asked" }, prompt);
    if (rejected) asked.append(el("small", {}, `rejected: ${rejected}`));
    const latest = el("td", { "data-label": label }, ...answerNodes(now, LONGEST));
    latest.dataset.right = isRight ?? "";
    if (isRight === false) latest.append(el("small", {}, `expected: ${expected}`));
    const earlier = el("td", { "data-label": "Before training" }, ...answerNodes(before, LONGEST));
    return el("tr", {}, asked, earlier, latest);
}
