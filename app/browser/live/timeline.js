// The timeline of one step: which sampled step is looked at, its figure, its legend, its zoom.

import { drawLater } from "../charts/drawing.js";
import { isPredicted, LaneBars, MARGIN } from "../charts/lanes.js";
import { CONFIG, loadPlotly, markDrawn, onScreen, themed } from "../charts/plots.js";
import { el, send } from "../common/dom.js";

const ZOOM = 0.6;
const MOVE = 0.2;
const KEYS = {
    "+": ["zoom", ZOOM],
    "=": ["zoom", ZOOM],
    "-": ["zoom", 1 / ZOOM],
    0: ["all"],
    Home: ["all"],
    ArrowLeft: ["move", -MOVE],
    ArrowRight: ["move", MOVE],
    ",": ["bar", -1, 0],
    ".": ["bar", 1, 0],
    ArrowUp: ["bar", 0, 1],
    ArrowDown: ["bar", 0, -1],
    Escape: ["forget"],
};
const LEAST_NAMED = 34; // pixels of a phase that hold a word
const PAUSE = 200; // ms after a zoom until what it shows is asked for
const BESIDE = 0.25; // of a stretch, that is asked for at either side of it
const CLOSER = 0.8; // of a stretch, at which it is worth asking for less of it

export class Timeline {
    // `step`: the one to open first, null for the latest; `onStep` is told whenever another is
    // chosen.
    constructor(root, step, onStep) {
        Object.assign(this, {
            root,
            onStep,
            chosen: step,
            run: null,
            steps: [],
            latest: null,
            taken: null,
            bands: [],
            range: null,
            detail: null,
            asked: null,
            dirty: false,
            drawn: "",
            predicted: true,
            loading: false,
        });
        this.node = root.querySelector('[data-figure="timeline"]');
        this.bars = new LaneBars(this.node);
        this.draw = this.draw.bind(this);
        this.slider = this.part("step");
        this.slider.addEventListener("input", () =>
            this.choose(this.steps[Number(this.slider.value)]),
        );
        this.part("earlier").addEventListener("click", () =>
            this.choose(this.steps[this.position() - 1]),
        );
        this.part("later").addEventListener("click", () =>
            this.choose(this.steps[this.position() + 1]),
        );
        this.part("latest").addEventListener("click", () =>
            this.choose(this.chosen === null ? this.steps.at(-1) : null),
        );
        this.part("predicted").addEventListener("click", ({ target }) => {
            this.predicted = !this.predicted;
            target.setAttribute("aria-pressed", String(this.predicted));
            this.redraw();
        });
        this.part("all").addEventListener("click", () => {
            this.setRange(null);
            this.node.focus();
        });
        this.node.addEventListener("keydown", (event) => this.press(event));
        new ResizeObserver(() => this.redraw()).observe(this.node);
        new MutationObserver(() => this.redraw()).observe(document.body, {
            attributeFilter: ["class"],
        });
        for (const event of ["scroll", "resize"])
            window.addEventListener(event, () => this.schedule(), { passive: true });
    }

    part(name) {
        return this.root.querySelector(`[data-timeline="${name}"]`);
    }

    clear() {
        Object.assign(this, {
            chosen: null,
            run: null,
            steps: [],
            latest: null,
            taken: null,
            range: null,
        });
        this.askDetail();
        this.onStep(null);
    }

    // The latest timeline of `run`, and the steps that have one.
    show(part, run) {
        Object.assign(this, { run, steps: part.steps, latest: part });
        const isKnown =
            this.chosen === null || !this.steps.length || this.steps.includes(this.chosen);
        if (isKnown) this.follow();
        else this.choose(nearest(this.steps, this.chosen));
    }

    openNear(step) {
        if (!this.steps.length) return;
        this.choose(nearest(this.steps, step));
        const isStill = matchMedia("(prefers-reduced-motion: reduce)").matches;
        this.root.scrollIntoView({ block: "nearest", behavior: isStill ? "auto" : "smooth" });
    }

    choose(step) {
        if (step === undefined) return;
        this.chosen = step;
        this.onStep(step);
        this.follow();
    }

    follow() {
        this.showSteps();
        if (this.chosen === null || this.chosen === this.latest.step) this.take(this.latest);
        else this.load();
    }

