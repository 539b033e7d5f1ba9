// The choice of the rank whose lanes a timeline shows: one, or all. Most runs have one rank, and
// then there is no choice.

import { el } from "../../shared/dom.js";

const FIRST = "0";

export class RankChoice {
    // node: the list to choose from; onChoice() is called whenever another rank is chosen.
    constructor(node, onChoice) {
        this.node = node;
        this.count = 0;
        this.chosen = FIRST; // the number of a rank, or "all"
        node.addEventListener("change", () => {
            this.chosen = node.value;
            onChoice();
        });
    }

    clear() {
        this.chosen = FIRST;
        this.offer(1);
    }

    // Offers the ranks of the step that is shown.
    offer(count) {
        if (count === this.count) return;
        this.count = count;
        this.node.hidden = count < 2;
        const ranks = Array.from({ length: count }, (_, rank) =>
            el("option", { value: rank }, `Rank ${rank}`),
        );
        this.node.replaceChildren(...ranks, el("option", { value: "all" }, "All ranks"));
        if (this.chosen !== "all" && Number(this.chosen) >= count) this.chosen = FIRST;
        this.node.value = this.chosen;
    }
}
