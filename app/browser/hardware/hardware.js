// The Hardware tab: this machine, what it and others can train, and the machines for a model.

import { el, field, send } from "../common/dom.js";
import { JobView, noticeJobs } from "../common/jobs.js";

const BOX_WAIT = 100;
const BOX_TRIES = 40;
const RANKS = { good: 0, warn: 0, bad: -1 };

export class Hardware {
    constructor(element, openTrain) {
        this.root = element;
        this.openTrain = openTrain;
        this.stale = true;
        this.reading = false;
        this.choices = this.settings = this.at = null;
        this.shown = [];
        this.columns = new Map();
        this.counts = {};
        this.sort = { by: "parameters", down: false };
        this.filter = "";
        this.only = "all";
        this.turn = 0;
        this.listen();
    }

    part(name) {
        return this.root.querySelector(`[data-part="${name}"]`);
    }

    listen() {
        const on = (name, event, act) => this.part(name).addEventListener(event, act);
        on("again", "click", () => this.outdated(true));
        on("measure", "click", () => this.measure());
        this.measuring = new JobView(this.part("measuring"));
        on("add", "click", () => this.show([...this.shown, this.part("known").value]));
        on("csv", "click", () => this.download());
        on("settings", "submit", (event) => event.preventDefault());
        on("settings", "change", ({ target }) => {
            if (target.name !== "filter" && this.choices) this.ask();
        });
        on("settings", "input", ({ target }) => {
            if (target.name !== "filter") return;
            this.filter = target.value;
            if (this.choices) this.draw();
        });
        for (const button of this.root.querySelectorAll("[data-only]")) {
            button.addEventListener("click", () => {
                this.only = button.dataset.only;
                for (const other of this.root.querySelectorAll("[data-only]"))
                    other.setAttribute("aria-pressed", other === button);
                if (this.choices) this.draw();
            });
        }
        on("ask", "submit", (event) => {
            event.preventDefault();
            this.offer();
        });
        const body = this.root.querySelector(".rs-grid tbody");
        body.addEventListener("keydown", (event) => this.move(event));
        body.addEventListener("focusin", ({ target }) => this.point(target.closest("td, th")));
        body.addEventListener("focusout", () => this.point(null));
        body.addEventListener("mouseover", ({ target }) => this.point(target.closest("td, th")));
        body.addEventListener("mouseleave", () => this.point(null));
        document.addEventListener("scroll", () => this.place(), { capture: true, passive: true });
    }

    async tried(work) {
        const said = field(this.root, "error");
        try {
            await work();
            said.hidden = true;
        } catch (error) {
            said.textContent = error.message;
            said.hidden = false;
        }
    }

    // ------------------------------------------------------------ this machine

    outdated(now = false) {
        this.stale = true;
        if (now) this.refresh();
    }

    async refresh() {
        if (!this.stale || this.reading) return;
        this.reading = true;
        this.stale = false;
        let read = false;
        await this.tried(async () => {
            if (!this.choices) this.choose(await send("/api/hardware/choices"));
            const about = await send("/api/hardware");
            this.columns.delete(this.choices.here);
            this.drawMachine(about);
            if (about.job && !this.following) this.follow(about.job);
            this.load();
            read = true;
        });
        this.stale ||= !read;
        this.reading = false;
    }

    choose(choices) {
        this.choices = choices;
        this.shown = choices.shown;
        this.settings = { ...choices.defaults };
        const form = this.part("settings");
        for (const [name, value] of Object.entries(choices.defaults))
            form.elements[name].value = value;
        form.elements.rows.max = choices.most_rows;
        this.root
            .querySelector("datalist")
            .replaceChildren(
                ...choices.models.flatMap((model) =>
                    [model.id, ...model.also].map((id) => el("option", { value: id }, model.title)),
                ),
            );
        this.drawChips();
    }

