// Compares several runs: their curves on shared axes, key figures, and the settings in which they
// differ.

import { LinkedCharts } from "../../shared/charts/plots.js";
import { el, field, send } from "../../shared/dom.js";

export const LEAST = 2;
export const MOST = 6;
const AGAIN = 4000; // ms between reads of runs that are active

export class Comparison {
    // changed(ids) is called when the set of compared runs has changed. baseline: the id of the run
    // that others are compared with, or an empty text.
    constructor(root, card, changed, baseline) {
        this.root = root;
        this.baseline = baseline;
        this.card = card;
        this.changed = changed;
        this.ids = [];
        this.axis = "step";
        this.isLog = true; // of the loss
        this.turn = 0; // counts requests; only the newest one counts
        this.readAt = Number.NEGATIVE_INFINITY;
        const nodes = [...card.querySelectorAll("[data-compare]")];
        const byName = Object.fromEntries(nodes.map((node) => [node.dataset.compare, node]));
        this.charts = new LinkedCharts(byName, {
            adapt: (layout, figure) => this.adapt(layout, figure),
            zoomed: (isZoomed) => {
                this.part("compare-reset").hidden = !isZoomed;
            },
        });
        this.part("compare-reset").addEventListener("click", () => this.charts.zoom(null));
        for (const button of card.querySelectorAll("button[data-axis]")) {
            button.addEventListener("click", () => this.chooseAxis(button.dataset.axis));
        }
        this.part("compare-log").addEventListener("click", () => this.toggleLog());
        this.part("compare-close").addEventListener("click", () => this.close());
    }

    setBaseline(baseline) {
        this.baseline = baseline;
        if (this.ids.length) this.read();
    }

    part(name) {
        return this.card.querySelector(`[data-part="${name}"]`);
    }

    // -------------------------------------------------------------- which runs

    openAddress() {
        const asked = named();
        if (asked.length) this.open(asked, false);
    }

    // Follows Back and Forward.
    followAddress() {
        const asked = named();
        if (String(asked) === String(this.ids)) return;
        if (asked.length) this.open(asked, false);
        else this.close();
    }

    open(ids, scrolls) {
        this.ids = ids;
        this.charts.clear();
        this.card.hidden = false;
        this.part("compare-body").hidden = true;
        this.part("compare-runs").replaceChildren();
        this.writeAddress();
        this.changed(ids);
        if (scrolls) {
            this.card.scrollIntoView({ block: "start" });
            this.card.querySelector("h3").focus({ preventScroll: true });
        }
        this.read();
    }

    close() {
        this.ids = [];
        this.turn += 1;
        if (this.card.hidden) return;
        const hadFocus = this.card.contains(document.activeElement);
        this.card.hidden = true;
        this.writeAddress();
        this.changed([]);
        if (hadFocus) this.root.querySelector('[data-part="compare-open"]').focus();
    }

    // A run has another name.
    renamed() {
        if (this.ids.length) this.read();
    }

    // The run was deleted.
    without(id) {
        if (!this.ids.includes(id)) return;
        const left = this.ids.filter((other) => other !== id);
        if (left.length >= LEAST) this.open(left, false);
        else this.close();
    }

    // Only the page Runs shows a comparison.
    writeAddress() {
        if (document.body.dataset.page !== "runs") return;
        const query = new URLSearchParams(location.search);
        query.delete("compare");
        const parts = [query.toString()];
        // The query string is built by hand, since URLSearchParams would escape the commas.
        if (this.ids.length) parts.push(`compare=${this.listed()}`);
        const address = `${location.pathname}?${parts.filter(Boolean).join("&")}`;
        history.replaceState(null, "", address);
    }

    query() {
        const baseline = encodeURIComponent(this.baseline);
        return `runs=${this.listed()}&axis=${this.axis}&baseline=${baseline}`;
    }

    listed() {
        return this.ids.map(encodeURIComponent).join(",");
    }

    chooseAxis(axis) {
        this.axis = axis;
        this.charts.zoom(null);
        for (const button of this.card.querySelectorAll("button[data-axis]")) {
            button.setAttribute("aria-pressed", String(button.dataset.axis === axis));
        }
        this.read();
    }

