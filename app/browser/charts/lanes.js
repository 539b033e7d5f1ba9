// The bars of a timeline. They come as traces of a Plotly figure, whose axes Plotly draws; the bars
// themselves are painted on a canvas behind those: as elements of the page, a thousand of them took
// longer to draw than all the curves together.

import { el } from "../common/dom.js";

export const MARGIN = { left: 74, right: 10, top: 2, bottom: 38 }; // as in the figure's layout
const NEAR = 3; // px beside a bar at which it is still meant
const LEAST = 0.5; // px of a bar that can be seen
const OUTLINE = 0.75;
const CHOSEN = 2;

export class LaneBars {
    // `node`: where Plotly draws the axes.
    constructor(node) {
        this.node = node;
        this.canvas = el("canvas", { "aria-hidden": "true" });
        this.tip = el("div", { class: "rs-tip", hidden: "" });
        this.said = el("p", { class: "rs-unseen", role: "status" });
        this.chosen = null; // the bar that the keyboard has come to: its row, and the time in its middle
        const frame = el("div", { class: "rs-lanes" });
        node.replaceWith(frame);
        frame.append(this.canvas, node, this.tip, this.said);
        this.lanes = [];
        this.ghosts = [];
        node.addEventListener("pointermove", (event) => this.point(event));
        for (const name of ["pointerleave", "pointerdown"])
            node.addEventListener(name, () => {
                this.tip.hidden = true;
            });
    }

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

    // Paints what lies between two places of the x axis, in ms.
    paint(from, to, showsPredicted) {
        const { canvas, node } = this;
        const density = window.devicePixelRatio || 1;
        const width = node.clientWidth - MARGIN.left - MARGIN.right;
        const height = node.clientHeight - MARGIN.top - MARGIN.bottom;
        Object.assign(this, { from, to, width, height });
        if (width <= 0 || height <= 0) return;
        for (const [side, size] of [
            ["width", width],
            ["height", height],
        ]) {
            const pixels = Math.round(size * density);
            if (canvas[side] !== pixels)
                Object.assign(canvas, { [side]: pixels }).style[side] = `${size}px`;
        }
        const pen = canvas.getContext("2d");
        pen.setTransform(density, 0, 0, density, 0, 0);
        pen.clearRect(0, 0, width, height);
        let bars = 0;
        for (const lane of this.lanes) bars += this.paintLane(pen, lane);
        if (showsPredicted) for (const ghost of this.ghosts) this.paintGhost(pen, ghost);
        pen.globalAlpha = 1;
        this.paintChosen(pen);
        Object.assign(canvas.dataset, { bars, predicted: showsPredicted ? this.ghosts.length : 0 });
    }

    paintLane(pen, { base, x, marker, width: share, row }) {
        const scale = this.width / (this.to - this.from);
        const tall = this.y(0) - this.y(share);
        const top = this.y(row + share / 2);
        let bars = 0;
        for (let k = 0; k < base.length; k += 1) {
            const left = (base[k] - this.from) * scale;
            const wide = Math.max(x[k] * scale, LEAST);
            if (left > this.width || left + wide < 0) continue;
            bars += 1;
            pen.fillStyle = Array.isArray(marker.color) ? marker.color[k] : marker.color;
            pen.globalAlpha = marker.opacity?.[k] ?? 1;
            pen.fillRect(left, top, wide, tall);
            if (!marker.pattern) continue;
            pen.fillStyle = this.hatch(pen, marker.pattern.fgcolor);
            pen.fillRect(left, top, wide, tall);
        }
        return bars;
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
        const { lane, k } = bar;
        const top = this.y(lane.row + lane.width / 2);
        pen.strokeStyle = getComputedStyle(this.node).color;
        pen.lineWidth = CHOSEN;
        pen.strokeRect(
            (lane.base[k] - this.from) * scale,
            top,
            Math.max(lane.x[k] * scale, LEAST),
            this.y(0) - this.y(lane.width),
        );
    }

    hatch(pen, colour) {
        if (!this.patterns.has(colour)) {
            const tile = el("canvas", { width: 6, height: 6 });
            const small = tile.getContext("2d");
            small.strokeStyle = colour;
            small.lineWidth = 2;
            for (const shift of [-6, 0, 6]) {
                small.moveTo(shift - 1, 7);
                small.lineTo(shift + 7, -1);
            }
            small.stroke();
            this.patterns.set(colour, pen.createPattern(tile, "repeat"));
        }
        return this.patterns.get(colour);
    }

    // Of a height on the y axis, which has one row at each whole number.
    y(value) {
        return this.height * (1 - (value + 0.52) / (this.rows + 0.02));
    }

