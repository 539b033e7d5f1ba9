// The page Runs: lists the queue and the runs that are searched for, and offers the actions on
// them.

import { followLinks } from "../../shared/address.js";
import { el, field, send } from "../../shared/dom.js";
import { Menu } from "../../shared/menu.js";
import { RenameDialog } from "../../shared/rename.js";
import { tabName } from "../../shared/tab.js";
import { Columns } from "./columns.js";
import { Comparison, LEAST, MOST } from "./compare.js";
import { Deletion } from "./deletion.js";
import { Marks } from "./marks.js";
import { QueueList } from "./queue.js";
import { itemsOf, rowOf } from "./rows.js";

const LIST_WAIT = 2000; // ms between reads of the list
const FIRST = 50; // number of runs listed at first, and added at each press
const TYPING = 40; // ms after the last key before the search is sent
const SOON = 400; // ms before the list is read again while the server still looks at its runs

const path = (id, what) => `/api/runs/${encodeURIComponent(id)}/${what}`;

export class RunList {
    // go(place) shows another place, openRun(id, view) shows a run, closeRun(id) stops showing it,
    // openChat(id) opens it in Chat. changed() is called when the queue was changed here, and
    // renamed() when a run has another name.
    constructor(element, { go, openRun, closeRun, openChat, changed, renamed }) {
        this.root = element;
        this.openRun = openRun;
        this.closeRun = closeRun;
        this.openChat = openChat;
        this.rows = new Map(); // the node of each run, the run, and the text of it
        this.ticked = new Map(); // the runs with a tick, by id
        this.limit = FIRST;
        this.turn = 0; // counts requests; only the newest one counts
        this.readAt = Number.NEGATIVE_INFINITY;
        this.queue = new QueueList(element, changed);
        const place = element.querySelector(".rs-runs");
        this.deletion = new Deletion(place, (ids) => this.deleted(ids));
        this.marks = new Marks(() => {
            this.comparison.setBaseline(this.marks.baseline);
            this.rows.clear(); // all are drawn anew
            this.refresh(true);
        });
        this.comparison = new Comparison(
            element,
            this.part("compare"),
            (ids) => this.compared(ids),
            this.marks.baseline,
        );
        this.menu = new Menu(place);
        this.rename = new RenameDialog(place, renamed);
        this.columns = new Columns(element, (isSorted) => {
            this.rows.clear();
            if (isSorted) this.ask();
            else this.refresh(true);
        });
        this.works = {
            open: (run) => this.openRun(run.id),
            resume: (run, button) => this.resume(run, button),
            queue: (run, button) => this.act(button, () => this.queue.addResume(run.id)),
            chat: (run) => this.openChat(run.id),
            rename: (run) => this.rename.open(run),
            details: (run) => this.openRun(run.id, "settings"),
            draft: (run, button) => this.draft(run, button),
            "train-on": (run, button) => this.draft(run, button, true),
            pin: (run) => this.marks.pin(run.id),
            baseline: (run) => this.marks.setBaseline(run.id),
            evaluate: (run) => this.openRun(run.id, "evaluate"),
            export: (run) => this.openRun(run.id, "export"),
            delete: (run, button) => this.delete([run], button),
        };
        followLinks(element, "a[data-page]", ({ dataset }) => go({ page: dataset.page }));
        this.listen();
        this.comparison.openAddress();
    }

    listen() {
        this.part("compare-open").addEventListener("click", () =>
            this.comparison.open(this.toCompare(), true),
        );
        this.part("delete-open").addEventListener("click", ({ target }) =>
            this.delete([...this.ticked.values()], target),
        );
        this.part("more-runs").addEventListener("click", () => {
            this.limit += FIRST;
            this.refresh(true);
        });
        const filters = this.part("filters");
        this.part("clear-filters").addEventListener("click", () => {
            for (const name of ["search", "state", "tag"]) filters.elements[name].value = "";
            filters.elements.search.focus();
            this.ask();
        });
        filters.addEventListener("submit", (event) => event.preventDefault());
        filters.addEventListener("change", ({ target }) => {
            if (target.name !== "sort") this.ask();
        });
        filters.elements.search.addEventListener("input", () => {
            clearTimeout(this.typing);
            this.typing = setTimeout(() => this.ask(), TYPING);
        });
    }

