// Paints the bars of a timeline. They arrive as traces of a Plotly figure, whose axes Plotly draws.
// The bars themselves are painted on a canvas behind the axes: as elements of the page, a thousand
// of them took longer to draw than all the curves together.
//
// A bar is identified by its lane, which is a trace, and its index in the lane.

import { withoutEntities } from "../../shared/charts/hover_text.js";
import { el } from "../../shared/dom.js";

const DIGIT = 8; // pixels that a digit of a block's number takes at most
export const MARGIN = { left: 104, right: 10, top: 2, bottom: 38 }; // as in the figure's layout
const NEAR = 3; // px around a bar in which the pointer still selects it
const LEAST = 0.5; // minimum width of a bar in px
const OUTLINE = 0.75; // px of the line around a predicted bar
const CHOSEN = 2; // px of the line around the chosen one
// The y axis of the figure extends from -BELOW to half a row above its last row, which makes it
// AROUND longer than its rows.
const BELOW = 0.52;
const AROUND = 0.02;

// Black or white, whichever is read better on a bar of this color (#rrggbb), which is drawn over
// the card with this opacity.
function inkOn(color, opacity) {
    const below = document.body.classList.contains("dark") ? 0 : 255;
    const [red, green, blue] = [1, 3, 5].map((at) => {
        const own = Number.parseInt(color.slice(at, at + 2), 16);
        const share = (own * opacity + below * (1 - opacity)) / 255;
        return share <= 0.04045 ? share / 12.92 : ((share + 0.055) / 1.055) ** 2.4;
    });
    const light = 0.2126 * red + 0.7152 * green + 0.0722 * blue;
    return (light + 0.05) ** 2 > 1.05 * 0.05 ? "#000" : "#fff";
}

export class LaneBars {
    // node: the node in which Plotly draws the axes.
    constructor(node) {
        this.node = node;
        this.canvas = el("canvas", { "aria-hidden": "true" });
        this.tip = el("div", { class: "rs-tip", hidden: "" });
        this.caption = el("p", { class: "rs-unseen", role: "status" });
        // The bar that the keyboard has selected, by its row and the time of its middle.
        this.chosen = null;
        const frame = el("div", { class: "rs-lanes" });
        node.replaceWith(frame);
        frame.append(this.canvas, node, this.tip, this.caption);
        this.lanes = [];
        this.ghosts = [];
        node.addEventListener("pointermove", (event) => this.point(event));
        for (const name of ["pointerleave", "pointerdown"])
            node.addEventListener(name, () => {
                this.tip.hidden = true;
            });
    }

    // Takes the bars of a figure; `paint` paints them.
    take({ data, layout }) {
        const rows = layout.yaxis.categoryarray;
        this.rows = rows.length;
        this.patterns = new Map();
        this.lanes = data.map((trace) => ({ ...trace, row: rows.indexOf(trace.y[0]) }));
        if (this.chosen && !this.nearest(this.chosen.row, this.chosen.time)) this.chosen = null;
        this.ghosts = layout.shapes
            .filter(isPredicted)
            .map(({ path, ...shape }) => ({ ...shape, path: new Path2D(path) }));
        this.tip.hidden = true;
    }

    // Paints the part between two positions on the x axis, in ms.
    paint(from, to, showsPredicted) {
        const { canvas, node } = this;
        const density = window.devicePixelRatio || 1;
        const width = node.clientWidth - MARGIN.left - MARGIN.right;
        const height = node.clientHeight - MARGIN.top - MARGIN.bottom;
        this.from = from;
        this.to = to;
        this.width = width;
        this.height = height;
        if (width <= 0 || height <= 0) return;
        this.resize("width", width * density, `${width}px`);
        this.resize("height", height * density, `${height}px`);
        const pen = canvas.getContext("2d");
        pen.setTransform(density, 0, 0, density, 0, 0);
        pen.clearRect(0, 0, width, height);
        Object.assign(pen, {
            font: "11px sans-serif",
            textAlign: "center",
            textBaseline: "middle",
        });
        let bars = 0;
        for (const lane of this.lanes) bars += this.paintLane(pen, lane);
        const ghosts = showsPredicted ? this.ghosts : [];
        for (const ghost of ghosts) this.paintGhost(pen, ghost);
        pen.globalAlpha = 1;
        this.paintChosen(pen);
        canvas.dataset.bars = bars;
        canvas.dataset.predicted = ghosts.length;
    }

