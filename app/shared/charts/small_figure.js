// Draws a small standalone figure, as wide as its place and in the colors of the theme.

import { CONFIG, loadPlotly, themed } from "./plots.js";

// Draws into `node`, and again when the width of the node or the theme changes.
export class SmallFigure {
    constructor(node) {
        this.node = node;
        new ResizeObserver(() => {
            if (node.clientWidth !== this.width) this.draw();
        }).observe(node);
        new MutationObserver(() => this.draw()).observe(document.body, {
            attributeFilter: ["class"],
        });
    }

    // caption: a description of the figure.
    show(figure, caption) {
        this.figure = figure;
        this.node.setAttribute("aria-label", caption);
        this.draw();
    }

    async draw() {
        const Plotly = await loadPlotly();
        const { node } = this;
        this.width = node.clientWidth;
        if (!this.width || !this.figure) return;
        const { data, layout } = colored(this.figure);
        const drawn = JSON.stringify([this.width, data, layout, document.body.className]);
        // Drawing a bar takes longer than drawing all the text next to it.
        if (drawn === this.drawn) return;
        this.drawn = drawn;
        await Plotly.react(node, data, themed(layout, node), CONFIG);
    }
}

// Returns a figure with variables of the style sheet replaced by the colors of this theme.
function colored(value) {
    if (typeof value === "string") return value.startsWith("--rs-") ? variable(value) : value;
    if (Array.isArray(value)) return value.map(colored);
    if (!value || typeof value !== "object") return value;
    const pairs = Object.entries(value).map(([name, item]) => [name, colored(item)]);
    return Object.fromEntries(pairs);
}

const variable = (name) => getComputedStyle(document.body).getPropertyValue(name).trim();
