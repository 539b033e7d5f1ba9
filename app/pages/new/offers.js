// Cards of changes that make a job fit, each with the memory before and after, and the buttons that
// end what a warning is about.

import { el, inCode } from "../../shared/dom.js";

// suggestion: as the server describes it; fill: changes settings.
export function offerCard({ title, note, about, bars, changes, is_recommended: isBest }, fill) {
    return el(
        "button",
        { type: "button", class: "rs-suggestion", title: about, click: () => fill(changes) },
        el("b", {}, title, isBest ? el("em", {}, "recommended") : null),
        ...bars.map(beforeAndAfter),
        note ? el("span", {}, note) : null,
    );
}

function beforeAndAfter({ text, before, after, limit }) {
    const line = (share, name) => {
        const fill = el("i", { class: name });
        fill.style.width = `${100 * share}%`;
        return fill;
    };
    const end = el("u");
    end.style.left = `${100 * limit}%`;
    const bars = el("span", { class: "rs-offer-bars", "aria-hidden": "true" });
    bars.append(line(before, "rs-before"), line(after, "rs-after"), end);
    return el("span", { class: "rs-offer" }, el("span", {}, text), bars);
}

// A sentence against a run, with the buttons that answer it. fixes: `label` and `act` of each.
export function reasonRow(text, fixes) {
    const buttons = fixes.map(({ label, act }) =>
        el("button", { type: "button", class: "rs-small", click: act }, label),
    );
    return el("li", {}, ...inCode(text), buttons.length ? el("div", {}, ...buttons) : null);
}