    // Resizing a canvas clears it, which is slow even if the size is the same.
    resize(side, size, style) {
        const pixels = Math.round(size);
        if (this.canvas[side] === pixels) return;
        this.canvas[side] = pixels;
        this.canvas.style[side] = style;
    }

    // Paints the visible bars of a lane, and returns how many there are.
    paintLane(pen, { base, x, marker, text, width: share, row }) {
        const scale = this.width / (this.to - this.from);
        const tall = this.y(0) - this.y(share);
        const top = this.y(row + share / 2);
        let bars = 0;
        for (let index = 0; index < base.length; index += 1) {
            const left = (base[index] - this.from) * scale;
            const wide = Math.max(x[index] * scale, LEAST);
            if (left > this.width || left + wide < 0) continue;
            bars += 1;
            pen.fillStyle = Array.isArray(marker.color) ? marker.color[index] : marker.color;
            pen.globalAlpha = marker.opacity?.[index] ?? 1;
            pen.fillRect(left, top, wide, tall);
            if (text?.[index]) {
                const ink = inkOn(pen.fillStyle, pen.globalAlpha);
                this.paintNumber(pen, text[index], [left + wide / 2, top + tall / 2], wide, ink);
            }
            if (!marker.pattern) continue;
            pen.fillStyle = this.hatch(pen, marker.pattern.fgcolor);
            pen.fillRect(left, top, wide, tall);
        }
        return bars;
    }

    // Writes the number of a block into the middle of its bar, where the bar has room for it.
    paintNumber(pen, number, [x, y], wide, ink) {
        if (wide < DIGIT * (number.length + 1)) return;
        pen.globalAlpha = 1;
        pen.fillStyle = ink;
        pen.fillText(number, x, y);
    }

    paintGhost(pen, { path, fillcolor, line }) {
        const scale = this.width / (this.to - this.from);
        const placed = new Path2D();
        const tall = this.y(1) - this.y(0);
        placed.addPath(path, new DOMMatrix([scale, 0, 0, tall, -this.from * scale, this.y(0)]));
        pen.globalAlpha = 1;
        pen.fillStyle = fillcolor;
        pen.fill(placed);
        pen.strokeStyle = line.color;
        pen.lineWidth = OUTLINE;
        pen.stroke(placed);
    }

    paintChosen(pen) {
        const bar = this.chosen && this.nearest(this.chosen.row, this.chosen.time);
        if (!bar) return;
        const scale = this.width / (this.to - this.from);
        const { lane, index } = bar;
        const left = (lane.base[index] - this.from) * scale;
        const top = this.y(lane.row + lane.width / 2);
        const wide = Math.max(lane.x[index] * scale, LEAST);
        const tall = this.y(0) - this.y(lane.width);
        pen.strokeStyle = getComputedStyle(this.node).color;
        pen.lineWidth = CHOSEN;
        pen.strokeRect(left, top, wide, tall);
    }

    hatch(pen, color) {
        if (!this.patterns.has(color))
            this.patterns.set(color, pen.createPattern(hatchTile(color), "repeat"));
        return this.patterns.get(color);
    }

    // The pixel position of a value on the y axis, which has one row at each whole number.
    y(value) {
        return this.height * (1 - (value + BELOW) / (this.rows + AROUND));
    }

    // The value at a pixel position on the y axis.
    value(top) {
        return (1 - top / this.height) * (this.rows + AROUND) - BELOW;
    }

    // -------------------------------------------------------------- what a bar is

    point({ clientX, clientY, buttons }) {
        const isDragged = Boolean(buttons);
        const box = this.node.getBoundingClientRect();
        const left = clientX - box.left - MARGIN.left;
        const top = clientY - box.top - MARGIN.top;
        const lines = isDragged || !this.width ? null : this.at(left, top);
        if (lines) this.show(lines, clientX, clientY);
        else this.tip.hidden = true;
    }

    show([first, ...others], clientX, clientY) {
        this.tip.hidden = false;
        this.tip.replaceChildren(first, ...others.map((line) => el("span", {}, line)));
        this.tip.style.top = `${clientY + 16}px`;
        const rightmost = window.innerWidth - this.tip.offsetWidth - 8;
        this.tip.style.left = `${Math.max(8, Math.min(clientX + 14, rightmost))}px`;
    }

