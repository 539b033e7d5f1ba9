// The queue above the list of runs: what waits, in which settings the entries differ, and buttons
// to change it.

import { el, field, send } from "../../shared/dom.js";

export class QueueList {
    // changed() is called when the queue was changed here.
    constructor(root, changed) {
        this.root = root;
        this.changed = changed;
        this.part("queue-continue").addEventListener("click", ({ target }) =>
            this.change(target, "continue"),
        );
    }

    part(name) {
        return this.root.querySelector(`[data-part="${name}"]`);
    }

    show(queue) {
        const text = JSON.stringify(queue);
        if (text === this.shown) return;
        const focused = this.part("queue-rows").contains(document.activeElement)
            ? document.activeElement.dataset.queued
            : null;
        this.shown = text;
        this.part("queue").hidden = !queue.rows.length && !queue.problem;
        this.part("queue-held").hidden = !queue.held;
        this.part("queue-behind").hidden = !queue.behind;
        field(this.root, "queue-behind").textContent = queue.behind;
        field(this.root, "queue-problem").textContent = queue.problem;
        this.part("queue-rows").replaceChildren(
            ...queue.rows.map((row, index) => this.row(row, index)),
        );
        if (focused) this.root.querySelector(`[data-queued="${CSS.escape(focused)}"]`)?.focus();
    }

    row(row, index) {
        const button = (label, what) =>
            el(
                "button",
                {
                    type: "button",
                    class: "rs-small",
                    "data-queued": `${row.id} ${what}`,
                    "aria-label": `${label}: ${row.name}`,
                    click: ({ target }) => this.change(target, `${row.id}/${what}`),
                },
                label,
            );
        const problem = row.problem
            ? el("small", { class: "rs-error" }, `Not started: ${row.problem}`)
            : null;
        const resumes = row.resumes ? "resumes · " : "";
        const about = el("small", { title: row.resumes }, `${resumes}${row.model} · ${row.data}`);
        const differs = row.differs
            ? el("small", { class: "rs-queue-differs" }, row.differs)
            : null;
        const up = index ? button("Move up", "up") : null;
        // A resumed run continues in this program.
        const hasBox = !row.problem && !row.resumes;
        return el(
            "li",
            {},
            el("div", {}, el("strong", {}, row.name), about, differs, problem),
            hasBox ? this.detachedBox(row) : null,
            el("span", { class: "rs-queue-actions" }, up, button("Remove", "remove")),
        );
    }

    detachedBox(row) {
        const box = el("input", {
            type: "checkbox",
            "data-queued": `${row.id} detached`,
            "aria-label": `Keep training if I close Ramstream: ${row.name}`,
            change: ({ target }) =>
                this.change(target, `${row.id}/detached`, { detached: target.checked }),
        });
        box.checked = row.detached;
        return el(
            "label",
            { class: "rs-queue-detached" },
            box,
            "Keep training if I close Ramstream",
        );
    }

    async change(button, what, body = {}) {
        button.disabled = true;
        try {
            const { queue } = await send(`/api/queue/${what}`, body);
            this.show(queue);
            field(this.root, "queue-problem").textContent = queue.problem;
            this.changed();
        } catch (error) {
            field(this.root, "queue-problem").textContent = error.message;
        }
        button.disabled = false;
    }

    // Queues the resume of a run. Throws if that is refused.
    async addResume(id) {
        const { queue } = await send("/api/queue/resume", { run: id });
        this.show(queue);
        this.changed();
    }
}
