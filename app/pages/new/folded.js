// The folded section of all other settings, which is Gradio's. Its title says the values that
// matter most.

import { el, setText } from "../../shared/dom.js";

const LIST = ".rs-train .secondary-wrap > input";
const TITLE = ".rs-rest > button";

export function isFolded() {
    return !document.querySelector(TITLE)?.classList.contains("open");
}

export function unfold() {
    if (isFolded()) document.querySelector(TITLE)?.click();
}

// Each title folds the settings below it. Gradio makes the titles at a time of its own.
export function foldByTitles() {
    document.addEventListener("click", ({ target }) => {
        const title = target.closest?.(".rs-fold");
        if (!title) return;
        const row = rowOf(title);
        row.classList.toggle("rs-folded");
        showFold(title, row);
    });
}

// Opens the section in which a setting is.
export function unfoldAround(setting) {
    const row = setting?.closest(".rs-folded");
    if (!row) return;
    row.classList.remove("rs-folded");
    showFold(row.previousElementSibling.querySelector(".rs-fold"), row);
}

// Each title says how many of its settings differ from the preset.
export function countChanges() {
    for (const title of document.querySelectorAll(".rs-fold, .rs-most-used")) {
        const count = rowOf(title).querySelectorAll(".rs-differs").length;
        if (!title.querySelector("small")) title.append(" ", el("small"));
        setText(title.querySelector("small"), count ? `${count} changed` : "");
    }
}

const rowOf = (title) => title.closest(".block").nextElementSibling;

function showFold(title, row) {
    title.setAttribute("aria-expanded", String(!row.classList.contains("rs-folded")));
}

// What is typed into a list that shows its value searches the list, in place of that value.
export function searchLists() {
    for (const name of ["focusin", "click"])
        document.addEventListener(name, ({ target }) => {
            if (target.matches?.(LIST)) target.select();
        });
}

// A list that is too narrow for its value says the whole of it in a tip.
export function tipsOfLists() {
    document.addEventListener("pointerover", ({ target }) => {
        if (!target.matches?.(LIST)) return;
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
    const line = `learning rate ${rate} · batch size ${batch} · sequence length ${length}`;
    setText(title.querySelector("small"), line);
}
