// The timeline of one step: remembers which sampled step is shown, and draws its figure, its legend
// and its zoom.

import { drawLater } from "../../shared/charts/drawing.js";
import { plotlyFor } from "../../shared/charts/load_plotly.js";
import { CONFIG, markDrawn, onScreen, themed } from "../../shared/charts/plots.js";
import { el, send } from "../../shared/dom.js";
import { isPredicted, LaneBars, MARGIN } from "./lanes.js";
import { PhaseBand } from "./phases.js";
import { RankChoice } from "./ranks.js";

const ZOOM = 0.6; // a key zooms in to this share of the stretch
const MOVE = 0.2; // a key moves by this share of the stretch
// The effect of each key, with its numbers: a zoom factor, a share of the stretch to move by, or a
// number of bars and rows.
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
const PAUSE = 200; // ms between a zoom and the request for more detail
const BESIDE = 0.25; // this share of the stretch is requested in addition on either side
const CLOSER = 0.8; // a new stretch is requested if it is shorter than this share of the old one

export class Timeline {
    // step: the step to show first, null for the latest; onStep(step) is called whenever another
    // one is chosen.
    constructor(root, step, onStep) {
        this.root = root;
        this.onStep = onStep;
        this.chosen = step; // null follows the latest step
        this.run = null;
        this.steps = []; // those that have a timeline
        this.latest = null; // the data of the latest step
        this.taken = null; // the data that are shown
        this.shown = null; // what they were requested with; null for those of the latest step
        this.range = null; // the zoomed range in ms; null for the whole step
        this.detail = null; // the detailed figure of a stretch: {from, to, figure}
        this.asked = null; // aborts the pending request for a detail
        this.problem = null; // why no detail could be shown
        this.dirty = false;
        this.drawn = ""; // the layout last drawn by Plotly, as text
        this.predicted = true;
        this.loading = false;
        this.node = root.querySelector('[data-figure="timeline"]');
        this.bars = new LaneBars(this.node);
        this.phases = new PhaseBand(this.part("phases"));
        this.ranks = new RankChoice(this.part("rank"), () => this.follow());
        this.draw = this.draw.bind(this);
        this.listen();
        this.watch();
    }

    listen() {
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
    }

    // Redraws for a new size or theme, and when the timeline becomes visible.
    watch() {
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
        this.chosen = null;
        this.run = null;
        this.steps = [];
        this.latest = null;
        this.taken = null;
        this.range = null;
        this.ranks.clear();
        this.askDetail();
        this.onStep(null);
    }

    // Takes the latest timeline of `run`, and the steps that have one.
    show(part, run) {
        this.run = run;
        this.steps = part.steps;
        this.latest = part;
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
        if (this.isThere()) this.take(this.latest, null);
        else this.load();
    }

    // The latest step is there without a request, as far as rank 0 is meant.
    isThere() {
        const step = this.latest?.step ?? null;
        const isLatest = this.chosen === null || this.chosen === step;
        return isLatest && (step === null || this.ranks.chosen === "0");
    }

    // What a person wants to see, whichever step is the latest.
    meant() {
        return `${this.chosen} ${this.ranks.chosen}`;
    }

    query() {
        return `step=${this.chosen ?? this.latest.step}&rank=${this.ranks.chosen}`;
    }

    // Requests the chosen step and rank. Only one request is sent at a time: when it is answered,
    // the next one is for the current position of a slider that is being dragged.
    async load() {
        if (this.loading) return;
        this.loading = true;
        try {
            while (!this.isThere() && this.query() !== this.shown) {
                const [run, meant, query] = [this.run, this.meant(), this.query()];
                const found = await this.read(run, query);
                // The latest step may have moved on meanwhile: this one is nearer than the last.
                if (run !== this.run || meant !== this.meant()) continue;
                if (found.error) {
                    this.report(found.error.message);
                    break;
                }
                this.take(found, query);
            }
        } finally {
            this.loading = false;
        }
    }

    async read(run, query) {
        try {
            return await send(`/api/runs/${encodeURIComponent(run)}/timeline?${query}`);
        } catch (error) {
            return { error };
        }
    }

    take(part, query) {
        this.shown = query;
        if (part === this.taken) return;
        this.taken = part;
        this.ranks.offer(part.ranks);
        this.report(part.caption);
        this.node.style.setProperty("--rs-rows", part.layout.yaxis.categoryarray.length);
        const isMain = ({ is_main }) => is_main;
        const others = part.legend.filter((entry) => !isMain(entry));
        this.part("legend").replaceChildren(...part.legend.filter(isMain).map(legendEntry));
        this.part("colors").hidden = !others.length;
        this.part("colors").replaceChildren(...others.map(legendEntry));
        this.phases.take(part.phases);
        this.part("predicted").hidden = !part.layout.shapes.some(isPredicted);
        this.detail = null;
        this.askDetail();
        const trace = this.part("trace");
        trace.hidden = part.step === null;
        trace.href = `/api/runs/${encodeURIComponent(this.run)}/trace?step=${part.step}`;
        this.redraw();
    }

