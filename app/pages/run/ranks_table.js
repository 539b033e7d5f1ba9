// The ranks of a run that has several.

import { el, field, setText } from "../../shared/dom.js";

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
