// The table of models and machines: selects, sorts and draws its rows, and moves the keyboard focus
// between its cells.

import { el, field } from "../../shared/dom.js";

// A model that a machine can train ranks above one that it cannot.
const RANKS = { good: 0, warn: 0, bad: -1 };
const NOT_COMPUTED = -2;
const WHOLE = "The whole checkpoint has more: its parts for images and sound are not trained.";
// Each key moves by this many rows and columns; a move beyond the last one stops there.
const MOVES = {
    ArrowUp: [-1, 0],
    ArrowDown: [1, 0],
    ArrowLeft: [0, -1],
    ArrowRight: [0, 1],
    Home: [0, -99],
    End: [0, 99],
};

// The table's content: the models, the chosen machines, and the columns that have arrived so far.
export class TableData {
    constructor() {
        this.choices = null;
        this.shown = [];
        this.columns = new Map();
        this.counts = {};
        this.failed = false;
    }

    // This machine, followed by the chosen ones.
    machines() {
        return [this.choices.here, ...this.shown];
    }

    cell(machine, id) {
        return this.columns.get(machine)?.cells[id];
    }

    // Undefined for a model that the settings rule out: it has no row.
    parameters(id) {
        return this.counts[id]?.parameters;
    }

    take(machine, column) {
        this.columns.set(machine, column);
        this.counts = column.counts;
    }
}

export class ModelTable {
    // data: a TableData; open(id) opens a model in New; offer(id) asks for machines for a model.
    constructor(root, data, { open, offer }) {
        this.root = root;
        this.data = data;
        this.open = open;
        this.offer = offer;
        this.grid = root.querySelector(".rs-grid table");
        this.head = this.grid.querySelector("thead");
        this.body = this.grid.querySelector("tbody");
        this.tip = root.querySelector(".rs-tip");
        this.sort = { by: "parameters", down: false };
        this.filter = "";
        this.only = "all";
        this.at = null; // the cell with the keyboard focus
        this.pointed = null; // the cell that the tooltip describes
        this.listen();
    }

    listen() {
        const onCell = ({ target }) => this.point(target.closest("td, th"));
        this.body.addEventListener("keydown", (event) => this.move(event));
        this.body.addEventListener("focusin", onCell);
        this.body.addEventListener("focusout", () => this.point(null));
        this.body.addEventListener("mouseover", onCell);
        this.body.addEventListener("mouseleave", () => this.point(null));
        document.addEventListener("scroll", () => this.place(), { capture: true, passive: true });
        const buttons = [...this.root.querySelectorAll("[data-only]")];
        for (const button of buttons) {
            button.addEventListener("click", () => {
                for (const other of buttons) other.setAttribute("aria-pressed", other === button);
                this.only = button.dataset.only;
                this.draw();
            });
        }
    }

    filterBy(text) {
        this.filter = text;
        this.draw();
    }

    // -------------------------------------------------------------- which rows

    rows() {
        const words = this.filter.toLowerCase().split(/\s+/).filter(Boolean);
        const rows = this.data.choices.models.filter(
            (model) =>
                this.data.parameters(model.id) !== undefined &&
                hasWords(model, words) &&
                this.isWanted(model),
        );
        return rows.sort((one, other) => this.compare(one, other));
    }

    // Whether the model is shown: always, or only if this machine or any machine can train it.
    isWanted({ id }) {
        if (this.only === "all") return true;
        const { choices } = this.data;
        const machines = this.only === "here" ? [choices.here] : this.data.machines();
        return machines.some((name) => RANKS[this.data.cell(name, id)?.labels.tone] === 0);
    }

    // Among models of the same rank, the largest comes first.
    compare(one, other) {
        const { by, down } = this.sort;
        const sign = down ? -1 : 1;
        if (by === "model")
            return sign * one.title.localeCompare(other.title, "en", { numeric: true });
        const difference = sign * (this.value(one) - this.value(other));
        return difference || this.data.parameters(other.id) - this.data.parameters(one.id);
    }

