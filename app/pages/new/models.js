// The models as cards, those that fit first, and whether all of a model is trained or an add-on.

import { el, field, isShown, send, setText } from "../../shared/dom.js";
import { FROM_MODEL } from "./receipt.js";

const METHOD = "train.method";
const SOURCE = "model.source";
const ROWS = "train.batch_size";
const TOKENS = "data.max_seq_len";
// What says nothing about the memory of each model.
const ASIDE = ["name", SOURCE];
const CUT_OFF = "No connection: take a model on this machine, or give the folder of one.";
const SETTLED = 900; // ms: what a person types has its verdict first

export class Models {
    // fill: changes settings.
    constructor(element, fill) {
        this.root = element;
        this.fill = fill;
        this.list = element.querySelector('[data-part="models"]');
        this.cards = [];
        this.order = []; // ids of the cards, which keep their places while a person looks
        this.list.addEventListener("change", ({ target }) => fill({ [SOURCE]: target.value }));
        this.from = element.querySelector('[data-part="from"]');
        this.from.lastElementChild.addEventListener("click", () => fill(FROM_MODEL));
        element
            .querySelector(".rs-method")
            .addEventListener("change", ({ target }) => fill({ [METHOD]: target.value }));
    }

    // Takes each form that is checked.
    took({ preset, shown }) {
        this.preset = preset;
        this.shown = shown;
        const method = shown[METHOD];
        for (const radio of this.root.querySelectorAll(".rs-method input"))
            radio.checked = radio.value === method;
        this.root.querySelector('[data-part="parts"]').hidden = method !== "parts";
        this.mark();
        const key = JSON.stringify(Object.entries(shown).filter(([name]) => !ASIDE.includes(name)));
        if (key === this.key) return;
        this.key = key;
        this.loadSoon();
    }

    // free: what was free when the Summary was made. Cards never contradict it.
    judgedWith(free) {
        if (!free || !this.free || free === this.free) return;
        this.free = "";
        this.loadSoon();
    }

    loadSoon() {
        clearTimeout(this.pause);
        this.pause = setTimeout(() => this.load(), SETTLED);
    }

    // name: that of the run whose weights training starts from, or empty.
    continues(name) {
        this.from.hidden = !name;
        setText(field(this.root, "from"), `Continues from ${name}`);
    }

    async load() {
        if (!isShown(this.root)) {
            this.key = null; // asked for when the page is shown and checked again
            return;
        }
        const { key, preset, shown } = this;
        const answer = await send("/api/models", { preset, shown }).catch(() => null);
        if (!answer || key !== this.key) return;
        this.free = answer.free;
        this.isCutOff = answer.is_cut_off;
        this.cards = inOrder(answer.models, this.order);
        this.order = this.cards.map(({ id }) => id);
        setText(field(this.root, "models-caption"), this.caption());
        const { activeElement } = document;
        const focused = this.list.contains(activeElement) ? activeElement.value : null;
        this.list.replaceChildren(...this.cards.map(card));
        this.mark();
        for (const radio of this.list.querySelectorAll("input"))
            if (radio.value === focused) radio.focus();
    }

    // The page is shown again: the cards come in the order that is best by then.
    shownAgain() {
        this.order = [];
        this.key = null;
    }

    caption() {
        if (!this.cards.length) return "";
        const fits = this.cards.some((each) => each.fits && !each.is_example);
        const [rows, tokens] = [ROWS, TOKENS].map((name) => Number(this.shown[name]));
        const [batch, length] = [rows, tokens].map((each) => each.toLocaleString("en"));
        const sizes = `batch size ${batch} and sequence length ${length}`;
        const said = fits ? `Memory for ${sizes}.` : `No known model fits with ${sizes}.`;
        return this.isCutOff ? `${said} ${CUT_OFF}` : said;
    }

    mark() {
        for (const radio of this.list.querySelectorAll("input")) {
            const { ids } = this.cards.find(({ id }) => id === radio.value);
            radio.checked = ids.includes(this.shown[SOURCE]);
        }
    }
}

// Cards that are there already keep their order; others follow.
function inOrder(cards, order) {
    const place = ({ id }) => (order.includes(id) ? order.indexOf(id) : order.length);
    return cards.toSorted((one, other) => place(one) - place(other));
}

// A model that cannot be had is not green, though it would fit.
function card({ id, title, fits, text, note, is_to_be_had: isToBeHad }) {
    const look = fits ? (isToBeHad ? "rs-fits" : "") : "rs-lacks";
    const fit = el("span", { class: look }, `${fits ? "✓" : "✕"} ${text}`);
    const radio = el("input", { type: "radio", name: "rs-model", value: id });
    return el("label", { title: id }, radio, el("b", {}, title), fit, el("span", {}, note));
}
