// The band of phases above a timeline.

import { el } from "../../shared/dom.js";

const LEAST_NAMED = 34; // px of a phase that are wide enough for a word

export class PhaseBand {
    constructor(node) {
        this.node = node;
        this.phases = [];
        this.bands = []; // their nodes
    }

    take(phases) {
        this.phases = phases;
        this.bands = phases.map(phaseBand);
        this.node.replaceChildren(...this.bands);
    }

    // A phase that the ends of the axis cut off has its name in the middle of its visible part.
    place(from, to) {
        const pixels = this.node.clientWidth / 100;
        this.phases.forEach(({ start, end }, index) => {
            const [left, right] = [start, end].map(
                (x) => (100 * (Math.min(Math.max(x, from), to) - from)) / (to - from),
            );
            const { style } = this.bands[index];
            style.left = `${left}%`;
            style.width = `${right - left}%`;
            style.display = right > left ? "" : "none";
            style.color = pixels * (right - left) < LEAST_NAMED ? "transparent" : "";
        });
    }
}

function phaseBand({ label, short, color }) {
    const band = el("span", { role: "listitem", title: label, "aria-label": label }, short);
    band.style.setProperty("--rs-swatch", color);
    return band;
}
