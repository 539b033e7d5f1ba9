// The cards of a run's machine: its memory now, and its ranks.

import { el, field, setText } from "../../shared/dom.js";

// Memory now, against its limits.
export class Meters {
    constructor(root) {
        this.root = root;
    }

    show(meters) {
        this.root.hidden = !meters.length;
        if (this.root.children.length !== meters.length)
            this.root.replaceChildren(...meters.map(emptyMeter));
        for (const [index, meter] of meters.entries()) fillMeter(this.root.children[index], meter);
    }
}

// A row for each rank of a run that has several.
export class RankTable {
    constructor(root) {
        this.root = root;
    }

    show(table) {
        this.root.hidden = !table;
        if (!table) return;
        setText(field(this.root, "ranks-caption"), table.caption);
        const heads = table.heads.map((head) => el("th", { scope: "col" }, head));
        this.root.querySelector("thead").replaceChildren(el("tr", {}, ...heads));
        this.root.querySelector("tbody").replaceChildren(...table.rows.map(rankRow));
    }
}

function rankRow([rank, ...values]) {
    const cells = values.map((text) => el("td", {}, text));
    return el("tr", {}, el("th", { scope: "row" }, rank), ...cells);
}

function emptyMeter() {
    return el(
        "div",
        { class: "rs-meter" },
        el("p", {}, el("strong"), el("span")),
        el(
            "div",
            { class: "rs-meter-bar", role: "meter", "aria-valuemin": 0, "aria-valuemax": 100 },
            el("i"),
            el("b", { title: "Predicted" }),
        ),
        el("p", { class: "rs-hint" }),
    );
}

function fillMeter(node, { name, text, note, tone, share, predicted }) {
    const [head, bar, foot] = node.children;
    const [used, mark] = bar.children;
    node.dataset.tone = tone;
    setText(head.children[0], name);
    setText(head.children[1], text);
    setText(foot, note);
    bar.setAttribute("aria-label", name);
    bar.setAttribute("aria-valuenow", Math.round(100 * share));
    bar.setAttribute("aria-valuetext", `${text}; ${note}`);
    used.style.width = `${100 * share}%`;
    mark.hidden = predicted === null;
    mark.style.left = `${100 * (predicted ?? 0)}%`;
}
