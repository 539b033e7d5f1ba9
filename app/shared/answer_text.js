// An answer of a model as nodes: a long one is cut, and what nobody can read is folded, each with a
// button that shows all of it.

import { el } from "./dom.js";

const LONGEST = 240;
const MOST_BROKEN = 0.1; // share of broken characters from which an answer is unreadable
const BROKEN = /[\p{Cc}\p{Co}\p{Cn}\ufffd]/u;
const SPACES = "\n\r\t";
export const UNREADABLE = "Unreadable";

// Whether an answer is of broken characters in part, as untrained models write them. A single one
// may be a character that the answer's end has cut.
export function isUnreadable(text) {
    const letters = [...text];
    const broken = letters.filter((letter) => BROKEN.test(letter) && !SPACES.includes(letter));
    const isMore = broken.length > 1 || letters.length < 4;
    return isMore && broken.length >= MOST_BROKEN * letters.length && broken.length > 0;
}

// text: the answer; null where the prompt was not asked, which is another thing than an empty one.
// longest: the number of characters that are shown at first.
export function answerNodes(text, longest = LONGEST) {
    if (text === null || text === undefined) return ["–"];
    if (!text) return ["(nothing)"];
    if (isUnreadable(text)) return folded(text, UNREADABLE, "Show");
    if (text.length <= longest) return [text];
    return folded(text, `${text.slice(0, longest)}…`, "Show all");
}

function folded(text, short, label) {
    const isBroken = short === UNREADABLE;
    const words = el("span", { class: isBroken ? "rs-off" : null }, short);
    const all = el(
        "button",
        {
            type: "button",
            class: "rs-link",
            click: () => {
                words.textContent = text;
                all.remove();
            },
        },
        label,
    );
    return [words, " ", all];
}
