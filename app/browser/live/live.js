// The Live tab: shows figures that the server has built, drawn by Plotly in place and linked by
// their x axis, and the other details of a run.

import { LinkedCharts } from "../charts/plots.js";
import { el, isShown, setText } from "../common/dom.js";
import { Diagnosis } from "./diagnosis.js";
import { SamplePrompts } from "./prompts.js";

const AT_END = 30; // the log scrolls along if it is at most this many px from its end

export class Live {
    constructor(element, setAxis, timeline) {
        this.root = element;
        this.setAxis = setAxis;
        this.timeline = timeline;
        this.prompts = new SamplePrompts(this.part("prompts"));
        this.log = false;
        this.diagnosis = new Diagnosis((name) => this.part(name));
        this.charts = this.linkedCharts();
        for (const button of element.querySelectorAll("button[data-axis]")) {
            button.addEventListener("click", () => this.chooseAxis(button.dataset.axis));
        }
        this.part("reset").addEventListener("click", () => this.charts.zoom(null));
        this.part("log-scale").addEventListener("click", () => this.toggleLog());
    }

    linkedCharts() {
        const nodes = this.root.querySelectorAll('[data-figure]:not([data-figure="timeline"])');
        const pairs = [...nodes].map((node) => [node.dataset.figure, node]);
        return new LinkedCharts(Object.fromEntries(pairs), {
            maps: ["norms"],
            adapt: (layout, figure) => this.adapt(layout, figure),
            zoomed: (isZoomed) => {
                this.part("reset").hidden = !isZoomed;
            },
            clicked: (x) => this.openStep(x),
        });
    }

    part(name) {
        return this.root.querySelector(`[data-part="${name}"]`);
    }

    isShown() {
        return isShown(this.root);
    }

    clear() {
        this.part("empty").hidden = false;
        this.part("run").hidden = true;
        this.charts.clear();
        this.timeline.clear();
    }

    chooseAxis(axis) {
        for (const button of this.root.querySelectorAll("button[data-axis]")) {
            button.setAttribute("aria-pressed", String(button.dataset.axis === axis));
        }
        this.charts.zoom(null);
        this.setAxis(axis);
    }

    toggleLog() {
        this.log = !this.log;
        this.part("log-scale").setAttribute("aria-pressed", String(this.log));
        this.charts.redrawAll();
    }

    show(answer) {
        this.part("empty").hidden = true;
        this.part("run").hidden = false;
        this.showTiles(answer.tiles);
        this.diagnosis.show(answer.diagnosis, answer.run_id);
        for (const [name, part] of Object.entries(answer.parts)) {
            if (name === "details") this.showDetails(part);
            else if (name === "timeline") this.timeline.show(part, answer.run_id);
            else if (name === "prompts") this.prompts.show(part);
            else this.showFigure(name, part);
        }
    }

    showFigure(name, part) {
        const node = this.charts.node(name);
        const said = this.root.querySelector(`[data-said="${name}"]`);
        node.closest("figure").hidden = Boolean(part.is_absent);
        this.charts.set(name, part);
        if (part.scale) this.showScale(name, part.scale);
        said.textContent = part.said;
        said.dataset.tone = part.tone;
        describe(node, part.said);
    }

    // The colour scale of a map, as elements of the page: Plotly's own takes a third of the drawing
    // time.
    showScale(name, values) {
        const scale = this.root.querySelector(`[data-scale="${name}"]`);
        scale.hidden = !values.length;
        scale.replaceChildren(
            ...values.map(({ at, text }) => {
                const value = el("li", {}, text);
                value.style.bottom = `${100 * at}%`;
                return value;
            }),
        );
    }

    // Makes axes logarithmic if a person has chosen that.
    adapt(layout, { log_axes: axes = [] }) {
        for (const name of axes) {
            // A zoom of the linear axis is meaningless on the logarithmic one.
            layout[name].uirevision += ` log ${this.log}`;
            if (this.log) Object.assign(layout[name], { type: "log", rangemode: "normal" });
        }
    }

