// The head of a run's page: the steps before the first one, then how the run goes, and in the end
// what came of it; with the reasons for the verdict, and what can be done.

import { el, field, send, setText } from "../../shared/dom.js";
import { Menu } from "../../shared/menu.js";
import { tabName } from "../../shared/tab.js";

const LABELS = {
    "export-again": "Export again",
    larger: "Choose a larger model",
    chat: "Chat",
    export: "Export",
    "train-on": "Continue training from here",
    draft: "Duplicate",
};
const IN_MENU = ["train-on", "draft"];

// Opens a form with the settings of a run; with `trainsOn`, the new run starts from its weights. A
// newly opened page shows the form that the server has stored.
export async function draftOf(run, { changes = {}, trainsOn = false }, button, problem) {
    button.disabled = true;
    setText(problem, "");
    try {
        const body = { changes, trains_on: trainsOn, tab: tabName() };
        await send(`/api/runs/${encodeURIComponent(run)}/draft`, body);
        location.assign("?show=new");
    } catch (error) {
        setText(problem, error.message);
    }
    button.disabled = false;
}

export class Head {
    // go(place) shows another place, openChat(run) opens Chat.
    constructor(root, { go, openChat }) {
        this.root = root;
        this.go = go;
        this.openChat = openChat;
        this.shown = "";
        this.menu = new Menu(root);
        this.problem = field(root, "head-problem");
        this.why = this.part("why");
        this.why.addEventListener("click", () => this.showWhy(this.part("findings").hidden));
    }

    part(name) {
        return this.root.querySelector(`[data-part="${name}"]`);
    }

    // head: the title, the numbers and the buttons. verdict: the findings with their reasons.
    show({ head, diagnosis: verdict, run_id: run, bar }) {
        const text = JSON.stringify([run, head, verdict, bar.actions]);
        if (text === this.shown) return;
        this.shown = text;
        if (run !== this.run) {
            this.showWhy(false);
            setText(this.problem, "");
        }
        this.run = run;
        this.isGoing = bar.actions.includes("stop");
        this.root.dataset.tone = head.tone;
        this.root.dataset.phase = head.phase;
        // A number and its unit stay on one line.
        setText(field(this.root, "head-title"), head.title.replaceAll(" %", "\u00a0%"));
        setText(field(this.root, "head-text"), head.text);
        this.replace("head-steps", head.steps, stepItem);
        this.replace("head-facts", head.facts, factItem);
        this.showActions(head, verdict.offer, bar);
        this.showFindings(head, verdict);
    }

    // What is there already is not replaced, so that a selection in it and the focus stay.
    replace(name, values, make) {
        const node = this.part(name);
        const text = JSON.stringify(values);
        if (node.dataset.shown === text) return;
        node.dataset.shown = text;
        node.replaceChildren(...values.map(make));
    }

    // -------------------------------------------------------------- buttons

    showActions({ phase, actions }, offer, bar) {
        const names = {
            first: ["offer", ...actions],
            beside: [...actions, "offer"],
        }[offer?.place] ?? [...actions];
        // The line over the run has the button of what is done most.
        const primary = bar.actions.includes("resume") || phase === "going" ? null : names[0];
        const inMenu = names.filter((name) => IN_MENU.includes(name));
        const beside = inMenu.length > 1 ? names.filter((name) => !inMenu.includes(name)) : names;
        const groups = beside.map((name) => ({ name, offer, primary: name === primary }));
        if (inMenu.length > 1) groups.push({ name: "menu", inMenu });
        this.offer = offer;
        this.replace("head-actions", groups, (group) =>
            group.name === "menu" ? this.menuButton(group.inMenu) : this.button(group),
        );
    }

    button({ name, primary = false }) {
        const label = name === "offer" ? this.offerLabel() : LABELS[name];
        return el(
            "button",
            {
                type: "button",
                class: primary ? "rs-primary" : null,
                "data-action": name,
                title: name === "offer" ? this.offer.label : null,
                click: ({ currentTarget }) => this.act(name, currentTarget),
            },
            label,
        );
    }