    drawMachine(about) {
        const listed = (pairs) =>
            pairs.flatMap(([name, value]) => [el("dt", {}, name), el("dd", {}, value)]);
        this.part("facts").replaceChildren(...listed(about.machine.pairs));
        this.part("notes").replaceChildren(
            ...about.machine.notes.map((note) => el("li", {}, note)),
        );
        this.part("rates").replaceChildren(...listed(about.rates.pairs));
        const on = about.rates.at
            ? ` Kept since ${new Date(1000 * about.rates.at).toLocaleString([], {
                  dateStyle: "medium",
                  timeStyle: "short",
              })}.`
            : "";
        field(this.root, "origin").textContent = about.rates.said + on;
        this.part("measure").disabled = Boolean(about.why_not_measure || about.job);
        if (about.why_not_measure) field(this.root, "measured").textContent = about.why_not_measure;
        else if (!this.following && !this.result)
            field(this.root, "measured").textContent = "Takes about ten seconds.";
    }

    async measure() {
        this.part("measure").disabled = true;
        await this.tried(async () => this.follow(await send("/api/hardware/measure", {})));
        if (!this.following) this.outdated(true);
    }

    async follow(job) {
        const said = field(this.root, "measured");
        this.following = true;
        said.textContent = "";
        this.measuring.show(job);
        noticeJobs();
        try {
            job = await this.measuring.follow(job);
            this.result = job.result || job.error;
        } catch (error) {
            this.result = error.message;
        }
        this.following = false;
        this.measuring.show(null); // what came of it stands beside the button
        said.textContent = this.result;
        this.outdated(true);
    }

    // ------------------------------------------------------------ columns

    ask() {
        const form = this.part("settings").elements;
        this.settings = {
            rows: form.rows.valueAsNumber,
            tokens: form.tokens.valueAsNumber,
            dtype: form.dtype.value,
        };
        this.columns.clear();
        this.load();
        if (this.asked) this.offer();
    }

    show(names) {
        if (!this.choices) return;
        this.shown = [...new Set(names.filter(Boolean))];
        this.drawChips();
        this.load();
    }

    async load() {
        // Fits first, which take no time, then speeds, a machine at a time.
        const turn = ++this.turn;
        const said = field(this.root, "settings-error");
        const { settings, choices } = this;
        const names = [choices.here, ...this.shown];
        const get = async (machine, timed) => {
            const known = this.columns.get(machine);
            if (known && (known.timed || !timed)) return;
            const column = await send("/api/hardware/column", { machine, timed, settings });
            if (turn !== this.turn) return;
            this.columns.set(machine, { ...column, timed });
            this.counts = column.counts;
        };
        said.textContent = "";
        this.failed = false;
        this.draw();
        try {
            for (const timed of [false, true]) {
                for (const name of names) {
                    await get(name, timed);
                    if (turn !== this.turn) return;
                    this.draw();
                }
                if (!timed) this.drawLargest(turn);
            }
        } catch (error) {
            if (turn !== this.turn) return;
            said.textContent = error.message;
            this.failed = true;
            this.draw();
        }
    }

    async drawLargest(turn) {
        const said = field(this.root, "largest");
        const found = await send("/api/hardware/largest", { settings: this.settings }).catch(
            (error) => ({ sentence: error.message }),
        );
        if (turn === this.turn) said.textContent = found.sentence;
    }

    drawChips() {
        const { shown, choices } = this;
        const full = shown.length >= choices.most_machines;
        const remove = (name) => {
            this.show(shown.filter((other) => other !== name));
            (this.part("chips").querySelector("button") ?? this.part("known")).focus();
        };
        this.part("chips").replaceChildren(
            ...shown.map((name) =>
                el(
                    "button",
                    {
                        type: "button",
                        class: "rs-chip",
                        "aria-label": `Remove ${name}`,
                        click: () => remove(name),
                    },
                    name,
                    el("span", { "aria-hidden": "true" }, "×"),
                ),
            ),
        );
        const known = this.part("known");
        const left = choices.machines.filter(({ name }) => !shown.includes(name));
        known.replaceChildren(
            ...left.map(({ name, memory }) => el("option", { value: name }, `${name}, ${memory}`)),
        );
        known.disabled = this.part("add").disabled = full || !left.length;
    }