    // -------------------------------------------------------------- bar by bar

    // All bars of a row, in order of time.
    inRow(row) {
        const bars = this.lanes
            .filter((lane) => lane.row === row)
            .flatMap((lane) => lane.base.map((_, index) => ({ lane, index })));
        return bars.sort((one, other) => start(one) - start(other));
    }

    // The bar of a row whose middle is nearest to `time`, or null in an empty row.
    nearest(row, time) {
        const apart = (bar) => Math.abs(middle(bar) - time);
        return this.inRow(row).reduce(
            (best, bar) => (best && apart(best) <= apart(bar) ? best : bar),
            null,
        );
    }

    // Selects the bar before or after (-1, 1) the selected one, or the nearest one in a row below
    // or above; if none is selected, the first visible one. Returns the start and end of the bar,
    // or null if there is none.
    choose(bars, rows) {
        const bar = this.next(bars, rows);
        if (!bar) return null;
        const { lane, index } = bar;
        this.chosen = { row: lane.row, time: middle(bar) };
        return [lane.base[index], lane.base[index] + lane.x[index]];
    }

    next(bars, rows) {
        const { chosen } = this;
        if (!chosen) return this.beyond(this.rows, -1, this.from);
        if (rows) return this.beyond(chosen.row, rows, chosen.time);
        const all = this.inRow(chosen.row);
        const at = all.findIndex((bar) => middle(bar) === chosen.time);
        return all[at + bars] ?? null;
    }

    // The bar nearest to `time` in the next row that has bars, searching from `row` in steps of
    // `rows`.
    beyond(row, rows, time) {
        for (let at = row + rows; at >= 0 && at < this.rows; at += rows) {
            const bar = this.nearest(at, time);
            if (bar) return bar;
        }
        return null;
    }

    // Describes the selected bar, next to it and for screen readers.
    announce() {
        const bar = this.chosen && this.nearest(this.chosen.row, this.chosen.time);
        if (!bar) return;
        const lines = linesOf(bar);
        const box = this.node.getBoundingClientRect();
        const x = ((middle(bar) - this.from) * this.width) / (this.to - this.from);
        this.show(lines, box.left + MARGIN.left + x, box.top + MARGIN.top + this.y(bar.lane.row));
        this.caption.textContent = lines.join(", ");
    }

    forget() {
        this.chosen = null;
        this.tip.hidden = true;
        this.caption.textContent = "";
    }

    // The lines of text for a position on the canvas, in px, or null if nothing is there.
    at(left, top) {
        if (left < 0 || left > this.width) return null;
        const scale = this.width / (this.to - this.from);
        const time = this.from + left / scale;
        const value = this.value(top);
        let best = null;
        let distance = NEAR / scale;
        for (const lane of this.lanes) {
            if (Math.abs(value - lane.row) > lane.width / 2) continue;
            for (let index = 0; index < lane.base.length; index += 1) {
                const left = lane.base[index];
                const apart = Math.max(left - time, time - left - lane.x[index], 0);
                if (apart > distance || (apart === distance && best)) continue;
                best = { lane, index };
                distance = apart;
            }
        }
        return best && linesOf(best);
    }
}

const start = ({ lane, index }) => lane.base[index];
const middle = ({ lane, index }) => lane.base[index] + lane.x[index] / 2;
export const isPredicted = (shape) => shape.name === "predicted";

// The text that Plotly would show in a hover label.
function linesOf({ lane, index }) {
    const values = {
        customdata: lane.customdata?.[index],
        x: lane.x[index],
        base: lane.base[index],
    };
    const caption = lane.hovertemplate
        .replace("<extra></extra>", "")
        .replace(/%\{(\w+)(:[^}]*)?\}/g, (_, name) => written(values[name]));
    return caption.split("<br>").map(withoutEntities);
}

const written = (value) =>
    typeof value === "number" ? String(Number(value.toPrecision(4))) : value;

// Two slanted lines, which continue across tiles.
function hatchTile(color) {
    const tile = el("canvas", { width: 6, height: 6 });
    const pen = tile.getContext("2d");
    pen.strokeStyle = color;
    pen.lineWidth = 2;
    for (const shift of [-6, 0, 6]) {
        pen.moveTo(shift - 1, 7);
        pen.lineTo(shift + 7, -1);
    }
    pen.stroke();
    return tile;
}
