// The sidebar: the pages, and below Runs those under way, those that are queued, and the
// latest ones.

import { addressOf, followLinks, markCurrent } from "../../shared/address.js";
import { el, field, send, setText } from "../../shared/dom.js";

const READ_AGAIN = 60000; // ms until the list is read again; polls report the run of the page
const READ_OTHERS = 3000; // the same, while another run than that of the page goes on
const SOON = 300; // ms after what changed it
const READ_AFTER = 700; // ms until the server has read the records of new runs

export class Sidebar {
    // go(place) shows a place.
    constructor(element, go) {
        this.root = element;
        this.list = element.querySelector('[data-part="recent"]');
        this.place = null;
        this.bar = null;
        this.going = []; // ids of the runs under way
        this.shown = "";
        this.readAt = Number.NEGATIVE_INFINITY;
        this.timer = 0;
        element.querySelector('[data-part="skip"]').addEventListener("click", skip);
        followLinks(element, "a[data-page], a[data-run]", ({ dataset }) =>
            go(
                dataset.run
                    ? { page: "run", run: dataset.run, view: dataset.view ?? "overview" }
                    : { page: dataset.page },
            ),
        );
    }

    // place: what the page shows.
    mark(place) {
        this.place = place;
        markCurrent(
            this.root.querySelectorAll(".rs-nav > a"),
            ({ dataset }) => dataset.page === place.page,
        );
        this.markRuns();
    }

    markRuns() {
        const { page, run } = this.place ?? {};
        markCurrent(
            this.list.querySelectorAll("a"),
            ({ dataset }) => page === "run" && dataset.run === run && !dataset.view,
        );
    }

    // Something has changed the list.
    changed(delay = SOON) {
        clearTimeout(this.timer);
        this.timer = setTimeout(() => this.read(), delay);
    }

    // Is called after each answer of the server.
    refresh() {
        const wait = this.followsOthers ? READ_OTHERS : READ_AGAIN;
        if (performance.now() - this.readAt > wait) this.changed();
    }

    // Whether a run is under way of which no poll reports.
    get followsOthers() {
        return this.going.some((id) => id !== this.bar?.run_id);
    }

    async read() {
        this.readAt = performance.now();
        try {
            this.show(await send("/api/recent"));
        } catch {
            // The line over the run reports that the server does not answer.
        }
    }

    show({ runs, queued, is_complete }) {
        if (!is_complete) this.changed(READ_AFTER);
        this.going = runs.filter(({ tone }) => tone === "busy").map(({ id }) => id);
        const text = JSON.stringify([runs, queued]);
        if (text !== this.shown) {
            this.shown = text;
            const going = runs.filter(({ continues }) => continues);
            const over = runs.filter(({ continues }) => !continues);
            this.list.replaceChildren(
                ...going.map(runEntry),
                ...queued.map(queuedEntry),
                ...over.map(runEntry),
            );
            this.list.hidden = !this.list.children.length;
        }
        this.markRuns();
        if (this.bar) this.follow(this.bar);
    }

    // The run that the page follows is known better than the list.
    follow(bar) {
        const isNews = this.bar?.run_id === bar.run_id && this.bar.state !== bar.state;
        this.bar = bar;
        if (isNews) this.changed();
        const link = [...this.list.querySelectorAll("a")].find(
            ({ dataset }) => dataset.run === bar.run_id && !dataset.view,
        );
        if (!link) return;
        link.dataset.tone = bar.tone;
        setText(field(link, "run-name"), bar.name);
        setText(field(link, "run-state"), stateLabel({ ...bar, word: bar.outcome }));
    }
}

// Moves the focus past the sidebar. The address, which says what the page shows, stays.
function skip(event) {
    event.preventDefault();
    const main = document.getElementById("rs-main");
    main.tabIndex = -1;
    main.focus();
}

function stateLabel({ word, tone, progress }) {
    return tone === "busy" && progress ? `${word} · ${Math.floor(100 * progress)} %` : word;
}

function runEntry(run) {
    const place = { page: "run", view: "overview", run: run.id, step: null };
    return el(
        "li",
        {},
        el(
            "a",
            { href: addressOf(place), "data-run": run.id, "data-tone": run.tone },
            el("i", { class: "rs-dot", "aria-hidden": "true" }),
            el("span", { "data-field": "run-name" }, run.name),
            el("small", { "data-field": "run-state" }, stateLabel(run)),
        ),
        run.served ? servedMark(run) : "",
    );
}

// Leads to where serving can be stopped.
function servedMark({ id, name }) {
    const place = { page: "run", view: "export", run: id, step: null };
    return el(
        "a",
        {
            class: "rs-served",
            href: addressOf(place),
            "data-run": id,
            "data-view": "export",
            title: "Other programs can use this model. Stop it in Export.",
            "aria-label": `Served: ${name}`,
        },
        "Served",
    );
}

function queuedEntry({ name, problem }) {
    return el(
        "li",
        {},
        el(
            "a",
            { href: "?show=runs", "data-page": "runs" },
            el("i", { class: "rs-dot", "aria-hidden": "true" }),
            el("span", {}, name),
            el("small", {}, problem ? "Not started" : "Queued"),
        ),
    );
}
