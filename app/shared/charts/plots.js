// Draws with Plotly in place, and links charts that share their x axis: a zoom or a pointer in one
// of them applies to all.

import { isShown } from "../dom.js";
import { inHover } from "../numbers.js";
import { drawLater } from "./drawing.js";
import { plotlyFor } from "./load_plotly.js";
import { logTicks } from "./log_ticks.js";
import { ends, patience } from "./patience.js";

export const CONFIG = {
    responsive: false,
    displaylogo: false,
    showSendToCloud: false,
    displayModeBar: false,
    doubleClick: false,
};
const TEXTS = "%{text}"; // the hover label of curves whose texts are written here
const NARROW = 480; // px of a chart below which its legend is smaller
const BESIDE = 200; // px outside the visible area in which charts are already drawn

// Returns the layout of a figure from the server, in the colors of the page and the size of its
// place.
export function themed(layout, node) {
    const style = getComputedStyle(document.body);
    const color = (name) => style.getPropertyValue(`--rs-${name}`).trim();
    const drawn = {
        ...layout,
        width: node.clientWidth,
        height: node.clientHeight,
        paper_bgcolor: "rgba(0,0,0,0)",
        plot_bgcolor: "rgba(0,0,0,0)",
        font: { family: getComputedStyle(node).fontFamily, size: 12, color: color("text") },
        hoverlabel: {
            bgcolor: color("card"),
            bordercolor: color("field-line"),
            font: { color: color("text") },
        },
    };
    const words = { font: { color: color("muted") } };
    drawn.annotations = layout.annotations?.map((each) => ({ ...words, ...each }));
    for (const name of Object.keys(layout).filter((key) => /^[xy]axis/.test(key))) {
        drawn[name] = themedAxis(layout[name], color("line"), color("muted"));
        // Plotly would measure every label; next to a chart, none can reach past its edge.
        if (name.startsWith("y")) drawn[name].ticklabeloverflow = "allow";
    }
    return drawn;
}

function themedAxis(axis, line, muted) {
    const font = { color: muted, size: 11 };
    return {
        gridcolor: line,
        linecolor: line,
        spikecolor: muted,
        ...axis,
        tickfont: font,
        title: { ...axis.title, font: { ...font } },
    };
}

// Marks the drawing of a chart for the browser's performance panel. Only the latest mark is kept: a
// page that stays open for a week draws a million times.
export function markDrawn(name) {
    performance.clearMarks(`drawn ${name}`);
    performance.mark(`drawn ${name}`);
}

// Whether a node is visible, or close to the visible area.
export function onScreen(node) {
    if (!isShown(node) || !node.clientWidth) return false;
    const box = node.getBoundingClientRect();
    return box.bottom > -BESIDE && box.top < window.innerHeight + BESIDE;
}

export class LinkedCharts {
    // nodes: the node of each chart, by name.
    // maps: the names of charts without curves, whose values a line through x cannot show.
    // adapt(layout, figure): makes the final changes to a layout.
    // zoomed(isZoomed): is called with whether part of the charts is hidden by a zoom.
    // clicked(x): is called when a point is clicked.
    constructor(
        nodes,
        { maps = [], adapt = () => {}, zoomed = () => {}, clicked = () => {} } = {},
    ) {
        this.maps = maps;
        this.adapt = adapt;
        this.zoomed = zoomed;
        this.clicked = clicked;
        this.range = null; // the visible range of x, null for the whole axis
        this.hasOwnZoom = false; // whether the y axis of a chart was zoomed
        this.zooms = 0; // counted, so that Plotly keeps a zoom until the next one
        this.resets = 0;
        this.pointed = null; // the chart under the pointer, and its x
        this.plots = new Map(
            Object.entries(nodes).map(([name, node]) => [name, this.plot(name, node)]),
        );
        this.watch();
    }

    // Redraws for a new size or theme, and when a chart becomes visible.
    watch() {
        const byNode = new Map([...this.plots.values()].map((plot) => [plot.node, plot]));
        const sizes = new ResizeObserver((entries) => {
            for (const { target } of entries) byNode.get(target).dirty = true;
            this.schedule();
        });
        for (const node of byNode.keys()) sizes.observe(node);
        new MutationObserver(() => this.redrawAll()).observe(document.body, {
            attributeFilter: ["class"],
        });
        for (const event of ["scroll", "resize"])
            window.addEventListener(event, () => this.schedule(), { passive: true });
    }

    plot(name, node) {
        const plot = { name, node, figure: null, text: "", dirty: false, drawn: null, timer: null };
        plot.draw = () => this.draw(plot);
        plot.follow = () => this.follow(plot);
        return plot;
    }

    node(name) {
        return this.plots.get(name).node;
    }

    // Schedules the drawing of a figure: soon, unless it is already drawn, or later if nobody could
    // see the difference.
    set(name, figure) {
        const plot = this.plots.get(name);
        const text = JSON.stringify([figure.data, figure.layout]);
        if (plot.figure && text === plot.text) return;
        const isDrawn = plot.figure && plot.drawn && !plot.dirty;
        const waits = isDrawn ? patience(plot.drawn, figure, ...seen(plot.node)) : 0;
        plot.figure = figure;
        plot.text = text;
        if (!waits) this.spoil(plot);
        else plot.timer ??= setTimeout(() => this.spoil(plot), waits);
    }

    clear() {
        this.zoom(null);
        for (const plot of this.plots.values()) plot.figure = null;
    }

