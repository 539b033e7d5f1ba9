// The folded section of all other settings, which is Gradio's. Its title says the values that
// matter most.

import { el, setText } from "../../shared/dom.js";

const TITLE = ".rs-rest > button";

export function isFolded() {
    return !document.querySelector(TITLE)?.classList.contains("open");
}

export function unfold() {
    if (isFolded()) document.querySelector(TITLE)?.click();
}

// A list that is too narrow for its value says the whole of it in a tip.
export function tipsOfLists() {
    document.addEventListener("pointerover", ({ target }) => {
        if (!target.matches?.(".rs-train .secondary-wrap > input")) return;
        target.title = target.scrollWidth > target.clientWidth ? target.value : "";
    });
}

export function summarize(shown) {
    const title = document.querySelector(TITLE);
    if (!title) return;
    if (!title.querySelector("small")) title.firstElementChild.after(el("small"));
    const [rate, batch, length] = [
        shown["train.learning_rate"],
        shown["train.batch_size"],
        shown["data.max_seq_len"],
    ];
    const line = `learning rate ${rate} · batch ${batch} · length ${length}`;
    setText(title.querySelector("small"), line);
}