    value({ id }) {
        const { by } = this.sort;
        if (by === "parameters") return this.data.parameters(id);
        const cell = this.data.cell(by, id);
        if (!cell) return NOT_COMPUTED;
        return cell.tokens_per_second ?? RANKS[cell.labels.tone];
    }

    // Text is sorted from A, and sizes from the smallest model; machines are sorted from the
    // fastest.
    sortBy(by) {
        const isText = by === "model" || by === "parameters";
        this.sort = { by, down: this.sort.by === by ? !this.sort.down : !isText };
        this.draw();
    }

    // -------------------------------------------------------------- drawing

    draw() {
        if (!this.data.choices) return;
        this.point(null);
        const rows = this.rows();
        const focused = document.activeElement;
        const wasInside = this.body.contains(focused);
        const heading = this.head.contains(focused) && focused.closest("[data-by]").dataset.by;
        this.drawHead();
        this.body.replaceChildren(...rows.map((model) => this.drawRow(model)));
        const current = this.current();
        if (current) current.tabIndex = 0;
        if (wasInside) current?.focus();
        else if (heading)
            this.head.querySelector(`[data-by="${CSS.escape(heading)}"] button`)?.focus();
        this.count(rows);
    }

    drawHead() {
        const machines = this.data
            .machines()
            .map((name) => this.heading(name, name, this.data.columns.get(name)?.memory));
        this.head.replaceChildren(
            el(
                "tr",
                {},
                this.heading("model", "Model"),
                this.heading("parameters", "Parameters"),
                ...machines,
            ),
        );
    }

    heading(by, label, note) {
        return el(
            "th",
            {
                scope: "col",
                "data-by": by,
                class: by === "model" ? "" : "rs-number",
                "aria-sort": this.order(by),
            },
            el("button", { type: "button", click: () => this.sortBy(by) }, label),
            ...(note ?? "").split(" · ").map((line) => el("small", {}, line)),
        );
    }

    order(by) {
        if (this.sort.by !== by) return "none";
        return this.sort.down ? "descending" : "ascending";
    }

    drawRow(model) {
        const name = el(
            "button",
            {
                type: "button",
                class: "rs-link",
                tabindex: -1,
                click: () => this.offer(model.id),
            },
            model.title,
        );
        return el(
            "tr",
            { "data-model": model.id },
            el("th", { scope: "row" }, name, el("small", { title: model.id }, model.id)),
            this.drawParameters(model),
            ...this.data.machines().map((machine) => this.drawCell(model, machine)),
        );
    }

    // Below the parameters of a language model: those of its whole checkpoint, if it has more.
    drawParameters({ id }) {
        const { parameters, whole } = this.data.counts[id];
        return el(
            "td",
            { class: "rs-number", tabindex: -1 },
            inBillions(parameters),
            whole > parameters ? el("small", { title: WHOLE }, `of ${inBillions(whole)}`) : null,
        );
    }

    // A cell of this machine is a button that opens the model in New.
    drawCell(model, machine) {
        const cell = this.data.cell(machine, model.id);
        if (!cell) return el("td", { class: "rs-cell", tabindex: -1 }, "…");
        const { word, speed, ways, tone } = cell.labels;
        const waits = !speed && tone !== "bad" && !this.data.columns.get(machine).timed;
        const second = waits ? "…" : speed;
        const inner = [
            el("b", {}, word),
            second ? el("span", {}, second) : null,
            ways ? el("small", {}, ways) : null,
        ];
        const attributes = { class: "rs-cell", "data-tone": tone, "data-machine": machine };
        if (machine !== this.data.choices.here)
            return el("td", { ...attributes, tabindex: -1 }, ...inner);
        const caption = [word, speed, ways].filter(Boolean).join(", ");
        const button = el(
            "button",
            {
                type: "button",
                tabindex: -1,
                click: () => this.open(model.id),
                "aria-label": `${caption}: open ${model.title} in New`,
            },
            ...inner,
        );
        return el("td", attributes, button);
    }

