// The Runs tab: lists the queue and every run, and offers the actions on a run.

import { el, field, send } from "../common/dom.js";
import { JobView, noticeJobs } from "../common/jobs.js";
import { Comparison, LEAST, MOST } from "./compare.js";
import { RunDetails } from "./run_details.js";

const LIST_WAIT = 2000; // ms between reads of the list

const path = (id, what) => `/api/runs/${encodeURIComponent(id)}/${what}`;

export class RunList {
    // openRun(id, tab) shows a run, closeRun(id) stops showing it, talkTo(id) opens it in Talk.
    constructor(element, { openRun, closeRun, talkTo }) {
        this.root = element;
        this.openRun = openRun;
        this.closeRun = closeRun;
        this.talkTo = talkTo;
        this.rows = new Map(); // the node of each run, and the text from which it was made
        this.ticked = new Set();
        this.readAt = Number.NEGATIVE_INFINITY;
        this.run = null; // the run of the export card
        this.details = new RunDetails(
            this.part("details"),
            () => this.refresh(true),
            (id) => this.focus(id, "details"),
        );
        this.comparison = new Comparison(element, this.part("compare"), (ids) =>
            this.compared(ids),
        );
        this.exporting = new JobView(this.part("exporting"));
        this.listen();
        this.comparison.openAddress();
    }

    listen() {
        this.part("compare-open").addEventListener("click", () =>
            this.comparison.open([...this.ticked], true),
        );
        this.part("queue-continue").addEventListener("click", ({ target }) =>
            this.changeQueue(target, "continue"),
        );
        const card = this.part("export");
        card.querySelector('[data-part="close"]').addEventListener("click", () => {
            card.hidden = true;
            this.focus(this.run.id, "export");
        });
        card.querySelector("form").addEventListener("submit", (event) => {
            event.preventDefault();
            this.export(new FormData(event.target));
        });
    }

    part(name) {
        return this.root.querySelector(`[data-part="${name}"]`);
    }

    async refresh(force = false) {
        if (!force && performance.now() - this.readAt < LIST_WAIT) return;
        this.readAt = performance.now();
        const { runs, queue } = await send("/api/runs");
        this.part("empty").hidden = runs.length > 0;
        this.part("list").hidden = runs.length === 0;
        this.part("bar").hidden = runs.length === 0;
        this.showQueue(queue);
        this.showRuns(runs);
        this.comparison.refresh();
    }

    // A row is redrawn only if its content has changed, so that another run's next step does not
    // take the focus or close an open menu.
    showRuns(runs) {
        const known = new Map();
        for (const run of runs) {
            const text = JSON.stringify(run);
            const before = this.rows.get(run.id);
            if (before?.text === text) {
                known.set(run.id, before);
                continue;
            }
            const focused = before?.node.contains(document.activeElement)
                ? document.activeElement.dataset.act
                : null;
            const node = this.row(run);
            before?.node.replaceWith(node);
            if (focused) node.querySelector(`[data-act="${focused}"]`)?.focus();
            known.set(run.id, { text, node });
        }
        this.rows = known;
        const body = this.part("rows");
        const nodes = [...known.values()].map(({ node }) => node);
        const isSame =
            nodes.length === body.children.length &&
            nodes.every((node, index) => node === body.children[index]);
        if (!isSame) body.replaceChildren(...nodes);
        for (const id of this.ticked) if (!known.has(id)) this.ticked.delete(id);
        this.showTicked();
    }

    row(run) {
        const state = el(
            "span",
            { class: "rs-state", "data-tone": run.tone, title: run.reason },
            run.word,
        );
        const tick = run.actions.includes("compare") ? this.tick(run) : null;
        return el(
            "tr",
            { "data-run": run.id },
            el("td", { class: "rs-pick" }, tick, state),
            nameCell(run),
            el("td", { class: "rs-number" }, run.steps),
            el("td", { class: "rs-number" }, run.loss),
            el("td", {}, run.model, el("small", {}, run.data)),
            el("td", {}, started(run.created), el("small", {}, `at work for ${run.at_work}`)),
            el("td", { class: "rs-row-actions" }, this.actions(run)),
        );
    }