    // A click on a point of a curve opens the timeline of its step, if x counts steps.
    openStep(x) {
        const isBySteps = this.root.querySelector('[data-axis="step"]').ariaPressed === "true";
        if (isBySteps) this.timeline.openNear(x);
    }

    // -------------------------------------------------------------- words

    showTiles(tiles) {
        const list = this.part("tiles");
        if (list.children.length !== tiles.length) list.replaceChildren(...tiles.map(emptyTile));
        for (const [index, tile] of tiles.entries()) {
            const [label, value, note] = list.children[index].children;
            label.textContent = tile.label;
            setText(value, tile.value);
            note.textContent = tile.note;
        }
    }

    showDetails(details) {
        this.part("facts").replaceChildren(...pairs(details.facts));
        for (const name of ["data", "plan"]) {
            const part = this.part(name);
            part.hidden = !details[name].length;
            part.querySelector("dl").replaceChildren(...pairs(details[name]));
        }
        this.part("files").replaceChildren(...details.files.map((file) => el("li", {}, file)));
        this.part("grid").hidden = !details.grid;
        this.part("grid").querySelector("pre").textContent = details.grid;
        this.part("formula").textContent = details.formula ? `TFLOPS: ${details.formula}` : "";
        this.showLog(details.log);
        this.showAnswers(details.answers);
        this.showForecast(details.forecast);
    }

    showLog(lines) {
        const log = this.part("log");
        const isAtEnd = log.scrollTop + log.clientHeight >= log.scrollHeight - AT_END;
        log.replaceChildren(...lines.map(logLine));
        if (!lines.length) log.replaceChildren(el("li", {}, "Nothing to tell so far."));
        if (isAtEnd) log.scrollTop = log.scrollHeight;
    }

    showForecast(forecast) {
        const card = this.part("forecast");
        card.hidden = !forecast;
        if (!forecast) return;
        card.querySelector("tbody").replaceChildren(...forecast.rows.map(forecastRow));
        this.part("forecast-said").textContent = forecast.said;
    }

    showAnswers(answers) {
        const card = this.part("answers");
        card.hidden = !answers;
        if (!answers) return;
        const scores = Object.entries(answers.scores).map(
            ([moment, score]) => `${moment} training ${score}`,
        );
        this.part("scores").textContent = `Answered exactly as expected: ${scores.join(", ")}.`;
        card.querySelector("tbody").replaceChildren(...answers.rows.map(answerRow));
    }
}

const pairs = (facts) =>
    facts.flatMap(([name, value]) => [el("dt", {}, name), el("dd", {}, value)]);

const emptyTile = () => el("div", {}, el("dt"), el("dd"), el("dd", { class: "rs-tile-note" }));

function logLine({ level, time, text }) {
    const clock = new Date(1000 * time).toLocaleTimeString();
    return el("li", { "data-level": level }, el("time", {}, clock), text);
}

function forecastRow({ tone, name, predicted, measured, error }) {
    const cells = [predicted, measured, error].map((text) => el("td", {}, text));
    return el("tr", { "data-tone": tone }, el("th", { scope: "row" }, name), ...cells);
}

function answerRow({ prompt, expected, before, after }) {
    const given = [before, after].map((text) =>
        el("td", { class: answerTone(text, expected) }, text ?? "–"),
    );
    return el("tr", {}, el("td", {}, prompt ?? "–"), el("td", {}, expected ?? "–"), ...given);
}

function answerTone(text, expected) {
    if (text === undefined) return undefined;
    return text === expected ? "rs-right" : "rs-off";
}

// For screen readers, the caption of a drawing is its description.
function describe(node, said) {
    const title = node.closest("figure").querySelector("h3").textContent;
    node.setAttribute("role", "img");
    node.setAttribute("aria-label", `${title}: ${said || "nothing to show"}.`);
}