    // One request at a time: a slider that is dragged asks for where it has come to by then.
    async load() {
        if (this.loading) return;
        this.loading = true;
        try {
            while (this.chosen !== null && this.chosen !== this.taken?.step) {
                const { run, chosen } = this;
                const found = await send(
                    `/api/runs/${encodeURIComponent(run)}/timeline?step=${chosen}`,
                ).catch((error) => ({ error }));
                if (run !== this.run || chosen !== this.chosen) continue;
                if (found.error) {
                    this.say(found.error.message);
                    break;
                }
                this.take(found);
            }
        } finally {
            this.loading = false;
        }
    }

    take(part) {
        if (part === this.taken) return;
        this.taken = part;
        this.say(part.said);
        this.node.style.setProperty("--rs-rows", part.layout.yaxis.categoryarray.length);
        this.part("legend").replaceChildren(
            ...part.legend.map(({ label, colour, kind }) => {
                const swatch = el("i", { "data-kind": kind });
                swatch.style.setProperty("--rs-swatch", colour);
                return el("span", {}, swatch, label);
            }),
        );
        this.bands = part.phases.map(({ label, short, colour }) => {
            const band = el("span", { role: "listitem", title: label, "aria-label": label }, short);
            band.style.setProperty("--rs-swatch", colour);
            return band;
        });
        this.part("phases").replaceChildren(...this.bands);
        this.part("predicted").hidden = !part.layout.shapes.some(isPredicted);
        this.detail = null;
        this.askDetail();
        const trace = this.part("trace");
        trace.hidden = part.step === null;
        trace.href = `/api/runs/${encodeURIComponent(this.run)}/trace?step=${part.step}`;
        this.redraw();
    }

    // Read aloud where a person chose the step, not with each step that the run samples.
    say(text) {
        const said = this.root.querySelector('[data-said="timeline"]');
        said.setAttribute("aria-live", this.chosen === null ? "off" : "polite");
        said.textContent = text;
    }

    // -------------------------------------------------------------- which step

    position() {
        return this.steps.indexOf(this.chosen ?? this.latest?.step);
    }

    showSteps() {
        const at = this.position();
        const last = this.steps.length - 1;
        this.part("steps").hidden = last < 1;
        this.slider.max = Math.max(0, last);
        this.slider.value = at;
        const step = this.steps[at];
        if (step !== undefined)
            this.slider.setAttribute("aria-valuetext", `Step ${step.toLocaleString("en")}`);
        this.part("number").textContent =
            step === undefined ? "" : `Step ${step.toLocaleString("en")}`;
        this.part("earlier").disabled = at <= 0;
        this.part("later").disabled = at >= last;
        this.part("latest").setAttribute("aria-pressed", String(this.chosen === null));
    }

    // -------------------------------------------------------------- drawing

    redraw() {
        this.dirty = true;
        this.schedule();
    }

    schedule() {
        if (this.dirty) drawLater(this.draw);
    }

    async draw() {
        if (!this.dirty || !this.taken || !onScreen(this.node)) return;
        const Plotly = await loadPlotly();
        const { taken, node } = this;
        if (!taken || !onScreen(node)) return;
        this.dirty = false;
        this.bars.take(this.detail?.figure ?? taken);
        const layout = this.axes();
        const drawn = JSON.stringify(layout);
        if (drawn !== this.drawn) {
            await Plotly.react(node, [], layout, { ...CONFIG, doubleClick: false });
            if (!this.drawn) {
                node.on("plotly_relayout", () => this.keepZoom());
                node.on("plotly_relayouting", (change) =>
                    this.place(change["xaxis.range[0]"], change["xaxis.range[1]"]),
                );
                node.on("plotly_doubleclick", () => this.setRange(null));
            }
            this.drawn = drawn;
        }
        this.showZoom();
        markDrawn("timeline");
    }

    // The figure's layout for axes alone, beside which nothing is drawn by Plotly. What was zoomed
    // to, by whatever means, stays over updates and other steps, until another run is opened.
    axes() {
        const layout = themed(this.taken.layout, this.node);
        const rows = layout.yaxis.categoryarray;
        const { left, right, top, bottom } = MARGIN;
        Object.assign(layout, {
            hovermode: false,
            margin: { l: left, r: right, t: top, b: bottom },
            shapes: layout.shapes.filter((shape) => !isPredicted(shape)),
        });
        layout.yaxis = {
            ...layout.yaxis,
            type: "linear",
            zeroline: false,
            tickvals: rows.map((_, row) => row),
            ticktext: rows,
        };
        // Lines of a grid would stand before the bars, where they look like gaps.
        Object.assign(layout.xaxis, {
            showgrid: false,
            ticks: "outside",
            tickcolor: layout.xaxis.linecolor,
        });
        layout.xaxis.range = [...(this.range ?? layout.xaxis.range)]; // a copy: Plotly writes into it
        return layout;
    }

