// The page of a run: its views show figures that the server has built, drawn by Plotly in place and
// linked by their x axis, and everything else that is known of the run.

import { followLinks } from "../../shared/address.js";
import { LinkedCharts } from "../../shared/charts/plots.js";
import { el, field, setText } from "../../shared/dom.js";
import { Answers } from "./answers.js";
import { EvaluateView } from "./evaluate_view.js";
import { ExportView } from "./export_view.js";
import { Head } from "./head.js";
import { LogView } from "./log_view.js";
import { SamplePrompts } from "./prompts.js";
import { RankTable } from "./ranks_table.js";
import { SettingsView } from "./settings_view.js";

const TITLES = {
    overview: "Overview",
    learning: "Learning",
    machine: "Machine",
    chat: "Chat",
    evaluate: "Evaluate",
    settings: "Settings",
    log: "Log",
    export: "Export",
};
const UNREAD = ["chat", "log"]; // these views show nothing of what a poll answers

export class RunPage {
    // go(place) shows another place, setAxis(axis) reads the figures on another axis, openChat(run)
    // opens Chat, wake() reads the run at once, edit() opens the form with what can be changed,
    // changed() reads the sidebar again.
    constructor(element, timeline, { go, setAxis, openChat, wake, edit, changed }) {
        this.root = element.querySelector(".rs-run");
        this.go = go;
        this.setAxis = setAxis;
        this.timeline = timeline;
        this.view = "overview";
        this.prompts = new SamplePrompts(this.part("prompts"));
        this.isLog = true;
        this.head = new Head(this.part("head"), { go, openChat });
        this.answers = new Answers(this.part("answers"));
        this.ranks = new RankTable(this.part("ranks"));
        this.others = {
            settings: new SettingsView(this.root, wake, edit),
            log: new LogView(this.root),
            evaluate: new EvaluateView(this.root),
            export: new ExportView(this.root, changed),
        };
        this.charts = this.linkedCharts();
        this.listen();
    }

    listen() {
        for (const button of this.root.querySelectorAll("button[data-axis]")) {
            button.addEventListener("click", () => this.chooseAxis(button.dataset.axis));
        }
        this.part("reset").addEventListener("click", () => this.charts.zoom(null));
        this.part("fold").addEventListener("click", () =>
            this.fold(!this.root.classList.contains("rs-folded")),
        );
        this.part("log-scale").addEventListener("click", () => this.toggleLog());
        followLinks(this.root, "a[data-page]", ({ dataset }) => this.go({ page: dataset.page }));
        followLinks(this.root, "a[data-view]", ({ dataset }) => {
            this.go({ view: dataset.view });
            if (dataset.part === "answers-over-time") this.prompts.lead();
        });
    }

    // -------------------------------------------------------------- which view

    setView(view) {
        this.view = view;
        this.root.dataset.view = view;
        setText(field(this.root, "title"), TITLES[view]);
        this.charts.schedule();
        this.timeline.schedule();
    }

    // Whether the view shows what a poll answers.
    reads() {
        return !UNREAD.includes(this.view);
    }

    // Shows what the view reads by itself; `answer` is that of the poll.
    showView(answer) {
        this.showOnly("run");
        this.others[this.view]?.refresh(answer);
    }

    // Shows one of: `waiting` for an answer, `empty` without any run, `gone`, and the `run`.
    showOnly(name) {
        for (const part of ["waiting", "empty", "gone", "run"])
            this.part(part).hidden = part !== name;
    }

    // There is no run at all.
    showNone() {
        this.clear();
        this.showOnly("empty");
    }

    // The run of the address cannot be shown; `caption` says why.
    miss(caption) {
        this.clear();
        this.showOnly("gone");
        setText(field(this.root, "gone"), caption);
    }

