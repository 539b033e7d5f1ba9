// Draws small figures of bars from elements of the page. They need no plotly.js, take the colors of
// the theme as it changes, and any width.

import { el } from "../dom.js";
import { withoutEntities } from "./hover_text.js";

const TICKS = 6; // of the x axis, at most

export class SmallFigure {
    constructor(node) {
        this.node = node;
        node.classList.add("rs-small-figure");
    }

    // figure: bars as Plotly takes them. caption: a description of the figure.
    show(figure, caption) {
        this.node.setAttribute("aria-label", caption);
        const text = JSON.stringify(figure);
        if (text === this.shown) return;
        this.shown = text;
        this.node.replaceChildren(...histogram(figure));
    }
}

// Bars from the bottom, with an axis of their widths and one of their heights.
function histogram({ data, layout }) {
    const [trace] = data;
    const { x, y, width } = trace;
    const from = x[0] - width[0] / 2;
    const to = Math.max(x.at(-1) + width.at(-1) / 2, ...layout.shapes.map(({ x0 }) => x0));
    const highest = Math.max(...y, 1);
    const share = (value) => (value - from) / (to - from);
    const bars = x.map((center, index) => {
        const wide = (width[index] * (1 - layout.bargap)) / (to - from);
        const bar = placed("i", {
            left: share(center) - wide / 2,
            width: wide,
            height: y[index] / highest,
        });
        return colored(bar, trace.marker.color[index], hoverText(trace, index));
    });
    const ticks = ticksOf(from, to).map((value) =>
        placed("span", { left: share(value) }, value.toLocaleString("en")),
    );
    const heights = [0, highest].map((value) =>
        placed("span", { bottom: value / highest }, value.toLocaleString("en")),
    );
    return [
        el("div", { class: "rs-heights" }, ...heights),
        el("div", { class: "rs-bars" }, ...bars, ...lines(layout, [from, to])),
        el("div", { class: "rs-widths" }, ...ticks),
        el("p", { class: "rs-axis" }, layout.xaxis.title.text),
    ];
}

function lines({ shapes }, [from, to]) {
    return shapes.map(({ x0, line }) => {
        const mark = placed("b", { left: (x0 - from) / (to - from) });
        const style = line.dash ? "dotted" : "solid";
        mark.style.borderLeft = `${line.width}px ${style} var(${line.color})`;
        return mark;
    });
}

// Creates a node at these shares of its place.
function placed(tag, shares, text) {
    const node = el(tag, {}, text);
    for (const [side, share] of Object.entries(shares)) node.style[side] = `${100 * share}%`;
    return node;
}

function colored(node, color, title) {
    node.style.background = color.startsWith("--rs-") ? `var(${color})` : color;
    node.title = title;
    return node;
}

function hoverText(trace, index) {
    const values = { customdata: trace.customdata?.[index], y: trace.y[index] };
    const text = trace.hovertemplate.replace("<extra></extra>", "");
    return withoutEntities(text.replace(/%\{(\w+)\}/g, (_, name) => values[name]));
}

// Round numbers between both ends: 1, 2 or 5 times a power of ten apart.
function ticksOf(from, to) {
    const least = Math.max(1, (to - from) / TICKS);
    const power = 10 ** Math.floor(Math.log10(least));
    const step = [1, 2, 5, 10].map((factor) => factor * power).find((each) => each >= least);
    const ticks = [];
    for (let at = Math.ceil(from / step) * step; at <= to; at += step) ticks.push(at);
    return ticks;
}
