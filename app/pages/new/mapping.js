// Shows the role of each column of the data and lets a person change it: there is a select for each
// part of an example, next to the columns with a sample value of each.

import { el, field } from "../../shared/dom.js";

const KINDS = {
    pair: "a prompt and its answer",
    conversation: "a conversation",
    preference: "a chosen answer and a rejected one",
    text: "a text",
    fixed: "as its columns are named",
};
const PARTS = {
    prompt: "Prompt (the model reads it)",
    completion: "Answer (trained on)",
    input: "Added to the prompt",
    history: "Earlier turns",
    chosen: "Chosen answer (trained on)",
    rejected: "Rejected answer (never trained)",
    system: "System message",
    messages: "Turns of the conversation",
    tools: "Tools",
    text: "Text (all of it trained on)",
};
const SHORT = {
    prompt: "prompt",
    completion: "answer",
    input: "added to the prompt",
    history: "earlier turns",
    chosen: "chosen answer",
    rejected: "rejected answer",
    system: "system message",
    messages: "turns",
    tools: "tools",
    text: "text",
};
const NEEDED = {
    pair: ["prompt", "completion"],
    conversation: ["messages"],
    preference: ["chosen", "rejected"],
    text: ["text"],
    fixed: [],
};
const STATES = {
    found: "Columns",
    several: "Columns: more than one reading",
    named: "Columns (your choice)",
    guess: "Check your columns",
    none: "Choose your columns",
};
const LONGEST = 20; // characters of a column's name on a button
const short = (name) => (name.length > LONGEST ? `${name.slice(0, LONGEST - 1)}…` : name);
const UNPRINTABLE = /[\u007f-\u009f\u2028\u2029\ufeff\ufffe\uffff]/g; // YAML refuses these
const REPORTS = {
    several:
        "These names can be read in more than one way. Change the choice below if it is not " +
        "what you mean.",
    none: "No column looks like a text or a conversation. Choose what each one is.",
};

export class Mapping {
    // apply(changes) is called with the settings that a person chose.
    constructor(root, apply) {
        this.root = root;
        this.apply = apply;
        this.mapping = null;
        this.kind = "";
        this.chosen = {}; // the column of each role
        this.selects = new Map();
        this.part("use").addEventListener("click", () => this.confirm());
        this.part("clear").addEventListener("click", () => this.apply(this.changes({})));
    }

    part(name) {
        return this.root.querySelector(`[data-part="${name}"]`);
    }

    // mapping: the server's description of the columns, or null; failed: whether the rows could not
    // be read with it.
    show(mapping, failed) {
        this.root.hidden = !mapping || (mapping.columns.length < 2 && mapping.state === "found");
        if (this.root.hidden) {
            this.mapping = null;
            return;
        }
        const { state, mix, question } = mapping;
        const names = JSON.stringify([mapping.columns, mix?.place]);
        const isNew = names !== this.names;
        this.names = names;
        this.mapping = mapping;
        this.chosen = { ...mapping.chosen };
        if (isNew || mapping.kind !== this.kind) this.build(mapping.kind);
        this.unfold(isNew, state !== "found" || failed);
        this.root.dataset.state = state;
        const place = mix ? ` in ${mix.name} (${mix.place + 1} of ${mix.sources.length})` : "";
        field(this.root, "mapping-state").textContent = `${STATES[state]}${place}`;
        // Above rows that can be read stands the question itself.
        this.report((failed && question) || (REPORTS[state] ?? ""));
        this.part("use").hidden = state !== "guess";
        const hasNoneToClear = Boolean(mix) && !mix.sources[mix.place].columns;
        this.part("clear").hidden = state !== "named" || hasNoneToClear;
        this.draw();
    }

    // What one click can answer while the columns are a guess: as it is, or let me change it.
    answers() {
        if (this.mapping?.state !== "guess" || this.root.hidden) return [];
        const label = this.useLabel();
        if (!label) return [];
        return [
            { label, act: () => this.confirm() },
            { label: "Change", act: () => this.lead() },
        ];
    }

    // What confirms the columns by their names; empty while one of them is not chosen.
    useLabel() {
        const columns = NEEDED[this.kind].map((role) => this.chosen[role]);
        return columns.includes(undefined) ? "" : `Use ${columns.map(short).join(" → ")}`;
    }

    confirm() {
        this.take();
        this.root.open = false;
    }

    lead() {
        this.root.open = true;
        const calm = matchMedia("(prefers-reduced-motion: reduce)").matches;
        this.root.scrollIntoView({ block: "center", behavior: calm ? "auto" : "smooth" });
        this.part("roles").querySelector("select")?.focus({ preventScroll: true });
    }

    // The panel opens automatically if it needs an answer; it stays open if a person opened it.
    unfold(isNew, asks) {
        if (isNew) this.root.open = asks;
        else if (asks) this.root.open = true;
    }

    report(text) {
        field(this.root, "mapping-caption").textContent = text;
    }

