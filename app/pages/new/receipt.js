// The Summary's own lines: the verdict, the time, and what will be trained. In a narrow window it
// is a bar at the bottom, which a press unfolds.

import { el, field, isShown, send, setText } from "../../shared/dom.js";
import { clockText, isToday, momentText } from "../../shared/moments.js";

// Changes of a form that continues from a run, so that it starts from its model.
export const FROM_MODEL = { "model.start_from": "" };
const CHECKING = "Checking …";
const POLL = 500; // ms between two looks at a measurement under way

export class Receipt {
    // measured: is called when this machine was measured. fill: changes settings.
    constructor(element, measured, fill) {
        this.root = element.querySelector(".rs-fit-panel");
        this.measured = measured;
        this.start = el("li", {}, el("span"), " ", fromModel(fill));
        this.asking = true;
        this.words = CHECKING;
        this.headline = "";
        this.side = this.root.closest(".rs-side");
        this.side.addEventListener("click", ({ target }) => this.press(target));
        this.keepInWindow();
        this.part("measure").addEventListener("click", () => this.measure());
    }

    part(name) {
        return this.root.querySelector(`[data-part="${name}"]`);
    }

    // The whole bar opens it, but for what does something of its own; its title closes it.
    press(target) {
        const isOwn = target.closest("button:not(.rs-unfold), a, label, summary");
        const isOpen = this.side.classList.contains("rs-unfolded");
        const isMeant = !isOpen || target.closest("h3, .rs-unfold");
        if (isShown(this.part("unfold")) && !isOwn && isMeant) this.unfold();
    }

    // It takes what the window has below its top, which moves while the page scrolls.
    keepInWindow() {
        const { side } = this;
        const measure = () => {
            if (!isShown(side)) return;
            const top = Math.round(side.getBoundingClientRect().top);
            side.style.setProperty("--rs-side-top", `${top}px`);
        };
        window.addEventListener("scroll", measure, { passive: true });
        window.addEventListener("resize", measure);
        new ResizeObserver(measure).observe(side);
    }

    unfold() {
        const isOpen = this.side.classList.toggle("rs-unfolded");
        this.part("unfold").setAttribute("aria-expanded", String(isOpen));
    }

    // While settings are being checked, the verdict on others is not shown. words: what stands in
    // its place, which is as high as it is.
    isAsking(isAsking, words = CHECKING) {
        this.asking = isAsking;
        this.words = words;
        const title = field(this.root, "headline");
        title.style.minHeight = isAsking ? `${title.offsetHeight}px` : "";
        this.root.setAttribute("aria-busy", String(isAsking));
        this.write();
    }

    write() {
        setText(field(this.root, "headline"), this.asking ? this.words : this.headline);
    }

    show({ tone, headline, clock, job, continues }) {
        this.root.dataset.tone = tone;
        this.headline = headline;
        this.write();
        setText(this.start.firstElementChild, `Continues from ${continues}`);
        const lines = job.map((line) => el("li", {}, line));
        field(this.root, "job").replaceChildren(...lines, ...(continues ? [this.start] : []));
        this.part("clock").hidden = !clock.text;
        this.part("clock").title = clock.why;
        setText(field(this.root, "clock"), clock.text);
        setText(field(this.root, "done"), doneAt(clock));
        this.part("measure").hidden = !clock.to_measure;
        const pace = field(this.root, "pace");
        pace.hidden = !clock.note;
        setText(pace, clock.note);
    }

    async measure() {
        const button = this.part("measure");
        button.disabled = true;
        const words = button.textContent;
        try {
            let job = await send("/api/hardware/measure", {});
            while (job.state === "working") {
                setText(button, `${job.text || "Measuring"} …`);
                await new Promise((resolve) => setTimeout(resolve, POLL));
                job = await send(`/api/jobs/${job.id}`);
            }
            if (job.error) throw new Error(job.error);
            setText(button, words);
            this.measured();
        } catch (error) {
            setText(button, error.message);
        }
        button.disabled = false;
    }
}

function fromModel(fill) {
    const act = { type: "button", class: "rs-link", click: () => fill(FROM_MODEL) };
    return el("button", act, "Start from the model instead");
}

// When a run that starts as soon as it can is done, in the time of the reader.
function doneAt({ seconds, begins }) {
    if (seconds === null || begins === null) return "";
    const end = Math.max(begins, Date.now() / 1000) + seconds;
    return ` · done ≈ ${isToday(end) ? clockText(end) : momentText(end)}`;
}