    toggleLog() {
        this.isLog = !this.isLog;
        this.part("compare-log").setAttribute("aria-pressed", String(this.isLog));
        this.read();
    }

    adapt(layout, { log_axes: axes = [] }) {
        layout.hoverlabel = { ...layout.hoverlabel, namelength: -1 }; // complete names
        for (const name of axes) {
            // A zoom of the linear axis is meaningless on the logarithmic one.
            layout[name].uirevision = `log ${this.isLog}`;
            if (this.isLog) layout[name].type = "log";
        }
    }

    // -------------------------------------------------------------- reading and showing

    refresh() {
        const isOld = performance.now() - this.readAt >= AGAIN;
        if (this.ids.length && this.goingOn && isOld) this.read();
    }

    async read() {
        this.turn += 1;
        const { turn } = this;
        this.readAt = performance.now();
        let answer;
        try {
            answer = await send(`/api/compare?${this.query()}`);
        } catch (error) {
            if (turn !== this.turn) return;
            field(this.card, "compare-problem").textContent = error.message;
            this.goingOn = Boolean(error.unreachable);
            return;
        }
        if (turn === this.turn) this.show(answer);
    }

    show(answer) {
        this.goingOn = answer.going_on;
        field(this.card, "compare-problem").textContent = aboutUnread(answer.unread);
        this.part("compare-body").hidden = false;
        this.showRuns(answer.runs);
        this.showTable("compare-figures", answer.runs, answer.rows);
        this.showTable("compare-settings", answer.runs, answer.settings);
        this.part("compare-settings").hidden = !answer.settings.length;
        field(this.card, "compare-same").textContent = answer.settings.length
            ? ""
            : "None. All settings of these runs are the same.";
        field(this.card, "compare-caution").textContent = answer.caution;
        for (const [name, figure] of Object.entries(answer.figures)) {
            this.charts.node(name).closest("figure").hidden = Boolean(figure.is_absent);
            this.charts.set(name, figure);
            this.charts.node(name).setAttribute("aria-label", answer.caption[name]);
        }
    }

    showRuns(runs) {
        const nodes = runs.map(({ color, name, tone, word }) =>
            el(
                "li",
                {},
                swatch(color),
                el("span", {}, name),
                el("span", { class: "rs-state", "data-tone": tone }, word),
            ),
        );
        this.part("compare-runs").replaceChildren(...nodes);
    }

    showTable(name, runs, rows) {
        const table = this.part(name);
        const heads = runs.map(({ color, name: run, is_baseline: isBaseline }) => {
            const mark = isBaseline ? el("small", {}, "baseline") : "";
            return el("th", { scope: "col" }, swatch(color), run, mark);
        });
        table.querySelector("thead").replaceChildren(el("tr", {}, el("td"), ...heads));
        table.querySelector("tbody").replaceChildren(...rows.map(tableRow));
    }
}

// The runs that the address compares.
function named() {
    const query = new URLSearchParams(location.search);
    return [...new Set((query.get("compare") ?? "").split(",").filter(Boolean))];
}

function aboutUnread(names) {
    if (!names.length) return "";
    const settings = `The settings of ${names.join(", ")} cannot be read`;
    return `${settings}, so they are left out of the difference.`;
}

// best: the column of the best value, null where there is none.
function tableRow({ name, title, texts, best = null, changes }) {
    const cells = texts.map((text, index) => {
        const change = changes?.[index] ? el("small", {}, changes[index]) : "";
        if (index !== best) return el("td", {}, text, change);
        // A screen reader would not convey a color alone.
        const aside = el("span", { class: "rs-hidden" }, " (best)");
        return el("td", { class: "rs-best" }, text, aside, change);
    });
    return el("tr", {}, el("th", { scope: "row", title }, name), ...cells);
}

function swatch(color) {
    const node = el("i", { class: "rs-swatch", "aria-hidden": "true" });
    node.style.background = color;
    return node;
}
