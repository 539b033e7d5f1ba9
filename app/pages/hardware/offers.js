// The machines for a model: the known ones that could train it, with their figures and sources.

import { el, field, isShown, send } from "../../shared/dom.js";

export class Offers {
    constructor(root) {
        this.root = root;
        this.form = root.querySelector('[data-part="ask"]');
        this.table = root.querySelector('[data-part="offers"]');
        this.caption = field(root, "offered");
        this.heading = root.querySelector("#rs-hardware-offers");
        this.asked = null; // the request whose answer is shown or awaited
    }

    // Sets the model, as if a person had typed it.
    choose(id) {
        this.form.elements.model.value = id;
    }

    // Brings the answer into sight: it is below the table of models.
    lead() {
        if (isShown(this.heading)) this.heading.focus({ preventScroll: true });
        this.stay();
    }

    // The answer, and what has arrived above it meanwhile, have moved the heading. It is brought
    // back, unless the person has left it.
    stay() {
        if (document.activeElement === this.heading)
            this.heading.scrollIntoView({ block: "start" });
    }

    // machines: known machines with their figures; settings: those of the table.
    async ask(machines, settings) {
        const asked = { model: this.form.elements.model.value, settings };
        this.asked = asked;
        this.report("Searching…");
        try {
            const found = await send("/api/hardware/offers", asked);
            if (asked === this.asked) this.show(found, machines);
        } catch (error) {
            if (asked !== this.asked) return;
            this.table.hidden = true;
            this.report(error.message, "rs-error");
        }
    }

    report(text, style = "rs-hint") {
        this.caption.className = style;
        this.caption.textContent = text;
    }

    show({ title, parameters, offers }, machines) {
        const count = offers.length;
        this.table.hidden = !count;
        this.caption.textContent = count
            ? `${title}, ${parameters} parameters: ${count} known machines, least RAM first.`
            : `No known machine holds ${title} with these settings. ` +
              "Fewer or shorter rows take less.";
        const rows = offers.map((offer) => {
            const { figures } = machines.find(({ name }) => name === offer.name);
            return offerRow(offer, figures);
        });
        this.table.querySelector("tbody").replaceChildren(...rows);
    }
}

function offerRow({ name, note, ram, tight, moments, gpu, speed }, figures) {
    const remarks = [moments, tight ? "just fits" : ""].filter(Boolean);
    return el(
        "tr",
        {},
        el("th", { scope: "row" }, figuresOf(name, figures), note ? el("small", {}, note) : null),
        el("td", { class: "rs-number" }, ram, ...remarks.map((text) => el("small", {}, text))),
        el("td", { class: "rs-number" }, gpu),
        el("td", { class: "rs-number" }, speed || "unknown"),
    );
}

// The name of a machine opens its figures.
function figuresOf(name, figures) {
    const facts = figures.flatMap((figure) => [
        el("dt", {}, figure.name),
        el("dd", {}, figure.value, ...figure.sources.map(sourceNode)),
    ]);
    return el(
        "details",
        {},
        el("summary", { title: "Its figures, and where they come from" }, name),
        el("dl", { class: "rs-facts" }, ...facts),
    );
}

// Turns a source that begins with an address into a link.
function sourceNode(text) {
    const [address, ...rest] = text.split(" ");
    if (!address.startsWith("https://")) return el("small", {}, text);
    const link = el("a", { href: address, target: "_blank", rel: "noreferrer" }, address);
    return el("small", {}, link, ` ${rest.join(" ")}`);
}