    // The address names another step, or none.
    setStep(step) {
        const { timeline } = this;
        if (step === timeline.chosen) return;
        timeline.chosen = step;
        if (timeline.latest) timeline.follow();
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

    clear() {
        this.showOnly("waiting");
        for (const view of Object.values(this.others)) view.clear();
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
        this.isLog = !this.isLog;
        this.part("log-scale").setAttribute("aria-pressed", String(this.isLog));
        this.charts.redrawAll();
    }

    show(answer) {
        this.showTiles(answer.tiles);
        this.ranks.show(answer.ranks);
        this.part("unevaluated").hidden = answer.evaluates;
        this.head.show(answer);
        const csv = `/api/runs/${encodeURIComponent(answer.run_id)}/curves.csv`;
        this.part("curves-csv").setAttribute("href", csv);
        // Of a run that ended before its first step there is nothing to draw, and the head says it
        // all. While one is prepared, the charts have their places.
        const isPreparing = answer.head.phase === "preparing";
        this.root.classList.toggle("rs-undrawn", !answer.has_steps && !isPreparing);
        this.showMachine(answer);
        for (const [name, part] of Object.entries(answer.parts)) {
            if (name === "details") this.showDetails(part);
            else if (name === "timeline") this.timeline.show(part, answer.run_id);
            else if (name === "prompts") this.prompts.show(part);
            else if (name === "answers") this.answers.show(part, answer.run_id);
            else this.showFigure(name, part);
        }
    }

    // Once a run is over, what its machine did takes one line, until somebody opens it.
    showMachine({ head, run_id, machine }) {
        setText(field(this.root, "machine"), machine);
        const now = `${run_id} ${head.phase === "over"}`;
        if (now === this.folded) return;
        const wasGoing = this.folded === `${run_id} false`;
        this.folded = now;
        const isOver = head.phase === "over";
        this.root.classList.toggle("rs-over", isOver);
        this.fold(isOver && !(wasGoing && this.readsTimeline()));
    }

    readsTimeline() {
        return this.timeline.root.getBoundingClientRect().top < window.innerHeight / 2;
    }

    fold(isFolded) {
        this.root.classList.toggle("rs-folded", isFolded);
        this.part("fold").setAttribute("aria-expanded", String(!isFolded));
        this.charts.schedule();
        this.timeline.schedule();
    }

    showFigure(name, part) {
        const node = this.charts.node(name);
        const caption = this.root.querySelector(`[data-caption="${name}"]`);
        node.closest("figure").hidden = Boolean(part.is_absent);
        this.charts.set(name, part);
        if (part.scale) this.showScale(name, part.scale);
        caption.textContent = part.caption;
        caption.dataset.tone = part.tone;
        describe(node, part.caption);
    }

    // The color scale of a map, as elements of the page: Plotly's own takes a third of the drawing
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

    // Makes axes logarithmic unless a person has chosen otherwise.
    adapt(layout, { log_axes: axes = [] }) {
        for (const name of axes) {
            // A zoom of the linear axis is meaningless on the logarithmic one.
            layout[name].uirevision += ` log ${this.isLog}`;
            if (this.isLog) Object.assign(layout[name], { type: "log", rangemode: "normal" });
        }
    }

    // A click on a point of a curve opens the timeline of its step, if x counts steps.
    openStep(x) {
        const isBySteps = this.root.querySelector('[data-axis="step"]').ariaPressed === "true";
        if (!isBySteps) return;
        if (this.view === "learning") this.go({ view: "machine" });
        this.timeline.openNear(x);
    }

    // -------------------------------------------------------------- words

    showTiles(tiles) {
        const list = this.part("tiles");
        if (list.children.length !== tiles.length) list.replaceChildren(...tiles.map(emptyTile));
        for (const [index, tile] of tiles.entries()) {
            const [label, value, note] = list.children[index].children;
            list.children[index].dataset.tile = tile.label;
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
        this.part("grid").hidden = !details.grid;
        this.part("grid").querySelector("pre").textContent = details.grid;
        this.part("formula").textContent = details.formula ? `TFLOPS: ${details.formula}` : "";
        this.showForecast(details.forecast);
        this.showPlaces(details.places);
    }

    showPlaces(places) {
        const card = this.part("places");
        card.hidden = !places;
        if (!places) return;
        field(card, "places-caption").textContent = places.caption;
        field(card, "places-more").textContent = places.more;
        card.querySelector("tbody").replaceChildren(...places.rows.map(placeRow));
    }

    showForecast(forecast) {
        const card = this.part("forecast");
        card.hidden = !forecast;
        if (!forecast) return;
        card.querySelector("tbody").replaceChildren(...forecast.rows.map(forecastRow));
        this.part("forecast-caption").textContent = forecast.caption;
    }
}

const pairs = (facts) =>
    facts.flatMap(([name, value]) => [el("dt", {}, name), el("dd", {}, value)]);

const emptyTile = () => el("div", {}, el("dt"), el("dd"), el("dd", { class: "rs-tile-note" }));

function forecastRow({ tone, name, predicted, measured, error }) {
    const cells = [predicted, measured, error].map((text) => el("td", {}, text));
    return el("tr", { "data-tone": tone }, el("th", { scope: "row" }, name), ...cells);
}

function placeRow([units, place, updated]) {
    const cells = [place, updated].map((text) => el("td", {}, text));
    return el("tr", {}, el("th", { scope: "row" }, units), ...cells);
}

// For screen readers, the caption of a drawing is its description.
function describe(node, caption) {
    const title = node.closest("figure").querySelector("h3").textContent;
    node.setAttribute("role", "img");
    node.setAttribute("aria-label", `${title}: ${caption || "nothing to show"}.`);
}