    // -------------------------------------------------------------- what a bar is

    point({ clientX, clientY, buttons }) {
        const box = this.node.getBoundingClientRect();
        const words =
            buttons || !this.width
                ? null
                : this.at(clientX - box.left - MARGIN.left, clientY - box.top - MARGIN.top);
        if (words) this.show(words, clientX, clientY);
        else this.tip.hidden = true;
    }

    show([first, ...others], clientX, clientY) {
        this.tip.hidden = false;
        this.tip.replaceChildren(first, ...others.map((line) => el("span", {}, line)));
        this.tip.style.top = `${clientY + 16}px`;
        this.tip.style.left = `${Math.max(8, Math.min(clientX + 14, window.innerWidth - this.tip.offsetWidth - 8))}px`;
    }

    // -------------------------------------------------------------- bar by bar

    // All bars of a row, by time.
    inRow(row) {
        const bars = this.lanes
            .filter((lane) => lane.row === row)
            .flatMap((lane) => lane.base.map((_, k) => ({ lane, k })));
        return bars.sort((one, other) => one.lane.base[one.k] - other.lane.base[other.k]);
    }

    nearest(row, time) {
        const apart = ({ lane, k }) => Math.abs(middle(lane, k) - time);
        return this.inRow(row).reduce(
            (best, bar) => (best && apart(best) <= apart(bar) ? best : bar),
            null,
        );
    }

    // Chooses the bar before or after (-1, 1) the chosen one, or the one beside it in a row below
    // or above; the first one that is seen where none is chosen. Returns where it begins and ends,
    // null where there is none.
    choose(bars, rows) {
        const from = this.chosen;
        let bar = null;
        if (!from) {
            for (let row = this.rows - 1; row >= 0 && !bar; row -= 1)
                bar = this.nearest(row, this.from);
        } else if (rows) {
            for (let row = from.row + rows; row >= 0 && row < this.rows && !bar; row += rows)
                bar = this.nearest(row, from.time);
        } else {
            const all = this.inRow(from.row);
            const at = all.findIndex(({ lane, k }) => middle(lane, k) === from.time);
            bar = all[at + bars] ?? null;
        }
        if (!bar) return null;
        const { lane, k } = bar;
        this.chosen = { row: lane.row, time: middle(lane, k) };
        return [lane.base[k], lane.base[k] + lane.x[k]];
    }

    // What the chosen bar is, beside it and for who hears the page.
    tell() {
        const bar = this.chosen && this.nearest(this.chosen.row, this.chosen.time);
        if (!bar) return;
        const words = linesOf(bar.lane, bar.k);
        const box = this.node.getBoundingClientRect();
        const x = ((middle(bar.lane, bar.k) - this.from) * this.width) / (this.to - this.from);
        this.show(words, box.left + MARGIN.left + x, box.top + MARGIN.top + this.y(bar.lane.row));
        this.said.textContent = words.join(", ");
    }

    forget() {
        this.chosen = null;
        this.tip.hidden = true;
        this.said.textContent = "";
    }

    // The lines that say what is at a place of the canvas, in px; null where nothing is.
    at(left, top) {
        if (left < 0 || left > this.width) return null;
        const scale = this.width / (this.to - this.from);
        const time = this.from + left / scale;
        const value = (1 - top / this.height) * (this.rows + 0.02) - 0.52;
        let best = null;
        let distance = NEAR / scale;
        for (const lane of this.lanes) {
            if (Math.abs(value - lane.row) > lane.width / 2) continue;
            for (let k = 0; k < lane.base.length; k += 1) {
                const apart = Math.max(lane.base[k] - time, time - lane.base[k] - lane.x[k], 0);
                if (apart > distance || (apart === distance && best)) continue;
                [best, distance] = [{ lane, k }, apart];
            }
        }
        return best && linesOf(best.lane, best.k);
    }
}

const middle = (lane, k) => lane.base[k] + lane.x[k] / 2;
export const isPredicted = (shape) => shape.name === "predicted";

// What Plotly would write into a hover label: names in it are text whose <, > and & were written as
// entities.
function linesOf(lane, k) {
    const values = { customdata: lane.customdata?.[k], x: lane.x[k], base: lane.base[k] };
    const said = lane.hovertemplate
        .replace("<extra></extra>", "")
        .replace(/%\{(\w+)(:[^}]*)?\}/g, (_, name) =>
            typeof values[name] === "number"
                ? String(Number(values[name].toPrecision(4)))
                : values[name],
        );
    return said
        .split("<br>")
        .map((line) =>
            line.replaceAll("&lt;", "<").replaceAll("&gt;", ">").replaceAll("&amp;", "&"),
        );
}