    // ------------------------------------------------------------ the table

    rows() {
        const { here } = this.choices;
        const names = [here, ...this.shown].filter((name) => this.columns.has(name));
        const words = this.filter.toLowerCase().split(/\s+/).filter(Boolean);
        const fits = (id, machines) =>
            machines.some((name) => RANKS[this.cell(name, id)?.words.tone] === 0);
        const machines = { all: null, here: [here], any: names }[this.only];
        const rows = this.choices.models.filter(
            (model) =>
                this.parameters(model.id) !== undefined &&
                words.every((word) =>
                    [model.title, model.family, model.id, ...model.also]
                        .join(" ")
                        .toLowerCase()
                        .includes(word),
                ) &&
                (!machines || fits(model.id, machines)),
        );
        const { by, down } = this.sort;
        const sign = down ? -1 : 1;
        const value = ({ id }) => {
            if (by === "parameters") return this.parameters(id);
            const cell = this.cell(by, id);
            return cell ? (cell.tokens_per_second ?? RANKS[cell.words.tone]) : -2;
        };
        return rows.sort((a, b) =>
            by === "model"
                ? sign * a.title.localeCompare(b.title, "en", { numeric: true })
                : sign * (value(a) - value(b)) || this.parameters(b.id) - this.parameters(a.id),
        );
    }

    cell(machine, id) {
        return this.columns.get(machine)?.cells[id];
    }

    parameters(id) {
        return this.counts[id]?.parameters;
    }

    draw() {
        this.point(null);
        const { here } = this.choices;
        const names = [here, ...this.shown];
        const rows = this.rows();
        const head = (by, label, small) =>
            el(
                "th",
                {
                    scope: "col",
                    "data-by": by,
                    class: by === "model" ? "" : "rs-number",
                    "aria-sort":
                        this.sort.by !== by ? "none" : this.sort.down ? "descending" : "ascending",
                },
                el("button", { type: "button", click: () => this.sortBy(by) }, label),
                small ? el("small", {}, small) : null,
            );
        const focus = document.activeElement;
        const kept = this.root.contains(focus) && focus.closest("[data-by]")?.dataset.by;
        const inside = this.root.querySelector(".rs-grid tbody").contains(focus);
        this.root
            .querySelector(".rs-grid thead")
            .replaceChildren(
                el(
                    "tr",
                    {},
                    head("model", "Model"),
                    head("parameters", "Parameters"),
                    ...names.map((name) => head(name, name, this.columns.get(name)?.memory ?? "…")),
                ),
            );
        this.root.querySelector(".rs-grid tbody").replaceChildren(
            ...rows.map((model) =>
                el(
                    "tr",
                    { "data-model": model.id },
                    el(
                        "th",
                        { scope: "row" },
                        el(
                            "button",
                            {
                                type: "button",
                                class: "rs-link",
                                tabindex: -1,
                                click: () => this.offer(model.id),
                            },
                            model.title,
                        ),
                        el("small", {}, model.id),
                    ),
                    el(
                        "td",
                        { class: "rs-number", tabindex: -1 },
                        (this.parameters(model.id) / 1e9).toFixed(2),
                        " B",
                    ),
                    ...names.map((name) => this.drawCell(model, name)),
                ),
            ),
        );
        const nodes = (list) =>
            list[Math.min(this.at?.row ?? 0, list.length - 1)]?.children[this.at?.column ?? 0];
        const current = target(nodes([...this.root.querySelectorAll(".rs-grid tbody tr")]));
        if (current) current.tabIndex = 0;
        if (inside) current?.focus();
        else if (kept) this.root.querySelector(`th[data-by="${CSS.escape(kept)}"] button`)?.focus();
        this.count(rows, names);
    }