    keepZoom() {
        if (!this.taken) return;
        const whole = this.taken.layout.xaxis.range;
        const shown = this.node.layout.xaxis.range;
        this.range = shown.every((end, index) => end === whole[index]) ? null : [...shown];
        this.drawn = JSON.stringify(this.axes());
        this.askDetail();
        this.showZoom();
    }

    showZoom() {
        this.part("all").hidden = !this.range;
        this.part("count").textContent =
            this.problem ?? (this.detail?.figure ?? this.taken)?.count ?? "";
        if (this.taken) this.place(...(this.range ?? this.taken.layout.xaxis.range));
    }

    // Bars and phases go with the axis, while it is moved too.
    place(from, to) {
        if (from === undefined) return;
        this.bars.paint(from, to, this.predicted);
        this.placePhases(from, to);
    }

    // -------------------------------------------------------------- more detail of what is zoomed
    // into

    // A step of very many spans has fewer bars than spans: those of the stretch that is looked at
    // are asked for once a zoom comes to rest. Whatever was asked for before is given up, so that
    // it never takes the place of what is wanted now.
    askDetail() {
        clearTimeout(this.timer);
        this.asked?.abort();
        this.asked = this.problem = null;
        const { range, taken, detail } = this;
        if (!range || !taken || taken.is_whole) {
            this.showDetail(null);
            return;
        }
        if (detail && range[0] >= detail.from && range[1] <= detail.to) {
            const asksForLess =
                (1 + 2 * BESIDE) * (range[1] - range[0]) < CLOSER * (detail.to - detail.from);
            if (detail.figure.is_whole || !asksForLess) return;
        } else this.showDetail(null);
        this.timer = setTimeout(() => this.loadDetail(), PAUSE);
    }

    async loadDetail() {
        const { taken, run } = this;
        const asked = (this.asked = new AbortController());
        const beside = BESIDE * (this.range[1] - this.range[0]);
        const [from, to] = [this.range[0] - beside, this.range[1] + beside];
        const query = new URLSearchParams({
            step: taken.step,
            from: Math.floor(1000 * from),
            to: Math.ceil(1000 * to),
        });
        try {
            const figure = await send(
                `/api/runs/${encodeURIComponent(run)}/stretch?${query}`,
                undefined,
                asked.signal,
            );
            if (asked === this.asked) this.showDetail({ from, to, figure });
        } catch (error) {
            if (asked !== this.asked) return;
            this.problem = error.message;
            this.showZoom();
        }
    }

    showDetail(detail) {
        if (detail === this.detail) return;
        this.detail = detail;
        this.redraw();
    }

    // What is cut off by the ends of the axis is still named in the middle of what is seen.
    placePhases(from, to) {
        const pixels = this.part("phases").clientWidth / 100;
        this.taken.phases.forEach(({ start, end }, index) => {
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

    // -------------------------------------------------------------- zoom by keyboard

    async setRange(range) {
        if (!this.drawn || !this.taken) return;
        const Plotly = await loadPlotly();
        await Plotly.relayout(this.node, {
            "xaxis.range": range ?? [...this.taken.layout.xaxis.range],
        });
    }

    // What is chosen is brought into sight, as far as the step is zoomed.
    async chooseBar(bar) {
        if (!bar) {
            if (bar === false) this.bars.forget();
            this.showZoom();
            return;
        }
        if (this.range && (bar[0] < this.range[0] || bar[1] > this.range[1])) {
            const half = (this.range[1] - this.range[0]) / 2;
            const centre = (bar[0] + bar[1]) / 2;
            await this.setRange([centre - half, centre + half]);
        }
        this.showZoom();
        this.bars.tell();
    }

    press(event) {
        const [what, much, rows] = KEYS[event.key] ?? [];
        if (!what || event.ctrlKey || event.metaKey || event.altKey || !this.drawn || !this.taken)
            return;
        event.preventDefault();
        if (what === "all") {
            this.setRange(null);
            return;
        }
        if (what === "bar" || what === "forget") {
            this.chooseBar(what === "bar" && this.bars.choose(much, rows));
            return;
        }
        const [from, to] = this.range ?? this.taken.layout.xaxis.range;
        const length = to - from;
        if (what === "move") this.setRange([from + much * length, to + much * length]);
        else this.setRange([from + ((1 - much) * length) / 2, to - ((1 - much) * length) / 2]);
    }
}

function nearest(steps, wanted) {
    return steps.reduce((best, step) =>
        Math.abs(step - wanted) < Math.abs(best - wanted) ? step : best,
    );
}