    part(name) {
        return this.root.querySelector(`[data-part="${name}"]`);
    }

    // -------------------------------------------------------------- what is listed

    // Reads the list as the filters say now.
    ask() {
        this.limit = FIRST;
        this.refresh(true);
    }

    query() {
        const { search, state, tag } = this.part("filters").elements;
        return new URLSearchParams({
            search: search.value,
            state: state.value,
            tag: tag.value,
            sort: this.columns.sort,
            turned: this.columns.turned,
            pinned: this.marks.pinned,
            limit: this.limit,
        });
    }

    async refresh(force = false) {
        if (!force && performance.now() - this.readAt < LIST_WAIT) return;
        this.turn += 1;
        const { turn } = this;
        this.readAt = performance.now();
        const answer = await send(`/api/runs?${this.query()}`);
        if (turn !== this.turn) return;
        for (const name of ["bar", "filters"]) this.part(name).hidden = !answer.total;
        this.part("empty").hidden = answer.total > 0;
        this.queue.show(answer.queue);
        this.showChoices(answer);
        this.showRuns(answer.runs);
        this.showCounts(answer);
        this.comparison.refresh();
        if (!answer.is_complete) this.readAt = performance.now() - LIST_WAIT + SOON;
    }

    showChoices({ states, tags }) {
        const { state, tag } = this.part("filters").elements;
        options(state, [{ value: "", label: "All states" }, ...states]);
        options(tag, [{ value: "", label: "All tags" }, ...tags]);
        tag.closest("label").hidden = !tags.length;
    }

    showCounts({ found, total, runs }) {
        const isAll = found === total;
        const words = isAll ? `${number(total)} runs` : `${number(found)} of ${number(total)} runs`;
        field(this.root, "found").textContent = total === 1 ? "1 run" : words;
        this.part("none-found").hidden = found > 0 || total === 0;
        this.part("list").hidden = found === 0;
        const left = found - runs.length;
        this.part("more-runs").hidden = left <= 0;
        this.part("more-runs").textContent = `Show ${Math.min(FIRST, left)} more`;
    }

    // A row is redrawn only if its content has changed, so that another run's next step does not
    // take the focus.
    showRuns(runs) {
        const known = new Map();
        for (const run of runs) {
            const text = JSON.stringify(run);
            const before = this.rows.get(run.id);
            if (before?.text === text) {
                known.set(run.id, before);
                continue;
            }
            const node = this.rowOf(run);
            if (before) keepPlace(before.node, node);
            known.set(run.id, { text, node, run });
        }
        this.rows = known;
        const body = this.part("rows");
        const nodes = [...known.values()].map(({ node }) => node);
        const isSame =
            nodes.length === body.children.length &&
            nodes.every((node, index) => node === body.children[index]);
        if (!isSame) body.replaceChildren(...nodes);
        // What is out of sight is neither compared nor deleted.
        for (const id of this.ticked.keys()) {
            if (known.has(id)) this.ticked.set(id, known.get(id).run);
            else this.ticked.delete(id);
        }
        this.showTicked();
    }

    rowOf(run) {
        return rowOf(run, {
            columns: this.columns.shown(),
            works: this.works,
            tick: this.tick(run),
            marks: this.marksOf(run),
            openMenu: (button) =>
                this.menu.open(
                    button,
                    `More: ${run.name}`,
                    itemsOf(run, this.works, this.marksOf(run)),
                ),
        });
    }

    marksOf({ id }) {
        return { isPinned: this.marks.isPinned(id), isBaseline: this.marks.baseline === id };
    }

    // Moves the focus to a button in a run's row, or in the first row if that row is gone.
    focus(id, act) {
        const row = this.rows.get(id)?.node ?? this.part("rows").firstElementChild;
        (row?.querySelector(`[data-act="${act}"]`) ?? row?.querySelector("button"))?.focus();
    }

    // -------------------------------------------------------------- runs with a tick

    tick(run) {
        if (!run.actions.includes("compare") && !run.actions.includes("delete")) return null;
        const box = el("input", {
            type: "checkbox",
            "data-act": "compare",
            "aria-label": `Select: ${run.name}`,
            change: () => {
                if (box.checked) this.ticked.set(run.id, run);
                else this.ticked.delete(run.id);
                this.showTicked();
            },
        });
        box.checked = this.ticked.has(run.id);
        return box;
    }