    drawCell(model, name) {
        const cell = this.cell(name, model.id);
        if (!cell) return el("td", { class: "rs-cell", tabindex: -1 }, "…");
        const { word, speed, tone } = cell.words;
        const waits = !speed && tone !== "bad" && !this.columns.get(name).timed ? "…" : speed;
        const inner = [el("b", {}, word), waits ? el("span", {}, waits) : null];
        const opens = name === this.choices.here;
        return el(
            "td",
            {
                class: "rs-cell",
                "data-tone": tone,
                "data-machine": name,
                tabindex: opens ? null : -1,
            },
            ...(opens
                ? [
                      el(
                          "button",
                          {
                              type: "button",
                              tabindex: -1,
                              click: () => this.open(model.id),
                              "aria-label": `${word}${speed ? `, ${speed}` : ""}: open ${model.title} in Train`,
                          },
                          ...inner,
                      ),
                  ]
                : inner),
        );
    }

    count(rows, names) {
        const total = this.choices.models.filter(
            ({ id }) => this.parameters(id) !== undefined,
        ).length;
        const waiting = names.some((name) => !this.columns.get(name)?.timed);
        const none =
            rows.length || !total
                ? ""
                : this.filter
                  ? ` None matches “${this.filter}”.`
                  : " None fits.";
        field(this.root, "counted").textContent =
            `Shown: ${rows.length} of ${total} models.${none}` +
            (waiting && !this.failed ? " Speeds are still being computed." : "");
        this.root
            .querySelector(".rs-grid table")
            .setAttribute("aria-busy", waiting && !this.failed);
        this.part("csv").disabled = waiting || !rows.length;
    }

    sortBy(by) {
        this.sort = {
            by,
            down: this.sort.by === by ? !this.sort.down : by !== "model" && by !== "parameters",
        };
        this.draw();
    }

    move(event) {
        const steps = {
            ArrowUp: [-1, 0],
            ArrowDown: [1, 0],
            ArrowLeft: [0, -1],
            ArrowRight: [0, 1],
            Home: [0, -99],
            End: [0, 99],
        };
        const step = steps[event.key];
        const cell = event.target.closest("td, th");
        if (event.key === "Escape") this.point(null);
        if (!step || !cell) return;
        event.preventDefault();
        const rows = [...cell.closest("tbody").children];
        const clamp = (value, length) => Math.max(0, Math.min(length - 1, value));
        const row = rows[clamp(rows.indexOf(cell.parentNode) + step[0], rows.length)];
        target(row.children[clamp(cell.cellIndex + step[1], row.children.length)]).focus();
    }

    point(cell) {
        const tip = this.root.querySelector(".rs-tip");
        const machine = cell?.dataset.machine;
        const model = cell?.parentNode.dataset.model;
        if (cell?.contains(document.activeElement)) {
            const last = this.root.querySelector('.rs-grid tbody [tabindex="0"]');
            if (last) last.tabIndex = -1;
            target(cell).tabIndex = 0;
            this.at = { row: cell.parentNode.sectionRowIndex, column: cell.cellIndex };
        }
        this.pointed = machine ? cell : null;
        tip.hidden = !machine;
        if (!machine) return;
        const { title } = this.choices.models.find(({ id }) => id === model);
        tip.replaceChildren(
            el("strong", {}, `${title} on ${machine}`),
            el("span", {}, this.cell(machine, model).detail),
        );
        target(cell).setAttribute("aria-describedby", tip.id);
        this.place();
    }

    place() {
        if (!this.pointed?.isConnected) return;
        const tip = this.root.querySelector(".rs-tip");
        const box = this.pointed.getBoundingClientRect();
        const below = box.bottom + tip.offsetHeight + 8 < innerHeight;
        tip.style.top = `${below ? box.bottom + 4 : box.top - tip.offsetHeight - 4}px`;
        tip.style.left = `${Math.max(8, Math.min(box.left, innerWidth - tip.offsetWidth - 16))}px`;
    }

