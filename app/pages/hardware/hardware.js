// Hardware: this machine, its measurement, and the requests of the table of models and
// machines.

import { el, field, inCode, send } from "../../shared/dom.js";
import { JobView, noticeJobs } from "../../shared/jobs.js";
import { momentText } from "../../shared/moments.js";
import { ModelTable, TableData } from "./model_table.js";
import { Offers } from "./offers.js";

const BOX_WAIT = 100; // ms between checks of Gradio's box
const BOX_TRIES = 40;
const BOX_RIGHT = 4; // checks in a row at which the box must show the model

export class Hardware {
    // openTrain() shows New; fillForm(changes) changes settings of its form.
    constructor(element, openTrain, fillForm) {
        this.root = element;
        this.openTrain = openTrain;
        this.fillForm = fillForm;
        this.stale = true;
        this.reading = false;
        this.isAfresh = false; // whether the table is to follow the memory that is free now
        this.basis = ""; // what the column of this machine was computed from
        this.settings = null;
        this.wanted = null; // the machines that are asked for before the page was read
        this.following = false; // whether a measurement is in progress
        this.result = "";
        this.turn = 0; // counts requests for the whole table; only the newest one counts
        this.data = new TableData();
        this.table = new ModelTable(element, this.data, {
            open: (id) => this.open(id),
            offer: (id) => this.offer(id),
        });
        this.offers = new Offers(element);
        this.measuring = new JobView(this.part("measuring"));
        this.largest = [...this.part("facts").children]; // found later than the other facts
        this.listen();
    }

    part(name) {
        return this.root.querySelector(`[data-part="${name}"]`);
    }

    listen() {
        const on = (name, event, act) => this.part(name).addEventListener(event, act);
        on("again", "click", () => {
            this.isAfresh = true;
            this.outdated(true);
        });
        on("measure", "click", () => this.measure());
        on("add", "click", () => this.show([...this.data.shown, this.part("known").value]));
        on("csv", "click", () => this.download());
        on("settings", "submit", (event) => event.preventDefault());
        on("settings", "change", ({ target }) => {
            if (target.name !== "filter" && this.data.choices) this.ask();
        });
        on("settings", "input", ({ target }) => {
            if (target.name === "filter") this.table.filterBy(target.value);
        });
        on("ask", "submit", (event) => {
            event.preventDefault();
            this.offer();
        });
    }

    // Does `work`; if it fails, the page shows the error.
    async tried(work) {
        const caption = field(this.root, "error");
        try {
            await work();
            caption.hidden = true;
        } catch (error) {
            caption.textContent = error.message;
            caption.hidden = false;
        }
    }

    // -------------------------------------------------------------- this machine

    outdated(now = false) {
        this.stale = true;
        if (now) this.refresh();
    }

    async refresh() {
        if (!this.stale || this.reading) return;
        this.reading = true;
        this.stale = false;
        let isRead = false;
        await this.tried(async () => {
            if (!this.data.choices) this.choose(await send("/api/hardware/choices"));
            const about = await send(`/api/hardware?fresh=${this.isAfresh}`);
            this.isAfresh = false;
            const basis = JSON.stringify([about.table, about.rates]);
            if (basis !== this.basis) this.data.columns.delete(this.data.choices.here);
            this.basis = basis;
            this.drawMachine(about);
            this.root.dataset.ready = "";
            if (about.job && !this.following) this.follow(about.job);
            this.load();
            isRead = true;
        });
        this.root.dataset.ready = ""; // also if it failed, for the error to be seen
        if (!isRead) this.stale = true;
        this.reading = false;
        this.offerWanted();
    }

    choose(choices) {
        this.data.choices = choices;
        this.data.counts = choices.counts;
        this.data.shown = choices.shown;
        this.settings = { ...choices.defaults };
        const boxes = this.part("settings").elements;
        const optimizers = Object.entries(choices.optimizers);
        boxes.optimizer.replaceChildren(
            ...optimizers.map(([value, label]) => el("option", { value }, label)),
        );
        for (const [name, value] of Object.entries(choices.defaults)) boxes[name].value = value;
        boxes.rows.max = choices.most_rows;
        const names = choices.models.flatMap((model) =>
            [model.id, ...model.also].map((id) => el("option", { value: id }, model.title)),
        );
        this.root.querySelector("datalist").replaceChildren(...names);
        this.drawChips();
    }