    spoil(plot) {
        plot.dirty = true;
        this.schedule();
    }

    redrawAll() {
        for (const plot of this.plots.values()) plot.dirty = true;
        this.schedule();
    }

    // A chart outside the visible area is drawn when it is scrolled into view.
    schedule() {
        for (const plot of this.plots.values())
            if (plot.dirty && plot.figure && onScreen(plot.node)) drawLater(plot.draw);
    }

    async draw(plot) {
        const { node } = plot;
        const Plotly = await plotlyFor(node, () => this.schedule());
        const { figure } = plot;
        if (!Plotly || !plot.dirty || !figure || !onScreen(node)) return;
        plot.dirty = false;
        clearTimeout(plot.timer);
        plot.timer = null;
        await Plotly.react(node, figure.data.map(withTexts), this.layout(figure, node), CONFIG);
        if (!plot.drawn) this.link(plot);
        plot.drawn = figure;
        markDrawn(plot.name);
    }

    layout(figure, node) {
        const drawn = themed(figure.layout, node);
        if (drawn.width < NARROW) drawn.legend = { ...drawn.legend, font: { size: 10 } };
        for (const name of Object.keys(drawn).filter((key) => key.startsWith("yaxis"))) {
            // Its own zoom is kept until the zoom is reset.
            drawn[name].uirevision = `reset ${this.resets}`;
        }
        if (this.range) drawn.xaxis.range = [...this.range];
        drawn.xaxis.autorange = !this.range;
        drawn.xaxis.uirevision = `zoom ${this.zooms}`;
        this.adapt(drawn, figure);
        for (const name of logAxes(drawn)) {
            const [low, high] = this.endsOf(name, figure, node);
            const [from, to] = drawn[name].domain ?? [0, 1];
            const { t: top = 0, b: bottom = 0 } = drawn.margin ?? {};
            const length = (to - from) * (drawn.height - top - bottom);
            if (low > 0) Object.assign(drawn[name], logTicks(low, high, length));
        }
        return drawn;
    }

    // The ends of a logarithmic axis: of its own zoom, or of the values of its curves.
    endsOf(name, { data }, node) {
        const shown = node._fullLayout?.[name];
        if (this.hasOwnZoom && shown?.type === "log" && !shown.autorange)
            return shown.range.map((power) => 10 ** power);
        const axis = name.replace("axis", "");
        const values = data
            .filter(({ yaxis = "y" }) => yaxis === axis)
            .flatMap(({ y }) => y.filter((value) => value > 0));
        return ends(values);
    }

    // Links Plotly's own events, which a node has only after it was first drawn.
    link(plot) {
        const { node } = plot;
        const isMap = this.maps.includes(plot.name);
        node.on("plotly_relayout", (change) => this.takeZoom(plot, change));
        node.on("plotly_doubleclick", () => this.zoom(null));
        // Only a real pointer has an `Event`: the linked charts fire `plotly_hover` too.
        node.on("plotly_hover", ({ event, xvals, points }) => {
            if (event instanceof Event) this.point(plot, isMap ? place(points[0]) : xvals?.[0]);
        });
        node.on("plotly_unhover", () => {
            if (this.pointed?.plot === plot) this.point(plot, undefined);
        });
        node.on("plotly_click", ({ points }) => {
            if (points?.length) this.clicked(points[0].x);
        });
    }

    // Applies a person's zoom in one chart.
    takeZoom(plot, change) {
        if (Object.keys(change).some((key) => key.startsWith("yaxis"))) {
            this.hasOwnZoom = true;
            this.zoomed(true);
            this.spoil(plot); // a logarithmic axis has other ticks
        }
        const from = change["xaxis.range[0]"];
        if (from !== undefined) this.zoom([from, change["xaxis.range[1]"]]);
        else if (change["xaxis.range"]) this.zoom(change["xaxis.range"]);
    }

    // Shows a range of x in all charts, or everything for null.
    zoom(range) {
        if (!range && !this.range && !this.hasOwnZoom) return;
        this.range = range;
        this.zooms += 1;
        if (!range) {
            this.resets += 1;
            this.hasOwnZoom = false;
        }
        this.zoomed(Boolean(range));
        this.redrawAll();
    }

    point(plot, x) {
        this.pointed = { plot, x };
        for (const other of this.plots.values()) {
            const follows = other !== plot && other.drawn && !this.maps.includes(other.name);
            if (follows && onScreen(other.node)) drawLater(other.follow);
        }
    }

    follow({ node }) {
        const { x } = this.pointed;
        if (x === undefined) window.Plotly.Fx.unhover(node);
        else window.Plotly.Fx.hover(node, { xval: x }, Object.keys(node._fullLayout._plots));
    }
}

const logAxes = (layout) =>
    Object.keys(layout).filter((name) => name.startsWith("yaxis") && layout[name].type === "log");

// A trace with the texts of its hover labels, in the format of all other numbers of the page.
function withTexts(trace) {
    if (trace.hovertemplate !== TEXTS) return trace;
    return { ...trace, text: trace.y.map((value) => (value === null ? "" : inHover(value))) };
}

// The ends of a drawn x axis as numbers, and its width in pixels.
function seen(node) {
    const { xaxis } = node._fullLayout;
    return [xaxis.range.map((end) => xaxis.d2c(end)), xaxis._length];
}

// The position of a point on its x axis as a number: on a time axis, its x is text.
function place({ x, xaxis }) {
    return xaxis.type === "date" ? xaxis.d2c(x) : x;
}