    build(kind) {
        this.kind = kind;
        const inside = this.part("roles").contains(document.activeElement)
            ? document.activeElement.dataset.role
            : null;
        const kinds = el(
            "select",
            { "data-role": "kind", change: ({ target }) => this.chooseKind(target.value) },
            // Nobody can choose the kind whose columns cannot be chosen.
            ...Object.keys(this.mapping.kinds)
                .filter((name) => name !== "fixed" || kind === "fixed")
                .map((name) => el("option", { value: name }, KINDS[name])),
        );
        kinds.value = kind;
        this.selects = new Map(this.mapping.kinds[kind].map((role) => [role, this.select(role)]));
        const labels = (isNeeded) =>
            [...this.selects]
                .filter(([role]) => this.isNeeded(role) === isNeeded)
                .map(([role, node]) => el("label", {}, PARTS[role], node));
        const rest = this.more(labels(false));
        const parts = [el("label", {}, "A row is", kinds), ...labels(true), rest];
        this.part("roles").replaceChildren(...parts.filter(Boolean));
        if (inside) this.part("roles").querySelector(`[data-role="${inside}"]`)?.focus();
    }

    // The parts that few rows have, folded unless one of them is chosen or a person looked.
    more(labels) {
        if (!labels.length) return null;
        const wasOpen = this.part("roles").querySelector("details")?.open;
        const isUsed = [...this.selects.keys()].some(
            (role) => !this.isNeeded(role) && this.chosen[role] !== undefined,
        );
        const rest = el("details", {}, el("summary", {}, "More columns"), el("div", {}, ...labels));
        rest.open = Boolean(wasOpen || isUsed);
        return rest;
    }

    select(role) {
        // The options' values are numbers, since a column may have any name, even an empty one.
        const none = el("option", { value: "" }, this.isNeeded(role) ? "choose a column" : "none");
        return el(
            "select",
            { "data-role": role, change: ({ target }) => this.choose(role, target.value) },
            none,
            ...this.mapping.columns.map(({ name }, index) =>
                el("option", { value: String(index) }, name || "(no name)"),
            ),
        );
    }

    draw() {
        const { columns } = this.mapping;
        this.part("use").textContent = this.useLabel() || "Use these columns";
        const used = new Map();
        for (const [role, node] of this.selects) {
            const place = columns.findIndex(({ name }) => name === this.chosen[role]);
            node.value = place < 0 ? "" : String(place);
            if (place >= 0) used.set(place, SHORT[role]);
        }
        if (this.kind === "fixed") {
            for (const name of Object.values(this.chosen)) {
                used.set(
                    columns.findIndex((column) => column.name === name),
                    "used",
                );
            }
        }
        this.part("columns").replaceChildren(
            ...columns.map(({ name, example }, index) =>
                el(
                    "tr",
                    { "data-used": used.has(index) },
                    el("th", { scope: "row" }, name || "(no name)"),
                    el("td", {}, example || "(empty)"),
                    el("td", {}, used.get(index) ?? ""),
                ),
            ),
        );
    }

    // After a change of the kind of row, columns that were already chosen are likely to be meant
    // again.
    chooseKind(kind) {
        const { text, prompt, completion, chosen, messages } = this.chosen;
        const names = this.mapping.columns.map(({ name }) => name);
        const named = [text, prompt, completion, chosen, messages].filter(
            (name) => name !== undefined,
        );
        const likely = [...new Set([...named, ...names])];
        this.chosen = {
            pair: { prompt: likely[0], completion: likely[1] },
            text: { text: completion ?? likely[0] },
            conversation: { messages: likely[0] },
            preference: { chosen: likely[0], rejected: likely[1] },
            fixed: {},
        }[kind];
        this.build(kind);
        this.take();
    }

    choose(role, place) {
        const before = this.chosen[role];
        const now = place === "" ? undefined : this.mapping.columns[place].name;
        // A column has only one role: if it was already chosen, the two roles swap their columns.
        const other = this.roleOf(now, role);
        if (other) this.chosen[other] = this.isNeeded(other) ? before : undefined;
        this.chosen[role] = now;
        this.take();
    }

    isNeeded(role) {
        return NEEDED[this.kind].includes(role);
    }

    // The role, other than `role`, for which this column is chosen.
    roleOf(column, role) {
        if (column === undefined) return undefined;
        const roles = [...this.selects.keys()];
        return roles.find((name) => name !== role && this.chosen[name] === column);
    }

    take() {
        this.draw();
        const missing = [...this.selects.keys()].find(
            (role) => this.isNeeded(role) && this.chosen[role] === undefined,
        );
        if (missing) {
            this.report(`Choose a column for: ${PARTS[missing]}.`);
            return;
        }
        this.apply(this.changes(this.chosen));
    }

    // The values for the form: all parts are included, since a part that is not chosen is not used.
    changes(chosen) {
        if (this.mapping.mix) return { "data.source": this.mixed(this.mapping.mix, chosen) };
        const shown = new Map(this.mapping.columns.map((column) => [column.name, column.shown]));
        const changes = { "data.format": "auto" };
        for (const role of Object.keys(PARTS)) {
            const isChosen = this.selects.has(role) && chosen[role] !== undefined;
            changes[`data.columns.${role}`] = isChosen ? shown.get(chosen[role]) : "";
        }
        return changes;
    }

    // The sources of a mix as the form shows them, one of them with new columns.
    mixed({ sources, place, format }, chosen) {
        const roles = [...this.selects.keys()].filter((role) => chosen[role] !== undefined);
        const { format: _format, columns: _columns, ...changed } = sources[place];
        if (format !== "auto") changed.format = "auto";
        if (roles.length)
            changed.columns = Object.fromEntries(roles.map((role) => [role, chosen[role]]));
        const mixed = sources.map((source, index) => (index === place ? changed : source));
        return JSON.stringify(mixed).replace(UNPRINTABLE, escaped);
    }
}

function escaped(sign) {
    const code = sign.charCodeAt(0).toString(16).padStart(4, "0");
    return `\\u${code}`;
}
