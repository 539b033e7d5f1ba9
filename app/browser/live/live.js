// The Live tab: figures that the server has built, drawn with Plotly in place and linked by their x
// axis.

import { LinkedCharts } from "../charts/plots.js";
import { el, isShown, setText } from "../common/dom.js";
import { Diagnosis } from "./diagnosis.js";
import { SamplePrompts } from "./prompts.js";

export class Live {
    constructor(element, setAxis, timeline) {
        this.root = element;
        this.setAxis = setAxis;
        this.timeline = timeline;
        this.prompts = new SamplePrompts(this.part("prompts"));
        this.log = false;
        this.diagnosis = new Diagnosis((name) => this.part(name));
        const nodes = [...element.querySelectorAll('[data-figure]:not([data-figure="timeline"])')];
        this.charts = new LinkedCharts(
            Object.fromEntries(nodes.map((node) => [node.dataset.figure, node])),
            {
                maps: ["norms"],
                adapt: (layout, figure) => this.adapt(layout, figure),
                zoomed: (isZoomed) => {
                    this.part("reset").hidden = !isZoomed;
                },
                clicked: (x) => this.openStep(x),
            },
        );
        for (const button of element.querySelectorAll("button[data-axis]")) {
            button.addEventListener("click", () => this.chooseAxis(button.dataset.axis));
        }
        this.part("reset").addEventListener("click", () => this.charts.zoom(null));
        this.part("log-scale").addEventListener("click", () => this.toggleLog());
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
            else {
                const node = this.charts.node(name);
                const said = this.root.querySelector(`[data-said="${name}"]`);
                node.closest("figure").hidden = Boolean(part.is_absent);
                this.charts.set(name, part);
                if (part.scale) this.showScale(name, part.scale);
                said.textContent = part.said;
                said.dataset.tone = part.tone;
                describe(node, part.said);
            }
        }
    }

    // The colours of a map, as elements of the page: Plotly's own bar takes a third of the drawing.
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

    adapt(layout, { log_axes: axes = [] }) {
        for (const name of axes) {
            // A zoom of the linear axis means nothing on the other one.
            layout[name].uirevision += ` log ${this.log}`;
            if (this.log) Object.assign(layout[name], { type: "log", rangemode: "normal" });
        }
    }

    // A point of a curve opens the step that it stands for.
    openStep(x) {
        if (this.root.querySelector('[data-axis="step"]').ariaPressed === "true")
            this.timeline.openNear(x);
    }

    // -------------------------------------------------------------- words

    showTiles(tiles) {
        const list = this.part("tiles");
        if (list.children.length !== tiles.length) {
            list.replaceChildren(
                ...tiles.map(() =>
                    el("div", {}, el("dt"), el("dd"), el("dd", { class: "rs-tile-note" })),
                ),
            );
        }
        tiles.forEach((tile, index) => {
            const [label, value, note] = list.children[index].children;
            label.textContent = tile.label;
            setText(value, tile.value);
            note.textContent = tile.note;
        });
    }

    showDetails(details) {
        const pairs = (facts) =>
            facts.flatMap(([name, value]) => [el("dt", {}, name), el("dd", {}, value)]);
        this.part("facts").replaceChildren(...pairs(details.facts));
        for (const name of ["data", "plan"]) {
            this.part(name).hidden = !details[name].length;
            this.part(name)
                .querySelector("dl")
                .replaceChildren(...pairs(details[name]));
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
        const atEnd = log.scrollTop + log.clientHeight >= log.scrollHeight - 30;
        log.replaceChildren(
            ...lines.map((line) =>
                el(
                    "li",
                    { "data-level": line.level },
                    el("time", {}, new Date(1000 * line.time).toLocaleTimeString()),
                    line.text,
                ),
            ),
        );
        if (!lines.length) log.replaceChildren(el("li", {}, "Nothing to tell so far."));
        if (atEnd) log.scrollTop = log.scrollHeight;
    }

    showForecast(forecast) {
        const card = this.part("forecast");
        card.hidden = !forecast;
        if (!forecast) return;
        card.querySelector("tbody").replaceChildren(
            ...forecast.rows.map((row) =>
                el(
                    "tr",
                    { "data-tone": row.tone },
                    el("th", { scope: "row" }, row.name),
                    ...["predicted", "measured", "error"].map((name) => el("td", {}, row[name])),
                ),
            ),
        );
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
        card.querySelector("tbody").replaceChildren(
            ...answers.rows.map((row) =>
                el(
                    "tr",
                    {},
                    ...["prompt", "expected", "before", "after"].map((name) =>
                        el("td", { class: tone(row, name) }, row[name] ?? "–"),
                    ),
                ),
            ),
        );
    }
}

function tone(row, name) {
    if (!["before", "after"].includes(name) || row[name] === undefined) return undefined;
    return row[name] === row.expected ? "rs-right" : "rs-off";
}

// For who hears the page: a drawing is what its caption says of it.
function describe(node, said) {
    const title = node.closest("figure").querySelector("h3").textContent;
    node.setAttribute("role", "img");
    node.setAttribute("aria-label", `${title}: ${said || "nothing to show yet"}.`);
}