    // The description is read aloud if a person chose the step, but not for each new sampled step.
    report(text) {
        const caption = this.root.querySelector('[data-caption="timeline"]');
        caption.setAttribute("aria-live", this.chosen === null ? "off" : "polite");
        caption.textContent = text;
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
        const text = step === undefined ? "" : `Step ${step.toLocaleString("en")}`;
        if (text) this.slider.setAttribute("aria-valuetext", text);
        this.part("number").textContent = text;
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
        const Plotly = await plotlyFor(this.node, () => this.schedule());
        const { taken, node } = this;
        if (!Plotly || !taken || !onScreen(node)) return;
        this.dirty = false;
        this.bars.take(this.detail?.figure ?? taken);
        const layout = this.axes();
        const drawn = JSON.stringify(layout);
        if (drawn !== this.drawn) {
            await Plotly.react(node, [], layout, { ...CONFIG, doubleClick: false });
            if (!this.drawn) this.followZoom();
            this.drawn = drawn;
        }
        this.showZoom();
        markDrawn("timeline");
    }

    // Follows Plotly's own events, which a node has only after it was first drawn.
    followZoom() {
        const { node } = this;
        node.on("plotly_relayout", () => this.keepZoom());
        node.on("plotly_relayouting", (change) =>
            this.place(change["xaxis.range[0]"], change["xaxis.range[1]"]),
        );
        node.on("plotly_doubleclick", () => this.setRange(null));
    }

    // The figure's layout with only the axes; Plotly draws nothing else. A zoom, however made, is
    // kept over updates and other steps, until another run is opened.
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
        // Grid lines would be drawn before the bars, where they look like gaps.
        Object.assign(layout.xaxis, {
            showgrid: false,
            ticks: "outside",
            tickcolor: layout.xaxis.linecolor,
        });
        // This is a copy, since Plotly writes into it.
        layout.xaxis.range = [...(this.range ?? layout.xaxis.range)];
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
        const figure = this.detail?.figure ?? this.taken;
        this.part("count").textContent = this.problem ?? figure?.count ?? "";
        if (this.taken) this.place(...(this.range ?? this.taken.layout.xaxis.range));
    }

    // Bars and phases follow the axis, even while it is being moved.
    place(from, to) {
        if (from === undefined) return;
        this.bars.paint(from, to, this.predicted);
        this.phases.place(from, to);
    }

    // -------------------------------------------------------------- more detail

    // A step with very many spans has fewer bars than spans: the spans of the visible stretch are
    // requested once a zoom ends. An earlier request is aborted, so that its answer never replaces
    // a newer one.
    askDetail() {
        clearTimeout(this.timer);
        this.asked?.abort();
        this.asked = null;
        this.problem = null;
        const { range, taken } = this;
        if (!range || !taken || taken.is_whole) {
            this.showDetail(null);
            return;
        }
        if (this.isDetailEnough(range)) return;
        if (!isInside(range, this.detail)) this.showDetail(null);
        this.timer = setTimeout(() => this.loadDetail(), PAUSE);
    }

    // A detail that covers the stretch is sufficient if it has every span, or if the stretch is not
    // much shorter than the one that would be requested.
    isDetailEnough(range) {
        const { detail } = this;
        if (!isInside(range, detail)) return false;
        const wanted = (1 + 2 * BESIDE) * (range[1] - range[0]);
        return detail.figure.is_whole || wanted >= CLOSER * (detail.to - detail.from);
    }

    async loadDetail() {
        const { taken, run } = this;
        const asked = new AbortController();
        this.asked = asked;
        const beside = BESIDE * (this.range[1] - this.range[0]);
        const [from, to] = [this.range[0] - beside, this.range[1] + beside];
        const query = new URLSearchParams({
            step: taken.step,
            rank: taken.rank < 0 ? "all" : taken.rank,
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

    // -------------------------------------------------------------- zoom by keyboard

    async setRange(range) {
        if (!this.drawn || !this.taken) return;
        await window.Plotly.relayout(this.node, {
            "xaxis.range": range ?? [...this.taken.layout.xaxis.range],
        });
    }

    // Brings the chosen bar into view if the step is zoomed; null if none is chosen.
    async showBar(bar) {
        if (!bar) {
            this.showZoom();
            return;
        }
        if (this.range && (bar[0] < this.range[0] || bar[1] > this.range[1])) {
            const half = (this.range[1] - this.range[0]) / 2;
            const center = (bar[0] + bar[1]) / 2;
            await this.setRange([center - half, center + half]);
        }
        this.showZoom();
        this.bars.announce();
    }

    press(event) {
        const [what, much, rows] = KEYS[event.key] ?? [];
        const isOfBrowser = event.ctrlKey || event.metaKey || event.altKey;
        if (!what || isOfBrowser || !this.drawn || !this.taken) return;
        event.preventDefault();
        const [from, to] = this.range ?? this.taken.layout.xaxis.range;
        const length = to - from;
        const cut = ((1 - much) * length) / 2; // at either side
        if (what === "all") this.setRange(null);
        else if (what === "move") this.setRange([from + much * length, to + much * length]);
        else if (what === "zoom") this.setRange([from + cut, to - cut]);
        else if (what === "bar") this.showBar(this.bars.choose(much, rows));
        else {
            this.bars.forget();
            this.showZoom();
        }
    }
}

function legendEntry({ label, color, kind, about }) {
    const swatch = el("i", { "data-kind": kind });
    swatch.style.setProperty("--rs-swatch", color);
    const hidden = about && el("span", { class: "rs-hidden" }, ` (${about})`);
    return el("span", { title: about || null }, swatch, label, hidden);
}

const isInside = ([from, to], detail) => detail !== null && from >= detail.from && to <= detail.to;

// The sampled step nearest to the wanted one.
function nearest(steps, wanted) {
    return steps.reduce((best, step) =>
        Math.abs(step - wanted) < Math.abs(best - wanted) ? step : best,
    );
}