    actions(run) {
        const button = (act, label, work) => {
            if (!run.actions.includes(act)) return null;
            return el(
                "button",
                {
                    type: "button",
                    class: "rs-small",
                    "data-act": act,
                    "aria-label": `${label}: ${run.name}`,
                    click: work,
                },
                label,
            );
        };
        return el(
            "div",
            {},
            button("open", "Open", () => this.openRun(run.id, "live")),
            button("resume", run.begins_anew ? "Start again" : "Resume", ({ target }) =>
                this.resume(run, target),
            ),
            button("talk", "Talk", () => this.talkTo(run.id)),
            button("details", "Details", () => this.details.open(run)),
            button("draft", "New run from this one", ({ target }) => this.draft(run, target)),
            button("train-on", "Train on", ({ target }) => this.draft(run, target, true)),
            button("export", "Export", () => this.openExport(run)),
            button("delete", "Delete", ({ target }) => this.delete(run, target)),
        );
    }

    // Moves the focus to a button in a run's row, or in the first row if that row is gone.
    focus(id, act) {
        const row = this.rows.get(id)?.node ?? this.part("rows").firstElementChild;
        (row?.querySelector(`[data-act="${act}"]`) ?? row?.querySelector("button"))?.focus();
    }

    // -------------------------------------------------------------- comparing

    tick(run) {
        const box = el("input", {
            type: "checkbox",
            "data-act": "compare",
            "aria-label": `Compare: ${run.name}`,
            change: () => {
                if (box.checked) this.ticked.add(run.id);
                else this.ticked.delete(run.id);
                this.showTicked();
            },
        });
        box.checked = this.ticked.has(run.id);
        return box;
    }

    showTicked() {
        const count = this.ticked.size;
        const fits = count >= LEAST && count <= MOST;
        const button = this.part("compare-open");
        button.disabled = !fits;
        button.classList.toggle("rs-primary", fits);
        button.textContent = count ? `Compare ${count}` : "Compare";
        field(this.root, "ticked").textContent = aboutTicked(count);
    }

    // The compared runs are the ticked ones.
    compared(ids) {
        if (ids.length) this.ticked = new Set(ids);
        for (const box of this.root.querySelectorAll('[data-act="compare"]')) {
            box.checked = this.ticked.has(box.closest("tr").dataset.run);
        }
        this.showTicked();
    }

    // -------------------------------------------------------------- the queue

    showQueue(queue) {
        const text = JSON.stringify(queue);
        if (text === this.queueShown) return;
        const focused = this.part("queue-rows").contains(document.activeElement)
            ? document.activeElement.dataset.queued
            : null;
        this.queueShown = text;
        this.part("queue").hidden = !queue.rows.length && !queue.problem;
        this.part("queue-held").hidden = !queue.held;
        this.part("queue-behind").hidden = !queue.behind;
        field(this.root, "queue-behind").textContent = queue.behind;
        field(this.root, "queue-problem").textContent = queue.problem;
        this.part("queue-rows").replaceChildren(
            ...queue.rows.map((row, index) => this.queueRow(row, index)),
        );
        if (focused) this.root.querySelector(`[data-queued="${CSS.escape(focused)}"]`)?.focus();
    }

    queueRow(row, index) {
        const button = (label, what) =>
            el(
                "button",
                {
                    type: "button",
                    class: "rs-small",
                    "data-queued": `${row.id} ${what}`,
                    "aria-label": `${label}: ${row.name}`,
                    click: ({ target }) => this.changeQueue(target, `${row.id}/${what}`),
                },
                label,
            );
        const problem = row.problem
            ? el("small", { class: "rs-error" }, `It was not started: ${row.problem}`)
            : null;
        const about = el("small", {}, `${row.model} · ${row.data}`);
        const up = index ? button("Move up", "up") : null;
        return el(
            "li",
            {},
            el("div", {}, el("strong", {}, row.name), about, problem),
            row.problem ? null : this.detachedBox(row),
            el("span", { class: "rs-queue-actions" }, up, button("Remove", "remove")),
        );
    }

