// A small figure that stands alone: as wide as its place, in the colours of the theme.

import { CONFIG, loadPlotly, themed } from "./plots.js";

export class SmallFigure {
    // Drawn into `node`, and again when that has another width or the page another theme.
    constructor(node) {
        this.node = node;
        new ResizeObserver(() => {
            if (node.clientWidth !== this.width) this.draw();
        }).observe(node);
        new MutationObserver(() => this.draw()).observe(document.body, {
            attributeFilter: ["class"],
        });
    }

    // `said` is what it shows, in words.
    show(figure, said) {
        this.figure = figure;
        this.node.setAttribute("aria-label", said);
        this.draw();
    }

    async draw() {
        const Plotly = await loadPlotly();
        const { node } = this;
        this.width = node.clientWidth;
        if (!this.width || !this.figure) return;
        const { data, layout } = coloured(this.figure);
        const drawn = JSON.stringify([this.width, data, layout, document.body.className]);
        if (drawn === this.drawn) return; // a bar takes longer to draw than all the text beside it
        this.drawn = drawn;
        await Plotly.react(node, data, themed(layout, node), CONFIG);
    }
}

// Colours that are named as variables of the style sheet become what they are in this theme.
function coloured(value) {
    if (typeof value === "string") {
        return value.startsWith("--rs-")
            ? getComputedStyle(document.body).getPropertyValue(value).trim()
            : value;
    }
    if (Array.isArray(value)) return value.map(coloured);
    return value && typeof value === "object"
        ? Object.fromEntries(Object.entries(value).map(([name, item]) => [name, coloured(item)]))
        : value;
}
