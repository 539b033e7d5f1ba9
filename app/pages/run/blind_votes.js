// Two answers to one prompt, of which nobody is told which model gave them. A person votes for one
// of them, and gets the next prompt.

import { answerNodes } from "../../shared/answer_text.js";
import { field, setText } from "../../shared/dom.js";

export class BlindVotes {
    // act(path, body) sends a vote to the server.
    constructor(card, act) {
        this.card = card;
        this.act = act;
        for (const button of card.querySelectorAll("button[data-place]"))
            button.addEventListener("click", () =>
                this.send("vote", { prompt: this.row.number, place: button.dataset.place }),
            );
        card.querySelector('[data-part="reveal"]').addEventListener("click", () =>
            this.send("reveal", {}),
        );
    }

    // answers: those of which the sides are hidden, or null.
    show(answers) {
        const open = answers?.rows.filter((row) => row.is_open) ?? [];
        this.answers = answers;
        [this.row] = open;
        this.card.hidden = !answers;
        if (!answers) return;
        const { card, row } = this;
        for (const button of card.querySelectorAll("button[data-place]")) button.hidden = !row;
        card.querySelector(".rs-blind-pair").hidden = !row;
        const done = answers.rows.length - open.length;
        const count = `Prompt ${done + 1} of ${answers.rows.length}`;
        setText(field(card, "blind-count"), row ? count : "All answers are the same.");
        setText(field(card, "blind-prompt"), row?.prompt ?? "");
        setText(field(card, "blind-expected"), row ? `expected: ${row.expected}` : "");
        field(card, "blind-left").replaceChildren(...answerNodes(row?.left ?? ""));
        field(card, "blind-right").replaceChildren(...answerNodes(row?.right ?? ""));
    }

    async send(path, body) {
        if (this.isSending) return;
        this.isSending = true;
        const problem = field(this.card, "blind-problem");
        setText(problem, "");
        try {
            await this.act(path, { evaluation: this.answers.id, ...body });
        } catch (error) {
            setText(problem, error.message);
        }
        this.isSending = false;
    }
}