    count(rows) {
        const { choices, failed } = this.data;
        const known = choices.models.filter(({ id }) => this.data.parameters(id) !== undefined);
        const isWaiting = this.data.machines().some((name) => !this.data.columns.get(name)?.timed);
        const computes = isWaiting && !failed;
        const isAll = rows.length === known.length;
        const counted = isAll
            ? `${rows.length} models.`
            : `${rows.length} of ${known.length} models.`;
        const none = rows.length || !known.length ? "" : this.whyNone();
        const more = computes ? " Speeds are still being computed." : "";
        field(this.root, "counted").textContent = counted + none + this.fitting() + more;
        this.grid.setAttribute("aria-busy", computes);
        this.root.querySelector('[data-part="csv"]').disabled = isWaiting || !rows.length;
    }

    // How many of all models each machine can train, as far as its column has arrived.
    fitting() {
        const counts = this.data.machines().flatMap((name) => {
            const column = this.data.columns.get(name);
            if (!column) return [];
            const cells = Object.values(column.cells);
            return [`${name} ${cells.filter(({ labels }) => RANKS[labels.tone] === 0).length}`];
        });
        return counts.length ? ` Models that fit: ${counts.join(", ")}.` : "";
    }

    whyNone() {
        return this.filter ? ` None matches “${this.filter}”.` : " None fits.";
    }

    // -------------------------------------------------------------- from cell to cell

    // The cell that the Tab key reaches: the one that had the focus last, or the first one.
    current() {
        const { row, column } = this.at ?? { row: 0, column: 0 };
        const rows = this.body.children;
        return target(rows[Math.min(row, rows.length - 1)]?.children[column]);
    }

    move(event) {
        const step = MOVES[event.key];
        const cell = event.target.closest("td, th");
        if (event.key === "Escape") this.point(null);
        if (!step || !cell) return;
        event.preventDefault();
        const rows = this.body.children;
        const row = rows[within(cell.parentNode.sectionRowIndex + step[0], rows.length)];
        const { children } = row;
        target(children[within(cell.cellIndex + step[1], children.length)]).focus();
    }

    // Shows the tooltip of a cell next to it; null hides the tooltip.
    point(cell) {
        const machine = cell?.dataset.machine;
        if (cell?.contains(document.activeElement)) this.remember(cell);
        this.pointed = machine ? cell : null;
        this.tip.hidden = !machine;
        if (!machine) return;
        const id = cell.parentNode.dataset.model;
        const { title } = this.data.choices.models.find((model) => model.id === id);
        this.tip.replaceChildren(
            el("strong", {}, `${title} on ${machine}`),
            el("span", {}, this.data.cell(machine, id).detail),
        );
        target(cell).setAttribute("aria-describedby", this.tip.id);
        this.place();
    }

    // Makes this cell the only one that the Tab key reaches.
    remember(cell) {
        const last = this.body.querySelector('[tabindex="0"]');
        if (last) last.tabIndex = -1;
        target(cell).tabIndex = 0;
        this.at = { row: cell.parentNode.sectionRowIndex, column: cell.cellIndex };
    }

    // Puts the tooltip below its cell, or above it if there is no room below.
    place() {
        if (!this.pointed?.isConnected) return;
        const { tip } = this;
        const box = this.pointed.getBoundingClientRect();
        const fitsBelow = box.bottom + tip.offsetHeight + 8 < innerHeight;
        const top = fitsBelow ? box.bottom + 4 : box.top - tip.offsetHeight - 4;
        const rightmost = innerWidth - tip.offsetWidth - 16;
        tip.style.top = `${top}px`;
        tip.style.left = `${Math.max(8, Math.min(box.left, rightmost))}px`;
    }
}

// The element of a cell that takes the focus.
const target = (cell) => cell?.querySelector("button") ?? cell;

const inBillions = (count) => `${(count / 1e9).toFixed(2)} B`;

const within = (index, length) => Math.max(0, Math.min(length - 1, index));

function hasWords({ title, family, id, also }, words) {
    const text = [title, family, id, ...also].join(" ").toLowerCase();
    return words.every((word) => text.includes(word));
}