    drawMachine({ machine, rates, table, why_not_measure: whyNot, job }) {
        this.part("facts").replaceChildren(...facts(machine.pairs), ...this.largest);
        const then = momentText(table.at);
        field(this.root, "largest-for").textContent = `With ${table.memory} free, on ${then}`;
        const notes = machine.notes.map((note) => el("li", {}, ...inCode(note)));
        this.part("notes").replaceChildren(...notes);
        this.part("rates").replaceChildren(...facts(rates.pairs));
        const kept = rates.at ? ` Measured ${momentText(rates.at)}.` : "";
        field(this.root, "origin").textContent = rates.caption + kept;
        this.part("measure").disabled = Boolean(whyNot || job);
        const measured = field(this.root, "measured");
        if (whyNot) measured.textContent = whyNot;
        else if (!this.following && !this.result) measured.textContent = "Takes about ten seconds.";
    }

    async measure() {
        this.part("measure").disabled = true;
        await this.tried(async () => this.follow(await send("/api/hardware/measure", {})));
        if (!this.following) this.outdated(true);
    }

    async follow(job) {
        const caption = field(this.root, "measured");
        this.following = true;
        caption.textContent = "";
        this.measuring.show(job);
        noticeJobs();
        try {
            const over = await this.measuring.follow(job);
            this.result = over.result || over.error;
        } catch (error) {
            this.result = error.message;
        }
        this.following = false;
        this.measuring.show(null); // the result is shown next to the button
        caption.textContent = this.result;
        this.outdated(true);
    }

    // -------------------------------------------------------------- columns

    // The settings have changed, so everything is requested again.
    ask() {
        this.readSettings();
        if (this.offers.asked) this.offer();
    }

    // Sets the settings to others, as far as the page has them.
    takeOver(settings) {
        const boxes = this.part("settings").elements;
        for (const [name, value] of Object.entries(settings)) {
            const { value: before } = boxes[name];
            boxes[name].value = value;
            if (!boxes[name].value) boxes[name].value = before; // a list without this value
        }
        this.readSettings();
    }

    readSettings() {
        const boxes = this.part("settings").elements;
        this.settings = {
            method: boxes.method.value,
            rows: boxes.rows.valueAsNumber,
            tokens: boxes.tokens.valueAsNumber,
            dtype: boxes.dtype.value,
            optimizer: boxes.optimizer.value,
        };
        this.data.columns.clear();
        this.load();
    }

    show(names) {
        if (!this.data.choices) return;
        this.data.shown = [...new Set(names.filter(Boolean))];
        this.drawChips();
        this.load();
    }

    // Requests the missing columns, one machine at a time: first whether models fit, which takes
    // seconds, then their speeds, which take longer. The largest models follow from the first
    // column, so they come next.
    async load() {
        this.turn += 1;
        const { turn } = this;
        const caption = field(this.root, "settings-error");
        const names = this.data.machines();
        caption.textContent = "";
        this.data.failed = false;
        this.table.draw();
        try {
            for (const timed of [false, true]) {
                for (const [index, name] of names.entries()) {
                    await this.loadColumn(name, timed, turn);
                    if (turn !== this.turn) return;
                    this.table.draw();
                    if (!timed && index === 0) await this.drawLargest(turn);
                }
            }
        } catch (error) {
            if (turn !== this.turn) return;
            caption.textContent = error.message;
            this.data.failed = true;
            this.table.draw();
        }
    }

    async loadColumn(machine, timed, turn) {
        const known = this.data.columns.get(machine);
        if (known && (known.timed || !timed)) return;
        const { settings } = this;
        const column = await send("/api/hardware/column", { machine, timed, settings });
        if (turn === this.turn) this.data.take(machine, { ...column, timed });
    }