    async download() {
        const machines = [this.choices.here, ...this.shown];
        const models = this.rows().map(({ id }) => id);
        await this.tried(async () => {
            const { csv } = await send("/api/hardware/csv", {
                machines,
                models,
                settings: this.settings,
            });
            const address = URL.createObjectURL(new Blob([csv], { type: "text/csv" }));
            el("a", { href: address, download: "ramstream-models.csv" }).click();
            setTimeout(() => URL.revokeObjectURL(address), 1000);
        });
    }

    // ------------------------------------------------------------ one model

    async open(id) {
        // Gradio makes the boxes of a tab when it is opened, and may fill them a moment later.
        this.point(null);
        this.openTrain();
        for (let tries = 0, right = 0; tries < BOX_TRIES && right < 4; tries += 1) {
            const box = document.querySelector("#field-model-source :is(input, textarea)");
            right = box?.value === id ? right + 1 : 0;
            if (box?.offsetParent && !right) {
                Object.getOwnPropertyDescriptor(Object.getPrototypeOf(box), "value").set.call(
                    box,
                    id,
                );
                box.focus();
                box.dispatchEvent(new Event("input", { bubbles: true }));
                await new Promise((resolve) => setTimeout(resolve, BOX_WAIT));
                box.dispatchEvent(new FocusEvent("blur"));
            }
            await new Promise((resolve) => setTimeout(resolve, BOX_WAIT));
        }
    }

    async offer(id) {
        const box = this.part("ask").elements.model;
        const said = field(this.root, "offered");
        const table = this.part("offers");
        if (id) {
            box.value = id;
            this.part("ask").scrollIntoView({ block: "nearest" });
            box.focus();
        }
        const asked = (this.asked = { model: box.value, settings: this.settings });
        said.className = "rs-hint";
        said.textContent = "Looking through the machines …";
        try {
            const found = await send("/api/hardware/offers", asked);
            if (asked !== this.asked) return;
            table.hidden = !found.offers.length;
            said.textContent = found.offers.length
                ? `${found.title}, ${found.parameters} parameters: ${found.offers.length} known machines, least RAM first.`
                : `No known machine holds ${found.title} with these settings. Fewer or shorter rows take less.`;
            table
                .querySelector("tbody")
                .replaceChildren(...found.offers.flatMap((offer) => this.drawOffer(offer)));
        } catch (error) {
            if (asked !== this.asked) return;
            table.hidden = true;
            said.className = "rs-error";
            said.textContent = error.message;
        }
    }

    drawOffer(offer) {
        const { figures } = this.choices.machines.find(({ name }) => name === offer.name);
        return [
            el(
                "tr",
                {},
                el(
                    "th",
                    { scope: "row" },
                    offer.name,
                    offer.note ? el("small", {}, offer.note) : null,
                ),
                el(
                    "td",
                    { class: "rs-number" },
                    offer.ram,
                    offer.tight ? el("small", {}, "only just") : null,
                ),
                el("td", { class: "rs-number" }, offer.gpu),
                el("td", { class: "rs-number" }, offer.speed || "not known"),
            ),
            el(
                "tr",
                {},
                el(
                    "td",
                    { colspan: 4 },
                    el(
                        "details",
                        {},
                        el("summary", {}, `The figures of the ${offer.name} and their sources`),
                        el(
                            "dl",
                            { class: "rs-facts" },
                            ...figures.flatMap((figure) => [
                                el("dt", {}, figure.name),
                                el(
                                    "dd",
                                    {},
                                    figure.value,
                                    ...figure.sources.map((source) =>
                                        el("small", {}, ...sourced(source)),
                                    ),
                                ),
                            ]),
                        ),
                    ),
                ),
            ),
        ];
    }
}

const target = (cell) => cell?.querySelector("button") ?? cell;

function sourced(text) {
    const [address, ...rest] = text.split(" ");
    if (!address.startsWith("https://")) return [text];
    return [
        el("a", { href: address, target: "_blank", rel: "noreferrer" }, address),
        ` ${rest.join(" ")}`,
    ];
}
