// Which column of the data is what: a select for each part of an example, beside the columns with a
// value of each.

import { el, field } from "../common/dom.js";

const KINDS = { pair: "a question and its answer", conversation: "a conversation", text: "a text" };
const PARTS = {
    prompt: "Prompt (the user’s turn)",
    completion: "Completion (trained on)",
    input: "Added to the prompt",
    system: "System message",
    messages: "Turns of the conversation",
    tools: "Tools",
    text: "Text (all of it trained on)",
};
const SHORT = {
    prompt: "prompt",
    completion: "completion",
    input: "added to the prompt",
    system: "system message",
    messages: "turns",
    tools: "tools",
    text: "text",
};
const NEEDED = ["prompt", "completion", "messages", "text"];
const STATES = {
    found: "",
    several: "· more than one reading",
    named: "· as you chose",
    guess: "· a guess, please check",
    none: "· please choose",
};
const UNPRINTABLE = /[\u007f-\u009f\u2028\u2029\ufeff\ufffe\uffff]/g; // to YAML
const SAID = {
    several:
        "The names of the columns fit more than one reading. This is the one that is taken; choose another one if it is not " +
        "what you mean.",
    guess: "These names fit no known format, and a run would refuse them. What is shown is a guess: choose, or use it as it is.",
    none: "No column looks like a text or a conversation. Choose which one is what.",
};

export class Mapping {
    constructor(root, apply) {
        Object.assign(this, {
            root,
            apply,
            mapping: null,
            kind: "",
            chosen: {},
            selects: new Map(),
        });
        this.part("use").addEventListener("click", () => this.take());
        this.part("clear").addEventListener("click", () => this.apply(this.changes({})));
    }

    part(name) {
        return this.root.querySelector(`[data-part="${name}"]`);
    }

    // mapping: what the server says of the columns, or null. failed: the rows could not be read
    // like this.
    show(mapping, failed) {
        this.root.hidden = !mapping || (mapping.columns.length < 2 && mapping.state === "found");
        if (this.root.hidden) {
            this.mapping = null;
            return;
        }
        const names = JSON.stringify([mapping.columns, mapping.mix?.place]);
        const { state } = mapping;
        const unsure = state !== "found";
        const isNew = names !== this.names;
        this.names = names;
        this.mapping = mapping;
        this.chosen = { ...mapping.chosen };
        if (isNew || mapping.kind !== this.kind) this.build(mapping.kind);
        // What a person opened stays open; what asks for an answer opens by itself.
        if (isNew) this.root.open = unsure || failed;
        else if (unsure || failed) this.root.open = true;
        this.root.dataset.state = state;
        const { mix } = mapping;
        const place = mix ? `in ${mix.name} (${mix.place + 1} of ${mix.sources.length}) ` : "";
        field(this.root, "mapping-state").textContent = `${place}${STATES[state]}`;
        this.say(
            mapping.why
                ? `${mapping.why} What is shown is a guess: choose, or use it as it is.`
                : (SAID[state] ?? ""),
        );
        this.part("use").hidden = state !== "guess";
        this.part("clear").hidden =
            state !== "named" || Boolean(mix && !mix.sources[mix.place].columns);
        this.draw();
    }

    say(text) {
        field(this.root, "mapping-said").textContent = text;
    }

    build(kind) {
        this.kind = kind;
        const inside = this.part("roles").contains(document.activeElement)
            ? document.activeElement.dataset.role
            : null;
        const kinds = el(
            "select",
            { "data-role": "kind", change: ({ target }) => this.chooseKind(target.value) },
            ...Object.keys(this.mapping.kinds).map((name) =>
                el("option", { value: name }, KINDS[name]),
            ),
        );
        kinds.value = kind;
        this.selects = new Map(this.mapping.kinds[kind].map((role) => [role, this.select(role)]));
        this.part("roles").replaceChildren(
            el("label", {}, "A row is", kinds),
            ...[...this.selects].map(([role, node]) => el("label", {}, PARTS[role], node)),
        );
        if (inside) this.part("roles").querySelector(`[data-role="${inside}"]`)?.focus();
    }

    select(role) {
        // Options are numbers: a column may have any name, the empty one too.
        const none = el(
            "option",
            { value: "" },
            NEEDED.includes(role) ? "choose a column" : "none",
        );
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
        const used = new Map();
        for (const [role, node] of this.selects) {
            const place = columns.findIndex(({ name }) => name === this.chosen[role]);
            node.value = place < 0 ? "" : String(place);
            if (place >= 0) used.set(place, SHORT[role]);
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

    chooseKind(kind) {
        const { columns } = this.mapping;
        const before = this.chosen;
        const likely = [
            ...new Set([
                before.text,
                before.prompt,
                before.completion,
                before.messages,
                ...columns.map(({ name }) => name),
            ]),
        ].filter((name) => name !== undefined);
        this.chosen = {
            pair: { prompt: likely[0], completion: likely[1] },
            text: { text: before.completion ?? likely[0] },
            conversation: { messages: likely[0] },
        }[kind];
        this.build(kind);
        this.take();
    }

    choose(role, place) {
        const before = this.chosen[role];
        const now = place === "" ? undefined : this.mapping.columns[place].name;
        // A column is one thing: where it was chosen already, the two change places.
        const other =
            now === undefined
                ? undefined
                : [...this.selects.keys()].find(
                      (name) => name !== role && this.chosen[name] === now,
                  );
        if (other) this.chosen[other] = NEEDED.includes(other) ? before : undefined;
        this.chosen[role] = now;
        this.take();
    }

    take() {
        this.draw();
        const missing = [...this.selects.keys()].find(
            (role) => NEEDED.includes(role) && this.chosen[role] === undefined,
        );
        if (missing) {
            this.say(`Choose a column for: ${PARTS[missing]}.`);
            return;
        }
        this.apply(this.changes(this.chosen));
    }

    // What the form is to show: every part, since what is not chosen is not used.
    changes(chosen) {
        if (this.mapping.mix) return { "data.source": this.mixed(this.mapping.mix, chosen) };
        const shown = new Map(this.mapping.columns.map((column) => [column.name, column.shown]));
        return {
            "data.format": "auto",
            ...Object.fromEntries(
                Object.keys(PARTS).map((role) => [
                    `data.columns.${role}`,
                    this.selects.has(role) && chosen[role] !== undefined
                        ? shown.get(chosen[role])
                        : "",
                ]),
            ),
        };
    }

    // The sources of a mix as its field has them, one of them with other columns.
    mixed({ sources, place, format }, chosen) {
        const columns = Object.fromEntries(
            [...this.selects.keys()]
                .filter((role) => chosen[role] !== undefined)
                .map((role) => [role, chosen[role]]),
        );
        return inFlow(
            sources.map((source, index) => {
                if (index !== place) return source;
                const { format: _, columns: __, ...other } = source;
                return {
                    ...other,
                    ...(format === "auto" ? {} : { format: "auto" }),
                    ...(Object.keys(columns).length ? { columns } : {}),
                };
            }),
        );
    }
}

// A value of the settings in YAML's flow style, on one line.
function inFlow(value) {
    if (Array.isArray(value)) return `[${value.map(inFlow).join(", ")}]`;
    if (value && typeof value === "object") {
        return `{${Object.entries(value)
            .map(([name, inner]) => `${name}: ${inFlow(inner)}`)
            .join(", ")}}`;
    }
    return JSON.stringify(value).replace(
        UNPRINTABLE,
        (sign) => `\\u${sign.charCodeAt(0).toString(16).padStart(4, "0")}`,
    );
}