    // The runs with a tick, beside the baseline.
    toCompare() {
        const { baseline } = this.marks;
        return [...new Set([baseline, ...this.ticked.keys()].filter(Boolean))];
    }

    showTicked() {
        const runs = [...this.ticked.values()];
        const count = runs.length;
        const can = (act) => runs.every((run) => run.actions.includes(act));
        const compared = count ? this.toCompare().length : 0;
        const fits = compared >= LEAST && compared <= MOST && can("compare");
        const compare = this.part("compare-open");
        compare.disabled = !fits;
        const isOpen = isSame(this.comparison.ids, this.toCompare());
        compare.classList.toggle("rs-primary", fits && !isOpen);
        compare.textContent = compared ? `Compare ${compared}` : "Compare";
        const remove = this.part("delete-open");
        remove.hidden = !count;
        remove.disabled = !can("delete");
        remove.textContent = `Delete ${count}…`;
        field(this.root, "ticked").textContent = aboutTicked(count, compared);
    }

    // The compared runs are the ticked ones. The address may name runs that are not listed yet.
    compared(ids) {
        if (ids.length) {
            const known = ids.map((id) => [
                id,
                this.rows.get(id)?.run ?? { id, actions: ["compare"] },
            ]);
            this.ticked = new Map(known);
        }
        for (const box of this.root.querySelectorAll('[data-act="compare"]')) {
            box.checked = this.ticked.has(box.closest("tr").dataset.run);
        }
        this.showTicked();
    }

    // -------------------------------------------------------------- actions

    async delete(runs, button) {
        if (await this.deletion.ask(runs)) {
            await this.act(button, () => this.deletion.delete(runs));
        }
    }

    async deleted(ids) {
        for (const id of ids) {
            this.ticked.delete(id);
            this.comparison.without(id);
            this.closeRun(id);
        }
        if (ids.length) this.marks.forget(ids);
        await this.refresh(true);
        if (ids.length) this.focus(ids[0], "open");
    }

    // A run has another name.
    renamed() {
        this.refresh(true);
        this.comparison.renamed();
    }

    async resume(run, button) {
        await this.act(button, async () => {
            await send(path(run.id, "control"), { command: "resume" });
            this.openRun(run.id);
        });
    }

    // Fills the form with the run's settings; with `trainsOn`, a new run starts from its weights.
    async draft(run, button, trainsOn = false) {
        await this.act(button, async () => {
            await send(path(run.id, "draft"), {
                changes: {},
                trains_on: trainsOn,
                tab: tabName(),
            });
            // A newly opened page shows the form that the server has stored.
            location.assign("?show=new");
        });
    }

    // Does `work` for `button`; if it fails, the place of the button shows the error.
    async act(button, work) {
        const place = button.closest("td, .rs-runs-bar");
        place.querySelector(".rs-error")?.remove();
        button.disabled = true;
        try {
            await work();
        } catch (error) {
            place.append(el("small", { class: "rs-error", role: "alert" }, error.message));
        }
        button.disabled = false;
        if (place.matches(".rs-runs-bar")) this.showTicked();
    }
}

// Puts a new row in the place of the one before, with the focus.
function keepPlace(before, node) {
    const focused = before.contains(document.activeElement)
        ? document.activeElement.dataset.act
        : null;
    before.replaceWith(node);
    if (focused) node.querySelector(`[data-act="${focused}"]`)?.focus();
}

// Sets the options of a select, and keeps what is chosen while it is still there.
function options(select, wanted) {
    const text = JSON.stringify(wanted);
    if (select.dataset.options === text) return;
    const chosen = select.value;
    const nodes = wanted.map(({ value, label }) => el("option", { value }, label));
    select.replaceChildren(...nodes);
    if (wanted.some(({ value }) => value === chosen)) select.value = chosen;
    select.dataset.options = text;
}

const number = (count) => count.toLocaleString("en");

const isSame = (ids, others) => String([...ids].sort()) === String([...others].sort());

function aboutTicked(count, compared) {
    if (compared > MOST) return `· up to ${MOST} can be compared`;
    return count && compared < LEAST ? "· select one more to compare" : "";
}