    async drawLargest(turn) {
        let found;
        try {
            found = await send("/api/hardware/largest", { settings: this.settings });
        } catch (error) {
            found = { text: error.message, sentences: [] };
        }
        if (turn !== this.turn) return;
        field(this.root, "largest").textContent = found.text;
        const details = this.part("largest-details");
        details.hidden = !found.sentences.length;
        const items = found.sentences.map((sentence) => el("li", {}, sentence));
        details.querySelector("ul").replaceChildren(...items);
    }

    drawChips() {
        const { shown, choices } = this.data;
        this.part("chips").replaceChildren(...shown.map((name) => this.chip(name)));
        const known = this.part("known");
        const left = choices.machines.filter(({ name }) => !shown.includes(name));
        known.replaceChildren(
            ...left.map(({ name, memory }) => el("option", { value: name }, `${name}, ${memory}`)),
        );
        const isFull = shown.length >= choices.most_machines;
        known.disabled = isFull || !left.length;
        this.part("add").disabled = known.disabled;
    }

    chip(name) {
        const remove = () => {
            this.show(this.data.shown.filter((other) => other !== name));
            // The button that had the focus is gone.
            (this.part("chips").querySelector("button") ?? this.part("known")).focus();
        };
        return el(
            "button",
            {
                type: "button",
                class: "rs-machine-chip",
                "aria-label": `Remove ${name}`,
                click: remove,
            },
            name,
            el("span", { "aria-hidden": "true" }, "×"),
        );
    }

    async download() {
        const question = {
            machines: this.data.machines(),
            models: this.table.rows().map(({ id }) => id),
            settings: this.settings,
        };
        await this.tried(async () => {
            const { csv } = await send("/api/hardware/csv", question);
            const address = URL.createObjectURL(new Blob([csv], { type: "text/csv" }));
            el("a", { href: address, download: "ramstream-models.csv" }).click();
            // The browser reads the address shortly after the click.
            setTimeout(() => URL.revokeObjectURL(address), 1000);
        });
    }

    // -------------------------------------------------------------- one model

    // Opens New with the model and the method of training that the table is about.
    async open(id) {
        const { method } = this.settings;
        this.table.point(null);
        this.openTrain();
        await typeModel(id);
        this.fillForm({ "train.method": method });
    }

    // Shows the machines for a model that was asked for before the page could be seen.
    offerWanted() {
        const { wanted } = this;
        if (!wanted || !this.data.choices) return;
        this.wanted = null;
        this.offer(...wanted);
    }

    // Shows the machines for the model `id`, and leads to them; without one, for the model that is
    // chosen. settings: those to take over, if any.
    async offer(id, settings) {
        if (!this.data.choices) {
            this.wanted = [id, settings];
            return;
        }
        if (settings) this.takeOver(settings);
        if (id) {
            this.offers.choose(id);
            this.offers.lead();
        }
        await this.offers.ask(this.data.choices.machines, this.settings);
        this.offers.stay();
    }
}

function facts(pairs) {
    return pairs.flatMap(([name, value]) => [el("dt", {}, name), el("dd", {}, value)]);
}

// Types the name of a model into the form of New. Gradio may still be filling its boxes, so this
// repeats until the name has stayed for a while.
async function typeModel(id) {
    let right = 0;
    for (let tries = 0; tries < BOX_TRIES && right < BOX_RIGHT; tries += 1) {
        const box = document.querySelector("#field-model-source :is(input, textarea)");
        right = box?.value === id ? right + 1 : 0;
        if (box?.offsetParent && !right) {
            setValue(box, id);
            box.focus();
            box.dispatchEvent(new Event("input", { bubbles: true }));
            await sleep(BOX_WAIT);
            box.dispatchEvent(new FocusEvent("blur"));
        }
        await sleep(BOX_WAIT);
    }
}

// Sets the value of a box with the browser's own setter, even if the box has its own `value`
// property.
function setValue(box, value) {
    const { set } = Object.getOwnPropertyDescriptor(Object.getPrototypeOf(box), "value");
    set.call(box, value);
}

const sleep = (milliseconds) => new Promise((resolve) => setTimeout(resolve, milliseconds));