    detachedBox(row) {
        const box = el("input", {
            type: "checkbox",
            "data-queued": `${row.id} detached`,
            "aria-label": `Run detached: ${row.name}`,
            change: ({ target }) =>
                this.changeQueue(target, `${row.id}/detached`, { detached: target.checked }),
        });
        box.checked = row.detached;
        const title = "In a process of its own, which goes on when Ramstream itself is closed";
        return el("label", { class: "rs-queue-detached", title }, box, "Run detached");
    }

    async changeQueue(button, what, body = {}) {
        button.disabled = true;
        try {
            const { queue } = await send(`/api/queue/${what}`, body);
            this.showQueue(queue);
            field(this.root, "queue-problem").textContent = queue.problem;
        } catch (error) {
            field(this.root, "queue-problem").textContent = error.message;
        }
        button.disabled = false;
    }

    // -------------------------------------------------------------- one run

    delete(run, button) {
        const dialog = this.part("delete");
        field(this.root, "delete-name").textContent = run.name;
        dialog.returnValue = "keep";
        const closed = () => {
            if (dialog.returnValue === "delete") this.act(button, () => this.deleteNow(run));
        };
        dialog.addEventListener("close", closed, { once: true });
        dialog.showModal();
    }

    async deleteNow(run) {
        await send(path(run.id, "delete"), {});
        if (this.run?.id === run.id) this.part("export").hidden = true;
        this.comparison.without(run.id);
        this.closeRun(run.id);
        await this.refresh(true);
        this.focus(run.id, "open");
    }

    async resume(run, button) {
        await this.act(button, async () => {
            await send(path(run.id, "control"), { command: "resume" });
            this.openRun(run.id, "live");
        });
    }

    // Fills the form with the run's settings; with `trainsOn`, a new run starts from its weights.
    async draft(run, button, trainsOn = false) {
        await this.act(button, async () => {
            await send(path(run.id, "draft"), { changes: {}, trains_on: trainsOn });
            // A newly opened page shows the form that the server has stored.
            location.assign("?tab=train");
        });
    }

    // Does `work` for `button`; if it fails, the button's cell shows the error.
    async act(button, work) {
        const cell = button.closest("td");
        cell.querySelector(".rs-error")?.remove();
        button.disabled = true;
        try {
            await work();
        } catch (error) {
            cell.append(el("small", { class: "rs-error", role: "alert" }, error.message));
        }
        button.disabled = false;
    }

    openExport(run) {
        this.run = run;
        const card = this.part("export");
        const folder = card.querySelector("input");
        card.hidden = false;
        field(this.root, "export-name").textContent = run.name;
        field(this.root, "export-said").replaceChildren();
        folder.value = run.export_folder;
        card.scrollIntoView({ block: "nearest" });
        folder.focus();
    }

    async export(form) {
        const said = field(this.root, "export-said");
        const button = this.part("export").querySelector(".rs-primary");
        button.disabled = true;
        said.className = "";
        try {
            const wanted = { folder: form.get("folder"), dtype: form.get("dtype") };
            const job = await send(path(this.run.id, "export"), wanted);
            this.exporting.show(job);
            noticeJobs();
            const over = await this.exporting.follow(job);
            if (over.state === "failed") throw new Error(over.error);
            said.textContent = over.result;
        } catch (error) {
            said.className = "rs-error";
            said.textContent = error.message;
        }
        this.exporting.show(null); // the result is shown in its place
        button.disabled = false;
    }
}

function nameCell({ id, name, note, reason, tone }) {
    const why = reason && tone === "bad" ? el("small", { class: "rs-error" }, reason) : null;
    return el(
        "td",
        {},
        el("strong", {}, name),
        note ? el("p", { class: "rs-note" }, note) : null,
        el("small", {}, id),
        why,
    );
}

function aboutTicked(count) {
    if (count > MOST) return `At most ${MOST} runs are compared: untick ${count - MOST}.`;
    if (count === 0) return "Tick two to six runs to see them side by side.";
    return count < LEAST ? "Tick one more run." : "";
}

function started(seconds) {
    return new Date(1000 * seconds).toLocaleString([], { dateStyle: "medium", timeStyle: "short" });
}