    menuButton(names) {
        const items = names.map((name) => ({
            act: name,
            label: LABELS[name],
            work: (button) => this.act(name, button),
        }));
        const label = "Train again";
        return el(
            "button",
            {
                type: "button",
                "aria-haspopup": "menu",
                "aria-expanded": "false",
                click: ({ currentTarget }) => this.menu.open(currentTarget, label, items),
            },
            label,
        );
    }

    offerLabel() {
        const [change] = this.offer.label.split(" instead of ");
        return this.isGoing && this.offer.stops ? `Stop and try ${change}` : `Try ${change}`;
    }

    async act(name, button) {
        if (name === "chat") this.openChat(this.run);
        else if (name === "export" || name === "export-again")
            this.go({ page: "run", run: this.run, view: "export" });
        else if (name === "offer") await this.take(button);
        else await draftOf(this.run, { trainsOn: name === "train-on" }, button, this.problem);
    }

    // Opens a form with the change that a finding offers.
    async take(button) {
        const { changes, stops } = this.offer;
        if (this.isGoing && stops) {
            button.disabled = true;
            try {
                await send(`/api/runs/${encodeURIComponent(this.run)}/control`, {
                    command: "stop",
                });
            } catch (error) {
                setText(this.problem, error.message);
                button.disabled = false;
                return;
            }
        }
        await draftOf(this.run, { changes }, button, this.problem);
    }

    // -------------------------------------------------------------- reasons

    showFindings({ phase, text, title }, { also, offer, ...main }) {
        const findings = [main, ...also]
            .map((finding) => ({ ...finding, words: wordsOf(finding, title, text) }))
            .filter(({ words }) => words.length);
        const shown = offer?.place === "reasons" ? [...findings, { offer: offer.label }] : findings;
        this.why.hidden = phase === "preparing" || !shown.length;
        if (this.why.hidden) this.showWhy(false);
        this.replace("findings", shown, (finding) =>
            finding.offer ? el("li", {}, this.button({ name: "offer" })) : findingItem(finding),
        );
    }

    showWhy(isOpen) {
        this.part("findings").hidden = !isOpen;
        this.why.setAttribute("aria-expanded", String(isOpen));
    }
}

// The sentences of a finding that the head does not show already.
function wordsOf({ text, advice, evidence }, title, shown) {
    return [text, advice, evidence].filter(
        (sentence) => sentence && sentence !== title && !shown.includes(sentence),
    );
}

function findingItem({ words: [first, ...more], tone }) {
    return el("li", { "data-tone": tone }, el("i", { class: "rs-dot" }), first, ...more.map(hint));
}

const hint = (text) => el("small", {}, text);

function stepItem({ label, state, note, share }) {
    const bar = share === null ? "" : progress(label, share);
    const words = { done: "done", now: "under way", next: "to come" }[state];
    return el(
        "li",
        { "data-state": state, "aria-current": state === "now" ? "step" : null },
        el("strong", {}, label, el("span", { class: "rs-hidden" }, `: ${words}`)),
        el("small", {}, note),
        bar,
    );
}

function progress(label, share) {
    const done = el("i");
    done.style.width = `${100 * share}%`;
    const attributes = { role: "progressbar", "aria-label": label, "aria-valuemin": 0 };
    const value = { "aria-valuemax": 100, "aria-valuenow": Math.round(100 * share) };
    return el("span", { class: "rs-head-progress", ...attributes, ...value }, done);
}

function factItem({ label, from, since, to, at }) {
    const begin = from ? [number(from, since), el("dd", { class: "rs-arrow" }, "→")] : [];
    return el("div", {}, el("dt", {}, label), ...begin, number(to, at));
}

function number(value, of) {
    const isNumber = /^[\d–]/.test(value);
    const shown = el("strong", { class: isNumber ? null : "rs-no-number" }, value);
    return el("dd", {}, shown, el("small", {}, of));
}
